"""How far tensors are from the reference: one pass over the dumps, block by block. numpy and torch only.

error     |T - T*|_2         every element a little off     (T* is the reference)
largest   max |T - T*|       one element far off
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from lockstep.dumps.dump import Dump, Dumps
from lockstep.dumps.optimizers import clip_by
from lockstep.plan import rates
from lockstep.plan.config import BETAS, EPS
from lockstep.training.optim import decays

# elements: all blocks of a comparison stay in the cache, and BLAS starts no threads for so few
BLOCK = 1 << 13


class Size(NamedTuple):
    """How large a tensor is, or an error."""

    norm: float  # 2-norm
    largest: float  # of one element

    def times(self, factor: float) -> "Size":
        return Size(factor * self.norm, factor * self.largest)

    def plus(self, other: "Size") -> "Size":
        return Size(self.norm + other.norm, self.largest + other.largest)

    def or_more(self, other: "Size") -> "Size":
        """The larger of the two, in both."""
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
    scale: float  # <own, reference> / <reference, reference> of what it should show: 1 if it is right; NaN if that is zero
    # Where terms of a sum all but cancel, rounding errors are of the size of these: of a gradient, the largest micro batch's; of a first moment,
    # what it keeps of the one before; of a parameter, what that gives to its change.
    terms: Size = Size(0.0, 0.0)
    unequal: str = ""  # of the batch, whose numbers are equal or not: how many are not, and where first

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
    if error == 0:
        return 0.0
    return error / size if size > 0 else math.inf


class _Sums:
    """Running 2-norm and maximum of one tensor, in float64; infinite once anything is not finite."""

    def __init__(self) -> None:
        self.square, self.largest = 0.0, 0.0

    def add(self, values: np.ndarray) -> None:
        self.square += float(np.dot(values, values))
        # a tensor may have no elements
        self.largest = max(self.largest, float(values.max(initial=0.0)), -float(values.min(initial=0.0)))

    def result(self) -> Size:
        return (
            Size(math.sqrt(self.square), self.largest)
            if math.isfinite(self.square)
            else Size(math.inf, math.inf)
        )


class _Comparison:
    """Sums of one tensor of one dump against its reference."""

    def __init__(self) -> None:
        self.error, self.own_square, self.error_along = _Sums(), 0.0, 0.0

    def add(self, values: np.ndarray, exact: np.ndarray, change: np.ndarray, spare: np.ndarray) -> None:
        """`change` is what the tensor should show. `spare`, of the same length, is overwritten with the difference."""
        self.error.add(np.subtract(values, exact, out=spare))
        self.error_along += float(np.dot(spare, change))
        self.own_square += float(np.dot(values, values))

    def distance(self, reference: _Sums, change: _Sums, terms: _Sums | None = None) -> Distance:
        own = math.sqrt(self.own_square) if math.isfinite(self.own_square) else math.inf
        scale = 1 + self.error_along / change.square if 0 < change.square < math.inf else math.nan
        error, size, shown = self.error.result(), reference.result(), change.result()
        return Distance(
            error=error.norm,
            largest_error=error.largest,
            norm=size.norm,
            largest=size.largest,
            own_norm=own,
            change=shown.norm,
            largest_change=shown.largest,
            scale=scale,
            terms=Size(0.0, 0.0) if terms is None else terms.result(),
        )


_arrays: dict[str, np.ndarray] = {}


def _array(name: str, length: int) -> np.ndarray:
    """A float64 array, used again for every block: fresh memory would cost more than the arithmetic."""
    if name not in _arrays:
        _arrays[name] = np.empty(BLOCK)
    return _arrays[name][:length]


def _blocks(sources: list[tuple[Dump, int, str]]) -> Iterator[list[np.ndarray]]:
    """The float64 blocks of several tensors of one size, side by side. Good until the next ones are asked for."""
    readers = [
        dump.blocks(step, name, BLOCK, _array(f"raw {number}", BLOCK).view(np.uint8))
        for number, (dump, step, name) in enumerate(sources)
    ]
    for blocks in zip(*readers, strict=True):
        wide = []
        for number, block in enumerate(blocks):
            array = _array(f"wide {number}", len(block))
            torch.from_numpy(array).copy_(block)
            wide.append(array)
        yield wide


@dataclass
class Measured:
    """One tensor of several dumps: distances from the reference, differences from the first dump, equality of the last two."""

    distances: dict[str, Distance]
    from_first: dict[str, Size]
    last_two_identical: bool  # the same values, bit for bit, whatever their dtypes


# what is not finite is counted as infinitely far, and said once
QUIET = np.errstate(over="ignore", invalid="ignore")


def distance_of(own: torch.Tensor, reference: torch.Tensor, before: torch.Tensor | None = None) -> Distance:
    """Of two tensors in memory, of one shape and not empty. With `before`, they should show a change from it."""
    flat = [tensor.detach().reshape(-1) for tensor in (own, reference, before) if tensor is not None]
    return distance_of_pieces(zip(*(tensor.split(BLOCK) for tensor in flat), strict=True))


@QUIET
def size_of(tensor: torch.Tensor) -> Size:
    """Of a tensor in memory, which may have no elements."""
    found = _Sums()
    for block in tensor.detach().flatten().split(BLOCK):
        found.add(block.double().numpy())
    return found.result()


@QUIET
def distance_of_pieces(pieces: Iterable[tuple[torch.Tensor, ...]]) -> Distance:
    """The same of flat pieces of (the tensor, the reference, what was before if that counts)."""
    found, wanted, change = _Comparison(), _Sums(), _Sums()
    for blocks in pieces:
        values, exact, *old = (block.double().numpy() for block in blocks)
        shown = exact - old[0] if old else exact
        found.add(values, exact, shown, np.empty_like(values))
        wanted.add(exact)
        change.add(shown)
    return found.distance(wanted, change)


def distance_of_numbers(own: float, reference: float) -> Distance:
    return distance_of(torch.tensor(own), torch.tensor(reference))


@QUIET
def tensor_distances(references: Dumps, dumps: Dumps, step: int, name: str) -> Measured:
    """One tensor of every dump that has it against the reference of its run, often one for all, reading each file once."""
    dumps = {run: dump for run, dump in dumps.items() if dump.has(step, name)}
    distinct = list(dict.fromkeys(references[run] for run in dumps))
    places = [distinct.index(references[run]) for run in dumps]
    wanted, same = [_Sums() for _ in distinct], True
    found, apart = [_Comparison() for _ in dumps], [_Sums() for _ in dumps]
    for blocks in _blocks([(source, step, name) for source in [*distinct, *dumps.values()]]):
        exact, values = blocks[: len(distinct)], blocks[len(distinct) :]
        spare = _array("spare", len(values[0]))
        for sums, block in zip(wanted, exact, strict=True):
            sums.add(block)
        for index, own in enumerate(values):
            found[index].add(own, exact[places[index]], exact[places[index]], spare)
            if index:
                apart[index].add(np.subtract(own, values[0], out=spare))
        if same and len(values) > 1:
            same = np.array_equal(values[-1].view(np.uint64), values[-2].view(np.uint64))
    distances = [
        each.distance(wanted[place], wanted[place]) for each, place in zip(found, places, strict=True)
    ]
    if name.startswith("batch/"):
        for run, distance in zip(dumps, distances, strict=True):
            distance.unequal = _unequal(dumps[run].tensor(step, name), references[run].tensor(step, name))
    differences = [each.result() for each in apart]
    return Measured(
        dict(zip(dumps, distances, strict=True)), dict(zip(dumps, differences, strict=True)), same
    )


def _unequal(own: torch.Tensor, reference: torch.Tensor) -> str:
    places = (own != reference).nonzero().tolist()
    if not places:
        return ""
    first = tuple(places[0])
    said = f"{own[first].item()}, not {reference[first].item()}"
    return f"{len(places)} of {own.numel()} {'is' if len(places) == 1 else 'are'} not what was to be fed, first at {[*first]}: {said}"


@QUIET
def update_distances(dump: Dump, initial: Dump, step: int, clip: float, name: str) -> dict[str, Distance]:
    """What the optimizer made of this run's own gradient, moments and weights, against the same update in float64.

    `initial` holds the weights before step 1; `clip` is what the gradients were multiplied with. Returns a distance
    for "parameter", and with AdamW for "exp_avg" and "exp_avg_sq" (Loshchilov and Hutter 2019, arXiv 1711.05101):

        m = b1 m + (1 - b1) g    v = b2 v + (1 - b2) g^2    p = p - lr (decay p + (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps))
    """
    options = dump.run["config"]
    adamw, rate = options["optimizer"] == "adamw", rates.rate_of(options, step, dump.run["num_steps"])
    shape = dump.steps[str(step)]["tensors"][f"parameter/{name}"]["shape"]
    decay = options["weight_decay"] if decays(len(shape)) else 0.0
    kinds = ["exp_avg", "exp_avg_sq", "parameter"] if adamw else ["parameter"]
    before = initial if step == 1 else dump
    sources = [(dump, step, f"gradient/{name}"), (before, step - 1, f"parameter/{name}")]
    sources += [(dump, step, f"{kind}/{name}") for kind in kinds]
    if adamw and step > 1:
        sources += [(dump, step - 1, f"{kind}/{name}") for kind in kinds[:2]]
    found = {kind: _Comparison() for kind in kinds}
    wanted, change = {kind: _Sums() for kind in kinds}, _Sums()
    terms = {kind: _Sums() for kind in kinds}
    b1, b2 = BETAS
    for gradient, old, *rest in _blocks(sources):
        spare, moments = _array("spare", len(old)), rest[len(kinds) :]
        gradient *= clip
        exact = {}
        if adamw:
            exact["exp_avg"] = m = _array("m", len(old))
            exact["exp_avg_sq"] = v = _array("v", len(old))
            np.multiply(gradient, 1 - b1, out=m)
            np.multiply(np.square(gradient, out=v), 1 - b2, out=v)
            if moments:
                kept = np.multiply(moments[0], b1, out=_array("kept", len(old)))
                terms["exp_avg"].add(kept)
                m += kept
                v += np.multiply(moments[1], b2, out=spare)
            np.sqrt(np.multiply(v, 1 / (1 - b2**step), out=spare), out=spare)
            spare += EPS
            np.divide(m, spare, out=gradient)
            gradient *= 1 / (1 - b1**step)
            if moments:
                kept *= rate / (1 - b1**step)
                terms["parameter"].add(np.divide(kept, spare, out=kept))
        gradient *= -rate
        gradient -= np.multiply(old, rate * decay, out=spare)
        change.add(gradient)
        exact["parameter"] = np.add(gradient, old, out=old)
        for kind, values in zip(kinds, rest, strict=False):
            wanted[kind].add(exact[kind])
            found[kind].add(values, exact[kind], gradient if kind == "parameter" else exact[kind], spare)
    return {
        kind: comparison.distance(wanted[kind], change if kind == "parameter" else wanted[kind], terms[kind])
        for kind, comparison in found.items()
    }


@QUIET
def own_update_distances(
    dump: Dump, replay: Dump, initial: Dump, step: int, name: str
) -> dict[str, Distance]:
    """A parameter and what an optimizer of the user's own keeps of it, after a step, against the replay's, which stepped from the same."""
    found = {
        kind: tensor_distances({"": replay}, {"": dump}, step, f"{kind}/{name}").distances[""]
        for kind, shapes in dump.layout.state.items()
        if name in shapes
    }
    before = initial if step == 1 else dump
    own, wanted, change, key = _Comparison(), _Sums(), _Sums(), f"parameter/{name}"
    for old, exact, values in _blocks([(before, step - 1, key), (replay, step, key), (dump, step, key)]):
        wanted.add(exact)
        np.subtract(exact, old, out=old)
        change.add(old)
        own.add(values, exact, old, _array("spare", len(old)))
    return {**found, "parameter": own.distance(wanted, change)}


@QUIET
def frozen_distance(dump: Dump, initial: Dump, step: int, name: str) -> Distance:
    """A parameter that is not trained, after a step, against what it was before the first."""
    found, wanted = _Comparison(), _Sums()
    for first, now in _blocks([(initial, 0, f"parameter/{name}"), (dump, step, f"parameter/{name}")]):
        wanted.add(first)
        found.add(now, first, first, _array("spare", len(now)))
    return found.distance(wanted, wanted)


@QUIET
def average_distance(dump: Dump, initial: Dump, step: int, name: str) -> Distance:
    """The average of this run's own weights (--ema_decay d) against d average + (1 - d) weights in float64, from its own average before.

    `initial` holds the weights before step 1, with which the average begins.
    """
    decay = dump.run["config"]["ema_decay"]
    before = (initial, 0, f"parameter/{name}") if step == 1 else (dump, step - 1, f"average/{name}")
    found, wanted = _Comparison(), _Sums()
    for old, new, own in _blocks(
        [before, (dump, step, f"parameter/{name}"), (dump, step, f"average/{name}")]
    ):
        old *= decay
        old += np.multiply(new, 1 - decay, out=new)
        wanted.add(old)
        found.add(own, old, old, new)
    return found.distance(wanted, wanted)


def clip_factor(options: dict, grad_norm: float) -> float:
    """What --max_grad_norm multiplies the gradients with; 0 does not clip."""
    return clip_factors(options, grad_norm)[0]


def clip_factors(options: dict, grad_norm: float) -> list[float]:
    """The factors that are in use: torch's, and bound / norm, without the 1e-6 that keeps torch from dividing by zero."""
    bound = options["max_grad_norm"]
    if not 0 < bound < grad_norm + 1e-6:
        return [1.0]
    return [clip_by(bound, grad_norm), min(1.0, bound / grad_norm)]
