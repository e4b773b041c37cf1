"""Malformed tokenizer.json files and texts: one line each, no traceback, no hang, and nothing wrong that is taken."""

import collections
import copy
import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

from fuzz import allow_memory, damage, mutate
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from lockstep.ground.errors import UserError
from lockstep.inputs.data import load_corpus
from lockstep.inputs.tokenizer import FileTokenizer, HashTokenizer, build_tokenizer

SECONDS, MEMORY, VOCABULARY = 30, 4 << 30, 400
TEXT = ["the quick brown fox jumps over the lazy dog. " * 5, "Hello, World! 123 é ü"] * 10
WORDS = ["the ", "quick\n", "brown\r\n", "\x00", "é", "漢字 ", "\U0001f600", "\x1c", "\ufeff", "\u2028"]
# Parts that no trained tokenizer here has.
PARTS = json.loads("""{
"normalizer": {"type": "Sequence", "normalizers": [
    {"type": "Replace", "pattern": {"Regex": "\\\\s+"}, "content": " "}, {"type": "NFD"},
    {"type": "Strip", "strip_left": true, "strip_right": false}]},
"pre_tokenizer": {"type": "Sequence", "pretokenizers": [
    {"type": "Digits", "individual_digits": true}, {"type": "Punctuation", "behavior": "Isolated"},
    {"type": "CharDelimiterSplit", "delimiter": "z"}, {"type": "FixedLength", "length": 5}, {"type": "UnicodeScripts"},
    {"type": "Split", "pattern": {"String": "o"}, "behavior": "MergedWithPrevious", "invert": false},
    {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true}]},
"post_processor": {"type": "TemplateProcessing", "special_tokens": {}, "single": [{"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}]},
"truncation": {"direction": "Right", "max_length": 20, "strategy": "LongestFirst", "stride": 0},
"padding": {"strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": null, "pad_id": 0, "pad_type_id": 0,
    "pad_token": "x"}}""")


def bases() -> dict[str, dict]:
    """A small trained tokenizer.json, and one with every other kind of part."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.normalizer = pre_tokenizers.ByteLevel(), normalizers.NFC()
    trainer = trainers.BpeTrainer(vocab_size=60, show_progress=False, special_tokens=["<unk>"])
    tokenizer.train_from_iterator(TEXT, trainer)
    bpe = json.loads(tokenizer.to_str())
    return {"bpe": bpe, "every part": {**bpe, **PARTS}}


def mutated(rng: random.Random, base: dict) -> bytes:
    content = copy.deepcopy(base)
    mutate(content, rng)
    data = json.dumps(content).encode()
    return damage(data, rng) if rng.random() < 0.25 else data


def taken_wrongly(folder: Path, data: bytes) -> str:
    """Why a tokenizer.json that was taken should not have been, or ""."""
    content = json.loads(data)
    if content["model"].get("dropout"):
        return "dropout"
    one, two = (build_tokenizer(str(folder), {"vocab_size": VOCABULARY, "eos_token_id": 0}) for _ in range(2))
    text = TEXT[0] * 50
    ids = one.encode(text)
    if ids != two.encode(text) or ids != one.encode(text):
        return "other tokens for the same text"
    bare = Tokenizer.from_str(json.dumps({**content, "truncation": None, "padding": None}))
    return "" if ids == bare.encode(text, add_special_tokens=False).ids else "cut or filled up"


def tokens_of(path: Path, tokenizer):
    folder = path.parent / "cache"
    return load_corpus(str(path), tokenizer, seq_length=1, windows_per_step=1, cache_folder=folder).tokens


def use_tokenizer(folder: Path, data: bytes) -> str:
    (folder / "tokenizer.json").write_bytes(data)
    (folder / "t.txt").write_text(" ".join(TEXT))
    tokenizer = build_tokenizer(str(folder), {"vocab_size": VOCABULARY, "eos_token_id": 0})
    assert isinstance(tokenizer, FileTokenizer)
    ids = tokens_of(folder / "t.txt", tokenizer)
    return "id out of range" if ids.min() < 0 or ids.max() >= VOCABULARY else taken_wrongly(folder, data)


def mutated_text(rng: random.Random) -> bytes:
    data = "".join(rng.choices(WORDS, k=rng.choice([1, 5, 200]))).encode()
    return damage(data, rng) if rng.random() < 0.7 else data


def use_text(folder: Path, data: bytes) -> str:
    path, tokenizer = folder / "t.txt", HashTokenizer(VOCABULARY)
    path.write_bytes(data)
    found = tokens_of(path, tokenizer).tolist()
    # a text that is no UTF-8 and was taken is a traceback here
    expected = [*tokenizer.encode(path.read_text(encoding="utf-8")), 0]
    return "" if found == expected else "other tokens"


def outcome(use, data: bytes) -> str:
    """In a process of its own, which may hang, eat memory or die."""
    with tempfile.TemporaryDirectory() as folder:
        said = Path(folder, "said")
        child = os.fork()
        if not child:
            _child(use, Path(folder), data, said)
        _, status = os.waitpid(child, 0)
        if status == signal.SIGALRM:
            return "hang"
        return said.read_text() if status == 0 else f"killed, status {status}"


def _child(use, folder: Path, data: bytes, said: Path) -> None:
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # pytest has its own
        signal.alarm(SECONDS)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        allow_memory(MEMORY)
        try:
            wrong = use(folder, data)
            result = f"taken wrongly: {wrong}" if wrong else "taken"
        except UserError as error:
            result = (
                "one line" if "\n" not in str(error) and len(str(error)) < 1000 else f"many lines: {error}"
            )
        except BaseException as error:  # noqa: BLE001 - that is what is looked for
            result = f"traceback: {type(error).__name__} {str(error)[:200]}"
        said.write_text(result)
    finally:
        os._exit(0)


def table(
    count: int, seed: int, kinds: tuple[str, ...] = ("text", "tokenizer.json", "tokenizer.json")
) -> tuple[collections.Counter, list[str]]:
    """How many cases ended how, and those that ended badly. They are of the kinds in turn."""
    rng, known, counts, bad = random.Random(seed), bases(), collections.Counter(), []
    for index in range(count):
        kind = kinds[index % len(kinds)]
        name = rng.choice(list(known))
        text = kind == "text"
        data = mutated_text(rng) if text else mutated(rng, known[name])
        found = outcome(use_text if text else use_tokenizer, data)
        counts[kind, found.split(":")[0]] += 1
        if found not in ("taken", "one line"):
            bad.append(f"{kind} {name} {data[:60]!r}: {found}")
    return counts, bad


def test_what_is_malformed_is_one_line():
    """benchmarks/damaged_files.py has a thousand of each kind, results/damaged_files.md how they ended."""
    for kind, number in (("text", 50), ("tokenizer.json", 24)):
        counts, bad = table(number, 20, (kind,))
        assert not bad, "\n".join(bad)
        assert min(counts[kind, "taken"], counts[kind, "one line"]) > 2, counts


def test_what_is_not_malformed_is_taken():
    for name, content in bases().items():
        assert outcome(use_tokenizer, json.dumps(content).encode()) == "taken", name


def test_the_table_sees_what_is_wrong(monkeypatch):
    """Negative controls: a hang, a lack of memory, a death, a traceback, and a file that is taken without a look."""
    monkeypatch.setattr(sys.modules[__name__], "SECONDS", 1)
    assert outcome(lambda folder, data: time.sleep(60), b"") == "hang"
    assert outcome(lambda folder, data: b" " * (8 << 30), b"").startswith("traceback: MemoryError")
    assert outcome(lambda folder, data: os.kill(os.getpid(), signal.SIGKILL), b"") == "killed, status 9"
    assert outcome(lambda folder, data: 1 / 0, b"").startswith("traceback: ZeroDivisionError")

    def as_it_is(self, text):
        return Tokenizer.from_file(str(self._path)).encode(text, add_special_tokens=False).ids

    monkeypatch.setattr(sys.modules[__name__], "SECONDS", 30)
    monkeypatch.setattr(FileTokenizer, "encode", as_it_is)
    assert "cut or filled up" in outcome(use_tokenizer, json.dumps(bases()["every part"]).encode())
