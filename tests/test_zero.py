"""ZeRO stages and offload: which combinations are refused, and that the live engine is what was asked for."""

import importlib.metadata
import json

import pytest
from ranks import ROOT, run_groups

from lockstep.dumps import history
from lockstep.dumps.dump import Dump
from lockstep.faults import CATALOGUE, applies_to
from lockstep.ground import origin
from lockstep.ground.errors import UserError
from lockstep.inputs.architectures import BUILT_IN
from lockstep.plan import deepspeed, zero
from lockstep.plan import deepspeed_file as configuration
from lockstep.plan.command_line import parse_config
from lockstep.plan.config import CONTROL, history_file
from lockstep.plan.strategies import SPECS
from lockstep.running import jobs
from lockstep.training import preflight
from lockstep.verdict import loss_curves as curves
from lockstep.verdict.comparison import compare_dumps


def config(*arguments, strategy="deepspeed"):
    return parse_config(strategy, ["--device", "cpu", *arguments])


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--zero_stage 0 --precision bf16", "float32 copies"),
        ("--zero_stage 0 --offload_optimizer cpu", "nothing sharded to offload"),
        ("--zero_stage 2 --offload_param cpu", "at stage 3 alone"),
        ("--zero_stage 2 --offload_optimizer nvme --nvme_path x", "add --zero_stage 3"),
        ("--zero_stage 3 --offload_optimizer nvme", "needs --nvme_path"),
        ("--nvme_path x", "nothing is offloaded to nvme"),
        ("--precision bf16 --offload_optimizer cpu", "with its own optimizer alone"),
        ("--precision mixed", "would also accumulate gradients in bfloat16"),
        ("--ema_decay 0.9", "keeps no average of the weights"),
    ],
)
def test_what_cannot_be_combined(arguments, message):
    with pytest.raises(UserError, match=message):
        zero.require(config(*arguments.split()))


@pytest.mark.parametrize(
    "arguments",
    ["", "--zero_stage 0", "--zero_stage 3 --offload_param cpu", "--zero_stage 2 --offload_optimizer cpu"],
)
def test_what_can_be_combined(arguments):
    zero.require(config(*arguments.split()))


def test_other_strategies_have_no_such_flags_and_record_none():
    with pytest.raises(UserError, match="unrecognized arguments: --zero_stage 2"):
        config("--zero_stage", "2", strategy="fsdp")
    assert "zero_stage" not in config(strategy="fsdp").own and config().as_dict()["own"]["zero_stage"] == 1


COMBINATIONS = {  # stage 1 is the default, which other tests run
    "stage 0": "--zero_stage 0",
    "stage 2": "--zero_stage 2",
    "stage 3": "--zero_stage 3",
    "stage 2, optimizer on the CPU": "--zero_stage 2 --offload_optimizer cpu",
    "stage 3, all on the CPU": "--zero_stage 3 --offload_optimizer cpu --offload_param cpu",
    "stage 3, TP=1": "--zero_stage 3",
    "stage 2, a user's file": f"--deepspeed_config {ROOT}/studies/deepspeed/zero_offload.json",
    "stage 3, autocast": "--zero_stage 3 --precision autocast",
}
FLAGS = ["--batch_size", "2", "--seq_length", "32", "--gradient_accumulation_steps", "2", "--dp_size", "2"]
STEPS = ["--debug_steps", "2", "--capture_steps", "2", "--max_grad_norm", "0.5"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Two steps of DDP, of every stage and offload with DP=2, and the float64 reference of all. No C++ compiler is on the PATH."""
    folder = tmp_path_factory.mktemp("zero")
    for name in ("no programs", "extensions"):
        (folder / name).mkdir()

    def job(strategy, name, *arguments):
        own = ["--capture_dir", str(folder / name), "--loss_output_dir", str(folder / name / "losses")]
        return {"strategy": strategy, "arguments": [*FLAGS, *STEPS, *own, *arguments]}

    runs = {1: [], 2: []}
    for name, flags in COMBINATIONS.items():
        tp = 1 if name.endswith("TP=1") else 2
        runs[tp].append(job("deepspeed", name, "--tp_size", str(tp), *flags.split()))
    groups = [(2, runs[1]), (4, runs[2])]
    for name in ("ddp", "ddp, autocast"):
        precision = ["--precision", "autocast"] if name != "ddp" else []
        replays = [str(folder / other / "deepspeed") for other in COMBINATIONS if baseline_of(other) == name]
        reference = {**job(jobs.REFERENCE, name, *precision), "replays": replays}
        groups += [(2, [job("ddp", name, *precision, "--control")]), (None, [reference])]
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PATH", str(folder / "no programs"))
        environment.setenv("TORCH_EXTENSIONS_DIR", str(folder / "extensions"))
        jobs.start_all_groups(groups, folder / "work")
    return folder


def test_no_extension_is_built(trained):
    assert list((trained / "extensions").iterdir()) == []


def baseline_of(name):
    return "ddp, autocast" if "autocast" in name else "ddp"


@pytest.mark.parametrize("name", COMBINATIONS)
def test_every_stage_computes_the_same(trained, name):
    ddp, folder = trained / baseline_of(name), trained / name
    result = compare_dumps(
        Dump(ddp / "reference"),
        {"ddp": Dump(ddp / "ddp"), "deepspeed": Dump(folder / "deepspeed")},
        {"ddp": Dump(ddp / "replay_ddp"), "deepspeed": Dump(folder / "replay_deepspeed")},
    )
    assert result.verdict("deepspeed") == "PASS", result.runs["deepspeed"].failures[:3]
    baseline = history.read(history_file(ddp / "losses", "ddp"))
    other = history.read(history_file(folder / "losses", "deepspeed"))
    curves.require_comparable_curves(baseline, other)
    control = history.read(history_file(ddp / "losses", CONTROL))
    assert curves.compare_curves(baseline, other, curves.tolerance_for(baseline, control)).passed


@pytest.mark.parametrize(
    "run, said",
    [*((str(stage), "sharding.") for stage in (1, 2, 3)), ("collectives", "sharding.collectives is")],
)
def test_a_run_that_got_something_else_stops(others, run, said):
    for rank in range(2):
        error = (others / run / f"error{rank}.txt").read_text()
        assert f"the live objects contradict the options: {said}" in error, error


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    """Every stage from 1 on was asked for, and DeepSpeed was told the one before it; gloo, and it has an operator of its own."""
    folder = tmp_path_factory.mktemp("stages")
    calls = []
    for stage in (1, 2, 3):
        arguments = [*FLAGS, "--tp_size", "1", "--debug_steps", "1", "--zero_stage", str(stage)]
        run = {"strategy": "deepspeed", "fault": "another ZeRO stage", "arguments": arguments}
        calls.append(("jobs:refused", str(stage), run))
    arguments = [*FLAGS, "--tp_size", "1", "--debug_steps", "1"]
    run = {"strategy": "deepspeed", "fault": "collectives of its own", "arguments": arguments}
    calls.append(("jobs:refused", "collectives", run))  # last: the process keeps them
    run_groups([(2, "jobs:in_turn", folder, calls)])
    return folder


@pytest.mark.parametrize("name", COMBINATIONS)
def test_the_contract_says_what_is_sharded(trained, name):
    sharding = Dump(trained / name / "deepspeed").manifest["contract"]["sharding"]
    stage = int(name[6])
    assert sharding["optimizer_shards"] == (2 if stage else 1)
    assert sharding["offload_optimizer"] == ("cpu" if "CPU" in name or "file" in name else "none")
    assert (sharding["gradients_sharded"], sharding["weights_sharded"]) == (stage >= 2, stage == 3)
    assert sharding["offload_param"] == ("cpu" if "all on" in name else "none")
    assert sharding["collectives"] == "gloo"


def told(tmp_path, content, *arguments):
    """What DeepSpeed is told with a user's file of this content."""
    path = tmp_path / "mine.json"
    path.write_text(content)
    parsed = config("--deepspeed_config", str(path), *arguments)
    parsed.spec.require(parsed, BUILT_IN["tiny-qwen2"])
    return json.loads(configuration.text(parsed, BUILT_IN["tiny-qwen2"]))


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
    '{"train_micro_batch_size_per_gpu": 4}': r"is 4, and must be 8 \(--batch_size\)",
    '{"zero_optimization": {"stage": 7}}': "zero_optimization.stage must be one of 0, 1, 2, 3",
    '{"zero_optimization": {"stage": 2.0}}': "must be one of 0, 1, 2, 3",
    '{"zero_optimization": {"offload_param": {"device": "disk"}}}': "must be one of none, cpu, nvme",
    '{"zero_optimization": {"offload_optimizer": null}}': "offload_optimizer is null, it must be an object",
    '{"zero_optimization": true}': "zero_optimization is true, it must be an object",
    '{"zero_optimization": {"compute_grad_norm": false}}': r"is false, and must be true \(in every run\)",
    '{"zero_optimization": {"allgather_bucket_size": "auto"}}': "no flag gives it a value",
    '{"zero_optimization": {"aio": {"block_size": 1}}}': "zero_optimization.aio is no key of DeepSpeed's",
    '{"zero_optimization": {"cpu_offload": true}}': "cpu_offload: write offload_optimizer",
    '{"zero_optimization": {"stage": 2, "overlapcomm": true}}': "mine.json: zero_optimization.overlapcomm is no key of DeepSpeed's; correct it",
    '{"zero_optimization": {"offload_optimizer": {"device": "cpu", "pin": true}}}': "zero_optimization.offload_optimizer.pin is no key",
    '{"zero_optimization": {"overlap_comm": "often"}}': 'zero_optimization.overlap_comm is "often": .* boolean',
    '{"optimizer": {"type": "Lion"}}': r'optimizer.type is "Lion", and must be "AdamW" \(--optimizer\)',
    '{"optimizer": {"params": {"lr": 0.5}}}': r"lr is 0.5, and must be .* \(--learning_rate\)",
    '{"optimizer": {"params": {"torch_adam": true}}}': "gives DeepSpeed its own optimizer",
    '{"gradient_accumulation_steps": true}': "gradient_accumulation_steps is true, and must be 1",
    '{"bf16": {"enabled": true}}': r"bf16.enabled is true, and must be false \(--precision\)",
    '{"fp16": {"enabled": true}}': "fp16.enabled is true, and must be false",
    '{"managed_gradient_accumulation": false}': "is false, and must be true",
    '{"data_types": {"grad_accum_dtype": "bf16"}}': r'is "bf16", and must be "fp32" \(--precision\)',
    '{"tensor_parallel": {"autotp_size": 4}}': r"is 4, and must be 2 \(--tp_size\)",
    '{"tensor_parallel": {"preset_model": "qwen3"}}': '"qwen3" is no preset of DeepSpeed\'s; correct it',
    '{"tensor_parallel": {"autotp": 2}}': "tensor_parallel.autotp is no key",
    '{"timers": {"throughput": {"sync": true}}}': "timers.throughput.sync is no key",
    '{"csv_monitor": {"on": true}}': "csv_monitor.on is no key",
    '{"comms_logger": null}': "comms_logger is null: ",
    '{"scheduler": {"type": "WarmupLR"}}': "leave the section out, and give --lr_schedule and --warmup_steps",
    '{"amp": {"enabled": true}}': "amp: Lockstep has --precision",
    '{"gradient_cliping": 1.0}': "gradient_cliping is no key of DeepSpeed's",
    '{"bfloat16": {"enabled": true}}': "bfloat16 is no key",
    '{"gradient_clipping": {"x": 1}}': 'gradient_clipping is {"x": 1}, and must be 1.0',
    "[]": "must be a JSON object",
    "{": "mine.json",
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
    assert parsed == configuration.of_flags(config())


def test_what_earlier_versions_refuse_is_left_out_where_it_is_the_default():
    told = configuration.resolved(config("--tp_size", "1"), hidden_size=64)
    assert told["tensor_parallel"] == {"autotp_size": 1} and told["bf16"] == {"enabled": False}
    needed = configuration.resolved(config("--precision", "bf16"), hidden_size=64)
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
    flags = configuration.of_flags(parsed)
    assert configuration.resolved(parsed, hidden_size=64) == flags
    assert flags["zero_optimization"]["stage"] == json.loads(path.read_text())["zero_optimization"]["stage"]


def test_a_file_is_read_once(tmp_path):
    """Where the run is started; what it says is recorded, where it lies is not."""
    path = tmp_path / "mine.json"
    path.write_text('{"zero_optimization": {"stage": 2}}')
    parsed = config("--deepspeed_config", str(path))
    path.unlink()
    assert configuration.resolved(parsed, hidden_size=64)["zero_optimization"]["stage"] == 2
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
    common = [*FLAGS, *STEPS, "--model_name", str(tmp_path / "model"), "--capture_dir", str(tmp_path)]
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
    result = compare_dumps(
        Dump(tmp_path / "reference"),
        {name: Dump(tmp_path / name) for name in ("ddp", "deepspeed")},
        {name: Dump(tmp_path / f"replay_{name}") for name in ("ddp", "deepspeed")},
    )
    assert result.verdict("deepspeed") == "PASS", result.runs["deepspeed"].failures[:3]
    sharding = Dump(tmp_path / "deepspeed").manifest["contract"]["sharding"]
    assert (sharding["offload_optimizer"], sharding["offload_param"]) == ("nvme", "nvme")
    written = {path.name for path in (tmp_path / "disk").rglob("*.swp") if path.stat().st_size > 2**20}
    assert "0_param.tensor.swp" in written and any(name.startswith("exp_avg_sq") for name in written), written
