"""What torchrun does with `python -m lockstep.train`, in ranks that are forked: torch and transformers are imported once for all runs."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from ranks import ROOT, free_port


def launched(folder: Path, strategy: str, arguments: list[str], runs: dict[str, dict]) -> dict[str, tuple]:
    """{name: (status, stderr)} of runs of two ranks, each with its own environment variables. The first rank that fails ends the run."""
    told = json.dumps([str(folder), strategy, arguments, runs])
    done = subprocess.run(
        [sys.executable, __file__, told],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return {name: (status, (folder / name).read_text()) for name, status in json.loads(done.stdout).items()}


def main(folder: str, strategy: str, arguments: list[str], runs: dict[str, dict]) -> None:
    import transformers.modeling_utils  # noqa: F401

    import ddp_strategy  # noqa: F401
    from lockstep import train
    from lockstep.training import loop  # noqa: F401

    status = {}
    for name, settings in runs.items():
        both, log = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}, Path(folder, name)
        left = set()
        for rank in range(2):
            pid = os.fork()
            if not pid:
                told = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
                os.dup2(told, 1)
                os.dup2(told, 2)
                each = {
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": "2",
                    "LOCAL_WORLD_SIZE": "2",
                }
                os.environ.update(both | each | settings)
                train.launch(strategy, train.make_strategy, train.make_trainer, arguments)  # ends the process
            left.add(pid)
        status[name] = 0
        while left:
            pid, ended = os.wait()
            left.discard(pid)
            if ended and not status[name]:
                status[name] = os.waitstatus_to_exitcode(ended)
                for other in left:
                    os.kill(other, signal.SIGTERM)
    print(json.dumps(status))


if __name__ == "__main__":
    main(*json.loads(sys.argv[1]))
