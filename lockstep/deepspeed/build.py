"""The extensions that DeepSpeed builds with a C++ compiler when it first needs them, and what a machine must have for that."""

import contextlib
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from lockstep.config import Config
from lockstep.deepspeed import configuration, options, ulysses, zero
from lockstep.errors import UserError
from lockstep.files import require_writable_folder
from lockstep.resources import has_compiler
from lockstep.running import progress

STALE_LOCK_SECONDS = 120  # no file of the build was touched for this long: nobody is building


def require(config: Config, architecture: dict) -> None:
    """Raise UserError if the package, or a compiler for its extension, is missing, or the options contradict each other."""
    if importlib.util.find_spec("deepspeed") is None:
        raise UserError(
            "train_deepspeed.py needs the package deepspeed, which is not installed; install requirements.txt"
        )
    if config.device == "cpu" and not has_compiler():
        raise UserError(
            "DeepSpeed builds a small C++ extension when it first runs on CPUs, and no C++ compiler (c++ or g++) is on the PATH; "
            "install one, e.g. the package g++"
        )
    zero.require(config)
    ulysses.require(config, architecture)
    configuration.text(config, architecture)
    path = options.of(config).nvme_path
    if path is not None:
        _require_libaio()
        require_writable_folder(path, "--nvme_path", keep=not config.dry_run)


def _require_libaio() -> None:
    """Raise UserError unless a program can be linked with libaio, with which DeepSpeed reads and writes the disk."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    program = "#include <libaio.h>\nint main() { io_context_t context = 0; return io_setup(1, &context); }\n"
    command = [compiler or "c++", "-x", "c++", "-", "-o", os.devnull, "-laio"]
    try:
        linked = subprocess.run(command, input=program, text=True, capture_output=True).returncode == 0
    except OSError:
        linked = False
    if not linked:
        raise UserError(
            "offload to nvme needs libaio with its headers and a C++ compiler; install the package libaio-dev (Debian, Ubuntu) or libaio-devel "
            "(Fedora, RHEL), and g++"
        )


def preload() -> None:
    """Import DeepSpeed, and what it imports when it makes an engine. Muon alone, with torch's compiler, takes two seconds of a core.

    Without the package nothing happens: the ranks say so.
    """
    if importlib.util.find_spec("deepspeed") is None:
        return
    os.environ["DS_ACCELERATOR"] = "cpu"  # or DeepSpeed takes the GPU of a machine that has one
    import deepspeed.module_inject.auto_ep_layer  # noqa: F401
    import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401
    import torch.utils.cpp_extension  # noqa: F401


SHARED_MEMORY = ("ShareMemCommBuilder", "its shared-memory op", "about a minute")
ASYNC_IO = ("AsyncIOBuilder", "its file access for ZeRO-Infinity", "about four minutes")


def build_extension(builder: str, what: str, how_long: str) -> None:
    """Build one of DeepSpeed's extensions, once per environment, and say so. The other ranks of the machine wait.

    DeepSpeed itself would build it silently, and wait for ever on the lock of an interrupted build.
    """
    import torch.distributed as dist
    from deepspeed.accelerator import get_accelerator
    from torch.utils.cpp_extension import _get_build_directory

    # The ninja installed beside this Python: another version on the PATH would build everything again.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    if int(os.environ.get("LOCAL_RANK", "0")) == 0:
        extension = get_accelerator().create_op_builder(builder)
        folder = Path(_get_build_directory(extension.NAME, False))
        _wait_for_lock(folder / "lock", what)
        built = (folder / f"{extension.NAME}.so").exists()
        announced = (
            contextlib.nullcontext()
            if built
            else progress.working(f"DeepSpeed builds {what}, once per environment ({how_long})")
        )
        with announced:
            extension.load(verbose=False)
    dist.barrier()


def _wait_for_lock(lock: Path, what: str) -> None:
    """Wait while another process builds; remove the lock once nobody has touched the folder for a while."""
    if lock.exists():
        progress.screen.note(f"DeepSpeed: another build of {what} holds {lock}; waiting for it")
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
