"""What a model returns: the loss, the logits, and any other tensors."""

import dataclasses
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.distributions import Distribution

from lockstep.recorder import tree, wrapped

RECORDS = (Distribution, types.SimpleNamespace)


def outputs_of(output: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """(loss, logits) of what a model returns: a scalar, logits, a tuple, or an object or dict with `loss` and `logits`."""
    if isinstance(output, (torch.Tensor, tuple, list)):
        tensors = [one for one in _as_tuple(output) if isinstance(one, torch.Tensor)]
        scalars = [one for one in tensors if one.ndim == 0]
        further = [one for one in tensors if one.ndim > (1 if len(tensors) > 1 else 0)]
        return next(iter(scalars), None), next(iter(further), None)
    found = _fields(output)
    return found.get("loss"), found.get("logits")


def tensors_of(output: Any) -> dict[str, torch.Tensor]:
    """The numbers that a model returns, by their fields and their places in tuples, such as hidden_states.1."""
    found: dict[str, torch.Tensor] = {}
    mapped(output, lambda name, tensor: found.setdefault(name, tensor))
    return found


def mapped(output: Any, change: Callable[[str, torch.Tensor], torch.Tensor], name: str = "") -> Any:
    """What a model returns, with `change(name, tensor)` in the place of each of `tensors_of`; lists, dicts and objects are changed in place."""
    if isinstance(output, torch.Tensor):
        counts = output.requires_grad or output.is_floating_point()
        return change(name or "0", output) if counts else output
    inside = f"{name}." if name else ""
    if isinstance(output, (tuple, list)):
        each = [mapped(one, change, f"{inside}{place}") for place, one in enumerate(output)]
        if type(output) is list:  # which others may hold, too
            output[:] = each
            return output
        return type(output)(*each) if hasattr(output, "_fields") else type(output)(each)
    if isinstance(output, dict) or not name or _is_record(output):
        fields = _fields(output)
        for key, value in list(fields.items()):
            other = mapped(value, change, f"{inside}{key}")
            if other is not value:
                fields[key] = other
    return output


def map_left(
    model: torch.nn.Module, change: Callable[[str, torch.Tensor], torch.Tensor], since: int = 0
) -> None:
    """The same with what a forward pass has left in its modules, such as a router's loss that the loop adds; a name is MODULE:ATTRIBUTE.

    What was made before the function with the number `since` is not of the pass.
    """

    def made(name: str, tensor: torch.Tensor) -> torch.Tensor:
        of_pass = tensor.grad_fn is not None and tensor.grad_fn._sequence_nr() >= since
        return change(name, tensor) if of_pass else tensor

    for name, module in model.named_modules():
        for key, value in list(vars(module).items()):
            container = type(value) in (torch.Tensor, tuple, list, dict) or _is_record(value)
            if key not in tree.OWN and container:
                vars(module)[key] = mapped(value, made, f"{wrapped.clean(name)}:{key}")


def _is_record(value: Any, inside: int = 2) -> bool:
    """Whether it is an object for a few values, some of them tensors, or such records `inside`. A cache, for instance, is more than that."""
    kind = type(value)  # an object that was left out of a model does not say its class
    if not (dataclasses.is_dataclass(kind) or issubclass(kind, RECORDS)) or issubclass(kind, dict):
        return False
    values = _fields(value).values()
    return any(
        isinstance(one, torch.Tensor) or (inside > 0 and _is_record(one, inside - 1)) for one in values
    )


def _as_tuple(output: Any) -> tuple:
    return (output,) if isinstance(output, torch.Tensor) else tuple(output)


def _fields(output: Any) -> dict[str, Any]:
    return output if isinstance(output, dict) else getattr(output, "__dict__", {})
