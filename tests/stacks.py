"""Record examples, and examples with changes, by one start of torchrun."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

from ranks import ROOT, free_port

EXAMPLES = ROOT / "examples" / "record"


def run_all(folder: Path, rows: list[dict]) -> None:
    """Record each of the `rows` that `row` returned."""
    path = folder / "rows.json"
    path.write_text(json.dumps(rows))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    command += ["--master_port", str(free_port()), str(ROOT / "tests" / "stack_runs.py"), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment())
    assert done.returncode == 0, done.stderr


def changed(folder: Path, script: str, changes: dict[str, str]) -> Path:
    """The example with these changes."""
    text = (EXAMPLES / script).read_text()
    for old, new in changes.items():
        assert text.count(old) == 1, f"{script} has {old!r} {text.count(old)} times"
        text = text.replace(old, new)
    folder.mkdir()
    (folder / script).write_text(text)
    return folder / script


def row(folder: Path, name: str, ranks: int, script: Path, arguments: str, steps: int = 2) -> dict:
    (folder / name).mkdir(exist_ok=True)
    return {
        "ranks": ranks,
        "folder": str(folder / name),
        "port": free_port(),
        "script": str(script),
        "arguments": shlex.split(arguments.replace("FOLDER", str(folder / "checkpoints"))),
        "steps": steps,
    }


def environment() -> dict[str, str]:
    paths = os.pathsep.join([str(ROOT), str(EXAMPLES)])
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1"}


def require_recorded(folder: Path) -> None:
    for path in sorted(folder.glob("status_*")):
        assert path.read_text() == "0", (folder / path.name.replace("status", "log")).read_text()
