"""The options of DDP and FSDP that change speed or memory: each is passed on, read back, and changes no number."""

import pytest
from ranks import run_groups

from lockstep.dumps import history
from lockstep.dumps.dump import Dump
from lockstep.ground.errors import UserError
from lockstep.inputs.shapes import describe
from lockstep.plan.command_line import parse_config
from lockstep.plan.config import CONTROL, history_file
from lockstep.plan.contract import expected_contract
from lockstep.plan.strategies import SPECS
from lockstep.running import jobs
from lockstep.verdict import loss_curves as curves
from lockstep.verdict.comparison import compare_dumps


def config(strategy, *arguments):
    return parse_config(strategy, ["--device", "cpu", *arguments])


@pytest.mark.parametrize(
    "strategy, arguments, message",
    [
        ("ddp", "--static_graph --gradient_accumulation_steps 2", "add --gradient_sync every"),
        ("fsdp", "--dp_size 4 --dp_replicate 3", "does not divide --dp_size 4"),
        ("fsdp", "--dp_size 4 --tp_size 1 --reshard_after_forward 3", "must divide the 4 shards"),
        ("fsdp", "--dp_size 4 --tp_size 1 --reshard_after_forward 4", "must divide the 4 shards .* be less"),
        ("fsdp", "--dp_size 4 --tp_size 1 --reshard_after_forward 2 --dp_replicate 2", "the 2 shards"),
        ("fsdp", "--dp_size 4 --tp_size 2 --reshard_after_forward 2", "with tensor parallelism"),
        ("fsdp", "--prefetch 1 --wrap model", "nothing to gather ahead"),
        ("fsdp", "--gradient_sync scatter", "there is one replica"),
    ],
)
def test_what_cannot_be_combined(strategy, arguments, message):
    with pytest.raises(UserError, match=message):
        SPECS[strategy].require(config(strategy, *arguments.split()), {})


@pytest.mark.parametrize(
    "strategy, arguments",
    [
        ("ddp", ""),
        ("ddp", "--static_graph"),
        ("ddp", "--static_graph --gradient_accumulation_steps 2 --gradient_sync every"),
        ("fsdp", ""),
        ("fsdp", "--dp_size 4 --tp_size 1 --reshard_after_forward 2"),
        ("fsdp", "--dp_size 4 --dp_replicate 4 --gradient_sync scatter"),
    ],
)
def test_what_can_be_combined(strategy, arguments):
    SPECS[strategy].require(config(strategy, *arguments.split()), {})


@pytest.mark.parametrize(
    "strategy, arguments, message",
    [
        ("ddp", "--gradient_as_bucket_view yes", "neither true nor false"),
        ("ddp", "--bucket_cap_mb 0", "out of range; it must be at least"),
        ("ddp", "--bucket_cap_mb nan", "out of range; it must be at least"),
        ("ddp", "--dp_replicate 2", "unrecognized arguments"),
        ("fsdp", "--reshard_after_forward 1", "must be at least 2"),
        ("fsdp", "--reshard_after_forward yes", "not a whole number"),
        ("fsdp", "--dp_replicate 0", "must be at least 1"),
        ("fsdp", "--static_graph", "unrecognized arguments"),
    ],
)
def test_a_value_that_is_none_is_refused(strategy, arguments, message):
    with pytest.raises(UserError, match=message):
        config(strategy, *arguments.split())


def test_compression_is_called_what_it_is():
    model = describe(SHAPE)
    compressed = expected_contract(config("ddp", "--compress_gradients", "bf16"), SHAPE, model)
    assert compressed["reduction_dtype"] == ["torch.bfloat16"]
    assert expected_contract(config("ddp"), SHAPE, model)["reduction_dtype"] == ["torch.float32"]


SHAPE = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 256,
    "tie_word_embeddings": True,
}

# All see the same global batches: four ranks along dp, or two with twice the batch.
FOUR, TWO = ("--dp_size", "4", "--batch_size", "1"), ("--dp_size", "2", "--batch_size", "2")
COMBINATIONS = {
    "ddp, static, small buckets": (
        "ddp",
        FOUR,
        "--static_graph --gradient_sync every --bucket_cap_mb 0.05 --gradient_as_bucket_view false",
    ),
    "ddp, unused parameters": ("ddp", FOUR, "--find_unused_parameters"),
    "fsdp, replicas of shards": (
        "fsdp",
        (*FOUR, "--tp_size", "1"),
        "--dp_replicate 2 --gradient_sync scatter",
    ),
    "fsdp, replicas, cut over tp": (
        "fsdp",
        (*TWO, "--tp_size", "2"),
        "--dp_replicate 2 --gradient_sync every --cpu_offload --wrap model",
    ),
    "fsdp, resharded to two": (
        "fsdp",
        (*FOUR, "--tp_size", "1"),
        "--reshard_after_forward 2 --prefetch 2 --cpu_offload",
    ),
    "fsdp, resharded, cut over tp": (
        "fsdp",
        (*TWO, "--tp_size", "2"),
        "--reshard_after_forward true --prefetch 1",
    ),
}
COMMON = ["--seq_length", "32", "--gradient_accumulation_steps", "2", "--max_grad_norm", "0.5"]
STEPS = ["--debug_steps", "2", "--capture_steps", "2", "--model_name", "tiny-qwen2-odd-vocab"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Two steps of every combination on four ranks, of DDP, and the float64 reference of all."""
    folder = tmp_path_factory.mktemp("options")

    def job(strategy, name, *arguments):
        own = ["--capture_dir", str(folder / name), "--loss_output_dir", str(folder / name / "losses")]
        return {"strategy": strategy, "arguments": [*COMMON, *STEPS, *own, *arguments]}

    runs = [job(s, name, *mesh, *flags.split()) for name, (s, mesh, flags) in COMBINATIONS.items()]
    dumps = [str(folder / name / strategy) for name, (strategy, _, _) in COMBINATIONS.items()]
    reference = {**job(jobs.REFERENCE, "plain", *FOUR), "replays": dumps}
    groups = [(4, [job("ddp", "plain", *FOUR, "--control"), *runs]), (None, [reference])]
    jobs.start_all_groups(groups, folder / "work")
    return folder


@pytest.mark.parametrize("name", COMBINATIONS)
def test_every_combination_computes_the_same(trained, name):
    strategy, plain = COMBINATIONS[name][0], trained / "plain"
    result = compare_dumps(
        Dump(plain / "reference"),
        {"ddp": Dump(plain / "ddp"), "it": Dump(trained / name / strategy)},
        {"ddp": Dump(plain / "replay_ddp"), "it": Dump(trained / name / f"replay_{strategy}")},
    )
    assert result.verdict("it") == "PASS", result.runs["it"].failures[:3]
    baseline = history.read(history_file(plain / "losses", "ddp"))
    other = history.read(history_file(trained / name / "losses", strategy))
    curves.require_comparable_curves(baseline, other)
    control = history.read(history_file(plain / "losses", CONTROL))
    assert curves.compare_curves(baseline, other, curves.tolerance_for(baseline, control)).passed


# option -> a value that is not the default, and what else it needs; and the entry of the contract that shows it
NOT_PASSED_ON = {
    "static_graph": ("ddp", "--static_graph --gradient_accumulation_steps 1", "sharding.static_graph"),
    "find_unused_parameters": ("ddp", "--find_unused_parameters", "sharding.find_unused_parameters"),
    "gradient_as_bucket_view": ("ddp", "--gradient_as_bucket_view false", "sharding.gradient_as_bucket_view"),
    "bucket_cap_mb": ("ddp", "--bucket_cap_mb 3", "sharding.bucket_bytes"),
    "compress_gradients": ("ddp", "--compress_gradients bf16", "reduction_dtype"),
    "gradient_sync": ("ddp", "--gradient_sync every", "sharding.gradients_of_micro_batches"),
    "reshard_after_forward": ("fsdp", "--reshard_after_forward true", "sharding.reshard_after_forward"),
    "dp_replicate": ("fsdp", "--dp_replicate 2", "sharding.replicas"),
    "cpu_offload": ("fsdp", "--cpu_offload", "sharding.offloaded"),
    "prefetch": ("fsdp", "--prefetch 1", "sharding.prefetch"),
    "gradient_sync, sharded": ("fsdp", "--gradient_sync every", "sharding.gradients_of_micro_batches"),
    "wrap": ("fsdp", "--wrap model", "sharding.wrap"),
    "sequence_parallel": (
        "fsdp",
        "--dp_size 1 --tp_size 2 --sequence_parallel",
        "sharding.positions_in_norms",
    ),
    "pp_schedule": (
        "fsdp",
        "--dp_size 1 --pp_size 2 --gradient_sync every --pp_schedule gpipe",
        "cuts.pp.schedule",
    ),
    "pp_microbatches": (
        "fsdp",
        "--dp_size 1 --pp_size 2 --gradient_sync every --batch_size 4 --pp_microbatches 2",
        "cuts.pp.microbatches",
    ),
}


@pytest.fixture(scope="module")
def not_passed_on(tmp_path_factory):
    """Every option was asked for, and the library was told its default."""
    folder = tmp_path_factory.mktemp("defaults")
    calls = []
    for name, (strategy, flags, _) in NOT_PASSED_ON.items():
        mesh = [*TWO, *(["--tp_size", "1"] if strategy == "fsdp" else [])]
        arguments = [*COMMON, *mesh, "--debug_steps", "1", *flags.split()]
        run = {"strategy": strategy, "fault": "options are not passed on", "arguments": arguments}
        calls.append(("jobs:refused", name, run))
    run_groups([(2, "jobs:in_turn", folder, calls)])
    return folder


@pytest.mark.parametrize("name", NOT_PASSED_ON)
def test_a_run_that_got_the_default_stops(not_passed_on, name):
    for rank in range(2):
        said = (not_passed_on / name / f"error{rank}.txt").read_text()
        assert f"the live objects contradict the options: {NOT_PASSED_ON[name][2]} is " in said, said


def test_every_option_is_tried_above():
    for strategy in ("ddp", "fsdp"):
        tried = {name.split(",")[0] for name, (its, _, _) in NOT_PASSED_ON.items() if its == strategy}
        assert tried == set(vars(SPECS[strategy].options()))
