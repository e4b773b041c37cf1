"""Does the model fit into main memory? A lower bound: parameters, gradients and optimizer state, without activations and torch itself.

A model that is far too large is refused at once, in one line. Otherwise the kernel would kill the workers later. `require` imports torch to
count the parameters.
"""

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.ground.errors import UserError
from lockstep.inputs.shapes import parameter_shapes

if TYPE_CHECKING:
    from lockstep.plan.config import Config

CGROUP_LIMITS = (
    "/sys/fs/cgroup/memory.max",
    "/sys/fs/cgroup/memory/memory.limit_in_bytes",
)  # of versions 2 and 1


def require(config: "Config", architecture: dict, workers_here: int) -> None:
    """Raise UserError if this machine has less memory than the run's workers here need at least.

    Looks at main memory only. Does nothing if RAY_ADDRESS names a cluster, whose size is not this machine's.
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


def least_bytes(config: "Config", parameters: int) -> int:
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
            limits.append(int(Path(path).read_text()))
        except (OSError, ValueError):  # another version of cgroups, or "max"
            continue
    return min(limits)
