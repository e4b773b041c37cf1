"""The rows of a comparison: a tensor of one run in one step, and what is tolerated of it. docs/verification.md derives the tolerances."""

import math
import statistics
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import torch

from lockstep.dumps.dump import Dump, number_of_elements
from lockstep.verdict.distance import Distance, Size, relative
from lockstep.verdict.factors import Factor
from lockstep.verdict.picture import COARSE, SIDE, Picture, draw

MULTIPLE = 4  # of DDP's own distance
FLOOR = 4  # unit roundoffs of the tensor's dtype, where DDP happens to be exact
# Unit roundoffs of the result of an optimizer step, for its rounding errors
UPDATE = {"exp_avg": 8, "exp_avg_sq": 16, "parameter": 4, "average": 4}
UPDATE_OF_CHANGE = 16  # unit roundoffs of the change of a parameter, which come on top
# A reference below this share of the pass's largest rms is zero in exact arithmetic. What is left are its own rounding errors.
ZERO = 2.0**-40
# DDP's own relative distance, at most: about ten times what correct runs have
LIMIT = {"fp32": 1e-5, "autocast": 0.2, "bf16": 0.2}
# The same for an optimizer of the user's own, relative to what it changed: 2-norm and largest element. Many divide each element by
# its own size, so the rounding error of an element that is nearly zero is a part of a whole step.
LIMIT_OF_UPDATE = Size(1e-4, 1e-2)
# The same for such an optimizer that computes in bfloat16 by itself. Beyond, zeros in the place of its change would not be noticed.
# Muon's iteration, for instance, multiplies small singular values, and the rounding errors beside them, by up to 3.44 in each of
# its five steps.
LIMIT_OF_LOWERED = Size(0.5, 0.5)
# Unit roundoff of the arithmetic. For bfloat16 it is half of the unit roundoff (2^-8), which is stricter.
UNIT = {"fp32": 2.0**-24, "autocast": 2.0**-9, "bf16": 2.0**-9}
EXACT = Size(0.0, 0.0)  # nothing is tolerated
# The relative error of a gradient that was not rounded to 16 bits, at most. One of many numbers that were is not so small by chance.
WIDE = 2.0**-18
# Unit roundoff of a dtype, likewise
ROUNDOFF = {"F64": 2.0**-53, "F32": 2.0**-24, "BF16": 2.0**-9, "F16": 2.0**-11, "I64": 0.0}
PASSES = {"batch": "batch", "forward": "forward", "backward": "backward", "gradient": "gradient"}
FINE = 10  # pictures of one pass that have all blocks
MOST = 120  # pictures of one pass; what comes later is mostly wrong because of these
# A factor is named if its multiple of what is tolerated is at least this share of the distance's multiple
PART = 0.01
MOSTLY = 0.9  # share of an error that a factor on all of a tensor must explain
NEAREST = 4  # tensors that are near enough and have a picture, too
# Elements of a tensor that has a picture, at most. Drawing it takes several times as much memory, in float64.
LARGEST, LARGEST_NEAR = 1 << 28, 1 << 24
COMPUTED = ("forward", "backward", "gradient", "update")  # passes


def pass_of(name: str) -> str:
    """Return the pass that a tensor is computed in: "update" for any other kind, as an optimizer's state has names of its own."""
    return PASSES.get(name.split("/")[0], "update")


@dataclass
class Judgement:
    """One tensor of one run in one step, judged."""

    step: int
    name: str
    distance: Distance
    tolerated: float  # of the 2-norm of the error
    tolerated_largest: float  # of the largest error of one element
    # For a module's tensor: the micro batch and the rank where it is worst, and the largest `multiple` of each rank
    where: str = ""
    ranks: dict[int, float] = field(default_factory=dict)
    picture: Picture | None = field(default=None, compare=False)
    factor: Factor | None = None  # one that its distance hides
    exact_zero: bool = (
        False  # whether it is zero in exact arithmetic, so that only its rounding errors are judged
    )

    @property
    def kind(self) -> str:
        return self.name.split("/")[0]

    @property
    def path(self) -> str:
        """Its name without the kind: a module or a parameter."""
        return self.name.partition("/")[2]

    @property
    def which_pass(self) -> str:
        return pass_of(self.name)

    @property
    def too_far(self) -> bool:
        """Whether either error or a factor is larger than tolerated, or anything is not finite."""
        return self.is_far or self.factor is not None

    @property
    def is_far(self) -> bool:
        """Whether its distance alone shows that it is too far."""
        distance = self.distance
        is_near = distance.error <= self.tolerated and distance.largest_error <= self.tolerated_largest
        are_finite = map(math.isfinite, (distance.norm, self.tolerated, self.tolerated_largest))
        return not (is_near and all(are_finite))

    @property
    def judged(self) -> bool:
        """Whether at most half of its size is tolerated, so that zeros in its place would be noticed.

        The batch has no scale: it is equal or it is not.
        """
        return self.kind == "batch" or self.tolerated <= self.distance.change / 2

    @property
    def multiple(self) -> float:
        """The larger of the two errors in units of its tolerance, or the hidden factor in units of its own; above 1 is too far."""
        if self.factor is None or self.is_far:
            return self._of_distance
        return max(self._of_distance, self.factor.multiple)

    @property
    def _of_distance(self) -> float:
        return max(
            relative(self.distance.error, self.tolerated),
            relative(self.distance.largest_error, self.tolerated_largest),
        )

    @property
    def of_factor(self) -> str:
        """Its factor in words, and whether that alone shows what is wrong; "" without one, or for a small part of another error."""
        if self.factor is None or self.factor.multiple < PART * self._of_distance:
            return ""
        if self.is_far and self.factor.part is None and not self.times:
            return ""  # a projection alone does not make it a multiple
        return self.factor.describe() + ("" if self.is_far else "; its distance is within what is tolerated")

    def describe(self) -> str:
        """What is wrong with it: its factor, or else its errors, and the factor that these mostly are."""
        distance = self.distance
        if distance.unequal or self.of_factor:
            return distance.unequal or self.of_factor
        if "/" not in self.name:  # a number, such as a loss
            return (
                f"{distance.own_norm:.9g}, and {distance.norm:.9g} in the reference: relative error {distance.relative:.2e}, "
                f"tolerated {relative(self.tolerated, distance.norm):.1e}{self.times}"
            )
        return (
            f"relative error {distance.relative:.2e} (2-norm), tolerated {relative(self.tolerated, distance.norm):.1e}; "
            f"{distance.relative_largest:.2e} (largest element), tolerated {relative(self.tolerated_largest, distance.largest):.1e}{self.times}"
        )

    @property
    def times(self) -> str:
        """The factor that explains most of its errors, as the end of a sentence; "" if none does."""
        distance = self.distance
        if abs(distance.scale - 1) * distance.change <= MOSTLY * distance.error:
            return ""
        what = "it" if distance.change == distance.norm else "its change"
        return f"; {what} is {distance.scale:.5g} times the reference's"


def add_pictures(
    rows: Sequence[Judgement],
    entries: dict[str, dict],
    pair_of: Callable[[Judgement], tuple[torch.Tensor, torch.Tensor]],
) -> None:
    """Draw pictures for rows of one pass: those that are too far, and those that are nearest to that.

    `entries` has the shapes, and `pair_of` returns the run's tensor and the reference's. It is not called for tensors that
    are too large.
    """
    far = [row for row in rows if row.too_far][:MOST]
    near = sorted((row for row in rows if not row.too_far), key=lambda row: -row.multiple)[:NEAREST]
    for index, row in enumerate([*far, *near]):
        side = COARSE if row.too_far and index >= FINE else SIDE
        if 0 < number_of_elements(entries[row.name]) <= (LARGEST if row.too_far else LARGEST_NEAR):
            counted = row.kind == "batch"
            row.picture = draw(*pair_of(row), row.tolerated, row.tolerated_largest, side, counted=counted)


class Yardstick:
    """The distances of correct tensors, by which the same tensors of other runs are judged.

    `found` has the distances by name, `entries` the shapes and dtypes. `zeros` are names of tensors that are known to be zero in
    exact arithmetic. Computed from a run's tensors, they are what its rounding errors leave. `alone`: each module was
    computed from the run's tensors, so errors of 16 bits are only where a tensor was rounded to them.
    """

    def __init__(
        self,
        found: dict[str, Distance],
        entries: dict[str, dict],
        precision: str,
        floor: float = FLOOR,
        zeros: Collection[str] = (),
        *,
        alone: bool = False,
    ):
        self.found, self.entries, self.precision, self.zeros = found, entries, precision, zeros
        self.alone = alone and precision != "fp32"
        self.floor = floor  # of tensors in float32
        self.noise = noise_of(found, entries, precision)
        # Without those that are zero in exact arithmetic: their relative errors say nothing of others
        vectors = [
            name
            for name, distance in found.items()
            if is_vector_gradient(name, entries[name]) and not self.is_zero(name, distance)
        ]
        wide = [name for name in vectors if self._is_wide(name)]
        self.typical = typical_error(
            [found[name] for name in vectors if name not in wide] or [found[name] for name in wide]
        )
        self.typical_of_wide = typical_error([found[name] for name in wide])

    def tolerance(self, name: str, distance: Distance, times: float = 1.0) -> Size:
        """Return what is tolerated of a tensor. For the gradient of a vector, the yardstick's error counts `times` as much."""
        noise, entry = self.noise.get(name), self.entries[name]
        is_vector = is_vector_gradient(name, entry)
        # The error of a scalar is one draw, which may be small by chance.
        is_wide = self._is_wide(name) and number_of_elements(entry) > 1
        yardstick = measure(
            self.found[name],
            (self.typical_of_wide if is_wide else self.typical) if is_vector else None,
            noise if self.is_zero(name, distance) else None,
        )
        floor = self.floor if entry["dtype"] == "F32" else FLOOR
        return tolerance(
            name, distance, yardstick.times(times if is_vector else 1.0), ROUNDOFF[entry["dtype"]], floor
        )

    def _is_wide(self, name: str) -> bool:
        """Whether a tensor was not rounded to 16 bits, though others of the pass were, by the size of its error."""
        return self.alone and self.found[name].relative <= WIDE

    def is_zero(self, name: str, distance: Distance) -> bool:
        """Whether a tensor is zero in exact arithmetic."""
        noise = self.noise.get(name)
        return name in self.zeros or (noise is not None and is_zero(distance, noise, self.precision))


class OfDDP(Yardstick):
    """The yardstick of a captured run: DDP's own distances in one step."""

    def __init__(self, ddp: Dump, step: int, found: dict[str, Distance], precision: str):
        super().__init__(found, ddp.steps[step]["tensors"], precision)
        self.ddp, self.step = ddp, step

    def judge(self, dump: Dump, name: str, distance: Distance, lowered: bool, of_run: Size) -> Judgement:
        """Return a row of a run.

        Of an optimizer of the user's own: `lowered` says whether it computes in bfloat16 or float16 itself, and `of_run` are the
        rounding errors of its step in the run's dtype in one process.
        """
        return Judgement(self.step, name, distance, *self._tolerance(dump, name, distance, lowered, of_run))

    def _tolerance(self, dump: Dump, name: str, distance: Distance, lowered: bool, of_run: Size) -> Size:
        if name.removeprefix("parameter/") in self.ddp.layout.model.frozen:
            return EXACT
        ddp_distance, noise = self.found[name], self.noise.get(name)
        if self.ddp.has_own_optimizer and pass_of(name) == "update" and not name.startswith("average/"):
            limit = LIMIT_OF_LOWERED if lowered else LIMIT_OF_UPDATE
            roundoff = ROUNDOFF[self.entries[name]["dtype"]]
            return own_update_tolerance(distance, ddp_distance, limit, roundoff, of_run)
        if distance is ddp_distance and noise is not None:
            return yardstick_tolerance(distance, self.precision, noise)
        return self.tolerance(name, distance, _token_ratio(dump, self.ddp))


def is_vector_gradient(name: str, entry: dict) -> bool:
    """Whether it is the gradient of a scalar, a vector, or a matrix of one row or column."""
    return name.startswith("gradient/") and sum(size > 1 for size in entry["shape"]) <= 1


def noise_of(found: dict[str, Distance], entries: dict, precision: str) -> dict[str, Size]:
    """Return the size that rounding noise may have in each floating-point tensor. Its scale is the largest rms of the pass."""
    noise: dict[str, Size] = {}
    for which_pass in ("forward", "backward", "gradient"):
        numels = {
            name: max(number_of_elements(entries[name]), 1)
            for name in found
            if pass_of(name) == which_pass and entries[name]["dtype"] != "I64"
        }
        rms = max((found[name].norm / math.sqrt(numel) for name, numel in numels.items()), default=0.0)
        scale = UNIT[precision] * rms
        noise |= {name: Size(scale * math.sqrt(numel), scale) for name, numel in numels.items()}
    return noise


def _token_ratio(dump: Dump, ddp: Dump) -> float:
    """Return how many times as many tokens a rank of this run has in a micro batch as one of DDP; at least 1.

    The gradient of a norm or a bias is a sum over tokens, one after the other. The relative error of such a sum of n terms is about
    u sqrt(n) / 3. DDP's mean over r ranks has r independent sums of n / r terms, so its error is r times smaller.
    """
    tokens, of_ddp = (
        each.run["config"]["batch_size"] / each.run["config"]["cp_size"] for each in (dump, ddp)
    )
    return max(1.0, tokens / of_ddp)


def typical_error(vectors: list[Distance]) -> Size:
    """Return the median relative errors of DDP's gradients of norms and biases; zero if the model has none."""
    if not vectors:
        return EXACT
    return Size(
        statistics.median(distance.relative for distance in vectors),
        statistics.median(distance.relative_largest for distance in vectors),
    )


def measure(ddp: Distance, typical: Size | None = None, noise: Size | None = None) -> Size:
    """Return DDP's errors, as a measure for other runs.

    One element may dominate a vector, and DDP's error is then a single draw that can be small by chance. So for the gradient of a
    vector, the measure is at least what is `typical` of such gradients. Of a tensor that is zero in exact arithmetic, DDP may have
    nothing but zeros, and another run what rounding leaves: the measure is then at least the `noise` of the pass.
    """
    errors = ddp.errors
    if typical is not None:
        errors = errors.or_more(Size(typical.norm * ddp.norm, typical.largest * ddp.largest))
    return errors if noise is None else errors.or_more(noise)


def tolerance(name: str, distance: Distance, measure: Size, roundoff: float, floor: float = FLOOR) -> Size:
    """Return what is tolerated of a tensor's errors. `measure` is DDP's errors, `roundoff` the ROUNDOFF of the tensor's dtype.

    The batch must be equal. An optimizer step may be a few unit roundoffs from the exact update of its own input. Everything
    else may be MULTIPLE times as far from the reference as the yardstick, DDP.
    """
    kind = name.split("/")[0]
    if kind == "batch":
        return EXACT
    if kind in UPDATE:
        of_size, of_change = UPDATE[kind] * roundoff, UPDATE_OF_CHANGE * roundoff
        if kind == "parameter":
            return distance.size.times(of_size).plus(distance.shown.or_more(distance.terms).times(of_change))
        return distance.size.or_more(distance.terms).times(of_size)
    return measure.times(MULTIPLE).plus(distance.size.or_more(distance.terms).times(floor * roundoff))


def own_update_tolerance(
    distance: Distance, ddp: Distance, limit: Size, roundoff: float, of_run: Size = EXACT
) -> Size:
    """Return what is tolerated after the step of an optimizer of the user's own.

    It is compared with the same step in float64 from the run's own gradients and state. How its rounding errors grow is not known, so the
    yardstick is DDP, or `of_run`, the errors of the run's step once more in its dtype, if these are larger: an element whose gradient all
    but cancels against its weight decay may do so in this run alone. DDP's own error may be at most `limit` times the change, and `of_run`
    may not raise the tolerance beyond that. Of a single element, it may be as large as all of the tensor's may be, if `of_run` has it, too.
    """
    floor = distance.size.plus(distance.shown).times(UPDATE["exp_avg_sq"] * roundoff)
    most, of_run = limit.norm * distance.change, of_run.times(MULTIPLE)
    of_element = max(limit.largest * distance.largest_change, min(of_run.largest, most))
    if distance is ddp:
        return Size(most, of_element).or_more(floor)
    of_run = Size(min(of_run.norm, most), min(of_run.largest, of_element))
    return ddp.errors.times(MULTIPLE).or_more(of_run).plus(floor)


def zeros_of(found: dict[str, Distance], entries: dict[str, dict], precision: str) -> set[str]:
    """Return the names of the tensors of a free pass that are zero in exact arithmetic. Arguments are those of a Yardstick."""
    noise = noise_of(found, entries, precision)
    return {name for name, distance in found.items() if is_zero(distance, noise[name], precision)}


def is_zero(distance: Distance, noise: Size, precision: str) -> bool:
    """Whether a tensor is zero in exact arithmetic: the reference has at most its own rounding errors."""
    return distance.norm <= ZERO / UNIT[precision] * noise.norm


def yardstick_tolerance(distance: Distance, precision: str, noise: Size) -> Size:
    """Return what is tolerated of DDP. A yardstick that is ten times as far off as correct runs measures nothing.

    `noise` is the size that rounding noise may have in this pass. A tensor below it cannot be judged, but is no reason to reject
    the yardstick.
    """
    # A tensor that is zero in exact arithmetic has no size. It has the scale of its pass, and of that the same share is tolerated.
    if is_zero(distance, noise, precision):
        return noise.times(LIMIT[precision] / UNIT[precision])
    tolerated = distance.size.times(LIMIT[precision])
    if distance.error > tolerated.norm or distance.largest_error > tolerated.largest:
        return tolerated.or_more(noise.times(LIMIT[precision]))
    return tolerated
