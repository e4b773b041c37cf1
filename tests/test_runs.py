"""What --strategies names."""

import pytest

from lockstep.config import parse_config
from lockstep.errors import UserError
from lockstep.mesh import Mesh
from lockstep.runs import runs_of

BASELINE = parse_config("ddp", ["--dp_size", "2", "--batch_size", "8"])


def named(names, tp_size=2):
    return runs_of(names, BASELINE, tp_size)


def test_the_baseline_is_first_and_always_there():
    assert [run.name for run in named("fsdp,deepspeed")] == ["ddp", "fsdp", "deepspeed"]
    assert [run.name for run in named("fsdp,ddp")] == ["ddp", "fsdp"]
    assert [run.mesh for run in named("fsdp")] == [Mesh(dp=2), Mesh(dp=2, tp=2)]


def test_every_run_sees_the_same_global_batch():
    runs = named("fsdp,fsdp@tp1xdp4,fsdp@dp1,deepspeed@dp1xtp4")
    assert {run.mesh.dp * run.batch_size for run in runs} == {16}
    assert [run.name for run in runs] == ["ddp", "fsdp", "fsdp_tp1xdp4", "fsdp_dp1", "deepspeed_dp1xtp4"]
    configs = [parse_config(run.row.place, run.arguments) for run in runs]
    assert [config.mesh for config in configs] == [run.mesh for run in runs]
    assert [config.name for config in configs] == [run.name for run in runs]


@pytest.mark.parametrize(
    "names, message",
    [
        ("ddp", "at least one strategy besides ddp"),
        ("fsdp,fsdp", "each once"),
        ("fsdp@tp1xdp4,fsdp@tp1xdp4", "each once"),
        ("fsdp@2x2", "2x2 is not a mesh"),
        ("fsdp@", "is not a mesh; write it as tp1xdp4"),
        ("fsdp@tp0", "tp0 is not a mesh"),
        ("fsdp@tp2xtp2", "is not a mesh"),
        ("fsdp@ep2", "ep2 is not a mesh"),
        ("fsdp@dp3", "16 sequences cannot be divided among 3 DP ranks"),
        ("deepspeed@pp2", "has no axis pp"),
        ("ddp@tp2xdp1", "DDP has no axis tp"),
        ("nosuch@dp4", "there is no strategy nosuch"),
    ],
)
def test_what_is_no_run_is_one_line(names, message):
    with pytest.raises(UserError, match=message):
        named(names)
