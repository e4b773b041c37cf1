"""Run functions in real gloo processes, one per rank, with a time limit; output is tagged by rank.

A function is named "module:function", takes (folder, argument) and may write files into the folder.
"""

import contextlib
import functools
import gc
import importlib
import json
import os
import random
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path

import preloaded

ROOT = Path(__file__).parents[1]
CAPTURED = shlex.split(
    "--batch_size 2 --seq_length 32 --precision fp32 --dp_size 2"
)  # the flags of conftest's `dumps`


def free_port() -> int:
    """A port that is free and stays so: below those that the system chooses, and above those of Ray's workers."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port


def run_ranks(world_size: int, target: str, folder: Path, argument=None, *, timeout: float = 240) -> str:
    """Fork the ranks, wait for all, return their tagged output; AssertionError with it when one fails or hangs."""
    return run_groups([(world_size, target, folder, argument)], timeout=timeout)


def run_groups(groups: list[tuple], *, timeout: float = 240, server: preloaded.Server | None = None) -> str:
    """`run_ranks` of (number of ranks, or 0 outside any launcher; target; folder; argument), one after the other.

    All are forked from one process, which has imported torch and the rest: preloaded.py. The functions' folders must differ.
    """
    for _, _, folder, argument in groups:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "argument.json").write_text(json.dumps(argument))
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    environment = {key: value for key, value in os.environ.items() if key not in names}
    environment |= {"OMP_NUM_THREADS": "1"}
    log_path = groups[0][2] / "log.txt"
    log_path.write_text("")
    told = json.dumps([[size, target, str(folder)] for size, target, folder, _ in groups])
    server = server or preloaded.server()
    process = server.start("ranks", [told], str(log_path), environment)
    try:
        status = process.wait(timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        status = "a time limit"
    logs = {"start": log_path}
    for world_size, _, folder, _ in groups:
        logs |= {
            f"rank {rank} of {folder.name}": folder / f"rank{rank}.log" for rank in range(max(world_size, 1))
        }
    output = "\n".join(
        f"[{who}] {line}"
        for who, path in logs.items()
        if path.exists()
        for line in path.read_text(errors="replace").splitlines()
    )
    assert status == 0, f"ended by {status}\n{output}"
    return output


def rank(target: str, folder: Path, alone: bool, listener: socket.socket) -> int:
    """One forked process: its output goes to a file, then the process group, then the function."""
    import torch
    import torch.distributed as dist

    from lockstep.ground.collective import init_alone
    from lockstep.plan import resources
    from lockstep.running import ranks

    log = os.open(folder / f"rank{os.environ['RANK']}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    torch.set_num_threads(1)
    resources.make_batch_threads()
    if alone:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            del os.environ[name]
        init_alone()
    else:
        ranks.join(listener, "gloo")
    module, function = target.split(":")
    try:
        getattr(importlib.import_module(module), function)(
            folder, json.loads((folder / "argument.json").read_text())
        )
    finally:
        gc.collect()  # as in lockstep/launch.py
        dist.destroy_process_group()
    return 0


def main() -> int:
    from lockstep.running import ranks

    groups = json.loads(sys.argv[1])
    for _, target, _ in groups:
        importlib.import_module(target.split(":")[0])
    gc.freeze()  # as in startup.importing
    for world_size, target, name in groups:
        body = functools.partial(rank, target, Path(name), world_size == 0)
        status = ranks.fork(world_size or 1, body, "ranks.py")
        if status:
            return status
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)
