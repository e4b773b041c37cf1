"""Where the error is inside a tensor: the largest error in each block, the elements that are farthest off, the slices that are wrong."""

import math
from dataclasses import dataclass

import numpy as np
import torch

from lockstep.plan.mesh import runs

SIDE = 64  # largest number of blocks along each side of a picture
COARSE = 16  # the same for tensors that come after the first ones that are too far
ELEMENTS = 8  # largest number of elements that are listed
PARTS = 100_000  # shares of the squared error are in units of 1 / PARTS
RUNS = 6  # number of runs of wrong slices that are listed for each dim
LEVELS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
# The levels span so many powers of ten below the largest error. Smaller errors have the lowest level.
DECADES = 6.0


@dataclass(frozen=True)
class Picture:
    """|run - reference| of one tensor, as a matrix: all dims but the last are flattened into rows."""

    shape: list[int]
    blocks: tuple[int, int]  # size of a block in elements, down and across
    # A character for each block, row by row: "." no error, "!" not finite, else one of LEVELS
    cells: str
    # The error of an element at the highest level. Each level below is DECADES / 61 powers of ten less.
    largest: float
    beyond: float  # an element is wrong if its error is larger than this, which has two digits
    wrong: int  # number of wrong elements
    # For each dim, [start, length] of the runs of slices with wrong elements. After RUNS of them, one more spans all others.
    slices: list[list[list[int]]]
    # (index, the run's value, the reference's value), the farthest first
    elements: list[tuple[list[int], float, float]]
    # Of at most COARSE blocks along each side: the size of a block in elements, down and across; the share of each block in the squared
    # error, in PARTS, row by row
    squares: tuple[int, int, list[int]] | None = None


def draw(
    own: torch.Tensor,
    reference: torch.Tensor,
    tolerated: float,
    tolerated_largest: float,
    side: int = SIDE,
    *,
    counted: bool = False,
) -> Picture:
    """Return the picture of a tensor of any shape that is not empty. A scalar is drawn as a vector of one element.

    `tolerated` is an absolute 2-norm of the error, `tolerated_largest` an absolute error of one element. `counted`: elements are equal or
    not, so each error is 1, and elements are listed in the order of their places.
    """
    values, reference_values = (
        np.atleast_1d(tensor.detach().double().numpy()) for tensor in (own, reference)
    )
    error = np.nan_to_num(np.abs(values - reference_values), nan=math.inf, posinf=math.inf)
    if counted:
        error = np.sign(error)
    beyond = tolerated_largest
    if not (error > beyond).any():  # the error is spread
        beyond = 2 * tolerated / math.sqrt(error.size)
    is_wrong = error > beyond
    flat = error.reshape(-1, error.shape[-1])
    (down, across), blocks = _blocks(flat, side, np.maximum)
    finite = blocks[np.isfinite(blocks)]
    largest = float(finite.max()) if finite.size else 0.0
    elements = error.ravel()
    farthest = (
        np.flatnonzero(elements)[:ELEMENTS]
        if counted
        else torch.from_numpy(elements).topk(min(ELEMENTS, elements.size)).indices
    )
    indices = [tuple(map(int, index)) for index in zip(*np.unravel_index(farthest, error.shape), strict=True)]
    return Picture(
        list(error.shape),
        (down, across),
        _levels(blocks, largest),
        largest,
        float(f"{beyond:.2g}"),
        int(is_wrong.sum()),
        [_slices(is_wrong, dim) for dim in range(error.ndim)],
        [
            (list(index), _short(values[index]), _short(reference_values[index]))
            for index in indices
            if error[index] > 0
        ],
        _squares(flat) if side == SIDE and not counted else None,
    )


def _blocks(flat: np.ndarray, side: int, by: np.ufunc) -> tuple[tuple[int, int], np.ndarray]:
    """Reduce each of at most `side` by `side` blocks of a matrix. Return (size of a block down, across) and the reduced blocks."""
    down, across = (-(-length // side) for length in flat.shape)
    rows = by.reduceat(flat, np.arange(0, flat.shape[0], down), axis=0)
    return (down, across), by.reduceat(rows, np.arange(0, flat.shape[1], across), axis=1)


def _squares(flat: np.ndarray) -> tuple[int, int, list[int]] | None:
    """Return `Picture.squares` of a matrix of errors; None if there is no error, or one that is not finite."""
    largest = flat.max()
    if not 0 < largest < math.inf:
        return None
    size, sums = _blocks(np.square(flat / largest), COARSE, np.add)
    return *size, np.rint(PARTS / sums.sum() * sums).astype(int).ravel().tolist()


def _short(value: np.float64) -> float:
    """Round a value to eight digits."""
    return float(f"{value:.8g}")


def _levels(blocks: np.ndarray, largest: float) -> str:
    """Return a character for each block by its largest error: one of LEVELS, "." for no error, "!" for one that is not finite."""
    top = len(LEVELS) - 1
    with np.errstate(divide="ignore", invalid="ignore"):
        levels = np.rint(top * (1 + np.log10(blocks / largest) / DECADES)).clip(0)
    places = np.select([blocks == 0, np.isinf(blocks)], [top + 1, top + 2], levels)
    return np.frombuffer(f"{LEVELS}.!".encode(), np.uint8)[places.astype(int)].tobytes().decode()


def _slices(wrong: np.ndarray, dim: int) -> list[list[int]]:
    """Return [start, length] of the runs of slices along a dim that have wrong elements. All runs after RUNS of them are one."""
    has_wrong = wrong.any(axis=tuple(other for other in range(wrong.ndim) if other != dim))
    wrong_runs = runs(np.flatnonzero(has_wrong).tolist())
    rest = wrong_runs[RUNS:]
    return [*wrong_runs[:RUNS], *([[rest[0][0], sum(rest[-1]) - rest[0][0]]] if rest else [])]
