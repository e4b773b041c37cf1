"""Programs that others start: they end with them, and what they said of their failure is found again."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from ranks import ROOT

from lockstep.errors import TrainingFailure, UserError
from lockstep.running import jobs, processes

TORCHRUN = "E1122 03:30:21.298000 13617 api.py:984] failed (exitcode: {}) local_rank: 1 (pid: 42) of binary: python\nTraceback ...\n"


@pytest.mark.parametrize("log, why, status", [
    ("train_x.py: --seed -1: no\n" + TORCHRUN.format(2), "--seed -1: no", 2),
    ("train_x.py: rank 3 failed: closed by peer\ntrain_x.py: rank 1 failed: it broke\n" + TORCHRUN.format(1), "rank 1 failed: it broke", 1),
    ("Warning: x\n" + TORCHRUN.format(-9), "killed by SIGKILL (the machine may be short of memory)", -9),
    ("a\n\x1b[31mb\n\n", "exit status 5: \\x1b[31mb", 5),
    ("", "exit status 5: it said nothing", 5),
])  # fmt: skip
def test_the_line_that_counts(log, why, status):
    assert processes.failure("train_x.py", 5, log) == (why, status)


@pytest.mark.parametrize("status, exit_code", [(1, 1), (2, 2), (3, 3), (-9, 1), (77, 1)])
def test_a_childs_status_is_ours(status, exit_code):
    assert processes.ChildFailure("x", status).exit_code == exit_code


def test_a_child_ends_with_a_killed_parent(tmp_path):
    code = "import sys, time; from lockstep import processes; print(processes.start(['sleep', '60']).pid, flush=True); time.sleep(60)"
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


@pytest.mark.parametrize("content, message", [
    ([{"strategy": "ddp", "arguments": [1]}], "jobs.0.arguments.0 is 1"),
    ([{"strategy": "dpp", "arguments": []}], "jobs.0.strategy is 'dpp'"),
    ([{"strategy": "ddp", "arguments": [], "faults": "x"}], "jobs.0.faults is 'x'"),
    ([{"strategy": "ddp", "arguments": [], "fault": "x"}], "there is no fault x"),
    ({}, "jobs is {}"),
])  # fmt: skip
def test_a_wrong_file_of_jobs(tmp_path, content, message):
    (tmp_path / "jobs.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=message):
        jobs.read(tmp_path / "jobs.json")


def test_a_failed_job_is_one_line(tmp_path):
    good = {"strategy": "ddp", "arguments": ["--dp_size", "1", "--debug_steps", "1", "--loss_output_dir", str(tmp_path)]}
    bad = {"strategy": "ddp", "arguments": [*good["arguments"], "--seed", "-1"]}
    with pytest.raises(TrainingFailure) as raised:
        jobs.start_all(None, [good, bad], tmp_path / "work")
    log = tmp_path / "work" / "log.txt"
    assert str(raised.value) == (
        "job 2 of 2, ddp, failed: argument --seed: -1 is out of range; it must be at least 0 and at most 4294967295; "
        f"see train_ddp.py --help; all it said is in {log}"
    )
    assert "Traceback" not in log.read_text()
