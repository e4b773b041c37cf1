"""Linear layers of bitsandbytes with frozen weights of 4 bits, as QLoRA has them.

Each computes what a layer with the same numbers in more bits computes.
"""

from typing import Any

import torch
from torch.nn import functional as F

from lockstep.ground.errors import UserError

FILE = "bitsandbytes.nn.modules"


class Linear(torch.nn.Module):
    """The layer that a Linear4bit is built again as.

    It computes in `compute_dtype` and returns the dtype of its input.
    """

    weight: torch.nn.Parameter
    bias: torch.nn.Parameter | None
    compute_dtype: torch.dtype | None

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        dtype = self.compute_dtype or given.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        return F.linear(given.to(dtype), self.weight.to(dtype), bias).to(given.dtype)


def is_one(parameter: torch.Tensor | None) -> bool:
    """Whether a parameter is one of bitsandbytes."""
    return type(parameter).__module__ == FILE


def before(module: torch.nn.Module) -> tuple[type, dict[str, Any]]:
    """Return the class and the attributes that a layer of bitsandbytes is built again with.

    Raises UserError for a layer that is no Linear4bit.
    """
    if not hasattr(module, "compute_dtype"):
        raise UserError(
            f"{type(module).__name__} of bitsandbytes computes with 8 bits, or is an embedding, which the reference has no other for; "
            "load the model in 4 bits, with embeddings as they are"
        )
    return Linear, {"compute_dtype": module.compute_dtype}


def values(parameter: torch.Tensor) -> torch.Tensor:
    """Return the numbers that a parameter of 4 bits stands for, in the dtype that it was quantized from.

    Any other parameter is returned as it is.
    """
    if not is_one(parameter):
        return parameter
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(parameter.data, parameter.quant_state)  # type: ignore[attr-defined]
