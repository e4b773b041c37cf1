"""By what factor a tensor or a part of it is off, where its distance from the reference hides it.

Rounding to nearest has no preferred sign. So rounding errors add up in a distance, and cancel in a projection: with the difference d of the
run's tensor from the yardstick's, which one process computed in the same dtypes, and the reference's tensor a,

    s = sum(d sign(a)) / sum(|a|)

is a factor less one, and zero up to a standard error that is measured on what it leaves of d. docs/verification.md derives what is
tolerated, and has the experiment that holds it.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.nn import functional as F

RATE = 1e-6  # of false alarms, of all projections of a run
BLOCKS = 32  # at most, that a dim is cut into
SUMS = 2**18  # of a tensor, at most: beyond, neighbours in a row are summed first
LEAST = 16  # elements that a part needs, and columns
FEWEST = 2.0  # degrees of freedom that a standard error needs
NOTHING = 4 * 2.0**-24  # a factor that float32 arithmetic may leave in all of a tensor
MANY = 1e6  # degrees of freedom of a standard error that is taken as known
WHOLE = 0  # the first projection is of all of a tensor


@dataclass
class Factor:
    """A part of a tensor that is 1 + `excess` times what it should be."""

    name: str
    part: str
    excess: float
    tolerated: float

    @property
    def multiple(self) -> float:
        return abs(self.excess) / self.tolerated

    def describe(self) -> str:
        return f"{self.part} is {1 + self.excess:.7g} times what it should be, tolerated {self.tolerated:.1e} of a factor"


@dataclass
class Projections:
    """Of one tensor. The last dim of each field is over `parts`, the first of `errors` and `freedom` over three kinds of sums."""

    name: str
    parts: list[str]
    excess: torch.Tensor
    errors: torch.Tensor  # standard errors
    freedom: torch.Tensor  # their degrees of freedom


class Factors:
    """The projections of all tensors of a step. What is tolerated depends on how many they are."""

    def __init__(self, steps: int):
        self.steps = steps  # of the run that are judged
        self.found: list[Projections] = []

    def add(
        self, name: str, own: torch.Tensor, near: torch.Tensor, right: torch.Tensor, *, is_weight: bool
    ) -> None:
        """Of one shape: the run's tensor, the yardstick's and the reference's in float64. `is_weight`: a parameter's gradient."""
        if right.numel() >= LEAST and bool(right.any()):
            self.found.append(project(name, own.double() - near, right, is_weight))

    @property
    def number(self) -> int:
        """Of projections in the run."""
        return self.steps * sum(len(one.parts) for one in self.found)

    def beyond(self) -> list[Factor]:
        """Of each tensor that has one, the part that is farthest beyond what is tolerated."""
        number = self.number
        return [factor for one in self.found if (factor := farthest(one, number)).multiple > 1]


def farthest(one: Projections, number: int) -> Factor:
    """The part that is farthest from, or beyond, what is tolerated of one of `number` projections."""
    # Student's tail, bounded: P(|t| > x) < (1 + x^2 / n)^(-(n - 1) / 2) for x > 1
    freedom = one.freedom.clamp_min(FEWEST)
    times = (freedom * ((number / RATE) ** (2 / (freedom - 1)) - 1)).sqrt()
    tolerated = (one.errors * times).masked_fill(_is_unknown(one), torch.inf).amax(0) + NOTHING
    multiple = one.excess.abs() / tolerated
    place = int(multiple.argmax())
    if multiple[WHOLE] > 1 and (one.excess[WHOLE] - one.excess[place]).abs() <= tolerated[place]:
        place = WHOLE  # this part is one like the others
    return Factor(one.name, one.parts[place], float(one.excess[place]), float(tolerated[place]))


def chances(one: Projections) -> torch.Tensor:
    """A bound of the chance that rounding errors give so large a factor or a larger one, of each part."""
    freedom = one.freedom.clamp_min(FEWEST)
    times = ((one.excess.abs() - NOTHING).clamp_min(0) / one.errors).nan_to_num(0.0)
    bound = (1 + times.square() / freedom) ** (-(freedom - 1) / 2)
    return bound.masked_fill(_is_unknown(one), 1.0).amax(0)


def _is_unknown(one: Projections) -> torch.Tensor:
    return (one.freedom < FEWEST) & (one.errors > 0)


def project(name: str, difference: torch.Tensor, right: torch.Tensor, is_weight: bool) -> Projections:
    """All projections of a tensor: of all of it, and of each dim's blocks."""
    # What a module computes of its inputs before it sums has errors of its own. All that is summed from one of them shares these: the
    # elements of a token, and of a weight's gradient those of an input.
    if is_weight and right.ndim > 1:
        difference, right = (one.movedim(-2, -1) for one in (difference, right))
    columns = right.shape[-1] if right.ndim > 1 else 1
    rows = right.numel() // columns
    together = max(1, math.ceil(right.numel() / SUMS))
    products, sizes = (
        F.pad(one.reshape(rows, columns), (0, -columns % together)).reshape(rows, -1, together).sum(-1)
        for one in (difference * right.sign(), right.abs())
    )
    # Few rows may have most of a tensor, and few errors say little of their size. So once more with all rows alike.
    alike = torch.where(sizes.any(1, keepdim=True), 1 / sizes.sum(1, keepdim=True), 0.0)
    parts: list[str] = []
    found = []
    for texts, of_rows, of_columns in _cuts(right.shape, together, is_weight):
        for weight in (torch.ones_like(alike), alike):
            parts += texts
            found.append(_project(products * weight, sizes * weight, of_rows, of_columns))
    return Projections(name, parts, *(torch.cat(each, -1) for each in zip(*found, strict=True)))


def _cuts(
    shape: torch.Size, together: int, is_weight: bool
) -> Iterator[tuple[list[str], torch.Tensor, torch.Tensor]]:
    """(what the parts are called, which rows are in each, which columns). Columns are summed, so many `together`."""
    width = shape[-1] if len(shape) > 1 else 1
    rows, columns = shape.numel() // width, math.ceil(width / together)
    all_rows, all_columns = (torch.ones(size, 1, dtype=torch.float64) for size in (rows, columns))
    yield ["all of it"], all_rows, all_columns
    dims = list(range(len(shape)))
    if is_weight and len(shape) > 1:
        dims[-2:] = dims[:-3:-1]
    for dim, length in enumerate(shape):
        is_column = len(shape) > 1 and dim == len(shape) - 1
        size, times = (columns, together) if is_column else (length, 1)
        number = min(BLOCKS, size // LEAST if is_column else size, shape.numel() // LEAST)
        if number < 2:
            continue
        blocks = torch.arange(size).tensor_split(number)
        of_index = torch.stack([torch.isin(torch.arange(size), block).double() for block in blocks], 1)
        texts = [
            f"[{int(block[0]) * times}:{min(int(block[-1] + 1) * times, length)}] of dim {dims[dim]}"
            for block in blocks
        ]
        if is_column:
            yield texts, all_rows, of_index
        else:
            before = shape[:dim].numel()
            after = rows // before // length
            yield texts, of_index.repeat_interleave(after, 0).repeat(before, 1), all_columns


def _project(
    products: torch.Tensor, sizes: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(excess (parts), standard errors (3, parts), degrees of freedom (3, parts)).

    Errors may be each element's own, or shared by a row. They may be shared by a column, too: where a bias is large, its column has nearly
    one value in all rows, which all round to the same side. A part may have few columns, so the size of these errors is taken as known.
    """
    in_rows, sizes_of_rows = products @ columns, sizes @ columns
    size = rows.T @ sizes_of_rows
    excess = torch.where(size > 0, rows.T @ in_rows / size, 0.0)
    left = products - rows @ excess @ columns.T * sizes
    of_elements = left.square()
    of_rows = (in_rows - rows @ excess * sizes_of_rows).square()
    of_columns = (rows.T @ left).square()
    variances, fourth = (
        torch.stack([rows.T @ elements @ columns, rows.T @ of_row, of_column @ columns])
        for elements, of_row, of_column in (
            (of_elements, of_rows, of_columns),
            (of_elements.square(), of_rows.square(), of_columns.square()),
        )
    )
    number = torch.where(fourth > 0, variances.square() / fourth, 1.0)
    errors = torch.where(size > 0, variances.sqrt() / size, 0.0)
    freedom = torch.cat([number[:2] - 1, torch.full_like(number[:1], MANY)])
    return excess.flatten(), errors.flatten(1), freedom.flatten(1)
