"""Do the losses of a strategy converge as the control's do? Several seeds each, and two tests.

[converging]
control = "fsdp"              # the run that the others are compared with
twin = "ulp"                  # a run of DDP with noise_control = true, from weights perturbed by one ulp: how far rounding moves a loss
second_twin = "eager"         # another run that computes the same, with other rounding errors: how much that varies
control_seeds = 10            # seeds of these three. A seed sets the initial weights and the order of the data
seeds = 3                     # seeds of each other run, the first ones
window = 100                  # steps whose mean loss is compared
false_alarm_rate = 0.01       # of a correct run, in all windows of both tests together

With x the mean loss of a run in a window, n = `seeds`, and m = `control_seeds` - n other seeds:

    other seeds    mean(x) - mean(x of the control with the m other seeds)               spread: of the latter
    same seeds     mean(log(d / d of the twin)) - mean(log(d of the second twin / d of the twin) with the m other seeds)
                                                                                         spread: of the latter, the largest window's

d is the largest |x - x of the control with the same seed| so far, at least two float32 ulps of the loss. How fast rounding
errors grow differs from seed to seed, so that d is compared with that of the twin with the same seed, as a ratio. A run that
is nearer than the twin is right.

If the run is correct and what is averaged is normally distributed, difference / (spread sqrt(1/n + 1/m)) follows Student's t
distribution with m - 1 degrees of freedom. An alarm is a window in which it exceeds the quantile of
false_alarm_rate / (2 x number of windows), two-sided for other seeds, one-sided for the same.
"""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, islice
from typing import Annotated

import numpy as np
from pydantic import Field

from lockstep.ground.schemas import Name, Strict

OTHER, SAME = "other seeds", "same seeds"
FEWEST_OTHERS = 4  # seeds of the control beside those of a run: a spread of fewer says little
MOST_TRIALS = 500  # of the count of false alarms
# Between the losses of two correct runs in their first steps (lockstep/verdict/loss_tolerance.py, MEAN_ULPS)
ULPS = 2
Losses = np.ndarray  # (seeds, steps) or (seeds, windows)


class Converging(Strict):
    """The table of a study."""

    control: Name
    twin: Name
    second_twin: Name
    control_seeds: Annotated[int, Field(ge=6, le=100)] = 10
    seeds: Annotated[int, Field(ge=2, le=50)] = 3
    window: Annotated[int, Field(ge=1)] = 100
    false_alarm_rate: Annotated[float, Field(gt=0, lt=1)] = 0.01

    @property
    def roles(self) -> tuple[str, str, str]:
        """The runs that others are judged by."""
        return self.control, self.twin, self.second_twin


@dataclass(frozen=True)
class Outcome:
    """What one of the two tests says of a run."""

    test: str
    # Of each window, in nats; for the same seeds as a multiple of the twin's
    differences: list[float]
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


def judge(
    told: Converging, run: Losses, own: list[int], control: Losses, twin: Losses, second: Losses
) -> list[Outcome]:
    """Make both tests of one run. All losses are means of windows, (seeds, windows); the run may have fewer windows.

    `own` are the seeds of the run, as indices of those of control and twins.
    """
    windows = run.shape[1]
    others = [seed for seed in range(len(control)) if seed not in own]
    n, m = len(own), len(others)
    rate = told.false_alarm_rate / 2 / control.shape[1]
    width = math.sqrt(1 / n + 1 / m)
    unpaired = run.mean(0) - control[others].mean(0)[:windows]
    spread = control[others].std(0, ddof=1)[:windows]
    of_twin = drift(twin, control)
    # Logs of the ratios to the twin
    expected = drift(second, control)[others] - of_twin[others]
    ratios = drift(run, control[own][:, :windows]) - of_twin[own][:, :windows]
    limits = quantile(2 * rate, m - 1) * expected.std(0, ddof=1).max() * width + expected.mean(0)[:windows]
    return [
        _outcome(told, OTHER, unpaired, quantile(rate, m - 1) * spread * width),
        # as factors: how many times as far from the control as the twin
        _outcome(told, SAME, np.exp(ratios.mean(0)), np.exp(limits)),
    ]


def drift(run: Losses, control: Losses) -> Losses:
    """Log of how far a run has been from the control so far, window by window: (seeds, windows).

    It is at least the log of two ulps of a loss.
    """
    size = np.abs(control).astype(np.float32)
    ulps = ULPS * (np.nextafter(size, np.float32(np.inf)) - size).astype(np.float64)
    gap = np.abs(run - control)
    return np.log(np.maximum.accumulate(np.maximum(np.where(np.isnan(gap), np.inf, gap), ulps), axis=1))


def _outcome(told: Converging, test: str, differences: Losses, tolerated: Losses) -> Outcome:
    # A loss that is not a number is an alarm
    alarms = np.flatnonzero(~(np.abs(differences) <= tolerated))
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


def alarms_among_correct_runs(
    told: Converging, control: Losses, twin: Losses, second: Losses
) -> dict[str, tuple[int, int]]:
    """Test -> (alarms, trials), of choices of `seeds` seeds of the second twin, each as if it were a run to be judged.

    These are all choices, or MOST_TRIALS random ones if there are more.
    """
    counts = {OTHER: 0, SAME: 0}
    trials = list(islice(_choices(len(control), told.seeds), MOST_TRIALS))
    for own in trials:
        for outcome in judge(told, second[list(own)], list(own), control, twin, second):
            counts[outcome.test] += outcome.found_after is not None
    return {test: (alarms, len(trials)) for test, alarms in counts.items()}
