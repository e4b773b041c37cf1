"""Pipeline, context and sequence parallelism: alone and together, against the float64 reference; what is refused."""

import pytest
from ranks import ROOT

from lockstep.dumps import history
from lockstep.dumps.dump import Dump
from lockstep.faults import CATALOGUE
from lockstep.ground.errors import UserError
from lockstep.inputs.architectures import BUILT_IN
from lockstep.plan import cuts, deepspeed, stages
from lockstep.plan.command_line import parse_config
from lockstep.plan.config import CONTROL, history_file
from lockstep.plan.mesh import Mesh, balanced_share, runs
from lockstep.plan.strategies import spec_of
from lockstep.running import jobs
from lockstep.training.preflight import load_inputs
from lockstep.verdict import loss_curves as curves
from lockstep.verdict.comparison import compare_dumps

COMBINATIONS = {
    "sp 2 x cp 2": "--cp_size 2 --tp_size 2 --sequence_parallel",
    "pp 2, interleaved, x cp 2, checkpointed": "--pp_size 2 --tp_size 1 --cp_size 2 --pp_schedule interleaved1f1b --pp_microbatches 2",
    "pp 2 x sp 2, autocast": "--pp_size 2 --tp_size 2 --sequence_parallel --precision autocast",
    "sp 2, compiled": "--tp_size 2 --sequence_parallel --compile aot_eager",
    "ddp, dp 2, compiled, checkpointed": "--dp_size 2 --batch_size 2 --compile aot_eager",
    "deepspeed, sp 2, stage 3, compiled": "--sp_size 2 --tp_size 1 --zero_stage 3 --compile aot_eager",
    "contextddp, cp 2": "--cp_size 2",
}
FURTHER = {  # with --all
    "pp 2, zero bubble, x dp 2": "--pp_size 2 --tp_size 1 --dp_size 2 --batch_size 2 --pp_schedule interleavedzerobubble",
    "dp 2 of 2 replicas x cp 2": "--dp_size 2 --batch_size 2 --dp_replicate 2 --cp_size 2 --tp_size 1 --gradient_sync scatter",
    "deepspeed, dp 2, checkpointed": "--dp_size 2 --batch_size 2 --tp_size 1 --zero_stage 3",
    "deepspeed, sp 2 x dp 2, stage 0": "--sp_size 2 --dp_size 2 --batch_size 2 --tp_size 1 --zero_stage 0",
    "cp 2 x dp 2": "--cp_size 2 --dp_size 2 --batch_size 2 --tp_size 1",
    "sp 2": "--tp_size 2 --sequence_parallel",
    "pp 4": "--pp_size 4 --tp_size 1",
    "dp 2, checkpointed": "--dp_size 2 --batch_size 2 --tp_size 1",
    "deepspeed, sp 2": "--sp_size 2 --tp_size 1 --zero_stage 2",
}
EXAMPLE = f"{ROOT}/examples/context_ddp.py:ContextDDP"
COMMON = ["--seq_length", "32", "--gradient_accumulation_steps", "2", "--max_grad_norm", "0.5"]
STEPS = ["--debug_steps", "2", "--capture_steps", "2"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory, request):
    """Two steps of every combination, of DDP in both precisions, and the float64 reference of all."""
    folder = tmp_path_factory.mktemp("dimensions")

    def job(strategy, name, *arguments):
        own = ["--capture_dir", str(folder / name), "--loss_output_dir", str(folder / name / "losses")]
        return {"strategy": strategy, "arguments": [*COMMON, *STEPS, *own, *arguments]}

    starts, alone = {2: [], 4: []}, ("--dp_size", "1", "--batch_size", "4")  # number of ranks -> jobs
    chosen = {**COMBINATIONS, **(FURTHER if request.config.getoption("--all") else {})}
    for name, flags in chosen.items():
        arguments = [*alone, *flags.split()]
        if "--pp_size" in flags:
            arguments += ["--gradient_sync", "every"]
        if "checkpointed" in name:
            arguments += ["--activation_checkpointing"]
        place = EXAMPLE if strategy_of(name) == spec_of(EXAMPLE).name else strategy_of(name)
        mesh = parse_config(place, ["--device", "cpu", *arguments]).mesh
        starts[mesh.world_size].append(job(place, name, *arguments))
    in_bf16 = [*alone, "--precision", "bf16", "--tp_size", "1", "--sp_size", "2"]
    starts[2].append(job("deepspeed", "deepspeed, sp 2, bf16", *in_bf16))
    starts[1], references = [], []
    for name, precision in (("ddp", "fp32"), ("ddp, autocast", "autocast")):
        told = (*alone, "--precision", precision)
        dumps = [str(folder / other / strategy_of(other)) for other in chosen if baseline_of(other) == name]
        starts[1].append(job("ddp", name, *told, "--control"))
        references.append({**job(jobs.REFERENCE, name, *told), "replays": dumps})
    jobs.start_all_groups([*starts.items(), (None, references)], folder / "work")
    return folder


def strategy_of(name):
    first = name.split(",")[0]
    return first if first in ("ddp", "deepspeed", "contextddp") else "fsdp"


def baseline_of(name):
    return "ddp, autocast" if "autocast" in name else "ddp"


@pytest.mark.parametrize("name", [*COMBINATIONS, *FURTHER])
def test_every_combination_computes_the_same(trained, name, request):
    if name in FURTHER and not request.config.getoption("--all"):
        pytest.skip("only with --all: the others have its parts")
    plain, strategy = trained / baseline_of(name), strategy_of(name)
    result = compare_dumps(
        Dump(plain / "reference"),
        {"ddp": Dump(plain / "ddp"), "it": Dump(trained / name / strategy)},
        {"ddp": Dump(plain / "replay_ddp"), "it": Dump(trained / name / f"replay_{strategy}")},
    )
    assert result.verdict("it") == "PASS", result.runs["it"].failures[:3]
    baseline = history.read(history_file(plain / "losses", "ddp"))
    other = history.read(history_file(trained / name / "losses", strategy))
    control = history.read(history_file(plain / "losses", CONTROL))
    assert curves.compare_curves(baseline, other, curves.tolerance_for(baseline, control)).passed


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
    tensors = compiled.steps["1"]["tensors"]
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
    tensors = Dump(trained / "sp 2 x cp 2" / "fsdp").steps["1"]["tensors"]
    assert tensors["forward/model.norm"]["sharded"] == {"cp": 1, "tp": 1}
    assert tensors["forward/model.layers.0.self_attn.q_proj"]["sharded"] == {"cp": 1, "tp": 2}


def test_there_are_planted_bugs_of_every_dimension():
    classes = [fault.bug_class for fault in CATALOGUE.values()]
    assert classes.count("context parallelism") >= 8 and classes.count("pipeline") >= 8
    assert classes.count("sequence parallelism") >= 3


def require(options, architecture):
    cuts.require(options, architecture)
    options.spec.require(options, architecture)


def config(*arguments, strategy="fsdp"):
    return parse_config(strategy, ["--device", "cpu", "--dp_size", "1", "--tp_size", "1", *arguments])


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--pp_size 2 --batch_size 4 --pp_microbatches 3", "does not divide --batch_size 4"),
        ("--pp_size 4 --pp_schedule interleaved1f1b", "8 stages, and the model has 4 parts"),
        (
            "--pp_size 4 --batch_size 2",
            "2 micro batches, and it needs at least 4, .* or choose --pp_schedule gpipe",
        ),
        (
            "--pp_size 2 --batch_size 5 --pp_schedule interleaved1f1b",
            "5 micro batches cannot be done in 2 equal rounds; make --pp_microbatches",
        ),
        ("--pp_size 2 --pp_schedule zbv", "would break their tie"),
        ("--pp_size 2 --gradient_accumulation_steps 2", "add --gradient_sync every"),
        ("--pp_size 2 --wrap model", "leave them out"),
        ("--pp_microbatches 2", "there is no pipeline"),
        ("--sequence_parallel", "add --tp_size 2"),
        ("--sequence_parallel --tp_size 2 --cp_size 2 --seq_length 6", "choose a multiple of 4"),
        ("--sequence_parallel --tp_size 2 --attn_impl eager", "leave --attn_impl out"),
        ("--tp_size 2 --activation_checkpointing --compile", "leave one of them out"),
    ],
)
def test_what_cannot_be_combined(arguments, message):
    with pytest.raises(UserError, match=message):
        require(config(*arguments.split()), BUILT_IN["tiny-qwen2"])


def test_models_that_cannot_be_combined():
    with pytest.raises(UserError, match="that are built like Llama"):
        require(config("--pp_size", "2"), BUILT_IN["tiny-gpt2"])
    sliding = {**BUILT_IN["tiny-mistral"], "sliding_window": 16}
    with pytest.raises(UserError, match="sliding window"):
        require(config("--tp_size", "2", "--sequence_parallel"), sliding)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--cp_size 2 --seq_length 30", "cannot be cut into 4 equal pieces"),
        ("--cp_size 2 --attn_impl eager", "leave --attn_impl out"),
    ],
)
def test_what_context_parallelism_cannot_cut(arguments, message):
    with pytest.raises(UserError, match=message):
        load_inputs(config(*arguments.split()))


@pytest.mark.parametrize(
    "strategy, flag, message",
    [
        ("ddp", "--cp_size", "DDP has no context parallelism"),
        ("fsdp", "--sp_size", "unrecognized arguments: --sp_size"),
        ("deepspeed", "--pp_size", "DeepSpeed AutoTP has no pipeline parallelism"),
        ("fsdp", "--pp_schedule", "invalid choice: '2'"),
    ],
)
def test_strategies_without_a_dimension(strategy, flag, message):
    with pytest.raises(UserError, match=message):
        parse_config(strategy, ["--device", "cpu", flag, "2"])


@pytest.mark.parametrize(
    "arguments, model, message",
    [
        ("--tp_size 2", "tiny-qwen2", "add --tp_size 1"),
        ("--tp_size 1", "tiny-mistral", "Ulysses ignores"),
        ("--tp_size 1", "tiny-gpt2", "built like Llama"),
        ("--tp_size 1 --sp_size 8", "tiny-qwen2", "4 heads and 2 key-value heads"),
    ],
)
def test_what_ulysses_cannot_cut(arguments, model, message):
    options = config("--sp_size", "2", "--seq_length", "128", *arguments.split(), strategy="deepspeed")
    sliding = {**BUILT_IN[model], "sliding_window": 64} if model == "tiny-mistral" else BUILT_IN[model]
    with pytest.raises(UserError, match=message):
        deepspeed.require_ulysses(options, sliding)


def test_every_position_and_every_layer_belongs_to_one_rank():
    for size in (1, 2, 4):
        own = [balanced_share(64, rank, size) for rank in range(size)]
        assert sorted(
            at for of_rank in own for start, n in of_rank for at in range(start, start + n)
        ) == list(range(64))
        work = [
            sum(start + n for start, n in of_rank) for of_rank in own
        ]  # keys that the last query of a piece sees
        assert len(set(work)) == 1
    assert runs([0, 1, 5, 6, 7]) == [[0, 2], [5, 3]] and runs([]) == []
    for schedule in stages.SCHEDULES:
        for size in (2, 4):
            count = stages.num_stages(schedule, size)
            assert sorted(
                stage for rank in range(size) for stage in stages.stages_of(schedule, rank, size)
            ) == list(range(count))
            units = [unit for stage in range(count) for unit in stages.units_of(stage, count, 8)]
            assert units == ["embedding", *range(8), "lm_head"]
    assert Mesh.of_options({"dp_size": 2, "tp_size": 4}) == Mesh(dp=2, tp=4)
