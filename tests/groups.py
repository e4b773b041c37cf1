"""Several `ranks.run_ranks` one after the other, of which only the first waits for the import of torch and transformers."""

import importlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import ranks


def run_groups(*calls: tuple[int, str, Path, object], timeout: float = 240) -> None:
    """Make the calls (world size, "module:function", folder, argument), each in new ranks. AssertionError with all output when one fails."""
    for _, _, folder, argument in calls:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "argument.json").write_text(json.dumps(argument))
    told = json.dumps([[target, str(folder), str(size)] for size, target, folder, _ in calls])
    paths = os.pathsep.join([str(ranks.ROOT), str(ranks.ROOT / "tests")])
    process = subprocess.Popen(
        [sys.executable, __file__, told],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        cwd=ranks.ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, status = process.communicate(timeout=timeout)[0], process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, status = process.communicate()[0], "a time limit"
    logs = [path.read_text(errors="replace") for call in calls for path in sorted(call[2].glob("rank*.log"))]
    assert status == 0, "\n".join([f"ended by {status}", output, *logs])


def in_turn(folder: Path, calls: list) -> None:
    """As the function of a call: the calls ("module:function", folder in `folder`, argument) one after the other in the same ranks."""
    for target, name, argument in calls:
        module, function = target.split(":")
        (folder / name).mkdir(parents=True, exist_ok=True)
        getattr(importlib.import_module(module), function)(folder / name, argument)


def main(calls: list[list[str]]) -> int:
    import lockstep.training.loop  # noqa: F401

    for call in calls:
        sys.argv[1:] = call
        status = ranks.main()
        if status:
            return status
    return 0


if __name__ == "__main__":
    raise SystemExit(main(json.loads(sys.argv[1])))
