"""The learning rate of every step, from a configuration, live or recorded. Nothing here imports torch.

    rate = learning_rate x min(1, step / warmup_steps) x shape(progress)        steps count from 1
    shape = 1 (constant), or (1 + cos(pi progress)) / 2 (cosine, arXiv 1608.03983 without restarts)

`progress` goes from 0 in the first step after the warm-up towards 1; the last step still has a rate above 0. A run that stops before its
schedule ends has `schedule_steps`.
"""

import math
from collections.abc import Mapping
from typing import Any, Literal, get_args

from lockstep.ground.errors import UserError

Schedule = Literal["constant", "cosine"]
SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)


def changes(options: Mapping[str, Any]) -> bool:
    """Whether steps have different rates."""
    return options["lr_schedule"] != "constant" or options["warmup_steps"] > 0


def require(options: Mapping[str, Any], num_steps: int) -> None:
    """Raise UserError for a schedule that ends before the run does, or for --schedule_steps without a schedule."""
    if options["schedule_steps"] and not changes(options):
        raise UserError(
            f"--schedule_steps {options['schedule_steps']}: the rate is constant; leave it out, or add --lr_schedule cosine"
        )
    if 0 < options["schedule_steps"] < num_steps:
        raise UserError(
            f"--schedule_steps {options['schedule_steps']}: the run has {num_steps} steps, and no rate for those after the schedule's end; "
            "leave it out, or raise it"
        )


def rate_of(options: Mapping[str, Any], step: int, num_steps: int) -> float:
    """The rate of a step, which counts from 1, in a run of `num_steps`."""
    num_steps = options["schedule_steps"] or num_steps
    rate, warmup = options["learning_rate"], options["warmup_steps"]
    if step <= warmup:
        return rate * (step / warmup)
    if options["lr_schedule"] == "constant":
        return rate
    progress = (step - 1 - warmup) / (num_steps - warmup)
    return rate * (1 + math.cos(math.pi * progress)) / 2
