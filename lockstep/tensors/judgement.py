"""The judgement of one tensor, and the verdict of a whole comparison. docs/verification.md derives the tolerances."""

import math
import statistics
from dataclasses import dataclass, field

from lockstep.inputs.modules import Names
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
SUMMED_IN_FLOAT32 = 2  # times the error that the norm of the same gradients has here, summed in float32; another order, another error
ZERO = (
    2.0**-40
)  # of the largest rms of a pass: a reference below it is zero in exact arithmetic, and what is left are its own rounding errors
FINER = 0.5  # of a deviation: what is tolerated of a gradient that would have shown it
LIMIT = {
    "fp32": 1e-5,
    "autocast": 0.2,
}  # of DDP's own distance, relative: about ten times what correct runs have
# Likewise of what an optimizer of the user's own changed, 2-norm and largest element: many divide each element by its own size, so the
# rounding errors of an element that is all but zero are a part of a whole step.
LIMIT_OF_UPDATE = Size(1e-4, 1e-2)
# Of one that computes in bfloat16 by itself: beyond, zeros in the place of its change would not be noticed. Muon's iteration, for
# instance, multiplies small singular values, and the rounding errors beside them, by up to 3.44 in each of its five steps.
LIMIT_OF_LOWERED = Size(0.5, 0.5)
# Unit roundoffs; of bfloat16 half of it (2^-8), which is stricter
UNIT = {"fp32": 2.0**-24, "autocast": 2.0**-9}  # of the arithmetic
ROUNDOFF = {"F64": 2.0**-53, "F32": 2.0**-24, "BF16": 2.0**-9, "I64": 0.0}  # of a dtype
PASSES = {"batch": "batch", "forward": "forward", "backward": "backward", "gradient": "gradient"}
COMPUTED = ("forward", "backward", "gradient", "update")  # passes


def pass_of(name: str) -> str:
    """The pass that a tensor is computed in. What an optimizer keeps has the optimizer's own names."""
    return PASSES.get(name.split("/")[0], "update")


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
        return pass_of(self.name)

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


def yardstick(ddp: Distance, typical: Size | None = None, noise: Size | None = None) -> Size:
    """DDP's errors as a measure for others.

    One element may dominate a vector, and DDP's error is then a single draw that can be small by chance. So for the gradient of a
    vector, the measure is at least what is `typical` of such gradients. Of a tensor that is zero in exact arithmetic, DDP may have
    nothing but zeros, and another run what rounding leaves: the measure is then at least the `noise` of the pass.
    """
    found = ddp.errors
    if typical is not None:
        found = larger(found, Size(typical.norm * ddp.norm, typical.largest * ddp.largest))
    return found if noise is None else larger(found, noise)


def larger(one: Size, other: Size) -> Size:
    return Size(max(one.norm, other.norm), max(one.largest, other.largest))


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


def judge_own_update(
    strategy: str, step: int, name: str, distance: Distance, ddp: Distance, limit: Size, roundoff: float
) -> Judgement:
    """A tensor after the step of an optimizer of the user's own, against the same step in float64 from the run's own gradients and state.

    How its rounding errors grow is not known, so DDP is the yardstick. Its own error may be at most `limit` times the change.
    """
    most = UPDATE["exp_avg_sq"] * roundoff
    floor = most * (distance.norm + distance.change)
    largest_floor = most * (distance.largest + distance.largest_change)
    if distance is ddp:
        tolerated = max(limit.norm * distance.change, floor)
        largest = max(limit.largest * distance.largest_change, largest_floor)
    else:
        tolerated, largest = MULTIPLE * ddp.error + floor, MULTIPLE * ddp.largest_error + largest_floor
    return Judgement(strategy, step, name, distance, tolerated, largest)


def is_zero(distance: Distance, noise: Size, precision: str) -> bool:
    """Whether a tensor is zero in exact arithmetic: the reference has nothing but its own rounding errors, if that."""
    return distance.norm <= ZERO / UNIT[precision] * noise.norm


def judge_yardstick(
    strategy: str, step: int, name: str, distance: Distance, precision: str, noise: Size
) -> Judgement:
    """DDP's own row: a yardstick that is ten times as far off as correct runs measures nothing.

    `noise` is the size that rounding noise may have in this pass. A tensor below it cannot be judged, but is no reason to reject
    the yardstick.
    """
    limit = LIMIT[precision]
    tolerated, largest = limit * distance.norm, limit * distance.largest
    if is_zero(distance, noise, precision):
        return Judgement(strategy, step, name, distance, MULTIPLE * noise.norm, MULTIPLE * noise.largest)
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
    # by how much a run's loss is right to differ from the baseline's, its weights, micro batches or choices being others
    moved: dict[str, float] = field(default_factory=dict)

    def checks(self, strategy: str, baseline: str) -> list[tuple[float, str, float]]:
        """(the loss to compare with, whose it is, the tolerance)."""
        base = self.by_strategy[baseline] + self.moved.get(strategy, 0.0)
        found = [(base, baseline, self.tolerated)]
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
    # what a sum in float32 may be off by; 0 unless the recorded norm is off by more than a sum in float64 may
    float32: float = 0.0
    clip: float = math.nan  # what the gradients were multiplied with

    @property
    def inexact(self) -> bool:
        """Whether it is off by more than a norm that was summed in float64. A NaN is."""
        return not abs(self.recorded - self.held) <= NORM * ROUNDOFF["F32"] * self.held

    @property
    def off(self) -> bool:
        """Whether it is off by more than even a sum in float32 explains."""
        return self.inexact and not abs(self.recorded - self.held) <= self.float32

    @property
    def used(self) -> float:
        """The norm that the gradients must have been clipped by: the recorded one, or theirs where that one is off."""
        return self.held if self.off else self.recorded


def float32_norm_error(held: float, summed: float, largest: int) -> float:
    """What a gradient norm `held` may be off by if it was summed in float32, absolute.

    `summed` is the same norm summed in float32 here. `largest` is the number of elements of the largest gradient: its square is the
    sum of n rounded additions, each off by at most u of the sum so far, without a preferred sign. The norm is then off by less than u
    sqrt(n) (docs/verification.md).
    """
    return SUMMED_IN_FLOAT32 * abs(summed - held) + math.sqrt(largest) * ROUNDOFF["F32"] * held


@dataclass
class Chosen:
    """A discrete choice of a run in one step, such as a router's of experts, that the reference was told."""

    strategy: str
    step: int
    name: str
    regret: float  # by how much a score that was not chosen is above one that was, at most, in the reference
    tolerated: float

    @property
    def too_far(self) -> bool:
        return not self.regret <= self.tolerated  # a NaN is


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
    choices: list[Chosen] = field(default_factory=list)
    # run -> entry of the effective contract -> "entry is a, not b", where it is not the baseline's
    configuration: dict[str, dict[str, str]] = field(default_factory=dict)

    def conventions(self, strategy: str) -> list[Judgement]:
        """Intermediate tensors that are not the reference's, in a step that gets to the right result in another way.

        Such are gradients under a loss scale that is taken off again, or rotary tables of other positions.
        """
        found, names = [], self.dumps[strategy].layout.names
        for step in map(int, self.dumps[strategy].steps):
            rows = [row for row in self.rows if (row.strategy, row.step) == (strategy, step)]
            seen = _seen_by_gradients(rows, self.dumps[strategy].expected(step), names)
            head = next((row for row in seen if row.name == names.logits_gradient), None)
            gradients = [row for row in rows if row.kind == "gradient" and row.judged]
            if self._ends_right(strategy, step, rows):
                found += seen
            elif head is not None and 2 * sum(row.too_far for row in gradients) < len(gradients):
                # most gradients are right without the factor, so it is taken off again; what is wrong is something else
                factor = head.distance.scale
                found += [row for row in seen if row.kind == "backward" and is_multiple(row, factor)]
        return found

    def _ends_right(self, strategy: str, step: int, rows: list[Judgement]) -> bool:
        """Whether the batch, the logits, the losses and all gradients of parameters with their norm are right in a step."""
        names = self.dumps[strategy].layout.names
        ends = {row.name: row for row in rows if _is_end(row, names)}
        return names.logits in ends and not (
            any(row.too_far for row in ends.values())
            or not ends.keys().isdisjoint(self.dumps[strategy].steps[str(step)]["replicas_differ"])
            or any((strategy, step) == missing[:2] for missing in self.missing)
            or any(norm.off for norm in self.norms if (norm.strategy, norm.step) == (strategy, step))
            or any(self.loss_problem(loss, strategy) for loss in self.losses if loss.step == step)
        )

    def loss_problem(self, loss: Loss, strategy: str) -> str:
        """What is wrong with the loss of a run; "" if nothing is."""
        mine = loss.by_strategy[strategy]
        for base, whose, tolerated in loss.checks(strategy, self.baseline):
            if not abs(mine - base) <= tolerated:  # a NaN fails
                return f"is {mine:.9f}, {whose}'s is {base:.9f}; {tolerated:.1e} is tolerated"
        return ""

    def failures(self, strategy: str) -> list[tuple[int, float, str, str]]:
        """(step, position, tensor, what is wrong), the first in execution order first."""
        dump = self.dumps[strategy]
        excused = {(row.step, row.name) for row in self.conventions(strategy)}
        order = {
            int(step): {name: at for at, name in enumerate(dump.expected(int(step)))} for step in dump.steps
        }
        found: list[tuple[int, float, str, str]] = [
            (row.step, order[row.step][row.name], row.name, describe(row))
            for row in self.rows
            if row.strategy == strategy and row.too_far and (row.step, row.name) not in excused
        ]
        for step, entry in dump.steps.items():
            for name, ranks in entry["replicas_differ"].items():
                if (int(step), name) in excused:
                    continue
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
        for one in self.choices:
            if one.strategy == strategy and one.too_far:
                what = (
                    f"is another choice than the reference's: a score that was left out is above one that was taken by {one.regret:.2e}, "
                    f"tolerated {one.tolerated:.1e}"
                )
                found.append((one.step, order[one.step][f"forward/{one.name}"], f"forward/{one.name}", what))
        for norm in self.norms:
            if norm.strategy == strategy and norm.off:
                last = max(at for name, at in order[norm.step].items() if name.startswith("gradient/"))
                what = f"was recorded as {norm.recorded:.9g}; the gradients' is {norm.held:.9g}"
                found.append((norm.step, last + 0.5, "gradient norm", what))
        for loss in self.losses:
            what = self.loss_problem(loss, strategy)
            if what:
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
        failures = self.failures(strategy)
        if failures and not self.is_no_yardstick(strategy):
            return "FAIL"
        return "NOT JUDGED" if failures or self.unjudged(strategy) else "PASS"

    def is_no_yardstick(self, strategy: str) -> bool:
        """Whether the run is the yardstick, all that is wrong with it are distances from the reference, and other runs share the first.

        Then the model or its optimizer jumps there, or is ill-conditioned, so that rounding errors alone take correct runs so far. If
        the others are nearer, this run is wrong.
        """
        if strategy != self.baseline or not self.has_reference:
            return False
        failures = self.failures(strategy)
        if not failures:
            return False
        far = {(row.step, row.name): row for row in self.rows if row.strategy == strategy and row.too_far}
        if any((step, name) not in far or name.startswith("batch/") for step, _, name, _ in failures):
            return False
        if any(entry["replicas_differ"] for entry in self.dumps[strategy].steps.values()):
            return False
        first = far[failures[0][0], failures[0][2]]
        others = [
            row.distance
            for row in self.rows
            if (row.step, row.name) == (first.step, first.name) and row.strategy != strategy
        ]
        return bool(others) and all(
            other.error > first.tolerated or other.largest_error > first.tolerated_largest for other in others
        )

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


def _is_end(row: Judgement, names: Names) -> bool:
    """Whether a tensor is no intermediate one: what goes into a step's forward pass, or what counts of its results."""
    return row.kind in ("batch", "gradient") or row.name == names.logits


def _seen_by_gradients(
    rows: list[Judgement], shapes: dict[str, tuple[int, ...]], names: Names
) -> list[Judgement]:
    """The intermediate tensors that are too far by so much that the gradients of matrices would have shown it."""
    coarsest = max(
        (
            _over(row.tolerated, row.distance.norm)
            for row in rows
            if row.kind == "gradient" and row.judged and len(shapes[row.name]) > 1
        ),
        default=math.inf,
    )
    return [
        row
        for row in rows
        if row.too_far
        and not _is_end(row, names)
        and row.kind in ("forward", "backward")
        and coarsest <= FINER * row.distance.relative < math.inf
    ]


def is_multiple(row: Judgement, factor: float) -> bool:
    """Whether a tensor is the reference's times a factor, as exactly as a right one would be the reference's."""
    distance = row.distance
    along = (distance.scale - 1) * distance.change
    across = math.sqrt(max(0.0, distance.error**2 - along**2))
    off = abs(distance.scale - factor) * distance.change
    return max(across, off) <= max(1.0, abs(factor)) * row.tolerated


def describe(row: Judgement) -> str:
    distance = row.distance
    return (
        f"relative error {distance.relative:.2e} (2-norm), tolerated {_over(row.tolerated, distance.norm):.1e}; "
        f"{distance.relative_largest:.2e} (largest element), tolerated {_over(row.tolerated_largest, distance.largest):.1e}"
    )
