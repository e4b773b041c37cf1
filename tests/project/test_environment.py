"""environment.sh: which Python the shell scripts take, and what they say where there is none."""

import os
import shutil
import sys

import pytest
from programs import completed
from ranks import ROOT

FILES = ("environment.sh", "run_verification_main.sh", "requirements.txt")
BARE = f"""#!/bin/bash
case "$*" in *"-m venv"*) exit 1 ;; esac
exec {sys.executable} -S "$@"
"""  # a Python without packages, and without the venv module


@pytest.fixture
def checkout(tmp_path):
    """A copy of the scripts, and a folder whose python3 is bare."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python3").write_text(BARE)
    (tmp_path / "bin" / "python3").chmod(0o755)
    (tmp_path / "a copy").mkdir()
    for name in FILES:
        shutil.copy(ROOT / name, tmp_path / "a copy" / name)
    return tmp_path / "a copy"


def script(checkout, **settings):
    environment = {"PATH": f"{checkout.parent / 'bin'}:/usr/bin:/bin", **settings}
    return completed([checkout / "run_verification_main.sh"], cwd="/", env=environment)


def test_a_python_without_the_venv_module(checkout):
    done = script(checkout)
    assert done.returncode == 2 and done.stderr.endswith(
        "cannot make a virtual environment; install its venv module (Debian: python3-venv)\n"
    )


def test_a_checkout_that_cannot_be_written(checkout):
    (checkout / ".venv").write_text("")  # in the folder's place
    done = script(checkout)
    assert done.returncode == 2 and done.stdout == "" and len(done.stderr.splitlines()) == 1
    assert f"{checkout}/.venv is not writable; set PYTHON to one that has them" in done.stderr


def test_a_relative_python_is_the_callers(tmp_path):
    """In an environment that satisfies the requirements, from another folder, which holds nothing afterwards."""
    python = os.path.relpath(sys.executable, tmp_path)
    environment = {**os.environ, "PYTHON": python, "TP_SIZE": "abc", "LC_ALL": "C"}
    environment.pop("HOME", None)
    done = completed([ROOT / "run_verification_main.sh"], cwd=tmp_path, env=environment)
    assert done.returncode == 2 and "TP_SIZE=abc" in done.stderr and list(tmp_path.iterdir()) == []
