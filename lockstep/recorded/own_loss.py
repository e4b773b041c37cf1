"""The loop's own loss, which --loss names: its value, its terms, and how often each counts in what was trained on."""

from collections.abc import Callable
from typing import Any

import torch

from lockstep.ground.errors import UserError, first_line
from lockstep.recorder.micro_batch import JoinedMicroBatch, Piece
from lockstep.recorder.model_outputs import mapped
from lockstep.verdict.mean_over import CLOSE

Loss = Callable[..., Any]


def computed(
    function: Loss,
    output: Any,
    tensors: dict[str, torch.Tensor],
    parameters: dict[str, torch.nn.Parameter],
    piece: Piece | None,
) -> tuple[dict[str, torch.Tensor], float, dict[str, dict[str, torch.Tensor]]]:
    """Compute the loop's own loss from what the model returned, and from the recorded tensors and the parameters.

    Returns (the scalars: the loss, as "", and its terms by name; the number that the loss is a sum over, or
    0; by scalar, its gradients at the tensors that the model returned). Where the micro batch is a piece of
    samples, the function is given what the piece has of these tensors. Raises UserError if the function
    fails, or returns no loss that depends on them.
    """
    copies: dict[str, torch.Tensor] = {}

    def copied(name: str, one: torch.Tensor) -> torch.Tensor:
        copy = (one if piece is None else piece.cut(one)).clone()
        return copies.setdefault(name, copy) if copy.requires_grad else copy

    try:
        result = function(mapped(output, copied), {**parameters, **tensors})
    except Exception as error:  # noqa: BLE001 - a user's function may raise anything
        raise UserError(
            f"--loss: {type(error).__name__}: {first_line(error)}; the recorded tensors are {', '.join(tensors)}, and lockstep.record.batch(...) adds others"
        ) from error
    loss, *rest = result if isinstance(result, tuple) else (result,)
    if not (isinstance(loss, torch.Tensor) and loss.ndim == 0 and loss.requires_grad):
        raise UserError(
            "--loss: the function must return a scalar tensor that depends on what the model returned, alone or first in a tuple"
        )
    scalars, number, gradients = {"": loss}, 0.0, {}
    for value in rest:
        if isinstance(value, dict):
            scalars |= value
        elif isinstance(value, (int, float)) or (isinstance(value, torch.Tensor) and value.numel() == 1):
            number = float(value)
        else:
            raise UserError(
                f"--loss: beside the loss, the function returns a {type(value).__name__}; what may follow it are a dict of its terms, and the number that it is a sum over"
            )
    for name, scalar in scalars.items():
        if not (isinstance(scalar, torch.Tensor) and scalar.numel() == 1 and scalar.requires_grad):
            raise UserError(
                f"--loss: the term {name} is not a scalar tensor with a gradient; leave it out, or return the tensor that is added"
            )
        if torch.autograd.grad(loss, scalar, retain_graph=True, allow_unused=True)[0] is None:
            raise UserError(
                f"--loss: the loss is not computed from {name}, so how often it counts is not known; "
                "return the tensor itself that is added, such as kl of loss + 0.5 * kl"
            )
        grads = torch.autograd.grad(scalar, list(copies.values()), retain_graph=True, materialize_grads=True)
        gradients[name] = dict(zip(copies, grads, strict=True))
    return scalars, number, gradients


def arrived(micro_batch: JoinedMicroBatch, at: dict[str, dict[str, torch.Tensor]]) -> dict[str, float]:
    """Return how often a loss and each of its terms count in what arrived, in the run, at what the model returned.

    `at` has the gradients of each of them there. What arrived is fitted with these by least squares. Raises
    UserError if the fit leaves too much of it and the model was called before a gradient had arrived for the
    micro batch before.
    """
    recorded = {
        **micro_batch.output_gradients,
        **{name: torch.tensor(g) for name, g in micro_batch.record.scalars.items()},
    }
    outside = next(
        (name for name in recorded if any(name not in gradients for gradients in at.values())), None
    )
    if outside is not None:
        raise UserError(
            f"--loss: the loop trains on {outside}, too, which the function is not given: return it from the model's forward, or judge without --loss"
        )
    flat = [torch.cat([gradients[name].flatten().double() for name in recorded]) for gradients in at.values()]
    rows = torch.stack(flat)
    observed = torch.cat([gradient.flatten().double() for gradient in recorded.values()])
    weights = (
        torch.linalg.lstsq(rows @ rows.T, (rows @ observed)[:, None], driver="gelsd").solution[:, 0].tolist()
    )
    rest = observed - torch.tensor(weights, dtype=torch.float64) @ rows
    if micro_batch.record.together and float(rest.norm()) > CLOSE[torch.bfloat16] * float(observed.norm()):
        raise UserError(
            f"--loss: the model was called with micro batch {micro_batch.number} of rank {micro_batch.ranks[0]} before a gradient arrived at the one before it, "
            "and no loss of one alone gives that: call the model once with both, or judge without --loss"
        )
    return dict(zip(at, weights, strict=True))
