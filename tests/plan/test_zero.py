"""ZeRO stages and offload: what DeepSpeed is told. What is refused: test_options.py. In real runs: test_combinations.py."""

import importlib.metadata
import json
import shlex

import pytest
import torch
from compared import compared
from ranks import ROOT

from lockstep.dumps.dump import Dump
from lockstep.faults import CATALOGUE, applies_to
from lockstep.ground import origin
from lockstep.ground.errors import UserError
from lockstep.inputs.architectures import BUILT_IN
from lockstep.plan import deepspeed, deepspeed_file, zero
from lockstep.plan.command_line import parse_config
from lockstep.plan.strategies import SPECS
from lockstep.running import jobs
from lockstep.training import preflight


def config(*arguments, strategy="deepspeed"):
    return parse_config(strategy, ["--device", "cpu", *arguments])


def told(tmp_path, content, *arguments):
    """What DeepSpeed is told with a user's file of this content."""
    path = tmp_path / "mine.json"
    path.write_text(content)
    parsed = config("--deepspeed_config", str(path), *arguments)
    parsed.spec.require(parsed, BUILT_IN["tiny-qwen2"])
    return json.loads(deepspeed_file.text(parsed, BUILT_IN["tiny-qwen2"]))


def test_a_users_file_is_filled_in(tmp_path):
    """As transformers' Trainer does, and ZeRO's stage comes from the file alone."""
    content = """{
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "weight_decay": "auto"}},
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": true,
            "reduce_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
            "offload_optimizer": {"device": "cpu", "pin_memory": false}
        },
        "tensor_parallel": {"vocab_parallel_lm_head": false},
        "wall_clock_breakdown": false
    }"""
    resolved = told(tmp_path, content, "--batch_size", "3")
    assert resolved["train_micro_batch_size_per_gpu"] == 3 and resolved["gradient_clipping"] == 1.0
    assert resolved["zero_optimization"] == {
        "stage": 3,
        "overlap_comm": True,
        "reduce_bucket_size": 64 * 64,
        "stage3_param_persistence_threshold": 640,
        "offload_optimizer": {"device": "cpu", "pin_memory": False},
    }
    assert resolved["wall_clock_breakdown"] is False and "optimizer" not in resolved
    assert resolved["tensor_parallel"] == {"autotp_size": 2, "vocab_parallel_lm_head": False}
    assert '"auto"' not in json.dumps(resolved)


CONTRADICTIONS = {  # a user's file -> what is said of it
    '{"train_batch_size": 99}': r"train_batch_size is 99, and must be 16 \(--batch_size, .* and --dp_size\); write .auto.",
    '{"zero_optimization": {"stage": 7}}': "zero_optimization.stage must be one of 0, 1, 2, 3",
    '{"zero_optimization": {"offload_optimizer": null}}': "offload_optimizer is null, it must be an object",
    '{"zero_optimization": {"compute_grad_norm": false}}': r"is false, and must be true \(in every run\)",
    '{"zero_optimization": {"allgather_bucket_size": "auto"}}': "no flag gives it a value",
    '{"zero_optimization": {"cpu_offload": true}}': "cpu_offload: write offload_optimizer",
    '{"zero_optimization": {"stage": 2, "overlapcomm": true}}': "mine.json: zero_optimization.overlapcomm is no key of DeepSpeed's; correct it",
    '{"optimizer": {"params": {"lr": 0.5}}}': r"lr is 0.5, and must be .* \(--learning_rate\)",
    '{"optimizer": {"params": {"torch_adam": true}}}': "gives DeepSpeed its own optimizer",
    '{"data_types": {"grad_accum_dtype": "bf16"}}': r'is "bf16", and must be "fp32" \(--precision\)',
    '{"tensor_parallel": {"autotp_size": 4}}': r"is 4, and must be 2 \(--tp_size\)",
    '{"scheduler": {"type": "WarmupLR"}}': "leave the section out, and give --lr_schedule and --warmup_steps",
    '{"amp": {"enabled": true}}': "amp: Lockstep has --precision",
    '{"gradient_cliping": 1.0}': "gradient_cliping is no key of DeepSpeed's",
    "[]": "must be a JSON object",
    }  # fmt: skip


@pytest.mark.parametrize("content, message", CONTRADICTIONS.items())
def test_a_users_file_that_contradicts_the_flags(tmp_path, content, message):
    with pytest.raises(UserError, match=message) as raised:
        told(tmp_path, content)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "content, arguments, message",
    [
        (
            '{"zero_optimization": {"stage": 2}}',
            "--zero_stage 3",
            r"stage is 2, and must be 3 \(--zero_stage",
        ),
        ('{"bf16": {"enabled": true}}', "--precision bf16", "keeps float32 master weights"),
        (
            '{"seq_parallel_communication_data_type": "bf16"}',
            "--sp_size 2 --tp_size 1",
            'is "bf16", and must be "fp32"',
        ),
        (
            '{"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/a"}}}',
            "--nvme_path /b",
            r'nvme_path is "/a", and must be "/b" \(--nvme_path\)',
        ),
    ],
)
def test_a_users_file_that_contradicts_one_flag(tmp_path, content, arguments, message):
    with pytest.raises(UserError, match=message):
        told(tmp_path, content, *arguments.split())


def test_empty_sections_ask_for_nothing(tmp_path):
    parsed = told(tmp_path, '{"zero_optimization": {}, "bf16": {}, "tensor_parallel": {}}')
    assert parsed == deepspeed_file.of_flags(config())


def test_what_earlier_versions_refuse_is_left_out_where_it_is_the_default():
    told = deepspeed_file.resolved(config("--tp_size", "1"), hidden_size=64)
    assert told["tensor_parallel"] == {"autotp_size": 1} and told["bf16"] == {"enabled": False}
    needed = deepspeed_file.resolved(config("--precision", "bf16"), hidden_size=64)
    assert needed["tensor_parallel"]["vocab_parallel_lm_head"] and len(needed["bf16"]) == 3


def test_a_version_that_does_not_know_what_it_is_told(monkeypatch):
    """In one line, before anything is started; what it need not know, it need not be told."""
    from deepspeed.runtime.config_utils import DeepSpeedConfigModel
    from deepspeed.runtime.tensor_parallel import config as tensor_parallel

    class Earlier(DeepSpeedConfigModel):
        autotp_size: int = 0

    monkeypatch.setattr(tensor_parallel, "TPTrainingConfig", Earlier)
    two, one = config("--tp_size", "2"), config("--tp_size", "1")
    architecture = BUILT_IN["tiny-qwen2"]
    two.spec.require(two, architecture)  # the version tested is not looked at
    monkeypatch.setattr(
        origin, "versions", lambda: {"deepspeed": "9.9", "torch": "1.0", "transformers": "5.23.0"}
    )
    one.spec.require(one, architecture)
    here = importlib.metadata.version("deepspeed")
    said = f"^deepspeed {here} found, tested with 9.9: tensor_parallel.vocab_parallel_lm_head is no key of DeepSpeed's; install"
    with pytest.raises(UserError, match=said):
        two.spec.require(two, architecture)
    torch = importlib.metadata.version("torch").split("+")[0]
    note = f"torch {torch} found, tested with 1.0; deepspeed {here} found, tested with 9.9: what follows may depend on it"
    assert preflight.notes(config()) == [note]
    assert preflight.notes(config(strategy="fsdp"))[0].startswith(f"torch {torch} found, tested with 1.0: ")


def test_the_versions_tested_are_those_required():
    assert origin.versions()["deepspeed"] == importlib.metadata.version("deepspeed")
    assert {"torch", "transformers", "ray"} < origin.versions().keys() and not origin.difference("torch")


@pytest.mark.parametrize("further", ["--precision autocast", "--precision fp32 --tp_size 1"])
@pytest.mark.parametrize("name", ("zero1", "zero2", "zero3", "zero_offload", "zero_infinity"))
def test_the_shipped_files_are_what_the_flags_ask_for(tmp_path, name, further):
    """With any number of ranks, batch size, clipping and precision."""
    path = ROOT / "studies" / "deepspeed" / f"{name}.json"
    more = ["--dp_size", "3", "--batch_size", "5", "--max_grad_norm", "0.3", *further.split()]
    if name == "zero_infinity":
        more += ["--nvme_path", str(tmp_path)]
    parsed = config("--deepspeed_config", str(path), *more)
    zero.require(parsed)
    flags = deepspeed_file.of_flags(parsed)
    assert deepspeed_file.resolved(parsed, hidden_size=64) == flags
    assert flags["zero_optimization"]["stage"] == json.loads(path.read_text())["zero_optimization"]["stage"]


def test_a_file_is_read_once(tmp_path):
    """Where the run is started; what it says is recorded, where it lies is not."""
    path = tmp_path / "mine.json"
    path.write_text('{"zero_optimization": {"stage": 2}}')
    parsed = config("--deepspeed_config", str(path))
    path.unlink()
    assert deepspeed_file.resolved(parsed, hidden_size=64)["zero_optimization"]["stage"] == 2
    assert parsed.as_dict()["own"]["deepspeed_config"] == {"zero_optimization": {"stage": 2}}


def test_without_libaio_one_line_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "false")  # a compiler that cannot link it
    with pytest.raises(UserError, match="install the package libaio-dev"):
        deepspeed._require_libaio()


def test_the_faults_of_one_strategy_apply_to_no_other():
    own = [fault for fault in CATALOGUE.values() if fault.only]
    assert {fault.only for fault in own} == {"deepspeed", "fsdp"}
    for fault in own:
        assert [row.name for row in SPECS.values() if applies_to(fault, row)] == [fault.only]


def test_zero_infinity_on_a_disk(tmp_path, request):
    """Weights and optimizer state on NVMe. DeepSpeed leaves what is smaller than 1 MiB in memory, so this embedding is larger. Only with
    --all: the first run builds an extension for four minutes, with libaio."""
    if not request.config.getoption("--all"):
        pytest.skip("only with --all")
    try:
        deepspeed._require_libaio()
    except UserError as error:
        pytest.skip(str(error))
    (tmp_path / "model").mkdir()
    larger = {**BUILT_IN["tiny-qwen2"], "vocab_size": 16384}
    (tmp_path / "model" / "config.json").write_text(json.dumps(larger))
    common = shlex.split("--batch_size 2 --seq_length 32 --dp_size 2 --debug_steps 2 --capture_steps 2")
    common += ["--model_name", str(tmp_path / "model"), "--capture_dir", str(tmp_path)]
    common += ["--init_weights_path", str(tmp_path / "weights.safetensors")]
    common += ["--loss_output_dir", str(tmp_path / "losses")]
    offload = ["--tp_size", "1", "--zero_stage", "3", "--nvme_path", str(tmp_path / "disk")]
    offload += ["--offload_optimizer", "nvme", "--offload_param", "nvme"]
    trained = [
        {"strategy": "ddp", "arguments": [*common, "--save_init_weights"]},
        {"strategy": "deepspeed", "arguments": [*common, *offload]},
    ]
    replays = [str(tmp_path / name) for name in ("ddp", "deepspeed")]
    reference = {"strategy": jobs.REFERENCE, "arguments": common, "replays": replays}
    jobs.start_all_groups([(2, trained), (None, [reference])], tmp_path / "work")
    result = compared(tmp_path, deepspeed=tmp_path / "deepspeed")
    assert result.verdict("deepspeed") == "PASS", result.runs["deepspeed"].failures[:3]
    sharding = Dump(tmp_path / "deepspeed").manifest["contract"]["sharding"]
    assert (sharding["offload_optimizer"], sharding["offload_param"]) == ("nvme", "nvme")
    written = {path.name for path in (tmp_path / "disk").rglob("*.swp") if path.stat().st_size > 2**20}
    assert "0_param.tensor.swp" in written and any(name.startswith("exp_avg_sq") for name in written), written


def test_zero_3_changes_no_later_run_in_its_process(tmp_path):
    """It adds biases in float32 under autocast, and leaves this `linear` in torch (findings/deepspeed_zero3_linear.py). So its own biases are
    rounded less, which is right by the reference."""
    common = shlex.split("--batch_size 2 --seq_length 32 --dp_size 2 --debug_steps 2 --capture_steps 2")
    common += shlex.split("--precision autocast --learning_rate 1e-2")
    common += ["--capture_dir", str(tmp_path), "--loss_output_dir", str(tmp_path / "losses")]
    trained = [
        {"strategy": "ddp", "arguments": common},
        {"strategy": "deepspeed", "arguments": [*common, "--tp_size", "1", "--zero_stage", "3"]},
        {"strategy": "ddp", "arguments": [*common, "--run_name", "later"]},
    ]
    jobs.start_all_groups(
        [(2, trained), (None, [{"strategy": "reference", "arguments": common}])], tmp_path / "work"
    )
    result = compared(tmp_path, deepspeed=tmp_path / "deepspeed")
    assert result.verdict("deepspeed") == "PASS", result.runs["deepspeed"].failures[:3]
    first, later, zero_3 = (Dump(tmp_path / name) for name in ("ddp", "later", "deepspeed"))
    biased = "forward/model.layers.0.self_attn.q_proj"
    assert all(
        torch.equal(first.tensor(2, name), later.tensor(2, name)) for name in first.steps[2]["tensors"]
    )
    assert not torch.equal(first.tensor(2, biased), zero_3.tensor(2, biased))
