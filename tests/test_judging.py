"""Steps that are judged by several processes, or by tasks of Ray: as one process judges them."""

import pytest
import torch
from test_streamed import Twice, mixture, recorded

from lockstep import judge


@pytest.mark.parametrize("how", [("--workers", "2", "--memory", "0"), ("--ray",)])
def test_tasks_find_the_same(tmp_path, how):
    torch.manual_seed(0)
    recorded(tmp_path, mixture(), factor=1.001)
    found = []
    for options in ((), how):
        assert judge.main([str(tmp_path), *options]) == 1
        found.append((tmp_path / "report.json").read_bytes())
    assert found[0] == found[1]


@pytest.mark.parametrize("how", [("--workers", "2"), ("--ray",)])
def test_an_error_of_a_task_is_one_line(tmp_path, capsys, how):
    recorded(tmp_path, Twice(outside=True))
    assert judge.main([str(tmp_path), "--memory", "0", *how]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "or a weight is used outside of its module, which needs more --memory" in line


def test_ray_decides_how_many_processes_it_has(tmp_path, capsys):
    recorded(tmp_path, Twice())
    assert judge.main([str(tmp_path), "--ray", "--workers", "2"]) == 2
    assert "leave it out with --ray" in capsys.readouterr().err
