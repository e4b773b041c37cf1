import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from lockstep import files
from lockstep.errors import UserError
from lockstep.inputs import data, texts, token_cache, tokens
from lockstep.inputs.data import load_corpus
from lockstep.inputs.token_cache import corpus_tokens
from lockstep.inputs.tokenizer import HashTokenizer
from lockstep.inputs.tokens import InMemory, TokenFile

ROOT = Path(__file__).parents[1]


@pytest.fixture
def text(tmp_path, monkeypatch):
    """A text that is not short, and not new."""
    monkeypatch.setattr(token_cache, "SHORT", 100)
    path = tmp_path / "t.txt"
    write(path, "".join(f"word{index} " + "\n" * (index % 9 == 0) for index in range(60_000)))
    return path


def write(path: Path, content: str, age: float = 60) -> None:
    path.write_text(content)
    os.utime(path, (time.time() - age,) * 2)


@pytest.fixture(autouse=True)
def settled(monkeypatch):
    """The time of a change of state cannot be set back, so the clock is set on."""
    real = time.time
    monkeypatch.setattr(token_cache.time, "time", lambda: real() + 60)


def tokens_of(path, cache, vocab=5003):
    return corpus_tokens(str(path), HashTokenizer(vocab), cache)


def names(cache, suffix):
    return sorted(path.name for path in cache.iterdir() if path.suffix == suffix)


class Refuses(HashTokenizer):
    def encode(self, text):
        raise AssertionError("tokenized again")


def test_tokenized_once(text, tmp_path):
    cache = tmp_path / "cache"
    found, sha256 = tokens_of(text, cache)
    assert found.values.tolist() == [*HashTokenizer(5003).encode(text.read_text()), 0]
    again, same = corpus_tokens(str(text), Refuses(5003), cache)
    assert same == sha256 and (again.values == found.values).all()
    assert len(names(cache, ".tokens")) == len(names(cache, ".link")) == 1 and not names(cache, ".tmp")


def test_a_second_run_reads_no_text(text, tmp_path, monkeypatch):
    tokens_of(text, tmp_path / "cache")
    monkeypatch.setattr(texts, "_blocks", lambda path: pytest.fail("read again"))
    tokens_of(text, tmp_path / "cache")


def test_only_the_hash_is_computed_for_a_copy_and_a_touched_file(text, tmp_path):
    cache = tmp_path / "cache"
    _, sha256 = tokens_of(text, cache)
    write(tmp_path / "copy.txt", text.read_text())
    os.utime(text)
    for path in (tmp_path / "copy.txt", text):
        assert corpus_tokens(str(path), Refuses(5003), cache)[1] == sha256
    assert len(names(cache, ".tokens")) == 1 and len(names(cache, ".link")) == 3


def test_a_changed_text_is_noticed(text, tmp_path):
    """Also where size and time stay as they were."""
    cache = tmp_path / "cache"
    _, before = tokens_of(text, cache)
    state = os.stat(text)
    time.sleep(0.02)  # a tick of the file system's clock
    text.write_text(text.read_text().replace("word7 ", "worm7 "))
    os.utime(text, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert os.stat(text).st_size == state.st_size
    assert tokens_of(text, cache)[1] != before


def test_a_text_written_just_now_is_read_again(text, tmp_path, monkeypatch):
    monkeypatch.setattr(token_cache.time, "time", lambda: os.stat(text).st_ctime + 0.5)
    tokens_of(text, tmp_path / "cache")
    assert names(tmp_path / "cache", ".link") == []


def test_what_makes_tokens_is_part_of_the_name(text, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    assert tokens_of(text, cache)[1] != tokens_of(text, cache, vocab=4999)[1]
    monkeypatch.setattr(texts, "CHUNK", 1000)
    tokens_of(text, cache)
    assert len(names(cache, ".tokens")) == 3


def test_a_text_that_changes_while_it_is_read(text, tmp_path):
    class Changes(HashTokenizer):
        def encode(self, words):
            text.write_text(text.read_text().upper())
            return super().encode(words)

    text.write_text(text.read_text() * 8)  # more than is read at once
    with pytest.raises(UserError, match="the text changed while it was read"):
        corpus_tokens(str(text), Changes(5003), tmp_path / "cache")
    assert not names(tmp_path / "cache", ".tokens") and not names(tmp_path / "cache", ".tmp")


@pytest.mark.parametrize("damage", [b"", b"garbage", "cut", "longer", "header", "token", "sums"])
def test_a_damaged_file_is_made_again(text, tmp_path, capsys, damage):
    cache = tmp_path / "cache"
    found, sha256 = tokens_of(text, cache)
    path = cache / names(cache, ".tokens")[0]
    content = bytearray(path.read_bytes())
    place = {"header": 30, "token": 70_000, "sums": -2}.get(damage)
    if place:
        content[place] ^= 1
    content = {"cut": content[:-5], "longer": content + b"x"}.get(damage, content if place else damage)
    path.write_bytes(content)
    again, same = tokens_of(text, cache)
    assert same == sha256 and (again.values == found.values).all()
    assert "damaged" in capsys.readouterr().err
    assert corpus_tokens(str(text), Refuses(5003), cache)[1] == sha256


@pytest.fixture
def large(monkeypatch):
    """Any token file is too large to be held in memory."""
    monkeypatch.setattr(tokens, "HELD", 0)


def test_a_large_file_is_read_where_it_is_asked_for(text, tmp_path, large):
    found, _ = tokens_of(text, tmp_path / "cache")
    whole = np.asarray([*HashTokenizer(5003).encode(text.read_text()), 0])
    assert isinstance(found, TokenFile) and len(found) == len(whole)
    for first, count in (
        (0, 1),
        (0, len(whole)),
        (16_383, 2),
        (16_384, 16_384),
        (len(whole) - 3, 3),
        (100, 40_000),
    ):
        assert (found.read(first, count) == whole[first : first + count]).all() and len(
            found.read(first, count)
        ) == count


def test_the_batches_of_a_large_corpus_are_the_same(text, tmp_path, monkeypatch):
    def batches():
        arguments = {"seq_length": 50, "windows_per_step": 4, "cache_folder": tmp_path / "cache"}
        return data.Batches(load_corpus(str(text), HashTokenizer(5003), **arguments), 0, 2, 2, 1)

    held = batches()
    monkeypatch.setattr(tokens, "HELD", 0)
    read = batches()
    assert isinstance(held.corpus.tokens, InMemory) and isinstance(read.corpus.tokens, TokenFile)
    for step in (0, 1, read.steps_per_epoch):
        assert (held.windows(step, 1) == read.windows(step, 1)).all()


def test_a_large_corpus_is_sent_as_its_path(text, tmp_path, large):
    found, _ = tokens_of(text, tmp_path / "cache")
    sent = pickle.dumps(found)
    assert len(sent) < 2000 and (pickle.loads(sent).read(5, 9) == found.read(5, 9)).all()
    entry = tmp_path / "cache" / names(tmp_path / "cache", ".tokens")[0]
    assert found.path == entry
    write(text, "other " * 9000)
    other, _ = tokens_of(text, tmp_path / "cache")
    os.replace(other.path, entry)
    with pytest.raises(
        UserError, match="holds other tokens; set --data_cache_dir to a folder that all machines share"
    ):
        pickle.loads(sent)
    entry.unlink()
    with pytest.raises(
        UserError, match="No such file.*set --data_cache_dir to a folder that all machines share"
    ):
        pickle.loads(sent)


@pytest.mark.parametrize("damage", ["a bit", "cut"])
def test_damage_in_a_large_file_is_found_when_it_is_read(text, tmp_path, large, damage):
    found, _ = tokens_of(text, tmp_path / "cache")
    with open(found.path, "r+b") as file:
        if damage == "cut":
            file.truncate(tokens.HEADER + 70_000)
        else:
            file.seek(tokens.HEADER + 70_000)
            file.write(b"\xff")
    assert len(found.read(0, 100)) == 100  # the block before
    with pytest.raises(
        UserError, match="damaged, block 1 is not what was written; delete it and start again"
    ):
        found.read(17_400, 200)


def test_nothing_can_be_written(text):
    with pytest.raises(UserError, match="--data_cache_dir /proc/nothing: cannot be written"):
        tokens_of(text, Path("/proc/nothing"))


def test_a_full_disk_is_one_line_and_leaves_nothing(text, tmp_path):
    code = f"""
import resource, signal, sys
from pathlib import Path
from lockstep.inputs import token_cache
from lockstep.errors import run_program
from lockstep.inputs.tokenizer import HashTokenizer
token_cache.SHORT = 0
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000,) * 2)
sys.exit(run_program("here", lambda: bool(token_cache.corpus_tokens({str(text)!r}, HashTokenizer(5003), Path({str(tmp_path)!r}, "cache")))))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (
        done.returncode == 2
        and done.stderr.count("\n") == 1
        and ".tokens: File too large; free space" in done.stderr
    )
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


SLOW = """
import sys, time
from pathlib import Path
from lockstep.inputs import token_cache
from lockstep.inputs.tokenizer import HashTokenizer
class Slow(HashTokenizer):
    def encode(self, text):
        print("tokenizing", flush=True)
        time.sleep(float(sys.argv[3]))
        return super().encode(text)
token_cache.SHORT = 0
print(token_cache.corpus_tokens(sys.argv[1], Slow(5003), Path(sys.argv[2]))[1], flush=True)
"""


def start(text, cache, seconds):
    command = [sys.executable, "-c", SLOW, str(text), str(cache), str(seconds)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_two_at_once_tokenize_once(text, tmp_path):
    both = [start(text, tmp_path / "cache", 1.5) for _ in range(2)]
    (out1, err1), (out2, err2) = (process.communicate(timeout=60) for process in both)
    assert (out1 + out2).count("tokenizing") == 1
    assert out1.split()[-1] == out2.split()[-1] == tokens_of(text, tmp_path / "other")[1]
    assert "waiting for another process that tokenizes" in err1 + err2


def test_what_a_killed_process_leaves_is_removed(text, tmp_path):
    cache = tmp_path / "cache"
    killed = start(text, cache, 60)
    assert killed.stdout.readline() == "tokenizing\n"
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert len(names(cache, ".tmp")) == 1
    tokens_of(text, cache)
    assert len(names(cache, ".tmp")) == 0 and len(names(cache, ".tokens")) == 1


def test_a_data_set_is_kept_under_its_tokens(tmp_path, monkeypatch):
    rows = ["some words here"] * 3
    monkeypatch.setattr(texts, "_dataset_texts", lambda name: iter(rows))
    found, _ = corpus_tokens("nobody/nothing", HashTokenizer(5003), tmp_path)
    assert len(found) == 12 and found.read(3, 1) == 0
    corpus_tokens("nobody/nothing", HashTokenizer(5003), tmp_path)
    assert len(names(tmp_path, ".tokens")) == 1
    rows.append("more")
    assert len(corpus_tokens("nobody/nothing", HashTokenizer(5003), tmp_path)[0]) == 14


def test_an_empty_data_set(tmp_path, monkeypatch):
    monkeypatch.setattr(texts, "_dataset_texts", lambda name: iter(["", " "]))
    with pytest.raises(UserError, match="the corpus is empty"):
        corpus_tokens("nobody/nothing", HashTokenizer(5003), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_short_text_needs_no_folder():
    assert len(corpus_tokens("builtin", HashTokenizer(2048), Path("/proc/nothing"))[0]) > 100_000


def test_a_tokenizer_that_starts_slowly_is_asked_once(tmp_path):
    class Slow(HashTokenizer):
        starts_at_once = False

    class Never(Refuses):
        starts_at_once = False

    _, sha256 = corpus_tokens("builtin", Slow(2048), tmp_path)
    assert corpus_tokens("builtin", Never(2048), tmp_path)[1] == sha256


def test_progress(monkeypatch, capsys):
    from lockstep.running import progress

    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])

    def lines(seconds, terminal):
        monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
        shown = progress.Bytes("tokenizing x", 200_000_000)
        for _ in range(100):
            now[0] += seconds / 100
            shown.add(2_000_000)
        shown.end()
        return capsys.readouterr().err

    assert lines(0.9, True) == lines(9, False) == ""
    assert lines(100, False).splitlines()[0] == "tokenizing x: 20 MB of 200, 90 s left"
    assert len(lines(100, False).splitlines()) == 5 and "\r" not in lines(100, False)
    assert lines(10, True).count("\r") > 30 and lines(10, True).count("\n") == 1


def test_the_default_folder(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert files.cache_folder() == Path("/somewhere/lockstep")
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")  # to be ignored, says the XDG specification
    assert files.cache_folder() == Path.home() / ".cache/lockstep"
