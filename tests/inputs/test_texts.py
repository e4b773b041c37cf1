import os
import random

import pytest

from lockstep.ground.errors import UserError
from lockstep.inputs import texts
from lockstep.inputs.texts import data_set, find
from lockstep.inputs.tokenizer import HashTokenizer


def documents(source) -> list[str]:
    found = [""]
    for text, ends in source.chunks():
        found[-1] += text
        found += [""] if ends else []
    assert found.pop() == ""
    return found


def test_a_folder_in_the_order_of_its_paths_and_only_once(tmp_path):
    for name in ("b.txt", "a/z.txt", "a.txt", "note.md", "a/b/c.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    os.symlink(".", tmp_path / "again")
    assert documents(find(str(tmp_path))) == ["a/b/c.txt", "a/z.txt", "a.txt", "b.txt"]


@pytest.mark.parametrize("chunk", [1, 5, 32])
def test_the_chunks_make_the_same_text_and_the_same_tokens(tmp_path, monkeypatch, chunk):
    """Cut anywhere else than at white space, a word would be two."""
    parts = [*"aöx漢字\U0001f600\ufeff\x00 \n\r\x1c\u2028", "\r\n", "x.y", " "]
    path = tmp_path / "t.txt"
    path.write_bytes("".join(random.Random(chunk).choices(parts, k=600)).encode())
    whole = path.read_text(encoding="utf-8")
    monkeypatch.setattr(texts, "CHUNK", chunk)
    found = [text for text, _ in find(str(path)).chunks()]
    assert "".join(found) == whole and max(map(len, found)) <= chunk
    if chunk == 32:  # no word is longer
        ids = HashTokenizer(5003)
        assert [i for text in found for i in ids.encode(text)] == ids.encode(whole)


@pytest.mark.parametrize("bad", [b"\xff", b"\xe6\xbc", b"\xed\xa0\x80"])
def test_what_is_no_utf8_is_named(tmp_path, bad):
    (tmp_path / "t.txt").write_bytes(b"x" * 9000 + bad)
    with pytest.raises(UserError, match="--dataset_name.*t.txt is not UTF-8 text .*; convert it to UTF-8"):
        documents(find(str(tmp_path)))


@pytest.mark.parametrize(
    "target, message", [("/dev/zero", "not a regular file"), ("a.txt", "cannot be read")]
)
def test_only_regular_files(tmp_path, target, message):
    os.symlink(target, tmp_path / "a.txt")
    for name in (tmp_path / "a.txt", tmp_path):
        with pytest.raises(UserError, match=f"a.txt: {message}"):
            find(str(name))


@pytest.mark.parametrize("name", ["gone.txt", "./gone", "/gone", "x" * 5000 + ".txt", "/dev/zero", "", None])
def test_what_is_no_text(name, tmp_path):
    with pytest.raises(
        UserError, match="--dataset_name.*(no such file|not a .txt file|is empty|no .txt file)"
    ):
        find(str(tmp_path) if name is None else name)


def test_the_content_hash_says_where_documents_end(tmp_path):
    def hashed(*contents):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        for index, content in enumerate(contents):
            (folder / f"{index}.txt").write_text(content)
        return find(str(folder)).content_sha256()

    assert len({hashed("ab", "c"), hashed("a", "bc"), hashed("abc"), hashed("abc", "")}) == 4
    assert hashed("ab", "c") == hashed("ab", "c")


def test_hugging_face_data_set(tmp_path):
    """The real reader, on a data set stored in a folder."""
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"text": ["some words here"] * 3}), tmp_path / "train.parquet")
    assert documents(data_set(str(tmp_path))) == ["some words here"] * 3
    parquet.write_table(pyarrow.table({"words": ["x"]}), tmp_path / "train.parquet")
    with pytest.raises(UserError, match="no column 'text'"):
        documents(data_set(str(tmp_path)))


@pytest.mark.parametrize("row", [None, 3, "\ud800"])
def test_rows_without_text(monkeypatch, row):
    monkeypatch.setattr(texts, "_rows", lambda name: iter(["a", row]))
    with pytest.raises(UserError, match="row 1 of its column 'text' holds no text"):
        documents(find("nobody/nothing"))


@pytest.mark.parametrize("offline", [False, True])
def test_missing_data_set(monkeypatch, offline):
    def unreachable(*_, **__):
        raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", unreachable)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", offline)
    reason = "Couldn't reach" if offline else "no network"
    with pytest.raises(UserError, match=f"no such data set .*{reason}.*; check the name"):
        documents(find("nobody/nothing-of-this-name"))
