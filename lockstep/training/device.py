"""The device of one rank, and its share of this machine's cores."""

import contextlib
import os
from typing import TYPE_CHECKING

from lockstep.plan.config import Config
from lockstep.plan.resources import workers_here

if TYPE_CHECKING:
    import torch


def training_device(config: Config) -> "torch.device":
    """The device of this rank of a launcher, made ready: its share of the cores, or its GPU."""
    import torch

    share_cores(config, workers_here(config.num_workers))
    if config.device != "cuda":
        return torch.device("cpu")
    device = torch.device(
        "cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count()
    )  # over gloo, ranks may share a GPU
    torch.cuda.set_device(device)
    return device


def share_cores(config: Config, num_workers: int) -> None:
    """Share this machine's cores among its workers; launchers set one thread, or all of them in each worker.

    Over gloo the threads of this rank become batch threads.
    """
    import torch

    if config.device == "cpu":
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // num_workers))
    if config.backend == "gloo":
        make_batch_threads()


def make_batch_threads() -> None:
    """Let no thread of this rank preempt another, nor any that they start from now on. Linux only; elsewhere it does nothing.

    A thread of gloo that wakes up takes the core from the thread that holds the lock it needs, and then spins: with tensor parallelism,
    four ranks on two cores take up to 1.7 times as long (docs/findings.md). A policy that the user chose is kept.
    """
    if not hasattr(os, "SCHED_BATCH"):
        return
    for thread in map(int, os.listdir("/proc/self/task")):
        # It has ended, or a container forbids it. Only speed depends on it.
        with contextlib.suppress(OSError):
            if os.sched_getscheduler(thread) == os.SCHED_OTHER:
                os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
