"""What DeepSpeed needs of a machine, and the extensions that it would build with a C++ compiler: one for offload to NVMe, none else."""

import contextlib
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

from lockstep import tested
from lockstep.config import Config
from lockstep.deepspeed import configuration, ulysses, zero
from lockstep.errors import UserError
from lockstep.files import require_writable_folder
from lockstep.inputs import shapes
from lockstep.running import progress


def require(config: Config, architecture: dict) -> None:
    """Raise UserError if the package, or what offload to NVMe needs, is missing, or the options contradict each other."""
    if importlib.util.find_spec("deepspeed") is None:
        raise UserError(
            "train_deepspeed.py needs the package deepspeed, which is not installed; install requirements.txt"
        )
    zero.require(config)
    ulysses.require(config, architecture)
    if shapes.describe(architecture).frozen:
        raise UserError(
            f"--model_name {config.model_name}: it has frozen parameters, whose places in ZeRO's flat pieces are not read here; choose another "
            "strategy"
        )
    if config.has_own_optimizer:
        raise UserError(
            f"--optimizer {config.optimizer}: DeepSpeed steps flat pieces of many tensors, and adamw and sgd alone are known to take them; choose one"
        )
    told, version = configuration.resolved(config, shapes.width(architecture)), tested.difference("deepspeed")
    file = zero.of(config).deepspeed_config
    # The version that was tested knows what the flags ask for, without the import, which takes seconds.
    if file is not None:
        configuration.require_readable(told, config.device, str(file.path), "correct it")
    elif version:
        configuration.require_readable(told, config.device, version, "install requirements.txt")
    path = zero.of(config).nvme_path
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
    with contextlib.suppress(ImportError):  # not every version has both
        import deepspeed.module_inject.auto_ep_layer  # noqa: F401
        import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401
    import torch.utils.cpp_extension  # noqa: F401

    use_torch_collectives()  # DeepSpeed looks once for the operators that it could build


def use_torch_collectives() -> None:
    """Let DeepSpeed use the collectives of torch's process groups on CPUs, as the other strategies do, before it makes its own.

    It would build an operator that sums in shared memory, for a minute, and again whenever the path of the environment changes.
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
        what = "DeepSpeed builds its file access for ZeRO-Infinity, once per environment (about four minutes)"
        if lock.exists():
            what = f"DeepSpeed waits for another build of its file access; if none is running, remove {lock}"
        built = (folder / f"{extension.NAME}.so").exists() and not lock.exists()
        with contextlib.nullcontext() if built else progress.working(what):
            extension.load(verbose=False)
    dist.barrier()
