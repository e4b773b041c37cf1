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
import tempfile
from pathlib import Path

import pytest
from edited import edit, flip_byte
from fuzz import Late, damage, limited, mutate

from lockstep import compare
from lockstep.dumps.dump import Dump
from lockstep.ground.errors import UserError

SECONDS = 20  # for one comparison, which takes a fifth of a second
FOLDERS = ("ddp", "fsdp", "reference", "replay_ddp", "replay_fsdp")
# Free text and notes: they are shown, and no verdict depends on them.
NOTES = (
    "origin",
    "architecture_source",
    "model_name",
    "num_epochs",
    "debug_steps",
    "dataset_name",
    "log_interval",
    "device",
    "backend",
    "num_steps",
    "sharded",
    "save_init_weights",
    "num_layers",
    "capture_steps",
    "biased_linear_dtype",
    "initial_weights",
    "bucket_cap_mb",  # changes no number
    "optimizer_implementation",
    "attention",
    "module_settings",  # a library may replace a module by its own, so a name may be missing
    # Of the reference, which has none; other dumps' contracts hold it  # fmt: skip
    "activation_checkpointing",
)
KINDS = (
    ["manifest"] * 2
    + ["manifest, sealed"] * 3
    + ["manifest, bytes"]
    + ["bytes"] * 2
    + ["header"] * 2
    + ["replaced"]
)


def outcome_of(folder: Path) -> str:
    """PASS, FAIL or refused of the comparison, "crash", "hang", or "untidy" for a refusal in more than one line."""
    out, error = io.StringIO(), io.StringIO()
    try:
        with limited(SECONDS), contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
            status = compare.main([str(folder / "fsdp"), str(folder / "reference")])
    except Late:
        return "hang"
    except BaseException as crash:  # noqa: BLE001 - a panic of the safetensors library is no Exception
        return f"crash {type(crash).__name__}: {crash}"
    if status == 2 and (error.getvalue().count("\n") != 1 or "\x1b" in error.getvalue()):
        return f"untidy {error.getvalue()[:300]}"
    return {0: "PASS", 1: "FAIL", 2: "refused"}.get(status, f"crash {error.getvalue()[-600:]}")


def by_depth(path: tuple) -> str:
    """Of a manifest: a depth is drawn first, or nearly all changes would be of some tensor's entry."""
    within = {"steps": path[2:3], "layout": path[1:3]}.get(path[0], ())
    return f"{len(path)} {path[0]} {within}"


def header_of(data: bytes) -> tuple[dict, bytes]:
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def mutate_header(draw: random.Random, data: bytes) -> tuple[bytes, bool]:
    """Change a safetensors header as only somebody who can read it does; (bytes, whether it means something else)."""
    header, body = header_of(data)

    def contents():
        return {
            name: (entry["dtype"], entry["shape"], body[slice(*entry["data_offsets"])])
            for name, entry in header.items()
        }

    before = contents()
    if draw.random() < 0.5:
        one, other = draw.sample(sorted(header), 2)
        header[one], header[other] = header[other], header[one]
    else:
        mutate(header, draw)
    text = json.dumps(header).encode()
    try:
        meant = contents() != before
    except (KeyError, TypeError, AttributeError, ValueError):
        meant = True
    return len(text).to_bytes(8, "little") + text + body, meant


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


def damaged(draw: random.Random, folder: Path) -> tuple[str, Path, bool]:
    """Damage one file of one dump: (what was done, the file, whether it means something else now)."""
    chosen = folder / draw.choice(FOLDERS)
    manifest = chosen / "manifest.json"
    kind = draw.choice(KINDS)
    if kind == "manifest, sealed":
        where, before = [], manifest.read_text()
        edit(chosen, lambda content: where.append(mutate(content, draw, by_depth)))
        noted = any(str(part).startswith(NOTES) for part in where[0])
        return (
            kind,
            manifest,
            not noted and json.dumps(json.loads(manifest.read_text())) != json.dumps(json.loads(before)),
        )
    if kind == "manifest":
        before = json.loads(manifest.read_text())
        content = copying.deepcopy(before)
        mutate(content, draw, by_depth)
        manifest.write_text(json.dumps(content))
        return kind, manifest, json.dumps(content) != json.dumps(before)
    if kind == "manifest, bytes":
        before = manifest.read_bytes()
        manifest.write_bytes(damage(before, draw))
        with contextlib.suppress(ValueError, RecursionError):
            return kind, manifest, json.loads(manifest.read_bytes()) != json.loads(before)
        return kind, manifest, True
    path = (
        draw.choice(sorted(chosen.glob("step_*"))) if kind != "replaced" or draw.random() < 0.5 else manifest
    )
    before = path.read_bytes()
    if kind == "replaced":
        replace(draw, path)
        return kind, path, not path.is_file() or path.is_symlink() or path.read_bytes() != before
    if kind == "header":
        changed, meant = mutate_header(draw, before)
        path.write_bytes(changed)
        return kind, path, meant
    if draw.random() < 0.5:
        flip_byte(path, draw.randrange(len(before)))  # most of a file are numbers
    else:
        path.write_bytes(damage(before, draw))
    with contextlib.suppress(ValueError, RecursionError):
        return kind, path, header_of(path.read_bytes()) != header_of(before)
    return kind, path, True


def campaign(dumps: Path, number: int, *, seed: int = 0) -> tuple[collections.Counter, list[str]]:
    """(how often each kind of damage came to which outcome, the cases that must not be)."""
    table, bad = collections.Counter(), []
    with tempfile.TemporaryDirectory(prefix="lockstep-fuzz-") as name:
        folder = Path(name)
        for each in FOLDERS:
            shutil.copytree(dumps / each, folder / each)
        assert outcome_of(folder) == "PASS"
        for case in range(number):
            kind, path, meant = damaged(random.Random(f"{seed} {case}"), folder)
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
