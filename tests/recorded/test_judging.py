"""Steps that are judged by several processes, or by tasks of Ray: as one process judges them."""

import os
import sys

import pytest
import torch
from programs import ROOT, completed
from test_streamed import Twice, mixture, recorded

TASKS = [("--workers", "2", "--memory", "0"), ("--ray", "--memory", "0")]


def judged(folder, *options):
    """A program of its own: when Ray ends, it ends all children of its process."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "recorded")])
    command = [sys.executable, "-m", "lockstep.judge", str(folder), *options]
    return completed(command, env={**os.environ, "PYTHONPATH": paths})


@pytest.mark.parametrize("how", TASKS)
def test_tasks_find_the_same(tmp_path, how):
    torch.manual_seed(0)
    recorded(tmp_path, mixture(), factor=1.001)
    found = []
    for options in ((), how):
        done = judged(tmp_path, *options)
        assert done.returncode == 1, done.stderr
        found.append((tmp_path / "report.json").read_bytes())
    assert found[0] == found[1]


@pytest.mark.parametrize("how", TASKS)
def test_an_error_of_a_task_is_one_line(tmp_path, how):
    recorded(tmp_path, Twice(outside=True))
    done = judged(tmp_path, *how)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "or a weight is used outside of its module, which needs more --memory" in line


def test_ray_decides_how_many_processes_it_has(tmp_path):
    recorded(tmp_path, Twice())
    done = judged(tmp_path, "--ray", "--workers", "2")
    assert done.returncode == 2 and "leave it out with --ray" in done.stderr
