"""What a step's large tensors hold. What several ranks hold alike is written by one of them, and only once.

Nothing is communicated. The rank that comes first to write a content makes a symbolic link, which only one rank can make:

    RUN/.claims/CONTENT -> rank_R

The other ranks leave the content out, and note it. The links are removed once all ranks have written their steps.
"""

import contextlib
import os
import shutil
from pathlib import Path

import torch

from lockstep.recorder.hashes import digest

CLAIMS, DONE = ".claims", "done-"
AT_LEAST = 1 << 16  # bytes of a tensor; smaller ones are written by each rank


def content_of(tensor: torch.Tensor) -> str:
    """Return what names the values of a tensor: their hash, their dtype and their shape."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return "-".join([f"{digest(tensor) % 2**64:016x}", dtype, *map(str, tensor.shape)])


def claim(run: Path, rank: str, content: str) -> bool:
    """Whether a rank is the first to write a content. `run` is the folder of all ranks, `rank` the name of the rank's folder in it."""
    (run / CLAIMS).mkdir(exist_ok=True)
    try:
        (run / CLAIMS / content).symlink_to(rank)
    except FileExistsError:
        return False
    except OSError:  # a file system without symbolic links: each rank writes all that it holds
        pass
    return True


def forget(run: Path, rank: str) -> None:
    """Remove the links that an earlier run of a rank has left, as it was killed."""
    with contextlib.suppress(OSError):
        for link in (run / CLAIMS).iterdir():
            if os.readlink(link) == rank:
                link.unlink()


def leave(run: Path, rank: str, ranks: int) -> None:
    """Note that a rank has written all its steps. Remove the links if all the ranks have, which are so many."""
    with contextlib.suppress(OSError):
        (run / CLAIMS / f"{DONE}{rank}").symlink_to(rank)
    if len([*(run / CLAIMS).glob(f"{DONE}*")]) == ranks:
        shutil.rmtree(run / CLAIMS, ignore_errors=True)
