"""GPT-2 on two ranks: correct runs of every strategy pass, a planted bug is caught, placed and explained."""

import shlex

import pytest
import torch
from compared import compared, replays
from families import built
from ranks import run_groups

from lockstep.diagnosis import recompute
from lockstep.diagnosis.case import Case
from lockstep.diagnosis.diagnose import diagnose
from lockstep.dumps.dump import Dump
from lockstep.faults import CATALOGUE, planted
from lockstep.ground.errors import UserError
from lockstep.inputs.architectures import BUILT_IN
from lockstep.plan import command_line
from lockstep.training import preflight
from lockstep.training.observe import model_contract

COMMON = shlex.split("--model_name tiny-gpt2 --batch_size 2 --seq_length 32 --dp_size 2 --debug_steps 2")
RUNS = {  # name -> (strategy, planted bug, flags)
    "ddp": ("ddp", "none", []),
    "fsdp": ("fsdp", "none", []),
    "zero0": ("deepspeed", "none", ["--zero_stage", "0"]),
    "zero3": (
        "deepspeed",
        "none",
        shlex.split("--zero_stage 3 --offload_optimizer cpu --offload_param cpu"),
    ),
    "unreduced": ("fsdp", "no_dp_reduction", []),
}


@pytest.fixture(scope="module")
def runs(new_folder):
    folder = new_folder("gpt2")
    capture = ["--capture_steps", "2", "--capture_dir", str(folder / "dumps")]

    def job(name, strategy, fault, flags):
        arguments = [*COMMON, *flags, *capture, "--run_name", name]
        if strategy != "ddp":
            arguments += ["--tp_size", "1"]
        return {"name": f"losses {name}", "strategy": strategy, "fault": fault, "arguments": arguments}

    jobs = [job(name, *run) for name, run in RUNS.items()]
    run_groups(
        [
            (2, "jobs:histories", folder / "runs", {"runs": jobs}),
            (0, "jobs:reference", folder / "reference", {"arguments": [*COMMON, *capture]}),
        ]
    )
    return folder / "dumps"


@pytest.mark.parametrize(
    "name", [name for name, (_, fault, _) in RUNS.items() if fault == "none" and name != "ddp"]
)
def test_a_correct_run_passes(runs, name):
    result = compared(runs, **{name: runs / name})
    assert result.outcome == "PASS"
    judged = {row.name for row in result.runs[name].judged}
    assert {
        "forward/transformer.wpe",
        "gradient/transformer.wpe.weight",
        "gradient/transformer.h.1.attn.c_attn.bias",
        "exp_avg_sq/transformer.h.0.ln_1.bias",
        "parameter/transformer.wte.weight",
    } <= judged


def test_a_planted_bug_is_caught_placed_and_explained(runs):
    """The evidence is each rank's own contribution to a gradient: of a norm with a bias, and of layers that hold W^T."""
    result = compared(runs, unreduced=runs / "unreduced")
    step, _, first, _ = result.runs["unreduced"].failures[0]
    assert (step, first) == (1, "gradient/transformer.ln_f.weight") and result.verdict("ddp") == "PASS"
    reference, own = Dump(runs / "reference"), replays(ddp=runs / "ddp", unreduced=runs / "unreduced")
    found = diagnose(result, "unreduced", reference, own)
    assert [cause.name for cause in found.causes] == ["dp reduction missing"]
    parts = [
        recompute.Contributions(Case(result, "unreduced", reference, None), f"transformer.{name}")
        for name in (
            "ln_f.weight",
            "wte.weight",
            "h.0.ln_1.bias",
            "h.0.attn.c_attn.weight",
            "h.1.attn.c_proj.weight",
            "h.1.mlp.c_fc.bias",
        )
    ]
    for part in parts:
        own = torch.cat([mine.flatten() for mine, _ in part.blocks()])
        assert part.known and recompute.nearest_terms(part, lambda rows: len(rows) * rows)[1] < 1e-5 * float(
            own.norm()
        )


class Accepted(Exception):
    pass


def test_a_fault_that_names_modules_of_another_family_is_refused(tmp_path):
    config = command_line.parse_config(
        "fsdp", [*COMMON, "--tp_size", "1", "--loss_output_dir", str(tmp_path)]
    )
    inputs = preflight.load_inputs(config)
    named = [fault for fault in CATALOGUE.values() if fault.named]
    assert len(named) >= 5
    for fault in named:
        with (
            pytest.raises(UserError, match=f"^{fault.name} names modules of tiny-qwen2"),
            planted(fault.name, config, inputs, print),
        ):
            pass
    with pytest.raises(Accepted), planted("no_dp_reduction", config, inputs, print):
        raise Accepted  # nothing is trained here


def test_a_dropout_that_is_left_on_is_seen():
    model = built(BUILT_IN["tiny-gpt2"])
    assert model_contract(model)["dropout"] == 0.0
    model.transformer.h[1].mlp.dropout.p = 0.1
    assert model_contract(model)["dropout"] == 0.1
