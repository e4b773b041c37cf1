"""Where the losses of a study's runs part: the largest difference within ranges of steps, beside what rounding errors alone do."""

from lockstep.dumps.history import History
from lockstep.verdict.loss_tolerance import loss_gap

ENDS = (1, 3, 10, 30, 100, 300, 1000, 3000, 10000)  # of the ranges


def ranges(steps: int) -> list[tuple[int, int]]:
    """(first, last) of the ranges that `steps` steps make."""
    ends = [*(end for end in ENDS if end < steps), steps]
    return [(before + 1, end) for before, end in zip([0, *ends], ends, strict=False)]


def largest(one: History, other: History, first: int, last: int) -> float:
    """The largest difference of the losses (nats) in the steps from `first` to `last`."""
    pairs = zip(one.steps[first - 1 : last], other.steps[first - 1 : last], strict=True)
    return max(loss_gap(*pair) for pair in pairs)


def lines(pairs: dict[str, tuple[History, History]]) -> list[list[str]]:
    """A table, the head first: title of a column -> the two runs."""
    steps = min(len(run.steps) for pair in pairs.values() for run in pair)
    return [
        ["steps", *pairs],
        *(
            [f"{first} to {last}", *(f"{largest(*pair, first, last):.1e}" for pair in pairs.values())]
            for first, last in ranges(steps)
        ),
    ]
