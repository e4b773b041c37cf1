"""Programs that others start: they end with them, and what they said of their failure is found again."""

import os
import signal
import subprocess
import sys
import time

import pytest
from ranks import ROOT

from lockstep.dumps import history
from lockstep.ground import hang, processes
from lockstep.ground.errors import TrainingFailure, UserError
from lockstep.plan.config import history_file
from lockstep.running import jobs, ranks

pytestmark = pytest.mark.usefixtures("from_nothing")


def test_memory_that_is_kept_is_given_back():
    code = (
        "import torch; from lockstep.ground import processes; from lockstep.plan import resources\n"
        "processes.keep_memory(); before = processes.own_memory(); x = torch.ones(1 << 26); del x\n"
        "kept = processes.own_memory(); resources.share_memory(); shared = processes.own_memory()\n"
        "resources.free_bytes = lambda: 0; resources.share_memory()\n"
        "print(*(n - before >> 20 for n in (kept, shared, processes.own_memory())))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    kept, shared, given_back = map(int, done.stdout.split())
    assert kept >= 255 and shared >= 255 and given_back < 64  # MiB; the tensor has 256


@pytest.mark.parametrize(
    "log, status, why",
    [
        ("train_x.py: --seed -1: no\n", 2, "--seed -1: no"),
        (
            "train_x.py: rank 3 failed: closed by peer\ntrain_x.py: rank 1 failed: it broke\n",
            1,
            "rank 1 failed: it broke",
        ),
        (  # why a rank died comes before what the others lost
            "train_x.py: rank 0 failed: the remote process exited\ntrain_x.py: rank 1 was killed\ntrain_x.py: rank 3 was killed",
            1,
            "rank 1 was killed",
        ),
        (  # C++ says why it aborts, in lines of its own
            "terminate called after throwing an instance of 'x'\n  what():  it broke\ntrain_x.py: rank 3 was killed by SIGABRT\n",
            1,
            "rank 3 was killed by SIGABRT; terminate called after throwing an instance of 'x'; what():  it broke",
        ),
        ("what(): x\ntrain_x.py: rank 3 was killed by SIGSEGV\n", 1, "rank 3 was killed by SIGSEGV"),
        ("Warning: x\n", -9, "killed by SIGKILL (the machine may be short of memory)"),
        ("a\n\x1b[31mb\n\n", 5, "exit status 5: \\x1b[31mb"),
        ("", 5, "exit status 5: no output"),
    ],
)
def test_the_line_that_counts(log, status, why):
    assert processes.failure("train_x.py", status, log) == why


@pytest.mark.parametrize("status, exit_code", [(1, 1), (2, 2), (3, 3), (-9, 1), (77, 1)])
def test_a_jobs_status_is_ours(status, exit_code):
    assert jobs.JobFailed("x", status).exit_code == exit_code


def test_a_child_ends_with_a_killed_parent(tmp_path):
    code = "import sys, time; from lockstep.ground import processes; print(processes.start(['sleep', '60']).pid, flush=True); time.sleep(60)"
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    child = int(parent.stdout.readline())
    assert os.path.exists(f"/proc/{child}")
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and _runs(child):
        time.sleep(0.05)
    assert not _runs(child)


def _runs(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def train(folder, *more):
    return {
        "strategy": "ddp",
        "arguments": [
            "--debug_steps",
            "1",
            "--batch_size",
            "1",
            "--seq_length",
            "16",
            "--loss_output_dir",
            str(folder),
            *more,
        ],
    }


def test_groups_of_ranks_in_one_start_and_a_job_that_fails(tmp_path, capsys):
    """Two ranks, then one process outside any launcher; what is meant for a person is shown, once for all ranks."""
    good = train(tmp_path / "one", "--dp_size", "1")
    bad = {**good, "arguments": [*good["arguments"], "--seed", "-1"]}
    groups = [(2, [train(tmp_path / "two", "--dp_size", "2")]), (None, [good, bad])]
    with pytest.raises(TrainingFailure) as raised:
        jobs.start_all_groups(groups, tmp_path / "work", shown=True)
    log = tmp_path / "work" / "log.txt"
    assert str(raised.value) == (
        "job 3 of 3, ddp, failed: argument --seed: -1 is out of range; it must be at least 0 and at most 4294967295; "
        f"see train_ddp.py --help; all it said is in {log}"
    )
    assert raised.value.exit_code == 2 and "Traceback" not in log.read_text()
    assert (tmp_path / "two" / "loss_ddp.json").exists() and (tmp_path / "one" / "loss_ddp.json").exists()
    shown = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in shown] == ["DDP (TP=1, DP=2)"] * 2 + ["DDP (TP=1, DP=1)"] * 2


DIES = """
import os, signal
from ddp_strategy import DDPStrategy

class Dies(DDPStrategy):
    axes = ("dp",)

    def update(self):
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().update()
"""


def test_a_killed_rank_ends_the_others_and_is_named(tmp_path):
    (tmp_path / "own.py").write_text(DIES)
    job = {**train(tmp_path, "--dp_size", "2"), "strategy": f"{tmp_path}/own.py:Dies"}
    begin = time.monotonic()
    with pytest.raises(TrainingFailure) as raised:
        jobs.start_all_groups([(2, [job])], tmp_path / "work")
    assert (
        "rank 1 was killed by SIGKILL (the machine may be short of memory)" in str(raised.value)
        and time.monotonic() - begin < 60
    )


HANGS = """
import time
import torch.distributed as dist
from ddp_strategy import DDPStrategy

class Hangs(DDPStrategy):
    axes, updates = ("dp",), 0

    def update(self):
        self.updates += 1
        print(f"beginning of update {self.updates}")
        print("a line of many\\n" * 100_000, flush=True)
        if self.updates == 1:
            time.sleep(2)
        elif dist.get_rank() == 1:
            time.sleep(10**6)
        return super().update()
"""


def test_a_rank_that_hangs_ends_the_run_and_is_named(tmp_path, monkeypatch):
    """A pause that is shorter does not. The log of a strategy that prints without end is cut, and has the stacks."""
    monkeypatch.setattr(processes, "LARGEST", 500_000)
    monkeypatch.setattr(processes, "KEPT", 100_000)
    (tmp_path / "own.py").write_text(HANGS)
    job = {**train(tmp_path, "--dp_size", "2"), "strategy": f"{tmp_path}/own.py:Hangs"}
    job["arguments"][1] = "3"
    seconds, status = jobs.start_groups([(2, [job])], tmp_path / "work", patience=8)
    said = jobs.why(tmp_path / "work", status)
    assert (seconds, status) == ([], 1) and said.startswith(
        "no rank has made progress for 8 s: rank 1 is in step 2, update, at own.py:16, time.sleep(10**6); "
        "rank 0 waits for other ranks in step "
    ), said
    log = (tmp_path / "work" / "log.txt").read_text()
    for rank in (0, 1):
        assert f"rank {rank}: at step " in log
    assert "in update\n    time.sleep(10**6)\n" in log
    assert "beginning of update 1" in log and log.count("[lockstep: lines are left out here") == 1
    assert len(log) < 600_000
    assert len(history.read(history_file(tmp_path, "hangs")).steps) >= 1


@pytest.mark.parametrize("text", ["", "0", "-5", "nan", "soon"])
def test_a_patience_that_is_none(text, monkeypatch):
    monkeypatch.setenv(hang.VARIABLE, text)
    with pytest.raises(UserError, match=f"{hang.VARIABLE}={text}: must be a number of seconds"):
        hang.patience()


def test_a_log_keeps_both_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "LARGEST", 1000)
    monkeypatch.setattr(processes, "KEPT", 200)
    path = tmp_path / "log.txt"
    path.touch()
    for number in range(1000):
        with open(path, "a") as file:
            file.write(f"line {number}\n")
        processes.cut(path)
        assert path.stat().st_size <= 1000
    *_, last = lines = path.read_text().splitlines()
    assert lines[0] == "line 0" and last == "line 999"
    (note,) = [at for at, line in enumerate(lines) if not line.startswith("line ")]
    kept = [int(line.removeprefix("line ")) for line in lines[:note]]
    assert kept == list(range(len(kept))) and "a log keeps 200 bytes of each end" in lines[note]
    assert not processes.cut(path)  # negative control: it is small enough


def test_a_rank_that_ends_before_the_killed_one_is_reaped(monkeypatch, capfd):
    """Which of two ended ranks is found first is the kernel's choice: here the one that only lost its connection."""
    ended = iter([(11, 1 << 8), (12, signal.SIGKILL)])
    monkeypatch.setattr(ranks.os, "waitpid", lambda *_: next(ended))
    assert ranks._wait({11: 0, 12: 1}, "p") == 1
    assert "p: rank 1 was killed by SIGKILL" in capfd.readouterr().err
