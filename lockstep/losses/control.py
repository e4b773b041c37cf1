"""The control run: DDP once more, from weights perturbed by one ulp. When does it measure rounding errors, and when not?

Rounding errors enter a run in its first step, and training amplifies them step by step. A difference that jumps, stands alone,
is large from the start or grows without end has another cause: damage, or unstable training. It is no measure for other runs.
docs/precision.md says what correct runs do and how these bounds were chosen.
"""

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass

CONTROL_FACTOR = 8  # twice WORST_RATIO
WORST_RATIO = 4  # the margin by which correct runs have exceeded one control run
NEIGHBOURS = 5  # steps before and after a step with which its gap is compared
AMPLIFICATION = 400  # of the noise of the first loss; seen where the control was a measure: 290
USUAL = 10  # an amplification that is usual in any run, however short
POWER = 0.5  # of the range of the loss; a larger tolerance would pass a run that learns nothing
_AGAIN = (
    "one of the two histories is wrong, or training is unstable: run both again, or lower --learning_rate"
)
_CALMER = "lower --learning_rate or --debug_steps"


@dataclass(frozen=True)
class Noise:
    """The rounding noise of one quantity in a run's first step, and limits of the control's gaps."""

    what: str
    floor: float  # by which two correct runs may differ in the first step
    first: float  # by which a control run may: its weights differ, too
    growth: float  # a step may have so many times the largest gap so far
    alone: float  # and so many times the largest of its NEIGHBOURS; stable training reaches a third of both
    unit: str


def loss_gap(mine: dict, theirs: dict) -> float:
    """Difference of two losses in nats."""
    return abs(theirs["loss"] - mine["loss"])


def norm_gap(mine: dict, theirs: dict) -> float:
    """Difference of two gradient norms, relative to the smaller: relative to the larger it could never exceed 1."""
    return abs(theirs["grad_norm"] - mine["grad_norm"]) / (
        min(mine["grad_norm"], theirs["grad_norm"]) or math.nan
    )


def envelope(gaps: list[float]) -> list[float]:
    """How far rounding errors have moved the control run by each step: the third largest gap so far, or that of this step or the
    last one if it is larger.

    So one outlier, which a single batch can cause, raises the bound of its own step and the next one only. The first three steps share
    their largest gap, because a single draw can be small by chance.
    """
    largest: list[float] = []
    found = []
    for step, gap in enumerate(gaps):
        heapq.heappush(largest, gap)
        if len(largest) > 3:
            heapq.heappop(largest)
        found.append(max(gaps[:3]) if step < 3 else max(largest[0], gaps[step - 1], gap))
    return found


def ratios(gaps: list[float], noise: Noise) -> Iterator[tuple[float, float]]:
    """For every step: its gap over the largest before it, and over the largest of its neighbours (at least the noise)."""
    so_far = noise.floor
    for step, gap in enumerate(gaps):
        around = [*gaps[max(0, step - NEIGHBOURS) : step], *gaps[step + 1 : step + 1 + NEIGHBOURS]]
        yield gap / so_far, gap / max([noise.floor, *around])
        so_far = max(so_far, gap)


def damage(gaps: list[float], noise: Noise) -> str:
    """Why these gaps are not the effect of rounding errors, in words, or ""."""
    for step, (gap, (growth, alone)) in enumerate(zip(gaps, ratios(gaps, noise), strict=True), start=1):
        here = f"in step {step} the control's {noise.what} is {gap:.1e}{noise.unit} from DDP's"
        if step == 1 and not gap <= noise.first:  # "not <=": a NaN is no gap of rounding either
            return f"{here}; weights perturbed by one ulp move it by at most {noise.first:.1e}; {_AGAIN}"
        if not growth <= noise.growth:
            less = f"training amplifies rounding errors by less than {noise.growth:.0f} in a step"
            return f"{here}, {growth:.0f} times the largest difference before; {less}; {_AGAIN}"
        if not alone <= noise.alone:
            return f"{here}, {alone:.0f} times its neighbours; a single batch does less than {noise.alone:.0f}; {_AGAIN}"
    return ""


def instability(gaps: list[float], noise: Noise, losses: list[float]) -> str:
    """Why rounding errors, amplified like this, are no measure for other runs, in words, or ""."""
    worst = max(gaps)
    if worst > AMPLIFICATION * noise.floor:
        more = f"more than {AMPLIFICATION} times the first loss's noise"
        return f"training is unstable: it amplifies one ulp to {worst:.1e} nats, {more}; {_CALMER}"
    scope = max(losses) - min(losses)
    if worst > USUAL * noise.floor and CONTROL_FACTOR * worst > POWER * scope:
        return f"a tolerance of {CONTROL_FACTOR * worst:.1e} nats is more than half the range of the loss, {scope:.1e}, so it proves nothing; {_CALMER}"
    return ""
