"""A usage error that one rank alone meets while all of them run: every rank stops, and a person sees one line."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import ROOT, free_port, run_ranks

from lockstep.running import under_ray
from lockstep.training import history

STEPS = 5
SMALL = ["--batch_size", "2", "--seq_length", "32", "--debug_steps", str(STEPS), "--device", "cpu"]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """What the two ranks of every case raised, and the folder."""
    folder = tmp_path_factory.mktemp("stopped")
    cases = {
        "safetensors": {"file_limit": 100_000},
        "pt": {"file_limit": 100_000},
        "first": {"saves": 0},
        "middle": {"saves": 3},
        "after_the_last_step": {"saves": STEPS},
        "end": {"saves": STEPS + 1},
        "unreadable": {"unreadable": 1},
        "none": {},
    }
    for name, case in cases.items():
        flags = [*SMALL, "--loss_output_dir", str(folder / name), "--storage_path", str(folder)]
        if "file_limit" in case:
            flags += ["--save_init_weights", "--init_weights_path", str(folder / name / f"w.{name}")]
        case.update(name=name, arguments=flags)
    run_ranks(2, "jobs:stopped", folder, {"cases": list(cases.values())})
    return {name: [(folder / f"{name}-{rank}.txt").read_text() for rank in (0, 1)] for name in cases}, folder


@pytest.mark.parametrize("case, message", [
    ("safetensors", "/w.safetensors: File too large; free space"), ("pt", "/w.pt: "),
    *((case, "loss_ddp.json: No space left on device") for case in ("first", "middle", "after_the_last_step", "end")),
    ("unreadable", "rank 1 has no such file"),
])  # fmt: skip
def test_both_ranks_stop_with_one_line(stopped, case, message):
    one, other = stopped[0][case]
    assert one == other and one.startswith("TrainingFailure: ") and message in one and "\n" not in one


def test_nothing_is_left_but_the_steps_that_were_written(stopped):
    said, folder = stopped
    assert said["none"] == ["not stopped"] * 2  # negative control
    assert not list(folder.glob("*/*w.*")) and not (folder / "first" / "loss_ddp.json").exists()
    kept = history.read(folder / "middle" / "loss_ddp.json")
    assert len(kept.steps) == 2 and kept.ended is None


ALONE = """
import os
import lockstep.launch
from ddp_strategy import DDPStrategy
from lockstep.errors import UserError

lockstep.launch.PATIENCE = 5

class Alone(DDPStrategy):
    label, axes = "Alone", ("dp",)

    def forward_backward(self, micro_batches):
        if os.environ["RANK"] in os.environ["RAISING"]:
            raise UserError("there is no room on this machine; make some")
        return super().forward_backward(micro_batches)
"""


@pytest.mark.parametrize("ranks, said", [("1", "rank 1: there is no room"), ("0", "there is no room"), ("01", "there is no room")])  # fmt: skip
def test_one_line_under_torchrun(tmp_path, ranks, said):
    """The other rank waits in a collective, and its lost connection is no news."""
    (tmp_path / "own.py").write_text(ALONE)
    command = [
        Path(sys.executable).parent / "torchrun",
        "--nproc_per_node",
        "2",
        "--master_port",
        str(free_port()),
    ]
    command += ["-m", "lockstep.train", "--strategy", f"{tmp_path}/own.py:Alone", *SMALL]
    command += ["--loss_output_dir", str(tmp_path), "--storage_path", str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAISING": ranks}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    lines = [line for line in done.stderr.splitlines() if line.startswith("lockstep.train: ")]
    assert done.returncode == 1 and lines == [f"lockstep.train: {said} on this machine; make some"], (
        done.stderr
    )
    assert "by peer" not in done.stderr


def test_a_log_that_cannot_be_written_hides_nothing():
    """/dev/full is a disk without room."""
    with under_ray._log_at(Path("/dev/full")) as log:
        print("a line of Ray")
        print("another one")
    assert log.lost == "No space left on device"
