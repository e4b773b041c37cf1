"""Which elements dropout kept, where a CPU would keep others: a bit for each element of its input."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from lockstep.recorder.patches import Undo, replace


def draws_as_a_cpu(device: torch.device) -> bool:
    """Whether a CPU draws the same random numbers as this device from the same state of the generator."""
    return device.type == "cpu"


def see_dropout(counts: Callable[[], bool], see: Callable[[Callable[[], torch.Tensor | None]], None]) -> Undo:
    """Call `see` for each call of torch's dropout that draws other random numbers than a CPU, while `counts()` is true.

    Calls in compiled code are not seen. `see` is given a function that returns which elements were kept, as a bool
    tensor, or None if that cannot be told.
    """
    real, is_inside = F.dropout, False

    def once(*given: Any) -> torch.Tensor:
        """Call dropout without seeing it again: a mode such as that of a default device calls F.dropout by its name."""
        nonlocal is_inside
        is_inside = True
        try:
            return real(*given)
        finally:
            is_inside = False

    @functools.wraps(real)
    def dropout(
        input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> torch.Tensor:
        if (
            is_inside
            or not training
            or p == 0
            or torch.compiler.is_compiling()
            or not (_is_other(input.device) and counts())
        ):
            return real(input, p, training, inplace)
        generator: Any = torch.get_device_module(input.device)
        device = (input.device,) if input.device.type == "cuda" else ()
        before = generator.get_rng_state(*device)
        result = once(input, p, training, inplace)

        @torch.no_grad()
        def kept() -> torch.Tensor | None:
            # This rank may have a shard of it, and a DTensor keeps a state of its own for random numbers.
            if isinstance(result, DTensor):
                return None
            # An element of the result may be zero though it was kept. So the same numbers are drawn once more for a
            # tensor of ones. The generator is then left as it was.
            after = generator.get_rng_state(*device)
            generator.set_rng_state(before, *device)
            mask = once(torch.ones_like(result), p, training, inplace) != 0
            is_same = torch.equal(generator.get_rng_state(*device), after)
            generator.set_rng_state(after, *device)
            # If the ones have another layout in memory, a kernel may draw in another order.
            fits = not bool(result[~mask].any()) and (inplace or not bool(input[mask & (result == 0)].any()))
            return mask if is_same and fits else None

        see(kept)
        return result

    return replace(F, "dropout", dropout)


def _is_other(device: torch.device) -> bool:
    """Whether a device draws other random numbers than a CPU, and can draw them a second time."""
    if draws_as_a_cpu(device) or device.type == "meta":
        return False
    return not (device.type == "cuda" and torch.cuda.is_current_stream_capturing())


def packed(kept: torch.Tensor) -> torch.Tensor:
    """Return the mask of kept elements as bits, in order: uint8 (bytes)."""
    return torch.from_numpy(np.packbits(kept.cpu().numpy()))


def unpacked(bits: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Return the mask of kept elements, bool of `shape`, from its bits. Raises ValueError for another number of bits."""
    unpacked_bits = torch.from_numpy(np.unpackbits(bits.numpy()))
    if not 0 <= len(unpacked_bits) - shape.numel() < 8:
        raise ValueError(f"{len(unpacked_bits)} bits for {shape.numel()} elements")
    return unpacked_bits[: shape.numel()].bool().reshape(shape)
