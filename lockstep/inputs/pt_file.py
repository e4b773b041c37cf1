"""`.pt` files as torch.save writes them, read without torch and without executing anything.

A zip archive of uncompressed members: `data.pkl`, a pickle that describes dicts and tensors, and one `data/KEY` for the
bytes of each storage. The pickle is followed step by step by a machine that knows dicts, lists, strings, numbers and plain
tensors and nothing else; torch.load, even with `weights_only=True`, builds much more, and unpacks what is compressed.
"""

import pickletools
import re
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from lockstep.errors import UserError, first_line, printable
from lockstep.files import require_regular

LARGEST_PICKLE = 1 << 21  # bytes; a tensor takes about 250 of them, and a dense model has some thousand
MOST_MEMBERS = 200_000
LARGEST_DIRECTORY = 1 << 25  # bytes
DTYPES = {  # the class of a storage -> the name and the bytes that safetensors has for its dtype
    "FloatStorage": ("F32", 4),
    "BFloat16Storage": ("BF16", 2),
    "HalfStorage": ("F16", 2),
    "DoubleStorage": ("F64", 8),
    "LongStorage": ("I64", 8),
    "IntStorage": ("I32", 4),
    "ShortStorage": ("I16", 2),
    "CharStorage": ("I8", 1),
    "ByteStorage": ("U8", 1),
    "BoolStorage": ("BOOL", 1),
}
_MEMBERS = re.compile(
    r"data\.pkl|data/\d+|byteorder|version|\.format_version|\.storage_alignment|\.data/serialization_id"
)
_ORDERED_DICT = "collections OrderedDict"
_TENSOR, _PARAMETER = "torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_parameter"
_GLOBALS = {_ORDERED_DICT, _TENSOR, _PARAMETER, *(f"torch {name}" for name in DTYPES)}
_PUSHES: dict[str, Callable[[], object]] = {
    "EMPTY_DICT": dict,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
}
_PUSHES_ITS_ARGUMENT = ("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE")
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
Kind = TypeVar("Kind")


@dataclass(frozen=True)
class Storage:
    """The bytes of one member: `begin` in the file, and the number of elements of `dtype`."""

    dtype: str
    itemsize: int
    begin: int
    elements: int


@dataclass(frozen=True)
class PlainTensor:
    """A plain tensor, inside its storage. Offset, shape and stride count elements."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True)
class _Global:
    name: str


def read(path: Path, where: str, *, checksums: bool) -> object:
    """The content of the file: dicts, lists, strings, numbers, and a `PlainTensor` for each tensor.

    `checksums`: hold every member against the archive's CRC-32, which reads the whole file. Raises UserError, with `where` in
    front, for whatever is damaged, compressed, or no plain tensor.
    """
    try:
        size = require_regular(path)
        _require_small_directory(path, size)
        with zipfile.ZipFile(path) as archive:
            members = _members(archive, path)
            if checksums:
                _require_intact(archive)
            pickle = archive.read(members["data.pkl"])
            order = archive.read(members["byteorder"]) if "byteorder" in members else b"little"
        if order != b"little":
            raise ValueError(f"its byte order is {order[:16]!r}, not little")
        places = {name: (_begin(path, info), info.file_size) for name, info in members.items()}
        return _Machine(places).run(pickle)
    except UserError as error:
        raise UserError(f"{where}: {str(error).removeprefix(f'{path}: ')}") from error
    # zipfile and pickletools raise half a dozen kinds, all for what stands in the file
    except (
        OSError,
        ValueError,
        KeyError,
        IndexError,
        TypeError,
        OverflowError,
        NotImplementedError,
        RuntimeError,
        EOFError,
        MemoryError,
        AttributeError,
        zipfile.BadZipFile,
        zipfile.LargeZipFile,
    ) as error:
        raise UserError(
            f"{where}: damaged, truncated or not a file that torch.save writes ({first_line(error)}); "
            "give a whole file, or save the weights again under another name"
        ) from error


def _require_small_directory(path: Path, size: int) -> None:
    """Limit the archive's directory, which zipfile reads whole: a file that is all directory would fill the memory."""
    with open(path, "rb") as file:
        file.seek(max(0, size - 98))
        end = file.read()
    record = end[-22:]
    if record[:4] != b"PK\x05\x06":
        raise ValueError("no end of a zip archive")
    count, length = int.from_bytes(record[10:12], "little"), int.from_bytes(record[12:16], "little")
    if end[:4] == b"PK\x06\x06":  # the record of large archives, which torch.save always writes
        count, length = (
            max(own, int.from_bytes(end[at : at + 8], "little")) for own, at in ((count, 32), (length, 40))
        )
    if count > MOST_MEMBERS or length > min(size, LARGEST_DIRECTORY):
        raise ValueError(f"{count} members and a directory of {length} bytes")


def _members(archive: zipfile.ZipFile, path: Path) -> dict[str, zipfile.ZipInfo]:
    """Name without the common folder -> member. Raises ValueError unless all are uncompressed and do not overlap."""
    infos = sorted(archive.infolist(), key=lambda info: info.header_offset)
    if not infos:
        raise ValueError("an empty archive")
    folder = infos[0].orig_filename.split("/")[0] + "/"
    members: dict[str, zipfile.ZipInfo] = {}
    end = 0
    for info in infos:
        shown = printable(info.orig_filename, 80)
        name = info.orig_filename.removeprefix(folder)
        if not _MEMBERS.fullmatch(name) or not info.orig_filename.startswith(folder):
            raise ValueError(f"{shown} is not something that torch.save writes for weights")
        if (
            info.compress_type != zipfile.ZIP_STORED
            or info.compress_size != info.file_size
            or info.flag_bits & 0x1
        ):
            raise ValueError(f"{shown} is compressed or encrypted, which torch.save never does")
        if info.header_offset < end:
            raise ValueError(f"{shown} overlaps another member")
        end = _begin(path, info) + info.file_size
        if name in members or end > archive.start_dir:
            raise ValueError(f"{shown} appears twice or runs out of the file")
        members[name] = info
    if "data.pkl" not in members or members["data.pkl"].file_size > LARGEST_PICKLE:
        raise ValueError(f"no data.pkl of at most {LARGEST_PICKLE} bytes")
    return members


def _begin(path: Path, info: zipfile.ZipInfo) -> int:
    """The place of a member's bytes in the file, after its local header, which has its own lengths."""
    with open(path, "rb") as file:
        file.seek(info.header_offset)
        header = file.read(30)
    if header[:4] != b"PK\x03\x04" or len(header) < 30:
        raise ValueError(f"no header of {printable(info.orig_filename, 80)}")
    return (
        info.header_offset
        + 30
        + int.from_bytes(header[26:28], "little")
        + int.from_bytes(header[28:30], "little")
    )


def _require_intact(archive: zipfile.ZipFile) -> None:
    for info in archive.infolist():
        with archive.open(info) as member:  # raises BadZipFile where the CRC-32 does not match
            while member.read(1 << 24):
                pass


class _Machine:
    """Interprets a pickle of protocol 2. Nothing is imported or called; names from the file are compared with known ones."""

    def __init__(self, places: dict[str, tuple[int, int]]):
        self.places = places  # of the members: where in the file they begin, and how many bytes they have
        self.stack: list = []
        self.marks: list[int] = []
        self.memo: dict[int, object] = {}

    def run(self, pickle: bytes) -> object:
        for code, argument, _ in pickletools.genops(pickle):
            name = code.name
            if name == "STOP":
                (value,) = self.stack
                return value
            self._step(name, argument)
        raise ValueError("the pickle has no end")

    def _step(self, name: str, argument: Any) -> None:
        stack = self.stack
        if name in _PUSHES:
            stack.append(_PUSHES[name]())
        elif name in _PUSHES_ITS_ARGUMENT:
            stack.append(argument)
        elif name == "MARK":
            self.marks.append(len(stack))
        elif name in ("BINPUT", "LONG_BINPUT"):
            self.memo[argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(self.memo[argument])
        elif name == "TUPLE":
            stack.append(tuple(self._from_mark()))
        elif name in _TUPLES:
            stack.append(tuple(self._pop(_TUPLES[name])))
        elif name == "GLOBAL":
            if argument not in _GLOBALS:
                raise UserError(
                    f"it holds {printable(argument.replace(' ', '.'), 80)}; only plain dense tensors in a dict are read: give "
                    "a file of torch.save(model.state_dict(), ...), or save the tensors as .safetensors"
                )
            stack.append(_Global(argument))
        elif name == "BINPERSID":
            stack.append(self._storage(*self._pop(1)))
        elif name == "REDUCE":
            stack.append(self._call(*self._pop(2)))
        elif name in ("SETITEM", "SETITEMS"):
            items = self._pop(2) if name == "SETITEM" else self._from_mark()
            for key, value in zip(items[::2], items[1::2], strict=True):
                self._set(_of(dict, stack[-1]), key, value)
        elif name in ("APPEND", "APPENDS"):
            items = self._pop(1) if name == "APPEND" else self._from_mark()
            _of(list, stack[-1]).extend(items)
        elif name == "BUILD":  # the attributes of an OrderedDict: a state dict's versions of modules
            _of(dict, self._pop(1)[0]), _of(dict, stack[-1])
        elif name != "PROTO" or argument != 2:
            raise ValueError(f"{name} {printable(argument, 20)} is not something that torch.save writes")

    def _set(self, target: dict, key: object, value: object) -> None:
        if _of(str, key) in target:
            raise ValueError(f"{printable(key, 80)} appears twice in one dict")
        target[key] = value

    def _pop(self, count: int) -> list:
        if len(self.stack) - (self.marks[-1] if self.marks else 0) < count:
            raise ValueError("the pickle reads an entry that it never wrote")
        taken = self.stack[-count:]
        del self.stack[-count:]
        return taken

    def _from_mark(self) -> list:
        return self._pop(len(self.stack) - mark) if (mark := self.marks.pop()) < len(self.stack) else []

    def _storage(self, identity: object) -> Storage:
        word, kind, key, _, elements = _of(tuple, identity)
        dtype, itemsize = DTYPES[_of(_Global, kind).name.removeprefix("torch ")]
        begin, size = self.places[f"data/{_of(str, key)}"]
        if word != "storage" or _of(int, elements) * itemsize != size:
            raise ValueError(f"data/{printable(key, 20)} does not have as many elements as the pickle says")
        return Storage(dtype, itemsize, begin, elements)

    def _call(self, function: object, arguments: object) -> PlainTensor | dict:
        name, given = _of(_Global, function).name, _of(tuple, arguments)
        if name == _ORDERED_DICT and given == ():
            return {}
        if name == _PARAMETER and len(given) == 3:
            return _of(PlainTensor, given[0])
        if name == _TENSOR and len(given) == 6:
            storage, offset, shape, stride = given[:4]
            return self._tensor(_of(Storage, storage), offset, _of(tuple, shape), _of(tuple, stride))
        raise ValueError(f"{name} with {len(given)} arguments")

    def _tensor(self, storage: Storage, offset: int, shape: tuple, stride: tuple) -> PlainTensor:
        numbers = (offset, *shape, *stride)
        if len(shape) != len(stride) or len(shape) > 8 or any(_of(int, number) < 0 for number in numbers):
            raise ValueError("a tensor with a negative size, or a stride too few")
        last = offset + sum((length - 1) * step for length, step in zip(shape, stride, strict=True))
        if last >= storage.elements and 0 not in shape:
            raise UserError(
                f"a tensor of shape {printable(shape, 80)} runs out of its {storage.elements} stored elements; "
                "save the weights again under another name"
            )
        reach = 1  # of the dimensions seen so far; a dimension that steps by less gives one element several places
        for step, length in sorted(
            (step, length) for step, length in zip(stride, shape, strict=True) if length > 1
        ):
            if step < reach:
                raise UserError(
                    f"a tensor of shape {printable(shape, 80)} is an expanded view, several of its elements are one in memory; "
                    "save its .contiguous() copy under another name"
                )
            reach = (length - 1) * step + reach
        return PlainTensor(storage, offset, shape, stride)


def _of(kind: type[Kind], value: object) -> Kind:
    """The value, if it is of exactly this type (True is not a number)."""
    if type(value) is not kind:
        raise ValueError(f"a {type(value).__name__} where a {kind.__name__} must stand")
    return value
