"""A usage error that one rank alone meets while all of them run: every rank stops, and a person sees one line."""

import os
import subprocess
import sys
from pathlib import Path

from launched import launched
from ranks import ROOT, free_port

from lockstep.running import under_ray

SMALL = ["--batch_size", "2", "--seq_length", "32", "--debug_steps", "5", "--device", "cpu"]


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


def under_torchrun(strategy, arguments, raising):
    """(status, stderr) of one run of two ranks."""
    command = [
        Path(sys.executable).parent / "torchrun",
        "--nproc_per_node",
        "2",
        "--master_port",
        str(free_port()),
    ]
    command += ["-m", "lockstep.train", "--strategy", strategy, *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAISING": raising}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stderr


# The ranks that raise -> status and line. torchrun's own status is 1.
SAID = {
    "1": (1, "rank 1: there is no room on this machine; make some"),
    "0": (2, "there is no room on this machine; make some"),
    "01": (2, "there is no room on this machine; make some"),
}


def test_one_line_under_a_launcher(tmp_path):
    """The other rank waits in a collective, and its lost connection is no news. Under torchrun, and in forked ranks as of torchrun."""
    (tmp_path / "own.py").write_text(ALONE)
    strategy = f"{tmp_path}/own.py:Alone"
    flags = [*SMALL, "--loss_output_dir", str(tmp_path), "--storage_path", str(tmp_path)]
    runs = launched(tmp_path, strategy, flags, {ranks: {"RAISING": ranks} for ranks in ("0", "01")})
    runs["1"] = under_torchrun(strategy, flags, "1")
    for ranks, (status, error) in runs.items():
        lines = [line for line in error.splitlines() if line.startswith("lockstep.train: ")]
        assert (status, lines) == (SAID[ranks][0], [f"lockstep.train: {SAID[ranks][1]}"]), error
        assert "by peer" not in error, error


def test_a_log_that_cannot_be_written_hides_nothing():
    """/dev/full is a disk without room."""
    with under_ray._log_at(Path("/dev/full")) as log:
        print("a line of Ray")
        print("another one")
    assert log.lost == "No space left on device"
