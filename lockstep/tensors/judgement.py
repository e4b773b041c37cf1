"""The judgement of one tensor, and the verdict of a whole comparison. docs/verification.md derives the tolerances."""

import math
import statistics
from dataclasses import dataclass, field

from lockstep.tensors.distance import Distance, Measured, Size
from lockstep.tensors.dump import Dump

MULTIPLE = 4  # of DDP's own distance
FLOOR = 4  # unit roundoffs of the tensor's dtype, where DDP happens to be exact
UPDATE = {
    "exp_avg": 8,
    "exp_avg_sq": 16,
    "parameter": 4,
    "average": 4,
}  # unit roundoffs of the result, for the rounding errors of an optimizer step
UPDATE_OF_CHANGE = 16  # and, for a parameter, of its change
NORM = 8  # float32 unit roundoffs of a recorded gradient norm: summed in float64, passed on in float32
LIMIT = {
    "fp32": 1e-5,
    "autocast": 0.2,
}  # of DDP's own distance, relative: about ten times what correct runs have
# Unit roundoffs; of bfloat16 half of it (2^-8), which is stricter
UNIT = {"fp32": 2.0**-24, "autocast": 2.0**-9}  # of the arithmetic
ROUNDOFF = {"F64": 2.0**-53, "F32": 2.0**-24, "BF16": 2.0**-9, "I64": 0.0}  # of a dtype
PASSES = {"batch": "batch", "forward": "forward", "backward": "backward", "gradient": "gradient"}
PASSES |= dict.fromkeys(UPDATE, "update")
COMPUTED = tuple(kind for kind in PASSES if kind != "batch")  # of tensors that are computed


@dataclass
class Judgement:
    """One tensor of one run in one step, judged."""

    strategy: str
    step: int
    name: str
    distance: Distance
    tolerated: float  # of the 2-norm of the error
    tolerated_largest: float  # of the largest error of one element

    @property
    def kind(self) -> str:
        return self.name.split("/")[0]

    @property
    def which_pass(self) -> str:
        return PASSES[self.kind]

    @property
    def too_far(self) -> bool:
        """Whether either error is larger than tolerated, or anything is not finite."""
        distance = self.distance
        numbers = (
            distance.error,
            distance.largest_error,
            distance.norm,
            self.tolerated,
            self.tolerated_largest,
        )
        near = distance.error <= self.tolerated and distance.largest_error <= self.tolerated_largest
        return not (near and all(map(math.isfinite, numbers)))

    @property
    def judged(self) -> bool:
        """Whether at most half of its size is tolerated, so that zeros in its place would be noticed.

        The batch has no scale: it is equal or it is not.
        """
        return self.kind == "batch" or self.tolerated <= self.distance.change / 2

    @property
    def multiple(self) -> float:
        """The larger of the two errors in units of its tolerance; above 1 is too far."""
        return max(
            _over(self.distance.error, self.tolerated),
            _over(self.distance.largest_error, self.tolerated_largest),
        )


def is_vector_gradient(name: str, entry: dict) -> bool:
    return name.startswith("gradient/") and len(entry["shape"]) == 1


def typical_error(vectors: list[Distance]) -> Size:
    """The median relative errors of DDP's gradients of norms and biases; zero if the model has none."""
    if not vectors:
        return Size(0.0, 0.0)
    return Size(
        statistics.median(one.relative for one in vectors),
        statistics.median(one.relative_largest for one in vectors),
    )


def yardstick(ddp: Distance, typical: Size | None = None) -> Size:
    """DDP's errors as a measure for others.

    One element may dominate a vector, and DDP's error is then a single draw that can be small by chance. So for the gradient of a
    vector, the measure is at least what is `typical` of such gradients.
    """
    if typical is None:
        return ddp.errors
    return Size(
        max(ddp.error, typical.norm * ddp.norm), max(ddp.largest_error, typical.largest * ddp.largest)
    )


def judge(
    strategy: str, step: int, name: str, distance: Distance, measure: Size, roundoff: float
) -> Judgement:
    """A row with its tolerances. `measure` is DDP's `yardstick`, `roundoff` the tensor's dtype's ROUNDOFF.

    The batch must be equal. An optimizer step may be a few unit roundoffs from the exact update of its own input. Everything
    else may be MULTIPLE times as far from the reference as the yardstick, DDP.
    """
    kind = name.split("/")[0]
    if kind == "batch":
        return Judgement(strategy, step, name, distance, 0.0, 0.0)
    if kind in UPDATE:
        own = UPDATE[kind] * roundoff
        of_change = UPDATE_OF_CHANGE * roundoff if kind == "parameter" else 0.0
        tolerated = own * distance.norm + of_change * distance.change
        return Judgement(
            strategy,
            step,
            name,
            distance,
            tolerated,
            own * distance.largest + of_change * distance.largest_change,
        )
    tolerated = MULTIPLE * measure.norm + FLOOR * roundoff * distance.norm
    largest = MULTIPLE * measure.largest + FLOOR * roundoff * distance.largest
    return Judgement(strategy, step, name, distance, tolerated, largest)


def judge_yardstick(
    strategy: str, step: int, name: str, distance: Distance, precision: str, noise: Size
) -> Judgement:
    """DDP's own row: a yardstick that is ten times as far off as correct runs measures nothing.

    `noise` is the size that rounding noise may have in this pass. A tensor below it cannot be judged, but is no reason to reject
    the yardstick.
    """
    limit = LIMIT[precision]
    tolerated, largest = limit * distance.norm, limit * distance.largest
    if distance.error > tolerated or distance.largest_error > largest:
        tolerated, largest = max(tolerated, limit * noise.norm), max(largest, limit * noise.largest)
    return Judgement(strategy, step, name, distance, tolerated, largest)


def _over(error: float, tolerated: float) -> float:
    return 0.0 if error == 0 else error / tolerated if tolerated > 0 else float("inf")


@dataclass
class Loss:
    """The loss of one DP rank in one step."""

    step: int
    dp_rank: int
    reference: float | None  # None without one
    by_strategy: dict[str, float]
    tolerated: float  # of the difference from DDP
    exact: dict[str, float] = field(
        default_factory=dict
    )  # of the reference from the weights that each run itself had
    limit: float = math.inf  # of the difference from that

    def checks(self, strategy: str, baseline: str) -> list[tuple[float, str, float]]:
        """(the loss to compare with, whose it is, the tolerance)."""
        found = [(self.by_strategy[baseline], baseline, self.tolerated)]
        return found + [
            (self.exact[name], "the reference", self.limit) for name in self.exact if name == strategy
        ]


@dataclass
class Norm:
    """The gradient norm that a run recorded, against the norm of the gradients that it held."""

    strategy: str
    step: int
    recorded: float
    held: float

    @property
    def off(self) -> bool:
        return not abs(self.recorded - self.held) <= NORM * ROUNDOFF["F32"] * self.held  # a NaN is off


@dataclass
class Result:
    """The findings of a comparison. Rows are in execution order within a step."""

    dumps: dict[str, Dump]  # that were judged
    baseline: str  # whose losses the others' are held against
    rows: list[Judgement]
    losses: list[Loss]
    pairs: dict[str, Measured]  # of step 1, every tensor but the update's
    columns: dict[str, Dump]  # the dumps that `pairs` speak of, in order
    missing: list[tuple[str, int, str]]  # (run, step, tensor) that the run should have computed and did not
    has_reference: bool = False
    norms: list[Norm] = field(default_factory=list)
    # run -> entry of the effective contract -> "entry is a, not b", where it is not the baseline's
    configuration: dict[str, dict[str, str]] = field(default_factory=dict)

    def failures(self, strategy: str) -> list[tuple[int, float, str, str]]:
        """(step, position, tensor, what is wrong), the first in execution order first."""
        dump = self.dumps[strategy]
        order = {
            int(step): {name: at for at, name in enumerate(dump.expected(int(step)))} for step in dump.steps
        }
        found: list[tuple[int, float, str, str]] = [
            (row.step, order[row.step][row.name], row.name, describe(row))
            for row in self.rows
            if row.strategy == strategy and row.too_far
        ]
        for step, entry in dump.steps.items():
            for name, ranks in entry["replicas_differ"].items():
                where = ", ".join(f"rank {rank}" for rank in ranks)
                found.append(
                    (
                        int(step),
                        order[int(step)][name],
                        name,
                        f"is not the same on all ranks that hold it: {where} differs",
                    )
                )
        found += [
            (step, order[step][name], name, "was not computed")
            for run, step, name in self.missing
            if run == strategy
        ]
        for norm in self.norms:
            if norm.strategy == strategy and norm.off:
                last = max(at for name, at in order[norm.step].items() if name.startswith("gradient/"))
                what = f"was recorded as {norm.recorded:.9g}; the gradients' is {norm.held:.9g}"
                found.append((norm.step, last + 0.5, "gradient norm", what))
        for loss in self.losses:
            mine = loss.by_strategy[strategy]
            off = [
                check
                for check in loss.checks(strategy, self.baseline)
                if not abs(mine - check[0]) <= check[2]
            ]  # a NaN fails
            for base, whose, tolerated in off[:1]:
                what = f"is {mine:.9f}, {whose}'s is {base:.9f}; {tolerated:.1e} is tolerated"
                found.append((loss.step, len(order[loss.step]), f"loss of DP rank {loss.dp_rank}", what))
        return sorted(found, key=lambda failure: failure[:3])  # of one tensor, its distance first

    def unjudged(self, strategy: str) -> list[str]:
        """Kinds of tensors of which none was large enough to judge in some step; all passes if there are no rows."""
        rows = [row for row in self.rows if row.strategy == strategy]
        kinds = {(row.step, row.kind) for row in rows}
        judged = {(row.step, row.kind) for row in rows if row.judged}
        return [f"{kind} of step {step}" for step, kind in sorted(kinds - judged)] if rows else ["all passes"]

    def verdict(self, strategy: str) -> str:
        if self.configuration.get(strategy):
            return "CONFIGURED DIFFERENTLY"
        if self.failures(strategy):
            return "FAIL"
        return "NOT JUDGED" if self.unjudged(strategy) else "PASS"

    def has_failed(self, strategy: str) -> bool:
        return self.verdict(strategy) in ("CONFIGURED DIFFERENTLY", "FAIL")

    @property
    def outcome(self) -> str:
        """The worst verdict of any dump."""
        verdicts = {self.verdict(strategy) for strategy in self.dumps}
        return next(
            verdict
            for verdict in ("CONFIGURED DIFFERENTLY", "FAIL", "NOT JUDGED", "PASS")
            if verdict in verdicts
        )


def describe(row: Judgement) -> str:
    distance = row.distance
    return (
        f"relative error {distance.relative:.2e} (2-norm), tolerated {_over(row.tolerated, distance.norm):.1e}; "
        f"{distance.relative_largest:.2e} (largest element), tolerated {_over(row.tolerated_largest, distance.largest):.1e}"
    )
