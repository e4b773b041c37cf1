"""The command line of every program is frozen in tests/help, so that a change of it is seen in a diff.

PYTHONPATH=.:tests python tests/commands/test_help.py       writes the files anew
"""

import sys
from pathlib import Path

import pytest
from programs import in_process
from ranks import ROOT

FOLDER = Path(__file__).parents[1] / "help"
PROGRAMS = sorted(path.stem for path in FOLDER.glob("*.txt"))
SCRIPTS = {path.stem for path in ROOT.glob("*.py") if "__main__" in path.read_text()}


def help_of(program: str) -> str:
    """What --help prints, 100 columns wide."""
    path = f"{program.replace('.', '/')}.py"
    done = in_process(path, "--help", COLUMNS="100", HOME="/home/user")
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(
    sys.version_info >= (3, 13), reason="argparse of Python 3.13 writes usage lines otherwise"
)
@pytest.mark.parametrize("program", PROGRAMS)
def test_the_command_line_is_the_frozen_one(program):
    assert help_of(program) == (FOLDER / f"{program}.txt").read_text(), (
        "a flag, its default or its help changed; if it was meant, run PYTHONPATH=.:tests python tests/commands/test_help.py"
    )


def test_every_program_is_frozen():
    assert set(PROGRAMS) >= SCRIPTS


if __name__ == "__main__":
    for each in {*PROGRAMS, *SCRIPTS}:
        (FOLDER / f"{each}.txt").write_text(help_of(each))
