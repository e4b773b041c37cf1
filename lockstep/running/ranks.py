"""Ranks on this machine, forked from one process that has already imported what they need.

Importing torch and the libraries of the strategies takes five seconds of a core: here once, not once per rank. A process that forks must
have no threads and no CUDA context, so this one imports, forks and waits, and does nothing else.
"""

import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable

from lockstep.ground import processes
from lockstep.ground.errors import printable

# Seconds in which the other ranks may report why they fail, too
GRACE = 5.0


def fork(num_ranks: int, body: Callable[[socket.socket], int], name: str) -> int:
    """Call `body(listener)` in forked processes, with the environment variables that torchrun sets (RANK, WORLD_SIZE, ...).

    Returns 0, or the exit status of the first rank that failed, after ending the others. `listener` is bound to MASTER_PORT; the first
    rank's store listens on it (`join`). If a signal ended a rank, the program `name` says so on stderr, and the status is 1.
    """
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(num_ranks)
        parent = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        left = {}
        for rank in range(num_ranks):
            pid = os.fork()
            if pid == 0:
                _be_rank(rank, num_ranks, listener, parent, body)
            left[pid] = rank
    return _wait(left, name)


def _be_rank(rank: int, num_ranks: int, listener: socket.socket, parent: int, body: Callable) -> None:
    """Run one rank in this process, and end it. Does not return."""
    status = 3
    try:
        processes.end_with_parent(signal.SIGKILL)
        # The parent may have ended before this process asked to end with it.
        if os.getppid() != parent:
            os._exit(1)
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(num_ranks),
            "LOCAL_WORLD_SIZE": str(num_ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(listener.getsockname()[1]),
        }
        status = body(listener)
    except BaseException:  # noqa: BLE001 - this is where the process ends
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # The process groups of many strategies are not worth destroying one by one.
        os._exit(status)


def join(listener: socket.socket, backend: str) -> None:
    """Make the process group of the forked ranks. Called in each of them, before anything else of torch.distributed."""
    import torch.distributed as dist

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    host, port = listener.getsockname()
    if rank == 0:
        store = dist.TCPStore(host, port, size, is_master=True, master_listen_fd=listener.detach())
    else:
        listener.close()
        store = dist.TCPStore(host, port, size, is_master=False)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)


def _wait(left: dict[int, int], name: str) -> int:
    """Wait for all ranks (process id -> rank). The first failure ends them all, after GRACE."""
    failed, deadline = 0, 0.0
    # Ranks that ended with status 0. They may have finished, or their code may have called exit.
    ended: list[int] = []
    while left:
        pid, status = os.waitpid(-1, os.WNOHANG if failed else 0)
        if pid == 0:
            if time.monotonic() > deadline:
                for other in left:
                    os.kill(other, signal.SIGKILL)
                deadline = float("inf")
            time.sleep(0.05)
            continue
        rank, code = left.pop(pid), os.waitstatus_to_exitcode(status)
        # Not killed here. Another rank may have failed because of it, and ended first.
        if code < 0 and deadline < float("inf"):
            print(
                printable(f"{name}: rank {rank} was {processes.killed_by(-code)}"),
                file=sys.stderr,
                flush=True,
            )
        if code == 0 and not failed:
            ended.append(rank)
        if code and not failed:
            for other in ended:
                print(
                    f"{name}: rank {other} ended with status 0 before rank {rank}, which failed; look for a call of exit on rank {other}",
                    file=sys.stderr,
                    flush=True,
                )
            failed, deadline = (code if code > 0 else 1), time.monotonic() + GRACE
    return failed
