"""By what factor a tensor or a part of it is off, where its distance from the reference hides it.

Rounding to nearest has no preferred sign. So rounding errors add up in a distance, and cancel in a projection: with the difference d of the
run's tensor from the yardstick's, which one process computed in the same dtypes, and the reference's tensor a,

    s = sum(d sign(a)) / sum(|a|)

is a factor less one, and zero up to a standard error that is measured on what it leaves of d. docs/verification.md derives what is
tolerated, and has the experiment that holds it.
"""

import functools
import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch.nn import functional as F

PIECE = 1 << 16  # elements of a tensor at a time: they stay in the cache, and need no fresh memory
RATE = 1e-6  # of false alarms, of all projections of a run
BLOCKS = 32  # at most, that a dim is cut into
SUMS = 2**18  # of a tensor, at most: beyond, neighbours in a row are summed first
LEAST = 16  # elements other than zero that a part needs, and columns
FEWEST = 2.0  # degrees of freedom that a standard error needs
# Of a tensor's largest element: what is smaller in float64 is zero in exact arithmetic
ZERO = 2.0**-40
NOTHING = 4 * 2.0**-24  # a factor that float32 arithmetic may leave in all of a tensor
MANY = 1e6  # degrees of freedom of a standard error that is taken as known
WHOLE = 0  # the first projection is of all of a tensor


Part = tuple[int, int, int]  # dim, start and stop of a part of a tensor
Cut = tuple[list[Part | None], np.ndarray, bool]


@dataclass
class Factor:
    """A part of a tensor that is 1 + `excess` times what it should be."""

    name: str
    shape: tuple[int, ...]
    part: Part | None  # None: all of it
    excess: float
    tolerated: float
    where: str = ""  # of a module's tensor: the micro batch, and the rank that has it
    rank: int | None = None

    @property
    def multiple(self) -> float:
        return abs(self.excess) / self.tolerated

    def describe(self) -> str:
        part, is_, it = self._in_words()
        times = 0.0 if abs(1 + self.excess) <= self.tolerated else round(1 + self.excess, 9)
        where = f"in {self.where}, " if self.where else ""
        return f"{where}{part} {is_} {times:.7g} times what {it} should be ({self.multiple:.3g} times what a factor may be off by)"

    def _in_words(self) -> tuple[str, str, str]:
        """("rows 32 to 63 of 64", "are", "they")"""
        if self.part is None:
            return "all of it", "is", "it"
        dim, start, stop = self.part
        behind = len(self.shape) - 1 - dim
        word = "element" if len(self.shape) == 1 else "column" if behind == 0 else "row"
        of = f"of {self.shape[dim]}"
        if len(self.shape) > 2 and behind > 0:
            word, of = "slice", f"{of} along dim {dim}"
        if stop - start == 1:
            return f"{word} {start} {of}", "is", "it"
        return f"{word}s {start} to {stop - 1} {of}", "are", "they"


@dataclass
class Projections:
    """Of one tensor. The last dim of each field is over `parts`, the first of `errors` and `freedom` over three kinds of sums."""

    name: str
    shape: tuple[int, ...]
    parts: list[Part | None]
    excess: np.ndarray
    errors: np.ndarray  # standard errors
    freedom: np.ndarray  # their degrees of freedom
    where: str = ""  # as a factor has it
    rank: int | None = None
    # Of the difference from the reference, where that from the yardstick is large
    from_reference: "Projections | None" = None


class Factors:
    """The projections of all tensors of a step. What is tolerated depends on how many they are."""

    def __init__(self, steps: int, nothing: float = NOTHING):
        self.steps = steps  # of the run that are judged
        self.nothing = nothing  # a factor that the arithmetic may leave in all of a tensor
        self.found: list[Projections] = []

    def add(
        self,
        name: str,
        own: torch.Tensor,
        near: torch.Tensor,
        right: torch.Tensor,
        *,
        is_weight: bool,
        where: str = "",
        rank: int | None = None,
    ) -> None:
        """Of one shape: the run's tensor, the yardstick's and the reference's in float64. `is_weight`: a parameter's gradient."""
        if right.numel() >= LEAST and bool(right.any()):
            found = project(name, own, near, right, is_weight)
            # The yardstick of another kind of processor has rounding errors that the run has not.
            if self.nothing > NOTHING and farthest(found, 1, self.nothing).multiple > 1:
                found = replace(found, from_reference=project(name, own, right, right, is_weight))
            self.found.append(replace(found, where=where, rank=rank))

    @property
    def number(self) -> int:
        """Of projections in the run."""
        return self.steps * sum(len(one.parts) for one in self.found)

    def beyond(self) -> list[Factor]:
        """Of each tensor that has one, the part that is farthest beyond what is tolerated."""
        number = self.number
        found = (farthest(one, number, self.nothing) for one in self.found)
        return [factor for factor in found if factor.multiple > 1]


def farthest(one: Projections, number: int, nothing: float = NOTHING) -> Factor:
    """The part that is farthest from, or beyond, what is tolerated of one of `number` projections.

    A part that is right is none the worse for a yardstick that is not.
    """
    tolerated = _tolerated(one, number, nothing)
    multiple = np.abs(one.excess) / tolerated
    if one.from_reference is not None:
        of_reference = np.abs(one.from_reference.excess) / _tolerated(one.from_reference, number, nothing)
        multiple = np.where(of_reference <= 1, np.minimum(multiple, of_reference), multiple)
    place = int(multiple.argmax())
    if multiple[WHOLE] > 1 and abs(one.excess[WHOLE] - one.excess[place]) <= tolerated[place]:
        place = WHOLE  # this part is one like the others
    if multiple[place] <= 1:
        return Factor(
            one.name, one.shape, one.parts[place], 0.0, float(tolerated[place]), one.where, one.rank
        )
    part = _with_neighbours(one, place, tolerated)
    excess, least = float(one.excess[place]), float(tolerated[place])
    return Factor(one.name, one.shape, part, excess, least, one.where, one.rank)


def _tolerated(one: Projections, number: int, nothing: float) -> np.ndarray:
    """Of each part."""
    # Student's tail, bounded: P(|t| > x) < (1 + x^2 / n)^(-(n - 1) / 2) for x > 1
    freedom = np.maximum(one.freedom, FEWEST)
    times = np.sqrt(freedom * ((number / RATE) ** (2 / (freedom - 1)) - 1))
    return np.where(is_unknown(one), np.inf, one.errors * times).max(0) + nothing


def _with_neighbours(one: Projections, place: int, tolerated: np.ndarray) -> Part | None:
    """A part and those beside it that are off by the same factor, as far as can be told: a rank's shard has several."""
    part = one.parts[place]
    if part is None:
        return None
    apart = np.abs(one.excess - one.excess[place])
    alike = (apart <= tolerated + tolerated[place]) & (apart < abs(one.excess[place]) / 2)
    dim, *ends = part
    for side, step in ((0, -1), (1, 1)):
        other = place + step
        while 0 <= other < len(one.parts) and alike[other]:
            beside = one.parts[other]
            if beside is None or beside[0] != dim or beside[2 - side] != ends[side]:
                break
            ends[side] = beside[1 + side]
            other += step
    return dim, ends[0], ends[1]


def is_unknown(one: Projections) -> np.ndarray:
    return one.freedom < FEWEST


def ratio(part: np.ndarray, whole: np.ndarray, otherwise: float = 0.0) -> np.ndarray:
    out = np.full(np.broadcast_shapes(part.shape, whole.shape), otherwise)
    return np.divide(part, whole, out=out, where=whole > 0)


def project(
    name: str, own: torch.Tensor, near: torch.Tensor, right: torch.Tensor, is_weight: bool
) -> Projections:
    """All projections of a tensor: of all of it, and of each dim's blocks."""
    # What a module computes of its inputs before it sums has errors of its own. All that is summed from one of them shares these: the
    # elements of a token, and of a weight's gradient those of an input.
    is_turned = is_weight and right.ndim > 1
    shape = right.movedim(-2, -1).shape if is_turned else right.shape
    together = max(1, math.ceil(right.numel() / SUMS))
    products, sizes = (one.numpy() for one in _summed(own, near, right, is_turned, together))
    # Few rows may have most of a tensor, and few errors say little of their size. So once more with all rows alike.
    alike = ratio(np.ones(1), sizes.sum(1, keepdims=True))
    products, sizes = (np.stack([each, alike * each]) for each in (products, sizes))
    cuts = _cuts(shape, together, is_weight)
    found = (_project(products, sizes, blocks, of_columns) for _, blocks, of_columns in cuts)
    excess, size, variances, fourth = (np.concatenate(each, -1) for each in zip(*found, strict=True))
    freedom = ratio(np.square(variances), fourth, otherwise=1.0) - 1
    freedom[2] = MANY
    parts = [part for cut, _, _ in cuts for part in 2 * cut]
    return Projections(name, tuple(right.shape), parts, excess, ratio(np.sqrt(variances), size), freedom)


def _summed(
    own: torch.Tensor, near: torch.Tensor, right: torch.Tensor, is_turned: bool, together: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(d sign(a), |a|), each (rows, columns / together): `together` neighbours in a row are summed. Rows of turned matrices are their columns.

    What is zero in exact arithmetic, such as the gradient at the query of a first position, has no sign: its d is left out. Memory has a piece of the tensors at a time.
    """
    width = right.shape[-1] if right.ndim > 1 else 1
    height = right.shape[-2] if is_turned else right.numel() // width
    columns = height if is_turned else width
    step = max(1, PIECE // width // together) * together if is_turned else max(1, PIECE // width)
    found: list[list[torch.Tensor]] = [[], []]
    least = ZERO * float(torch.linalg.vector_norm(right, torch.inf))
    for matrices in zip(*(one.reshape(-1, height, width) for one in (own, near, right)), strict=True):
        pieces: list[list[torch.Tensor]] = [[], []]
        for values, yardstick, exact in zip(*(one.split(step) for one in matrices), strict=True):
            difference = values.double() - yardstick
            signs = exact.sign().masked_fill_(exact.abs() < least, 0.0)
            for which, one in enumerate((difference * signs, exact.abs())):
                turned = one.T if is_turned else one
                padded = F.pad(turned, (0, -turned.shape[1] % together))
                pieces[which].append(padded.reshape(len(turned), -1, together).sum(-1))
        for which, each in enumerate(pieces):
            found[which].append(torch.cat(each, 1 if is_turned else 0))
    products, sizes = (torch.cat(each) for each in found)
    assert products.shape == (right.numel() // columns, math.ceil(columns / together))
    return products, sizes


@functools.lru_cache(maxsize=64)  # a model has few shapes
def _cuts(shape: torch.Size, together: int, is_weight: bool) -> list[Cut]:
    """(the parts, the one that each row or column is in, whether these are columns). Columns are summed, so many `together`."""
    width = shape[-1] if len(shape) > 1 else 1
    rows, columns = shape.numel() // width, math.ceil(width / together)
    found: list[Cut] = [([None], np.zeros(rows, int), False)]
    dims = list(range(len(shape)))
    if is_weight and len(shape) > 1:
        dims[-2:] = dims[:-3:-1]
    for dim, length in enumerate(shape):
        is_column = len(shape) > 1 and dim == len(shape) - 1
        size, times = (columns, together) if is_column else (length, 1)
        number = min(BLOCKS, size // LEAST if is_column else size, shape.numel() // LEAST)
        if number < 2:
            continue
        blocks = np.array_split(np.arange(size), number)
        cut: list[Part | None] = [
            (dims[dim], int(block[0]) * times, min((int(block[-1]) + 1) * times, length)) for block in blocks
        ]
        of_index = np.repeat(np.arange(number), [len(block) for block in blocks])
        if not is_column:
            before = shape[:dim].numel()
            of_index = np.tile(np.repeat(of_index, rows // before // length), before)
        found.append((cut, of_index, is_column))
    return found


def _project(
    products: np.ndarray, sizes: np.ndarray, blocks: np.ndarray, of_columns: bool
) -> tuple[np.ndarray, ...]:
    """(excess (parts), size (parts), variances (3, parts), their squares summed likewise) of arrays (2, rows, columns).

    Errors may be each element's own, or shared by a row. They may be shared by a column, too: where a bias is large, its column has nearly
    one value in all rows, which all round to the same side. A part may have few columns, so the size of these errors is taken as known.
    """
    if of_columns:
        products, sizes = products.swapaxes(1, 2), sizes.swapaxes(1, 2)
    parts = np.eye(blocks[-1] + 1)[:, blocks]
    sums, lengths = products.sum(-1, keepdims=True), sizes.sum(-1, keepdims=True)
    # Of few numbers, the errors say nothing of their size: of one, nothing at all is left.
    many = parts @ np.count_nonzero(sizes, -1, keepdims=True) >= LEAST
    size = (parts @ lengths) * many
    excess = ratio(parts @ sums, size)
    right = excess[:, blocks]
    left = right * sizes
    np.subtract(products, left, out=left)  # in place: fresh memory costs more than the arithmetic
    errors = left, sums - right * lengths, parts @ left
    moments = []
    for _ in range(2):
        each, line, across = (np.square(one, out=one) for one in errors)
        lines = parts @ line, across.sum(-1, keepdims=True)  # of what is cut, and across it
        moments.append(np.stack([parts @ each.sum(-1, keepdims=True), *lines[:: -1 if of_columns else 1]]))
    return excess.ravel(), size.ravel(), *(each.reshape(3, -1) for each in moments)
