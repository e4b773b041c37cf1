import os
import random

import pytest

from lockstep.errors import UserError
from lockstep.inputs import texts
from lockstep.inputs.texts import ContentHash, DataSet, find
from lockstep.inputs.tokenizer import HashTokenizer


def chunks(source):
    return list(source.chunks(ContentHash(), lambda count: None))


def documents(source) -> list[str]:
    found = [""]
    for text, ends in chunks(source):
        found[-1] += text
        found += [""] if ends else []
    assert found.pop() == ""
    return found


def test_built_in():
    found = documents(find("builtin"))
    assert len(found) > 50 and len("".join(found)) > 400_000


def test_a_folder_in_the_order_of_its_paths(tmp_path):
    for name in ("b.txt", "a/z.txt", "a.txt", "note.md", "a/b/c.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    assert documents(find(str(tmp_path))) == ["a/b/c.txt", "a/z.txt", "a.txt", "b.txt"]


@pytest.mark.parametrize(
    "content", ["", "   ", "a\x00b", "\n\n", "one\r\ntwo\rthree\n", "\ufeffbom", "no end", "ä" * 50]
)
def test_text_is_what_python_reads(tmp_path, content):
    path = tmp_path / "t.txt"
    path.write_bytes(content.encode())
    assert documents(find(str(path))) == [path.read_text(encoding="utf-8")]


@pytest.mark.parametrize("block", [1, 2, 3, 7, 64])
@pytest.mark.parametrize("chunk", [1, 5, 16])
def test_the_pieces_make_the_same_text_and_the_same_tokens(tmp_path, monkeypatch, block, chunk):
    """Cut anywhere else than at white space, a word would be two."""
    rng, words = (
        random.Random(block * chunk),
        ["a", "öß", "x.y", "漢字", "\U0001f600", "\r\n", "\n", "\x1c", "\u2028"],
    )
    text = "".join(rng.choice(words) + rng.choice(["", " ", "\n"]) for _ in range(300))
    (tmp_path / "t.txt").write_bytes(text.encode())
    whole = (tmp_path / "t.txt").read_text(encoding="utf-8")
    monkeypatch.setattr(texts, "BLOCK", block)
    monkeypatch.setattr(texts, "CHUNK", chunk)
    found = chunks(find(str(tmp_path / "t.txt")))
    assert "".join(text for text, _ in found) == whole and max(len(text) for text, _ in found) <= chunk
    assert [ends for _, ends in found].count(True) == 1 and found[-1][1]
    if chunk == 16:  # longer than any word here: none is cut
        ids = HashTokenizer(5003)
        words_of = sorted(whole.split(), key=len)
        if len(words_of[-1]) < chunk:
            assert [i for text, _ in found for i in ids.encode(text)] == ids.encode(whole)


def test_where_a_chunk_ends(monkeypatch):
    monkeypatch.setattr(texts, "CHUNK", 8)
    cut = lambda text: [part for part, _ in texts._cut([text])]  # noqa: E731
    assert cut("ab cd\nefghijk") == ["ab cd\n", "efghijk"]  # at a newline
    assert cut("ab cdefghij") == ["ab ", "cdefghij"]  # else at white space
    assert cut("abcdefghij k") == ["abcdefgh", "ij k"]  # else anywhere
    assert cut(" abcdefghij") == [" ", "abcdefgh", "ij"]
    assert cut("abcdefgh") == ["abcdefgh"] and cut("") == [""]


@pytest.mark.parametrize("before, block", [(0, 1 << 20), (5, 1), (1000, 7), (1000, 1000)])
@pytest.mark.parametrize(
    "bad, reason",
    [
        (b"\xff", "invalid start byte"),
        (b"\xe6\xbc", "unexpected end|invalid continuation"),
        (b"\xed\xa0\x80", "invalid"),
    ],
)
def test_what_is_no_utf8_is_named_with_its_byte(tmp_path, monkeypatch, before, block, bad, reason):
    monkeypatch.setattr(texts, "BLOCK", block)
    path = tmp_path / "t.txt"
    path.write_bytes(b"x" * before + bad)
    with pytest.raises(UserError, match=f"t.txt is not UTF-8 text \\(({reason}).* at byte {before}\\)"):
        chunks(find(str(path)))


def test_only_regular_files(tmp_path):
    os.mkfifo(tmp_path / "pipe.txt")
    for name in (tmp_path / "pipe.txt", tmp_path):
        with pytest.raises(UserError, match="pipe.txt: not a regular file"):
            find(str(name))
    (tmp_path / "pipe.txt").unlink()
    os.symlink("loop.txt", tmp_path / "loop.txt")
    for name in (tmp_path / "loop.txt", tmp_path):
        with pytest.raises(UserError, match="loop.txt: cannot be read"):
            find(str(name))
    os.symlink("/dev/zero", tmp_path / "a.txt")
    with pytest.raises(UserError, match="a.txt: not a regular file"):
        find(str(tmp_path))
    with pytest.raises(UserError, match="not a .txt file"):
        find("/dev/zero")


def test_a_folder_that_holds_itself(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    os.symlink(".", tmp_path / "again")
    assert documents(find(str(tmp_path))) == ["a"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_folder_that_cannot_be_read_is_no_empty_one(tmp_path):
    (tmp_path / "closed").mkdir(mode=0)
    with pytest.raises(UserError, match="closed cannot be read"):
        find(str(tmp_path))


@pytest.mark.parametrize(
    "name, message",
    [
        ("gone.txt", "no such file"),
        ("./gone", "no such"),
        ("/gone", "no such"),
        ("x" * 5000 + ".txt", "no such"),
    ],
)
def test_what_is_not_there(name, message):
    with pytest.raises(UserError, match=message):
        find(name)


def test_the_content_hash_says_where_documents_end(tmp_path):
    def hashed(*contents):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        for index, content in enumerate(contents):
            (folder / f"{index}.txt").write_text(content)
        source, content = find(str(folder)), ContentHash()
        list(source.chunks(content, lambda count: None))
        assert content.hexdigest() == source.content_sha256(lambda count: None)
        return content.hexdigest()

    assert (
        len({hashed("ab", "c"), hashed("a", "bc"), hashed("abc"), hashed("abc", ""), hashed("c", "ab")}) == 5
    )
    assert hashed("ab", "c") == hashed("ab", "c")
    built_in, content = find("builtin"), ContentHash()
    list(built_in.chunks(content, lambda count: None))
    assert content.hexdigest() == built_in.content_sha256(lambda count: None)


def test_hugging_face_data_set(tmp_path):
    """The real reader, on a data set stored in a folder."""
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"text": ["some words here"] * 3}), tmp_path / "train.parquet")
    assert documents(DataSet(str(tmp_path))) == ["some words here"] * 3
    parquet.write_table(pyarrow.table({"words": ["x"]}), tmp_path / "train.parquet")
    with pytest.raises(UserError, match="no column 'text'"):
        chunks(DataSet(str(tmp_path)))


@pytest.mark.parametrize("row", [None, 3, "\ud800"])
def test_rows_without_text(monkeypatch, row):
    monkeypatch.setattr(texts, "_dataset_texts", lambda name: iter(["a", row]))
    with pytest.raises(UserError, match="row 1 of its column 'text' holds no text"):
        chunks(DataSet("nobody/nothing"))


def test_missing_data_set(monkeypatch):
    monkeypatch.setattr("lockstep.inputs.texts.hub_answers", lambda url: False)
    with pytest.raises(UserError, match="the hub cannot be reached"):
        chunks(find("nobody/nothing-of-this-name"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="no such data set"):
        chunks(find("nobody/nothing-of-this-name"))
