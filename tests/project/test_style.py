"""ruff and mypy, told by pyproject.toml what to look for, find nothing in the repository, and something in a bad file."""

import sys

import pytest
from programs import completed
from ranks import ROOT

CONFIGURATION = str(ROOT / "pyproject.toml")
FORMAT = ("ruff", "format", "--check", "--no-cache", "--config", CONFIGURATION)
CHECK = ("ruff", "check", "--no-cache", "--config", CONFIGURATION)
# its cache is .mypy_cache: only the first run takes a quarter of a minute
MYPY = ("mypy", "--config-file", CONFIGURATION)


def run(*command):
    return completed([sys.executable, "-m", *command])


@pytest.mark.parametrize("command", [(*FORMAT, "."), (*CHECK, "."), MYPY], ids=["format", "check", "mypy"])
def test_the_repository_has_no_findings(command):
    done = run(*command)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "command, text, said",
    [
        (FORMAT, "x = {  'a':1 }\n", "Would reformat"),
        (CHECK, "import os\n", "F401"),
        (CHECK, "def f(x=[]):\n    return x\n", "B006"),
        (MYPY, "def f(x):\n    return x\n", "[no-untyped-def]"),
    ],
)
def test_a_bad_file_is_found(tmp_path, command, text, said):
    (tmp_path / "bad.py").write_text(text)
    done = run(*command, str(tmp_path / "bad.py"))
    assert done.returncode == 1 and said in done.stdout
