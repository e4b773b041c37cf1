"""The tokens of a corpus, tokenized once, kept in the folder --data_cache_dir, and opened by later runs.

    NAME.tokens         a token file (lockstep/inputs/tokens.py); NAME is a hash of the texts and of everything that turns them into tokens
    NAME.tokens.lock    held by the process that writes it
    NAME.link           to a token file; NAME is a hash of the files' paths, sizes and times, so that they need not be read

All may be deleted at any time. A short text under the hash tokenizer is tokenized in each process: that takes less time than
to look here, and works where nothing can be written.
"""

import contextlib
import fcntl
import functools
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from lockstep import files
from lockstep.errors import UserError
from lockstep.inputs import texts, tokens
from lockstep.inputs.tokenizer import HashTokenizer, Tokenizer
from lockstep.inputs.tokens import InMemory, TokenFile
from lockstep.running.progress import Bytes

SHORT = 1 << 20  # bytes of text
SETTLED = 2.0  # seconds: a file changed this lately may change again and keep its time


def corpus_tokens(dataset_name: str, tokenizer: Tokenizer, folder: Path) -> tuple[InMemory | TokenFile, str]:
    """(the tokens of a corpus, with a separator after every document; their SHA-256).

    Raises UserError if the text is missing or empty, or has tokens outside the model's vocabulary.
    """
    source = texts.find(dataset_name)
    if isinstance(source, texts.DataSet):
        return _data_set(source, tokenizer, folder)
    if tokenizer.starts_at_once and source.size < SHORT:
        if dataset_name == texts.BUILT_IN_CORPUS and isinstance(tokenizer, HashTokenizer):
            return _built_in(tokenizer.vocab_size)
        return _in_memory(source, tokenizer)
    stamp = source.stamp()
    link = folder / f"{_name(tokenizer, {'stamp': stamp})}.link"
    found = _open(link)
    if found is None:
        progress = Bytes(f"reading {source.name}", source.size)
        content = source.content_sha256(progress.add)
        progress.end()
        entry = folder / f"{_name(tokenizer, {'content': content})}.tokens"
        files.require_writable_folder(folder, "--data_cache_dir")
        with _locked(entry):
            found = _open(entry) or _write(entry, source, tokenizer, content)
        if time.time() - max(max(state[2:]) for state in stamp) / 1e9 > SETTLED:
            files.write_atomically(link, lambda temporary: os.symlink(entry.name, temporary))
    return found


def _in_memory(source: texts.Texts, tokenizer: Tokenizer) -> tuple[InMemory, str]:
    array = np.concatenate(list(_encoded(source, tokenizer, texts.ContentHash(), lambda count: None)))
    array.flags.writeable = False
    return InMemory(array), hashlib.sha256(array.tobytes()).hexdigest()


@functools.lru_cache(maxsize=2)  # the runs of one start of the ranks share it
def _built_in(vocab_size: int) -> tuple[InMemory, str]:
    source = texts.find(texts.BUILT_IN_CORPUS)
    assert isinstance(source, texts.Texts)
    return _in_memory(source, HashTokenizer(vocab_size))


def _data_set(source: texts.DataSet, tokenizer: Tokenizer, folder: Path) -> tuple[InMemory | TokenFile, str]:
    """A data set is read and tokenized in every run, because only its rows show whether it has changed."""
    files.require_writable_folder(folder, "--data_cache_dir")
    mine = folder / f"data-set-{os.getpid()}.tokens"
    about = _tokenize(mine, source, tokenizer, texts.ContentHash())
    entry = mine.with_name(f"{about['sha256'][:32]}.tokens")
    os.replace(mine, entry)
    found = _open(entry)
    assert found is not None
    return found


def _name(tokenizer: Tokenizer, of: dict) -> str:
    rule = {"format": tokens.FORMAT, "chunk": texts.CHUNK}
    return hashlib.sha256(json.dumps([rule, tokenizer.key, of], sort_keys=True).encode()).hexdigest()[:32]


def _open(path: Path) -> tuple[InMemory | TokenFile, str] | None:
    """(tokens of a token file, their SHA-256); None if there is no such file. Of a damaged one it says so, and returns None."""
    try:
        found = tokens.open_file(
            Path(os.path.realpath(path))
        )  # what a link leads to: a link is of this machine's files
        return tokens.held(found), found.about["sha256"]
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(
            f"{path}: cannot be read ({error.strerror or error}); delete it, or choose another --data_cache_dir"
        ) from error
    except tokens.Damaged as error:
        _say(f"{path}: damaged ({error}); tokenizing again")
        return None


@contextlib.contextmanager
def _locked(entry: Path) -> Iterator[None]:
    """A lock that one process holds at a time. It is released when the process ends, in whatever way."""
    path = entry.with_name(entry.name + ".lock")
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(open(path, "ab"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                _say(f"waiting for another process that tokenizes into {entry}")
                fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            raise UserError(
                f"--data_cache_dir: {path} cannot be locked ({error.strerror or error}); choose another folder"
            ) from error
        yield


def _write(
    entry: Path, source: texts.Texts, tokenizer: Tokenizer, content_sha256: str
) -> tuple[InMemory | TokenFile, str]:
    for left in entry.parent.glob(f".{entry.name}.*.tmp"):  # by a process that was killed
        left.unlink(missing_ok=True)
    content = texts.ContentHash()

    def unchanged() -> None:
        if content.hexdigest() != content_sha256:
            raise UserError(
                f"--dataset_name {source.name}: the text changed while it was read; start again when it no longer changes"
            )

    _tokenize(entry, source, tokenizer, content, unchanged)
    found = _open(entry)
    assert found is not None
    return found


def _tokenize(
    path: Path,
    source: texts.Texts | texts.DataSet,
    tokenizer: Tokenizer,
    content: texts.ContentHash,
    check: Callable[[], None] = lambda: None,
) -> dict:
    """Write the token file of a corpus and return its header. If `check` raises at the end, no file is left."""
    progress = Bytes(f"tokenizing {source.name}", source.size)
    about: dict = {}

    def write(temporary: Path) -> None:
        parts = _encoded(source, tokenizer, content, progress.add)
        about.update(tokens.write_file(temporary, {"texts": source.name, **tokenizer.key}, parts))
        check()

    files.write_atomically(path, write)
    progress.end()
    return about


def _encoded(
    source: texts.Texts | texts.DataSet,
    tokenizer: Tokenizer,
    content: texts.ContentHash,
    read: Callable[[int], None],
) -> Iterator[np.ndarray]:
    """The tokens (any length,) int32 of the texts, piece by piece."""
    words = 0
    for text, ends in source.chunks(content, read):
        ids = tokenizer.encode(text)
        array = np.fromiter(ids, np.int64, len(ids))
        words += int(np.count_nonzero(array != tokenizer.separator))
        if len(array) and not 0 <= array.min() <= array.max() < tokenizer.vocab_size:
            raise UserError(
                f"--dataset_name {source.name}: the tokenizer gives id {array.max()}, the model's vocabulary has "
                f"{tokenizer.vocab_size}; the model folder's tokenizer.json and config.json do not belong together"
            )
        yield array.astype(np.int32)
        if ends:
            yield np.asarray([tokenizer.separator], np.int32)
    if words == 0:
        raise UserError(f"--dataset_name {source.name}: the corpus is empty")


def _say(line: str) -> None:
    if os.environ.get("RANK", "0") == "0":  # what every rank finds is said once
        print(line, file=sys.stderr, flush=True)
