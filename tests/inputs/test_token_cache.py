import hashlib
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from lockstep.ground.errors import UserError
from lockstep.inputs import texts, token_cache
from lockstep.inputs.data import Batches, load_corpus
from lockstep.inputs.token_cache import corpus_tokens
from lockstep.inputs.tokenizer import HashTokenizer

ROOT = Path(__file__).parents[2]


@pytest.fixture
def text(tmp_path, monkeypatch):
    """A text that is not short."""
    monkeypatch.setattr(token_cache, "SHORT", 100)
    path = tmp_path / "t.txt"
    path.write_text("".join(f"word{index} " + "\n" * (index % 9 == 0) for index in range(60_000)))
    return path


def tokens_of(path, cache, vocab=5003):
    return corpus_tokens(str(path), HashTokenizer(vocab), cache)


def only(cache, pattern="*.tokens"):
    (found,) = cache.glob(pattern)
    return found


class Refuses(HashTokenizer):
    def encode(self, text):
        raise AssertionError("tokenized again")


def test_tokenized_once(text, tmp_path):
    cache = tmp_path / "cache"
    found, sha256 = tokens_of(text, cache)
    assert found.tolist() == [*HashTokenizer(5003).encode(text.read_text()), 0]
    # a history records it
    assert sha256 == "e44ea34aedb7580f2c49530180e83524d7f5aa0f602cb616a538c31dea0c50b6"
    (tmp_path / "copy.txt").write_text(text.read_text())
    for path in (text, tmp_path / "copy.txt"):
        again, same = corpus_tokens(str(path), Refuses(5003), cache)
        assert same == sha256 and (again == found).all()
    assert len(list(cache.iterdir())) == 2


def test_what_makes_tokens_is_part_of_the_name(text, tmp_path, monkeypatch):
    """The text, too, where size and time stay as they were."""
    cache = tmp_path / "cache"
    found = {tokens_of(text, cache)[1], tokens_of(text, cache, vocab=4999)[1]}
    state = os.stat(text)
    text.write_text(text.read_text().replace("word7 ", "worm7 "))
    os.utime(text, ns=(state.st_atime_ns, state.st_mtime_ns))
    found.add(tokens_of(text, cache)[1])
    assert len(found) == 3
    monkeypatch.setattr(texts, "CHUNK", 1000)
    tokens_of(text, cache)
    assert len(list(cache.glob("*.tokens"))) == 4


def test_a_text_that_changes_while_it_is_read(text, tmp_path):
    class Changes(HashTokenizer):
        def encode(self, words):
            text.write_text(text.read_text().upper())
            return super().encode(words)

    with pytest.raises(UserError, match="the text changed while it was read"):
        corpus_tokens(str(text), Changes(5003), tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("*.json"))


DAMAGED = {
    "gone": lambda content: None,
    "empty": lambda content: b"",
    "cut": lambda content: content[:-5],
    "longer": lambda content: content + b"x",
    "a bit": lambda content: content[:-9] + bytes([content[-9] ^ 1]) + content[-8:],
    "other JSON": lambda content: b"{}",
    "a pickle": lambda content: pickle.dumps(print),
}


@pytest.mark.parametrize("damage", [*DAMAGED, "a pipe"])
@pytest.mark.parametrize("suffix", ["tokens", "json"])
def test_a_pair_that_does_not_fit_is_written_anew(text, tmp_path, suffix, damage):
    """Nothing is unpickled, no pipe is waited for, and no damaged token is taken."""
    cache = tmp_path / "cache"
    found, sha256 = tokens_of(text, cache)
    path = only(cache, f"*.{suffix}")
    if suffix == "json" and damage == "a bit":  # the end of the key is not looked at
        path.write_text(path.read_text().replace(sha256[:9], "0" * 9))
    else:
        damaged = DAMAGED.get(damage, DAMAGED["gone"])(path.read_bytes())
        path.unlink()
        if damaged is not None:
            path.write_bytes(damaged)
    if damage == "a pipe":
        os.mkfifo(path)
    with pytest.raises(AssertionError, match="tokenized again"):
        corpus_tokens(str(text), Refuses(5003), cache)
    again, same = tokens_of(text, cache)
    assert same == sha256 and (again == found).all()
    assert corpus_tokens(str(text), Refuses(5003), cache)[1] == sha256


def test_a_large_corpus_has_the_same_batches_and_is_sent_as_its_path(text, tmp_path, monkeypatch):
    def batches():
        arguments = {"seq_length": 50, "windows_per_step": 4, "cache_folder": tmp_path / "cache"}
        return Batches(load_corpus(str(text), HashTokenizer(5003), **arguments), 0, 2, 2, 1)

    held = batches()
    monkeypatch.setattr(token_cache, "HELD", 0)
    mapped = batches()
    assert isinstance(mapped.corpus.tokens, np.memmap) and not isinstance(held.corpus.tokens, np.memmap)
    sent = pickle.dumps(mapped)
    assert len(sent) < 2000 and len(pickle.dumps(held)) > 100_000
    for other in (mapped, pickle.loads(sent)):
        for step in (0, 1, held.steps_per_epoch):
            assert (held.windows(step, 1) == other.windows(step, 1)).all()
    path = only(tmp_path / "cache")
    path.with_suffix(".json").write_text(
        json.dumps({"num_tokens": 1, "sha256": hashlib.sha256(b"a" * 4).hexdigest()})
    )
    for content in (b"a" * 4, b""):  # whole, but others; and damaged
        path.unlink()
        path.write_bytes(content)
        with pytest.raises(
            UserError, match="other tokens; set --data_cache_dir to a folder that all machines"
        ):
            pickle.loads(sent)


SLOW = """
import resource, signal, sys, time
from pathlib import Path
from lockstep.ground.errors import run_program
from lockstep.inputs import token_cache, texts
from lockstep.inputs.tokenizer import HashTokenizer
class Slow(HashTokenizer):
    def encode(self, text):
        found = super().encode(text)
        print("tokenizing", flush=True)
        time.sleep(float(sys.argv[3]))
        return found
token_cache.SHORT, texts.CHUNK = 0, 200_000
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[4]),) * 2)
main = lambda: print(token_cache.corpus_tokens(sys.argv[1], Slow(5003), Path(sys.argv[2]))[1]) or 0
sys.exit(run_program("here", main))
"""


def start(text, cache, seconds=0.5, room=1 << 30):
    command = [sys.executable, "-c", SLOW, str(text), str(cache), str(seconds), str(room)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_full_disk_is_one_line_and_leaves_nothing(text, tmp_path):
    full = start(text, tmp_path / "cache", 0, 100_000)
    _, said = full.communicate(timeout=60)
    assert full.returncode == 2 and said.count("\n") == 1 and ".tokens: File too large; free space" in said
    assert list((tmp_path / "cache").iterdir()) == []


def test_one_that_was_killed_and_two_at_once(text, tmp_path, monkeypatch):
    monkeypatch.setattr(texts, "CHUNK", 200_000)
    cache = tmp_path / "cache"
    killed = start(text, cache, 60)
    assert killed.stdout.readline() == "tokenizing\n"
    killed.kill()
    killed.communicate()
    assert not list(cache.glob("*.tokens")) and not list(cache.glob("*.json"))
    both = [start(text, cache) for _ in range(2)]
    said = [process.communicate(timeout=60)[0].split()[-1] for process in both]
    assert said == [tokens_of(text, tmp_path / "other")[1]] * 2
    assert corpus_tokens(str(text), Refuses(5003), cache)[1] == said[0]


def test_a_data_set_is_tokenized_in_every_run(tmp_path, monkeypatch):
    rows = ["some words here"] * 3
    monkeypatch.setattr(texts, "_rows", lambda name: iter(rows))
    found, _ = corpus_tokens("nobody/nothing", HashTokenizer(5003), tmp_path)
    assert len(found) == 12 and found[3] == 0
    rows.append("more")
    assert len(corpus_tokens("nobody/nothing", HashTokenizer(5003), tmp_path)[0]) == 14
    rows[:] = ["", " "]
    with pytest.raises(UserError, match="the corpus is empty"):
        corpus_tokens("nobody/nothing", HashTokenizer(5003), tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


def test_nothing_can_be_written(text):
    with pytest.raises(UserError, match="--data_cache_dir /proc/nothing: cannot be written"):
        tokens_of(text, Path("/proc/nothing"))


def test_progress(monkeypatch, capsys):
    from lockstep.ground import progress

    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])

    def shown(seconds, terminal):
        monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
        read = progress.Bytes("tokenizing x", 200_000_000)
        for _ in range(100):
            now[0] += seconds / 100
            read.add(2_000_000)
        read.end()
        return capsys.readouterr().err

    assert shown(0.9, True) == shown(9, False) == ""
    lines = shown(100, False).splitlines()
    assert lines[0] == "tokenizing x: 20 MB of 200, 90 s left" and len(lines) == 5
    assert shown(10, True).count("\r") > 30
