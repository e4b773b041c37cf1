"""A strategy from outside the repository goes through every program as it is; through run_verification_main.sh in test_one_command.py."""

import ast
import json
import os
import subprocess
import sys

import pytest
from own_strategy import own_strategy
from ranks import ROOT

from lockstep import strategies
from lockstep.errors import UserError

SMALL = ["--batch_size", "2", "--seq_length", "64", "--precision", "fp32"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with my_parallel.py, whose class Mine is DDPStrategy."""
    folder = tmp_path_factory.mktemp("own")
    own_strategy(folder / "my_parallel.py", name="Mine")
    return folder


def run(folder, *command, status=0, **settings):
    environment = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(ROOT), **settings}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=380)
    assert done.returncode == status, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_through_the_verification_of_tensors(folder):
    """With the worked example of the documentation, on a model whose head is not tied."""
    example = ROOT / "examples" / "transformers_tp.py"
    out = run(
        folder,
        sys.executable,
        ROOT / "run_verification.py",
        "--strategies",
        f"ddp,my_parallel.py:Mine,{example}:TransformersTP",
        "--model_name",
        "tiny-llama",
        "--output_dir",
        "verify",
        *SMALL,
    )
    runs = json.loads((folder / "verify" / "report.json").read_text())["runs"]
    assert out.endswith("PASS\n") and list(runs) == ["ddp", "mine", "transformerstp"]
    labels = [runs[name]["label"] for name in ("mine", "transformerstp")]
    assert labels == ["mine (TP=1, DP=2)", "transformers TP (TP=2, DP=2)"]


def test_a_planted_fault_is_found_in_it(folder):
    run(
        folder,
        sys.executable,
        ROOT / "run_faults.py",
        "no_dp_reduction",
        "--strategy",
        "my_parallel.py:Mine",
        "--steps",
        "3",
        "--output",
        "f.json",
    )
    (row,) = json.loads((folder / "f.json").read_text())["rows"]
    assert (
        row["caught"]
        and row["first_right"]
        and row["strategy"] == "mine"
        and row["cause"] == "dp reduction missing"
    )


@pytest.mark.parametrize(
    "name, message",
    [
        ("nope", "there is no strategy nope; choose from ddp, deepspeed, fsdp, or give your own"),
        ("gone.py:Mine", "gone.py: cannot be imported"),
        ("my_parallel.py:Nobody", "has no Nobody; name the class"),
    ],
)
def test_what_is_no_strategy_is_refused(folder, monkeypatch, name, message):
    monkeypatch.chdir(folder)
    with pytest.raises(UserError, match=message):
        strategies.row_of(name)


def named_in(source):
    """The string literals in a Python source that are a registered strategy's name."""
    nodes = ast.walk(ast.parse(source))
    return [n.value for n in nodes if isinstance(n, ast.Constant) and n.value in list(strategies.ROWS)]


def test_no_file_compares_the_name_of_a_strategy():
    """Whatever is told apart by strategy asks the registry: nothing else has a name that it could compare."""
    may = {
        "strategies.py",
        *(row.program for row in strategies.ROWS.values()),
        "build.py",
    }  # build.py: a package
    rooms = ("*.py", "lockstep/**/*.py", "benchmarks/*.py", "results/*.py", "examples/*.py")
    files = [path for room in rooms for path in ROOT.glob(room) if path.name not in may]
    assert len(files) > 80
    assert {path.name: named_in(path.read_text()) for path in files if named_in(path.read_text())} == {}


@pytest.mark.parametrize("line", ['x = name == "fsdp"', 'x in ("ddp", a)', 'RANKS = {"deepspeed": 4}'])
def test_the_name_of_a_strategy_would_be_seen(line):
    """Negative control."""
    assert named_in(line) and not named_in("row.is_baseline or 'tp' in row.axes")
