"""Damage by the hundred: whatever is done to a file of a dump, the comparison answers with one line or a verdict, soon.

benchmarks/damaged_files.py has a thousand cases, results/damaged_files.md how they ended.
"""

import collections
import contextlib
import copy as copying
import io
import json
import os
import random
import shutil
import signal
import tempfile
from pathlib import Path

import pytest
from edited import edit

from lockstep import compare
from lockstep.dumps.dump import Dump
from lockstep.ground.errors import UserError

SECONDS = 20  # for one comparison, which takes a fifth of a second
FOLDERS = ("ddp", "fsdp", "reference", "replay_ddp", "replay_fsdp")
VALUES = [None, True, False, 0, 1, -1, 2, 2**63, 2**70, -(2**70), 0.5, 1e308, -1e308, float("nan"), float("inf"), "", "x", "0", "\x1b[2J", "a" * 100_000,
          [], [0], [-1], [[]], {}, {"x": 1}, "F32", "F64", "BF16", "I64", "dp", "tp", "fp32", "bf16", "sgd", "eager"]  # fmt: skip
# Free text and notes: they are shown, and no verdict depends on them.
NOTES = ("origin", "architecture_source", "model_name", "num_epochs", "debug_steps", "dataset_name", "log_interval", "device", "backend",
         "num_steps", "sharded", "logits", "save_init_weights", "num_layers", "capture_steps", "biased_linear_dtype", "initial_weights",
         "bucket_cap_mb",  # changes no number
         "optimizer_implementation", "attention",
         "module_settings",  # a library may replace a module by its own, so a name may be missing
         "activation_checkpointing")  # of the reference, which has none; other dumps' contracts hold it  # fmt: skip
KINDS = (
    ["manifest"] * 2
    + ["manifest, sealed"] * 3
    + ["manifest, bytes"]
    + ["bytes"] * 2
    + ["header"] * 2
    + ["replaced"]
)


class Hang(BaseException):
    pass


@contextlib.contextmanager
def time_limit():
    def ring(*_):
        raise Hang

    signal.signal(signal.SIGALRM, ring)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)


def outcome_of(folder: Path) -> str:
    """PASS, FAIL or refused of the comparison, "crash", "hang", or "untidy" for a refusal in more than one line."""
    out, error = io.StringIO(), io.StringIO()
    try:
        with time_limit(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
            status = compare.main([str(folder / "fsdp"), str(folder / "reference")])
    except Hang:
        return "hang"
    except BaseException as crash:  # noqa: BLE001 - a panic of the safetensors library is no Exception
        return f"crash {type(crash).__name__}: {crash}"
    if status == 2 and (error.getvalue().count("\n") != 1 or "\x1b" in error.getvalue()):
        return f"untidy {error.getvalue()[:300]}"
    return {0: "PASS", 1: "FAIL", 2: "refused"}.get(status, f"crash {error.getvalue()[-600:]}")


def places(node, path=()):
    """The paths of all values in a JSON document."""
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in items:
        yield (*path, key)
        yield from places(value, (*path, key))


def change_somewhere(draw: random.Random, manifest: dict) -> tuple:
    """Change one value of a manifest, or take it out, or put it in the place of another; returns where."""
    # by depth first, or nearly all changes would be of some tensor's entry
    found = collections.defaultdict(list)
    for place in places(manifest):
        within = {"steps": place[2:3], "layout": place[1:3]}.get(place[0], ())
        found[len(place), place[0], str(within)].append(place)
    place = draw.choice(found[draw.choice(sorted(found, key=str))])
    parent = manifest
    for key in place[:-1]:
        parent = parent[key]
    last, kind = place[-1], draw.randrange(6)
    if kind == 0:
        del parent[last]
    elif kind == 1 and isinstance(parent, dict):
        parent[str(draw.choice(VALUES))[:50] + "x"] = parent.pop(last)
    elif kind == 2:
        other = draw.choice(sorted(parent, key=str) if isinstance(parent, dict) else range(len(parent)))
        parent[last], parent[other] = parent[other], parent[last]
    elif kind == 3 and isinstance(parent[last], (int, float)) and not isinstance(parent[last], bool):
        parent[last] = draw.choice([parent[last] + 1, -parent[last], parent[last] * 1.0001, parent[last] * 2])
    else:
        parent[last] = copying.deepcopy(draw.choice(VALUES))
    return place


def header_of(data: bytes) -> tuple[dict, bytes]:
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def mutate_header(draw: random.Random, data: bytes) -> tuple[bytes, bool]:
    """Change a safetensors header as only somebody who can read it does; (bytes, whether it means something else)."""
    header, body = header_of(data)
    one, other = draw.sample(sorted(header), 2)
    kind = draw.randrange(8)
    if kind == 0:
        header[one]["data_offsets"], header[other]["data_offsets"] = (
            header[other]["data_offsets"],
            header[one]["data_offsets"],
        )
    elif kind == 1:
        header[one]["data_offsets"] = list(header[other]["data_offsets"])
    elif kind == 2:
        header[one]["shape"] = [draw.choice([-1, 0, 2**62, 2**70, 1.5, "8", None])] + header[one]["shape"][1:]
    elif kind == 3:
        header[one]["dtype"] = draw.choice(["F32", "F64", "I64", "BF16", "U8", "X", None, 3])
    elif kind == 4:
        header[draw.choice(["x", "", "forward/model.extra", "__metadata__"])] = header.pop(one)
    elif kind == 5:
        header[draw.choice(["x", "__metadata__"])] = draw.choice([header[one], {}, [], {"a": "b"}, 7])
    elif kind == 6:
        header[one].pop(draw.choice(sorted(header[one])))
    else:
        header[one], header[other] = header[other], header[one]
    text = json.dumps(header).encode()
    length = draw.choice([len(text)] * 6 + [0, 7, len(text) - 1, 2**40, 2**63, 2**64 - 1])
    changed = length.to_bytes(8, "little") + text + body
    before = header_of(data)[0]

    def contents(table):
        return {
            name: (entry["dtype"], entry["shape"], body[slice(*entry["data_offsets"])])
            for name, entry in table.items()
        }

    try:
        return changed, length != len(text) or contents(header) != contents(before)
    except (KeyError, TypeError, AttributeError, ValueError):
        return changed, True


def mutate_bytes(draw: random.Random, data: bytes) -> bytes:
    changed, place = bytearray(data), draw.randrange(len(data))
    kind = draw.randrange(7)
    if kind <= 1:
        changed[place] ^= 1 << draw.randrange(8)
    elif kind == 2:
        changed[draw.randrange(min(len(data), 20_000))] = draw.randrange(256)
    elif kind == 3:
        del changed[place:]
    elif kind == 4:
        changed += bytes(draw.randrange(1, 200))
    elif kind == 5:
        changed[place : place + 64] = bytes(64)[: len(data) - place]
    else:
        first = 4 * draw.randrange(len(data) // 4 - 16)
        second = 4 * draw.randrange(len(data) // 4 - 16)
        changed[first : first + 4], changed[second : second + 4] = (
            changed[second : second + 4],
            changed[first : first + 4],
        )
    return bytes(changed)


def replace(draw: random.Random, path: Path) -> None:
    """Something else in the place of a file."""
    kind = draw.randrange(6)
    if kind == 5:
        shutil.copy(draw.choice(sorted(path.parent.parent.glob("*/*.*"))), path.with_suffix(".other"))
        os.replace(path.with_suffix(".other"), path)
        return
    path.unlink()
    if kind == 0:
        os.mkfifo(path)
    elif kind == 1:
        path.symlink_to("/dev/zero")
    elif kind == 2:
        path.mkdir()
    elif kind == 3:
        path.write_bytes(b"")
    elif kind == 4:
        path.symlink_to(path)


def mutate(draw: random.Random, folder: Path) -> tuple[str, Path, bool]:
    """Damage one file of one dump: (what was done, the file, whether it means something else now)."""
    chosen = folder / draw.choice(FOLDERS)
    manifest = chosen / "manifest.json"
    kind = draw.choice(KINDS)
    if kind == "manifest, sealed":
        where, before = [], manifest.read_text()
        edit(chosen, lambda content: where.append(change_somewhere(draw, content)))
        noted = any(str(part).startswith(NOTES) for part in where[0])
        return (
            kind,
            manifest,
            not noted and json.dumps(json.loads(manifest.read_text())) != json.dumps(json.loads(before)),
        )
    if kind == "manifest":
        before = json.loads(manifest.read_text())
        content = copying.deepcopy(before)
        change_somewhere(draw, content)
        manifest.write_text(json.dumps(content))
        return kind, manifest, json.dumps(content) != json.dumps(before)
    if kind == "manifest, bytes":
        before = manifest.read_bytes()
        manifest.write_bytes(mutate_bytes(draw, before))
        with contextlib.suppress(ValueError):
            return kind, manifest, json.loads(manifest.read_bytes()) != json.loads(before)
        return kind, manifest, True
    path = (
        draw.choice(sorted(chosen.glob("step_*"))) if kind != "replaced" or draw.random() < 0.5 else manifest
    )
    before = path.read_bytes()
    if kind == "replaced":
        replace(draw, path)
        return kind, path, not path.is_file() or path.is_symlink() or path.read_bytes() != before
    changed, meant = mutate_header(draw, before) if kind == "header" else (mutate_bytes(draw, before), True)
    path.write_bytes(changed)
    if kind == "bytes" and len(changed) == len(before):
        with contextlib.suppress(ValueError):
            meant = header_of(changed) != header_of(before)
    return kind, path, meant


def campaign(dumps: Path, number: int, *, seed: int = 0) -> tuple[collections.Counter, list[str]]:
    """(how often each kind of damage came to which outcome, the cases that must not be)."""
    table, bad = collections.Counter(), []
    with tempfile.TemporaryDirectory(prefix="lockstep-fuzz-") as name:
        folder = Path(name)
        for each in FOLDERS:
            shutil.copytree(dumps / each, folder / each)
        assert outcome_of(folder) == "PASS"
        for case in range(number):
            kind, path, meant = mutate(random.Random(f"{seed} {case}"), folder)
            outcome = outcome_of(folder)
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
            shutil.copy(dumps / path.relative_to(folder), path)
            outcome = "accepted, means the same" if outcome == "PASS" and not meant else outcome
            table[kind, "accepted wrong" if outcome == "PASS" else outcome.split(" ")[0].rstrip(",")] += 1
            if outcome not in ("FAIL", "refused", "accepted, means the same"):
                bad.append(f"case {case}: {kind} of {path.relative_to(folder)}: {outcome}")
    return table, bad


@pytest.mark.parametrize("seed", [1, 2])
def test_no_damage_crashes_hangs_or_passes(dumps, seed):
    table, bad = campaign(dumps, 45, seed=seed)
    assert bad == [], table
    assert {kind for kind, _ in table} == set(KINDS)


def test_the_campaign_can_fail(dumps, monkeypatch):
    """Negative control: without the checksums some damaged bytes are accepted."""
    real = Dump.blocks

    def unverified(self, *arguments):
        with contextlib.suppress(UserError):
            yield from real(self, *arguments)

    monkeypatch.setattr(Dump, "blocks", unverified)
    table, bad = campaign(dumps, 25, seed=3)
    assert bad and table["bytes", "accepted wrong"] == len(bad)
