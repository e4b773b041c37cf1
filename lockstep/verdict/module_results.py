"""Results of judging each module by itself: rows, sentences, and the file that the reference's program writes."""

import hashlib
import json
from pathlib import Path

from pydantic import ConfigDict

from lockstep.dumps.dump import Dump
from lockstep.dumps.manifest import MANIFEST
from lockstep.ground.files import read_json, write_text
from lockstep.ground.schemas import Sha256, Strict, validate
from lockstep.verdict.judgement import Judgement
from lockstep.verdict.scalars import Chosen

SHOWN = 5
REMEDY = "run python -m lockstep.reference again"


class ModuleResults(Strict):
    """The results of all steps of one dump, in order of execution within a step."""

    model_config = ConfigDict(strict=False)  # JSON has lists for tuples

    dump: Sha256  # of the dump's manifest
    rows: list[Judgement]
    choices: list[Chosen]


def sentence(rows: list[Judgement]) -> str:
    """Return a sentence on the tensors that are wrong by themselves. At least one row must be too far."""
    wrong = [row for row in rows if row.too_far]
    first = wrong[0]
    by_name: dict[str, list[str]] = {}
    for row in wrong:
        by_name.setdefault(row.name, []).append(str(row.step))
    labels = [
        name if len(steps) == 1 else f"{name} in steps {', '.join(steps)}" for name, steps in by_name.items()
    ]
    listed = ", ".join(labels[:SHOWN]) + (", ..." if len(labels) > SHOWN else "")
    place = f" ({first.where})" if first.where and first.factor is None else ""
    if len(wrong) == 1:
        return (
            f"1 of {len(rows)} tensors is not what its module computes from its recorded inputs: {listed}{place}: "
            f"{first.describe()}"
        )
    return (
        f"{len(wrong)} of {len(rows)} tensors are not what their modules compute from their recorded inputs: {listed}; "
        f"the first{place}: {first.describe()}"
    )


def following(rows: list[Judgement], too_far: list[Judgement]) -> str:
    """Return the end of a sentence: how many tensors are too far from the batch on, but right by themselves.

    `too_far` are rows of the computation from the batch on, `rows` those of modules by themselves. Return "" if there is none.
    """
    right = {(row.step, row.name) for row in rows if not row.too_far}
    count = sum((row.step, row.name) in right for row in too_far)
    if not count:
        return ""
    if count == 1:
        return "; 1 more is too far from the reference, but right by itself: it follows from what is wrong before it"
    return f"; {count} more are too far from the reference, but right by themselves: they follow from what is wrong before them"


def sentences(rows: list[Judgement], choices: list[Chosen]) -> list[str]:
    """Return a sentence for all tensors, and one for each choice, that are wrong by themselves; [] if none are."""
    wrong = [sentence(rows)] if any(row.too_far for row in rows) else []
    return wrong + [f"{choice.name} {choice.describe()}" for choice in choices if choice.too_far]


def digest_of(dump: Dump) -> str:
    """SHA-256 of a dump's manifest, which has the checksums of all its tensors."""
    return hashlib.sha256((dump.folder / MANIFEST).read_bytes()).hexdigest()


def path_of(folder: Path) -> Path:
    """Return the path of the results of the dump in `folder`. It lies beside the folder."""
    return folder.with_name(f"alone_{folder.name}.json")


def write(found: ModuleResults, folder: Path) -> None:
    write_text(path_of(folder), json.dumps(found.model_dump()))


def read(dump: Dump, beside: Path) -> ModuleResults | None:
    """Return the results of a dump, from a file beside it or in the folder `beside`; None if no file is of the dump as it is now.

    Raises UserError for a damaged file.
    """
    for path in (path_of(dump.folder), path_of(beside / dump.name)):
        if path.exists():
            results = validate(ModuleResults, read_json(path), path, REMEDY)
            if results.dump == digest_of(dump):
                return results
    return None
