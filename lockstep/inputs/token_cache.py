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
SHORT = 1 << 20  # bytes of text
HELD = 1 << 26  # bytes of tokens that are read as a whole, and sent to Ray's workers
TOKEN = np.dtype("<i4")


def corpus_tokens(dataset_name: str, tokenizer: Tokenizer, folder: Path) -> tuple[np.ndarray, str]:
    """(the tokens of a corpus (num_tokens,) int32, with a separator after every document; their SHA-256).

    Many tokens are a np.memmap. Raises UserError if the text is missing or empty, or has tokens outside the model's vocabulary.
    """
    source = texts.find(dataset_name)
    if tokenizer.starts_at_once and source.size is not None and source.size < SHORT:
        values = np.concatenate(list(_encoded(source, tokenizer)))
        return values, hashlib.sha256(values.data).hexdigest()
    content = source.content_sha256()
    built_in = dataset_name == texts.BUILT_IN_CORPUS
    made_of = [FORMAT, texts.CHUNK, tokenizer.key, built_in, content if source.paths else dataset_name]
    name = hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()[:32]
    path = folder / f"{name}.tokens"
    # only the rows of a data set show whether it has changed, so it is read and tokenized in every run
    found = opened(path) if source.paths else None
    if found is None:
        files.require_writable_folder(folder, "--data_cache_dir")
        about = _write(path, source, tokenizer)
        if source.content_sha256() != content:
            raise UserError(
                f"--dataset_name {dataset_name}: the text changed while it was read; start again when it no longer changes"
            )
        files.write_text(path.with_suffix(".json"), json.dumps(about))
        found = opened(path)
    if found is None:
        raise UserError(f"{path}: another process has written other tokens; start again")
    return found


def opened(path: Path) -> tuple[np.ndarray, str] | None:
    """(tokens of a file, their SHA-256); None unless the file is whole and the JSON beside it belongs to it."""
    try:
        about = files.read_json(path.with_suffix(".json"))
        size = files.require_regular(path)
        with open(path, "rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        if (size, sha256) != (about["num_tokens"] * TOKEN.itemsize, about["sha256"]):
            return None
        values = np.memmap(path, TOKEN, "r")
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return values if size > HELD else np.array(values), sha256


def _write(path: Path, source: texts.Texts, tokenizer: Tokenizer) -> dict:
    """Write the tokens of a corpus; returns what the JSON beside them says."""
    digest, num_tokens = hashlib.sha256(), 0

    def write(temporary: Path) -> None:
        nonlocal num_tokens
        with open(temporary, "wb") as file:
            for part in _encoded(source, tokenizer):
                digest.update(part.data)
                file.write(part.data)
                num_tokens += len(part)

    files.write_atomically(path, write)
    key = {"texts": source.name, **tokenizer.key}
    return {"num_tokens": num_tokens, "sha256": digest.hexdigest(), "key": key}


def _encoded(source: texts.Texts, tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    """The tokens (any length,) int32 of the texts, piece by piece."""
    progress = Bytes(f"tokenizing {source.name}", source.size)
    empty = True
    for text, ends in source.chunks():
        ids = np.asarray(tokenizer.encode(text), np.int64)
        empty = empty and not (ids != tokenizer.separator).any()
        if len(ids) and not 0 <= ids.min() <= ids.max() < tokenizer.vocab_size:
            raise UserError(
                f"--dataset_name {source.name}: the tokenizer gives id {ids.max()}, the model's vocabulary has "
                f"{tokenizer.vocab_size}; the model folder's tokenizer.json and config.json do not belong together"
            )
        yield ids.astype(TOKEN)
        if ends:
            yield np.asarray([tokenizer.separator], TOKEN)
        progress.add(len(text.encode()))
    progress.end()
    if empty:
        raise UserError(f"--dataset_name {source.name}: the corpus is empty")
