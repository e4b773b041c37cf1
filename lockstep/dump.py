"""A dump: what one run computed in its first steps, as full tensors on disk.

    FOLDER/manifest.json            what ran, and for every step and tensor: order, shape, dtype, how it was sharded, checksum
    FOLDER/step_1.safetensors       the tensors of a step, readable by any safetensors reader
    FOLDER/step_2.safetensors.part  a step that was not finished

Every rank writes the part it holds into the one file, at its place: nothing is gathered, no rank ever holds more than
it trains with. The manifest names a step only when its file is whole. torch only, no distributed.
"""

import hashlib
import json
import math
import os
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from lockstep.errors import UserError, first_line
from lockstep.files import write_text

FORMAT = 2
MANIFEST = "manifest.json"
HEADER_ENTRY = 320  # bytes reserved in the header for a tensor; a longer one is an error, not a corruption
DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.int64: "I64"}
TORCH = {text: dtype for dtype, text in DTYPES.items()}
ITEMSIZE = {text: dtype.itemsize for dtype, text in DTYPES.items()}
WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_LARGEST_WRITE = 1 << 30


@dataclass
class Part:
    """What one rank knows of one tensor: where its part lies, who it is equal to, what it wrote."""

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


def step_path(folder: Path, step: int) -> Path:
    return folder / f"step_{step}.safetensors"


class StepWriter:
    """One rank's hand in the file of one step.

    Every rank asks for the same slots in the same order, so all compute the same layout without a word. The file must
    exist (`create` on one rank, before the others open it) and be the same one for all ranks: a shared folder.
    """

    def __init__(self, path: Path, num_tensors: int):
        self.header_bytes = 8 * math.ceil(HEADER_ENTRY * num_tensors / 8)
        self.slots: dict[str, Slot] = {}
        self._end = 0
        self._file = os.open(path, os.O_RDWR)

    @staticmethod
    def create(path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_TRUNC | os.O_RDWR, 0o644))

    @property
    def size(self) -> int:
        """Bytes of the file with all tensors that were asked for so far."""
        return 8 + self.header_bytes + self._end

    def slot(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Slot:
        """The slot of this name; made at the end of the file when it is asked for the first time."""
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
        """Note this rank's part of a tensor, and write it unless another rank that holds the same one does."""
        slot = self.slots[name]
        local = local.detach().cpu().contiguous()
        data = local.reshape(-1).view(torch.uint8).numpy()
        part = Part(tuple(start), tuple(local.shape), hashlib.sha256(data).hexdigest())
        if is_writer:
            part.checksum = checksum(data, slot.dtype.itemsize)
            for begin, offset, length in _runs(slot.shape, part.start, part.shape, slot.dtype.itemsize):
                self._write_all(data[begin : begin + length], 8 + self.header_bytes + slot.offset + offset)
        slot.parts.append(part)

    def _write_all(self, data: np.ndarray, offset: int) -> None:
        written = 0
        while written < len(data):
            written += os.pwrite(self._file, data[written : written + _LARGEST_WRITE], offset + written)

    def write_header(self, path: Path) -> None:
        """Make the file a safetensors file. Called once, by one rank, when every rank has closed it."""
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

    def close(self) -> None:
        os.close(self._file)


def checksum(data: np.ndarray, itemsize: int) -> int:
    """The sum of a tensor's words modulo 2^64: adds up over shards, so that nobody needs the whole tensor to know it.

    Notices any changed bit, a cut and a hole; not words that have changed places.
    """
    return int(data.view(WORDS[itemsize]).sum(dtype=np.uint64))


def _runs(full: tuple, start: tuple, shape: tuple, itemsize: int):
    """(offset in the part, offset in the full tensor, length) in bytes of every contiguous run of a part."""
    if math.prod(shape) == 0:
        return
    split = max((dim for dim in range(len(full)) if shape[dim] != full[dim]), default=0)
    strides = [math.prod(full[dim + 1 :]) * itemsize for dim in range(len(full))]
    if not full:
        yield 0, 0, itemsize
        return
    length = shape[split] * strides[split]
    offsets = np.full((), start[split] * strides[split], dtype=np.int64)
    for dim in range(split):
        offsets = offsets[..., None] + (start[dim] + np.arange(shape[dim])) * strides[dim]
    for number, offset in enumerate(offsets.reshape(-1).tolist()):
        yield number * length, offset, length


def merge(name: str, parts_by_rank: list[list[Part]], full_shape: tuple, itemsize: int) -> tuple[int, list[int]]:
    """(checksum of the full tensor, ranks whose part differs from another rank's of the same place).

    Raises ValueError unless the written parts cover the full tensor exactly once.
    """
    written = [part for parts in parts_by_rank for part in parts if part.checksum is not None]
    places = {(part.start, part.shape) for part in written}
    covered = sum(math.prod(shape) for _, shape in places)
    if len(places) != len(written) or covered != math.prod(full_shape):
        raise ValueError(f"{name}: the ranks wrote {covered} of {math.prod(full_shape)} elements in {len(written)} parts")
    digests: dict[tuple, str] = {}
    odd = set()
    for rank, parts in enumerate(parts_by_rank):
        for part in parts:
            if digests.setdefault((part.start, part.shape), part.sha256) != part.sha256:
                odd.add(rank)
    return sum(part.checksum for part in written) % 2**64, sorted(odd)


def write_manifest(folder: Path, manifest: dict) -> None:
    write_text(folder / MANIFEST, json.dumps({"format": FORMAT, **manifest}, indent=1) + "\n")


def number_of_elements(entry: dict) -> int:
    return math.prod(entry["shape"])


class Dump:
    """A dump that is there: its manifest, checked, and its tensors by name, read piece by piece.

    Raises UserError for a folder without a readable manifest, or with a file that is missing, cut off or not the
    manifest's.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        path = folder / MANIFEST
        if not path.is_file():
            unfinished = sorted(folder.glob("*.part")) if folder.is_dir() else []
            what = f"only the unfinished {unfinished[0].name}" if unfinished else "no dump"
            raise UserError(f"{folder}: {what} (no {MANIFEST}); run with --capture_dir again")
        try:
            self.manifest = json.loads(path.read_text(encoding="utf-8"))
            if self.manifest["format"] != FORMAT:
                raise ValueError(f"format {self.manifest['format']}, not {FORMAT}")
            self.run, self.steps = self.manifest["run"], self.manifest["steps"]
            self.label = self.run["label"]
            for key in ("architecture", "versions", "config"):
                self.run[key].items()
            self.manifest["initial_sha256"].strip()
            self.contract = self.manifest.get("contract", {})  # a reference has none
            self.contract.items()
            self._places = {int(step): self._read_header(int(step)) for step in self.steps}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{path}: damaged or not a dump's manifest ({first_line(error)}); capture again") from error
        unfinished = sorted(folder.glob("*.part"))
        if unfinished or not self.steps:
            what = f"{unfinished[0].name} was not finished" if unfinished else "not one step was finished"
            raise UserError(f"{folder}: {what}; the run was stopped or is still going on; capture again")
        if not self.contract and not self.run.get("exact"):
            raise UserError(f"{folder}: the run was stopped before it said what it runs with; capture again")

    def _read_header(self, step: int) -> dict:
        path = step_path(self.folder, step)
        tensors = self.steps[str(step)]["tensors"]
        try:
            with open(path, "rb") as file:
                length = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(min(length, 1 << 28)))
                places = {
                    name: (8 + length + entry["data_offsets"][0], entry["dtype"], tuple(entry["shape"]))
                    for name, entry in header.items()
                }
            size = path.stat().st_size
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{path}: damaged or missing ({first_line(error)}); capture again") from error
        for name, entry in tensors.items():
            offset, dtype, shape = places.get(name, (0, None, None))
            if (dtype, list(shape or ())) != (entry["dtype"], entry["shape"]):
                raise UserError(f"{path}: {name} is not what {MANIFEST} says of it; capture again")
            if offset + math.prod(shape) * ITEMSIZE[dtype] > size:
                raise UserError(f"{path}: cut off inside {name}; capture again")
        return places

    def blocks(self, step: int, name: str, num_elements: int, buffer: np.ndarray):
        """Yield a tensor's elements in flat blocks of `num_elements`, read into `buffer` (bytes); verifies its checksum.

        Raises UserError at the end if the bytes are not those that were written.
        """
        offset, dtype, shape = self._places[step][name]
        itemsize, total = ITEMSIZE[dtype], 0
        left = math.prod(shape) * itemsize
        with open(step_path(self.folder, step), "rb", buffering=0) as file:
            file.seek(offset)
            while left:
                piece = buffer[: min(left, num_elements * itemsize)]
                got = 0
                while got < len(piece):
                    got += file.readinto(piece[got:]) or self._cut_off(step, name)
                total += checksum(piece, itemsize)
                left -= len(piece)
                yield torch.from_numpy(piece).view(TORCH[dtype])
        if total % 2**64 != self.steps[str(step)]["tensors"][name]["checksum"]:
            raise UserError(f"{step_path(self.folder, step)}: {name} is damaged (its checksum does not match); capture again")

    def parameter_digest(self, step: int) -> str:
        """What identifies the parameters after a step: a hash of their checksums."""
        tensors = self.steps[str(step)]["tensors"]
        sums = {name: entry["checksum"] for name, entry in tensors.items() if name.startswith("parameter/")}
        return hashlib.sha256(json.dumps(sums, sort_keys=True).encode()).hexdigest()

    def _cut_off(self, step: int, name: str):
        raise UserError(f"{step_path(self.folder, step)}: cut off inside {name}; capture again")

    def tensor(self, step: int, name: str) -> torch.Tensor:
        """A full tensor, in memory; checksum verified."""
        _, dtype, shape = self._places[step][name]
        size = math.prod(shape)
        buffer = np.empty(size * ITEMSIZE[dtype], dtype=np.uint8)
        for block in self.blocks(step, name, max(size, 1), buffer):
            return block.reshape(shape)
        return torch.empty(shape, dtype=TORCH[dtype])
