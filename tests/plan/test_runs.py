"""What --strategies names."""

import pytest
from own_strategy import own_strategy
from ranks import ROOT

from lockstep.ground.errors import UserError
from lockstep.plan.command_line import _require_run_name, parse_config
from lockstep.plan.mesh import Mesh
from lockstep.plan.runs import runs_of

LONG = ("reshard_after_forward=false", "gradient_sync=every", "pp_schedule=interleaved1f1b", "wrap=layer")
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
    configs = [parse_config(run.spec.place, run.arguments) for run in runs]
    assert [config.mesh for config in configs] == [run.mesh for run in runs]
    assert [config.name for config in configs] == [run.name for run in runs]


@pytest.mark.parametrize(
    "names, message",
    [
        ("ddp", "at least one strategy besides ddp"),
        ("fsdp,fsdp", "each once"),
        ("fsdp@2x2", "2x2 is not a mesh"),
        ("fsdp@ep2", "fsdp@ep2: there is no axis ep; the axes are pp, dp, cp, tp"),
        ("deepspeed@sp2xdp1", "deepspeed@sp2xdp1: there is no axis sp; write cp"),
        (
            "fsdp:zero_stage=3",
            "FSDP.DTensor has no option zero_stage; it has reshard_after_forward, .*pp_schedule, .*compile",
        ),
        ("fsdp:", "has no option without a name"),
        ("fsdp:sequence_parallel=1", "sequence_parallel takes no value; leave =1 out"),
        ("fsdp:prefetch=1+prefetch=2", "prefetch is given twice"),
        ('deepspeed:deepspeed_config={"a":1,"b":2}', "or the path of a file, not JSON itself"),
        ("fsdp@tp2@dp2", "write NAME@MESH:OPTIONS"),
        ("fsdp@dp3", "16 sequences cannot be divided among 3 DP ranks"),
        ("ddp@tp2xdp1", "DDP has no axis tp"),
        ("nosuch@dp4", "there is no strategy nosuch"),
    ],
)
def test_what_is_no_run_is_one_line(names, message):
    with pytest.raises(UserError, match=message):
        for run in named(names):
            parse_config(run.spec.place, run.arguments)


def test_options_of_one_run(tmp_path):
    """They reach its parser, and its name and its label tell it from the others."""
    own = tmp_path / "a@b:c" / "mine.py"
    own.parent.mkdir()
    own_strategy(own, name="Mine", then="\nMine.axes, Mine.label = ('dp', 'tp'), 'Mine'\n")
    file = ROOT / "studies/deepspeed/zero2.json"
    texts = [
        "deepspeed@tp1xdp2:zero_stage=3+offload_param=cpu",
        f"deepspeed@tp1xdp2:deepspeed_config={file}",
        "fsdp@tp2:sequence_parallel",
        "fsdp@pp2:pp_schedule=gpipe+pp_microbatches=4+compile=aot_eager",
        "fsdp:activation_checkpointing",
        "ddp:gradient_as_bucket_view=false",
        f"{own}:Mine@tp1:compile",
        f"{own}:Mine",
    ]
    runs = named(",".join(texts))
    configs = [parse_config(run.spec.place, run.arguments) for run in runs]
    assert [config.label for config in configs] == [
        "DDP (TP=1, DP=2)",
        "DeepSpeed AutoTP (TP=1, DP=2, zero_stage=3, offload_param=cpu)",
        "DeepSpeed AutoTP (TP=1, DP=2, zero_stage=2, deepspeed_config)",
        "FSDP+DTensor (TP=2, DP=1, sequence_parallel)",
        "FSDP+DTensor (TP=1, DP=1, PP=2, pp_schedule=gpipe, pp_microbatches=4, compile=aot_eager)",
        "FSDP+DTensor (TP=2, DP=2, activation_checkpointing)",
        "DDP (TP=1, DP=2, gradient_as_bucket_view=false)",
        "Mine (TP=1, DP=1, compile=inductor)",
        "Mine (TP=2, DP=2)",
    ]
    names = [run.name for run in runs]
    assert [config.name for config in configs] == names and len(set(names)) == len(names)
    assert (
        names[1] == "deepspeed_tp1xdp2_zero_stage-3_offload_param-cpu"
        and names[3] == "fsdp_tp2_sequence_parallel"
    )
    assert [run.is_baseline for run in runs] == [True] + [False] * 8
    recorded = [config.as_dict() for config in configs]
    assert [
        config.spec.label_of(config.mesh, one) for config, one in zip(configs, recorded, strict=True)
    ] == [config.label for config in configs]


def test_names_of_different_options_differ():
    paths = ["deepspeed:deepspeed_config=a/b.json", "deepspeed:deepspeed_config=a-b.json"]
    many = [f"fsdp@pp1xdp2xcp1xtp2:{'+'.join(LONG)}+prefetch={number}" for number in (1, 2)]
    names = [run.name for run in named(",".join([*paths, *many]))]
    assert len(set(names)) == 5 and max(map(len, names)) == 100
    for name in names:
        _require_run_name(name)
