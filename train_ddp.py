"""Train with PyTorch DistributedDataParallel, the baseline; it also writes the initial weights for the others.

    python train_ddp.py --init_weights_path runs/init.safetensors --save_init_weights
    torchrun --nproc_per_node 2 train_ddp.py        the same loop in place, without ray
    python train_ddp.py --dry_run                   configuration, mesh and contract; trains nothing

Writes loss_ddp.json under --loss_output_dir. All flags: --help. Exit status: 0; 1 a run that failed; 2 a usage error;
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

    from ddp_strategy import DDPStrategy


def make_strategy(*arguments: Any) -> "DDPStrategy":
    """The strategy around a model, on every rank."""
    from ddp_strategy import DDPStrategy

    return DDPStrategy(*arguments)


def make_trainer(worker: Callable[..., Any], **settings: Any) -> "TorchTrainer":
    """Ray's trainer, which starts the ranks; each calls the worker. torchrun starts them itself."""
    from ray.train.torch import TorchTrainer

    return TorchTrainer(worker, **settings)


def main(argv: list[str] | None = None) -> int:
    """Parse, check, train; the exit status."""
    return launch("ddp", make_strategy, make_trainer, argv)


if __name__ == "__main__":
    startup.end(main())
