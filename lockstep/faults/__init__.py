"""Planted bugs: the catalogue, and how one is planted in a run."""

import contextlib
import functools
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from lockstep.faults.catalogue import CATALOGUE, Fault
from lockstep.faults.planting import Planting
from lockstep.ground import user_file
from lockstep.ground.errors import UserError
from lockstep.inputs import architectures
from lockstep.inputs.data import Inputs
from lockstep.inputs.shapes import describe
from lockstep.plan import strategies
from lockstep.plan.config import Config, Spec

if TYPE_CHECKING:
    from lockstep.training.strategy import MakeStrategy, Strategy


# Each file enters its faults into the catalogue
for _file in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_file.name}")


def applies_to(fault: Fault, spec: Spec) -> bool:
    """Whether a strategy has the axes and the handles that a fault needs."""
    offered = dir(strategies.load(spec.handles))
    return (
        fault.only in ("", spec.name)
        and set(fault.axes) <= set(spec.axes)
        and set(fault.needs) <= set(offered)
    )


@contextlib.contextmanager
def planted(
    name: str | None, config: Config, inputs: Inputs, make_strategy: "MakeStrategy"
) -> Iterator["MakeStrategy"]:
    """Yield make_strategy or, given the name of a fault or path/to/file.py:FUNCTION, one that plants it.

    The loop's own guards (weights, batches, contract) then do not stop the run. They write what they find to guards.txt
    beside the loss history: the verdict has to see the fault without them. Raises UserError for a fault that names
    modules which this model does not have, and at the end TrainingFailure for one whose replacements the run did not use.
    """
    if name is None:
        yield make_strategy
        return
    if name in CATALOGUE:
        _require_modules(CATALOGUE[name], config, inputs)
    planter = CATALOGUE[name].plant if name in CATALOGUE else user_file.load(name, "fault")
    with contextlib.ExitStack() as stack:
        planting = Planting(config, inputs, stack)
        planting.handles = strategies.load(config.spec.handles)(planting)
        plant = planter(planting)
        if not inspect.isgenerator(plant):
            raise UserError(
                f"{name}: a fault is a generator function, which yields where the strategy is built"
            )

        def make(*arguments: Any) -> "Strategy":
            next(plant)
            planting.strategy = make_strategy(*arguments)
            with contextlib.suppress(StopIteration):
                plant.send(planting.strategy)
            return planting.strategy

        _disarm_guards(stack, config.loss_output_dir / "guards.txt")
        yield make
        planting.require_used(name)


def _require_modules(fault: Fault, config: Config, inputs: Inputs) -> None:
    """Raise UserError if the fault names modules that the run's model does not have."""
    named, actual = (
        describe(model).names for model in (architectures.resolve(fault.model)[0], inputs.architecture)
    )
    if fault.named and (named.layers, named.embedding) != (actual.layers, actual.embedding):
        raise UserError(
            f"{fault.name} names modules of {fault.model}, which {config.model_name} does not have; choose another fault"
        )


def _disarm_guards(stack: contextlib.ExitStack, path: Path) -> None:
    """Let the loop's guards append what they find to a file and not stop the run, until the stack is closed."""
    import torch.distributed as dist

    from lockstep.ground.errors import TrainingFailure
    from lockstep.training import agreement, loop, starting_weights

    def noted(guard: Callable[..., None], *arguments: Any) -> None:
        try:
            guard(*arguments)
        except TrainingFailure as failure:
            if dist.get_rank() == 0:
                path.parent.mkdir(parents=True, exist_ok=True)
                with open(path, "a", encoding="utf-8") as file:
                    file.write(f"{failure}\n")

    for module, name in (
        (loop, "stop_together"),
        (loop, "require_right_batches"),
        (agreement, "stop_together"),
        (starting_weights, "stop_together"),
    ):
        disarmed = functools.partial(noted, getattr(module, name))
        stack.enter_context(mock.patch.object(module, name, disarmed))
