"""One run at a time into one place."""

import os
import shlex
import signal
import subprocess
import sys

import pytest
from programs import ROOT, in_process

from lockstep.ground import locks
from lockstep.ground.errors import UserError

HOLDS = "import sys, time; from pathlib import Path; from lockstep.ground import locks\nwith locks.held((Path(sys.argv[1]), '--x')): print(1, flush=True); time.sleep(60)"


@pytest.fixture
def holder(tmp_path):
    """A process that holds the lock of tmp_path/loss_ddp.json."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(tmp_path / "loss_ddp.json")], cwd=ROOT, stdout=subprocess.PIPE
    )
    process.stdout.readline()
    yield process
    process.kill()
    process.wait()


def test_the_second_is_refused_and_says_who_is_first(tmp_path, holder):
    said = rf"--x: another run \(process {holder.pid} on .*\) is writing .*loss_ddp.json; wait until"
    with pytest.raises(UserError, match=said), locks.held((tmp_path / "loss_ddp.json", "--x")):
        pass
    with locks.held((tmp_path / "loss_fsdp.json", "--x")):  # another history in the same folder
        pass


def test_a_killed_run_leaves_no_lock(tmp_path, holder):
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    assert locks.path_of(tmp_path / "loss_ddp.json").exists()
    with locks.held((tmp_path / "loss_ddp.json", "--x")):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_lock_ends_with_its_error(tmp_path):
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), locks.held((tmp_path / "a", "--x"), (tmp_path / "b", "--y")):
            raise ZeroDivisionError


def test_a_child_does_not_keep_the_lock(tmp_path):
    with locks.held((tmp_path / "a", "--x")):
        child = subprocess.Popen(["sleep", "20"], close_fds=False)
    with locks.held((tmp_path / "a", "--x")):
        child.kill()


def test_a_file_system_without_locks_is_said_and_used(tmp_path, monkeypatch, capsys):
    def no_locks(*_):
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.flock", no_locks)
    with locks.held((tmp_path / "a", "--x")):
        assert "will not be noticed" in capsys.readouterr().err


def test_a_folder_in_the_locks_place(tmp_path):
    (tmp_path / ".a.lock").mkdir()
    with pytest.raises(UserError, match="--x: .*cannot be written"), locks.held((tmp_path / "a", "--x")):
        pass


@pytest.mark.parametrize(
    "command, lock, option",
    [
        (
            ["train_ddp.py", "--loss_output_dir", "OUT", "--storage_path", "s"],
            "OUT/.loss_ddp.json.lock",
            "--loss_output_dir",
        ),
        (["run_verification.py", "--output_dir", "OUT"], "OUT/.verification.lock", "--output_dir"),
        (
            ["run_verification.py", "--output_dir", "OUT"],
            "OUT/.fsdp.lock",
            "--output_dir",
        ),  # a run whose script was killed
        (["run_faults.py", "tie_broken", "--output", "OUT/f.json"], "OUT/.f.json.lock", "--output"),
        (
            shlex.split("run_faults.py tie_broken --work_dir OUT --output OUT.json"),
            ".OUT.lock",
            "--work_dir",
        ),
    ],
)
def test_other_programs_are_refused_at_once(tmp_path, command, lock, option):
    path = tmp_path / lock
    path.parent.mkdir(exist_ok=True)
    held = path.with_name(path.name.removesuffix(".lock")[1:])
    with locks.held((held, "--x")):
        done = in_process(*command, cwd=tmp_path)
    assert done.returncode == 2 and f"{option}: another run (process {os.getpid()} " in done.stderr, (
        done.stderr
    )
    assert len(done.stderr.splitlines()) == 1 and not list(tmp_path.rglob("*.json"))
