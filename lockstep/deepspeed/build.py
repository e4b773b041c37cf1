"""DeepSpeed's shared-memory op, which it builds with a C++ compiler when it first runs on CPUs."""

import contextlib
import importlib.util
import os
import shutil
import sys
import time
from pathlib import Path

from lockstep.config import Config
from lockstep.deepspeed import configuration, zero
from lockstep.errors import UserError
from lockstep.running import progress

STALE_LOCK_SECONDS = 120  # no file of the build was touched for this long: nobody is building


def require(config: Config, architecture: dict) -> None:
    """Raise UserError if the package, or a compiler for its extension, is missing, or the options contradict each other."""
    if importlib.util.find_spec("deepspeed") is None:
        raise UserError(
            "train_deepspeed.py needs the package deepspeed, which is not installed; install requirements.txt"
        )
    if config.device == "cpu" and not (shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++")):
        raise UserError(
            "DeepSpeed builds a small C++ extension when it first runs on CPUs, and no C++ compiler (c++ or g++) is on the PATH; "
            "install one, e.g. the package g++"
        )
    zero.require(config)
    configuration.text(config, architecture)


def preload() -> None:
    """Import DeepSpeed, and what it imports when it is given an optimizer: Muon, and with it torch's compiler, two seconds of a core.

    Without the package nothing happens: the ranks say so.
    """
    if importlib.util.find_spec("deepspeed") is None:
        return
    os.environ["DS_ACCELERATOR"] = "cpu"  # or DeepSpeed takes the GPU of a machine that has one
    import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401


def build_extension() -> None:
    """Build DeepSpeed's shared-memory op, once per environment, and say so. The other ranks of the machine wait.

    DeepSpeed itself would build it silently, and wait for ever on the lock of an interrupted build.
    """
    import torch.distributed as dist
    from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder
    from torch.utils.cpp_extension import _get_build_directory

    # The ninja installed beside this Python: another version on the PATH would build everything again.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    if int(os.environ.get("LOCAL_RANK", "0")) == 0:
        folder = Path(_get_build_directory(ShareMemCommBuilder.NAME, False))
        _wait_for_lock(folder / "lock")
        built = (folder / f"{ShareMemCommBuilder.NAME}.so").exists()
        announced = (
            contextlib.nullcontext()
            if built
            else progress.working(
                "DeepSpeed builds its shared-memory op, once per environment (about a minute)"
            )
        )
        with announced:
            ShareMemCommBuilder().load(verbose=False)
    dist.barrier()


def _wait_for_lock(lock: Path) -> None:
    """Wait while another process builds; remove the lock once nobody has touched the folder for a while."""
    if lock.exists():
        progress.screen.note(f"DeepSpeed: another build of its shared-memory op holds {lock}; waiting for it")
    while lock.exists():
        if time.time() - max(_touched(file) for file in [lock, *lock.parent.iterdir()]) > STALE_LOCK_SECONDS:
            progress.screen.note(f"DeepSpeed: removing the lock of an interrupted build, {lock}")
            lock.unlink(missing_ok=True)
        time.sleep(1)


def _touched(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except FileNotFoundError:  # a builder at work removes files
        return time.time()
