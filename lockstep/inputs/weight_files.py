"""The formats of weights files: one .safetensors file, several with an index, one .pt file.

safetensors and torch read them, from a memory map. Both are imported when a file is read, not before.
"""

import io
import json
import os
import pickle
import pickletools
import re
import warnings
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.ground.errors import UserError, first_line, printable
from lockstep.ground.files import parse_json, read_json, require_regular
from lockstep.ground.schemas import Name, Strict, validate

if TYPE_CHECKING:
    import torch

INDEX = ".safetensors.index.json"
# The key of our own entry in the metadata of a safetensors file.
HEADER = "lockstep"
# The most bytes that may describe the tensors of a file. A tensor takes about 250, and a dense model has some thousand tensors.
LARGEST_HEADER = 1 << 22
# The dtypes whose numbers float32 holds exactly, float32 first.
FLOATS = ("torch.float32", "torch.bfloat16", "torch.float16")
# The most tuples in a pickle; a tensor takes five. Hashing 150,000 tuples, one in the other, overflows the stack of a process.
MOST_TUPLES = 50_000
DAMAGED = "give a whole file, or save the weights again under another name"
_FETCH = "fetch the model folder again"
_PLAIN = "give a plain dict of dense tensors: torch.save(model.state_dict(), ...)"
# What the pickle of a dict of tensors refers to.
_KNOWN = re.compile(
    r"collections OrderedDict|torch\._utils _rebuild_(tensor_v2|parameter)|"
    r"torch (Float|BFloat16|Half|Double|Long|Int|Short|Char|Byte|Bool)Storage"
)


class About(Strict):
    """The description in a file that Lockstep wrote."""

    architecture: dict[str, Any]
    sha256: dict[str, str]
    source: Name | None = None  # where the weights came from, in words


class _Index(Strict):
    weight_map: dict[str, Name]
    metadata: dict[str, Any] = {}


@dataclass(frozen=True)
class Contents:
    """The tensors of a file, on the CPU, most of them views of its memory map."""

    tensors: dict[str, "torch.Tensor"]
    about: About | None = None  # None: not written by this project


def read(path: Path, where: str, *, checksums: bool = False) -> Contents:
    """The tensors of a weights file. With `checksums`, a .pt file is also checked against its CRC-32.

    Raises UserError, beginning with `where`, unless it is a whole file of one of the three formats.
    """
    try:
        require_regular(path)
        if path.name.endswith(INDEX):
            return _read_index(path)
        # A warning of a library would be a second line beside the error.
        with warnings.catch_warnings(action="ignore"):
            return _read_pt(path, checksums) if path.suffix == ".pt" else _read_safetensors(path)
    except UserError as error:
        raise UserError(f"{where}: {str(error).removeprefix(f'{path}: ')}") from error
    except Exception as error:  # the libraries raise a dozen kinds, all for what stands in the file
        # The message of torch.load advises loading such a file without weights_only.
        is_refused = isinstance(error, pickle.UnpicklingError)
        why = "torch.load refuses its pickle" if is_refused else first_line(error)
        raise UserError(f"{where}: damaged, truncated or no {path.suffix} file ({why}); {DAMAGED}") from error


def _read_safetensors(path: Path) -> Contents:
    from safetensors import safe_open

    with open(path, "rb") as file:
        _require_small("its header", int.from_bytes(file.read(8), "little"))
    with safe_open(path, framework="pt") as opened:
        metadata = opened.metadata() or {}
        about = _about(parse_json(metadata[HEADER])) if HEADER in metadata else None
        return Contents(opened.get_tensors(), about)


def _require_small(what: str, size: int) -> None:
    if size > LARGEST_HEADER:
        raise ValueError(f"{what} has {size} bytes, at most {LARGEST_HEADER} are read")


def _about(content: object) -> About:
    # A pickle can hold one list a million times, or a list inside itself. As JSON, it has a length, which can be limited.
    length = 0
    for piece in json.JSONEncoder().iterencode(content):
        length += len(piece)
        _require_small("its description of the model", length)
    return validate(About, content, "its description of the model", DAMAGED)


def shards(path: Path) -> dict[str, set[str]]:
    """File name -> tensors that it must hold, for the files that an index names, all beside it.

    Raises UserError, beginning with the path.
    """
    tensors_of: dict[str, set[str]] = {}
    for name, shard in validate(_Index, read_json(path), path, _FETCH).weight_map.items():
        if os.path.basename(shard) != shard or not shard.endswith(".safetensors"):
            raise UserError(f"{path}: names {shard}, which is no .safetensors file beside it; {_FETCH}")
        tensors_of.setdefault(shard, set()).add(name)
    return tensors_of


def _read_index(path: Path) -> Contents:
    tensors: dict[str, torch.Tensor] = {}
    for shard, listed in sorted(shards(path).items()):
        found = read(path.with_name(shard), shard).tensors
        name = min(found.keys() ^ listed, default=None)
        if name is not None:
            verb = "lacks" if name in listed else "holds, against the index,"
            raise UserError(f"{shard} {verb} tensor {printable(name, 200)}; {_FETCH}")
        tensors.update(found)
    return Contents(tensors)


def _read_pt(path: Path, checksums: bool) -> Contents:
    import torch

    _require_plain_archive(path, checksums)
    content, about = torch.load(path, map_location="cpu", weights_only=True, mmap=True), None
    if isinstance(content, dict) and {"architecture", "sha256", "tensors"} <= content.keys():
        about = {key: value for key, value in content.items() if key != "tensors"}
        content = content["tensors"]
    if not isinstance(content, dict):
        raise UserError(f"holds a {type(content).__name__}, not a dict; {_PLAIN}")
    for name, value in content.items():
        if type(name) is not str or not isinstance(value, torch.Tensor):
            kind = type(value).__name__
            raise UserError(
                f"its entry {printable(name, 80)} is a {kind}, not a tensor with a name; {_PLAIN}"
            )
    tensors = {name: value.detach().resolve_neg() for name, value in content.items()}
    return Contents(tensors, None if about is None else _about(about))


class _Limited(io.FileIO):
    """A file for zipfile, which reads the directory of an archive in one piece, however large it is."""

    def read(self, size: int | None = -1, /) -> bytes:
        _require_small("its directory", size or 0)
        return super().read(size)


def _require_plain_archive(path: Path, checksums: bool) -> None:
    """Raise unless torch.load can map the file. It takes members as they are, and reads all but the tensors' bytes at once."""
    with _Limited(path) as file, zipfile.ZipFile(file) as archive:
        if len(archive.infolist()) != len(archive.NameToInfo):
            raise ValueError("it has two members of one name")
        for member in archive.infolist():
            name = printable(member.filename, 80)
            if member.compress_type != zipfile.ZIP_STORED:
                raise ValueError(f"{name} is compressed, which torch.save never does")
            if "/data/" not in member.filename:
                _require_small(name, member.file_size)
            if member.filename.lower().endswith("data.pkl"):
                _require_plain_pickle(archive.read(member))
        if checksums and archive.testzip() is not None:
            raise ValueError("a member does not match its CRC-32")


def _require_plain_pickle(content: bytes) -> None:
    """Raise for what weights_only allows and no weights need: functions that take any amount of memory, and hashes that never end."""
    last_opcode, memoized_tuples, num_tuples = "", set(), 0
    for opcode, argument, _ in pickletools.genops(content):
        if opcode.name == "GLOBAL" and not _KNOWN.fullmatch(str(argument)):
            raise UserError(f"it holds {printable(argument, 80).replace(' ', '.')}; {_PLAIN}")
        if opcode.name.endswith("BINPUT"):
            if last_opcode.startswith("TUPLE"):
                memoized_tuples.add(argument)
        elif opcode.name != "PROTO":
            last_opcode = opcode.name
            num_tuples += last_opcode.startswith("TUPLE")
        if num_tuples > MOST_TUPLES or (opcode.name.endswith("BINGET") and argument in memoized_tuples):
            raise ValueError("its tuples are not those of tensors")
