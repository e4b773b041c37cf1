"""How far tensors are from the reference: one pass over the dumps, block by block. numpy and torch only.

error     |T - T*|_2         every element a little off     (T* is the reference)
largest   max |T - T*|       one element far off
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from lockstep.dumps.dump import Dump, Dumps
from lockstep.plan import rates
from lockstep.plan.config import BETAS
from lockstep.recorder.optimizers import clip_by
from lockstep.training.optim import decays, direction

# Elements of a block. All blocks of a comparison stay in the cache, and their memory is not asked of the system.
BLOCK = 1 << 16
# Elements that `dot` gives BLAS at a time. It starts threads for more, which wait for each other where other processes have the cores.
ROW = 1 << 13


class Size(NamedTuple):
    """The size of a tensor, or of an error."""

    norm: float  # 2-norm
    largest: float  # of one element

    def times(self, factor: float) -> "Size":
        return Size(factor * self.norm, factor * self.largest)

    def plus(self, other: "Size") -> "Size":
        return Size(self.norm + other.norm, self.largest + other.largest)

    def or_more(self, other: "Size") -> "Size":
        """Return the larger of the two norms, and the larger of the two largest elements."""
        return Size(max(self.norm, other.norm), max(self.largest, other.largest))


@dataclass
class Distance:
    """One tensor of one dump against the reference: absolute errors, and the sizes that they are compared with."""

    error: float  # infinite, like `largest_error`, if anything is not finite
    largest_error: float
    norm: float  # 2-norm of the reference's tensor
    largest: float
    own_norm: float  # 2-norm of the dump's tensor
    change: float  # 2-norm of what the tensor should show: itself; of a parameter, its last update
    largest_change: float
    # <own, reference> / <reference, reference> of what the tensor should show: 1 if it is right; NaN if that is zero
    scale: float
    # The size of the terms of a sum. Where these all but cancel, rounding errors are of their size. Of a gradient, it is that of
    # the largest micro batch's; of a first moment, what it keeps of the one before; of a parameter, what that gives to its change.
    terms: Size = Size(0.0, 0.0)
    # For the batch, whose numbers are equal or not: how many are not equal, and where first
    unequal: str = ""

    @property
    def errors(self) -> Size:
        return Size(self.error, self.largest_error)

    @property
    def size(self) -> Size:
        return Size(self.norm, self.largest)

    @property
    def shown(self) -> Size:
        return Size(self.change, self.largest_change)

    @property
    def relative(self) -> float:
        return relative(self.error, self.norm)

    @property
    def relative_largest(self) -> float:
        return relative(self.largest_error, self.largest)

    @property
    def across(self) -> float:
        """The part of the error that is no multiple of what the tensor should show."""
        along = (self.scale - 1) * self.change
        return math.sqrt(max(0.0, self.error**2 - along**2))


def relative(error: float, size: float) -> float:
    """Return error / size; 0 without an error, infinity if only the size is 0."""
    if error == 0:
        return 0.0
    return error / size if size > 0 else math.inf


def dot(one: np.ndarray, other: np.ndarray) -> float:
    """Return the inner product of two flat arrays."""
    starts = range(0, one.size, ROW)
    return float(sum(np.dot(one[start : start + ROW], other[start : start + ROW]) for start in starts))


class _Sums:
    """The running 2-norm and largest element of one tensor, in float64; infinite once anything is not finite."""

    def __init__(self) -> None:
        self.square, self.largest = 0.0, 0.0

    def add(self, values: np.ndarray) -> None:
        self.square += dot(values, values)
        # A tensor may have no elements
        most, least = (float(ufunc.reduce(values, initial=0.0)) for ufunc in (np.maximum, np.minimum))
        self.largest = max(self.largest, most, -least)

    def result(self) -> Size:
        return (
            Size(math.sqrt(self.square), self.largest)
            if math.isfinite(self.square)
            else Size(math.inf, math.inf)
        )


class _Comparison:
    """One tensor of one dump against its reference, summed up block by block."""

    def __init__(self, wanted: _Sums | None = None):
        self.error, self.own_square, self.error_along = _Sums(), 0.0, 0.0
        self.wanted, self._shared = wanted or _Sums(), wanted is not None
        self.change: _Sums | None = None  # what it should show, if that is not itself
        self.terms = _Sums()

    def add(self, values: np.ndarray, reference: np.ndarray, change: np.ndarray | None = None) -> None:
        """Add a block of both tensors. `change` is what the tensor should show, if that is not itself."""
        error = values - reference
        self.error.add(error)
        self.error_along += dot(error, reference if change is None else change)
        self.own_square += dot(values, values)
        if not self._shared:
            self.wanted.add(reference)
        if change is not None:
            self.change = self.change or _Sums()
            self.change.add(change)

    def distance(self) -> Distance:
        own_norm = math.sqrt(self.own_square) if math.isfinite(self.own_square) else math.inf
        change = self.change or self.wanted
        scale = 1 + self.error_along / change.square if 0 < change.square < math.inf else math.nan
        error, size, shown = self.error.result(), self.wanted.result(), change.result()
        return Distance(*error, *size, own_norm, *shown, scale, self.terms.result())


def _blocks(sources: list[tuple[Dump, int, str]]) -> Iterator[list[np.ndarray]]:
    """Yield the float64 blocks of several tensors of one size, side by side."""
    readers = (dump.blocks(step, name, BLOCK) for dump, step, name in sources)
    for blocks in zip(*readers, strict=True):
        yield [block.to(torch.float64, copy=True).numpy() for block in blocks]


@dataclass
class Measured:
    """One tensor of several dumps: distances from the reference, differences from the first dump, equality of the last two."""

    distances: dict[str, Distance]
    from_first: dict[str, Size]
    last_two_identical: bool  # the same values, bit for bit, whatever their dtypes


# A value that is not finite counts as infinitely far. That is reported once, without the warnings of numpy.
QUIET = np.errstate(over="ignore", invalid="ignore")


def distance_of(own: torch.Tensor, reference: torch.Tensor) -> Distance:
    """Return the distance of a tensor from its reference. Both are in memory, of one shape and not empty."""
    return distances_of([own], reference)[0]


@QUIET
def distances_of(
    tensors: Sequence[torch.Tensor], reference: torch.Tensor, before: torch.Tensor | None = None
) -> list[Distance]:
    """Return the distances of several tensors from one reference, in one pass over it.

    With `before`, what the tensors should show is the change from `before` to the reference.
    """
    wanted = _Sums()
    comparisons = [_Comparison(wanted) for _ in tensors]
    sources = [reference, *([] if before is None else [before]), *tensors]
    for blocks in zip(*(tensor.detach().reshape(-1).split(BLOCK) for tensor in sources), strict=True):
        reference_block, *others = (block.double().numpy() for block in blocks)
        change = None if before is None else reference_block - others.pop(0)
        wanted.add(reference_block)
        for comparison, values in zip(comparisons, others, strict=True):
            comparison.add(values, reference_block, change)
    return [comparison.distance() for comparison in comparisons]


@QUIET
def size_of(tensor: torch.Tensor) -> Size:
    """Return the size of a tensor in memory, which may have no elements."""
    sums = _Sums()
    for block in tensor.detach().flatten().split(BLOCK):
        sums.add(block.double().numpy())
    return sums.result()


@QUIET
def tensor_distances(references: Dumps, dumps: Dumps, step: int, name: str) -> Measured:
    """Compare one tensor of every dump that has it with the reference of its run. Each file is read once.

    Several runs may share one reference.
    """
    dumps = {run: dump for run, dump in dumps.items() if dump.has(step, name)}
    distinct = list(dict.fromkeys(references[run] for run in dumps))
    reference_sums, is_same = [_Sums() for _ in distinct], True
    indices = [distinct.index(references[run]) for run in dumps]
    comparisons, from_first = (
        [_Comparison(reference_sums[index]) for index in indices],
        [_Sums() for _ in dumps],
    )
    for blocks in _blocks([(source, step, name) for source in [*distinct, *dumps.values()]]):
        reference_blocks, values = blocks[: len(distinct)], blocks[len(distinct) :]
        for sums, block in zip(reference_sums, reference_blocks, strict=True):
            sums.add(block)
        for index, own in enumerate(values):
            comparisons[index].add(own, reference_blocks[indices[index]])
            if index:
                from_first[index].add(own - values[0])
        if is_same and len(values) > 1:
            is_same = np.array_equal(values[-1].view(np.uint64), values[-2].view(np.uint64))
    distances = dict(zip(dumps, (comparison.distance() for comparison in comparisons), strict=True))
    if name.startswith("batch/"):
        for run, distance in distances.items():
            distance.unequal = _unequal(dumps[run].tensor(step, name), references[run].tensor(step, name))
    return Measured(distances, dict(zip(dumps, (sums.result() for sums in from_first), strict=True)), is_same)


def _unequal(own: torch.Tensor, reference: torch.Tensor) -> str:
    """Return how many elements are not equal, and where first, in words; "" if all are equal."""
    places = (own != reference).nonzero().tolist()
    if not places:
        return ""
    first = tuple(places[0])
    difference = f"{own[first].item()}, not {reference[first].item()}"
    return f"{len(places)} of {own.numel()} {'is' if len(places) == 1 else 'are'} not what was to be fed, first at {[*first]}: {difference}"


@QUIET
def update_distances(dump: Dump, initial: Dump, step: int, clip: float, name: str) -> dict[str, Distance]:
    """Compare the update of one parameter with the same update in float64, from this run's own gradient, moments and weights.

    `initial` holds the weights before step 1; `clip` is the factor that the gradients were clipped by. Returns a distance
    for "parameter", and with AdamW for "exp_avg" and "exp_avg_sq" (Loshchilov and Hutter 2019, arXiv 1711.05101):

        m = b1 m + (1 - b1) g    v = b2 v + (1 - b2) g^2    p = p - lr (decay p + (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps))
    """
    options = dump.run["config"]
    is_adamw, rate = options["optimizer"] == "adamw", rates.rate_of(options, step, dump.run["num_steps"])
    shape = dump.steps[step]["tensors"][f"parameter/{name}"]["shape"]
    decay = options["weight_decay"] if decays(len(shape)) else 0.0
    kinds = ["exp_avg", "exp_avg_sq", "parameter"] if is_adamw else ["parameter"]
    before = initial if step == 1 else dump
    sources = [(dump, step, f"gradient/{name}"), (before, step - 1, f"parameter/{name}")]
    sources += [(dump, step, f"{kind}/{name}") for kind in kinds]
    if is_adamw and step > 1:
        sources += [(dump, step - 1, f"{kind}/{name}") for kind in kinds[:2]]
    comparisons = {kind: _Comparison() for kind in kinds}
    b1, b2 = BETAS
    for gradient, old, *rest in _blocks(sources):
        gradient *= clip
        own_blocks, moments = rest[: len(kinds)], rest[len(kinds) :]
        reference_moments, change = [], gradient
        if is_adamw:
            m, v = gradient * (1 - b1), np.square(gradient) * (1 - b2)
            if moments:
                kept = moments[0] * b1
                m, v = m + kept, v + moments[1] * b2
                comparisons["exp_avg"].terms.add(kept)
                comparisons["parameter"].terms.add(rate * direction(kept, v, step))
            reference_moments, change = [m, v], direction(m, v, step)
        change = change * -rate - old * (rate * decay)
        for kind, values, reference in zip(
            kinds, own_blocks, [*reference_moments, change + old], strict=True
        ):
            comparisons[kind].add(values, reference, change if kind == "parameter" else None)
    return {kind: comparison.distance() for kind, comparison in comparisons.items()}


@QUIET
def own_update_distances(
    dump: Dump, replay: Dump, initial: Dump, step: int, name: str
) -> dict[str, Distance]:
    """Compare a parameter and its state in an optimizer of the user's own, after a step, with those of the replay.

    The replay stepped from the same weights, gradients and state.
    """
    distances = {
        kind: tensor_distances({"": replay}, {"": dump}, step, f"{kind}/{name}").distances[""]
        for kind, shapes in dump.layout.state.items()
        if name in shapes
    }
    before = initial if step == 1 else dump
    comparison, key = _Comparison(), f"parameter/{name}"
    for old, reference, values in _blocks([(before, step - 1, key), (replay, step, key), (dump, step, key)]):
        comparison.add(values, reference, reference - old)
    return {**distances, "parameter": comparison.distance()}


@QUIET
def frozen_distance(dump: Dump, initial: Dump, step: int, name: str) -> Distance:
    """Compare a parameter that is not trained, after a step, with what it was before the first step."""
    comparison = _Comparison()
    for before, after in _blocks([(initial, 0, f"parameter/{name}"), (dump, step, f"parameter/{name}")]):
        comparison.add(after, before)
    return comparison.distance()


@QUIET
def average_distance(dump: Dump, initial: Dump, step: int, name: str) -> Distance:
    """Compare the average of this run's weights (--ema_decay d) with d average + (1 - d) weights in float64.

    Both averages follow from the run's own average before the step. `initial` holds the weights before step 1, with which the
    average begins.
    """
    decay = dump.run["config"]["ema_decay"]
    before = (initial, 0, f"parameter/{name}") if step == 1 else (dump, step - 1, f"average/{name}")
    comparison = _Comparison()
    for average, weight, own_average in _blocks(
        [before, (dump, step, f"parameter/{name}"), (dump, step, f"average/{name}")]
    ):
        comparison.add(own_average, average * decay + weight * (1 - decay))
    return comparison.distance()


def clip_factor(options: dict, grad_norm: float) -> float:
    """Return the factor by which --max_grad_norm multiplies the gradients. A bound of 0 does not clip."""
    return clip_factors(options, grad_norm)[0]


def clip_factors(options: dict, grad_norm: float) -> list[float]:
    """Return the clipping factors that libraries use: torch's, and bound / norm.

    The second one is without the 1e-6 that keeps torch from dividing by zero.
    """
    bound = options["max_grad_norm"]
    if not 0 < bound < grad_norm + 1e-6:
        return [1.0]
    return [clip_by(bound, grad_norm), min(1.0, bound / grad_norm)]
