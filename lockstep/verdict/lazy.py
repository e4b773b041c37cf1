"""Tensors of a whole model, by name, that are not all in memory: each is made when it is asked for, or mapped from a file."""

import tempfile
from collections import UserDict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy
import torch

from lockstep.ground.errors import UserError, first_line

ALIGNED = 8  # bytes


class Lazy(UserDict[str, torch.Tensor]):
    """A mapping from `names` to tensors. `make(name)` returns a tensor, and is called each time that it is asked for."""

    def __init__(self, names: Iterable[str], make: Callable[[str], torch.Tensor]):
        self.data, self.make = dict.fromkeys(names), make  # type: ignore[assignment] # names alone

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self:
            raise KeyError(name)
        return self.make(name)


class OnDisk(UserDict[str, torch.Tensor]):
    """A mapping from names to tensors, which are in a file of `folder`. The file has no name and is gone when they are.

    Only what is in use is in memory; the system writes the rest back. Setting a tensor raises UserError if it cannot be written.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        # Where each tensor begins in the file, its dtype and shape
        self.data: dict[str, Any] = {}
        self.flat = torch.empty(0, dtype=torch.uint8)  # the bytes of the file, as far as it is mapped
        self.end = 0
        self.file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - closed by `close`, or with the mapping

    def __setitem__(self, name: str, tensor: torch.Tensor) -> None:
        self.data[name] = self.end, tensor.dtype, tensor.shape
        try:
            tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tofile(self.file)
            self.file.write(bytes(-self.file.tell() % ALIGNED))
            self.file.flush()
        except OSError as error:
            raise UserError(
                f"{self.folder}: tensors of the reference cannot be kept there: {first_line(error)}; gradients take 12 bytes for each parameter and micro batch"
            ) from error
        self.end = self.file.tell()

    def __getitem__(self, name: str) -> torch.Tensor:
        start, dtype, shape = self.data[name]
        end = start + shape.numel() * dtype.itemsize
        if end == start:
            return torch.empty(shape, dtype=dtype)
        self._map(end)
        # There may be a mode in which float32 means float64
        with torch._C.DisableTorchFunction():
            return self.flat[start:end].view(dtype).reshape(shape)

    def close(self) -> None:
        """Close the file, so that nothing more is written. What is there can be read as before, without an open file."""
        self._map(self.end)
        self.file.close()

    def _map(self, end: int) -> None:
        if end > len(self.flat):
            self.flat = torch.from_numpy(numpy.memmap(self.file, numpy.uint8, "c"))
