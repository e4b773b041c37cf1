"""What DeepSpeed's engine does with gradients that are right, recorded and judged: its norm, its clipping and its update, by its own or torch's optimizers."""

import json

import pytest
import torch
from ranks import run_groups

from lockstep import judge
from lockstep.recorded import update as recorded_update

OWN = {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.1}}
L2 = {"type": "Adam", "params": {"lr": 1e-3, "weight_decay": 0.1, "adam_w_mode": False}}
OFFLOADED = {"offload_optimizer": {"device": "cpu"}}
MOMENTUM = {"optimizer": "SGD", "options": {"momentum": 0.9}}
# Of DeepSpeed's own
SCHEDULE = {
    "type": "WarmupLR",
    "params": {"warmup_min_lr": 1e-3, "warmup_max_lr": 1e-3, "warmup_num_steps": 2},
}
RIGHT = {
    "stage 0": {"stage": 0},
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 3": {"stage": 3},
    "stage 2, sgd": {"stage": 2, **MOMENTUM},
    "stage 3, sgd": {"stage": 3, **MOMENTUM},
    "stage 2, lion": {"stage": 2, "optimizer": "Lion"},
    "stage 3, lion": {"stage": 3, "optimizer": "Lion"},
    "stage 1, its own schedule": {"stage": 1, "scheduler": SCHEDULE},
    "stage 1, bf16": {"stage": 1, "bf16": True},
    "stage 3, bf16": {"stage": 3, "bf16": True},
}
# Its own optimizers are compiled at first use in an environment, for minutes: only with --all
KERNELS = {
    "fused, stage 0": {"stage": 0, "config": OWN},
    "fused, stage 1": {"stage": 1, "config": OWN},
    "cpu, stage 2": {"stage": 2, "config": OWN, "zero": OFFLOADED},
    "cpu, stage 3, l2": {"stage": 3, "config": L2, "zero": OFFLOADED},
}
OF_ADAMW = "are not AdamW's with its recorded settings, most of all"
PARTIAL = (
    "step 1: the gradient was clipped by a norm of 1.021334, 0.98475 times that of the reference's gradient"
)
WRONG = {
    "beta": (2, f"step 1: 26 of 52 of what the optimizer keeps {OF_ADAMW} exp_avg_sq/"),
    "beta, stage 3": (3, f"step 1: 26 of 52 of what the optimizer keeps {OF_ADAMW} exp_avg_sq/"),
    "decay of all": (1, f"step 1: 5 of 26 updates {OF_ADAMW} model.layers.1.post_attention_layernorm"),
    "decay twice": (3, "step 1: 15 of 26 updates are not AdamW's"),
    "stale rate": (3, "step 2: 15 of 26 updates are not AdamW's"),
    "stale rate, stage 1": (1, "step 2: 15 of 26 updates are not AdamW's"),
    # It takes flat pieces of many parameters for one
    "norm of pieces": (
        1,
        "step 1: 52 of 52 of what the optimizer keeps are not Lamb's with its recorded settings, most of all",
    ),
    "partial norm, stage 0": (
        0,
        "step 1: 25 of 26 parameters with a gradient were clipped, and not model.norm",
    ),
    "partial norm": (2, PARTIAL),
    "partial norm, stage 3": (3, PARTIAL),
    "clipped otherwise": (2, f"step 1: 52 of 52 of what the optimizer keeps {OF_ADAMW}"),
    "schedule": (1, "the schedule of the learning rate is stepped 2 times in a step"),
}


@pytest.fixture(scope="module")
def runs(new_folder, request):
    folder = new_folder("deepspeed")
    compiled = request.config.getoption("--all")
    cases = RIGHT | (KERNELS if compiled else {})
    cases |= {"copies": {"stage": 0, "bf16": True}}
    cases |= {name: {"stage": stage, "bug": name.partition(",")[0]} for name, (stage, _) in WRONG.items()}
    cases["norm of pieces"]["optimizer"] = "Lamb"
    cases["schedule"]["scheduler"] = SCHEDULE
    round_robin = {"stage": 1, "zero": {"round_robin_gradients": True}}
    groups = [(2, "recorded_deepspeed:refused", folder / "round robin", round_robin)]
    groups += [(2, "recorded_deepspeed:loop", folder / name, one) for name, one in cases.items()]
    run_groups(groups, timeout=900 if compiled else 240)
    return folder


@pytest.mark.parametrize("name", [*RIGHT, *KERNELS])
def test_a_right_update_passes(runs, name, capsys, request):
    if name in KERNELS and not request.config.getoption("--all"):
        pytest.skip("DeepSpeed compiles this optimizer for minutes: --all")
    folder = runs / name / "run"
    assert judge.main([str(folder)]) == 0, capsys.readouterr().out
    said = capsys.readouterr().out
    assert said.splitlines()[-1].startswith("PASS: 2 steps") and said.count("clipped from a norm of") == 2, (
        said
    )
    kept = (
        ("momentum_buffer",)
        if "sgd" in name
        else ("exp_avg",)
        if "lion" in name
        else ("exp_avg", "exp_avg_sq")
    )
    first, second = json.loads((folder / "report.json").read_text())["steps"]
    for step, kinds in ((first, ("update", *kept)), (second, ("update",))):
        judged = [row.partition("/")[0] for row in step["tensors"]]
        assert [judged.count(kind) for kind in kinds] == [26] * len(kinds)
    assert "gradient norm" in first["tensors"]


def test_copies_that_no_reader_knows_are_not_judged(runs, capsys):
    assert judge.main([str(runs / "copies" / "run")]) == 0
    said = capsys.readouterr().out
    last = said.splitlines()[-1]
    assert last.startswith("PASS: 2 steps;"), said
    assert "; the update of FP16_UnfusedOptimizer is not judged: of DeepSpeed's own" in last, said
    assert "whole run: 3 steps" in said  # its constructor steps, too


def test_readers_that_take_other_parameters_are_not_called(runs):
    assert (runs / "round robin" / "said").read_text().startswith("round_robin_gradients: ")


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_update_fails_for_its_own_reason(runs, name, capsys):
    assert judge.main([str(runs / name / "run")]) == 1
    said = capsys.readouterr().out
    assert said.splitlines()[-1].startswith(f"FAIL: {WRONG[name][1]}"), said


@pytest.mark.parametrize("times", [1, 2, 3, 50, 2000])
def test_powers_that_are_made_in_float32(times):
    """As DeepSpeed's kernel makes them; the tolerance is that of no other error."""
    betas = tuple(float(torch.tensor(beta)) for beta in (0.9, 0.999))
    powers = [torch.tensor(1.0), torch.tensor(1.0)]
    for _ in range(times):
        powers = [power * beta for power, beta in zip(powers, betas, strict=True)]
    first, second = (
        abs(float(1 - power) / (1 - beta**times) - 1) for power, beta in zip(powers, betas, strict=True)
    )
    allowed = recorded_update._error_of_powers({"betas": betas}, {"step": torch.tensor(float(times))})
    assert first + second / 2 <= allowed * (1 + 1e-3)
    assert allowed < (1e-12 if times == 1 else 1e-4)
