"""Malformed tokenizer.json files and texts: one line each, no traceback, no hang, and nothing wrong that is taken.

python tests/test_data_fuzz.py 1000       more of them, and the table
"""

import collections
import copy
import json
import os
import random
import resource
import signal
import sys
import tempfile
import time
from pathlib import Path

from lockstep.errors import UserError
from lockstep.inputs.data import load_corpus
from lockstep.inputs.texts import ContentHash, find
from lockstep.inputs.tokenizer import FileTokenizer, HashTokenizer, build_tokenizer

SECONDS, MEMORY, VOCABULARY = 30, 4 << 30, 400
TEXT = ["the quick brown fox jumps over the lazy dog. " * 5, "Hello, World! 123 é ü"] * 10
VALUES = [None, True, False, 0, -1, 1, 1.5, 2**31, 2**32 - 1, 2**40, -(2**63), 10**30, "", "x", "\x00", "é" * 100, [], {}, [[]],
          [None], {"type": "ByteLevel"}, {"type": "Nope"}, {"a": {"b": []}}, float("nan"), 1e308]  # fmt: skip


def bases() -> dict[str, dict]:
    """Small tokenizer.json files with every kind of part."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

    def trained(model, trainer, before, normal=None):
        tokenizer = Tokenizer(model)
        tokenizer.pre_tokenizer = before
        if normal:
            tokenizer.normalizer = normal
        tokenizer.train_from_iterator(TEXT, trainer)
        return json.loads(tokenizer.to_str())

    silent = {"show_progress": False}
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe = trained(
        models.BPE(),
        trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, special_tokens=["<end>"], **silent),
        bytes_,
    )
    unigram = trained(
        models.Unigram(),
        trainers.UnigramTrainer(vocab_size=60, special_tokens=["<unk>"], unk_token="<unk>", **silent),
        pre_tokenizers.Metaspace(),
        normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()]),
    )
    pieces = trained(
        models.WordPiece(unk_token="[UNK]"),
        trainers.WordPieceTrainer(vocab_size=80, special_tokens=["[UNK]"], **silent),
        pre_tokenizers.BertPreTokenizer(),
        normalizers.BertNormalizer(),
    )
    replace = {"type": "Replace", "pattern": {"Regex": "\\s+"}, "content": " "}
    single = {"type": "Replace", "pattern": {"String": "q"}, "content": "qq"}
    strip = {"type": "Strip", "strip_left": True, "strip_right": False}
    before = [
        {"type": "Digits", "individual_digits": True},
        {"type": "Punctuation", "behavior": "Isolated"},
        {"type": "CharDelimiterSplit", "delimiter": "z"},
        {"type": "FixedLength", "length": 5},
        {"type": "UnicodeScripts"},
        {"type": "Split", "pattern": {"String": "o"}, "behavior": "MergedWithPrevious", "invert": False},
        bpe["pre_tokenizer"],
    ]
    template = {
        "type": "TemplateProcessing",
        "single": [{"Sequence": {"id": "A", "type_id": 0}}],
        "special_tokens": {},
    }
    template["pair"] = [*template["single"], {"Sequence": {"id": "B", "type_id": 1}}]
    cut = {"direction": "Right", "max_length": 20, "strategy": "LongestFirst", "stride": 0}
    fill = {
        "strategy": {"Fixed": 64},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "x",
    }
    return {
        "bpe": bpe,
        "unigram": unigram,
        "wordpiece": pieces,
        "wordlevel": {
            **bpe,
            "model": {
                "type": "WordLevel",
                "vocab": {"<end>": 0, "a": 1, "b": 2, "<unk>": 3},
                "unk_token": "<unk>",
            },
        },
        "normalized": {
            **bpe,
            "normalizer": {"type": "Sequence", "normalizers": [replace, single, strip, {"type": "NFD"}]},
        },
        "split": {**bpe, "pre_tokenizer": {"type": "Sequence", "pretokenizers": before}},
        "template": {**bpe, "post_processor": template},
        "cut and filled": {**bpe, "truncation": cut, "padding": fill},
        "byte fallback": {**unigram, "model": {**unigram["model"], "byte_fallback": True}},
    }


def places(value, at=()):
    yield at
    if isinstance(value, (dict, list)):
        keys = list(value) if isinstance(value, dict) else range(len(value))
        for key in list(keys)[: 20 if len(value) < 20 else 4]:  # not the whole of a vocabulary
            yield from places(value[key], (*at, key))


def mutated(rng: random.Random, base: dict) -> tuple[str, bytes]:
    """What was done, and the bytes of the file."""
    content = copy.deepcopy(base)
    everywhere = [at for at in places(content) if at]
    at, other = rng.choice(everywhere), rng.choice(everywhere)

    def reach(path):
        found = content
        for key in path:
            found = found[key]
        return found

    kind = rng.choice(["set", "set", "set", "delete", "copy", "add", "cut", "flip", "repeat"])
    what = f"{kind} {'.'.join(map(str, at))}"
    if kind == "set":
        reach(at[:-1])[at[-1]] = value = rng.choice(VALUES)
        what += f" {value!r:.30}"
    elif kind == "delete":
        del reach(at[:-1])[at[-1]]
    elif kind == "copy":
        reach(at[:-1])[at[-1]] = copy.deepcopy(reach(other))
    elif kind == "add":
        content[rng.choice(["extra", "Model", "vocab"])] = rng.choice(VALUES)
    data = bytearray(json.dumps(content).encode())
    place = rng.randrange(len(data))
    if kind == "cut":
        del data[place:]
    elif kind == "flip":
        data[place] ^= 1 << rng.randrange(8)
    elif kind == "repeat":
        data[place:place] = data[place : place + 20]
    return what, bytes(data)


def taken_wrongly(folder: Path, data: bytes) -> str:
    """Why a tokenizer.json that was taken should not have been, or ""."""
    try:
        content = json.loads(
            data,
            parse_constant=lambda name: 1 / 0,
            object_pairs_hook=lambda pairs: dict(pairs) if len(dict(pairs)) == len(pairs) else 1 / 0,
        )
    except (ValueError, ZeroDivisionError):
        return "no JSON"
    if content.keys() - bases_keys:
        return "unknown keys"
    if content["model"].get("dropout"):
        return "dropout"
    one, two = (build_tokenizer(str(folder), {"vocab_size": VOCABULARY, "eos_token_id": 0}) for _ in range(2))
    text = TEXT[0] * 50
    ids = one.encode(text)
    if ids != two.encode(text) or ids != one.encode(text):
        return "other tokens for the same text"
    from tokenizers import Tokenizer

    bare = Tokenizer.from_str(json.dumps({**content, "truncation": None, "padding": None}))
    return "" if ids == bare.encode(text, add_special_tokens=False).ids else "cut or filled up"


bases_keys = {
    "version",
    "truncation",
    "padding",
    "added_tokens",
    "normalizer",
    "pre_tokenizer",
    "post_processor",
    "decoder",
    "model",
}


def use_tokenizer(folder: Path, data: bytes) -> str:
    (folder / "tokenizer.json").write_bytes(data)
    (folder / "t.txt").write_text(" ".join(TEXT))
    tokenizer = build_tokenizer(str(folder), {"vocab_size": VOCABULARY, "eos_token_id": 0})
    assert isinstance(tokenizer, FileTokenizer)
    corpus = load_corpus(
        str(folder / "t.txt"), tokenizer, seq_length=4, windows_per_step=1, cache_folder=folder / "cache"
    )
    ids = corpus.tokens.read(0, len(corpus.tokens))
    return "id out of range" if ids.min() < 0 or ids.max() >= VOCABULARY else taken_wrongly(folder, data)


def mutated_text(rng: random.Random) -> bytes:
    words = [
        "the ",
        "quick\n",
        "brown\r\n",
        "\x00",
        "é",
        "漢字 ",
        "\U0001f600",
        "\t",
        " ",
        "\x1c",
        "\ufeff",
        "\u2028",
    ]
    data = bytearray("".join(rng.choice(words) for _ in range(rng.choice([0, 1, 5, 200]))).encode())
    for _ in range(rng.choice([0, 1, 3])):
        place = rng.randrange(len(data) + 1)
        data[place:place] = rng.choice(
            [
                b"\xff",
                b"\x80",
                b"\xed\xa0\x80",
                b"\xe6\xbc",
                b"\xf4\x90\x80\x80",
                b"\xc0\xaf",
                b"ok",
                b"\x1b[2J",
            ]
        )
    return bytes(data)


def use_text(folder: Path, data: bytes) -> str:
    path = folder / "t.txt"
    path.write_bytes(data)
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        try:
            list(find(str(path)).chunks(ContentHash(), lambda count: None))
        except UserError as said:
            assert str(path) in str(said)
            return "" if f"at byte {error.start})" in str(said) else "another byte named"
        return "no UTF-8"
    tokenizer = HashTokenizer(VOCABULARY)
    corpus = load_corpus(
        str(path), tokenizer, seq_length=1, windows_per_step=1, cache_folder=folder / "cache"
    )
    return (
        ""
        if corpus.tokens.read(0, len(corpus.tokens)).tolist() == [*tokenizer.encode(text), 0]
        else "other tokens"
    )


def outcome(use, data: bytes) -> str:
    """In a process of its own, which may hang, eat memory or die."""
    with tempfile.TemporaryDirectory() as folder:
        said = Path(folder, "said")
        child = os.fork()
        if not child:
            _child(use, Path(folder), data, said)
        deadline = time.monotonic() + SECONDS
        while not (ended := os.waitpid(child, os.WNOHANG))[0]:
            if time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return "hang"
            time.sleep(0.005)
        return said.read_text() if said.exists() and ended[1] == 0 else f"killed, status {ended[1]}"


def _child(use, folder: Path, data: bytes, said: Path) -> None:
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
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
        if kinds[index % len(kinds)] == "tokenizer.json":
            name = rng.choice(list(known))
            what, data = mutated(rng, known[name])
            found, kind = outcome(use_tokenizer, data), "tokenizer.json"
        else:
            name, what, data = "text", "", mutated_text(rng)
            found, kind = outcome(use_text, data), "text"
            what = repr(data[:60])
        counts[kind, found.split(":")[0]] += 1
        if found not in ("taken", "one line"):
            bad.append(f"{name}, {what}: {found}")
    return counts, bad


def test_what_is_malformed_is_one_line():
    """benchmarks/damaged_files.py has a thousand of each kind, results/damaged_files.md how they ended."""
    (of_texts, bad), (counts, more) = table(50, 20, ("text",)), table(24, 20, ("tokenizer.json",))
    counts, bad = counts + of_texts, bad + more
    assert not bad, "\n".join(bad)
    for kind in ("tokenizer.json", "text"):
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
        from tokenizers import Tokenizer

        return Tokenizer.from_file(str(self._path)).encode(text, add_special_tokens=False).ids

    monkeypatch.setattr(sys.modules[__name__], "SECONDS", 30)
    monkeypatch.setattr(FileTokenizer, "encode", as_it_is)
    assert "cut or filled up" in outcome(use_tokenizer, json.dumps(bases()["cut and filled"]).encode())


if __name__ == "__main__":
    found, wrong = table(int(sys.argv[1]), seed=int(sys.argv[2]) if len(sys.argv) > 2 else 1)
    for (kind, result), number in sorted(found.items()):
        print(f"{kind:<16} {result:<16} {number}")
    print("\n".join(wrong))
