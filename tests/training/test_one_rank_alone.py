"""A usage error that one rank alone meets while all of them run: every rank stops, and a person sees one line."""

import os
import shlex
import sys
from pathlib import Path

import pytest
from programs import completed
from ranks import free_port

from lockstep.running import under_ray

SMALL = shlex.split("--batch_size 2 --seq_length 32 --debug_steps 5 --device cpu")


ALONE = """
import os
import lockstep.launch
from ddp_strategy import DDPStrategy
from lockstep.ground.errors import UserError

lockstep.launch.PATIENCE = 5

class Alone(DDPStrategy):
    label, axes, steps = "Alone", ("dp",), 0

    def forward_backward(self, micro_batches):
        self.steps += 1
        if os.environ["RANK"] in os.environ["RAISING"]:
            raise UserError("there is no room on this machine; make some")
        return super().forward_backward(micro_batches)
"""


@pytest.mark.parametrize(
    "raising, line",
    [
        ("1", "rank 1: there is no room on this machine; make some"),
        ("01", "there is no room on this machine; make some"),
    ],
)
def test_one_line_under_torchrun(tmp_path, raising, line):
    """The other rank waits in a collective, and its lost connection is no news."""
    (tmp_path / "own.py").write_text(ALONE)
    torchrun = [Path(sys.executable).parent / "torchrun", "--nproc_per_node", "2"]
    torchrun += ["--master_port", str(free_port()), "-m", "lockstep.train"]
    folders = ["--loss_output_dir", str(tmp_path), "--storage_path", str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAISING": raising}
    command = [*torchrun, "--strategy", f"{tmp_path}/own.py:Alone", *SMALL, *folders]
    error = completed(command, env=environment).stderr
    said = [each for each in error.splitlines() if each.startswith("lockstep.train: ")]
    assert said == [f"lockstep.train: {line}"] and "by peer" not in error, error


def test_a_log_has_its_last_line(tmp_path):
    with under_ray._log_at(tmp_path / "log.txt"):
        print("a line")
        print("no end", end="")
    assert (tmp_path / "log.txt").read_text() == "a line\nno end"


def test_a_log_that_cannot_be_written_hides_nothing():
    """/dev/full is a disk without room."""
    with under_ray._log_at(Path("/dev/full")) as log:
        print("a line of Ray")
        print("another one")
    assert log.lost == "No space left on device"
