"""What the loss of a micro batch is a mean over.

If the model returns the loss, the loss itself shows it: it is the mean of a cross-entropy over labels among the model's inputs, or it
is not. If the loop makes the loss itself from the logits, a cross-entropy is recognised by the gradient that arrives at the logits.

With p the softmax of a token's logits, d its label as a one-hot vector, V classes and label smoothing e, the gradient of

    a (cross-entropy of the token)        is        a (p - (1 - e) d - e / V)

and zero where there is no label. So the label, the weight a and e follow from the gradient. The weight a says what the loss is a mean
over, though neither labels nor loss were seen.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from lockstep.recorder.micro_batch import IGNORED, JoinedMicroBatch, is_label
from lockstep.verdict.float64 import Entropy
from lockstep.verdict.judgement import FLOOR

SAME = 1e-9  # relative difference below which a float64 loss is taken for a mean over tokens
ROWS = 64  # number of tokens that are computed at a time
ALIKE = 0.01  # relative difference below which the weights of all tokens count as equal
# A token whose gradient at weight 1 has a smaller 2-norm says nothing of the weight: its label is all but certain.
SURE = 1e-3
# The relative residual of a gradient, by its dtype, below which it is that of a cross-entropy. Label smoothing below this counts as none.
CLOSE = {
    torch.float64: 1e-3,
    torch.float32: 1e-3,
    torch.bfloat16: 0.03,
    torch.float16: 0.01,
}


@dataclass
class Mean:
    """What the loss of a micro batch is a mean over."""

    tokens: int = 0  # number of tokens that the loss without its further terms is of; 0 if it is not known
    divisor: float = 0.0  # what the loss divides the sum over these tokens by
    smoothing: float = 0.0  # label smoothing of a cross-entropy that the loop makes from the logits
    uncertain: float = 0.0  # relative error that `divisor` may have
    # The loss function of torch that the loop was seen to call; "" if the gradient says what the loss is
    function: str = ""
    # The token that each position must give, -1 where none; None: not known
    targets: torch.Tensor | None = None
    # The name of the input that has the targets; "" if they follow from the gradient at the logits
    labels: str = ""
    samples: int = 0  # that the targets are of; 0 if it is not known


@dataclass
class Recognised:
    """A cross-entropy, as the gradient at the logits shows it."""

    labels: torch.Tensor  # (...), -1 where none
    # Of each token's cross-entropy in what was trained on; 0 if tokens have different weights
    weight: float
    smoothing: float
    rest: float  # relative 2-norm of the gradient's residual


def recognise(logits: torch.Tensor, gradient: torch.Tensor) -> Recognised | None:
    """Return the cross-entropy that a gradient is of; None if it is of none.

    `logits` (..., V) are in float64, `gradient` (..., V) is what arrived at them.
    """
    if logits.ndim < 2 or logits.shape != gradient.shape or gradient.dtype not in CLOSE:
        return None
    gradients = gradient.flatten(0, -2)
    has_label = gradients.any(-1)
    labels = gradients.argmin(-1).masked_fill(~has_label, -1).unflatten(0, logits.shape[:-1])
    used_logits, used_gradients = logits.detach().flatten(0, -2)[has_label], gradients[has_label].double()
    if not len(used_logits):
        return None
    smoothing = _smoothing(used_logits[:ROWS], used_gradients[:ROWS], CLOSE[gradient.dtype])
    product_sum = square_sum = residual_sum = gradient_sum = 0.0
    weights = []
    for x, dx in zip(used_logits.split(ROWS), used_gradients.split(ROWS), strict=True):
        basis = _basis(x, dx, smoothing)
        products, squares = (dx * basis).sum(-1), basis.square().sum(-1)
        product_sum, square_sum = product_sum + float(products.sum()), square_sum + float(squares.sum())
        weights.append((products / squares)[squares.sqrt() > SURE])
        residual_sum += float((dx - (products / squares)[:, None] * basis).square().sum())
        gradient_sum += float(dx.square().sum())
    if square_sum == 0:  # one class alone: nothing depends on the logits
        return None
    weight = product_sum / square_sum
    sure_weights = torch.cat(weights)
    # No token of a batch that is known by heart says what it weighs.
    spread = float((sure_weights / weight - 1).abs().max()) if len(sure_weights) else math.inf
    tolerated = CLOSE[gradient.dtype]
    if smoothing:
        # Another term, such as an entropy, may be nearer to some smoothing than to none.
        tolerated = min(tolerated, max(tolerated * smoothing, FLOOR * torch.finfo(gradient.dtype).eps))
    residual = (residual_sum / gradient_sum) ** 0.5
    if not residual <= tolerated or weight <= 0:
        return None
    return Recognised(labels, weight if spread <= ALIKE else 0.0, smoothing, residual)


def _basis(logits: torch.Tensor, gradient: torch.Tensor, smoothing: float) -> torch.Tensor:
    """Return the gradient of each token's cross-entropy, of weight 1. A token's label is where `gradient` is least."""
    basis = logits.double().softmax(-1) - smoothing / logits.shape[-1]
    return basis.scatter_add(
        -1, gradient.argmin(-1, keepdim=True), basis.new_full((len(basis), 1), smoothing - 1)
    )


def _smoothing(logits: torch.Tensor, gradient: torch.Tensor, least: float) -> float:
    """Return the median label smoothing e over tokens; 0 if it is not between `least` and 1.

    For each token, the coefficients a of p - d and a e of d - 1 / V are fitted by least squares.
    """
    plain = _basis(logits, gradient, 0.0)
    smoothed = _basis(logits, gradient, 1.0) - plain
    matrix = torch.stack(
        [torch.stack([(u * v).sum(-1) for v in (plain, smoothed)], -1) for u in (plain, smoothed)], -2
    )
    right = torch.stack([(gradient * u).sum(-1) for u in (plain, smoothed)], -1)
    weight, product = torch.linalg.lstsq(matrix, right[..., None]).solution[..., 0].unbind(-1)
    smoothing = float((product / weight).median())
    return smoothing if least < smoothing < 1 else 0.0


def mean_of(
    micro_batch: JoinedMicroBatch, loss: float | None, logits: torch.Tensor | None, number: float
) -> Mean:
    """Return what the loss of a micro batch is a mean over, as far as it can be seen.

    `loss` is None if it was not seen. `number` is what the loss is said to be a sum over, 0 if nothing says it.
    """
    mean = Mean()
    if loss is not None:
        divisor = 1.0 if number else divisor_of(micro_batch)
        mean.tokens = int(number)
        found = None if logits is None else targets_of(micro_batch, loss, logits, divisor)
        if found is not None:
            mean.targets, mean.labels, divisor = found
            mean.tokens = int((mean.targets != -1).sum())
        mean.divisor = divisor or mean.tokens
    else:
        gradient = micro_batch.join_chunks(list(micro_batch.output_gradients.values()))
        recognised = None if gradient is None or logits is None else recognise(logits, gradient)
        if gradient is None or recognised is None:
            return _mean_of_function(micro_batch)
        if micro_batch.piece is None:  # else the labels are those of a piece alone
            mean.targets = recognised.labels
        if recognised.weight:
            mean.divisor = micro_batch.record.scale / recognised.weight
            mean.tokens = int((recognised.labels != -1).sum())
            mean.smoothing = recognised.smoothing
            # The residual may be another term, such as a distillation's. The weight then has a part of that term.
            mean.uncertain = FLOOR * max(torch.finfo(gradient.dtype).eps / 2, recognised.rest)
    return mean


def _mean_of_function(micro_batch: JoinedMicroBatch) -> Mean:
    """Return the same for a loss that is the result of one call of a loss function of torch, or a multiple of it."""
    if micro_batch.piece is not None or len(micro_batch.record.losses) != 1:
        return Mean()
    (loss,) = micro_batch.record.losses
    if not loss.is_whole or not loss.number or not loss.weight:
        return Mean()
    divisor = micro_batch.record.scale / loss.weight
    uncertain = FLOOR * loss.roundoff
    return Mean(
        loss.number, divisor, uncertain=uncertain, function=loss.function, targets=micro_batch.targets
    )


def mean_of_calls(micro_batch: JoinedMicroBatch, loss: float, calls: list[Entropy], number: float) -> Mean:
    """Return the same for a loss that a model computes by these calls of cross_entropy. It need not return the logits."""
    mean, divisor = Mean(), 1.0 if number else divisor_of(micro_batch)
    targets = torch.cat([call.targets for call in calls]) if calls else torch.empty(0)
    tokens = int((targets != -1).sum())
    is_one_head = len({call.logits.shape[-1] for call in calls}) == 1
    if not is_one_head or any(len(call.targets) != len(call.logits) for call in calls) or not tokens:
        return mean
    total = sum(
        float(torch.nn.functional.cross_entropy(*call, ignore_index=-1, reduction="sum")) for call in calls
    )
    divided_by = _divided_by(total, loss, divisor or tokens)
    if not divided_by:
        return mean
    mean.tokens, mean.divisor = tokens, divided_by
    mean.targets, mean.labels, _ = in_rows(micro_batch, calls)
    return mean


def in_rows(
    micro_batch: JoinedMicroBatch, calls: list[Entropy]
) -> tuple[torch.Tensor | None, str, torch.Tensor | None]:
    """Arrange calls of cross_entropy as the micro batch is arranged.

    Several calls are of parts of the rows, or each of some positions of all rows. Return their targets (batch, sequence); the name of the
    input that has these, "" if none has; their logits (batch, sequence, V). Targets and logits are None if the arrangement is not known.
    """
    shape = _rows(micro_batch, sum(len(call.targets) for call in calls))
    if shape is None or len({call.logits.shape[-1] for call in calls}) > 1:
        return None, "", None

    def by_rows(parts: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat(parts).unflatten(0, (shape[0], -1))

    def by_positions(parts: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat([part.unflatten(0, (shape[0], -1)) for part in parts], 1)

    must_be_rows = any(len(call.targets) % shape[0] for call in calls)
    for arrange in (by_rows,) if must_be_rows else (by_rows, by_positions):
        targets = _padded(arrange([call.targets for call in calls]), shape, -1)
        labels = next(
            (name for name, known in _candidates(micro_batch, shape) if torch.equal(known, targets)), ""
        )
        if labels or len(calls) == 1:
            return targets, labels, _padded(arrange([call.logits for call in calls]), shape, 0)
    return None, "", None


def _rows(micro_batch: JoinedMicroBatch, places: int) -> torch.Size | None:
    """Return the shape (batch, sequence) of the first input of tokens with so many places, with or without the last place of each row.

    None if there is no such input.
    """
    shapes = (
        tensor.shape
        for tensor in micro_batch.tensors.values()
        if tensor.ndim == 2 and not tensor.is_floating_point()
    )
    return next((shape for shape in shapes if places in (shape.numel(), shape.numel() - shape[0])), None)


def _padded(rows: torch.Tensor, shape: torch.Size, fill: float) -> torch.Tensor:
    """Add `fill` at the end of each row if rows lack the last place of this shape."""
    return rows if rows.shape[1] == shape[1] else torch.cat([rows, torch.full_like(rows[:, :1], fill)], 1)


def divisor_of(micro_batch: JoinedMicroBatch) -> float:
    """Return what the model was told to divide its sum over tokens by; 0 if nothing."""
    divisor: Any = micro_batch.record.plain.get("num_items_in_batch") or micro_batch.tensors.get(
        "num_items_in_batch", 0
    )
    return float(divisor)


def targets_of(
    micro_batch: JoinedMicroBatch, loss: float, logits: torch.Tensor, divisor: float
) -> tuple[torch.Tensor, str, float] | None:
    """Return which token each position must give, -1 where none; the name of the input that has the labels; what the sum is divided by.

    None if the loss of a micro batch is no mean or sum of a cross-entropy. `divisor` is what the model was told to divide by, 0 if nothing. The
    loss itself shows which input has the labels, whether the model shifts them, and which label counts for no token.
    """
    if logits.ndim < 2:
        return None
    rows = logits.detach().double().flatten(0, -2)
    for name, targets in _candidates(micro_batch, logits.shape[:-1]):
        tokens = int((targets != -1).sum())
        if not tokens or int(targets.min()) < -1 or int(targets.max()) >= rows.shape[-1]:
            continue  # no labels, such as the times of a diffusion
        total = torch.nn.functional.cross_entropy(rows, targets.flatten(), ignore_index=-1, reduction="sum")
        divided_by = _divided_by(float(total), loss, divisor or tokens)
        if divided_by:
            return targets, name, divided_by
    return None


def _divided_by(total: float, loss: float, divisor: float) -> float:
    """Return what a sum over tokens is divided by in the loss: `divisor`, or 1 where the loss is the sum itself; 0 if neither."""
    return next((by for by in (divisor, 1.0) if math.isclose(total / by, loss, rel_tol=SAME)), 0.0)


def _candidates(micro_batch: JoinedMicroBatch, shape: torch.Size) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name of each input of this shape that may have the labels, with the token that each position must then give.

    -1 stands where there is none. Each input comes as it is and shifted by one position, for each label that may be ignored.
    """
    # Inputs that are named as labels come first: the tokens, when shifted, may be the same as labels that were shifted before.
    names = sorted(reversed(micro_batch.tensors), key=lambda name: not is_label(name))
    for name in names:
        labels = micro_batch.tensors[name]
        if labels.is_floating_point() or labels.shape != shape:
            continue
        for ignored in IGNORED:
            targets = labels.long().masked_fill(labels == ignored, -1)
            yield name, targets
            yield name, torch.cat([targets[..., 1:], torch.full_like(targets[..., :1], -1)], -1)
