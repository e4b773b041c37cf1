"""Do the losses of a strategy converge as the control's do? Several seeds each, and two tests.

[converging]
control = "fsdp"              # the run that the others are compared with
twin = "ulp"                  # a run of DDP with noise_control = true: from weights perturbed by one ulp. It shows how far rounding moves a loss
control_seeds = 10            # seeds of these two. A seed sets the initial weights and the order of the data
seeds = 3                     # seeds of each other run, the first ones
window = 100                  # steps whose mean loss is compared
false_alarm_rate = 0.01       # of a correct run, in all windows of both tests together

With x the mean loss of a run in a window, n = `seeds`, and m = `control_seeds` - n other seeds:

    other seeds    mean(x) - mean(x of the control with the m other seeds)     scale  s sqrt(1/n + 1/m)     s: spread of the latter
    same seeds     mean(x - x of the control with the same seed)               scale  r / sqrt(n)           r: root mean square of
                                                                               twin - control with the m other seeds, the largest so far

If the run is correct and x is normally distributed, difference / scale follows Student's t distribution: with m - 1 degrees of freedom for
other seeds, and m for the same seeds. An alarm is a window in which it exceeds the two-sided quantile of
false_alarm_rate / (2 x number of windows). Taking the largest r so far makes alarms rarer.
"""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, islice
from typing import Annotated

import numpy as np
from pydantic import Field

from lockstep.schemas import Name, Strict

OTHER, SAME = "other seeds", "same seeds"
FEWEST_OTHERS = 4  # seeds of the control beside those of a run: a spread of fewer says little
MOST_TRIALS = 500  # of the count of false alarms
Losses = np.ndarray  # (seeds, steps) or (seeds, windows)


class Converging(Strict):
    """The table of a study."""

    control: Name
    twin: Name
    control_seeds: Annotated[int, Field(ge=6, le=100)] = 10
    seeds: Annotated[int, Field(ge=2, le=50)] = 3
    window: Annotated[int, Field(ge=1)] = 100
    false_alarm_rate: Annotated[float, Field(gt=0, lt=1)] = 0.01


@dataclass(frozen=True)
class Outcome:
    """What one of the two tests says of a run."""

    test: str
    differences: list[float]  # of each window, in nats
    tolerated: list[float]
    found_after: int | None  # steps, up to the end of the first window with an alarm

    @property
    def worst(self) -> float:
        """The largest difference, as a multiple of what is tolerated."""
        pairs = zip(self.differences, self.tolerated, strict=True)
        return max(abs(d) / t if t else math.inf if d else 0.0 for d, t in pairs)


@functools.cache
def quantile(probability: float, freedom: int) -> float:
    """The t that Student's distribution with so many degrees of freedom exceeds, on either side, with this probability.

    P(|T| <= sqrt(freedom) tan(a)) is the integral of cos^(freedom - 1) from 0 to a, over that to pi / 2.
    """
    angles = np.linspace(0, math.pi / 2, 200_001)
    density = np.cos(angles) ** (freedom - 1)
    inside = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    return math.sqrt(freedom) * math.tan(np.interp(1 - probability, inside / inside[-1], angles))


def in_windows(losses: Losses, window: int) -> Losses:
    """Mean losses of whole windows: (seeds, steps) -> (seeds, steps // window)."""
    whole = losses[:, : losses.shape[1] // window * window]
    return whole.reshape(len(losses), -1, window).mean(axis=2)


def judge(told: Converging, run: Losses, own: list[int], control: Losses, twin: Losses) -> list[Outcome]:
    """Both tests of one run. All losses are means of windows, (seeds, windows); the run may have fewer windows.

    `own` are the seeds of the run, as places among those of control and twin.
    """
    number = run.shape[1]
    others = [seed for seed in range(len(control)) if seed not in own]
    n, m = len(own), len(others)
    each = told.false_alarm_rate / 2 / control.shape[1]
    rounding = (twin - control)[others]
    unpaired = run.mean(0) - control[others].mean(0)[:number]
    paired = (run - control[own][:, :number]).mean(0)
    spread = control[others].std(0, ddof=1)[:number] * math.sqrt(1 / n + 1 / m)
    rms = np.maximum.accumulate(np.sqrt(np.square(rounding).mean(0)))[:number] / math.sqrt(n)
    return [
        _outcome(told, OTHER, unpaired, quantile(each, m - 1) * spread),
        _outcome(told, SAME, paired, quantile(each, m) * rms),
    ]


def _outcome(told: Converging, test: str, differences: Losses, tolerated: Losses) -> Outcome:
    alarms = np.flatnonzero(~(np.abs(differences) <= tolerated))  # a loss that is not a number is one
    after = (int(alarms[0]) + 1) * told.window if len(alarms) else None
    return Outcome(test, differences.tolist(), tolerated.tolist(), after)


def _choices(total: int, number: int) -> Iterator[tuple[int, ...]]:
    """All choices of so many of `total`; if they are too many, random ones."""
    if math.comb(total, number) <= MOST_TRIALS:
        yield from combinations(range(total), number)
        return
    generator = np.random.default_rng(0)
    while True:
        yield tuple(generator.choice(total, number, replace=False).tolist())


def alarms_among_correct_runs(told: Converging, control: Losses, twin: Losses) -> dict[str, tuple[int, int]]:
    """Test -> (alarms, trials): every choice of `seeds` seeds of the twin, as if it were a run to be judged."""
    counts = {OTHER: 0, SAME: 0}
    trials = list(islice(_choices(len(control), told.seeds), MOST_TRIALS))
    for own in trials:
        for outcome in judge(told, twin[list(own)], list(own), control, twin):
            counts[outcome.test] += outcome.found_after is not None
    return {test: (alarms, len(trials)) for test, alarms in counts.items()}
