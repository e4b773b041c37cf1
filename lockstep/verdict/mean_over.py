"""What the loss of a micro batch is a mean over.

The loss that a model returns says it: it is a mean over some labels among its inputs, or none. Of a loss that a loop makes itself from the logits, a cross-entropy is recognised by the gradient that arrives there.

With p the softmax of a token's logits, d its label as a one-hot vector, V classes and label smoothing e, the gradient of

    a (cross-entropy of the token)        is        a (p - (1 - e) d - e / V)

and zero where there is no label. So the label, the weight a and e follow from the gradient, and a says what the loss is a mean over, though
neither labels nor loss were seen.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from lockstep.recorder.called import IGNORED, Called, is_label
from lockstep.verdict.float64 import Entropy
from lockstep.verdict.judgement import FLOOR

SAME = 1e-9  # relative: the float64 loss is this mean over tokens
ROWS = 64  # tokens at once
ALIKE = 0.01  # relative: the weights of all tokens are one
# Of the basis' size: where a label is all but certain, the gradient is too small to have a weight
SURE = 1e-3
CLOSE = {
    torch.float64: 1e-3,
    torch.float32: 1e-3,
    torch.bfloat16: 0.03,
    torch.float16: 0.01,
}  # relative rest, by the gradient's dtype; label smoothing below this is none


@dataclass
class Mean:
    """What the loss of a micro batch is a mean over."""

    tokens: int = 0  # but for its further terms; 0 if that is not known
    divisor: float = 0.0  # of the sum over these tokens, in the loss
    smoothing: float = 0.0  # of the labels of a cross-entropy that the loop makes from the logits
    uncertain: float = 0.0  # relative error that `divisor` may have
    # Of torch's losses, which the loop was seen to call; "" if the gradient says what it is
    function: str = ""
    targets: torch.Tensor | None = (
        None  # the token that each position must give, -1 where none; None: not known
    )
    # The input that they are made of; "" if they are those that the gradient at the logits says
    labels: str = ""


@dataclass
class Recognised:
    labels: torch.Tensor  # (...), -1 where none
    # Of each token's cross-entropy in what was trained on; 0 if tokens are not weighed alike
    weight: float
    smoothing: float
    rest: float  # of the gradient, relative, that this leaves


def recognise(logits: torch.Tensor, gradient: torch.Tensor) -> Recognised | None:
    """`logits` (..., V) in float64 and the `gradient` (..., V) at them; None if it is not that of a cross-entropy."""
    if logits.ndim < 2 or logits.shape != gradient.shape or gradient.dtype not in CLOSE:
        return None
    arrived = gradient.flatten(0, -2)
    used = arrived.any(-1)
    labels = arrived.argmin(-1).masked_fill(~used, -1).unflatten(0, logits.shape[:-1])
    rows, own = logits.detach().flatten(0, -2)[used], arrived[used].double()
    if not len(rows):
        return None
    smoothing = _smoothing(rows[:ROWS], own[:ROWS], CLOSE[gradient.dtype])
    along = square = rest = size = 0.0
    weights = []
    for some, found in zip(rows.split(ROWS), own.split(ROWS), strict=True):
        basis = _basis(some, found, smoothing)
        products, squares = (found * basis).sum(-1), basis.square().sum(-1)
        along, square = along + float(products.sum()), square + float(squares.sum())
        weights.append((products / squares)[squares.sqrt() > SURE])
        rest += float((found - (products / squares)[:, None] * basis).square().sum())
        size += float(found.square().sum())
    if square == 0:  # one class alone: nothing depends on the logits
        return None
    weight = along / square
    spread = float((torch.cat(weights) / weight - 1).abs().max())
    close = CLOSE[gradient.dtype]
    if smoothing:
        # Another term, such as an entropy, may be nearer to some smoothing than to none.
        close = min(close, max(close * smoothing, FLOOR * torch.finfo(gradient.dtype).eps))
    left = (rest / size) ** 0.5
    if not left <= close or weight <= 0:
        return None
    return Recognised(labels, weight if spread <= ALIKE else 0.0, smoothing, left)


def _basis(logits: torch.Tensor, gradient: torch.Tensor, smoothing: float) -> torch.Tensor:
    """The gradient of each token's cross-entropy; its label is where the gradient is least."""
    basis = logits.double().softmax(-1) - smoothing / logits.shape[-1]
    return basis.scatter_add(
        -1, gradient.argmin(-1, keepdim=True), basis.new_full((len(basis), 1), smoothing - 1)
    )


def _smoothing(logits: torch.Tensor, gradient: torch.Tensor, least: float) -> float:
    """The median of e over tokens: least squares for a and a e, whose factors are p - d and d - 1 / V."""
    plain = _basis(logits, gradient, 0.0)
    other = _basis(logits, gradient, 1.0) - plain
    square = torch.stack(
        [torch.stack([(one * two).sum(-1) for two in (plain, other)], -1) for one in (plain, other)], -2
    )
    right = torch.stack([(gradient * one).sum(-1) for one in (plain, other)], -1)
    weight, product = torch.linalg.lstsq(square, right[..., None]).solution[..., 0].unbind(-1)
    found = float((product / weight).median())
    return found if least < found < 1 else 0.0


def labels_of(logits: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor | None:
    """The labels of a cross-entropy, however its tokens count, by its exact gradient at the logits; None if it is none. -1 where no token counts."""
    found = recognise(logits, gradient)
    return None if found is None else found.labels


def mean_of(called: Called, loss: float | None, logits: torch.Tensor | None, number: float) -> Mean:
    """As far as it is seen; `number` is what the loss is said to be a sum over, 0 if it is not said. None for a `loss` that was not seen."""
    mean = Mean()
    if loss is not None:
        told = 1.0 if number else divisor_of(called)
        mean.tokens = int(number)
        found = None if logits is None else targets_of(called, loss, logits, told)
        if found is not None:
            mean.targets, mean.labels = found
            mean.tokens = int((mean.targets != -1).sum())
        mean.divisor = told or mean.tokens
    else:
        gradient = called.whole_of(list(called.arrived.values()))
        recognised = None if gradient is None or logits is None else recognise(logits, gradient)
        if gradient is None or recognised is None:
            return _mean_of_function(called)
        if called.piece is None:  # else they are those of a piece alone
            mean.targets = recognised.labels
        if recognised.weight:
            mean.divisor = called.about.scale / recognised.weight
            mean.tokens = int((recognised.labels != -1).sum())
            mean.smoothing = recognised.smoothing
            # What is left may be another term, such as a distillation's, which the weight then has a part of.
            mean.uncertain = FLOOR * max(torch.finfo(gradient.dtype).eps / 2, recognised.rest)
    return mean


def _mean_of_function(called: Called) -> Mean:
    """The same for a loss that is that of one call of torch's function, or a multiple of it."""
    if called.piece is not None or len(called.about.losses) != 1:
        return Mean()
    (seen,) = called.about.losses
    if not seen.is_whole or not seen.number or not seen.weight:
        return Mean()
    divisor = called.about.scale / seen.weight
    uncertain = FLOOR * seen.roundoff
    return Mean(seen.number, divisor, uncertain=uncertain, function=seen.function, targets=called.targets)


def mean_of_calls(called: Called, loss: float, calls: list[Entropy], number: float) -> Mean:
    """The same for a loss that a model computes by these calls of cross_entropy, of logits that it need not return."""
    mean, told = Mean(), 1.0 if number else divisor_of(called)
    targets = torch.cat([one.targets for one in calls]) if calls else torch.empty(0)
    tokens = int((targets != -1).sum())
    alike = len({one.logits.shape[-1] for one in calls}) == 1  # else of several heads
    if not alike or any(len(one.targets) != len(one.logits) for one in calls) or not tokens:
        return mean
    total = sum(
        float(torch.nn.functional.cross_entropy(*one, ignore_index=-1, reduction="sum")) for one in calls
    )
    if not math.isclose(total / (told or tokens), loss, rel_tol=SAME):
        return mean
    mean.tokens, mean.divisor = tokens, told or tokens
    mean.targets, mean.labels, _ = in_rows(called, calls)
    return mean


def in_rows(called: Called, calls: list[Entropy]) -> tuple[torch.Tensor | None, str, torch.Tensor | None]:
    """(the targets of these calls as rows (batch, sequence), the input that they are made of, "" if none is, and the logits likewise).

    Several calls are of parts of the rows, or each of some positions of all rows. None where it is not known.
    """
    shape = _rows(called, sum(len(one.targets) for one in calls))
    if shape is None or len({one.logits.shape[-1] for one in calls}) > 1:
        return None, "", None

    def by_rows(parts: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat(parts).unflatten(0, (shape[0], -1))

    def by_positions(parts: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat([one.unflatten(0, (shape[0], -1)) for one in parts], 1)

    of_parts = any(len(one.targets) % shape[0] for one in calls)
    for arranged in (by_rows,) if of_parts else (by_rows, by_positions):
        targets = _padded(arranged([one.targets for one in calls]), shape, -1)
        labels = next((name for name, one in _wanted(called, shape) if torch.equal(one, targets)), "")
        if labels or len(calls) == 1:
            return targets, labels, _padded(arranged([one.logits for one in calls]), shape, 0)
    return None, "", None


def _rows(called: Called, places: int) -> torch.Size | None:
    """The shape of the first input of tokens that has as many places, or so many but for the last of each row."""
    shapes = (one.shape for one in called.tensors.values() if one.ndim == 2 and not one.is_floating_point())
    return next((one for one in shapes if places in (one.numel(), one.numel() - one[0])), None)


def _padded(rows: torch.Tensor, shape: torch.Size, none: float) -> torch.Tensor:
    """With `none` in the last place of each row if there is nothing for it."""
    return rows if rows.shape[1] == shape[1] else torch.cat([rows, torch.full_like(rows[:, :1], none)], 1)


def divisor_of(called: Called) -> float:
    """What the model was told to divide its sum over tokens by; 0 if nothing."""
    told: Any = called.about.plain.get("num_items_in_batch") or called.tensors.get("num_items_in_batch", 0)
    return float(told)


def targets_of(
    called: Called, loss: float, logits: torch.Tensor, divisor: float
) -> tuple[torch.Tensor, str] | None:
    """(which token each position must give, -1 where none; the input that has the labels).

    None if the loss of a micro batch is no mean of a cross-entropy. `divisor` is what the model was told to divide by, 0 if nothing. The
    loss itself says which input has the labels, whether the model shifts them, and which label counts for no token.
    """
    if logits.ndim < 2:
        return None
    own = logits.detach().double().flatten(0, -2)
    for name, wanted in _wanted(called, logits.shape[:-1]):
        tokens = int((wanted != -1).sum())
        if not tokens or int(wanted.min()) < -1 or int(wanted.max()) >= own.shape[-1]:
            continue  # no labels, such as the times of a diffusion
        total = torch.nn.functional.cross_entropy(own, wanted.flatten(), ignore_index=-1, reduction="sum")
        if math.isclose(float(total) / (divisor or tokens), loss, rel_tol=SAME):
            return wanted, name
    return None


def _wanted(called: Called, shape: torch.Size) -> Iterator[tuple[str, torch.Tensor]]:
    """(an input of this shape that may have the labels, which token each position must then give, -1 where none)."""
    # Shifted, the tokens themselves may be the same as labels that were shifted before.
    in_order = sorted(reversed(called.tensors), key=lambda name: not is_label(name))
    for name in in_order:
        labels = called.tensors[name]
        if labels.is_floating_point() or labels.shape != shape:
            continue
        for ignored in IGNORED:
            counted = labels.long().masked_fill(labels == ignored, -1)
            yield name, counted
            yield name, torch.cat([counted[..., 1:], torch.full_like(counted[..., :1], -1)], -1)
