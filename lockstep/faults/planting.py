"""The run that a fault is planted in: replacements that last as long as it does, and the handles of its strategy.

Everything that a fault replaces goes through its run, which records whether it was used. What nobody calls plants
nothing, or something else.
"""

import contextlib
import inspect
import itertools
import sys
import types
from collections.abc import Callable, Generator
from types import ModuleType
from typing import Any
from unittest import mock

import torch

from lockstep.ground.collective import gather_objects
from lockstep.ground.errors import TrainingFailure
from lockstep.inputs.data import Inputs
from lockstep.plan import strategies
from lockstep.plan.config import Config

Replacing = Callable[[], contextlib.AbstractContextManager[object]]
# A fault: before its `yield` the strategy is not built; `yield` gives it, of whatever class.
Plant = Generator[None, Any, None]


class Handles:
    """What faults can change in one strategy. Its spec names a class derived from this one, with a public method for each.

    A fault says which methods it needs, never in which strategy. It is not planted where the class lacks one.
    """

    def __init__(self, run: "Planting"):
        self.run = run

    @property
    def strategy(self) -> Any:
        return self.run.strategy


class Planting:
    """A run's configuration and inputs, its strategy's handles, and replacements in live objects that last until it ends."""

    handles: Any
    strategy: Any  # once it is built

    def __init__(self, config: Config, inputs: Inputs, stack: contextlib.ExitStack):
        self.config, self.inputs, self._stack = config, inputs, stack
        self._used: dict[str, bool] = {}

    def defining(self, name: str) -> ModuleType:
        """Return the module that has `name`: that of the strategy's class, or of a class that it is derived from."""
        classes = inspect.getmro(strategies.load(self.config.spec.factory))
        return next(module for cls in classes if name in vars(module := sys.modules[cls.__module__]))

    def patch(self, target: object, attribute: str, replacement: object) -> None:
        """Replace an attribute. A function must be called at least once, anything else read."""
        self._stack.enter_context(self._replacing(target, attribute, replacement)())

    def patch_during(
        self, owner: object, method: str, target: object, attribute: str, replacement: object
    ) -> None:
        """Replace an attribute of `target` whenever owner.method runs, and no longer."""
        real, replacing = getattr(owner, method), self._replacing(target, attribute, replacement)

        def wrapped(*arguments: Any, **options: Any) -> Any:
            with replacing():
                return real(*arguments, **options)

        self.patch(owner, method, wrapped)

    def patch_dist(self, module: ModuleType, function: str, replacement: Callable[..., Any]) -> None:
        """Replace a function of torch.distributed for one module alone, which calls it as `dist.FUNCTION`."""
        functions = {
            **vars(module.dist),
            function: self.recorded(f"{module.__name__}.dist.{function}", replacement),
        }
        self._stack.enter_context(mock.patch.object(module, "dist", types.SimpleNamespace(**functions)))

    def recorded(self, what: str, replacement: Callable[..., Any]) -> Callable[..., Any]:
        """Return `replacement`, which must then be called at least once: for a hook, or anything else given to a library.

        `what` names it in the error.
        """
        mark = self._record(what)

        def called(*arguments: Any, **options: Any) -> Any:
            mark()
            return replacement(*arguments, **options)

        return called

    def change_output(self, module: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Let a module of the strategy's model return change(its output)."""
        recorded = self.recorded(f"the output of {module}", change)
        self.strategy.model.get_submodule(module).register_forward_hook(
            lambda _module, _inputs, output: recorded(output)
        )

    def change_weights(self, of: str, change: Callable[[torch.Tensor], object]) -> None:
        """Call change(tensor) for the live weights whose names begin with `of`, once, right before the first step.

        All checks of the weights have been made by then.
        """

        def at_start(step: int) -> None:
            if step == 1:
                with torch.no_grad():
                    for name, tensor in self.handles.weights():
                        if name.startswith(of):
                            change(tensor)

        self.around(self.strategy, "forward_backward", before=at_start)

    def change_gradients(self, change: Callable[[int, str, torch.Tensor], object]) -> None:
        """Call change(step, name, gradient) for this rank's shards between backward and update."""

        def after_backward(step: int) -> None:
            for name, gradient in self.handles.gradients():
                change(step, name, gradient)

        self.around(self.strategy, "forward_backward", after=after_backward)

    def undo_updates(self, of: Callable[[int, str], bool]) -> None:
        """After each update, put back the weights of this rank for which of(step, name) is true."""
        kept: list[tuple[torch.Tensor, torch.Tensor]] = []

        def keep(step: int) -> None:
            live = [tensor for name, tensor in self.handles.weights() if of(step, name)]
            kept[:] = [(tensor, tensor.clone()) for tensor in live]

        def put_back(_step: int) -> None:
            with torch.no_grad():
                for tensor, old in kept:
                    tensor.copy_(old)

        self.around(self.strategy, "update", before=keep, after=put_back)

    def around(
        self,
        target: object,
        method: str,
        *,
        before: Callable[[int], None] | None = None,
        after: Callable[[int], None] | None = None,
    ) -> None:
        """Call before(step) and after(step) around every call of an object's method; steps count from 1."""
        real, steps = getattr(target, method), itertools.count(1)

        def wrapped(*arguments: Any, **options: Any) -> Any:
            step = next(steps)
            if before:
                before(step)
            result = real(*arguments, **options)
            if after:
                after(step)
            return result

        self.patch(target, method, wrapped)

    def scale_backward(self, factor: Callable[[int], float]) -> None:
        """Multiply the gradient of every loss with factor(number of the call, from 0). The loss itself stays right."""
        real, calls = self.strategy.loss, itertools.count()

        def scaled(*arguments: Any) -> Any:
            loss = real(*arguments)
            return loss + (factor(next(calls)) - 1) * (loss - loss.detach())

        self.patch(self.strategy, "loss", scaled)

    def reduce_again(
        self, module: ModuleType, *, calls_per_loss: int, which: int, row: int | None = None
    ) -> None:
        """Do one of the all-reduces of a loss function twice, or of one `row` of its tensor only.

        `which` is its place, from 0, among the `calls_per_loss` of one loss. The module calls torch.distributed as `dist`.
        """
        real, calls = module.dist.all_reduce, itertools.count()

        def all_reduce(tensor: Any, *arguments: Any, **options: Any) -> None:
            real(tensor, *arguments, **options)
            if next(calls) % calls_per_loss == which:
                real(tensor if row is None else tensor[row], *arguments, **options)

        self.patch_dist(module, "all_reduce", all_reduce)

    def require_used(self, fault: str) -> None:
        """Raise TrainingFailure on every rank if a replacement was used on no rank. Collective."""
        by_rank = gather_objects(self._used)
        used = {name for replacements in by_rank for name, is_used in replacements.items() if is_used}
        unused = next((name for replacements in by_rank for name in replacements if name not in used), None)
        if unused:
            raise TrainingFailure(
                f"fault {fault}: its replacement of {unused} was never used, so it plants something else than it says; "
                "replace what the run uses"
            )

    def _replacing(self, target: object, attribute: str, replacement: object) -> Replacing:
        """Return what makes a context manager that replaces an attribute and records that the replacement is used."""
        what = f"{_name(target)}.{attribute}"
        if callable(replacement):
            recorded = self.recorded(what, replacement)
            return lambda: mock.patch.object(target, attribute, recorded)
        if isinstance(target, (type, ModuleType)):
            raise TypeError(f"{what}: only functions of a class or a module can be replaced")
        return self._holding(target, attribute, replacement, self._record(what))

    def _holding(self, target: object, attribute: str, value: object, mark: Callable[[], None]) -> Replacing:
        """Do so for a value: give the object a class of its own, whose property holds it and records that it is read."""
        cls, held = type(target), [value]

        def read(_: object) -> object:
            mark()
            return held[0]

        def write(_: object, new: object) -> None:
            held[0] = new

        derived = type(cls.__name__, (cls,), {attribute: property(read, write), "__module__": cls.__module__})

        @contextlib.contextmanager
        def holding() -> Any:
            target.__class__ = derived
            try:
                yield
            finally:
                target.__class__ = cls

        return holding

    def _record(self, what: str) -> Callable[[], None]:
        """Return what is to be called when the replacement of `what` is used.

        Replacements of one name are numbered, on all ranks in the same order.
        """
        names = (what if number == 1 else f"{what} ({number})" for number in itertools.count(1))
        name = next(name for name in names if name not in self._used)
        self._used[name] = False
        return lambda: self._used.update({name: True})


def _name(target: object) -> str:
    return getattr(target, "__qualname__", None) or getattr(target, "__name__", None) or type(target).__name__
