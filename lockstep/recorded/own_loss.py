"""The loop's own loss, which --loss names: its value, its terms, and how often each is in what the run trained on."""

from collections.abc import Callable
from typing import Any

import torch

from lockstep.ground.errors import UserError, first_line
from lockstep.recorder.called import Called, Piece
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
    """Of the loop's own loss: (it, as "", and its terms by name; the number that it is a sum over, or 0; the gradients of each at what the model returned)."""
    copies: dict[str, torch.Tensor] = {}

    def copied(name: str, one: torch.Tensor) -> torch.Tensor:
        own = (one if piece is None else piece.cut(one)).clone()
        return copies.setdefault(name, own) if own.requires_grad else own

    try:
        made = function(mapped(output, copied), {**parameters, **tensors})
    except Exception as error:  # noqa: BLE001 - a user's function may raise anything
        raise UserError(
            f"--loss: {type(error).__name__}: {first_line(error)}; the recorded tensors are {', '.join(tensors)}, and lockstep.record.batch(...) adds others"
        ) from error
    loss, *rest = made if isinstance(made, tuple) else (made,)
    if not (isinstance(loss, torch.Tensor) and loss.ndim == 0 and loss.requires_grad):
        raise UserError(
            "--loss: the function must return a scalar tensor that depends on what the model returned, alone or first in a tuple"
        )
    scalars, number, at = {"": loss}, 0.0, {}
    for one in rest:
        if isinstance(one, dict):
            scalars |= one
        else:
            number = float(one)
    for name, scalar in scalars.items():
        if torch.autograd.grad(loss, scalar, retain_graph=True, allow_unused=True)[0] is None:
            raise UserError(
                f"--loss: the loss is not computed from {name}, so how often it counts is not known; "
                "return the tensor itself that is added, such as kl of loss + 0.5 * kl"
            )
        each = torch.autograd.grad(scalar, list(copies.values()), retain_graph=True, materialize_grads=True)
        at[name] = dict(zip(copies, each, strict=True))
    return scalars, number, at


def arrived(called: Called, at: dict[str, dict[str, torch.Tensor]]) -> dict[str, float]:
    """How often a loss and each of its terms are in what arrived at what the model returned; `at` are their gradients there."""
    recorded = {**called.arrived, **{name: torch.tensor(one) for name, one in called.about.scalars.items()}}
    columns = [torch.cat([of[name].flatten().double() for name in recorded]) for of in at.values()]
    own = torch.stack(columns)
    observed = torch.cat([one.flatten().double() for one in recorded.values()])
    weights = (
        torch.linalg.lstsq(own @ own.T, (own @ observed)[:, None], driver="gelsd").solution[:, 0].tolist()
    )
    left = observed - torch.tensor(weights, dtype=torch.float64) @ own
    if called.about.together and float(left.norm()) > CLOSE[torch.bfloat16] * float(observed.norm()):
        raise UserError(
            f"--loss: the model was called with micro batch {called.number} of rank {called.ranks[0]} before a gradient arrived at the one before it, "
            "and no loss of one alone gives that: call the model once with both, or judge without --loss"
        )
    return dict(zip(at, weights, strict=True))
