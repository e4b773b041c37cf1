"""What a model returns: the loss, the logits, and further scalars."""

from typing import Any

import torch


def outputs_of(output: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """(loss, logits) of what a model returns: a scalar, logits, a tuple, or an object or dict with `loss` and `logits`."""
    if isinstance(output, (torch.Tensor, tuple, list)):
        tensors = [one for one in _as_tuple(output) if isinstance(one, torch.Tensor)]
        scalars = [one for one in tensors if one.ndim == 0]
        further = [one for one in tensors if one.ndim > (1 if len(tensors) > 1 else 0)]
        return next(iter(scalars), None), next(iter(further), None)
    found = _fields(output)
    return found.get("loss"), found.get("logits")


def scalars_of(output: Any) -> dict[str, torch.Tensor]:
    """The scalars that a model returns, the loss among them, by their fields or their places in a tuple."""
    if isinstance(output, (torch.Tensor, tuple, list)):
        found = {str(place): value for place, value in enumerate(_as_tuple(output))}
    else:
        found = _fields(output)
    return {
        name: value for name, value in found.items() if isinstance(value, torch.Tensor) and value.ndim == 0
    }


def _as_tuple(output: Any) -> tuple:
    return (output,) if isinstance(output, torch.Tensor) else tuple(output)


def _fields(output: Any) -> dict[str, Any]:
    return output if isinstance(output, dict) else getattr(output, "__dict__", {})
