"""What a run can use: the launcher's ranks, this machine's cores, GPUs and memory; and a rank's part of them.

Importing this needs no torch.
"""

import contextlib
import importlib.metadata
import math
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.ground import processes
from lockstep.ground.errors import UserError
from lockstep.inputs.shapes import parameter_shapes
from lockstep.plan.config import Config, Spec
from lockstep.plan.mesh import AXES, Mesh

if TYPE_CHECKING:
    import torch

# The container's limit of memory, in versions 2 and 1 of cgroups
CGROUP = Path("/sys/fs/cgroup")
CGROUP_LIMITS = (CGROUP / "memory.max", CGROUP / "memory/memory.limit_in_bytes")
WORKERS_PER_CORE = 8  # more CPU processes than this on one core spend their time switching


def launched_in_place() -> bool:
    """Whether a launcher such as torchrun started this process as one of several ranks."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


# Environment variable with the number of processes -> the program that sets it, and gives the processes no ranks
STARTERS = {"OMPI_COMM_WORLD_SIZE": "mpirun", "PMI_SIZE": "mpirun", "SLURM_STEP_NUM_TASKS": "srun"}


def require_one_process_or_ranks() -> None:
    """Raise UserError in one of several processes that have no ranks: each would start a Ray instance, and train by itself."""
    if launched_in_place():
        return
    for name, program in STARTERS.items():
        if int(os.environ.get(name) or 1) > 1:
            raise UserError(
                f"{program} started {os.environ[name]} processes and gave them no RANK and WORLD_SIZE; "
                "start them with torchrun or the deepspeed launcher, or start one process, which uses Ray"
            )


def workers_here(total: int) -> int:
    """The number of ranks on this machine, by either name that launchers have for it; `total` without a launcher."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or total)


def resolve_mesh(spec: Spec, options: dict[str, Any]) -> dict[str, int]:
    """num_workers and the size of every axis, from the flags and the launcher. Raises UserError if they contradict each other."""
    sizes = {axis: options[f"{axis}_size"] for axis in AXES}
    for axis, size in sizes.items():
        if axis not in spec.axes and size not in (None, 1):
            raise UserError(
                f"--{axis}_size {size}: {spec.label} has no {AXES[axis].value} parallelism; leave it out, or use another strategy"
            )
    sizes["tp"] = sizes["tp"] or (2 if "tp" in spec.axes else 1)
    launched = int(os.environ["WORLD_SIZE"]) if launched_in_place() else None
    total = options["num_workers"] or launched
    if sizes["dp"] is None:
        others = math.prod(size for axis, size in sizes.items() if axis != "dp")
        sizes["dp"] = 1 if "dp" not in spec.axes else max(1, total // others) if total else 2
    mesh = Mesh(**sizes)
    workers = options["num_workers"] or mesh.world_size
    shown = ("tp", "dp", *mesh.further_axes)
    names, product = (
        " x ".join(factors)
        for factors in ((f"{axis}_size" for axis in shown), (str(mesh.size(axis)) for axis in shown))
    )
    if workers != mesh.world_size:
        raise UserError(
            f"--num_workers {workers} is not {names} = {product} = {mesh.world_size}; change one of them"
        )
    if launched not in (None, workers):
        raise UserError(
            f"the launcher started {launched} processes, the mesh has {product} = {workers}; start {workers}, or change the mesh ({names})"
        )
    return {"num_workers": workers, **{f"{axis}_size": size for axis, size in mesh.sizes.items()}}


def torch_is_for_cpus() -> bool:
    """Whether the installed torch was built without support for any accelerator."""
    return importlib.metadata.version("torch").endswith("+cpu")


def local_gpus() -> int:
    """The number of GPUs of this machine that CUDA_VISIBLE_DEVICES allows (0 if torch has no CUDA)."""
    if torch_is_for_cpus():
        return 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip() not in ("", "-1")])
    driver = Path("/proc/driver/nvidia/gpus")
    return len(list(driver.iterdir())) if driver.is_dir() else 0


def resolve_device(spec: Spec, options: dict[str, Any]) -> dict[str, str]:
    """device and backend, from the flags and the hardware. Raises UserError for more workers than fit."""
    device, backend, workers = options["device"], options["backend"], options["num_workers"]
    gpus, cores = local_gpus(), os.cpu_count() or 1
    in_place = launched_in_place()
    is_on_cluster = bool(os.environ.get("RAY_ADDRESS")) and not in_place  # whose size is not this machine's
    if in_place:
        workers = workers_here(workers)
    if device == "auto":
        device = "cuda" if gpus >= workers and backend != "gloo" else "cpu"
    if backend == "auto":
        backend = "nccl" if device == "cuda" else "gloo"
    if device == "cpu" and backend == "nccl":
        raise UserError(
            "--backend nccl needs --device cuda and one GPU per worker; use --backend gloo on CPUs"
        )
    if device == "cuda" and not is_on_cluster:
        # Ray gives each rank a GPU of its own.
        is_shared = backend == "gloo" and in_place and spec.ranks_share_gpus
        needed = 1 if is_shared else workers
        if gpus < needed:
            raise UserError(
                f"--device cuda: {needed} GPUs needed for {workers} workers, {gpus} found; "
                "use --device cpu, or lower --tp_size or --dp_size"
            )
    if device == "cpu" and not is_on_cluster and workers > WORKERS_PER_CORE * cores:
        raise UserError(
            f"{workers} workers on {cores} CPU cores: at most {WORKERS_PER_CORE} per core; lower --tp_size or --dp_size"
        )
    return {"device": device, "backend": backend}


def device_elsewhere(options: dict[str, Any]) -> dict[str, str]:
    """device and backend of a run on machines that are not at hand: auto is GPUs, as many as there are workers."""
    device = "cuda" if options["device"] == "auto" else options["device"]
    backend = options["backend"]
    return {
        "device": device,
        "backend": {"cuda": "nccl", "cpu": "gloo"}[device] if backend == "auto" else backend,
    }


def require_memory(config: Config, architecture: dict, workers_here: int) -> None:
    """Raise UserError if this machine has less memory than the run's workers here need at least.

    The need is a lower bound: parameters, gradients and optimizer state, without activations and torch itself. Without this check the
    kernel would kill the workers later. Imports torch to count the parameters. Does nothing if RAY_ADDRESS names a cluster, whose size is
    not this machine's.
    """
    if os.environ.get("RAY_ADDRESS"):
        return
    parameters = sum(math.prod(shape) for shape in parameter_shapes(architecture).values())
    needed, has = least_bytes(config, parameters) * workers_here // config.num_workers, machine_bytes()
    if needed > has:
        raise UserError(
            f"--model_name {config.model_name}: {parameters:.3g} parameters, with gradients and optimizer state over "
            f"{config.num_workers} workers, need at least {needed / 1e9:.3g} GB of memory, and this machine has "
            f"{has / 1e9:.3g} GB; choose a smaller model or lower --num_layers"
        )


def least_bytes(config: Config, parameters: int) -> int:
    """The least number of bytes of main memory that all workers of a run with so many parameters need together.

    Every worker first builds the whole model in float32. Then whole replicas hold everything in each worker; other strategies hold
    it at least once over all workers. The reference is one process in float64. On GPUs, training takes no main memory.
    """
    copies = 4 if config.optimizer == "adamw" else 2  # parameters, gradients, two moments
    if config.run_name == "reference":
        return parameters * 8 * copies
    build = parameters * 4 * config.num_workers
    if config.device == "cuda":
        return build
    size = 2 if config.precision == "bf16" else 4
    return max(build, parameters * size * copies * (config.dp_size if config.spec.whole_replicas else 1))


def machine_bytes() -> int:
    """Main memory of this machine, or of the container that this process runs in."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in CGROUP_LIMITS:
        try:
            limits.append(int(path.read_text()))
        except (OSError, ValueError):  # another version of cgroups, or "max"
            continue
    return min(limits)


def free_bytes() -> int:
    """Main memory that is available on this machine, but no more than what the container has left."""
    free = [machine_bytes()]
    with contextlib.suppress(OSError, ValueError):  # not a container, or another version of cgroups
        used, limit = (int((CGROUP / name).read_text()) for name in ("memory.current", "memory.max"))
        # Files that the kernel keeps in memory until it is needed
        cached = re.search(r"^inactive_file (\d+)", (CGROUP / "memory.stat").read_text(), re.MULTILINE)
        free.append(limit - used + (int(cached[1]) if cached else 0))
    with contextlib.suppress(OSError):
        available = re.search(r"^MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
        free += [int(available[1]) * 1024] if available else []
    return min(free)


def share_memory() -> None:
    """Give back the memory that this process has freed and kept, if it has more than twice what the machine has left."""
    if processes.own_memory() > 2 * free_bytes():
        processes.give_back_memory()


def training_device(config: Config) -> "torch.device":
    """The device of this rank of a launcher, made ready: its share of the cores, or its GPU."""
    import torch

    share_cores(config, workers_here(config.num_workers))
    if config.device != "cuda":
        return torch.device("cpu")
    # Over gloo, ranks may share a GPU.
    if "LOCAL_RANK" not in os.environ:
        raise UserError(
            "LOCAL_RANK is not set, so which GPU is this rank's is not known; start with torchrun"
        )
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
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
    """Let no thread of this rank, nor any that these start from now on, preempt another. Linux only; elsewhere it does nothing.

    A thread of gloo that wakes up takes the core from the thread that holds the lock it needs, and then spins: with tensor parallelism,
    four ranks on two cores take up to 1.7 times as long (docs/findings.md). A policy that the user chose is kept.
    """
    if not hasattr(os, "SCHED_BATCH"):
        return
    for thread in map(int, os.listdir("/proc/self/task")):
        # The thread may have ended, or a container may forbid the change. Only speed depends on it.
        with contextlib.suppress(OSError):
            if os.sched_getscheduler(thread) == os.SCHED_OTHER:
                os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
