"""A fault being planted: what it may change, for as long as the run lasts."""

import contextlib
import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING
from unittest import mock

if TYPE_CHECKING:
    from lockstep.faults.handles import Handles


class Planting:
    """What a fault is given: the run it is planted in, the strategy's handles, and a way to patch."""

    handles: "Handles"

    def __init__(self, config, inputs, stack: contextlib.ExitStack):
        self.config, self.inputs, self._stack = config, inputs, stack

    def patch(self, target, attribute: str, replacement) -> None:
        """Replace an attribute until the run ends."""
        self._stack.enter_context(mock.patch.object(target, attribute, replacement))


def around(target, method: str, *, before: Callable | None = None, after: Callable | None = None) -> None:
    """Call before(step) and after(step) around every call of an object's method; steps count from 1."""
    real, steps = getattr(target, method), itertools.count(1)

    def wrapped(*arguments):
        step = next(steps)
        if before:
            before(step)
        result = real(*arguments)
        if after:
            after(step)
        return result

    setattr(target, method, wrapped)


def wrap_loss(strategy, wrap: Callable) -> None:
    """The strategy computes wrap(loss function)(input_ids, labels) from now on."""
    strategy.loss = wrap(strategy.loss)


def scale_backward(strategy, factor: Callable[[int], float]) -> None:
    """Multiply the gradient of every loss with factor(number of the call, from 0); its value stays right."""
    calls = itertools.count()

    def wrap(real):
        def scaled(*arguments):
            loss = real(*arguments)
            return loss + (factor(next(calls)) - 1) * (loss - loss.detach())

        return scaled

    wrap_loss(strategy, wrap)


def reduce_again(run: Planting, module, *, calls_per_loss: int, which: int, row: int | None = None) -> None:
    """Let one of the all-reduces of a loss function, in a module that calls it as `dist`, happen twice (of one row only)."""
    real, calls = module.dist, itertools.count()

    class Twice:
        def __getattr__(self, name):
            return getattr(real, name)

        def all_reduce(self, tensor, *arguments, **options):
            real.all_reduce(tensor, *arguments, **options)
            if next(calls) % calls_per_loss == which:
                real.all_reduce(tensor if row is None else tensor[row], *arguments, **options)

    run.patch(module, "dist", Twice())
