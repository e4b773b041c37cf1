"""The device of one rank, and its share of this machine's cores."""

import os
from typing import TYPE_CHECKING

from lockstep.config import Config
from lockstep.resources import workers_here

if TYPE_CHECKING:
    import torch


def training_device(config: Config) -> "torch.device":
    """The device of this rank of a launcher, made ready: its share of the cores, or its GPU."""
    import torch

    set_threads(config, workers_here(config.num_workers))
    if config.device != "cuda":
        return torch.device("cpu")
    device = torch.device(
        "cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count()
    )  # over gloo, ranks may share a GPU
    torch.cuda.set_device(device)
    return device


def set_threads(config: Config, num_workers: int) -> None:
    """Share this machine's cores among its workers; launchers set one thread, or all of them in each worker."""
    import torch

    if config.device == "cpu":
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // num_workers))
