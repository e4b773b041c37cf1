"""Text -> token ids: by the model's own tokenizer.json if there is one, else by the CRC of words."""

import hashlib
import importlib.metadata
import itertools
import os
import re
import sys
import unicodedata
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

from lockstep.errors import UserError, first_line, printable
from lockstep.files import require_regular
from lockstep.inputs import user_file
from lockstep.inputs.architectures import BUILT_IN, HUB_STAND_INS
from lockstep.inputs.hub import hub_file

if TYPE_CHECKING:
    import tokenizers

SEPARATOR = 0  # token id between documents, where the model names none
LARGEST = 1 << 27  # bytes of a tokenizer.json; that of Gemma 3 is a quarter of it
TRIAL_SECONDS = 120
KEPT = 1 << 17  # pieces without white space whose ids are remembered
ROOT = Path(__file__).parents[2]
_WORD = re.compile(r"\w+|[^\w\s]")


Computed = TypeVar("Computed")


class _Remembered(dict[str, Computed], Generic[Computed]):
    """A function's results, each computed once."""

    def __init__(self, function: Callable[[str], Computed]):
        self._function = function

    def __missing__(self, text: str) -> Computed:
        self[text] = found = self._function(text)
        return found


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
        # what is a letter is Python's to say
        self.key = {
            "tokenizer": self.name,
            "vocab_size": vocab_size,
            "separator": SEPARATOR,
            "unicode": unicodedata.unidata_version,
        }
        self._words = _Remembered(lambda word: 1 + zlib.crc32(word.encode()) % (vocab_size - 1))
        self._pieces = _Remembered(lambda piece: tuple(map(self._words.__getitem__, _WORD.findall(piece))))

    def encode(self, text: str) -> list[int]:
        if len(self._pieces) > KEPT:  # memory must not grow with the text
            self._pieces.clear()
            self._words.clear()
        return list(
            itertools.chain.from_iterable(map(self._pieces.__getitem__, text.split()))
        )  # no word has white space


class FileTokenizer:
    """A Hugging Face tokenizer.json, by the tokenizers library. Read when the first text comes.

    The file's own truncation and padding are off: they would cut or pad documents.
    """

    starts_at_once = False

    def __init__(self, path: Path, vocab_size: int, separator: int):
        size = require_regular(path)
        if size > LARGEST:
            raise UserError(
                f"{path}: {size} bytes; the limit is {LARGEST}; not a tokenizer.json, fetch it again"
            )
        try:
            sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror or error})") from error
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
        if self._tokenizer is None:
            _try(self._path)
            self._tokenizer = load(self._path)
        try:
            return self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[
                0
            ].ids  # fast: without offsets
        except BaseException as error:  # noqa: BLE001 - a panic of the library is no Exception
            raise_unless_ours(error)
            raise UserError(
                f"{self._path}: fails on this text ({first_line(error)}); fetch it again"
            ) from error


def load(path: Path) -> "tokenizers.Tokenizer":
    """The library's tokenizer of a tokenizer.json, without truncation and padding."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(path))
    except BaseException as error:  # noqa: BLE001 - as above
        raise_unless_ours(error)
        raise UserError(
            f"{path}: not a readable tokenizer.json ({first_line(error)}); fetch it again"
        ) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def raise_unless_ours(error: BaseException) -> None:
    """Raise errors that are not the library's: Ctrl-C, an exit, a lack of memory."""
    if isinstance(error, (KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError)):
        raise error


def _try(path: Path) -> None:
    """Load the file in a process of its own first: a malformed one may crash the library and its process."""
    import subprocess  # not needed to answer a usage error

    try:
        done = subprocess.run(
            [sys.executable, "-m", "lockstep.inputs.tokenizer_trial", str(path.absolute())],
            cwd=ROOT,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TRIAL_SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise UserError(
            f"{path}: not read within {TRIAL_SECONDS} seconds; it is damaged, fetch it again"
        ) from None
    if done.returncode == UserError.exit_code:
        raise UserError(done.stderr.strip().splitlines()[-1].removeprefix("tokenizer_trial: "))
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no message"]
        raise UserError(
            f"{path}: stops the tokenizers library with status {done.returncode} ({lines[-1][:160]}); fetch it again"
        )


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


def _separator(model_name: str, ends: object, vocab_size: int) -> int:
    """The first of the model's end-of-text tokens."""
    if ends is None:
        return SEPARATOR
    listed = ends if isinstance(ends, list) else [ends]
    ids = [each for each in listed if type(each) is int and 0 <= each < vocab_size]
    if not listed or ids != listed:
        raise UserError(
            f"--model_name {model_name}: eos_token_id is {printable(repr(ends), 60)} in its config.json; it must be one or more whole numbers "
            f"from 0 to {vocab_size - 1}"
        )
    return ids[0]
