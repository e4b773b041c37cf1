"""The catalogue of planted bugs: each a small patch of a live strategy or of a library call, in the real distributed run.

A fault is a generator function. What stands before its `yield` happens before the strategy is built, what stands after
it to the strategy that the `yield` gives. Its docstring says what went wrong in a system that people used.
"""

import contextlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from lockstep.config import SHARDED

BUG_CLASSES = (
    "TP reduction missing", "TP reduction doubled", "DP reduction missing", "wrong group or scale",
    "grad norm, clipping", "accumulation, normalisation", "data", "random state", "weights", "precision, optimizer",
)  # fmt: skip


@dataclass(frozen=True)
class Fault:
    """One planted bug and what the verdict has to say of it."""

    name: str
    story: str  # one sentence
    seen_in: str  # OWNER/REPO number of a public thread
    bug_class: str
    cause: str  # the cause that lockstep/diagnose.py must name first
    first: str  # the first tensor that it breaks
    step: int  # in this step
    strategies: tuple[str, ...]
    model: str
    arguments: tuple[str, ...]  # further flags that it needs to do anything
    precisions: tuple[str, ...]  # in which it does anything: what rounds to bfloat16 does so in fp32 runs
    mesh: tuple[int, int]  # (dp, tp)
    plant: Callable


CATALOGUE: dict[str, Fault] = {}


def fault(
    *, seen_in: str, bug_class: str, cause: str, first: str, step: int = 1, strategies: tuple[str, ...] = SHARDED,
    model: str = "tiny-qwen2", arguments: tuple[str, ...] = (), precisions: tuple[str, ...] = ("fp32", "autocast"),
    mesh: tuple[int, int] = (2, 2),
) -> Callable:  # fmt: skip
    """Enter a generator function into the catalogue under its own name."""
    if bug_class not in BUG_CLASSES:
        raise ValueError(f"{bug_class!r} is no class of bugs; choose from {BUG_CLASSES}")

    def enter(plant: Callable) -> Callable:
        story = " ".join(plant.__doc__.split())
        CATALOGUE[plant.__name__] = Fault(
            plant.__name__, story, seen_in, bug_class, cause, first, step, strategies, model, arguments, precisions, mesh, plant
        )
        return plant

    return enter


class Planting:
    """What a fault is given: the run it is planted in, and ways to change things for as long as the run lasts."""

    def __init__(self, config, inputs, stack: contextlib.ExitStack):
        self.config, self.inputs, self._stack = config, inputs, stack
        self.autotp = config.strategy == "deepspeed"

    def patch(self, target, attribute: str, replacement) -> None:
        self._stack.enter_context(mock.patch.object(target, attribute, replacement))

    @property
    def strategy_module(self):
        """The module of the strategy, to patch what it imported."""
        import autotp_strategy
        import fsdp_strategy

        return autotp_strategy if self.autotp else fsdp_strategy

    def gradients(self, strategy):
        """(name, live tensor) of the parts of the averaged gradient that this rank holds, between backward and update."""
        for name, parameter in strategy.model.named_parameters():
            if not self.autotp:
                yield name, parameter.grad.to_local()
            elif parameter._hp_mapping is not None:  # this rank's share of the optimizer has a part of it
                yield name, parameter._hp_mapping.get_lp_grad_fragment(parameter._index_in_param_group)

    def weights(self, strategy):
        """(name, live tensor) of the weights that this rank holds; under ZeRO-1 the working copy and the master."""
        for name, parameter in strategy.model.named_parameters():
            if not self.autotp:
                yield name, parameter.detach().to_local()
                continue
            yield name, parameter.data
            if parameter._hp_mapping is not None:
                yield name, parameter._hp_mapping.get_hp_fragment()

    def tp_group(self, strategy):
        return strategy._tp_group() if self.autotp else strategy.device_mesh["tp"].get_group()


def backward_scaled(run: Planting, factor: Callable[[int], float]):
    """A fault that multiplies the gradient of every loss with factor(number of the call, from 0); its value is right."""
    calls, real = itertools.count(), run.strategy_module.causal_lm_loss

    def scaled(*arguments):
        loss = real(*arguments)
        return loss + (factor(next(calls)) - 1) * (loss - loss.detach())

    run.patch(run.strategy_module, "causal_lm_loss", scaled)
    yield


def around(strategy, method: str, *, before: Callable | None = None, after: Callable | None = None) -> None:
    """Call before(step) and after(step) around every call of the strategy's method; steps count from 1."""
    real, steps = getattr(strategy, method), itertools.count(1)

    def wrapped(*arguments):
        step = next(steps)
        if before:
            before(step)
        result = real(*arguments)
        if after:
            after(step)
        return result

    setattr(strategy, method, wrapped)


@contextlib.contextmanager
def planted(name: str | None, config, inputs, make_strategy: Callable):
    """Yields make_strategy, or, given the name of a fault, one that plants it.

    The loop's own guards (weights, batches, contract) then note what they find in guards.txt beside the loss history
    instead of stopping the run: the verdict has to see the fault without them.
    """
    if name is None:
        yield make_strategy
        return
    with contextlib.ExitStack() as stack:
        planting = Planting(config, inputs, stack)
        _disarm_guards(planting, config.loss_output_dir / "guards.txt")
        plant = CATALOGUE[name].plant(planting)

        def make(model, config, mesh, device):
            next(plant)
            strategy = make_strategy(model, config, mesh, device)
            with contextlib.suppress(StopIteration):
                plant.send(strategy)
            return strategy

        yield make


def _disarm_guards(planting: Planting, path: Path) -> None:
    import torch.distributed as dist

    from lockstep import training
    from lockstep.errors import TrainingFailure

    def noting(guard: Callable) -> Callable:
        def noted(*arguments) -> None:
            try:
                guard(*arguments)
            except TrainingFailure as failure:
                if dist.get_rank() == 0:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    with open(path, "a", encoding="utf-8") as file:
                        file.write(f"{failure}\n")

        return noted

    for guard in ("stop_together", "_require_right_batches"):
        planting.patch(training, guard, noting(getattr(training, guard)))


from lockstep.faults import accumulation, clipping, data, data_parallel, optimizer, precision, tensor_parallel, weights  # noqa: E402, F401
