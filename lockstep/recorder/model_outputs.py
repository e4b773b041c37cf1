"""What a model returns: the loss, the logits, and any other tensors."""

import dataclasses
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.distributions import Distribution

from lockstep.recorder import tree, wrapped

# Classes of objects for a few values, beside dataclasses
RECORDS = (Distribution, types.SimpleNamespace)


def outputs_of(output: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return (loss, logits) of a model's output; None for what it does not have.

    The output is a scalar, logits, a tuple or list of them, or an object or dict with `loss` and `logits`.
    """
    if isinstance(output, (torch.Tensor, tuple, list)):
        elements = (output,) if isinstance(output, torch.Tensor) else output
        tensors = [tensor for tensor in elements if isinstance(tensor, torch.Tensor)]
        scalars = [tensor for tensor in tensors if tensor.ndim == 0]
        others = [tensor for tensor in tensors if tensor.ndim > (1 if len(tensors) > 1 else 0)]
        return next(iter(scalars), None), next(iter(others), None)
    loss, logits = (_fields(output).get(name) for name in ("loss", "logits"))
    is_loss = isinstance(loss, torch.Tensor) and loss.numel() == 1
    return loss if is_loss else None, logits if isinstance(logits, torch.Tensor) else None


def tensors_of(output: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of a model's output that are of floating point or require gradients.

    Names are made of fields and places in tuples, such as hidden_states.1.
    """
    tensors: dict[str, torch.Tensor] = {}
    mapped(output, lambda name, tensor: tensors.setdefault(name, tensor))
    return tensors


def mapped(output: Any, change: Callable[[str, torch.Tensor], torch.Tensor], name: str = "") -> Any:
    """Return a model's output with each tensor of `tensors_of` replaced by `change(name, tensor)`.

    Lists, dicts and objects are changed in place. `name` is where the output is in a larger one, "" for the whole.
    """
    if isinstance(output, torch.Tensor):
        has_numbers = output.requires_grad or output.is_floating_point()
        return change(name or "0", output) if has_numbers else output
    prefix = f"{name}." if name else ""
    if isinstance(output, (tuple, list)):
        elements = [mapped(element, change, f"{prefix}{place}") for place, element in enumerate(output)]
        # Others may hold the same list, so it is changed in place.
        if type(output) is list:
            output[:] = elements
            return output
        return type(output)(*elements) if hasattr(output, "_fields") else type(output)(elements)
    if isinstance(output, dict) or not name or _is_record(output):
        for key, value in list(_fields(output).items()):
            replacement = mapped(value, change, f"{prefix}{key}")
            if replacement is value:
                continue
            if isinstance(output, dict):
                output[key] = replacement
            else:
                # A dataclass may be frozen.
                object.__setattr__(output, key, replacement)
    return output


def map_left(
    model: torch.nn.Module, change: Callable[[str, torch.Tensor], torch.Tensor], since: int = 0
) -> None:
    """Replace tensors that a forward pass left as attributes of modules, such as a router's loss that the loop adds.

    They are replaced as `mapped` does, by names MODULE:ATTRIBUTE. A tensor is of the pass if the sequence number of its
    autograd function is at least `since`. Other tensors stay.
    """

    def made(name: str, tensor: torch.Tensor) -> torch.Tensor:
        is_of_pass = tensor.grad_fn is not None and tensor.grad_fn._sequence_nr() >= since
        return change(name, tensor) if is_of_pass else tensor

    for name, module in model.named_modules():
        for key, value in list(vars(module).items()):
            may_hold_tensors = type(value) in (torch.Tensor, tuple, list, dict) or _is_record(value)
            if key not in tree.OWN and may_hold_tensors:
                vars(module)[key] = mapped(value, made, f"{wrapped.clean(name)}:{key}")


def _is_record(value: Any, inside: int = 2) -> bool:
    """Whether a value is an object for a few values, some of them tensors or, down to `inside` levels, such records.

    A cache, for instance, is more than that.
    """
    # isinstance would ask for __class__, which an object that was left out of a model does not say.
    cls = type(value)
    if not (dataclasses.is_dataclass(cls) or issubclass(cls, RECORDS)) or issubclass(cls, dict):
        return False
    fields = _fields(value).values()
    return any(
        isinstance(field, torch.Tensor) or (inside > 0 and _is_record(field, inside - 1)) for field in fields
    )


def _fields(output: Any) -> dict[str, Any]:
    if isinstance(output, dict):
        return output
    if dataclasses.is_dataclass(output) and not hasattr(output, "__dict__"):  # its fields are slots
        names = (field.name for field in dataclasses.fields(output))
        return {name: getattr(output, name) for name in names if hasattr(output, name)}
    return getattr(output, "__dict__", {})
