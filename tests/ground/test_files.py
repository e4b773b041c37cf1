"""Reading strictly, writing atomically, and the one line that every error becomes."""

import os
import subprocess

import pytest

from lockstep.ground import errors, files, schemas
from lockstep.ground.errors import TrainingFailure, UserError

BAD_JSON = {
    b"{": "not valid JSON",
    b"[" * 100_000: "nested too deeply",
    b"\xef\xbb\xbf{}": "byte order mark",
    b'{"a": 1, "a": 2}': "the key 'a' appears twice",
    b"[1e999]": "is not a float64 number",
    b"\xff\xfe": "not UTF-8",
    b"1" * 5000: "not valid JSON",
}


@pytest.mark.parametrize("content", BAD_JSON, ids=range(len(BAD_JSON)))
def test_bad_json_is_named(tmp_path, content):
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(UserError, match=BAD_JSON[content]):
        files.read_json(tmp_path / "a.json")


def test_only_regular_files_are_read(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", tmp_path, "/dev/zero"):
        with pytest.raises(UserError, match="not a regular file"):
            files.read_json(tmp_path / path)
    with pytest.raises(UserError, match="No such file"):
        files.read_json(tmp_path / "gone.json")


def test_a_file_too_large_is_not_read(tmp_path):
    (tmp_path / "a.json").write_text("[" + "1," * 100 + "1]")
    with pytest.raises(UserError, match="has at most 100"):
        files.read_json(tmp_path / "a.json", limit=100)


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write .*File exists"):
        files.write_text(tmp_path / "file" / "a.json", "x")


@pytest.fixture
def full_disk(tmp_path):
    """A folder on a disk of 64 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder], capture_output=True
    ).returncode:
        pytest.skip("nothing can be mounted here")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def test_a_full_disk_is_said_with_what_is_wanted_and_free(full_disk):
    (full_disk / "fill").write_bytes(b"x" * 40_000)
    with pytest.raises(
        UserError,
        match=r"cannot write .*a.json: No space left on device \(100,000 bytes are wanted, [\d,]+ are free\)",
    ):
        files.write_text(full_disk / "a.json", "x" * 100_000)
    assert [path.name for path in full_disk.iterdir()] == ["fill"]
    files.write_text(full_disk / "a.json", "x")


@pytest.mark.parametrize("library", ["safetensors", "torch"])
def test_a_full_disk_under_a_library(full_disk, library):
    import torch
    from safetensors.torch import save_file

    tensors = {"a": torch.zeros(100_000)}
    save = {
        "safetensors": lambda path: save_file(tensors, path),
        "torch": lambda path: torch.save(tensors, path),
    }[library]
    with pytest.raises(UserError, match=r"cannot write .*a.bin: No space left on device \([\d,]+ are free\)"):
        files.write_atomically(full_disk / "a.bin", save)
    assert list(full_disk.iterdir()) == []


def test_another_error_of_a_library_is_not_the_disks(tmp_path):
    def broken(_path):
        raise RuntimeError("it broke")

    with pytest.raises(RuntimeError, match="it broke"):
        files.write_atomically(tmp_path / "a", broken)


def test_a_result_is_written_elsewhere_if_need_be(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write .*a.json: .*; the result is in ") as raised:
        files.write_result(tmp_path / "file" / "a.json", "result")
    with open(str(raised.value).rsplit(" ", 1)[1]) as elsewhere:
        assert elsewhere.read() == "result"


def test_trying_a_folder_leaves_nothing(tmp_path):
    files.require_writable_folder(tmp_path / "a" / "b", "--x", keep=False)
    files.require_writable_file(tmp_path / "a" / "b.json", "--x")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UserError, match="--x /proc/nothing: cannot be written"):
        files.require_writable_file(files.Path("/proc/nothing/x"), "--x")
    with pytest.raises(UserError, match="is a folder"):
        files.require_writable_file(tmp_path, "--x")


@pytest.mark.parametrize(
    "error, status, line",
    [
        (UserError("no \x1b[31mred"), 2, "p: no \\x1b[31mred"),
        (TrainingFailure("it broke"), 1, "p: it broke"),
        (KeyboardInterrupt(), 130, "p: interrupted"),
        (BrokenPipeError(), 141, None),
        (ZeroDivisionError("by zero"), 3, "p: internal error (ZeroDivisionError: by zero)"),
    ],
)
def test_every_error_has_its_status(capfd, monkeypatch, error, status, line):
    def body():
        raise error

    monkeypatch.setattr(os, "dup2", lambda *_: None)  # standard output is pytest's
    assert errors.run_program("p", body) == status
    shown = capfd.readouterr().err.strip().splitlines()
    assert shown[-1].startswith(line) if line else shown == []
    assert len(shown) == 1 or status in (3, 141)


def test_text_from_files_is_escaped_and_cut():
    assert errors.printable("a\x1b]0;b\x07\n\u202e") == "a\\x1b]0;b\\x07\\n\\u202e"
    assert len(errors.printable("x" * 10**6)) == errors.LONGEST


class _Example(schemas.Strict):
    count: schemas.Count
    loss: schemas.Finite
    label: schemas.Name


@pytest.mark.parametrize(
    "change, place",
    [
        ({"count": 1.5}, "count is 1.5"),
        ({"count": True}, "count is True"),
        ({"loss": float("nan")}, "loss is nan"),
        ({"label": "\x1b"}, "label is"),
        ({"more": 1}, "more is 1"),
    ],
)
def test_schemas_are_strict(change, place):
    good = {"count": 1, "loss": 2.0, "label": "DDP (TP=1, DP=2)"}
    assert schemas.validate(_Example, good, "a.json", "fix it").count == 1
    with pytest.raises(UserError, match=f"a.json: {place}.*; fix it") as raised:
        schemas.validate(_Example, {**good, **change}, "a.json", "fix it")
    assert "\n" not in str(raised.value)
