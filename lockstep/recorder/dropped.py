"""What dropout leaves out, where a CPU would leave out other elements: a bit for each element that a call was given."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from lockstep.recorder.patches import Undo, replace


def draws_as_a_cpu(device: torch.device) -> bool:
    """Whether a CPU that begins with the same state of its generator draws the same random numbers."""
    return device.type == "cpu"


def see_dropout(counts: Callable[[], bool], see: Callable[[Callable[[], torch.Tensor | None]], None]) -> Undo:
    """Let `see` be told of the calls of torch's dropout that draw other random numbers than a CPU, while `counts`, but of compiled code.

    It is given a function that returns which elements were kept, or None if that cannot be seen.
    """
    real, inside = F.dropout, False

    def once(*given: Any) -> torch.Tensor:
        """A mode of torch functions, such as of a default device, calls torch's function again by its name."""
        nonlocal inside
        inside = True
        try:
            return real(*given)
        finally:
            inside = False

    @functools.wraps(real)
    def dropout(
        input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> torch.Tensor:
        if (
            inside
            or not training
            or p == 0
            or torch.compiler.is_compiling()
            or not (_is_other(input.device) and counts())
        ):
            return real(input, p, training, inplace)
        generator: Any = torch.get_device_module(input.device)
        of = (input.device,) if input.device.type == "cuda" else ()
        before = generator.get_rng_state(*of)
        result = once(input, p, training, inplace)

        @torch.no_grad()
        def kept() -> torch.Tensor | None:
            # Of which this rank may have a shard, and which keeps a state of its own
            if isinstance(result, DTensor):
                return None
            # A zero may be one that was kept. So the same numbers are drawn for ones, which leaves the generator as it is.
            after = generator.get_rng_state(*of)
            generator.set_rng_state(before, *of)
            found = once(torch.ones_like(result), p, training, inplace) != 0
            same = torch.equal(generator.get_rng_state(*of), after)
            generator.set_rng_state(after, *of)
            # For ones that lie otherwise in memory, a kernel may draw in another order.
            fits = not bool(result[~found].any()) and (
                inplace or not bool(input[found & (result == 0)].any())
            )
            return found if same and fits else None

        see(kept)
        return result

    return replace(F, "dropout", dropout)


def _is_other(device: torch.device) -> bool:
    """Whether its random numbers are not a CPU's, and can be drawn twice."""
    if draws_as_a_cpu(device) or device.type == "meta":
        return False
    return not (device.type == "cuda" and torch.cuda.is_current_stream_capturing())


def packed(kept: torch.Tensor) -> torch.Tensor:
    """(bytes): which elements were kept, in their order."""
    return torch.from_numpy(np.packbits(kept.cpu().numpy()))


def unpacked(bits: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """The elements that were kept. Raises ValueError for another number of them."""
    found = torch.from_numpy(np.unpackbits(bits.numpy()))
    if not 0 <= len(found) - shape.numel() < 8:
        raise ValueError(f"{len(found)} bits for {shape.numel()} elements")
    return found[: shape.numel()].bool().reshape(shape)
