"""Corpus -> tokens -> packed windows -> the batch of one step and one DP rank.

Everything is a function of (corpus, tokenizer, seed, step, dp_rank): TP peers get the same batch, DP ranks get
disjoint ones, and no strategy is asked which. Documents are joined with a separator and cut into windows of
seq_length + 1 tokens; there is no padding. Nothing here imports torch before a batch is made.
"""

import functools
import hashlib
import os
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lockstep.architectures import BUILT_IN, HUB_STAND_INS, hub_answers, hub_file
from lockstep.errors import UserError, first_line

BUILT_IN_CORPUS = "builtin"
HUB = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
SEPARATOR = 0  # token id between documents, for the built-in tokenizer
_WORD = re.compile(r"\w+|[^\w\s]")


class HashTokenizer:
    """Words and punctuation marks, each mapped to 1 + crc32(word) mod (vocab_size - 1).

    Needs no vocabulary file, and spreads the ids over the whole vocabulary, so that every shard of a
    vocabulary-parallel embedding is read and updated.
    """

    name = "word-crc32"

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size
        self.separator = SEPARATOR

    def encode(self, text: str) -> list[int]:
        return [1 + zlib.crc32(word.encode()) % (self.vocab_size - 1) for word in _WORD.findall(text)]


class FileTokenizer:
    """A Hugging Face tokenizer.json, through the tokenizers library."""

    def __init__(self, path: Path, vocab_size: int, separator: int):
        from tokenizers import Tokenizer

        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises a bare Exception
            raise UserError(f"{path}: not a readable tokenizer.json ({first_line(error)}); fetch it again") from error
        self.name = "tokenizer.json " + hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        self.vocab_size = vocab_size
        self.separator = separator

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids


def build_tokenizer(model_name: str, architecture: dict):
    """The model's own tokenizer.json where there is one (its folder, or the hub), else the hash tokenizer."""
    vocab_size = architecture["vocab_size"]
    if model_name in BUILT_IN:
        return HashTokenizer(vocab_size)
    folder = Path(os.path.expanduser(model_name))
    if folder.is_dir():
        path = folder / "tokenizer.json"
        path = path if path.is_file() else None
    else:
        path, _ = hub_file(model_name, "tokenizer.json")
        if path is None and model_name not in HUB_STAND_INS:
            raise UserError(f"--model_name {model_name}: its tokenizer.json cannot be read from the hub")
    if path is None:
        return HashTokenizer(vocab_size)
    ends = architecture.get("eos_token_id")
    separator = (ends[0] if isinstance(ends, list) else ends) or SEPARATOR
    return FileTokenizer(path, vocab_size, separator)


def documents(dataset_name: str) -> Iterator[str]:
    """The texts of a corpus: "builtin", a .txt file, a folder of .txt files, or a Hugging Face data set.

    A data set is named "id" or "id:config"; its train split must have a column "text".
    """
    path = Path(os.path.expanduser(dataset_name))
    if dataset_name == BUILT_IN_CORPUS:
        from pydoc_data.topics import topics  # English documentation that ships with CPython

        yield from (topics[key] for key in sorted(topics))
    elif path.is_file():
        if path.suffix != ".txt":
            raise UserError(f"--dataset_name {dataset_name}: not a .txt file; give plain text in UTF-8")
        yield _read_text(path)
    elif path.is_dir():
        files = sorted(path.rglob("*.txt"))
        if not files:
            raise UserError(f"--dataset_name {dataset_name}: the folder holds no .txt file")
        yield from (_read_text(file) for file in files)
    elif path.suffix == ".txt" or path.is_absolute() or dataset_name.startswith(("~", ".")):
        raise UserError(f"--dataset_name {dataset_name}: no such file or folder")
    else:
        yield from _dataset_texts(dataset_name)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--dataset_name: {path} cannot be read as UTF-8 text ({error})") from error


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


@dataclass(frozen=True)
class Corpus:
    """Token windows (num_windows, seq_length + 1) int32, and what they were made from."""

    windows: np.ndarray
    tokenizer_name: str
    sha256: str


def load_corpus(
    dataset_name: str, tokenizer, *, seq_length: int, windows_per_step: int, max_windows: int | None
) -> Corpus:
    """Tokenize and pack a corpus; stop reading after max_windows windows if that is given.

    Raises UserError when the text is missing, empty, or too short for the windows of one step.
    """
    width = seq_length + 1
    tokens: list[int] = []
    for text in documents(dataset_name):
        tokens.extend(tokenizer.encode(text))
        tokens.append(tokenizer.separator)
        if max_windows is not None and len(tokens) >= max_windows * width:
            break
    array = np.asarray(tokens, dtype=np.int64)
    words = int((array != tokenizer.separator).sum())
    if words == 0:
        raise UserError(f"--dataset_name {dataset_name}: the corpus is empty")
    if array.max() >= tokenizer.vocab_size:
        raise UserError(
            f"--dataset_name {dataset_name}: the tokenizer gives id {array.max()}, the model's vocabulary has "
            f"{tokenizer.vocab_size}; the model folder's tokenizer.json and config.json do not belong together"
        )
    num_windows = len(array) // width
    if num_windows < windows_per_step:
        raise UserError(
            f"--dataset_name {dataset_name}: {len(array)} tokens are {num_windows} windows of {width}, one step needs "
            f"{windows_per_step}; give more text, or lower --batch_size, --seq_length or --gradient_accumulation_steps"
        )
    windows = array[: num_windows * width].astype(np.int32).reshape(num_windows, width)
    return Corpus(windows, tokenizer.name, hashlib.sha256(windows.tobytes()).hexdigest())


@dataclass(frozen=True)
class Batches:
    """The windows of each step: a fresh permutation per epoch, cut into global batches, cut into DP shares."""

    corpus: Corpus
    seed: int
    dp_size: int
    batch_size: int
    num_micro_batches: int

    @property
    def windows_per_step(self) -> int:
        return self.dp_size * self.batch_size * self.num_micro_batches

    @property
    def steps_per_epoch(self) -> int:
        return len(self.corpus.windows) // self.windows_per_step

    def windows(self, step: int, dp_rank: int) -> np.ndarray:
        """The windows (num_micro_batches, batch_size, seq_length + 1) of one step (from 0) and one DP rank."""
        epoch, position = divmod(step, self.steps_per_epoch)
        order = _order(self.seed, epoch, len(self.corpus.windows))
        share = self.batch_size * self.num_micro_batches
        first = position * self.windows_per_step + dp_rank * share
        chosen = self.corpus.windows[order[first : first + share]]
        return chosen.reshape(self.num_micro_batches, self.batch_size, -1)

    def micro_batches(self, step: int, dp_rank: int, device) -> list[tuple]:
        """(input_ids, labels), each (batch_size, seq_length) int64 on the device, one pair per micro batch."""
        import torch

        windows = torch.from_numpy(self.windows(step, dp_rank).astype(np.int64)).to(device)
        return [(window[:, :-1].contiguous(), window[:, 1:].contiguous()) for window in windows]


@functools.lru_cache(maxsize=2)
def _order(seed: int, epoch: int, num_windows: int) -> np.ndarray:
    """The order of the windows in one epoch; drawn once, not at every step."""
    return np.random.default_rng((seed, epoch)).permutation(num_windows)


def micro_batches_hash(micro_batches: list[tuple]) -> int:
    """48 bits of SHA-256 over what a rank really feeds its model (48 so that a float64 can carry it)."""
    digest = hashlib.sha256()
    for input_ids, labels in micro_batches:
        digest.update(input_ids.cpu().numpy().tobytes())
        digest.update(labels.cpu().numpy().tobytes())
    return int.from_bytes(digest.digest()[:6], "big")


def global_batch_hash(hashes_by_dp_rank: list[int]) -> str:
    """Hash of a step's global batch from the hashes of its DP shares, in order."""
    return hashlib.sha256(" ".join(map(str, hashes_by_dp_rank)).encode()).hexdigest()[:16]
