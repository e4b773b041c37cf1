"""Tensors of a whole model, by name, that are not all in memory: each is made when it is asked for, or mapped from a file."""

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import numpy
import torch

from lockstep.ground.errors import UserError, first_line

ALIGNED = 8  # bytes


class Lazy(Mapping[str, torch.Tensor]):
    """`make(name)` gives a tensor, anew each time."""

    def __init__(self, names: Iterable[str], make: Callable[[str], torch.Tensor]):
        self.names, self.make = dict.fromkeys(names), make

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self.names:
            raise KeyError(name)
        return self.make(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


def on_disk(tensors: Iterable[tuple[str, torch.Tensor]], folder: Path) -> dict[str, torch.Tensor]:
    """The same tensors, in a file of `folder` that has no name and is gone when they are.

    Memory has of them what is in use; the system writes the rest back. Raises UserError if the file cannot be written.
    """
    places: dict[str, tuple[int, torch.dtype, torch.Size]] = {}
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            for name, tensor in tensors:
                places[name] = file.tell(), tensor.dtype, tensor.shape
                tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tofile(file)
                file.write(bytes(-file.tell() % ALIGNED))
            if not file.tell():
                return {name: torch.empty(shape, dtype=dtype) for name, (_, dtype, shape) in places.items()}
            file.flush()
            flat = torch.from_numpy(numpy.memmap(file, numpy.uint8, "c"))
    except OSError as error:
        raise UserError(
            f"{folder}: gradients of the reference cannot be kept there: {first_line(error)}; they take 8 bytes for each parameter and micro batch"
        ) from error
    return {
        name: flat[start : start + shape.numel() * dtype.itemsize].view(dtype).reshape(shape)
        for name, (start, dtype, shape) in places.items()
    }
