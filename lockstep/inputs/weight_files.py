"""The formats of weights files: one .safetensors file, several with an index, one .pt file; opened without torch.

What is read is a `Contents`: a place in a file for each tensor, which `check` and `load` of lockstep/inputs/weights.py read alike.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from lockstep.errors import UserError, first_line, printable
from lockstep.files import parse_json, read_json, require_regular
from lockstep.inputs import pt_file
from lockstep.schemas import Name, Strict, validate

if TYPE_CHECKING:
    import numpy as np

INDEX = ".safetensors.index.json"
HEADER = "lockstep"  # the key of our own entry in the metadata of a safetensors file
FLOATS = {"F32": 4, "BF16": 2, "F16": 2}  # dtypes that float32 holds exactly -> bytes
TORCH_NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
LARGEST_HEADER = (
    1 << 22
)  # bytes; a tensor takes about 250 of them, with its checksum, and a dense model has some thousand
MOST_VALUES, DEEPEST = 1_000_000, 16  # in what a file says of itself: values, and how deep one may lie
DAMAGED = "give a whole file, or save the weights again under another name"


@dataclass(frozen=True)
class Stored:
    """A tensor in a file: dtype as safetensors calls it, first byte, shape, and strides in elements."""

    path: Path
    dtype: str
    begin: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def float32(self) -> "np.ndarray":
        """The values as a contiguous NumPy array of float32: a view of the file if possible, else a copy."""
        import numpy as np

        itemsize = FLOATS[self.dtype]
        span = 1 + sum((length - 1) * step for length, step in zip(self.shape, self.stride, strict=True))
        # mode "c": torch wants what it copies from to be writable; nothing is written to the file
        raw = np.memmap(self.path, np.uint8, mode="c", offset=self.begin, shape=(span * itemsize,))
        raw = raw if self.begin % itemsize == 0 else raw.copy()
        kind = {"F32": "<f4", "BF16": "<u2", "F16": "<f2"}[self.dtype]
        values = np.lib.stride_tricks.as_strided(
            raw.view(kind), self.shape, [step * itemsize for step in self.stride]
        )
        if self.dtype == "BF16":  # the upper half of a float32
            return (values.astype("<u4", order="C") << 16).view("<f4")
        return np.ascontiguousarray(values, dtype="<f4")


class About(Strict):
    """The description in a file that Lockstep wrote."""

    architecture: dict[str, Any]
    sha256: dict[str, str]
    source: Name | None = None  # where the weights came from, in words


class _Index(Strict):
    weight_map: dict[str, Name] = Field(min_length=1, max_length=1_000_000)
    metadata: dict[str, Any] = {}


@dataclass(frozen=True)
class Contents:
    tensors: dict[str, Stored]
    about: About | None = None  # None: not written by this project


def read(path: Path, where: str, *, checksums: bool = False) -> Contents:
    """The place of every tensor of a weights file. With `checksums`, a .pt file is also checked against its CRC-32.

    Raises UserError, beginning with `where`, unless it is a whole file of one of the three formats.
    """
    try:
        require_regular(path)
    except UserError as error:
        raise UserError(f"{where}: {str(error).removeprefix(f'{path}: ')}") from error
    if path.name.endswith(INDEX):
        return _read_index(path, where)
    return _read_pt(path, where, checksums) if path.suffix == ".pt" else _read_safetensors(path, where)


def _read_safetensors(path: Path, where: str) -> Contents:
    from safetensors import SafetensorError, safe_open

    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > LARGEST_HEADER:
                raise ValueError(f"a header of {length} bytes, at most {LARGEST_HEADER} are read")
            text = file.read(length)
        # First the library's own checks: header, dtypes, sizes, no overlaps, no holes, nothing after the last tensor.
        with safe_open(path, framework="np") as opened:
            names = set(opened.keys())
        header = parse_json(text.decode("utf-8"))
        metadata = header.pop("__metadata__", None) or {}
        if header.keys() != names:
            raise ValueError("two JSON readers find different tensors in its header")
        tensors = {}
        for name, entry in header.items():
            shape = tuple(entry["shape"])
            tensors[name] = Stored(
                path, entry["dtype"], 8 + length + entry["data_offsets"][0], shape, _contiguous(shape)
            )
        about = parse_json(metadata[HEADER]) if HEADER in metadata else None
    except (SafetensorError, ValueError, KeyError, TypeError, OSError) as error:
        raise UserError(
            f"{where}: damaged, truncated or no safetensors file ({first_line(error)}); {DAMAGED}"
        ) from error
    return Contents(tensors, _about(about, where) if HEADER in metadata else None)


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1]
    for length in reversed(shape[1:]):
        strides.append(strides[-1] * length)
    return tuple(reversed(strides)) if shape else ()


def shards(path: Path, where: str) -> dict[str, set[str]]:
    """File name -> tensors that it must hold, for the files that an index names, all beside it."""
    try:
        content = read_json(path)
    except UserError as error:
        raise UserError(f"{where}: {str(error).removeprefix(f'{path}: ')}") from error
    found: dict[str, set[str]] = {}
    for name, shard in validate(_Index, content, where, "fetch the model folder again").weight_map.items():
        if os.path.basename(shard) != shard or not shard.endswith(".safetensors"):
            raise UserError(
                f"{where}: names {shard}, which is no .safetensors file beside it; fetch the model folder again"
            )
        found.setdefault(shard, set()).add(name)
    return found


def _read_index(path: Path, where: str) -> Contents:
    tensors: dict[str, Stored] = {}
    for shard, listed in sorted(shards(path, where).items()):
        inside = read(path.with_name(shard), f"{where}, {shard}").tensors
        odd = min(inside.keys() ^ listed, default=None)
        if odd is not None:
            what = "lacks" if odd in listed else "holds, against the index,"
            raise UserError(
                f"{where}: {shard} {what} tensor {printable(odd, 200)}; fetch the model folder again"
            )
        tensors.update(inside)
    return Contents(tensors)


def _read_pt(path: Path, where: str, checksums: bool) -> Contents:
    content = pt_file.read(path, where, checksums=checksums)
    remedy = "give a plain dict of tensors: torch.save(model.state_dict(), ...)"
    if type(content) is not dict:
        raise UserError(f"{where}: holds a {type(content).__name__}, not a dict; {remedy}")
    about = None
    if {"architecture", "sha256", "tensors"} <= content.keys():
        about, content = (
            _about({key: value for key, value in content.items() if key != "tensors"}, where),
            content["tensors"],
        )
        if type(content) is not dict:
            raise UserError(
                f"{where}: its entry 'tensors' is a {type(content).__name__}, not a dict; {DAMAGED}"
            )
    other = next((name for name, value in content.items() if type(value) is not pt_file.PlainTensor), None)
    if other is not None:
        kind = type(content[other]).__name__
        raise UserError(f"{where}: its entry {printable(other, 80)} is a {kind}, not a tensor; {remedy}")
    return Contents({name: _stored(path, tensor) for name, tensor in content.items()}, about)


def _stored(path: Path, tensor: pt_file.PlainTensor) -> Stored:
    begin = tensor.storage.begin + tensor.offset * tensor.storage.itemsize
    return Stored(path, tensor.storage.dtype, begin, tensor.shape, tensor.stride)


def _about(content: object, where: str) -> About:
    """The description in a .pt file, read up to a limit: a pickle can hold a list a million times, or inside itself."""
    left, seen = [(content, 0)], 0
    while left:
        value, depth = left.pop()
        seen += 1
        if (
            seen > MOST_VALUES
            or depth > DEEPEST
            or not isinstance(value, (dict, list, str, int, float, type(None)))
        ):
            raise UserError(
                f"{where}: its description of the model is not a plain dict of numbers and strings; {DAMAGED}"
            )
        inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        left.extend((each, depth + 1) for each in inside)
    return validate(About, content, f"{where}, its description of the model", DAMAGED)
