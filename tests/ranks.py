"""Run a function in real gloo processes, one per rank, with a time limit; output is tagged by rank.

The function is named "module:function", takes (folder, argument) and may write files into the folder.
"""

import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
CAPTURED = [
    "--batch_size",
    "2",
    "--seq_length",
    "32",
    "--precision",
    "fp32",
    "--dp_size",
    "2",
]  # the flags of conftest's `dumps`


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def run_ranks(world_size: int, target: str, folder: Path, argument=None, *, timeout: float = 240) -> str:
    """Fork the ranks, wait for all, return their tagged output; AssertionError with it when one fails or hangs."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "argument.json").write_text(json.dumps(argument))
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    environment = {key: value for key, value in os.environ.items() if key not in names}
    environment |= {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]), "OMP_NUM_THREADS": "1"}
    with open(folder / "log.txt", "w") as log:
        process = subprocess.Popen(
            [sys.executable, __file__, target, str(folder), str(world_size)],
            env=environment,
            cwd=ROOT,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            status = process.wait(timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            status = "a time limit"
    logs = {f"rank {rank}": folder / f"rank{rank}.log" for rank in range(world_size)} | {
        "start": folder / "log.txt"
    }
    output = "\n".join(
        f"[{who}] {line}"
        for who, path in logs.items()
        if path.exists()
        for line in path.read_text(errors="replace").splitlines()
    )
    assert status == 0, f"ended by {status}\n{output}"
    return output


def run_alone(target: str, folder: Path, argument=None, *, timeout: float = 240) -> None:
    """Run the function in one process outside any launcher, with a process group of its own."""
    run_ranks(0, target, folder, argument, timeout=timeout)


def main() -> int:
    import torch
    import torch.distributed as dist
    import transformers.modeling_utils  # noqa: F401

    from lockstep.collective import init_alone
    from lockstep.running import ranks

    target, folder, world_size = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    module, function = target.split(":")
    body = getattr(importlib.import_module(module), function)

    def run(listener: socket.socket | None) -> int:
        torch.set_num_threads(1)
        ranks.join(listener, "gloo") if listener else init_alone()
        try:
            body(folder, json.loads((folder / "argument.json").read_text()))
        finally:
            gc.collect()  # as in lockstep/launch.py
            dist.destroy_process_group()
        return 0

    def logged(listener: socket.socket) -> int:
        log = os.open(folder / f"rank{os.environ['RANK']}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        return run(listener)

    return ranks.fork(world_size, logged, "ranks.py") if world_size else run(None)


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)
