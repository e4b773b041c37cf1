"""The options that only some strategies have: each is passed on and read back. That none changes a number: test_combinations.py."""

import pytest
from ranks import run_groups

from lockstep.ground.errors import UserError
from lockstep.inputs.architectures import BUILT_IN
from lockstep.inputs.shapes import describe
from lockstep.plan.command_line import parse_config
from lockstep.plan.contract import expected_contract
from lockstep.plan.strategies import SPECS
from lockstep.training.preflight import load_inputs


def config(strategy, *arguments):
    return parse_config(strategy, ["--device", "cpu", *arguments])


REFUSED = [
    ("ddp", "--static_graph --gradient_accumulation_steps 2", "add --gradient_sync every"),
    ("fsdp", "--dp_size 4 --dp_replicate 3", "does not divide --dp_size 4"),
    ("fsdp", "--dp_size 4 --tp_size 1 --reshard_after_forward 3", "must divide the 4 shards"),
    ("fsdp", "--dp_size 4 --tp_size 1 --reshard_after_forward 4", "must divide the 4 shards .* be less"),
    ("fsdp", "--dp_size 4 --tp_size 1 --reshard_after_forward 2 --dp_replicate 2", "the 2 shards"),
    ("fsdp", "--dp_size 4 --tp_size 2 --reshard_after_forward 2", "with tensor parallelism"),
    ("fsdp", "--prefetch 1 --wrap model", "nothing to gather ahead"),
    ("fsdp", "--gradient_sync scatter", "there is one replica"),
    ("ddp", "--gradient_as_bucket_view yes", "neither true nor false"),
    ("ddp", "--bucket_cap_mb 0", "out of range; it must be at least"),
    ("fsdp", "--reshard_after_forward 1", "must be at least 2"),
    ("fsdp", "--reshard_after_forward yes", "not a whole number"),
    ("fsdp", "--static_graph", "unrecognized arguments"),
    ("fsdp", "--zero_stage 2", "unrecognized arguments: --zero_stage 2"),
    ("deepspeed", "--zero_stage 0 --precision bf16", "float32 copies"),
    ("deepspeed", "--zero_stage 0 --offload_optimizer cpu", "nothing sharded to offload"),
    ("deepspeed", "--zero_stage 2 --offload_param cpu", "at stage 3 alone"),
    ("deepspeed", "--zero_stage 2 --offload_optimizer nvme --nvme_path x", "add --zero_stage 3"),
    ("deepspeed", "--zero_stage 3 --offload_optimizer nvme", "needs --nvme_path"),
    ("deepspeed", "--nvme_path x", "nothing is offloaded to nvme"),
    ("deepspeed", "--precision bf16 --offload_optimizer cpu", "with its own optimizer alone"),
    ("deepspeed", "--precision mixed", "would also accumulate gradients in bfloat16"),
    ("deepspeed", "--ema_decay 0.9", "keeps no average of the weights"),
    ("fsdp", "--tp_size 1 --pp_size 2 --batch_size 4 --pp_microbatches 3", "does not divide --batch_size 4"),
    ("fsdp", "--tp_size 1 --pp_size 4 --pp_schedule interleaved1f1b", "8 stages, and the model has 4 parts"),
    ("fsdp", "--tp_size 1 --pp_size 4 --batch_size 2", "2 micro batches, and it needs at least 4, .* or choose --pp_schedule gpipe"),
    ("fsdp", "--tp_size 1 --pp_size 2 --batch_size 5 --pp_schedule interleaved1f1b", "5 micro batches cannot be done in 2 equal rounds; make --pp_microbatches"),
    ("fsdp", "--tp_size 1 --pp_size 2 --pp_schedule zbv", "would break their tie"),
    ("fsdp", "--tp_size 1 --pp_size 2 --gradient_accumulation_steps 2", "add --gradient_sync every"),
    ("fsdp", "--tp_size 1 --pp_size 2 --wrap model", "leave them out"),
    ("fsdp", "--pp_microbatches 2", "there is no pipeline"),
    ("fsdp", "--pp_schedule 2", "invalid choice: '2'"),
    ("fsdp", "--tp_size 1 --pp_size 2 --model_name tiny-gpt2", "that are built like Llama"),
    ("fsdp", "--tp_size 1 --sequence_parallel", "add --tp_size 2"),
    ("fsdp", "--sequence_parallel --tp_size 2 --cp_size 2 --seq_length 6", "choose a multiple of 4"),
    ("fsdp", "--sequence_parallel --tp_size 2 --attn_impl eager", "leave --attn_impl out"),
    ("fsdp", "--tp_size 2 --activation_checkpointing --compile", "leave one of them out"),
    ("fsdp", "--tp_size 1 --cp_size 2 --seq_length 30", "cannot be cut into 4 equal pieces"),
    ("fsdp", "--tp_size 1 --cp_size 2 --attn_impl eager", "leave --attn_impl out"),
    ("fsdp", "--tp_size 1 --cp_size 2 --model_name tiny-mixtral", "is known for models that are built like Llama"),
    ("ddp", "--cp_size 2", "DDP has no context parallelism"),
    ("fsdp", "--sp_size 2", "unrecognized arguments: --sp_size"),
    ("deepspeed", "--pp_size 2", "DeepSpeed AutoTP has no pipeline parallelism"),
    ("deepspeed", "--sp_size 2 --tp_size 2", "add --tp_size 1"),
    ("deepspeed", "--sp_size 2 --tp_size 1 --model_name tiny-gpt2", "built like Llama"),
    ("deepspeed", "--sp_size 8 --tp_size 1", "4 heads and 2 key-value heads"),
]  # fmt: skip


def require(config):
    config.spec.require(config, load_inputs(config).architecture)


@pytest.mark.parametrize("strategy, arguments, message", REFUSED)
def test_what_cannot_be_is_refused(strategy, arguments, message):
    with pytest.raises(UserError, match=message):
        require(config(strategy, "--dp_size", "1", *arguments.split()))


@pytest.mark.parametrize(
    "strategy, arguments",
    [
        ("ddp", "--static_graph"),
        ("ddp", "--static_graph --gradient_accumulation_steps 2 --gradient_sync every"),
        ("fsdp", "--dp_size 4 --tp_size 1 --reshard_after_forward 2"),
        ("fsdp", "--dp_size 4 --dp_replicate 4 --gradient_sync scatter"),
        ("deepspeed", "--zero_stage 3 --offload_param cpu"),
        ("deepspeed", "--zero_stage 2 --offload_optimizer cpu"),
    ],
)
def test_what_can_be_combined(strategy, arguments):
    require(config(strategy, *arguments.split()))


def test_what_ignores_a_sliding_window_is_refused():
    sliding = {**BUILT_IN["tiny-mistral"], "sliding_window": 16}
    for strategy, flags in (("fsdp", "--sequence_parallel"), ("deepspeed", "--sp_size 2 --tp_size 1")):
        options = config(strategy, *flags.split())
        with pytest.raises(UserError, match="sliding window"):
            options.spec.require(options, sliding)


def test_compression_is_called_what_it_is():
    architecture = BUILT_IN["tiny-llama"]
    model = describe(architecture)
    compressed = expected_contract(config("ddp", "--compress_gradients", "bf16"), architecture, model)
    assert compressed["reduction_dtype"] == ["torch.bfloat16"]
    assert expected_contract(config("ddp"), architecture, model)["reduction_dtype"] == ["torch.float32"]


# option -> a value that is not the default, and what else it needs; and the entry of the contract that shows it
NOT_PASSED_ON = {
    "static_graph": ("ddp", "--static_graph --gradient_accumulation_steps 1", "sharding.static_graph is"),
    "find_unused_parameters": ("ddp", "--find_unused_parameters", "sharding.find_unused_parameters is"),
    "gradient_as_bucket_view": ("ddp", "--gradient_as_bucket_view false", "sharding.gradient_as_bucket_view is"),
    "bucket_cap_mb": ("ddp", "--bucket_cap_mb 3", "sharding.bucket_bytes is"),
    "compress_gradients": ("ddp", "--compress_gradients bf16", "reduction_dtype is"),
    "gradient_sync": ("ddp", "--gradient_sync every", "sharding.gradients_of_micro_batches is"),
    "reshard_after_forward": ("fsdp", "--reshard_after_forward true", "sharding.reshard_after_forward is"),
    "dp_replicate": ("fsdp", "--dp_replicate 2", "sharding.replicas is"),
    "cpu_offload": ("fsdp", "--cpu_offload", "sharding.offloaded is"),
    "prefetch": ("fsdp", "--prefetch 1", "sharding.prefetch is"),
    "gradient_sync, sharded": ("fsdp", "--gradient_sync every", "sharding.gradients_of_micro_batches is"),
    "wrap": ("fsdp", "--wrap model", "sharding.wrap is"),
    "sequence_parallel": ("fsdp", "--dp_size 1 --tp_size 2 --sequence_parallel", "sharding.positions_in_norms is"),
    "pp_schedule": ("fsdp", "--dp_size 1 --pp_size 2 --gradient_sync every --pp_schedule gpipe", "cuts.pp.schedule is"),
    "pp_microbatches": ("fsdp", "--dp_size 1 --pp_size 2 --gradient_sync every --batch_size 4 --pp_microbatches 2", "cuts.pp.microbatches is"),
    **{f"zero_stage {stage}": ("deepspeed", f"--zero_stage {stage}", "sharding.") for stage in (1, 2, 3)},
    "collectives": ("deepspeed", "", "sharding.collectives is"),  # last: the process keeps them
}  # fmt: skip
FAULTS = {"zero_stage": "another ZeRO stage", "collectives": "collectives of its own"}


@pytest.fixture(scope="module")
def not_passed_on(new_folder):
    """Every option was asked for, and the library was told its default, or the stage before; gloo, and DeepSpeed has an operator of its own."""
    folder = new_folder("defaults")
    calls = []
    for name, (strategy, flags, _) in NOT_PASSED_ON.items():
        common = "--dp_size 2 --batch_size 2 --seq_length 32 --gradient_accumulation_steps 2 --debug_steps 1"
        tp = " --tp_size 1" * (strategy != "ddp")
        fault = FAULTS.get(name.split()[0], "options are not passed on")
        run = {"strategy": strategy, "fault": fault, "arguments": f"{common}{tp} {flags}".split()}
        calls.append(("jobs:refused", name, run))
    run_groups([(2, "jobs:in_turn", folder, calls)])
    return folder


@pytest.mark.parametrize("name", NOT_PASSED_ON)
def test_a_run_that_got_something_else_stops(not_passed_on, name):
    for rank in range(2):
        said = (not_passed_on / name / f"error{rank}.txt").read_text()
        assert f"the live objects contradict the options: {NOT_PASSED_ON[name][2]}" in said, said


def test_every_option_is_tried_above():
    for strategy in ("ddp", "fsdp"):
        tried = {name.split(",")[0] for name, (its, _, _) in NOT_PASSED_ON.items() if its == strategy}
        assert tried == set(vars(SPECS[strategy].options()))
