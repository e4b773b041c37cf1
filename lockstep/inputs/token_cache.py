"""The tokens of a corpus, tokenized once, kept in the folder --data_cache_dir, and opened by later runs.

    NAME.tokens    the tokens, int32, little-endian; NAME is a hash of the texts and of everything that turns them into tokens
    NAME.json      written after it: how many tokens there are, their SHA-256, and what made them

Both are replaced as a whole, so two processes that tokenize the same texts do no harm: they write the same bytes. A pair that does not fit
is written anew. All may be deleted at any time. A short text under the hash tokenizer is tokenized in each process: that takes less time
than to look here, and works where nothing can be written.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from lockstep.ground import files
from lockstep.ground.errors import UserError
from lockstep.ground.progress import Bytes
from lockstep.inputs import texts
from lockstep.inputs.tokenizer import Tokenizer

FORMAT = "lockstep tokens 2"
SHORT = 1 << 20  # bytes; a shorter text is tokenized in each process
HELD = 1 << 26  # bytes; tokens that take no more are read into memory, and sent to Ray's workers
TOKEN = np.dtype("<i4")


def corpus_tokens(dataset_name: str, tokenizer: Tokenizer, folder: Path) -> tuple[np.ndarray, str]:
    """(the tokens of a corpus (num_tokens,) int32, with a separator after every document; their SHA-256).

    Many tokens are a np.memmap. Raises UserError if the text is missing or empty, or has tokens outside the model's vocabulary.
    """
    source = texts.find(dataset_name)
    if tokenizer.starts_at_once and source.size is not None and source.size < SHORT:
        tokens = np.concatenate(list(_encoded(source, tokenizer)))
        return tokens, hashlib.sha256(tokens.data).hexdigest()
    content_sha256 = source.content_sha256()
    is_built_in = dataset_name == texts.BUILT_IN_CORPUS
    key = [FORMAT, texts.CHUNK, tokenizer.key, is_built_in, content_sha256 if source.paths else dataset_name]
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
    path = folder / f"{name}.tokens"
    # Only the rows of a data set show whether it has changed, so it is read and tokenized in every run
    cached = opened(path) if source.paths else None
    if cached is None:
        files.require_writable_folder(folder, "--data_cache_dir")
        description = _write(path, source, tokenizer)
        if source.content_sha256() != content_sha256:
            raise UserError(
                f"--dataset_name {dataset_name}: the text changed while it was read; start again when it no longer changes"
            )
        files.write_text(path.with_suffix(".json"), json.dumps(description))
        cached = opened(path)
    if cached is None:
        raise UserError(f"{path}: another process has written other tokens; start again")
    return cached


def opened(path: Path) -> tuple[np.ndarray, str] | None:
    """(the tokens of a file, their SHA-256); None unless the file is whole and the JSON beside it belongs to it."""
    try:
        description = files.read_json(path.with_suffix(".json"))
        size = files.require_regular(path)
        with open(path, "rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        if (size, sha256) != (description["num_tokens"] * TOKEN.itemsize, description["sha256"]):
            return None
        tokens = np.memmap(path, TOKEN, "r")
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return tokens if size > HELD else np.array(tokens), sha256


def _write(path: Path, source: texts.Texts, tokenizer: Tokenizer) -> dict:
    """Write the tokens of a corpus. Returns the content of the JSON beside them."""
    digest, num_tokens = hashlib.sha256(), 0

    def write(temporary: Path) -> None:
        nonlocal num_tokens
        with open(temporary, "wb") as file:
            for tokens in _encoded(source, tokenizer):
                digest.update(tokens.data)
                file.write(tokens.data)
                num_tokens += len(tokens)

    files.write_atomically(path, write)
    key = {"texts": source.name, **tokenizer.key}
    return {"num_tokens": num_tokens, "sha256": digest.hexdigest(), "key": key}


def _encoded(source: texts.Texts, tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    """The tokens (any length,) int32 of the texts, piece by piece."""
    progress = Bytes(f"tokenizing {source.name}", source.size)
    is_empty = True
    for text, is_last in source.chunks():
        ids = np.asarray(tokenizer.encode(text), np.int64)
        is_empty = is_empty and not (ids != tokenizer.separator).any()
        if len(ids) and not 0 <= ids.min() <= ids.max() < tokenizer.vocab_size:
            raise UserError(
                f"--dataset_name {source.name}: the tokenizer gives id {ids.max()}, the model's vocabulary has "
                f"{tokenizer.vocab_size}; the model folder's tokenizer.json and config.json do not belong together"
            )
        yield ids.astype(TOKEN)
        if is_last:
            yield np.asarray([tokenizer.separator], TOKEN)
        progress.add(len(text.encode()))
    progress.end()
    if is_empty:
        raise UserError(f"--dataset_name {source.name}: the corpus is empty")
