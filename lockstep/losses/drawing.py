"""The axes of figures of losses: steps are whole, and zero is zero."""

import math
from collections.abc import Iterable
from typing import Any


def whole_steps(axes: Any) -> None:
    """Ticks at whole steps alone, however few there are."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 2.5, 5, 10], integer=True))


def from_zero(axes: Any, values: Iterable[float]) -> None:
    """A vertical axis from 0, for values that are not negative: linear up to the smallest that is not zero, then logarithmic."""
    positive = [value for value in values if 0 < value < math.inf]
    if positive:
        threshold = 10.0 ** math.floor(math.log10(min(positive)))
        axes.set_yscale("symlog", linthresh=threshold, linscale=0.5)
        axes.set_ylim(-threshold / 4, 2 * max(positive))  # a marker at 0 is whole
