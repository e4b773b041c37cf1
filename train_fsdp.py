"""Train with FSDP2 + DTensor: a tensor-parallel plan over the tp axis, then fully_shard over the dp axis.

    python train_fsdp.py --tp_size 2 --dp_size 2 --init_weights_path runs/init.safetensors
    torchrun --nproc_per_node 4 train_fsdp.py       the same loop in place, without ray
    python train_fsdp.py --dry_run                  configuration, mesh and contract; trains nothing

Writes loss_fsdp.json under --loss_output_dir. All flags: --help. Exit status: 0; 1 a run that failed; 2 a usage error;
3 an internal error.
"""

if __name__ == "__main__":
    from lockstep.ground import startup

    startup.begin()  # first: from now on Ctrl-C and a missing package are one line each

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lockstep.launch import launch

if TYPE_CHECKING:
    from ray.train.torch import TorchTrainer

    from fsdp_strategy import FSDPStrategy


def make_strategy(*arguments: Any) -> "FSDPStrategy":
    """The strategy around a model, on every rank."""
    from fsdp_strategy import FSDPStrategy

    return FSDPStrategy(*arguments)


def make_trainer(worker: Callable[..., Any], **settings: Any) -> "TorchTrainer":
    """Ray's trainer, which starts the ranks; each calls the worker. torchrun starts them itself."""
    from ray.train.torch import TorchTrainer

    return TorchTrainer(worker, **settings)


def main(argv: list[str] | None = None) -> int:
    """Parse, check, train; the exit status."""
    return launch("fsdp", make_strategy, make_trainer, argv)


if __name__ == "__main__":
    startup.end(main())
