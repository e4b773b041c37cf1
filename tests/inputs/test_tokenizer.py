import json
import os
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from lockstep.ground.errors import UserError
from lockstep.inputs.architectures import BUILT_IN
from lockstep.inputs.data import load_corpus
from lockstep.inputs.tokenizer import HashTokenizer, build_tokenizer

ARCHITECTURE = {**BUILT_IN["tiny-qwen2"], "eos_token_id": 0}


def words():
    one = Tokenizer(models.WordLevel({"<end>": 0, "a": 1, "b": 2}, unk_token="<end>"))
    one.pre_tokenizer = pre_tokenizers.Whitespace()
    return one


@pytest.fixture
def folder(tmp_path):
    words().save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def changed(folder: Path, change) -> None:
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


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
    one = words()
    one.enable_truncation(4)
    one.enable_padding(length=6)
    one.save(str(folder / "tokenizer.json"))
    assert len(Tokenizer.from_file(str(folder / "tokenizer.json")).encode("a " * 50).ids) == 6
    assert build_tokenizer(str(folder), ARCHITECTURE).encode("a " * 50) == [1] * 50


@pytest.mark.parametrize("ends", [-1, "1", True, [], [0, True], 2048])
def test_separator(folder, ends):
    for good, separator in ((None, 0), (2, 2), ([5, 6], 5)):
        assert build_tokenizer(str(folder), {**ARCHITECTURE, "eos_token_id": good}).separator == separator
    with pytest.raises(UserError, match="eos_token_id"):
        build_tokenizer(str(folder), {**ARCHITECTURE, "eos_token_id": ends})


DAMAGED = {
    "no model": lambda c: c.update(model=None),
    "fails on a text": lambda c: c["model"].update(unk_token="gone"),
    "a panic": lambda c: c.update(
        normalizer={"type": "Precompiled", "precompiled_charsmap": "EAAAAAAAAAAAAAAAAAAAAAAAAABhYmMA"}
    ),
}


@pytest.mark.parametrize("damage", [*DAMAGED, b"[]", b"\xff"])
def test_malformed(folder, damage):
    path = folder / "tokenizer.json"
    if damage in DAMAGED:
        changed(folder, DAMAGED[damage])
    else:
        path.write_bytes(damage)
    with pytest.raises(UserError, match="the tokenizers library cannot use it .*; fetch it again") as caught:
        build_tokenizer(str(folder), ARCHITECTURE).encode("a b z")
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_dropout_is_refused(folder):
    model = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]}
    changed(folder, lambda c: c.update(model=model))
    assert build_tokenizer(str(folder), ARCHITECTURE).encode("ab") == [2]
    changed(folder, lambda c: c["model"].update(dropout=0.1))
    with pytest.raises(UserError, match="other tokens; set it to null"):
        build_tokenizer(str(folder), ARCHITECTURE).encode("ab")


@pytest.mark.parametrize("ours", [KeyboardInterrupt, SystemExit, MemoryError])
def test_what_is_not_the_library_s_passes(folder, monkeypatch, ours):
    """Negative control: PanicException is no Exception either, and test_malformed has one."""

    def stop(path):
        raise ours

    monkeypatch.setattr(Tokenizer, "from_file", stop)
    with pytest.raises(ours):
        build_tokenizer(str(folder), ARCHITECTURE).encode("a")


def test_no_regular_file(folder):
    path = folder / "tokenizer.json"
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(UserError, match="not a regular file"):
        build_tokenizer(str(folder), ARCHITECTURE)
    path.unlink()
    path.symlink_to(path)
    with pytest.raises(UserError, match="cannot be read"):
        build_tokenizer(str(folder), ARCHITECTURE)
