"""The memory plan: against arithmetic by hand, against tensors that a real model saves, and against the allocator of real ranks."""

import json
import shutil
from dataclasses import replace

import allocated
import memory_plan as benchmark
import pytest
import torch
from families import built
from own_strategy import own_strategy

from extras.memory import __main__ as program
from extras.memory import activations, plan
from extras.studies import report
from lockstep.inputs.architectures import BUILT_IN
from lockstep.inputs.model import causal_lm_loss
from lockstep.plan import command_line

# Llama-3-70B's config.json
LLAMA_70B = {
    "model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
    "num_key_value_heads": 8, "vocab_size": 128256, "hidden_act": "silu", "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0, "initializer_range": 0.02, "tie_word_embeddings": False, "attention_bias": False,
    "attention_dropout": 0.0, "bos_token_id": 128000, "eos_token_id": 128001, "torch_dtype": "bfloat16",
}  # fmt: skip
# tiny-llama, by hand: embedding and head of 2048 x 64; two layers of q, o (64 x 64), k, v (32 x 64), gate, up, down (64 x 128) and two
# norms; a norm.
VOCABULARY = 2 * 2048 * 64
LAYER = 2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 128
NORMS = 5 * 64
WHOLE = VOCABULARY + 2 * LAYER + NORMS


def planned(command):
    """The plan of tiny-llama with a strategy and its flags."""
    strategy, *flags = command.split()
    config = command_line.parse_config(strategy, ["--model_name", "tiny-llama", *flags], elsewhere=True)
    return plan.of(config, BUILT_IN["tiny-llama"])


def state(found):
    """(parameters, gradients, optimizer) when the optimizer steps."""
    moment = found.moments[plan.UPDATE]
    return moment.parameters, moment.gradients, moment.optimizer


def test_whole_replicas_by_hand():
    assert state(planned("ddp --dp_size 64")) == (4 * WHOLE, 4 * WHOLE, 8 * WHOLE)
    assert state(planned("ddp --precision bf16")) == (2 * WHOLE, 2 * WHOLE, 4 * WHOLE)
    assert state(planned("ddp --optimizer sgd"))[2] == 0


def test_shards_by_hand():
    assert state(planned("fsdp --tp_size 1")) == (2 * WHOLE, 2 * WHOLE, 4 * WHOLE)
    rows = (
        2 * 683 * 64 + 2 * (2 * 22 * 64 + 2 * 11 * 64 + 2 * 43 * 64 + 22 * 128 + 2 * 22) + 22
    )  # of 3 ranks, padded
    assert state(planned("fsdp --tp_size 1 --dp_size 3")) == (4 * rows, 4 * rows, 8 * rows)
    half = (WHOLE - NORMS) // 2 + NORMS  # tp leaves the norms whole
    assert state(planned("fsdp --tp_size 2 --dp_size 1")) == (4 * half, 4 * half, 8 * half)


def test_options_of_fsdp_by_hand():
    """Of tiny-llama: what is gathered at the loss, and the shards."""
    one = "fsdp --tp_size 1"
    kept = planned(one).moments[plan.LOSS]
    assert kept.gradients == 0
    resharded = planned(f"{one} --reshard_after_forward true")
    assert resharded.moments[plan.LOSS].parameters < kept.parameters
    four = f"{one} --dp_size 4"
    assert state(planned(f"{four} --dp_replicate 2")) == state(planned(one))
    assert state(planned(four)) != state(planned(one)), "negative control: shards of four ranks"
    whole = planned(f"{one} --wrap model").moments[plan.LOSS]
    assert whole.parameters == kept.parameters == 2 * WHOLE + 4 * WHOLE
    few = f"{one} --batch_size 1 --seq_length 8 --wrap"
    layers, at_once = (planned(f"{few} {name}").moments[plan.LOSS] for name in ("layer", "model"))
    assert at_once.total > layers.total  # the flat buffer of the whole model
    mixed = planned(f"{one} --precision mixed")
    # float32 shards, bfloat16 gathered
    assert mixed.moments[plan.LOSS].parameters == 2 * WHOLE + 2 * WHOLE
    assert state(mixed) == state(planned(one))
    assert planned(f"{one} --gradient_accumulation_steps 2").moments[plan.LOSS].gradients == 4 * WHOLE
    every = f"{one} --gradient_accumulation_steps 2 --gradient_sync every"
    assert planned(every).moments[plan.LOSS].gradients == 2 * WHOLE


def test_options_of_ddp_by_hand():
    plain = planned("ddp")
    twice = planned("ddp --gradient_as_bucket_view false")
    assert state(twice) == (4 * WHOLE, 8 * WHOLE, 8 * WHOLE)
    step = plain.moments[plan.UPDATE].temporary
    # MiB; the head alone has half of one
    for cap, last in (("25", WHOLE), ("0.5", WHOLE - 2048 * 64)):
        compressed = planned(f"ddp --compress_gradients bf16 --bucket_cap_mb {cap}")
        assert compressed.moments[plan.UPDATE].temporary - step == 2 * last
    bf16, mixed = (planned(f"ddp --precision {name}").moments[plan.LOSS] for name in ("bf16", "mixed"))
    # but for the norms and the embedding, the bfloat16 copies of the weights are saved
    assert mixed.activations - bf16.activations == pytest.approx(2 * (2048 * 64 + 2 * LAYER), rel=0.01)


def test_zero_by_hand():
    """Beside the paper (arXiv 1910.02054, section 3.1): K = 12 bytes of state for each element, a share of them on each rank. Weights and
    gradients have four bytes here, not two, because they are float32."""
    found = {
        stage: state(planned(f"deepspeed --tp_size 1 --dp_size 4 --zero_stage {stage}")) for stage in range(4)
    }
    # torch's own optimizer: no copy of the weights
    assert found[0] == (4 * WHOLE, 4 * WHOLE, 8 * WHOLE)
    assert found[1][0] == found[2][0] == 4 * WHOLE
    assert found[1][2] == found[2][2] == found[3][2] == 12 * WHOLE // 4
    # the second of four shares begins in the embedding and ends in the head's beginning, after all layers
    assert found[2][1] < found[0][1]
    assert found[3][0] == 4 * WHOLE // 4 + 4 * (
        2 * LAYER + NORMS
    )  # matrices of at most 100,000 elements stay whole
    assert found[3][1] == 4 * WHOLE // 4
    assert len({found[0], found[1], found[3]}) == 3, "negative control: another stage has other numbers"


def test_a_reduce_bucket_has_its_full_size_however_small_the_model():
    """500 million elements, or what the user's file says."""
    flags = "deepspeed --tp_size 1 --zero_stage 2"
    default, small = (
        planned(f"{flags}{more}").moments[plan.END_OF_BACKWARD].temporary
        for more in ("", ' --deepspeed_config {"zero_optimization":{"reduce_bucket_size":1000000}}')
    )
    assert default - small == 4 * (500_000_000 - 1_000_000)


def test_what_is_offloaded_is_elsewhere():
    here = planned("deepspeed --tp_size 1 --zero_stage 2 --offload_optimizer cpu")
    assert state(here)[2] == 0 and here.host["optimizer"] == 12 * WHOLE // 2
    three = "deepspeed --tp_size 1 --zero_stage 3"
    disk = planned(f"{three} --offload_optimizer nvme --offload_param nvme --nvme_path disk")
    assert disk.nvme == {"optimizer": 12 * WHOLE // 2, "parameters": 4 * WHOLE // 2}
    assert disk.peak[1] < planned(three).peak[1]
    on_cpus = planned("deepspeed --tp_size 1 --zero_stage 2 --offload_optimizer cpu --device cpu")
    assert on_cpus.host == {} and state(on_cpus)[2] == 12 * WHOLE // 2


@pytest.mark.parametrize("precision", ["fp32", "autocast", "bf16"])
@pytest.mark.parametrize("attn_impl", ["sdpa", "eager"])
def test_activations_are_what_a_real_model_saves(precision, attn_impl):
    """The distinct storages that autograd saves in a real forward pass, other than weights."""
    batch, sequence = 2, 64
    architecture = {**BUILT_IN["tiny-llama"], "num_hidden_layers": 4}
    model = built(architecture, attn_impl)
    if precision == "bf16":
        model.to(torch.bfloat16)
    ids = torch.zeros(batch, sequence, dtype=torch.long)
    known = {one.untyped_storage().data_ptr() for one in (*model.parameters(), *model.buffers(), ids)}
    saved = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    saving = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with saving, torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
        loss = causal_lm_loss(model, ids, ids)
    flags = ["--batch_size", str(batch), "--seq_length", str(sequence), "--precision", precision]
    config = command_line.parse_config("ddp", [*flags, "--attn_impl", attn_impl])
    found = activations.of(config, architecture)
    assert found.saved == pytest.approx(sum(saved.values()), rel=0.01), float(loss.detach())
    longer = activations.of(replace(config, seq_length=2 * sequence), architecture)
    assert longer.saved > 1.3 * found.saved, "negative control: a longer sequence saves more"
    assert found.saved <= found.head and found.layers <= found.head


def test_a_rank_holds_its_share_of_the_heads():
    config = command_line.parse_config("fsdp", ["--tp_size", "1", "--dp_size", "1"])
    whole = activations.of(config, BUILT_IN["tiny-llama"])
    half = activations.of(replace(config, tp_size=2), BUILT_IN["tiny-llama"])
    assert whole.saved / 2 < half.saved < 0.75 * whole.saved  # norms and residuals are whole


def test_seventy_billion_parameters_on_a_thousand_ranks(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_70B))
    flags = ["--model_name", str(tmp_path), "--tp_size", "8", "--dp_size", "128", "--precision", "autocast"]
    for strategy in (["fsdp"], ["deepspeed", "--zero_stage", "3"]):
        assert program.main(["--strategy", *strategy, *flags]) == 0
        out = capsys.readouterr().out
        assert "80 layers, 1024 ranks" in out and "GPU memory of a rank" in out
        assert "262.83 GiB of main memory while each rank builds the whole model" in out


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--model_name tiny-llama", "--strategy is missing"),
        ("--strategy fsdp --cp_size 2", "what a rank holds with --cp_size is not known"),
        ("--strategy deepspeed --sp_size 2 --tp_size 1", "what a rank holds with --cp_size is not known"),
        ("--strategy fsdp --tp_size 2 --sequence_parallel", "what a rank holds with --sequence_parallel"),
        ("--strategy ddp --compile", "what a rank holds with --compile is not known"),
        ("--strategy fsdp --optimizer Adam", "what a rank holds with --optimizer Adam is not known"),
        ("--strategy fsdp --cpu_offload", "what --cpu_offload keeps on a GPU is not known"),
        ("--strategy mine.py:Mine", "what mine keeps in memory is not known"),
    ],
)
def test_usage_errors(tmp_path, monkeypatch, refusal, arguments, message):
    own_strategy(tmp_path / "mine.py", name="Mine")
    monkeypatch.chdir(tmp_path)
    assert message in refusal(program.main, arguments.split())


def test_a_studys_report_has_the_prediction(tmp_path):
    study = benchmark.study_file.read(benchmark.STUDY)
    control = benchmark.study_file.plan_control(study, study.shared, tmp_path)
    row = {
        "run": "ddp",
        "label": control.config.label,
        "outcome": "control",
        "first loss": 7.6,
        "last loss": 7.5,
    }
    row |= {
        "median seconds per step": 0.1,
        "tokens per second": 5120.0,
        "peak memory": {"bytes by rank": [2**29]},
    }
    expected = plan.of(control.config, control.inputs.architecture).peak[1]
    for found, cell in ((report.predicted(control), f"{expected / 2**20:.0f} MiB"), ({}, "not known")):
        (head, line) = report.table(study, [{**row, **found}])
        assert line[head.index("peak memory of a rank")] == "512 MiB"
        assert line[head.index("predicted")] == cell
    assert "predicted" not in report.table(study.model_copy(update={"memory": False}), [row])[0]


@pytest.fixture(scope="module")
def measured(new_folder):
    """(plan, measured) by run of the benchmark's study, of real ranks on CPUs."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    folder = new_folder("allocated")
    study = benchmark.study_file.read(benchmark.STUDY)
    chosen = [
        case
        for case in benchmark.cases(study, folder)
        if case[0] == "tied" and case[1] in ("ddp", "fsdp", "stage0")
    ]
    found = allocated.measure([(strategy, flags) for *_, strategy, flags in chosen], folder)
    return {
        name: (benchmark.predicted(strategy, flags), peaks)
        for (_, name, strategy, flags), peaks in zip(chosen, found, strict=True)
    }


def test_the_allocator_of_real_ranks_agrees(measured):
    assert set(measured) == {"ddp", "fsdp", "stage0"}
    for name, (expected, found) in measured.items():
        for moment in ("built", "forward and backward", "update"):
            assert expected[moment] == pytest.approx(found[moment], rel=benchmark.LIMIT), (name, moment)


def test_the_plan_of_another_strategy_would_not_agree(measured):
    """Negative control."""
    expected, found = measured["ddp"][0], measured["fsdp"][1]
    assert max(expected.values()) != pytest.approx(max(found.values()), rel=benchmark.LIMIT)


def test_the_page_of_results_is_generated():
    path = benchmark.STUDY.parents[1] / "results" / "memory_plan.json"
    content = json.loads(path.read_text())
    assert path.with_suffix(".md").read_text() == benchmark.page(content)
    names = {"ddp", *benchmark.study_file.read(benchmark.STUDY).runs}
    assert {(row["model"], row["run"]) for row in content["rows"]} == {
        (model, name) for model in benchmark.MODELS for name in names
    }
