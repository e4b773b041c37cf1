"""Text -> token ids: by the model's own tokenizer.json if there is one, else by the CRC of words."""

import contextlib
import functools
import hashlib
import importlib.metadata
import itertools
import os
import re
import unicodedata
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.ground import user_file
from lockstep.ground.errors import UserError, first_line, printable
from lockstep.ground.files import require_regular
from lockstep.inputs.architectures import BUILT_IN, HUB_STAND_INS
from lockstep.inputs.hub import hub_file

if TYPE_CHECKING:
    import tokenizers

SEPARATOR = 0  # token id between documents, where the model names none
KEPT = 1 << 17  # pieces without white space whose ids are remembered
_WORD = re.compile(r"\w+|[^\w\s]")


@functools.lru_cache(KEPT)
def _ids(piece: str, vocab_size: int) -> tuple[int, ...]:
    """The ids of the words in a piece of text without white space."""
    return tuple(1 + zlib.crc32(word.encode()) % (vocab_size - 1) for word in _WORD.findall(piece))


class HashTokenizer:
    """Words and punctuation marks, each mapped to 1 + crc32(word) mod (vocab_size - 1).

    Needs no vocabulary file, and spreads the ids over the whole vocabulary, so that every shard of a
    vocabulary-parallel embedding is read and updated.
    """

    name = "word-crc32"
    starts_at_once = True

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size
        self.separator = SEPARATOR
        # Which characters are letters depends on Python's version of Unicode.
        self.key = {
            "tokenizer": self.name,
            "vocab_size": vocab_size,
            "separator": SEPARATOR,
            "unicode": unicodedata.unidata_version,
        }

    def encode(self, text: str) -> list[int]:
        # No word has white space in it, so the text can be split there.
        pieces = map(_ids, text.split(), itertools.repeat(self.vocab_size))
        return list(itertools.chain.from_iterable(pieces))


class FileTokenizer:
    """A Hugging Face tokenizer.json, by the tokenizers library. Read when the first text comes.

    The file's own truncation and padding are off: they would cut or pad documents.
    """

    starts_at_once = False

    def __init__(self, path: Path, vocab_size: int, separator: int):
        require_regular(path)
        try:
            sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
        except OSError as error:
            raise UserError(
                f"{path}: cannot be read ({error.strerror or error}); check its permissions"
            ) from error
        self.name = "tokenizer.json " + sha256[:16]
        self.key = {
            "tokenizer": sha256,
            "vocab_size": vocab_size,
            "separator": separator,
            "tokenizers": importlib.metadata.version("tokenizers"),
        }
        self.vocab_size = vocab_size
        self.separator = separator
        self._path = path
        self._tokenizer: tokenizers.Tokenizer | None = None

    def encode(self, text: str) -> list[int]:
        """Raises UserError if the file is not a tokenizer, or fails on this text."""
        with _refused_by_the_library(self._path):
            if self._tokenizer is None:
                self._tokenizer = _load(self._path)
            # The fast method leaves the offsets out.
            return self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids


def _load(path: Path) -> "tokenizers.Tokenizer":
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    if getattr(tokenizer.model, "dropout", None):
        raise UserError(f"{path}: its model has a dropout: each run would have other tokens; set it to null")
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


@contextlib.contextmanager
def _refused_by_the_library(path: Path) -> Iterator[None]:
    """Raise UserError for whatever the tokenizers library raises."""
    try:
        yield
    except (UserError, KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError):
        raise
    except BaseException as error:  # noqa: BLE001 - a panic of the library is no Exception
        raise UserError(
            f"{path}: the tokenizers library cannot use it ({first_line(error)}); fetch it again"
        ) from error


Tokenizer = HashTokenizer | FileTokenizer


def build_tokenizer(model_name: str, architecture: dict) -> Tokenizer:
    """The model's own tokenizer.json if there is one (in its folder, or on the hub), else the hash tokenizer.

    Raises UserError if it cannot be read from the hub, or if `eos_token_id`, which separates documents, is not a token id.
    """
    vocab_size = architecture["vocab_size"]
    if model_name in BUILT_IN or user_file.is_named(model_name):
        return HashTokenizer(vocab_size)
    folder = Path(os.path.expanduser(model_name))
    path: Path | None
    if folder.is_dir():
        path = folder / "tokenizer.json" if os.path.lexists(folder / "tokenizer.json") else None
    else:
        path, problem = hub_file(model_name, "tokenizer.json")
        if path is None and model_name not in HUB_STAND_INS:
            raise UserError(
                f"--model_name {model_name}: its tokenizer.json cannot be read from the hub ({problem}); give a model folder"
            )
    if path is None:
        return HashTokenizer(vocab_size)
    return FileTokenizer(
        path, vocab_size, _separator(model_name, architecture.get("eos_token_id"), vocab_size)
    )


def _separator(model_name: str, eos: object, vocab_size: int) -> int:
    """The first of the model's end-of-text tokens (`eos_token_id`); SEPARATOR if it has none."""
    if eos is None:
        return SEPARATOR
    listed = eos if isinstance(eos, list) else [eos]
    ids = [token for token in listed if type(token) is int and 0 <= token < vocab_size]
    if not listed or ids != listed:
        raise UserError(
            f"--model_name {model_name}: eos_token_id is {printable(repr(eos), 60)} in its config.json; it must be one or more whole numbers "
            f"from 0 to {vocab_size - 1}"
        )
    return ids[0]
