import json
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from lockstep.errors import UserError
from lockstep.inputs import tokenizer as tokenizer_module
from lockstep.inputs.architectures import BUILT_IN
from lockstep.inputs.data import load_corpus
from lockstep.inputs.tokenizer import FileTokenizer, HashTokenizer, build_tokenizer

ARCHITECTURE = {**BUILT_IN["tiny-qwen2"], "eos_token_id": 0}


def words():
    one = Tokenizer(models.WordLevel({"<end>": 0, "a": 1, "b": 2}, unk_token="<end>"))
    one.pre_tokenizer = pre_tokenizers.Whitespace()
    return one


@pytest.fixture
def folder(tmp_path):
    words().save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def changed(folder: Path, change) -> str:
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    return str(folder)


def test_tokenizer_of_a_model_folder(folder):
    tokenizer = build_tokenizer(str(folder), ARCHITECTURE)
    assert tokenizer.encode("a b b") == [1, 2, 2] and tokenizer.name.startswith("tokenizer.json ")
    (folder / "t.txt").write_text("a b " * 100)
    small = build_tokenizer(str(folder), {**ARCHITECTURE, "vocab_size": 2})
    with pytest.raises(UserError, match="do not belong together"):
        load_corpus(
            str(folder / "t.txt"), small, seq_length=8, windows_per_step=1, cache_folder=folder / "cache"
        )


def test_without_a_tokenizer_the_words_are_hashed(tmp_path):
    assert isinstance(build_tokenizer(str(tmp_path), ARCHITECTURE), HashTokenizer)


def test_truncation_and_padding_of_the_file_are_off(folder):
    """Negative control: the library itself cuts and fills up."""
    cutting = words()
    cutting.enable_truncation(4)
    cutting.save(str(folder / "tokenizer.json"))
    assert len(Tokenizer.from_file(str(folder / "tokenizer.json")).encode("a " * 50).ids) == 4
    assert build_tokenizer(str(folder), ARCHITECTURE).encode("a " * 50) == [1] * 50
    filling = words()
    filling.enable_padding(length=64)
    filling.save(str(folder / "tokenizer.json"))
    assert len(Tokenizer.from_file(str(folder / "tokenizer.json")).encode("a").ids) == 64
    assert build_tokenizer(str(folder), ARCHITECTURE).encode("a") == [1]


@pytest.mark.parametrize("ends, separator", [(None, 0), (0, 0), (2, 2), ([5, 6], 5)])
def test_separator(folder, ends, separator):
    assert build_tokenizer(str(folder), {**ARCHITECTURE, "eos_token_id": ends}).separator == separator


@pytest.mark.parametrize(
    "ends", [-1, 1.5, 1.0, "1", True, False, [], [-1], [0, -1], [0, True], [0, 2048], 2048, {"a": 1}, [[1]]]
)
def test_what_is_no_separator(folder, ends):
    with pytest.raises(UserError, match="eos_token_id"):
        build_tokenizer(str(folder), {**ARCHITECTURE, "eos_token_id": ends})


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda c: c.update(extra=1), "unknown key 'extra'"),
        (lambda c: c.update(model=None), "no key 'model'"),
        (lambda c: c["model"].update(dropout=0.1), "other tokens"),
        (lambda c: c["model"]["vocab"].update(c=-1), "is not a token id"),
        (lambda c: c["model"]["vocab"].update(c=True), "is not a token id"),
        (
            lambda c: c["model"]["vocab"].update(c={"x" * 9000: 1}),
            r"entry 'c': \{'xxx.{30,60}\.\.\. is not a token id",
        ),
        (lambda c: c["model"]["vocab"].update(c=2), "have one id"),
        (lambda c: c["model"].update(unk_token="gone"), "fails on a piece of text"),
        (lambda c: c.update(pre_tokenizer={"type": "Unheard"}), "not a readable tokenizer.json"),
        (
            lambda c: c.update(
                normalizer={"type": "Precompiled", "precompiled_charsmap": "EAAAAAAAAAAAAAAAAAAAAAAAAABhYmMA"}
            ),
            "fails on",
        ),
    ],
)
def test_malformed(folder, change, message):
    with pytest.raises(UserError, match=message) as caught:
        build_tokenizer(changed(folder, change), ARCHITECTURE).encode("a b")
    assert str(folder) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"\xff", b"{}" * 2, b'{"model": {}, "model": {}}', b"[" * 100_000]
)
def test_no_json(folder, content):
    (folder / "tokenizer.json").write_bytes(content)
    with pytest.raises(UserError, match="tokenizer.json"):
        build_tokenizer(str(folder), ARCHITECTURE).encode("a")


def test_what_takes_the_process_down_is_one_line(folder, monkeypatch):
    path = folder / "tokenizer.json"
    for program, message in (
        ("import os; os.abort()", "status -6"),
        ("import time; time.sleep(60)", "not read within 1 seconds"),
    ):
        monkeypatch.setattr(tokenizer_module, "TRIAL_SECONDS", 1 if "sleep" in program else 60)
        real = subprocess.run
        with monkeypatch.context() as patched:
            patched.setattr(
                subprocess,
                "run",
                lambda command, _p=program, _real=real, **options: _real(
                    [sys.executable, "-c", _p], **options
                ),
            )
            with pytest.raises(UserError, match=message):
                FileTokenizer(path, 2048, 0).encode("a")


def test_no_regular_file(folder, monkeypatch):
    import os

    (folder / "tokenizer.json").unlink()
    os.mkfifo(folder / "tokenizer.json")
    with pytest.raises(UserError, match="not a regular file"):
        build_tokenizer(str(folder), ARCHITECTURE)
    (folder / "tokenizer.json").unlink()
    os.symlink("tokenizer.json", folder / "tokenizer.json")
    with pytest.raises(UserError, match="cannot be read"):
        build_tokenizer(str(folder), ARCHITECTURE)
    (folder / "tokenizer.json").unlink()
    words().save(str(folder / "tokenizer.json"))
    monkeypatch.setattr(tokenizer_module, "LARGEST", 10)
    with pytest.raises(UserError, match="the limit is 10"):
        build_tokenizer(str(folder), ARCHITECTURE)


def test_hashed_words_are_remembered_within_bounds(monkeypatch):
    one, two = HashTokenizer(2048), HashTokenizer(2048)
    text = " ".join(f"word{index}, x{index % 7}" for index in range(500))
    monkeypatch.setattr(tokenizer_module, "KEPT", 10)
    assert [one.encode(text), one.encode(text)] == [two.encode(text)] * 2 and len(one.encode("a b")) == 2
    assert len(one._pieces) <= 2
