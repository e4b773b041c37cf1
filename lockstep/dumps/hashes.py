"""64-bit hashes of tensors, made where the tensors are. They tell changes and bugs, and are no protection against somebody who means it."""

import torch

# Odd 64-bit numbers without structure, as signed ones: the fractions of the golden ratio and of the square root of 3.
FACTORS = (-7046029254386353131, -4942790177534073029)
AT_ONCE = 1 << 24  # elements: each takes some 30 bytes on the way


def hashes(samples: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """A 64-bit hash of each sample (dim 0), on its device. What a `mask` of the same shape leaves out, such as padding, does not count."""
    rows = samples.detach().reshape(len(samples), -1)
    if rows.is_floating_point():
        rows = rows.double().view(torch.int64)
    rows = rows.long()
    used = torch.ones_like(rows)
    if mask is not None and mask.shape == samples.shape:
        used = (mask.reshape(rows.shape) != 0).long()
    mixed = (rows + 1) * FACTORS[0] + used.cumsum(1) * FACTORS[1]
    mixed = (mixed ^ (mixed >> 29)) * FACTORS[0]
    return ((mixed ^ (mixed >> 32)) * used).sum(1)


def hashes_of_slices(tensor: torch.Tensor, dim: int) -> list[int]:
    """The hash of each slice along a dim."""
    slices = tensor.detach().movedim(dim, 0)
    number = max(1, AT_ONCE // max(slices[0].numel(), 1))
    return [value for some in slices.split(number) for value in hashes(some).tolist()]


def digest(tensor: torch.Tensor) -> int:
    """The hash of a tensor, whatever its shape."""
    parts = [hashes(part[None]) for part in tensor.detach().flatten().split(AT_ONCE)]
    return int(hashes(torch.cat(parts)[None])) if parts else 0
