"""The file of one captured step, written by all ranks: a safetensors file with full tensors.

Every rank writes its parts into the one file, at their places. Nothing is gathered, so no rank holds more than it trains with. This
module needs torch, but no process group. lockstep/dumps/dump.py reads the file.
"""

import ctypes
import hashlib
import json
import math
import os
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

# Bytes reserved in the header for a tensor; a longer one is an error, not a corruption
HEADER_ENTRY = 320
DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.int64: "I64"}
WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_LARGEST_WRITE = 1 << 30
_LARGEST_COPY = 1 << 24
_CHUNK = 1 << 13  # words that are summed at a time: they stay in the cache
# 2^64 / golden ratio, so that the weights of neighbouring places lie far apart
_SPREAD = 0x9E3779B97F4A7C15
_PLACES = np.arange(_CHUNK, dtype=np.uint64) * np.uint64(_SPREAD)


def step_path(folder: Path, step: int) -> Path:
    return folder / f"step_{step}.safetensors"


@dataclass
class Part:
    """One rank's part of one tensor: its place, its hash, and the checksum of what the rank wrote."""

    start: tuple[int, ...]
    shape: tuple[int, ...]
    sha256: str
    checksum: int | None = None  # None: another rank with the same part wrote it


@dataclass
class Slot:
    """The place of a full tensor in the step's file."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int  # from the end of the header
    parts: list[Part] = field(default_factory=list)


class StepWriter:
    """Writes one rank's parts into the file of one step.

    Every rank asks for the same slots in the same order, so all compute the same layout without communication. The file must exist
    (`create` on one rank, before the others open it) and be shared by all ranks.
    """

    def __init__(self, path: Path, num_tensors: int):
        self.header_bytes = 8 * math.ceil(HEADER_ENTRY * num_tensors / 8)
        self.slots: dict[str, Slot] = {}
        self._end = 0
        self._path, self._file = path, os.open(path, os.O_RDWR)

    @staticmethod
    def create(path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_TRUNC | os.O_RDWR, 0o644))

    @property
    def size(self) -> int:
        """The size of the file in bytes, with all slots so far."""
        return 8 + self.header_bytes + self._end

    def slot(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Slot:
        """Return the slot of this name. The first call makes it, at the end of the file."""
        if name not in self.slots:
            if dtype not in DTYPES:
                raise ValueError(f"{name} is {dtype}; a dump holds {', '.join(map(str, DTYPES))}")
            self.slots[name] = Slot(tuple(shape), dtype, self._end)
            self._end += math.prod(shape) * dtype.itemsize
        slot = self.slots[name]
        if (slot.shape, slot.dtype) != (tuple(shape), dtype):
            raise ValueError(f"{name} was {slot.shape} {slot.dtype}, now it is {tuple(shape)} {dtype}")
        return slot

    def write(self, name: str, start: tuple[int, ...], local: torch.Tensor, *, is_writer: bool) -> None:
        """Record this rank's part of a tensor, and write it if this rank is its writer."""
        slot = self.slots[name]
        local = local.detach().cpu().contiguous()
        # What a collective returns has no memory before it is waited for.
        local = local if type(local) is torch.Tensor else local.clone()
        data = _bytes_of(local)
        part = Part(tuple(start), tuple(local.shape), hashlib.sha256(data.data).hexdigest())
        if is_writer:
            itemsize = slot.dtype.itemsize
            offsets, length = _runs(slot.shape, part.start, part.shape, itemsize)
            runs = data.reshape(len(offsets), length)
            for run, offset in zip(runs, offsets.tolist(), strict=True):
                self._write_all(run, 8 + self.header_bytes + slot.offset + offset)
            part.checksum = _checksum_of_runs(runs, itemsize, offsets // itemsize)
        slot.parts.append(part)

    def _write_all(self, data: np.ndarray, offset: int) -> None:
        written = 0
        while written < len(data):
            written += os.pwrite(self._file, data[written : written + _LARGEST_WRITE].data, offset + written)

    def write_header(self, path: Path) -> None:
        """Make the file a safetensors file. Called once, by one rank, after every rank has closed it."""
        header = {
            name: {
                "dtype": DTYPES[slot.dtype],
                "shape": slot.shape,
                "data_offsets": [slot.offset, slot.offset + math.prod(slot.shape) * slot.dtype.itemsize],
            }
            for name, slot in self.slots.items()
        }
        text = json.dumps(header, separators=(",", ":")).encode()
        if len(text) > self.header_bytes:
            raise ValueError(f"the header takes {len(text)} bytes, {self.header_bytes} were reserved")
        with open(path, "r+b") as file:
            file.write(self.header_bytes.to_bytes(8, "little") + text.ljust(self.header_bytes))
            # The file has its full size even if the last tensors were never computed
            file.truncate(8 + self.header_bytes + self._end)

    def append(self, path: Path, slots: dict[str, tuple[tuple[int, ...], torch.dtype, int]]) -> None:
        """Copy the tensors that this file lacks from the file of another stage, and remove that file.

        `slots` has the (shape, dtype, offset) of each tensor in the other file.
        """
        with open(self._path, "r+b") as file, open(path, "rb") as source:
            for name, (shape, dtype, offset) in slots.items():
                if name not in self.slots:
                    slot = self.slot(name, shape, dtype)
                    file.seek(8 + self.header_bytes + slot.offset)
                    source.seek(8 + self.header_bytes + offset)
                    bytes_left = math.prod(shape) * dtype.itemsize
                    while bytes_left:
                        block = source.read(min(bytes_left, _LARGEST_COPY))
                        if not block:
                            raise ValueError(f"{path} ends inside {name}")
                        file.write(block)
                        bytes_left -= len(block)
        path.unlink()

    def close(self) -> None:
        os.close(self._file)


def checksum(data: np.ndarray, itemsize: int, first: int = 0) -> int:
    """Return the sum of word x weight modulo 2^64 over consecutive words of a tensor. `first` is the place of the first one.

    The weight is an odd number made of the word's place, so a changed word is always noticed, and so are words that changed places. The
    checksums of the parts add up to the tensor's, so nobody needs the whole tensor.
    """
    return _checksum_of_runs(data[None], itemsize, np.array([first]))


def _checksum_of_runs(runs: np.ndarray, itemsize: int, first: np.ndarray) -> int:
    """Return the `checksum` of several runs of consecutive words, all of one length.

    `runs` has a row of bytes for each run, and `first` the place of its first word.
    """
    words, total = runs.view(WORDS[itemsize]), 0
    rows = max(1, _CHUNK // max(1, words.shape[1]))
    for begin in range(0, len(words), rows):
        for column in range(0, words.shape[1], _CHUNK):
            block = words[begin : begin + rows, column : column + _CHUNK]
            places = (first[begin : begin + rows] + column).astype(np.uint64) * np.uint64(_SPREAD)
            weights = _PLACES[: block.shape[1]] + places[:, None]
            weights ^= weights >> np.uint64(32)
            weights |= np.uint64(1)
            weights *= block
            total += int(weights.sum(dtype=np.uint64))
    return total % 2**64


def _bytes_of(tensor: torch.Tensor) -> np.ndarray:
    """Return the bytes of a contiguous tensor, flat, not copied: they are there as long as the tensor is.

    After `Tensor.numpy()` a storage can no longer be resized. FSDP2 resizes those of gathered weights, of which a module may return a part.
    """
    if not tensor.nbytes:
        return np.empty(0, np.uint8)
    address = ctypes.cast(tensor.data_ptr(), ctypes.POINTER(ctypes.c_ubyte))
    return np.ctypeslib.as_array(address, (tensor.nbytes,))


def _runs(
    full: tuple[int, ...], start: tuple[int, ...], shape: tuple[int, ...], itemsize: int
) -> tuple[np.ndarray, int]:
    """Return (the offsets in the full tensor of the contiguous runs of a part, in its order; the length of each run), in bytes."""
    if math.prod(shape) == 0:
        return np.zeros(0, dtype=np.int64), 0
    split = max((dim for dim in range(len(full)) if shape[dim] != full[dim]), default=0)
    strides = [math.prod(full[dim + 1 :]) * itemsize for dim in range(len(full))]
    if not full:
        return np.zeros(1, dtype=np.int64), itemsize
    offsets = np.full((), start[split] * strides[split], dtype=np.int64)
    for dim in range(split):
        offsets = offsets[..., None] + (start[dim] + np.arange(shape[dim])) * strides[dim]
    return offsets.reshape(-1), shape[split] * strides[split]


def merge(
    name: str, parts_by_rank: list[list[Part]], full_shape: tuple[int, ...], itemsize: int
) -> tuple[int, list[int]]:
    """Return (checksum of the full tensor, ranks whose part differs from the one that was written for the same place).

    Raises ValueError unless the written parts cover the full tensor exactly once.
    """
    written = [
        (part.start, part.shape, part.checksum)
        for parts in parts_by_rank
        for part in parts
        if part.checksum is not None
    ]
    places = {(start, shape) for start, shape, _ in written}
    covered = sum(math.prod(shape) for _, shape in places)
    is_computed = name.startswith(("batch/", "forward/", "backward/"))
    if len(places) != len(written):
        raise ValueError(
            f"{name}: {len(written)} parts of it are written, and {len(places)} would do: they overlap"
            + "; a pass that is not trained on must compute no gradients (torch.no_grad)" * is_computed
        )
    if covered != math.prod(full_shape):
        raise ValueError(
            f"{name}: the ranks hold {covered} of its {math.prod(full_shape)} elements"
            + "; each rank must go through all of its micro batches with all of their inputs, forward and backward"
            * is_computed
        )
    pairs = [(rank, part) for rank, parts in enumerate(parts_by_rank) for part in parts]
    digests = {(part.start, part.shape): part.sha256 for _, part in pairs if part.checksum is not None}
    odd = {rank for rank, part in pairs if part.sha256 != digests.get((part.start, part.shape), part.sha256)}
    return sum(value for _, _, value in written) % 2**64, sorted(odd)
