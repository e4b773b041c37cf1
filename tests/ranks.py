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
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
CAPTURED = ["--batch_size", "2", "--seq_length", "32", "--precision", "fp32", "--dp_size", "2"]  # the flags of conftest's `dumps`


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def run_ranks(world_size: int, target: str, folder: Path, argument=None, *, timeout: float = 240) -> str:
    """Start the ranks, wait for all, return their tagged output; AssertionError with it when one fails or hangs."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "argument.json").write_text(json.dumps(argument))
    base = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "OMP_NUM_THREADS": "1",
    }
    processes = []
    for rank in range(world_size):
        log = open(folder / f"rank{rank}.log", "w")
        environment = {**base, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        command = [sys.executable, __file__, target, str(folder)]
        processes.append(
            subprocess.Popen(command, env=environment, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)
        )
    deadline = time.monotonic() + timeout
    while any(p.poll() is None for p in processes) and time.monotonic() < deadline:
        if any(p.returncode for p in processes):  # one failed: its peers would wait for it
            break
        time.sleep(0.05)
    hung = [rank for rank, p in enumerate(processes) if p.poll() is None]
    for rank in hung:
        os.killpg(processes[rank].pid, signal.SIGKILL)
        processes[rank].wait()
    output = "\n".join(
        f"[rank {rank}] {line}"
        for rank in range(world_size)
        for line in (folder / f"rank{rank}.log").read_text(errors="replace").splitlines()
    )
    codes = [p.returncode for p in processes]
    assert codes == [0] * world_size, f"exit statuses {codes}, stopped by the test: {hung}\n{output}"
    return output


def run_alone(target: str, folder: Path, argument=None, *, timeout: float = 240) -> None:
    """Run the function in one process outside any launcher, with a process group of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "argument.json").write_text(json.dumps(argument))
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    environment = {key: value for key, value in os.environ.items() if key not in names}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    done = subprocess.run(
        [sys.executable, __file__, target, str(folder)], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, done.stdout + done.stderr


def main() -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    target, folder = sys.argv[1], Path(sys.argv[2])
    module, function = target.split(":")
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        from lockstep.collective import init_alone

        init_alone()
    try:
        getattr(importlib.import_module(module), function)(folder, json.loads((folder / "argument.json").read_text()))
    finally:
        gc.collect()  # as in lockstep/launch.py
        dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
