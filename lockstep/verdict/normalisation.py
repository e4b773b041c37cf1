"""What a recorded gradient is made of: the weight of each micro batch's gradient in it, and what this weighting is called.

Let g_i be the gradient of the loss of micro batch i in float64. Every correct run's gradient is a weighted sum of them,

    gradient = sum_i w_i g_i + rest

whatever the loss is divided by. So the weights are measured, never assumed. They make the sum of the tensors' distances small, not that of
their squares. So fewer than half of the tensors may be wrong: these are then left out. The rest says whether the arithmetic is right;
the weights say what the loss is a mean over.
"""

import functools
import itertools
import math
import statistics
from collections import UserDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from lockstep.verdict.distance import BLOCK, QUIET, Size, dot, size_of
from lockstep.verdict.lazy import Lazy

ROUNDS = 20  # of iteratively reweighted least squares
OUTLIER = 10  # a tensor whose rest is more than so many times the median rest is left out
WRITTEN = 10  # whole numbers below this are written into losses
Gradients = Mapping[str, torch.Tensor]  # by parameter
Factors = Mapping[str, float]  # such as of clipping, by parameter; 1 where there is none
# Tensor -> the inner products of the columns with each other, and those of the columns with what was observed
Products = dict[str, tuple[torch.Tensor, torch.Tensor]]


@dataclass
class Fit:
    """The weights of columns in observed gradients.

    `weights[i]` is that of column i. `rest` is the relative 2-norm of what the weighted sum leaves of each tensor. `largest_term` is the
    norm of the largest term of the sum, relative to the observed tensor's, in a typical tensor. `squares` are the inner products of the
    columns with each other, by tensor.
    """

    weights: torch.Tensor
    rest: dict[str, float]
    largest_term: float = 0.0
    squares: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def typical(self) -> float:
        return statistics.median(self.rest.values())


@QUIET
def fit(
    observed: Gradients,
    columns: list[Gradients],
    factors: Factors | None = None,
    like: Fit | None = None,
    losses: int | None = None,
) -> Fit:
    """Return the weights with which the columns, times each tensor's factor, make the observed gradients. Each tensor counts alike.

    Tensors that are zero are left out. `like` is a fit of the same columns to other gradients: its `squares` are used and added to. The
    first `losses` columns are of losses; None: all are. A loss that gives no tensor a gradient, such as a discriminator's where the
    generator is trained, has the mean of the other losses' weights.
    """
    products: Products = {}
    squares = {} if like is None else like.squares
    for name in observed:
        square, between, right = _products(observed, columns, factors, name, squares.get(name))
        if square > 0:
            squares[name] = between
            products[name] = (between / square, right / square)
    if not products:
        return Fit(torch.zeros(len(columns), dtype=torch.float64), dict.fromkeys(observed, 0.0))
    tensor_weights = dict.fromkeys(products, 1.0)
    # Least squares, each time with tensors weighted by the inverse of their distance in the round before
    for _ in range(ROUNDS):
        weights = _solved(products, tensor_weights)
        distances = {name: _distance(*products[name], weights) for name in products}
        typical = statistics.median(distances.values())
        tensor_weights = {name: 1 / max(distance, typical) for name, distance in distances.items()}
    weights = _solved(products, {name: 1.0 for name in products if distances[name] <= OUTLIER * typical})
    sizes = torch.stack([square.diagonal() for square, _ in products.values()]).sum(0)[:losses]
    if bool(sizes.any()):
        weights[:losses][sizes == 0] = weights[:losses][sizes != 0].mean()
    largest_terms = ((square.diagonal().sqrt() * weights).abs().max() for square, _ in products.values())
    rest = Sum(observed, columns, weights, factors).rest()
    return Fit(weights, rest, statistics.median(map(float, largest_terms)), squares)


def _products(
    observed: Gradients,
    columns: list[Gradients],
    factors: Factors | None,
    name: str,
    known: torch.Tensor | None,
) -> tuple[float, torch.Tensor, torch.Tensor]:
    """Return the inner products of one tensor: observed with itself, of the columns with each other, and of the columns with observed.

    `known` are those of the columns with each other, if they are known already.
    """
    square, between, right = 0.0, np.zeros((len(columns), len(columns))), np.zeros(len(columns))
    sums = [Sum(observed, [column], torch.ones(1), factors) for column in columns]
    for piece, *column_pieces in zip(*(_pieces(like, name) for like in (observed, *sums)), strict=True):
        square += dot(piece, piece)
        for i, column_piece in enumerate(column_pieces):
            right[i] += dot(column_piece, piece)
            for j in range(i + 1) if known is None else ():
                between[i, j] += dot(column_piece, column_pieces[j])
    symmetric = torch.from_numpy(between + np.tril(between, -1).T)
    return square, symmetric if known is None else known, torch.from_numpy(right)


def _solved(products: Products, tensor_weights: dict[str, float]) -> torch.Tensor:
    """Return the columns' weights by least squares, in which each tensor has a weight of its own."""
    weighted = ([weight * part for part in products[name]] for name, weight in sorted(tensor_weights.items()))
    square, right = (torch.stack(parts).sum(0) for parts in zip(*weighted, strict=True))
    return torch.linalg.lstsq(square, right[:, None], driver="gelsd").solution[:, 0]


def _distance(square: torch.Tensor, right: torch.Tensor, weights: torch.Tensor) -> float:
    """Return a tensor's rest, from the inner products alone. It is known to half of the digits only."""
    return math.sqrt(max(float(1 - 2 * weights @ right + weights @ square @ weights), 1e-16))


class Sum(UserDict[str, torch.Tensor]):
    """A weighted sum of gradients in float64, by name. A column counts as zero where it does not have a tensor.

    `like` has the names and shapes. `factors` are what tensors are multiplied with besides. Nothing of the sum is kept: a tensor is
    computed when it is asked for.
    """

    def __init__(
        self,
        like: Gradients,
        columns: list[Gradients],
        weights: torch.Tensor,
        factors: Factors | None = None,
    ):
        self.data = dict.fromkeys(like)  # type: ignore[assignment] # names alone
        self.like, self.columns, self.weights = like, columns, weights.tolist()
        self.factors = factors or {}

    def of(self, name: str) -> list[tuple[float, Gradients]]:
        """Return (weight, column) of each column that has this tensor. The tensor's factor is in the weight."""
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
        """Return the size of the largest term of the sum. Where terms all but cancel, rounding errors are of this size."""
        largest = Size(0.0, 0.0)
        for weight, column in self.of(name):
            largest = largest.or_more(size_of(column[name]).times(abs(weight)))
        return largest

    @QUIET
    def rest(self) -> dict[str, float]:
        """Return the relative 2-norm of what the sum leaves of each tensor of `like`; 0 for a tensor that is zero."""
        rest = {}
        for name in self.like:
            left = whole = 0.0
            for piece, summed in zip(_pieces(self.like, name), _pieces(self, name), strict=True):
                difference = piece - summed
                left += dot(difference, difference)
                whole += dot(piece, piece)
            rest[name] = math.sqrt(left / whole) if whole > 0 else 0.0
        return rest


def accumulated(terms: Sum, dtypes: Mapping[str, torch.dtype], scale: float = 1.0) -> Lazy:
    """Return the sum as a run adds up the gradients of its micro batches: in the dtype of each tensor, rounded each time.

    The run's gradients are `scale` times as large there, and not yet clipped: float16 has few digits for small numbers.
    """

    def make(name: str) -> torch.Tensor:
        # Half of the sums of two numbers of 16 bits lie between two such numbers. So the terms are rounded, too, and as many sums are
        # rounded up as down.
        times = scale / terms.factors.get(name, 1.0)
        rounded = [
            (column[name].double() * (times * weight)).to(dtypes[name]) for weight, column in terms.of(name)
        ]
        if not rounded:
            return terms[name]
        total = functools.reduce(torch.add, rounded)
        # The run, whose gradients are finite, then summed in a wider dtype, as FSDP2 may.
        if not total.isfinite().all():
            total = functools.reduce(torch.add, [one.double() for one in rounded])
        return total.double() / times

    return Lazy(terms, make)


def _pieces(gradients: Gradients, name: str) -> Iterator[np.ndarray]:
    """Yield a tensor in flat pieces in float64, so that memory holds no whole tensor for each column."""
    terms = gradients.of(name) if isinstance(gradients, Sum) else []
    if not terms:
        for piece in gradients[name].flatten().split(BLOCK):
            yield piece.double().numpy()
        return
    weights = [weight for weight, _ in terms]
    for pieces in zip(*(_pieces(column, name) for _, column in terms), strict=True):
        weighted = (
            piece if weight == 1 else piece * weight for weight, piece in zip(weights, pieces, strict=True)
        )
        yield functools.reduce(np.add, weighted)


@dataclass
class Weighting:
    """A known weighting of micro batches: what the loss is a mean over."""

    name: str
    label: str
    weights: torch.Tensor  # of the micro batches' sums over tokens
    others: set[str] = field(default_factory=set)  # names of others that are equal here


TOKEN_MEAN, RANK_MEAN, STEP_MEAN, MICRO_MEAN = "token-mean", "rank-mean", "micro-step-mean", "micro-mean"
PIECE_MEAN = "piece-mean"
SUM = "sum"
LABELS = {
    TOKEN_MEAN: "the mean over all tokens of the global batch",
    RANK_MEAN: "the mean of the ranks' token means",
    STEP_MEAN: "the mean of the micro steps' means, each over the tokens of all ranks",
    MICRO_MEAN: "the mean of the micro batches' means",
}


def known(tokens: list[int], shares: list[int], numbers: list[int]) -> list[Weighting]:
    """Return the weightings that libraries have. Of equal ones, the first is returned, which has the names of the others.

    `tokens[i]` is the number of tokens of micro batch i, `shares[i]` the share of the samples (data-parallel rank) that it is of, and
    `numbers[i]` its number in this share. Where samples are cut, i counts the pieces, and pieces of the same samples have one number.
    """
    n = torch.tensor(tokens, dtype=torch.float64)

    def mean_of_means(groups: list) -> torch.Tensor:
        totals = torch.stack([n[[other == group for other in groups]].sum() for group in groups])
        return 1 / totals / len(set(groups))

    weights_by_name = {
        TOKEN_MEAN: torch.ones_like(n) / n.sum(),
        RANK_MEAN: mean_of_means(shares),
        MICRO_MEAN: mean_of_means(list(zip(shares, numbers, strict=True))),
        STEP_MEAN: mean_of_means(numbers),
        PIECE_MEAN: 1 / n / len(n),
    }
    distinct: list[Weighting] = []
    for name, weights in weights_by_name.items():
        equal = [one for one in distinct if torch.allclose(weights, one.weights, rtol=1e-12, atol=0)]
        if equal:
            equal[0].others.add(name)
        else:
            distinct.append(Weighting(name, LABELS.get(name, "the mean of the pieces' means"), weights))
    return distinct


@dataclass
class Named:
    """The known weighting that is nearest to the measured weights, times a factor."""

    weighting: Weighting
    factor: float
    off: float  # relative distance of the measured weights from factor x weighting


def nearest(weights: torch.Tensor, tokens: list[int], candidates: list[Weighting]) -> Named:
    """Return the candidate that is nearest to measured weights, up to a factor, which is that of all tokens together.

    Of several that are as near, the one whose factor is nearest to 1. `weights[i]` is that of the sum over the tokens of micro batch i.
    """
    n = torch.tensor(tokens, dtype=torch.float64)
    named_weightings = []
    for candidate in candidates:
        factor = float((weights * n).sum() / (candidate.weights * n).sum())
        distance = (weights * n - factor * candidate.weights * n).norm() / (weights * n).norm()
        named_weightings.append(Named(candidate, factor, float(distance)))
    return min(named_weightings, key=lambda named: (round(named.off, 9), round(abs(named.factor - 1), 3)))


def may_be_written(factor: float, tolerance: float) -> bool:
    """Whether a loss may well be written with this number, or its inverse: a small whole number."""
    multiple = factor if factor > 1 else 1 / (factor or 1.0)
    return round(multiple) < WRITTEN and math.isclose(multiple, round(multiple), rel_tol=tolerance)


def explanations(factor: float, numbers: dict[str, float], tolerance: float) -> list[str]:
    """Return what a factor may be, in words: a number that is known of the run, its inverse, or a product or quotient of two such numbers.

    `numbers` are those numbers by name; `tolerance` is relative. Products and quotients are not tried for a small whole number or its
    inverse, which some two numbers make by accident. Return [] if nothing matches.
    """
    names_by_value: dict[float, list[str]] = {}
    for name, value in numbers.items():
        if value > 1:
            names_by_value.setdefault(value, []).append(name)
    terms = {" or ".join(names): value for value, names in names_by_value.items()}
    simple = terms | {
        " or ".join(f"1 / {name}" for name in names): 1 / value for value, names in names_by_value.items()
    }
    in_brackets = {f"({name})" if " or " in name else name: value for name, value in terms.items()}
    pairs: dict[str, float] = {}
    for (a_name, a), (b_name, b) in itertools.combinations(in_brackets.items(), 2):
        pairs |= {
            f"{a_name} x {b_name}": a * b,
            f"1 / ({a_name} x {b_name})": 1 / (a * b),
            f"{a_name} / {b_name}": a / b,
            f"{b_name} / {a_name}": b / a,
        }
    for value, names in names_by_value.items():
        if len(names) > 1:
            product = f"{names[0]} x {names[-1]}"
            pairs |= {product: value**2, f"1 / ({product})": 1 / value**2}
    for group in (simple, {} if may_be_written(factor, tolerance) else pairs):
        matching = [name for name, value in group.items() if math.isclose(factor, value, rel_tol=tolerance)]
        if matching:
            return matching
    return []
