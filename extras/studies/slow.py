"""Planted faults of training that are too small to be seen in one step, but add up over many.

They are not in the catalogue, whose faults the tensors of the first steps must show. What finds them, if anything, is where
the losses of several runs end up (extras/studies/converging.py). A fault is a generator function, as in catalogue.py.
"""

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lockstep.faults.catalogue import Planter
from lockstep.faults.planting import Plant, Planting
from lockstep.ground.errors import UserError
from lockstep.inputs.data import Batches


@dataclass(frozen=True)
class Slow:
    """One fault, and what it does in one sentence."""

    name: str
    story: str
    plant: Planter


SLOW: dict[str, Slow] = {}


def slow(plant: Planter) -> Planter:
    """Enter a generator function under its own name."""
    SLOW[plant.__name__] = Slow(plant.__name__, " ".join((plant.__doc__ or "").split()), plant)
    return plant


def _round(tensor: torch.Tensor) -> None:
    tensor.copy_(tensor.to(torch.bfloat16))


def _scale_rate(run: Planting, factor: Any) -> None:
    """From now on the learning rate of step `step` is `factor(step)` times what the schedule says."""
    _patch_rate(run, lambda real, options, step, num_steps: real(options, step, num_steps) * factor(step))


def _patch_rate(run: Planting, rate: Any) -> None:
    """From now on the learning rate is `rate(what it was, options, step, num_steps)`."""
    from lockstep.plan import rates

    if not rates.changes(vars(run.config)):
        raise UserError("this fault changes the rate of later steps; add --lr_schedule or --warmup_steps")
    run.patch(rates, "rate_of", functools.partial(rate, rates.rate_of))


@slow
def rate_drifts(run: Planting) -> Plant:
    """The learning rate is multiplied with 1.0003 once more at every step."""
    _scale_rate(run, lambda step: 1.0003**step)
    yield


@slow
def rate_one_percent_low(run: Planting) -> Plant:
    """The learning rate is one percent too low at every step."""
    _scale_rate(run, lambda _step: 0.99)
    yield


@slow
def schedule_starts_again(run: Planting) -> Plant:
    """Half-way through, the schedule starts again with its warm-up, as after a resume that has lost the number of steps."""
    half = run.inputs.num_steps // 2
    _patch_rate(
        run,
        lambda real, options, step, num_steps: real(options, step - half if step > half else step, num_steps),
    )
    yield


@slow
def second_moments_in_bfloat16(run: Planting) -> Plant:
    """AdamW's second moments are rounded to bfloat16 after every step, which loses most of their small changes."""
    strategy = yield
    if run.config.optimizer != "adamw":
        raise UserError("this fault needs second moments; use --optimizer adamw")

    def round_all(_step: int) -> None:
        for state in run.handles.torch_optimizer().state.values():
            _round(state["exp_avg_sq"])

    run.around(strategy, "update", after=round_all)


@slow
def weights_in_bfloat16(run: Planting) -> Plant:
    """Weights are rounded to bfloat16 after every step, which loses updates of less than half an ulp."""
    strategy = yield

    def round_all(_step: int) -> None:
        for _, weight in run.handles.weights():
            _round(weight)

    run.around(strategy, "update", after=round_all)


@slow
def every_twentieth_update_lost(run: Planting) -> Plant:
    """The gradients of every twentieth step are zero when the optimizer steps."""
    strategy = yield

    def lose(step: int) -> None:
        for _, gradient in run.handles.gradients() if step % 20 == 0 else ():
            gradient.zero_()

    run.around(strategy, "update", before=lose)


@slow
def one_shard_in_a_thousand_repeated(run: Planting) -> Plant:
    """One shard of samples in a thousand is the shard that the same rank had in the step before."""
    _repeat(run, every=1000)
    yield


@slow
def one_shard_in_ten_repeated(run: Planting) -> Plant:
    """One shard of samples in ten is the shard that the same rank had in the step before."""
    _repeat(run, every=10)
    yield


def _repeat(run: Planting, *, every: int) -> None:
    if run.inputs.num_steps * run.config.dp_size < every:
        raise UserError(f"this fault repeats one shard in {every}, and the run has fewer; train more steps")
    real = Batches.windows

    def windows(batches: Batches, step: int, dp_rank: int) -> np.ndarray:
        number = step * batches.dp_size + dp_rank  # of the shard, among those of all ranks
        return real(batches, step - 1 if number % every == every - 1 and step else step, dp_rank)

    run.patch(Batches, "windows", windows)
