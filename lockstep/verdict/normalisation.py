"""What a recorded gradient is made of: how much of each micro batch's own, and what this weighting is called.

Let g_i be the gradient of the loss of micro batch i in float64. Every correct run's gradient is a weighted sum of them,

    gradient = sum_i w_i g_i + rest

whatever the loss is divided by. So the weights are measured, never assumed. They make the sum of the tensors' distances small, not that of
their squares, so fewer than half of the tensors may be wrong: these are then left out. The rest says whether the arithmetic is right; the weights say what the loss is a mean over.
"""

import functools
import itertools
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from lockstep.verdict.distance import BLOCK, Size, size_of
from lockstep.verdict.lazy import Lazy

ROUNDS = 20
OUTLIER = 10  # times the median rest
WRITTEN = 10  # whole numbers below this are written into losses
Gradients = Mapping[str, torch.Tensor]  # by parameter
Factors = Mapping[str, float]  # such as of clipping, by parameter; 1 where there is none
# Of the columns with each other, and with what was observed
Products = dict[str, tuple[torch.Tensor, torch.Tensor]]


@dataclass
class Fit:
    """`weights[i]` belongs to micro batch i; `rest` is the relative 2-norm of what they leave of each tensor.

    `largest_term` is the size of the largest tensor of a sum, relative to the sum, in a typical gradient. `squares` are the products of the
    columns with each other, by tensor.
    """

    weights: torch.Tensor
    rest: dict[str, float]
    largest_term: float = 0.0
    squares: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def typical(self) -> float:
        return statistics.median(self.rest.values())


def fit(
    observed: Gradients,
    columns: list[Gradients],
    factors: Factors | None = None,
    like: Fit | None = None,
    losses: int | None = None,
) -> Fit:
    """The weights with which the columns, times each tensor's factor, make the observed gradients; each tensor counts alike.

    Tensors that are zero are left out. `like` is a fit of the same columns to other gradients. The first `losses` columns, None for all, are of
    losses: one that gives no tensor a gradient, such as of a discriminator where the generator is trained, has the mean of their weights.
    """
    products: Products = {}
    squares = {} if like is None else like.squares
    for name in observed:
        size = _norm(_pieces(observed, name))
        if size > 0:
            squares[name], right = _products(observed, columns, factors, name, squares.get(name))
            products[name] = (squares[name] / size**2, right / size**2)
    if not products:
        return Fit(torch.zeros(len(columns), dtype=torch.float64), dict.fromkeys(observed, 0.0))
    counts = dict.fromkeys(products, 1.0)
    for _ in range(ROUNDS):  # least squares, each time with the tensors weighed by their distances
        weights = _solved(products, counts)
        near = {name: _near(*products[name], weights) for name in products}
        typical = statistics.median(near.values())
        counts = {name: 1 / max(distance, typical) for name, distance in near.items()}
    weights = _solved(products, {name: 1.0 for name in products if near[name] <= OUTLIER * typical})
    sizes = torch.stack([square.diagonal() for square, _ in products.values()]).sum(0)[:losses]
    if bool(sizes.any()):
        weights[:losses][sizes == 0] = weights[:losses][sizes != 0].mean()
    terms = ((square.diagonal().sqrt() * weights).abs().max() for square, _ in products.values())
    rest = Sum(observed, columns, weights, factors).rest()
    return Fit(weights, rest, statistics.median(map(float, terms)), squares)


def _products(
    observed: Gradients,
    columns: list[Gradients],
    factors: Factors | None,
    name: str,
    square: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`square` are the products of the columns with each other, if they are known."""
    own = torch.zeros(len(columns), len(columns), dtype=torch.float64)
    with_observed = torch.zeros(len(columns), dtype=torch.float64)
    each = [Sum(observed, [column], torch.ones(1), factors) for column in columns]
    for piece, *of_columns in zip(*(_pieces(one, name) for one in (observed, *each)), strict=True):
        for row, column in enumerate(of_columns):
            with_observed[row] += np.dot(column, piece)
            for other in range(row + 1) if square is None else ():
                own[row, other] += np.dot(column, of_columns[other])
    return own + own.tril(-1).T if square is None else square, with_observed


def _solved(products: Products, counts: dict[str, float]) -> torch.Tensor:
    weighed = ([count * one for one in products[name]] for name, count in sorted(counts.items()))
    square, right = (torch.stack(each).sum(0) for each in zip(*weighed, strict=True))
    return torch.linalg.lstsq(square, right[:, None], driver="gelsd").solution[:, 0]


def _near(square: torch.Tensor, right: torch.Tensor, weights: torch.Tensor) -> float:
    """A tensor's rest, from the products alone: to half of the digits."""
    return math.sqrt(max(float(1 - 2 * weights @ right + weights @ square @ weights), 1e-16))


class Sum(Mapping[str, torch.Tensor]):
    """A weighted sum of gradients, in float64, of the names that `like` has; what a column does not have is zero there.

    `factors` are what further tensors are multiplied with. Nothing of the sum is kept: a tensor is computed when it is asked for.
    """

    def __init__(
        self,
        like: Gradients,
        columns: list[Gradients],
        weights: torch.Tensor,
        factors: Factors | None = None,
    ):
        self.like, self.columns, self.weights = like, columns, weights.tolist()
        self.factors = factors or {}

    def of(self, name: str) -> list[tuple[float, Gradients]]:
        """The weights and columns that have this tensor."""
        factor = self.factors.get(name, 1.0)
        return [
            (weight * factor, column)
            for weight, column in zip(self.weights, self.columns, strict=True)
            if name in column
        ]

    def __getitem__(self, name: str) -> torch.Tensor:
        total = None
        for weight, column in self.of(name):
            tensor = column[name]
            total = tensor.double() * weight if total is None else total.add_(tensor, alpha=weight)
        return torch.zeros(self.like[name].shape, dtype=torch.float64) if total is None else total

    def largest_term(self, name: str) -> Size:
        """The size of the largest tensor that is summed. Where tensors all but cancel, rounding errors are of this size."""
        largest = Size(0.0, 0.0)
        for weight, column in self.of(name):
            largest = largest.or_more(size_of(column[name]).times(abs(weight)))
        return largest

    def rest(self) -> dict[str, float]:
        """The relative 2-norm of what the sum leaves of each tensor that it is like; 0 of one that is zero."""
        found = {}
        for name in self.like:
            size = _norm(_pieces(self.like, name))
            both = zip(_pieces(self.like, name), _pieces(self, name), strict=True)
            found[name] = _norm(piece - own for piece, own in both) / size if size > 0 else 0.0
        return found

    def __contains__(self, name: object) -> bool:
        return name in self.like  # Mapping's own would compute the tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.like)

    def __len__(self) -> int:
        return len(self.like)


def accumulated(terms: Sum, dtypes: Mapping[str, torch.dtype]) -> Lazy:
    """The sum in the dtype of each tensor, as a run adds up the gradients of its micro batches: it rounds every time."""

    def make(name: str) -> torch.Tensor:
        # Half of the sums of two numbers of 16 bits lie between two such: what is added is rounded, too, so that as many go up as down
        rounded = [(column[name].double() * weight).to(dtypes[name]) for weight, column in terms.of(name)]
        return functools.reduce(torch.add, rounded).double() if rounded else terms[name]

    return Lazy(terms, make)


def _pieces(gradients: Gradients, name: str) -> Iterator[torch.Tensor]:
    """A tensor in flat pieces in float64, so that memory has none of the size of a tensor for each column."""
    found = gradients.of(name) if isinstance(gradients, Sum) else []
    if not found:
        for piece in gradients[name].flatten().split(BLOCK):
            yield piece.double()
        return
    weights = [weight for weight, _ in found]
    for pieces in zip(*(_pieces(column, name) for _, column in found), strict=True):
        terms = (
            piece if weight == 1 else piece * weight for weight, piece in zip(weights, pieces, strict=True)
        )
        yield functools.reduce(torch.add, terms)


def _norm(pieces: Iterable[torch.Tensor]) -> float:
    return math.sqrt(sum(float(piece.square().sum()) for piece in pieces))


@dataclass
class Weighting:
    """A known weighting: what the loss is a mean over."""

    name: str
    label: str
    weights: torch.Tensor  # of the micro batches' sums over tokens


TOKEN_MEAN, RANK_MEAN, MICRO_MEAN, PIECE_MEAN = "token-mean", "rank-mean", "micro-mean", "piece-mean"
LABELS = {
    TOKEN_MEAN: "the mean over all tokens of the global batch",
    RANK_MEAN: "the mean of the ranks' token means",
    MICRO_MEAN: "the mean of the micro batches' means",
}


def known(tokens: list[int], shares: list[int], numbers: list[int] | None = None) -> list[Weighting]:
    """The weightings that libraries have; equal ones once. `shares[i]` is the share of the samples (data-parallel rank) of micro batch i.

    Where these are pieces of micro batches, `numbers[i]` is the number that the pieces of one have in a share; the mean of their means is the last.
    """
    n = torch.tensor(tokens, dtype=torch.float64)
    wholes = list(zip(shares, range(len(n)) if numbers is None else numbers, strict=True))
    of_share, of_whole = (
        torch.tensor(
            [float(n[[other == own for other in groups]].sum()) for own in groups], dtype=torch.float64
        )
        for groups in (shares, wholes)
    )
    weights = {
        TOKEN_MEAN: torch.ones_like(n) / n.sum(),
        RANK_MEAN: 1 / of_share / len(set(shares)),
        MICRO_MEAN: 1 / of_whole / len(set(wholes)),
        PIECE_MEAN: 1 / n / len(n),
    }
    found: list[Weighting] = []
    for name, own in weights.items():
        if not any(torch.allclose(own, other.weights, rtol=1e-12, atol=0) for other in found):
            found.append(Weighting(name, LABELS.get(name, "the mean of the pieces' means"), own))
    return found


@dataclass
class Named:
    """The known weighting that is nearest to the measured weights, times a factor."""

    weighting: Weighting
    factor: float
    off: float  # relative distance of the measured weights from factor x weighting


def nearest(weights: torch.Tensor, tokens: list[int], candidates: list[Weighting]) -> Named:
    """`weights` are those of the sums over tokens. The factor is that of all tokens together."""
    n = torch.tensor(tokens, dtype=torch.float64)
    found = []
    for candidate in candidates:
        factor = float((weights * n).sum() / (candidate.weights * n).sum())
        distance = (weights * n - factor * candidate.weights * n).norm() / (weights * n).norm()
        found.append(Named(candidate, factor, float(distance)))
    return min(found, key=lambda named: named.off)


def may_be_written(factor: float, tolerance: float) -> bool:
    """Whether a loop may well have this number, or its inverse, in its loss as it stands."""
    times = factor if factor > 1 else 1 / (factor or 1.0)
    return round(times) < WRITTEN and math.isclose(times, round(times), rel_tol=tolerance)


def explanations(factor: float, numbers: dict[str, float], tolerance: float) -> list[str]:
    """What the factor may be: one of the numbers that are known of the run, its inverse, or a product or quotient of two.

    Some two make a small whole number, or its inverse, by accident.
    """
    equal: dict[float, list[str]] = {}
    for name, value in numbers.items():
        if value > 1:
            equal.setdefault(value, []).append(name)
    terms = {" or ".join(names): value for value, names in equal.items()}
    simple = terms | {
        " or ".join(f"1 / {name}" for name in names): 1 / value for value, names in equal.items()
    }
    grouped = {f"({name})" if " or " in name else name: value for name, value in terms.items()}
    pairs: dict[str, float] = {}
    for (one, a), (other, b) in itertools.combinations(grouped.items(), 2):
        pairs |= {
            f"{one} x {other}": a * b,
            f"1 / ({one} x {other})": 1 / (a * b),
            f"{one} / {other}": a / b,
            f"{other} / {one}": b / a,
        }
    for value, names in equal.items():
        if len(names) > 1:
            both = f"{names[0]} x {names[-1]}"
            pairs |= {both: value**2, f"1 / ({both})": 1 / value**2}
    for group in (simple, {} if may_be_written(factor, tolerance) else pairs):
        matching = [name for name, value in group.items() if math.isclose(factor, value, rel_tol=tolerance)]
        if matching:
            return matching
    return []
