"""What a process needs before DeepSpeed runs in it: torch's collectives, and for offload to NVMe an extension that is built."""

import contextlib
import os
import sys
from pathlib import Path

from lockstep.ground import progress


def use_torch_collectives() -> None:
    """Let DeepSpeed use the collectives of torch's process groups on CPUs, as the other strategies do, before it makes its own.

    Otherwise it would spend a minute building an operator that sums in shared memory, and again whenever the path of the
    environment changes.
    """
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def collectives() -> str:
    """What the live DeepSpeed communicates with: the backend of torch's process groups, or an operator of its own."""
    import torch.distributed as dist
    from deepspeed.comm import comm

    return dist.get_backend() if comm.cdb.shm_comm_op is None else "deepspeed_shm_comm"


def build_async_io() -> None:
    """Build DeepSpeed's operator that reads and writes the disk, once per environment, and say so. Collective: the other ranks wait."""
    import torch.distributed as dist
    from deepspeed.accelerator import get_accelerator
    from torch.utils.cpp_extension import _get_build_directory

    # The ninja installed beside this Python: another version on the PATH would build everything again.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    if int(os.environ.get("LOCAL_RANK", "0")) == 0:
        extension = get_accelerator().create_op_builder("AsyncIOBuilder")
        folder = Path(_get_build_directory(extension.NAME, False))
        lock = folder / "lock"
        text = "DeepSpeed builds its file access for ZeRO-Infinity, once per environment (about four minutes)"
        if lock.exists():
            text = f"DeepSpeed waits for another build of its file access; if none is running, remove {lock}"
        is_built = (folder / f"{extension.NAME}.so").exists() and not lock.exists()
        with contextlib.nullcontext() if is_built else progress.working(text):
            extension.load(verbose=False)
    dist.barrier()
