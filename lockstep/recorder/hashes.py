"""64-bit hashes of tensors, made where the tensors are. They tell changes and bugs, and are no protection against somebody who means it."""

import functools

import torch

# Odd 64-bit numbers without structure, as signed ones: the fractions of the golden ratio and of the square root of 3.
FACTORS = (-7046029254386353131, -4942790177534073029)
AT_ONCE = 1 << 24  # bytes, or elements of which each takes some 16 bytes on the way


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


@functools.cache
def _odd(number: int, device: torch.device) -> torch.Tensor:
    """Odd 64-bit numbers without structure. A sum of elements times these changes with any one element."""
    places = torch.arange(1, number + 1, device=device) * FACTORS[1]
    return ((places ^ (places >> 32)) * FACTORS[0]) | 1


def hashes_of_slices(tensor: torch.Tensor, dim: int) -> list[int]:
    """The hash of each slice along a dim, of its values as bfloat16."""
    bits = tensor.detach().bfloat16().view(torch.int16).movedim(dim, 0)
    rows = bits.reshape(len(bits), -1)
    odd = _odd(rows.shape[1], rows.device)
    number = max(1, AT_ONCE // max(rows.shape[1], 1))
    return [value for some in rows.split(number) for value in (some.long() * odd).sum(1).tolist()]


def digest(tensor: torch.Tensor) -> int:
    """The hash of a tensor's bytes."""
    flat = tensor.detach().contiguous().flatten().view(torch.uint8)
    whole = flat.numel() // 8 * 8
    words = (
        flat[:whole].view(torch.int64) if flat.data_ptr() % 8 == 0 else flat[:whole].clone().view(torch.int64)
    )
    odd = _odd(AT_ONCE // 8, flat.device)
    parts = [(some * odd[: some.numel()]).sum() for some in words.split(AT_ONCE // 8)]
    parts.append((flat[whole:].long() * odd[:8][: flat.numel() - whole]).sum())
    return int((torch.stack(parts) * odd[: len(parts)]).sum())
