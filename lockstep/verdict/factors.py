"""Factors by which a tensor or a part of it is off, where its distance from the reference hides them.

Rounding to nearest has no preferred sign. So rounding errors add up in a distance, and cancel in a projection. Let d be the
difference of the run's tensor from the yardstick's, which one process computed in the same dtypes, and a the reference's tensor:

    s = sum(d sign(a)) / sum(|a|)

is a factor less one. In a correct run it is zero up to a standard error, which is measured on what s leaves of d.
docs/verification.md derives what is tolerated, and describes the experiment behind it.
"""

import functools
import math
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional as F

# Elements of a tensor that are looked at together: they stay in the cache, and need no fresh memory
PIECE = 1 << 16
RATE = 1e-6  # of false alarms in a run, over all its projections
BLOCKS = 32  # that a dim is cut into, at most
# Sums of a tensor, at most. Of a larger tensor, neighbours in a row are summed first.
SUMS = 2**18
LEAST = 16  # nonzero elements that a part needs
LEAST_COLUMNS = 8  # of a part
FEWEST = 2.0  # degrees of freedom that a standard error needs
# An element that is smaller in float64 than this share of the tensor's largest is zero in exact arithmetic
ZERO = 2.0**-40
NOTHING = 4 * 2.0**-24  # a factor, less one, that float32 arithmetic may leave on all of a tensor
MANY = 1e6  # degrees of freedom of a standard error that is taken as known
WHOLE = 0  # the first projection is of all of a tensor


Part = tuple[int, int, int]  # dim, start and stop of a part of a tensor
# (parts, the index of the part that each row or column is in, whether these are columns)
Cut = tuple[list[Part | None], np.ndarray, bool]


@dataclass
class Factor:
    """A part of a tensor that is 1 + `excess` times what it should be."""

    name: str
    shape: tuple[int, ...]
    part: Part | None  # None: all of it
    excess: float
    tolerated: float
    where: str = ""  # the micro batch and the rank, of a module's tensor
    rank: int | None = None

    @property
    def multiple(self) -> float:
        return abs(self.excess) / self.tolerated

    def describe(self) -> str:
        part, verb, pronoun = self._part_in_words()
        times = 0.0 if abs(1 + self.excess) <= self.tolerated else round(1 + self.excess, 9)
        prefix = f"in {self.where}, " if self.where else ""
        return f"{prefix}{part} {verb} {times:.7g} times what {pronoun} should be ({self.multiple:.3g} times what a factor may be off by)"

    def _part_in_words(self) -> tuple[str, str, str]:
        """Return the part in words, with its verb and its pronoun, such as ("rows 32 to 63 of 64", "are", "they")."""
        if self.part is None:
            return "all of it", "is", "it"
        dim, start, stop = self.part
        dims_after = len(self.shape) - 1 - dim
        word = "element" if len(self.shape) == 1 else "column" if dims_after == 0 else "row"
        total = f"of {self.shape[dim]}"
        if len(self.shape) > 2 and dims_after > 0:
            word, total = "slice", f"{total} along dim {dim}"
        if stop - start == 1:
            return f"{word} {start} {total}", "is", "it"
        return f"{word}s {start} to {stop - 1} {total}", "are", "they"


@dataclass
class Projections:
    """The projections of one tensor.

    The last dim of each array is over `parts`. The first dim of `errors` and `freedom` is over what shares an error: nothing but
    the element itself, a row, a column.
    """

    name: str
    shape: tuple[int, ...]
    parts: list[Part | None]
    excess: np.ndarray
    errors: np.ndarray  # standard errors
    freedom: np.ndarray  # their degrees of freedom
    rank: int | None = None
    # The same of the difference from the reference, where the difference from the yardstick is large, and may be the yardstick's error
    from_reference: "Projections | None" = None


class Factors:
    """The projections of all tensors of a step. What is tolerated depends on their number.

    `steps` is the number of steps of the run that are judged. `nothing` is a factor, less one, that the arithmetic may leave on
    all of a tensor.
    """

    def __init__(self, steps: int, nothing: float = NOTHING):
        self.steps = steps
        self.nothing = nothing
        self.found: list[Projections] = []

    def add(
        self,
        name: str,
        own: torch.Tensor,
        yardstick: torch.Tensor,
        reference: torch.Tensor,
        *,
        is_weight: bool,
        rank: int | None = None,
    ) -> None:
        """Add the projections of a tensor, unless it is zero or has too few elements.

        `own`, `yardstick` and `reference` are the tensor of the run, of the yardstick, and of the reference in float64, all of one shape.
        `is_weight`: it is the gradient of a parameter.
        """
        if reference.numel() >= LEAST and bool(reference.any()):
            projections = project(name, own, yardstick, reference, is_weight)
            # The yardstick may have rounding errors that the run does not have: of another kind of processor, or of a run that rounds less
            if farthest(projections, 1, self.nothing).multiple > 1:
                projections.from_reference = project(name, own, reference, reference, is_weight)
            projections.rank = rank
            self.found.append(projections)

    @property
    def number(self) -> int:
        """The number of projections in the run."""
        return self.steps * sum(len(projections.parts) for projections in self.found)

    def beyond(self) -> list[Factor]:
        """Return the part of each tensor that is farthest beyond what is tolerated; nothing of a tensor without such a part."""
        number = self.number
        factors = (farthest(projections, number, self.nothing) for projections in self.found)
        return [factor for factor in factors if factor.multiple > 1]


def farthest(one: Projections, number: int, nothing: float = NOTHING) -> Factor:
    """Return the part of a tensor that has the largest multiple of what is tolerated of one of `number` projections.

    Its excess is 0 if that is not beyond. A part that agrees with the reference counts as right, even if the yardstick does not
    agree. On the same kind of processor, at least a third of the excess must be the yardstick's. What the yardstick is off on all of the
    tensor is taken off its parts.
    """
    tolerated = tolerated_of(one, number, nothing)
    multiple = np.abs(one.excess) / tolerated
    if one.from_reference is not None:
        by_reference = one.from_reference.excess
        of_reference = np.abs(by_reference) / tolerated_of(one.from_reference, number, nothing)
        is_right = of_reference <= 1
        if nothing <= NOTHING:
            is_right &= np.abs(by_reference) <= np.abs(one.excess) * (2 / 3)
            if is_right[WHOLE]:
                multiple = np.abs(one.excess - (one.excess[WHOLE] - by_reference[WHOLE])) / tolerated
        multiple = np.where(is_right, np.minimum(multiple, of_reference), multiple)
    index = int(multiple.argmax())
    if multiple[WHOLE] > 1 and abs(one.excess[WHOLE] - one.excess[index]) <= tolerated[index]:
        index = WHOLE  # the part is off like all of the tensor
    part, excess = one.parts[index], 0.0
    if multiple[index] > 1:
        part, excess = _with_neighbours(one, index, tolerated), float(one.excess[index])
    return Factor(one.name, one.shape, part, excess, float(tolerated[index]), rank=one.rank)


def tolerated_of(one: Projections, number: int, nothing: float) -> np.ndarray:
    """Return what is tolerated of the excess of each part."""
    # Student's tail, bounded: P(|t| > x) < (1 + x^2 / n)^(-(n - 1) / 2) for x > 1
    freedom = np.maximum(one.freedom, FEWEST)
    quantile = np.sqrt(freedom * ((number / RATE) ** (2 / (freedom - 1)) - 1))
    return np.where(is_unknown(one), np.inf, one.errors * quantile).max(0) + nothing


def _with_neighbours(one: Projections, index: int, tolerated: np.ndarray) -> Part | None:
    """Return a part, joined with its neighbours that are off by the same factor, as far as can be told.

    A rank's shard has several parts.
    """
    part = one.parts[index]
    if part is None:
        return None
    differences = np.abs(one.excess - one.excess[index])
    is_alike = (differences <= tolerated + tolerated[index]) & (differences < abs(one.excess[index]) / 2)
    dim, *ends = part
    for side, step in ((0, -1), (1, 1)):
        neighbour = index + step
        while 0 <= neighbour < len(one.parts) and is_alike[neighbour]:
            adjacent = one.parts[neighbour]
            if adjacent is None or adjacent[0] != dim or adjacent[2 - side] != ends[side]:
                break
            ends[side] = adjacent[1 + side]
            neighbour += step
    return dim, ends[0], ends[1]


def is_unknown(one: Projections) -> np.ndarray:
    """Whether each standard error has too few degrees of freedom to be known."""
    return one.freedom < FEWEST


def ratio(part: np.ndarray, whole: np.ndarray, otherwise: float = 0.0) -> np.ndarray:
    """Return part / whole, and `otherwise` where `whole` is not positive."""
    out = np.full(np.broadcast_shapes(part.shape, whole.shape), otherwise)
    return np.divide(part, whole, out=out, where=whole > 0)


def project(
    name: str, own: torch.Tensor, yardstick: torch.Tensor, reference: torch.Tensor, is_weight: bool
) -> Projections:
    """Return the projections of a tensor: of all of it, and of the blocks of each dim. Arguments are those of `Factors.add`."""
    # What a module computes from its inputs before it sums has errors of its own. All sums of one of these share its errors: the
    # elements of a token, and, in a weight's gradient, those of an input.
    is_transposed = is_weight and reference.ndim > 1
    shape = reference.movedim(-2, -1).shape if is_transposed else reference.shape
    together = max(1, math.ceil(reference.numel() / SUMS))
    products, sizes = (
        tensor.numpy() for tensor in _summed_rows(own, yardstick, reference, is_transposed, together)
    )
    # A few rows may have most of a tensor, and few errors say little of their size. So there are projections with all rows
    # weighted alike, too.
    row_weights = ratio(np.ones(1), sizes.sum(1, keepdims=True))
    products, sizes = (np.stack([array, row_weights * array]) for array in (products, sizes))
    cuts = _cuts(shape, together, is_weight)
    results = (_project_cut(products, sizes, blocks, of_columns) for _, blocks, of_columns in cuts)
    excess, size, variances, fourths = (np.concatenate(arrays, -1) for arrays in zip(*results, strict=True))
    freedom = ratio(np.square(variances), fourths, otherwise=1.0) - 1
    # The size of errors that columns share is taken as known.
    freedom[2] = MANY
    parts = [part for parts_of_cut, _, _ in cuts for part in 2 * parts_of_cut]
    return Projections(name, tuple(reference.shape), parts, excess, ratio(np.sqrt(variances), size), freedom)


def _summed_rows(
    own: torch.Tensor, yardstick: torch.Tensor, reference: torch.Tensor, is_transposed: bool, together: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (d sign(a), |a|), each (rows, columns / together): `together` neighbours in a row are summed.

    d is `own` less `yardstick`, and a is `reference`. If `is_transposed`, rows are the matrices' columns. An element that is zero in exact
    arithmetic, such as of the gradient at the query of a first position, has no sign, so its d is left out. Memory has a piece of
    the tensors at a time.
    """
    width = reference.shape[-1] if reference.ndim > 1 else 1
    height = reference.shape[-2] if is_transposed else reference.numel() // width
    columns = height if is_transposed else width
    step = max(1, PIECE // width // together) * together if is_transposed else max(1, PIECE // width)
    collected: list[list[torch.Tensor]] = [[], []]
    threshold = ZERO * float(torch.linalg.vector_norm(reference, torch.inf))
    for matrices in zip(
        *(tensor.reshape(-1, height, width) for tensor in (own, yardstick, reference)), strict=True
    ):
        pieces: list[list[torch.Tensor]] = [[], []]
        for values, yardstick_block, reference_block in zip(
            *(matrix.split(step) for matrix in matrices), strict=True
        ):
            difference = values.double() - yardstick_block
            signs = reference_block.sign().masked_fill_(reference_block.abs() < threshold, 0.0)
            for index, block in enumerate((difference * signs, reference_block.abs())):
                matrix = block.T if is_transposed else block
                padded = F.pad(matrix, (0, -matrix.shape[1] % together))
                pieces[index].append(padded.reshape(len(matrix), -1, together).sum(-1))
        for index, tensors in enumerate(pieces):
            collected[index].append(torch.cat(tensors, 1 if is_transposed else 0))
    products, sizes = (torch.cat(tensors) for tensors in collected)
    assert products.shape == (reference.numel() // columns, math.ceil(columns / together))
    return products, sizes


@functools.lru_cache(maxsize=64)  # a model has few shapes
def _cuts(shape: torch.Size, together: int, is_weight: bool) -> list[Cut]:
    """Return the cut of all of a tensor, and those of its dims.

    `shape` is that of the tensor, with the last two dims transposed for a weight's gradient. Columns are sums of `together`
    neighbours.
    """
    width = shape[-1] if len(shape) > 1 else 1
    rows, columns = shape.numel() // width, math.ceil(width / together)
    cuts: list[Cut] = [([None], np.zeros(rows, int), False)]
    dims = list(range(len(shape)))
    if is_weight and len(shape) > 1:
        dims[-2:] = dims[:-3:-1]
    for dim, length in enumerate(shape):
        is_column = len(shape) > 1 and dim == len(shape) - 1
        size, unit = (columns, together) if is_column else (length, 1)
        num_blocks = min(BLOCKS, size // LEAST_COLUMNS if is_column else size, shape.numel() // LEAST)
        if num_blocks < 2:
            continue
        blocks = np.array_split(np.arange(size), num_blocks)
        parts: list[Part | None] = [
            (dims[dim], int(block[0]) * unit, min((int(block[-1]) + 1) * unit, length)) for block in blocks
        ]
        part_of_index = np.repeat(np.arange(num_blocks), [len(block) for block in blocks])
        if not is_column:
            num_before = shape[:dim].numel()
            part_of_index = np.tile(np.repeat(part_of_index, rows // num_before // length), num_before)
        cuts.append((parts, part_of_index, is_column))
    return cuts


def _project_cut(
    products: np.ndarray, sizes: np.ndarray, blocks: np.ndarray, of_columns: bool
) -> tuple[np.ndarray, ...]:
    """Return (excess, size, sums of squared errors (3, parts), sums of their fourth powers (3, parts)) of the parts of a cut.

    `products` and `sizes` are (2, rows, columns): with rows as they are, and weighted alike. The results have the parts of both.
    `blocks` has the part that each row is in, or each column if `of_columns`.

    Errors may be each element's own, or shared by a row. They may be shared by a column, too: where a bias is large, its column
    has nearly one value in all rows, and all of these round to the same side. A part of few columns does not say how large
    such errors are, so their size is that of all columns.
    """
    if of_columns:
        products, sizes = products.swapaxes(1, 2), sizes.swapaxes(1, 2)
    member = np.eye(blocks[-1] + 1)[:, blocks]
    line_sums, line_sizes = products.sum(-1, keepdims=True), sizes.sum(-1, keepdims=True)
    # The errors of a few numbers say nothing of their size. Of a single number, no error is left at all.
    has_enough = member @ np.count_nonzero(sizes, -1, keepdims=True) >= LEAST
    size = (member @ line_sizes) * has_enough
    excess = ratio(member @ line_sums, size)
    line_excess = excess[:, blocks]
    rest = line_excess * sizes
    # In place: fresh memory costs more than the arithmetic
    np.subtract(products, rest, out=rest)
    errors = rest, line_sums - line_excess * line_sizes, member @ rest
    moments = []
    for _ in range(2):
        entry, line, cross = (np.square(values, out=values) for values in errors)
        # Of the lines that are cut into parts, and of those across
        lines = member @ line, cross.sum(-1, keepdims=True)
        moments.append(np.stack([member @ entry.sum(-1, keepdims=True), *lines[:: -1 if of_columns else 1]]))
    if of_columns and len(blocks) < LEAST * len(member):
        squares = np.square(line_sizes)
        # Each part's own excess is taken off its columns' errors.
        correction = len(blocks) / (len(blocks) - len(member))
        shared = ratio(moments[0][2].sum(1, keepdims=True) * correction, squares.sum(1, keepdims=True))
        moments[0][2] = shared * (member @ squares)
    return excess.ravel(), size.ravel(), *(moment.reshape(3, -1) for moment in moments)
