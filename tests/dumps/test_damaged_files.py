"""The program behind results/damaged_files.md."""

import collections
import json
import sys

import damaged_files
from programs import completed
from ranks import ROOT

RESULTS = ROOT / "results" / "damaged_files.json"


def run(monkeypatch, tmp_path, words, *more):
    """With one reader that ends so, in this process, whose memory is not to be limited."""
    bad = [word for word in words if word not in ("refused", "taken")]
    reader = ("a text", lambda number, seed: (collections.Counter(words), bad))
    monkeypatch.setitem(damaged_files.READERS, "text", reader)
    monkeypatch.setattr(damaged_files.resource, "setrlimit", lambda *_: None)
    return damaged_files.main(["text", "--number", "3", "--output", str(tmp_path / "d.json"), *more])


def test_what_must_not_be_is_counted_and_named(tmp_path, monkeypatch, capsys):
    assert run(monkeypatch, tmp_path, {"refused": 2, "taken": 1}) == 0
    assert "| a text | 2 | 1 | 0 | 0 | 0 | 0 | 0 | 0 | 0 |" in (tmp_path / "d.md").read_text()
    wrong = {"refused": 1, "taken wrongly: other tokens": 1, "traceback: MemoryError": 1}
    assert run(monkeypatch, tmp_path, wrong) == 1
    page = (tmp_path / "d.md").read_text()
    assert (
        "| a text | 1 | 0 | 0 | 0 | 1 | 0 | 0 | 1 | 0 |" in page
        and "a text: taken wrongly: other tokens" in page
    )


def test_real_cases(tmp_path):
    """A reader that needs no processes, started as the page says."""
    command = [
        sys.executable,
        "benchmarks/damaged_files.py",
        "history",
        "--number",
        "8",
        "--output",
        tmp_path / "d.json",
    ]
    done = completed(command, env={"PYTHONPATH": ".:tests:tests/inputs:tests/dumps"})
    assert done.returncode == 0, done.stderr
    row = json.loads((tmp_path / "d.json").read_text())["readers"]["history"]
    assert sum(row["outcomes"].values()) == 8 and row["bad"] == [] and row["origin"]["cpu"]


def test_the_table_is_generated_and_nothing_in_it_is_wrong():
    content = json.loads(RESULTS.read_text())
    assert RESULTS.with_suffix(".md").read_text() == damaged_files.page(content)
    assert content["number"] >= 1000 and content["readers"].keys() == damaged_files.READERS.keys()
    for row in content["readers"].values():
        assert (
            row["bad"] == []
            and sum(row["outcomes"][name] for name in damaged_files.GOOD) == content["number"]
        )
