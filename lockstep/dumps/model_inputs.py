"""What a model is called with: tensors and plain values, or lists, tuples and dicts of them."""

from collections.abc import Mapping
from typing import Any

import torch

from lockstep.dumps.tree import SEQUENCES

PLAIN = (bool, int, float, str, type(None))


def described(value: Any, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    """A value as JSON; the tensors in it are put into `tensors`, by names such as state.0. Raises TypeError for what JSON cannot have."""
    if isinstance(value, torch.Tensor):
        tensors[name] = value
        return {"tensor": name}
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {"dict": {key: described(one, f"{name}.{key}", tensors) for key, one in value.items()}}
    if type(value) in (list, tuple):
        inside = [described(one, f"{name}.{place}", tensors) for place, one in enumerate(value)]
        return {type(value).__name__: inside}
    raise TypeError(f"{name} is a {type(value).__name__}")


def rebuilt(about: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """The value again."""
    if not isinstance(about, dict):
        return about
    [(kind, inside)] = about.items()
    if kind == "tensor":
        return tensors[inside]
    if kind == "dict":
        return {key: rebuilt(one, tensors) for key, one in inside.items()}
    return SEQUENCES[kind]([rebuilt(one, tensors) for one in inside])
