"""What dropout leaves out, where a CPU would leave out other elements: a bit for each element of what a call returned."""

import numpy as np
import torch


def draws_as_a_cpu(device: torch.device) -> bool:
    """Whether a CPU that begins with the same state of its generator draws the same random numbers."""
    return device.type == "cpu"


def packed(returned: torch.Tensor) -> torch.Tensor:
    """(bytes): which elements are not zero, in their order."""
    return torch.from_numpy(np.packbits((returned.detach() != 0).cpu().numpy()))


def unpacked(bits: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """The elements that were kept. Raises ValueError for another number of them."""
    found = torch.from_numpy(np.unpackbits(bits.numpy()))
    if not 0 <= len(found) - shape.numel() < 8:
        raise ValueError(f"{len(found)} bits for {shape.numel()} elements")
    return found[: shape.numel()].bool().reshape(shape)
