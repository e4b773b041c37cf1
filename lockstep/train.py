"""Train with any strategy: one of the registry, or your own.

    python -m lockstep.train --strategy my_parallel.py:MyStrategy --dp_size 2 --tp_size 2         under Ray Train
    torchrun --nproc_per_node 4 -m lockstep.train --strategy my_parallel.py:MyStrategy            in place

All other flags are those of train_fsdp.py --help. Exit status as there.
"""

if __name__ == "__main__":
    from lockstep.ground import startup

    startup.begin()  # first: from now on Ctrl-C and a missing package are one line each

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lockstep.ground.errors import UserError, run_program
from lockstep.ground.flags import Parser
from lockstep.launch import launch

if TYPE_CHECKING:
    from ray.train.torch import TorchTrainer
    from transformers import PreTrainedModel

    from lockstep.plan.config import Config
    from lockstep.training.strategy import Strategy


def split(argv: list[str]) -> tuple[str, list[str]]:
    """The strategy and the rest of a command line. Raises UserError if none is named."""
    parser = Parser(prog="lockstep.train", add_help=False, allow_abbrev=False)
    parser.add_argument("--strategy")
    options, rest = parser.parse_known_args(argv)
    if options.strategy is None:
        raise UserError("--strategy is missing: a name such as fsdp, or path/to/file.py:Class")
    return options.strategy, rest


def make_strategy(model: "PreTrainedModel", config: "Config", *more: Any) -> "Strategy":
    """The named strategy around a model, on every rank."""
    from lockstep.training.strategy import factory_of

    return factory_of(config.spec)(model, config, *more)


def make_trainer(worker: Callable[..., Any], **settings: Any) -> "TorchTrainer":
    """Ray's trainer, which starts the ranks; each calls the worker. torchrun starts them itself."""
    from ray.train.torch import TorchTrainer

    return TorchTrainer(worker, **settings)


def main() -> int:
    def body() -> int:
        strategy, rest = split(sys.argv[1:])
        return launch(strategy, make_strategy, make_trainer, rest)

    return run_program("lockstep.train", body)


if __name__ == "__main__":
    startup.end(main())
