"""Complex tensors as real ones: each number is a pair in a last dim of size 2, its real and its imaginary part.

Weights, gradients, updates and what modules return are recorded and judged so. A model and an optimizer are given complex numbers again.
"""

import torch


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """Return a complex tensor (...) as a real one (..., 2); any other tensor as it is."""
    # There may be a mode in which dtypes mean others.
    with torch._C.DisableTorchFunction():
        return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def like(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return a real tensor (..., 2) as a complex one (...) if `other` is a complex tensor of that shape; else as it is."""
    if not other.is_complex() or tensor.is_complex() or tensor.shape != (*other.shape, 2):
        return tensor
    with torch._C.DisableTorchFunction():
        return torch.view_as_complex(tensor.contiguous())


def in_width(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of floating point in `dtype`, a complex one with parts in `dtype`, and any other as it is."""
    if tensor.is_complex():
        return tensor.to(dtype.to_complex())
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def is_inexact(tensor: torch.Tensor) -> bool:
    """Whether a tensor is of floating point or complex, and so is rounded."""
    return tensor.is_floating_point() or tensor.is_complex()
