"""ZeRO stages and offload, pipeline, context and sequence parallelism, options of speed and memory: alone and together, each computes what
DDP and the float64 reference do. Two starts of ranks, and one reference for each precision."""

import pytest
from compared import compared
from ranks import ROOT

from lockstep.dumps import history
from lockstep.dumps.dump import Dump
from lockstep.ground.errors import UserError
from lockstep.plan.command_line import parse_config
from lockstep.plan.config import CONTROL, history_file
from lockstep.plan.strategies import spec_of
from lockstep.running import jobs
from lockstep.verdict import loss_curves
from lockstep.verdict.comparison import compare_dumps

EXAMPLE = f"{ROOT}/examples/context_ddp.py:ContextDDP"
# All see the same global batches.
ONE, TWO, FOUR = (f"--dp_size {size} --batch_size {4 // size}" for size in (1, 2, 4))
ZERO = {  # stage 1 is the default, which other tests run
    "deepspeed, stage 0": "--tp_size 2 --zero_stage 0",
    "deepspeed, stage 2": "--tp_size 2 --zero_stage 2",
    "deepspeed, stage 3": "--tp_size 2 --zero_stage 3",
    "deepspeed, stage 2, optimizer on the CPU": "--tp_size 2 --zero_stage 2 --offload_optimizer cpu",
    "deepspeed, stage 3, all on the CPU": "--tp_size 2 --zero_stage 3 --offload_optimizer cpu --offload_param cpu",
    "deepspeed, stage 3, TP=1": "--tp_size 1 --zero_stage 3",
    "deepspeed, stage 2, a user's file": f"--tp_size 2 --deepspeed_config {ROOT}/studies/deepspeed/zero_offload.json",
    "deepspeed, stage 3, autocast": "--tp_size 2 --zero_stage 3 --precision autocast",
}
COMBINATIONS = {
    **{name: f"{TWO} {flags}" for name, flags in ZERO.items()},
    "sp 2 x cp 2": f"{ONE} --cp_size 2 --tp_size 2 --sequence_parallel",
    "pp 2, interleaved, x cp 2, checkpointed": f"{ONE} --pp_size 2 --tp_size 1 --cp_size 2 --pp_schedule interleaved1f1b --pp_microbatches 2",
    "pp 2 x sp 2, autocast": f"{ONE} --pp_size 2 --tp_size 2 --sequence_parallel --precision autocast",
    "sp 2, compiled": f"{ONE} --tp_size 2 --sequence_parallel --compile aot_eager",
    "ddp, dp 2, compiled, checkpointed": f"{TWO} --compile aot_eager",
    "deepspeed, sp 2, stage 3, compiled": f"{ONE} --sp_size 2 --tp_size 1 --zero_stage 3 --compile aot_eager",
    "contextddp, cp 2": f"{ONE} --cp_size 2",
    "ddp, static, small buckets": f"{FOUR} --static_graph --gradient_sync every --bucket_cap_mb 0.05 --gradient_as_bucket_view false",
    "ddp, unused parameters": f"{FOUR} --find_unused_parameters",
    "replicas of shards": f"{FOUR} --tp_size 1 --dp_replicate 2 --gradient_sync scatter",
    "replicas, cut over tp": f"{TWO} --tp_size 2 --dp_replicate 2 --gradient_sync every --cpu_offload --wrap model",
    "resharded to two": f"{FOUR} --tp_size 1 --reshard_after_forward 2 --prefetch 2 --cpu_offload",
    "resharded, cut over tp": f"{TWO} --tp_size 2 --reshard_after_forward true --prefetch 1",
}
FURTHER = {  # with --all
    "pp 2, zero bubble, x dp 2": f"{TWO} --pp_size 2 --tp_size 1 --pp_schedule interleavedzerobubble",
    "dp 2 of 2 replicas x cp 2": f"{TWO} --dp_replicate 2 --cp_size 2 --tp_size 1 --gradient_sync scatter",
    "deepspeed, dp 2, checkpointed": f"{TWO} --tp_size 1 --zero_stage 3",
    "deepspeed, sp 2 x dp 2, stage 0": f"{TWO} --sp_size 2 --tp_size 1 --zero_stage 0",
    "cp 2 x dp 2": f"{TWO} --cp_size 2 --tp_size 1",
    "sp 2": f"{ONE} --tp_size 2 --sequence_parallel",
    "pp 4": f"{ONE} --pp_size 4 --tp_size 1",
    "dp 2, checkpointed": f"{TWO} --tp_size 1",
    "deepspeed, sp 2": f"{ONE} --sp_size 2 --tp_size 1 --zero_stage 2",
}
COMMON = (
    "--seq_length 32 --gradient_accumulation_steps 2 --max_grad_norm 0.5 --debug_steps 2 --capture_steps 2"
)


def strategy_of(name):
    first = name.split(",")[0]
    return first if first in ("ddp", "deepspeed", "contextddp") else "fsdp"


def baseline_of(name):
    return "ddp, autocast" if "autocast" in name else "ddp"


@pytest.fixture(scope="module")
def trained(new_folder, request):
    """Two steps of every combination, of DDP in both precisions, and the float64 reference of all. No C++ compiler is on the PATH."""
    folder = new_folder("combinations")
    for name in ("no programs", "extensions"):
        (folder / name).mkdir()

    def job(strategy, name, flags):
        own = ["--capture_dir", str(folder / name), "--loss_output_dir", str(folder / name / "losses")]
        own += ["--model_name", "tiny-qwen2-odd-vocab"] * ("autocast" not in name)
        return {"strategy": strategy, "arguments": [*COMMON.split(), *own, *flags.split()]}

    starts, references = {2: [], 4: []}, []  # number of ranks -> jobs
    chosen = {**COMBINATIONS, **(FURTHER if request.config.getoption("--all") else {})}
    for name, flags in chosen.items():
        flags += " --gradient_sync every" * ("--pp_size" in flags)
        flags += " --activation_checkpointing" * ("checkpointed" in name)
        place = EXAMPLE if strategy_of(name) == spec_of(EXAMPLE).name else strategy_of(name)
        mesh = parse_config(place, ["--device", "cpu", *flags.split()]).mesh
        starts[mesh.world_size].append(job(place, name, flags))
    in_bf16 = f"{ONE} --precision bf16 --tp_size 1 --sp_size 2"
    starts[2].append(job("deepspeed", "deepspeed, sp 2, bf16", in_bf16))
    for name, precision in (("ddp", "fp32"), ("ddp, autocast", "autocast")):
        told = f"{TWO} --precision {precision}"
        dumps = [str(folder / other / strategy_of(other)) for other in chosen if baseline_of(other) == name]
        starts[2].append(job("ddp", name, f"{told} --control"))
        references.append({**job(jobs.REFERENCE, name, told), "replays": dumps})
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PATH", str(folder / "no programs"))
        environment.setenv("TORCH_EXTENSIONS_DIR", str(folder / "extensions"))
        jobs.start_all_groups([*starts.items(), (None, references)], folder / "work")
    return folder


@pytest.mark.parametrize("name", [*COMBINATIONS, *FURTHER])
def test_every_combination_computes_the_same(trained, name, request):
    if name in FURTHER and not request.config.getoption("--all"):
        pytest.skip("only with --all: the others have its parts")
    plain, strategy = trained / baseline_of(name), strategy_of(name)
    result = compared(plain, it=trained / name / strategy)
    assert result.verdict("it") == "PASS", result.runs["it"].failures[:3]
    baseline = history.read(history_file(plain / "losses", "ddp"))
    other = history.read(history_file(trained / name / "losses", strategy))
    loss_curves.require_comparable_curves(baseline, other)
    control = history.read(history_file(plain / "losses", CONTROL))
    assert loss_curves.compare_curves(baseline, other, loss_curves.tolerance_for(baseline, control)).passed


def test_no_extension_is_built(trained):
    assert list((trained / "extensions").iterdir()) == []


@pytest.mark.parametrize("name", ZERO)
def test_the_contract_says_what_is_sharded(trained, name):
    sharding = Dump(trained / name / "deepspeed").manifest["contract"]["sharding"]
    stage = int(name.split("stage ")[1][0])
    assert sharding["optimizer_shards"] == (2 if stage else 1)
    assert sharding["offload_optimizer"] == ("cpu" if "CPU" in name or "file" in name else "none")
    assert (sharding["gradients_sharded"], sharding["weights_sharded"]) == (stage >= 2, stage == 3)
    assert sharding["offload_param"] == ("cpu" if "all on" in name else "none")
    assert sharding["collectives"] == "gloo"


def test_ulysses_reduces_in_bfloat16_if_told_to(trained):
    """An engine with sequence parallelism has a key of its own for that. No tolerance is derived for bf16, so its contract must say it."""
    run = Dump(trained / "deepspeed, sp 2, bf16" / "deepspeed")
    assert run.contract["reduction_dtype"] == ["torch.bfloat16"]
    losses = [
        history.read(history_file(trained / name / "losses", strategy)).steps[0]["loss"]
        for name, strategy in (("deepspeed, sp 2, bf16", "deepspeed"), ("ddp", "ddp"))
    ]
    assert losses[0] == pytest.approx(losses[1], abs=0.03)  # an ulp of 7.6 in bfloat16


def test_the_contract_says_who_has_what(trained):
    contract = Dump(trained / "pp 2, interleaved, x cp 2, checkpointed" / "fsdp").manifest["contract"]
    assert contract["activation_checkpointing"] is True
    assert contract["cuts"]["cp"] == [[[0, 8], [24, 8]], [[8, 16]]]
    assert contract["cuts"]["pp"] == {
        "schedule": "interleaved1f1b",
        "microbatches": 2,
        "units": [[["embedding"], [1]], [[0], ["lm_head"]]],
    }
    assert contract["tied_embeddings"] is True and contract["sharding"]["shards"] == [2]
    sequence = Dump(trained / "sp 2 x cp 2" / "fsdp").manifest["contract"]["sharding"]
    assert sequence["positions_in_norms"] == [8]


def test_a_compiled_run_has_what_enters_and_leaves_layers(trained):
    compiled = Dump(trained / "sp 2, compiled" / "fsdp")
    tensors = compiled.steps[1]["tensors"]
    assert {
        "forward/model.layers.0",
        "backward/model.embed_tokens",
        "gradient/model.norm.weight",
    } <= tensors.keys()
    assert "forward/model.layers.0.mlp" not in tensors and compiled.missing == []
    assert compiled.contract["compiled"] == [True]


def test_a_compiled_baseline_is_refused(trained):
    compiled = Dump(trained / "ddp, dp 2, compiled, checkpointed" / "ddp")
    with pytest.raises(UserError, match="run train_ddp.py without --compile"):
        compare_dumps(Dump(trained / "ddp" / "reference"), {"ddp": compiled}, {})


def test_a_dump_says_what_is_cut(trained):
    tensors = Dump(trained / "sp 2 x cp 2" / "fsdp").steps[1]["tensors"]
    assert tensors["forward/model.norm"]["sharded"] == {"cp": 1, "tp": 1}
    assert tensors["forward/model.layers.0.self_attn.q_proj"]["sharded"] == {"cp": 1, "tp": 2}
