"""One tensor judged, and the verdict of a whole comparison. docs/verification.md derives what is tolerated."""

from dataclasses import dataclass

from lockstep.distance import Distance, Tensor
from lockstep.dump import Dump

MULTIPLE = 4  # of DDP's own distance
FLOOR = {"exp_avg": 8, "exp_avg_sq": 16}  # roundings of the tensor's dtype; of all others:
FLOOR_ELSE = 4
ROUNDING = {"F64": 2.0**-53, "F32": 2.0**-24, "BF16": 2.0**-9}
PASSES = {"batch": "batch", "forward": "forward", "backward": "backward", "gradient": "gradient"}
PASSES |= dict.fromkeys(("exp_avg", "exp_avg_sq", "parameter"), "update")
@dataclass
class Row:
    """One tensor of one run in one step, judged."""

    strategy: str
    step: int
    name: str
    distance: Distance
    yardstick: Distance  # DDP's, of the same tensor
    rounding: float

    @property
    def which_pass(self) -> str:
        return PASSES[self.name.split("/")[0]]

    @property
    def floor(self) -> float:
        """What rounding alone may do, relative: a tensor that DDP happens to get exactly right is no reason for alarm."""
        return FLOOR.get(self.name.split("/")[0], FLOOR_ELSE) * self.rounding

    @property
    def tolerated(self) -> float:
        """Of the 2-norm of the error."""
        return MULTIPLE * self.yardstick.error + self.floor * self.distance.norm

    @property
    def tolerated_largest(self) -> float:
        """Of the largest error of one element."""
        return MULTIPLE * self.yardstick.largest_error + self.floor * self.distance.largest

    @property
    def too_far(self) -> bool:  # so that a NaN is too far
        distance = self.distance
        return not (distance.error <= self.tolerated and distance.largest_error <= self.tolerated_largest)

    @property
    def judged(self) -> bool:
        """Whether a tensor of zeros in its place would be noticed twice over; smaller ones are rounding noise.

        The batch has no scale: it is equal or it is not.
        """
        return self.which_pass == "batch" or self.tolerated <= self.distance.change / 2

    @property
    def multiple(self) -> float:
        """The larger of the two errors in units of what is tolerated; above 1 is too far."""
        return max(_over(self.distance.error, self.tolerated), _over(self.distance.largest_error, self.tolerated_largest))


def _over(error: float, tolerated: float) -> float:
    return 0.0 if error == 0 else error / tolerated if tolerated > 0 else float("inf")


@dataclass
class Loss:
    """The loss of one DP rank in one step."""

    step: int
    dp_rank: int
    reference: float
    by_strategy: dict[str, float]
    tolerated: float  # of the difference from DDP


@dataclass
class Result:
    """All that a comparison found. Rows are in execution order within a step."""

    dumps: dict[str, Dump]  # that were judged
    baseline: str  # whose losses the others' are held against
    rows: list[Row]
    losses: list[Loss]
    pairs: dict[str, Tensor]  # of step 1, every tensor but the update's
    columns: dict[str, Dump]  # the dumps that `pairs` speak of, in order

    def failures(self, strategy: str) -> list[tuple[int, int, str, str]]:
        """(step, position, tensor, what is wrong), the first in execution order first."""
        dump = self.dumps[strategy]
        order = {step: {name: at for at, name in enumerate(entry["tensors"])} for step, entry in dump.steps.items()}
        found = [
            (row.step, order[str(row.step)][row.name], row.name, describe(row))
            for row in self.rows
            if row.strategy == strategy and row.too_far
        ]
        for step, entry in dump.steps.items():
            for name, ranks in entry["replicas_differ"].items():
                where = ", ".join(f"rank {rank}" for rank in ranks)
                found.append((int(step), order[step][name], name, f"is not the same on all ranks that hold it: {where} differs"))
        for loss in self.losses:
            if not abs(loss.by_strategy[strategy] - loss.by_strategy[self.baseline]) <= loss.tolerated:  # a NaN fails
                found.append((loss.step, len(order[str(loss.step)]), f"loss of DP rank {loss.dp_rank}", f"is {loss.by_strategy[strategy]:.9f}, {self.baseline}'s is {loss.by_strategy[self.baseline]:.9f}; {loss.tolerated:.1e} is tolerated"))
        return sorted(found)

    def unjudged_passes(self, strategy: str) -> list[str]:
        """Passes in which no tensor was large enough to judge."""
        rows = [row for row in self.rows if row.strategy == strategy]
        judged = {row.which_pass for row in rows if row.judged}
        return [name for name in dict.fromkeys(row.which_pass for row in rows) if name not in judged]

    def verdict(self, strategy: str) -> str:
        if self.failures(strategy):
            return "FAIL"
        return "NOT JUDGED" if self.unjudged_passes(strategy) else "PASS"

    @property
    def outcome(self) -> str:
        """The worst verdict of any dump."""
        verdicts = {self.verdict(strategy) for strategy in self.dumps}
        return next(verdict for verdict in ("FAIL", "NOT JUDGED", "PASS") if verdict in verdicts)


def describe(row: Row) -> str:
    distance = row.distance
    return (
        f"{distance.relative:.2e} of its norm from the reference, {_over(row.tolerated, distance.norm):.1e} is tolerated; "
        f"largest element off by {distance.relative_largest:.2e} of the largest, {_over(row.tolerated_largest, distance.largest):.1e} is tolerated"
    )
