"""The texts of a corpus: built in, .txt files, or a Hugging Face data set. Read in pieces, so a text may have any size.

A document is tokenized in chunks of at most CHUNK characters. A chunk ends after its last newline; without one, after its last white space;
without either, after CHUNK characters.
"""

import hashlib
import importlib.util
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from lockstep.ground.errors import UserError, first_line
from lockstep.ground.files import require_regular
from lockstep.inputs import hub

BUILT_IN_CORPUS = "builtin"
CHUNK = 1 << 20  # characters


@dataclass(frozen=True)
class Texts:
    """The texts that --dataset_name names. `documents()` reads each in pieces. A data set has no paths, and its size is unknown."""

    name: str
    documents: Callable[[], Iterable[Iterable[str]]]
    paths: tuple[Path, ...] = ()
    size: int | None = None  # bytes

    def chunks(self) -> Iterator[tuple[str, bool]]:
        """Yield (text, whether the document ends with it) of each chunk."""
        for pieces in self.documents():
            yield from _cut(pieces)

    def content_sha256(self) -> str:
        """A hash of the files: of what is in each, of their order, and of where each ends."""
        content = hashlib.sha256()
        for path in self.paths:
            try:
                with open(path, "rb") as file:
                    content.update(hashlib.file_digest(file, "sha256").digest())
            except OSError as error:
                raise _unreadable(path, error) from error
        return content.hexdigest()


def find(dataset_name: str) -> Texts:
    """What --dataset_name names: "builtin", a .txt file, a folder of .txt files, or a Hugging Face data set.

    A folder's files are read in the order of their paths, with those of subfolders, but not behind links to folders. Raises UserError if
    there is no such file or folder, or it cannot be read.
    """
    if dataset_name == BUILT_IN_CORPUS:
        # English documentation that ships with CPython
        module = importlib.util.find_spec("pydoc_data.topics")
        if module is None or module.origin is None:
            raise UserError(
                f"--dataset_name {dataset_name}: this Python does not include it; give a .txt file"
            )
        return Texts(dataset_name, _built_in, (Path(module.origin),), os.stat(module.origin).st_size)
    if not dataset_name:  # an empty path would be the current folder
        raise UserError("--dataset_name is empty; give builtin, a .txt file, a folder of them, or a data set")
    path = Path(os.path.expanduser(dataset_name))
    if os.path.isdir(path):
        paths = _text_files(path)
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
        return data_set(dataset_name)
    return Texts(dataset_name, lambda: map(_pieces, paths), paths, sum(map(require_regular, paths)))


def data_set(name: str) -> Texts:
    """A Hugging Face data set, "id" or "id:config"; its train split must have a column "text". One row is one document."""
    return Texts(name, lambda: _documents(name))


def _documents(name: str) -> Iterator[list[str]]:
    for index, text in enumerate(_rows(name)):
        try:
            text.encode()
        except (AttributeError, UnicodeEncodeError) as error:
            raise UserError(
                f"--dataset_name {name}: row {index} of its column 'text' holds no text ({first_line(error)}); "
                "remove the row"
            ) from error
        yield [text]


def _built_in() -> Iterator[list[str]]:
    from pydoc_data.topics import topics

    return ([topics[key]] for key in sorted(topics))


def _text_files(folder: Path) -> tuple[Path, ...]:
    def stop(error: OSError) -> NoReturn:
        raise _unreadable(error.filename, error) from error

    paths = [Path(parent, name) for parent, _, names in os.walk(folder, onerror=stop) for name in names]
    return tuple(sorted(path for path in paths if path.suffix == ".txt"))


def _unreadable(path: Path, error: OSError) -> UserError:
    return UserError(
        f"--dataset_name: {path} cannot be read ({error.strerror or error}); check its permissions"
    )


def _pieces(path: Path) -> Iterator[str]:
    """The text of a UTF-8 file, piece by piece, with every kind of line end as a newline."""
    try:
        with open(path, encoding="utf-8") as file:
            while text := file.read(CHUNK):
                yield text
    except UnicodeDecodeError as error:
        raise UserError(
            f"--dataset_name: {path} is not UTF-8 text ({error.reason}); convert it to UTF-8"
        ) from error
    except OSError as error:
        raise _unreadable(path, error) from error


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
    """The length of the chunk that a text of CHUNK characters begins with."""
    newline = text.rfind("\n")
    if newline >= 0:
        return newline + 1
    if text[-1].isspace():
        return len(text)
    last_word = text.rsplit(None, 1)[-1]
    return len(text) - len(last_word) or len(text)


def _rows(name: str) -> Iterator[str]:
    try:
        import datasets
        from huggingface_hub import HfApi, constants
    except ImportError as error:
        raise UserError(
            f"--dataset_name {name}: no such file or folder, and reading a Hugging Face data set needs "
            "`pip install datasets`"
        ) from error
    identifier, _, config = name.partition(":")
    offline = constants.HF_HUB_OFFLINE
    try:
        if not offline and not Path(identifier).is_dir():
            # This asks once. load_dataset would ask a hub that does not answer again and again.
            HfApi().dataset_info(identifier, timeout=hub.PATIENCE)
        rows = datasets.load_dataset(identifier, config or None, split="train", streaming=not offline)
        for row in rows:
            yield row["text"]
    except KeyError as error:
        raise UserError(
            f"--dataset_name {name}: its train split has no column 'text'; give one that has"
        ) from error
    except Exception as error:  # the library raises its own, the hub's and the network's errors
        raise UserError(
            f"--dataset_name {name}: no such file or folder, and no such data set ({first_line(error)}); "
            "check the name, or set HF_HUB_OFFLINE=1 to use a cached copy"
        ) from error
