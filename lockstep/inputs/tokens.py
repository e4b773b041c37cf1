"""The tokens of a corpus: in memory, or in a file of which only the needed blocks are read.

A token file is a line of JSON padded to HEADER bytes, the tokens (int32, little-endian), and the CRC-32 of every BLOCK bytes of tokens
(uint32). Every block that is read is checked against its CRC.
"""

import contextlib
import hashlib
import json
import os
import socket
import zlib
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np

from lockstep import files
from lockstep.errors import UserError

FORMAT = "lockstep tokens 1"
HEADER = 4096  # bytes
BLOCK = 1 << 16  # bytes
HELD = 1 << 26  # bytes of tokens that are read as a whole, and sent to Ray's workers
TOKEN = np.dtype("<i4")


class Damaged(Exception):
    """The token file is damaged."""


@dataclass(frozen=True)
class InMemory:
    """Tokens (num_tokens,) int32 of this process. Pickled as a whole."""

    values: np.ndarray

    def __len__(self) -> int:
        return len(self.values)

    def read(self, first: int, count: int) -> np.ndarray:
        """The tokens (count,) int32 from `first` on."""
        return self.values[first : first + count]


@dataclass(frozen=True)
class TokenFile:
    """The tokens of an open token file. Pickled as its path: the process that unpickles it must see the same file there."""

    path: Path
    about: dict[str, Any]  # the header
    _file: FileIO = field(repr=False, compare=False)
    _sums: np.ndarray = field(repr=False, compare=False)

    def __len__(self) -> int:
        return self.about["num_tokens"]

    def read(self, first: int, count: int) -> np.ndarray:
        """The tokens (count,) int32 from `first` on. Raises UserError if they are not those that were written."""
        begin, end = first * TOKEN.itemsize, (first + count) * TOKEN.itemsize
        blocks = range(begin // BLOCK, -(-end // BLOCK))
        base, limit = blocks[0] * BLOCK, len(self) * TOKEN.itemsize
        try:
            data = os.pread(self._file.fileno(), min(blocks[-1] * BLOCK + BLOCK, limit) - base, HEADER + base)
        except OSError as error:
            raise UserError(f"{self.path}: cannot be read ({error.strerror or error})") from error
        for index, block in enumerate(blocks):
            if zlib.crc32(data[index * BLOCK : index * BLOCK + BLOCK]) != self._sums[block]:
                raise UserError(
                    f"{self.path}: damaged, block {block} is not what was written; delete it and start again"
                )
        return np.frombuffer(data, TOKEN)[(begin - base) // TOKEN.itemsize :][:count]

    def __reduce__(self) -> tuple[Callable[..., "TokenFile"], tuple[Path, dict]]:
        return _reopen, (self.path, self.about)


def _reopen(path: Path, about: dict) -> TokenFile:
    try:
        found = open_file(path)
    except (OSError, Damaged) as error:
        raise UserError(
            f"{path}: not found on {socket.gethostname()} ({error}); set --data_cache_dir to a folder that all machines share"
        ) from error
    if found.about != about:
        raise UserError(
            f"{path}: on {socket.gethostname()} it holds other tokens; set --data_cache_dir to a folder that all machines share"
        )
    return found


def open_file(path: Path) -> TokenFile:
    """Raises OSError when it cannot be opened, and Damaged when its parts do not fit together."""
    with contextlib.ExitStack() as closing:
        file = closing.enter_context(open(path, "rb", buffering=0))
        about, sums = _header(file.fileno())
        closing.pop_all()  # from here on it is the TokenFile's
    return TokenFile(path, about, file, sums)


def _header(file: int) -> tuple[dict, np.ndarray]:
    try:
        about = files.parse_json(os.pread(file, HEADER, 0).decode())
        num_tokens = about["num_tokens"]
        if (
            about["format"] != FORMAT
            or type(num_tokens) is not int
            or num_tokens < 1
            or len(about["sha256"]) != 64
        ):
            raise Damaged(f"its header is not that of {FORMAT!r}")
        end = HEADER + num_tokens * TOKEN.itemsize
        if not 0 < os.fstat(file).st_size - end == 4 * -(-num_tokens * TOKEN.itemsize // BLOCK):
            raise Damaged("its size is not what its header says")
        table = os.pread(file, os.fstat(file).st_size - end, end)
        if zlib.crc32(table) != about["crc32_of_sums"]:
            raise Damaged("its checksums are not what was written")
    except (ValueError, KeyError, TypeError) as error:
        raise Damaged("its header is not what was written") from error
    return about, np.frombuffer(table, "<u4")


def held(found: TokenFile) -> InMemory | TokenFile:
    """The tokens in memory where they are few. Raises Damaged when one of those is not what was written."""
    if len(found) * TOKEN.itemsize > HELD:
        return found
    try:
        return InMemory(found.read(0, len(found)))
    except UserError as error:
        raise Damaged(str(error)) from error


def write_file(path: Path, key: dict, parts: Iterable[np.ndarray]) -> dict:
    """Fill a token file from parts (any length,) int32; returns its header. OSError when it cannot be written."""
    digest, sums, num_bytes, rest = hashlib.sha256(), array("I"), 0, b""
    with open(path, "wb") as file:
        file.write(b" " * HEADER)
        for part in parts:
            data = part.astype(TOKEN, copy=False).tobytes()
            digest.update(data)
            file.write(data)
            num_bytes += len(data)
            rest += data
            whole = len(rest) // BLOCK * BLOCK
            sums.extend(zlib.crc32(rest[begin : begin + BLOCK]) for begin in range(0, whole, BLOCK))
            rest = rest[whole:]
        if rest:
            sums.append(zlib.crc32(rest))
        table = np.asarray(sums, "<u4").tobytes()
        file.write(table)
        about = {
            "format": FORMAT,
            "num_tokens": num_bytes // TOKEN.itemsize,
            "sha256": digest.hexdigest(),
            "crc32_of_sums": zlib.crc32(table),
            "key": key,
        }
        file.seek(0)
        file.write(json.dumps(about).encode().ljust(HEADER))
    return about
