"""The texts of a corpus: built in, .txt files, or a Hugging Face data set. Read in pieces, so a text may have any size.

A document is tokenized in chunks of at most CHUNK characters. A chunk ends after its last newline; without one, after its last white space;
without either, after CHUNK characters.
"""

import codecs
import hashlib
import importlib.util
import io
import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from lockstep.errors import UserError, first_line
from lockstep.files import require_regular
from lockstep.inputs.hub import hub_answers

BUILT_IN_CORPUS = "builtin"
HUB = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
CHUNK = 1 << 20  # characters
BLOCK = 1 << 20  # bytes read at once


class ContentHash:
    """SHA-256 over the SHA-256 of every document. It depends on the texts, their order, and where each ends."""

    def __init__(self) -> None:
        self._documents, self._open = hashlib.sha256(), hashlib.sha256()

    def add(self, data: bytes) -> None:
        self._open.update(data)

    def end(self) -> None:
        """The document is over."""
        self._documents.update(self._open.digest())
        self._open = hashlib.sha256()

    def hexdigest(self) -> str:
        return self._documents.hexdigest()


@dataclass(frozen=True)
class Texts:
    """The texts of files, which `chunks` reads. With `built_in`, the texts in the module that is the only file."""

    name: str
    paths: tuple[Path, ...]
    size: int  # bytes
    built_in: bool = False

    def stamp(self) -> list:
        """Path, size and times of every file, which change with the file. A change within one tick of the clock may be missed."""
        try:
            states = [(str(path.absolute()), os.stat(path)) for path in self.paths]
        except OSError as error:
            raise UserError(
                f"--dataset_name {self.name}: {error.filename} cannot be read ({error.strerror}); check its permissions"
            ) from error
        return [[path, state.st_size, state.st_mtime_ns, state.st_ctime_ns] for path, state in states]

    def chunks(self, content: ContentHash, read: Callable[[int], None]) -> Iterator[tuple[str, bool]]:
        """(text, whether the document ends with it). Calls `read` with the number of bytes of every piece."""
        if self.built_in:
            yield from _built_in_chunks(content, read)
        else:
            for path in self.paths:
                yield from _cut(_decoded(path, content, read))
                content.end()

    def content_sha256(self, read: Callable[[int], None]) -> str:
        """The ContentHash of the whole corpus, without decoding it."""
        content = ContentHash()
        if self.built_in:
            for _ in _built_in_chunks(content, read):
                pass
            return content.hexdigest()
        for path in self.paths:
            for data in _blocks(path):
                content.add(data)
                read(len(data))
            content.end()
        return content.hexdigest()


@dataclass(frozen=True)
class DataSet:
    """A Hugging Face data set, "id" or "id:config"; its train split must have a column "text". One row is one document."""

    name: str
    size: None = field(default=None, init=False)  # unknown before it has been read

    def chunks(self, content: ContentHash, read: Callable[[int], None]) -> Iterator[tuple[str, bool]]:
        for index, text in enumerate(_dataset_texts(self.name)):
            try:
                data = text.encode()
            except (AttributeError, UnicodeEncodeError) as error:
                raise UserError(
                    f"--dataset_name {self.name}: row {index} of its column 'text' holds no text ({first_line(error)})"
                ) from error
            content.add(data)
            read(len(data))
            yield from _cut([text])
            content.end()


def find(dataset_name: str) -> Texts | DataSet:
    """What --dataset_name names: "builtin", a .txt file, a folder of .txt files, or a Hugging Face data set.

    A folder's files are read in the order of their paths, with those of subfolders, but not behind links to folders. Raises UserError if
    there is no such file, folder or data set, or it cannot be read.
    """
    if dataset_name == BUILT_IN_CORPUS:
        module = importlib.util.find_spec(
            "pydoc_data.topics"
        )  # English documentation that ships with CPython
        if module is None or module.origin is None:
            raise UserError(
                f"--dataset_name {dataset_name}: this Python does not include it; give a .txt file"
            )
        path = Path(module.origin)
        return Texts(dataset_name, (path,), path.stat().st_size, built_in=True)
    if not dataset_name:  # an empty path would be the current folder
        raise UserError("--dataset_name is empty; give builtin, a .txt file, a folder of them, or a data set")
    path = Path(os.path.expanduser(dataset_name))
    if os.path.isdir(path):
        paths = _text_files(path, dataset_name)
        if not paths:
            raise UserError(
                f"--dataset_name {dataset_name}: the folder holds no .txt file; give a folder with .txt files"
            )
    elif os.path.lexists(path):
        if path.suffix != ".txt":
            raise UserError(f"--dataset_name {dataset_name}: not a .txt file; give plain text in UTF-8")
        paths = (path,)
    elif path.suffix == ".txt" or path.is_absolute() or dataset_name.startswith(("~", ".")):
        raise UserError(f"--dataset_name {dataset_name}: no such file or folder; check the path")
    else:
        return DataSet(dataset_name)
    return Texts(dataset_name, paths, sum(require_regular(each) for each in paths))


def _text_files(folder: Path, dataset_name: str) -> tuple[Path, ...]:
    def stop(error: OSError) -> NoReturn:
        raise UserError(
            f"--dataset_name {dataset_name}: {error.filename} cannot be read ({error.strerror}); check its permissions"
        ) from error

    found = [Path(where, name) for where, _, names in os.walk(folder, onerror=stop) for name in names]
    return tuple(sorted(path for path in found if path.suffix == ".txt"))


def _built_in_chunks(content: ContentHash, read: Callable[[int], None]) -> Iterator[tuple[str, bool]]:
    from pydoc_data.topics import topics

    for key in sorted(topics):
        data = topics[key].encode()
        content.add(data)
        read(len(data))
        yield topics[key], True
        content.end()


def _blocks(path: Path) -> Iterator[bytes]:
    try:
        with open(path, "rb") as file:
            while data := file.read(BLOCK):
                yield data
    except OSError as error:
        raise UserError(
            f"--dataset_name: {path} cannot be read ({error.strerror or error}); check its permissions"
        ) from error


def _decoded(path: Path, content: ContentHash, read: Callable[[int], None]) -> Iterator[str]:
    """The text of a UTF-8 file, piece by piece, with every kind of line end as a newline."""
    decoder, newlines = (
        codecs.getincrementaldecoder("utf-8")(),
        io.IncrementalNewlineDecoder(None, translate=True),
    )
    given = 0  # bytes
    for data in itertools.chain(_blocks(path), [b""]):
        first = given - len(decoder.getstate()[0])  # the bytes of a character may lie in two pieces
        try:
            text = decoder.decode(data, final=not data)
        except UnicodeDecodeError as error:
            raise UserError(
                f"--dataset_name: {path} is not UTF-8 text ({error.reason} at byte {first + error.start}); convert it to UTF-8"
            ) from error
        given += len(data)
        content.add(data)
        read(len(data))
        yield newlines.decode(text, final=not data)


def _cut(pieces: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """The pieces of one document as its chunks."""
    rest = ""
    for piece in pieces:
        rest, start = rest + piece, 0
        while len(rest) - start > CHUNK:
            end = start + _length_of_chunk(rest[start : start + CHUNK])
            yield rest[start:end], False
            start = end
        rest = rest[start:]
    yield rest, True


def _length_of_chunk(text: str) -> int:
    newline = text.rfind("\n")
    if newline >= 0:
        return newline + 1
    if text[-1].isspace():
        return len(text)
    last_word = text.rsplit(None, 1)[-1]
    return len(text) - len(last_word) or len(text)


def _dataset_texts(dataset_name: str) -> Iterator[str]:
    offline = bool(os.environ.get("HF_HUB_OFFLINE"))
    try:
        import datasets
    except ImportError as error:
        raise UserError(
            f"--dataset_name {dataset_name}: no such file or folder, and reading a Hugging Face data set needs "
            "`pip install datasets`"
        ) from error
    identifier, _, config = dataset_name.partition(":")
    if not offline and not Path(identifier).is_dir() and not hub_answers(f"{HUB}/api/datasets/{identifier}"):
        raise UserError(
            f"--dataset_name {dataset_name}: no such file or folder, and the hub cannot be reached; "
            "set HF_HUB_OFFLINE=1 to use a cached copy"
        )
    try:
        rows = datasets.load_dataset(identifier, config or None, split="train", streaming=not offline)
        for row in rows:
            yield row["text"]
    except KeyError as error:
        raise UserError(f"--dataset_name {dataset_name}: its train split has no column 'text'") from error
    except Exception as error:  # the library raises its own, the hub's and the network's errors
        raise UserError(
            f"--dataset_name {dataset_name}: no such file or folder, and no such data set ({first_line(error)})"
        ) from error
