"""What was found of each module by itself: the rows, and the file that the reference's program writes of a captured run."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path

from pydantic import ConfigDict

from lockstep.dumps.dump import Dump
from lockstep.dumps.manifest import MANIFEST
from lockstep.ground.files import read_json, write_text
from lockstep.ground.schemas import Sha256, Strict, validate
from lockstep.recorder.module_hooks import module_of
from lockstep.verdict.factors import Factor, Factors
from lockstep.verdict.judgement import Judgement
from lockstep.verdict.scalars import Chosen

SHOWN = 5
REMEDY = "run python -m lockstep.reference again"


class Alone(Strict):
    """Of all steps of one dump, in order of execution within a step."""

    model_config = ConfigDict(strict=False)  # JSON has lists for tuples

    dump: Sha256  # of its manifest
    rows: list[Judgement]
    choices: list[Chosen]


def with_factors(rows: list[Judgement], factors: Factors) -> list[Judgement]:
    """Of a module that has factors in several micro batches, the one that is farthest beyond, and the ranks that have one."""
    found: dict[str, list[Factor]] = {}
    for factor in sorted(factors.beyond(), key=lambda factor: -factor.multiple):
        own = (
            factor.name
            if factor.rank is None
            else f"{factor.name.partition('/')[0]}/{module_of(factor.name)}"
        )
        found.setdefault(own, []).append(factor)
    return [_with_factor(row, found[row.name]) if row.name in found else row for row in rows]


def _with_factor(row: Judgement, beyond: list[Factor]) -> Judgement:
    """`beyond` are the factors of the row's tensor, the farthest first."""
    first, ranks = beyond[0], dict(row.ranks)
    for one in beyond:
        if one.rank is not None:
            ranks[one.rank] = max(one.multiple, ranks.get(one.rank, 0.0))
    return replace(row, factor=first, ranks=ranks, where=row.where if row.is_far else first.where)


def sentence(rows: list[Judgement]) -> str:
    """What is wrong by itself. At least one row is."""
    wrong = [row for row in rows if row.too_far]
    first = wrong[0]
    steps: dict[str, list[str]] = {}
    for row in wrong:
        steps.setdefault(row.name, []).append(str(row.step))
    each = [name if len(own) == 1 else f"{name} in steps {', '.join(own)}" for name, own in steps.items()]
    names = ", ".join(each[:SHOWN]) + (", ..." if len(each) > SHOWN else "")
    where = f" ({first.where})" if first.where and first.factor is None else ""
    if len(wrong) == 1:
        return (
            f"1 of {len(rows)} tensors is not what its module gives from the inputs that it had: {names}{where}: "
            f"{first.describe()}"
        )
    return (
        f"{len(wrong)} of {len(rows)} tensors are not what their modules give from the inputs that they had: {names}; "
        f"the first{where}: {first.describe()}"
    )


def following(rows: list[Judgement], too_far: list[Judgement]) -> str:
    """The end of a sentence: how many of the tensors that are `too_far` from the batch on are right by themselves, by `rows`; "" if none is."""
    right = {(row.step, row.name) for row in rows if not row.too_far}
    number = sum((row.step, row.name) in right for row in too_far)
    if not number:
        return ""
    if number == 1:
        return "; 1 more is too far from the reference, but right by itself: it follows from what is wrong before it"
    return f"; {number} more are too far from the reference, but right by themselves: they follow from what is wrong before them"


def sentences(rows: list[Judgement], choices: list[Chosen]) -> list[str]:
    """All that is wrong by itself; [] if nothing is."""
    found = [sentence(rows)] if any(row.too_far for row in rows) else []
    return found + [f"{one.name} {one.describe()}" for one in choices if one.too_far]


def digest_of(dump: Dump) -> str:
    """SHA-256 of a dump's manifest, which has the checksums of all its tensors."""
    return hashlib.sha256((dump.folder / MANIFEST).read_bytes()).hexdigest()


def path_of(folder: Path) -> Path:
    """Beside the dump in a folder."""
    return folder.with_name(f"alone_{folder.name}.json")


def write(found: Alone, folder: Path) -> None:
    write_text(path_of(folder), json.dumps(found.model_dump()))


def read(dump: Dump, beside: Path) -> Alone | None:
    """What was found of a dump, from a file beside it or in a folder; None if no file is of this dump, as it is now.

    Raises UserError for a file that is damaged.
    """
    for path in (path_of(dump.folder), path_of(beside / dump.name)):
        if path.exists():
            found = validate(Alone, read_json(path), path, REMEDY)
            if found.dump == digest_of(dump):
                return found
    return None
