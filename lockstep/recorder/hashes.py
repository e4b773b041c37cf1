"""64-bit hashes of tensors, computed on the tensors' device.

They show changes and bugs. They are no protection against somebody who forges a tensor on purpose.
"""

import functools

import torch

from lockstep.recorder.complex_numbers import as_real

# Odd 64-bit numbers without structure, as signed integers: the fractional parts of the golden ratio and of the
# square root of 3
FACTORS = (-7046029254386353131, -4942790177534073029)
# How many bytes are hashed at once, or elements, each of which takes some 16 bytes of memory meanwhile
AT_ONCE = 1 << 21


def hashes(samples: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Return a 64-bit hash of each sample (dim 0), on the samples' device: (samples).

    Elements where a `mask` of the same shape is 0, such as padding, do not count.
    """
    samples = as_real(samples)
    rows = samples.detach().reshape(len(samples), samples[:1].numel())
    if rows.is_floating_point():
        rows = rows.double().view(torch.int64)
    rows = rows.long()
    used = torch.ones_like(rows)
    if mask is not None and mask.shape == samples.shape:
        used = (mask.reshape(rows.shape) != 0).long()
    mixed = (rows + 1) * FACTORS[0] + used.cumsum(1) * FACTORS[1]
    mixed = (mixed ^ (mixed >> 29)) * FACTORS[0]
    return ((mixed ^ (mixed >> 32)) * used).sum(1)


def hashes_of_ends(samples: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return three hashes of each sample, by which it is known whatever its padding, each (samples).

    Its last elements that are alike may be padding. The hashes are those of the whole sample, of what comes
    before these elements, and of that and the first of them.
    """
    rows = samples.detach().reshape(len(samples), -1)
    # How many elements from here to the end are unlike the last one. It is 0 in the last ones that are alike.
    unlike = (rows != rows[:, -1:]).flip(1).cumsum(1).flip(1)
    before = (unlike > 0).long()
    and_first = torch.cat([before.new_ones(len(rows), 1), before[:, :-1]], 1)
    return {
        "whole": hashes(rows),
        "before": hashes(rows, before),
        "and_first": hashes(rows, and_first),
    }


@functools.lru_cache(4)
def _odd_numbers(number: int, device: torch.device) -> torch.Tensor:
    """Return `number` odd 64-bit numbers without structure. A sum of elements times these changes with any one element."""
    places = torch.arange(1, number + 1, device=device) * FACTORS[1]
    return ((places ^ (places >> 32)) * FACTORS[0]) | 1


def hashes_of_slices(tensor: torch.Tensor, dim: int) -> list[int]:
    """Return the hash of each slice along a dim. Values are hashed as bfloat16."""
    bits = tensor.detach().bfloat16().view(torch.int16).movedim(dim, 0)
    rows = bits.reshape(len(bits), -1)
    odd = _odd_numbers(rows.shape[1], rows.device)
    number = max(1, AT_ONCE // max(rows.shape[1], 1))
    return [value for chunk in rows.split(number) for value in (chunk.long() * odd).sum(1).tolist()]


def digest(tensor: torch.Tensor) -> int:
    """Return the hash of a tensor's bytes. Words are mixed before they are added up, so that no two bits of them cancel."""
    flat = tensor.detach().contiguous().flatten().view(torch.uint8)
    end = flat.numel() // 8 * 8  # of the last whole word of 8 bytes
    words = flat[:end].view(torch.int64) if flat.data_ptr() % 8 == 0 else flat[:end].clone().view(torch.int64)
    sums = [_mixed_sum(chunk) for chunk in words.split(AT_ONCE // 8)]
    sums.append(_mixed_sum(flat[end:].long()))
    return int(_mixed_sum(torch.stack(sums)))


def _mixed_sum(words: torch.Tensor) -> torch.Tensor:
    """Return the sum of 64-bit words, each mixed and times a number of its place."""
    mixed = words * FACTORS[0]
    mixed = (mixed ^ (mixed >> 29)) * FACTORS[1]
    mixed ^= mixed >> 32
    return (mixed * _odd_numbers(AT_ONCE // 8, words.device)[: len(words)]).sum()
