"""What loss a loop of its own makes from the logits: a cross-entropy is recognised by the gradient that arrives there.

With p the softmax of a token's logits, d its label as a one-hot vector, V classes and label smoothing e, the gradient of

    a (cross-entropy of the token)        is        a (p - (1 - e) d - e / V)

and zero where there is no label. So the label, the weight a and e follow from the gradient, and a says what the loss is a mean over, though
neither labels nor loss were seen.
"""

from dataclasses import dataclass

import torch

ROWS = 64  # tokens at once
ALIKE = 0.01  # relative: the weights of all tokens are one
SURE = (
    1e-3  # of the basis' size: where a label is all but certain, the gradient is too small to have a weight
)
CLOSE = {
    torch.float32: 1e-3,
    torch.bfloat16: 0.03,
    torch.float16: 0.01,
}  # relative rest, by the gradient's dtype; label smoothing below this is none


@dataclass
class Recognised:
    labels: torch.Tensor  # (...), -1 where none
    weight: float  # of each token's cross-entropy in what was trained on
    smoothing: float


def recognise(logits: torch.Tensor, gradient: torch.Tensor) -> Recognised | None:
    """`logits` (..., V) in float64 and the `gradient` (..., V) at them; None if it is not that of a cross-entropy that weighs all tokens alike."""
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
    if not (rest / size) ** 0.5 <= CLOSE[gradient.dtype] or not spread <= ALIKE or weight <= 0:
        return None
    return Recognised(labels, weight, smoothing)


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
