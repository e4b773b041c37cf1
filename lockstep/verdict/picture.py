"""Where the error lies inside a tensor: the largest error in each block, the elements that are farthest off, and which slices are wrong."""

import math
from dataclasses import dataclass

import numpy as np
import torch

from lockstep.plan.mesh import runs

SIDE = 64  # blocks along each side of a picture, at most
COARSE = 16  # the same, of tensors behind the first that are too far
ELEMENTS = 8  # that are listed
PARTS = 100_000  # of the squared error
RUNS = 6  # runs of wrong slices that are listed of each dim
LEVELS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
DECADES = 6.0  # below the largest error; what is smaller has the lowest level


@dataclass(frozen=True)
class Picture:
    """|run - reference| of one tensor. Dims but the last are laid out as rows, one after the other."""

    shape: list[int]
    blocks: tuple[int, int]  # elements of a block, down and across
    # A character for each block, row by row: "." no error, "!" not finite, else one of LEVELS
    cells: str
    # error of an element, at the highest level; each level below is DECADES / 61 less
    largest: float
    beyond: float  # this error, to two digits, an element is wrong
    wrong: int  # elements that are
    # Of each dim, [start, length] of the runs of slices with wrong elements; one behind RUNS of them holds all others
    slices: list[list[list[int]]]
    # index, the run's, the reference's; the farthest first
    elements: list[tuple[list[int], float, float]]
    # Of at most COARSE blocks along each side: elements of a block, and its share of the squared error in PARTS, row by row
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
    """The picture of a tensor of any shape, not empty; a number is a vector of one. Tolerated are an absolute 2-norm of the error, and an error of one element.

    `counted`: its elements are equal or not, so each error is 1, and elements are listed in the order of their places.
    """
    mine, right = (np.atleast_1d(tensor.detach().double().numpy()) for tensor in (own, reference))
    error = np.nan_to_num(np.abs(mine - right), nan=math.inf, posinf=math.inf)
    if counted:
        error = np.sign(error)
    beyond = tolerated_largest
    if not (error > beyond).any():  # the error is spread
        beyond = 2 * tolerated / math.sqrt(error.size)
    wrong = error > beyond
    flat = error.reshape(-1, error.shape[-1])
    (down, across), blocks = _blocks(flat, side, np.maximum)
    finite = blocks[np.isfinite(blocks)]
    largest = float(finite.max()) if finite.size else 0.0
    each = error.ravel()
    farthest = (
        np.flatnonzero(each)[:ELEMENTS]
        if counted
        else torch.from_numpy(each).topk(min(ELEMENTS, each.size)).indices
    )
    places = [tuple(map(int, place)) for place in zip(*np.unravel_index(farthest, error.shape), strict=True)]
    return Picture(
        list(error.shape),
        (down, across),
        _levels(blocks, largest),
        largest,
        float(f"{beyond:.2g}"),
        int(wrong.sum()),
        [_slices(wrong, dim) for dim in range(error.ndim)],
        [(list(place), _short(mine[place]), _short(right[place])) for place in places if error[place] > 0],
        _squares(flat) if side == SIDE and not counted else None,
    )


def _blocks(flat: np.ndarray, side: int, by: np.ufunc) -> tuple[tuple[int, int], np.ndarray]:
    """(elements of a block down and across, what each of at most `side` by `side` blocks comes to)"""
    down, across = (-(-length // side) for length in flat.shape)
    rows = by.reduceat(flat, np.arange(0, flat.shape[0], down), axis=0)
    return (down, across), by.reduceat(rows, np.arange(0, flat.shape[1], across), axis=1)


def _squares(flat: np.ndarray) -> tuple[int, int, list[int]] | None:
    largest = flat.max()
    if not 0 < largest < math.inf:
        return None
    size, sums = _blocks(np.square(flat / largest), COARSE, np.add)
    return *size, np.rint(PARTS / sums.sum() * sums).astype(int).ravel().tolist()


def _short(value: np.float64) -> float:
    return float(f"{value:.8g}")


def _levels(blocks: np.ndarray, largest: float) -> str:
    last = len(LEVELS) - 1
    with np.errstate(divide="ignore", invalid="ignore"):
        level = np.rint(last * (1 + np.log10(blocks / largest) / DECADES)).clip(0)
    places = np.select([blocks == 0, np.isinf(blocks)], [last + 1, last + 2], level)
    return np.frombuffer(f"{LEVELS}.!".encode(), np.uint8)[places.astype(int)].tobytes().decode()


def _slices(wrong: np.ndarray, dim: int) -> list[list[int]]:
    hit = wrong.any(axis=tuple(other for other in range(wrong.ndim) if other != dim))
    found = runs(np.flatnonzero(hit).tolist())
    rest = found[RUNS:]
    return [*found[:RUNS], *([[rest[0][0], sum(rest[-1]) - rest[0][0]]] if rest else [])]
