"""Planted bugs: the catalogue, and how one is planted in a run."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from lockstep import strategies
from lockstep.config import Config, Spec
from lockstep.deepspeed import faults as _of_deepspeed  # noqa: F401
from lockstep.errors import UserError
from lockstep.faults import (  # noqa: F401
    accumulation,
    average,
    checkpointing,
    clipping,
    context_parallel,
    data,
    data_parallel,
    optimizer,
    pipeline,
    precision,
    sequence_parallel,
    sharding,
    tensor_parallel,
    weights,
)
from lockstep.faults.catalogue import CATALOGUE, Fault, Planter
from lockstep.faults.planting import Planting
from lockstep.inputs import architectures, user_file
from lockstep.inputs.data import Inputs
from lockstep.inputs.shapes import describe

if TYPE_CHECKING:
    from lockstep.training.strategy import MakeStrategy, Strategy


def applies_to(fault: Fault, spec: Spec) -> bool:
    """Whether a strategy has the axes and the handles that a fault needs."""
    offered = strategies.load(spec.handles).offered()
    if fault.only not in ("", spec.name):
        return False
    return set(fault.axes) <= set(spec.axes) and set(fault.needs) <= offered


@contextlib.contextmanager
def planted(
    name: str | None, config: Config, inputs: Inputs, make_strategy: "MakeStrategy"
) -> Iterator["MakeStrategy"]:
    """Yields make_strategy, or, given the name of a fault or path/to/file.py:FUNCTION, one that plants it.

    The loop's own guards (weights, batches, contract) then do not stop the run. They write what they find to guards.txt beside the loss
    history: the verdict has to see the fault without them. Raises UserError for a fault that names modules which this model does not have,
    and at the end TrainingFailure for one whose replacements the run did not use.
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
        _disarm_guards(stack, config.loss_output_dir / "guards.txt")
        yield _planting(planter, planting, make_strategy)
        planting.require_used(name)


def _require_modules(fault: Fault, config: Config, inputs: Inputs) -> None:
    own, here = (
        describe(each).names for each in (architectures.resolve(fault.model)[0], inputs.architecture)
    )
    if fault.named and (own.layers, own.embedding) != (here.layers, here.embedding):
        raise UserError(
            f"{fault.name} names modules of {fault.model}, which {config.model_name} does not have; choose another fault"
        )


def _planting(planter: Planter, planting: Planting, make_strategy: "MakeStrategy") -> "MakeStrategy":
    """make_strategy with a fault."""
    plant = planter(planting)

    def make(*arguments: Any) -> "Strategy":
        next(plant)
        strategy = planting.handles.strategy = make_strategy(*arguments)
        with contextlib.suppress(StopIteration):
            plant.send(strategy)
        return strategy

    return make


def _disarm_guards(stack: contextlib.ExitStack, path: Path) -> None:
    import torch.distributed as dist

    from lockstep.errors import TrainingFailure
    from lockstep.training import loop as training

    def noting(guard: Callable[..., None]) -> Callable[..., None]:
        def noted(*arguments: Any) -> None:
            try:
                guard(*arguments)
            except TrainingFailure as failure:
                if dist.get_rank() == 0:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    with open(path, "a", encoding="utf-8") as file:
                        file.write(f"{failure}\n")

        return noted

    for guard in ("stop_together", "require_right_batches"):
        stack.enter_context(mock.patch.object(training, guard, noting(getattr(training, guard))))
