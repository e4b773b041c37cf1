"""Patches that last as long as a run, for planted faults and the handles that they use."""

import contextlib
import itertools
from collections.abc import Callable
from types import ModuleType
from typing import Any
from unittest import mock

from lockstep.config import Config
from lockstep.inputs.data import Inputs

# Of one micro batch, as strategies have it: (input_ids, labels) -> loss, shape ().
LossFunction = Callable[..., Any]


class PatchedRun:
    """A run's configuration and inputs, and `patch`."""

    def __init__(self, config: Config, inputs: Inputs, stack: contextlib.ExitStack):
        self.config, self.inputs, self._stack = config, inputs, stack

    def patch(self, target: object, attribute: str, replacement: object) -> None:
        """Replace an attribute until the run ends."""
        self._stack.enter_context(mock.patch.object(target, attribute, replacement))


def around(
    target: object,
    method: str,
    *,
    before: Callable[[int], None] | None = None,
    after: Callable[[int], None] | None = None,
) -> None:
    """Call before(step) and after(step) around every call of an object's method; steps count from 1."""
    real, steps = getattr(target, method), itertools.count(1)

    def wrapped(*arguments: Any) -> Any:
        step = next(steps)
        if before:
            before(step)
        result = real(*arguments)
        if after:
            after(step)
        return result

    setattr(target, method, wrapped)


def wrap_loss(strategy: Any, wrap: Callable[[LossFunction], LossFunction]) -> None:
    """From now on the strategy computes wrap(loss function)(input_ids, labels)."""
    strategy.loss = wrap(strategy.loss)


def scale_backward(strategy: Any, factor: Callable[[int], float]) -> None:
    """Multiply the gradient of every loss with factor(number of the call, from 0). The loss itself stays right."""
    calls = itertools.count()

    def wrap(real: LossFunction) -> LossFunction:
        def scaled(*arguments: Any) -> Any:
            loss = real(*arguments)
            return loss + (factor(next(calls)) - 1) * (loss - loss.detach())

        return scaled

    wrap_loss(strategy, wrap)


def reduce_again(
    run: PatchedRun, module: ModuleType, *, calls_per_loss: int, which: int, row: int | None = None
) -> None:
    """Do one of the all-reduces of a loss function twice (of one `row` only); its module calls torch.distributed as `dist`."""
    real, calls = module.dist, itertools.count()

    class Twice:
        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

        def all_reduce(self, tensor: Any, *arguments: Any, **options: Any) -> None:
            real.all_reduce(tensor, *arguments, **options)
            if next(calls) % calls_per_loss == which:
                real.all_reduce(tensor if row is None else tensor[row], *arguments, **options)

    run.patch(module, "dist", Twice())
