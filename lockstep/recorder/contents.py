"""What a step's large tensors hold. What several ranks hold alike is written by one of them, and only once.

Nothing is communicated. The rank that is first to write a content makes an empty file with its name, which only one rank can make:

    RUN/.claims/CONTENT

The other ranks leave the content out, and note that. The folder is removed by the first rank that records anew, and by the last one that
has written its steps. A rank that finds no file of another one writes the content: what is written twice does no harm.
"""

import contextlib
import hashlib
import random
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch

CLAIMS, DONE = ".claims", "done-"
AT_LEAST = 1 << 16  # bytes of a tensor; smaller ones are written by each rank


def content_of(tensor: torch.Tensor) -> str:
    """Return what names the values of a tensor on the CPU: a hash of its bytes, its dtype and its shape."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
    # As fast as writing to a disk. A forged tensor gives a wrong verdict whatever the hash.
    name = hashlib.sha1(data, usedforsecurity=False).hexdigest()
    return "-".join([name, str(tensor.dtype).removeprefix("torch."), *map(str, tensor.shape)])


def divide(
    tensors: Mapping[str, torch.Tensor], known: set[str], run: Path | None, rank: int
) -> tuple[dict[str, str], dict[str, str]]:
    """Return the contents of a rank's large tensors, by key: (those that it writes, those that it leaves out).

    `known` are the contents that are written already; those of these tensors are added. `run` is the folder of all ranks; None if this
    rank knows no others.
    """
    written, elsewhere = dict[str, str](), dict[str, str]()
    large = [key for key, tensor in tensors.items() if tensor.nbytes >= AT_LEAST]
    # Ranks that hold the same go through it in other orders, so that each writes a part of it.
    random.Random(rank).shuffle(large)
    for key in large:
        content = content_of(tensors[key])
        is_new = content not in known and (run is None or claim(run, content))
        known.add(content)
        (written if is_new else elsewhere)[key] = content
    return written, elsewhere


def claim(run: Path, content: str) -> bool:
    """Whether a rank must write a content, since no other rank does. `run` is the folder of all ranks."""
    try:
        (run / CLAIMS).mkdir(exist_ok=True)
        (run / CLAIMS / content).open("x").close()
    except FileExistsError:
        return False
    # Such as one that another rank has just removed
    except OSError:
        return True
    return True


def forget(run: Path) -> None:
    """Remove what ranks have claimed."""
    shutil.rmtree(run / CLAIMS, ignore_errors=True)


def remove_earlier(rank_folder: Path) -> None:
    """Remove what an earlier run has recorded of a rank, and what its ranks have claimed, as it may have been killed."""
    shutil.rmtree(rank_folder, ignore_errors=True)
    forget(rank_folder.parent)


def leave(run: Path, rank: int, ranks: int) -> None:
    """Note that a rank has written all its steps. The last one of `ranks` removes what they have claimed."""
    with contextlib.suppress(OSError):
        (run / CLAIMS / f"{DONE}{rank}").touch()
        if len([*(run / CLAIMS).glob(f"{DONE}*")]) >= ranks:
            forget(run)
