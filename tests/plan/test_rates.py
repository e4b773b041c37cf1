"""The learning rate of every step: its formula, and that every strategy and the reference follow it."""

import math
import shlex

import pytest
from compared import compared
from ranks import run_groups

from lockstep.dumps import history
from lockstep.plan.config import history_file
from lockstep.plan.rates import changes, rate_of
from lockstep.plan.strategies import SPECS
from lockstep.verdict import loss_curves

COSINE = {"learning_rate": 0.5, "lr_schedule": "cosine", "warmup_steps": 2, "schedule_steps": 0}
FLAGS = shlex.split("--lr_schedule cosine --warmup_steps 2 --debug_steps 4 --capture_steps 3")
SMALL = shlex.split("--dp_size 2 --batch_size 2 --seq_length 32 --learning_rate 3e-3")


def test_the_formula():
    found = [rate_of(COSINE, step, 6) for step in range(1, 7)]
    wanted = [0.25, 0.5, *(0.25 * (1 + math.cos(math.pi * part / 4)) for part in range(4))]
    assert found == pytest.approx(wanted, rel=1e-15) and found[-1] > 0
    constant = {**COSINE, "lr_schedule": "constant"}
    assert [rate_of(constant, step, 6) for step in (1, 2, 3, 6)] == [0.25, 0.5, 0.5, 0.5]
    plain = {"learning_rate": 0.5, "lr_schedule": "constant", "warmup_steps": 0, "schedule_steps": 0}
    assert rate_of(plain, 1, 6) == 0.5 and not changes(plain)
    assert changes(constant) and changes(COSINE)


@pytest.fixture(scope="module")
def trained(new_folder):
    """Four steps of every strategy, the same of DDP with a rate that is not the schedule's, and the reference."""
    folder = new_folder("rates")
    arguments = [*SMALL, *FLAGS, "--capture_dir", str(folder)]

    def run(strategy, fault="none"):
        own = arguments if fault == "none" else [*arguments, "--run_name", "off"]
        tp = [] if SPECS[strategy].is_baseline else ["--tp_size", "1"]
        return {"name": f"{strategy} {fault}", "strategy": strategy, "fault": fault, "arguments": [*own, *tp]}

    runs = [*(run(name) for name in SPECS), run("fsdp", "learning rate of the first step")]
    groups = [
        (2, "jobs:histories", folder / "work", {"runs": runs}),
        (0, "jobs:reference", folder / "reference-work", {"arguments": arguments}),
    ]
    run_groups(groups)
    return folder


def losses(folder, run, name):
    return history.read(history_file(folder / "work" / run, name))


def test_every_strategy_follows_it(trained):
    result = compared(trained, **{name: trained / name for name in SPECS})
    assert {name: result.verdict(name) for name in SPECS} == dict.fromkeys(SPECS, "PASS")
    wanted = [rate_of({**COSINE, "learning_rate": 3e-3}, step, 4) for step in range(1, 5)]
    baseline = losses(trained, "ddp none", "ddp")
    for name in SPECS:
        other = losses(trained, f"{name} none", name)
        assert [step["learning_rate"] for step in other.steps] == wanted
        tolerance = loss_curves.tolerance_for(baseline, None)
        assert loss_curves.compare_curves(baseline, other, tolerance).passed


def test_a_run_that_does_not_is_caught(trained):
    """It keeps the rate of the first step, and records it. Both verdicts say so, and the weights of the second step are wrong."""
    result = compared(trained, off=trained / "off")
    assert result.verdict("off") == "CONFIGURED DIFFERENTLY"
    step, _, first, _ = result.runs["off"].failures[0]
    assert (step, first.split("/")[0]) == (2, "parameter")
    baseline = losses(trained, "ddp none", "ddp")
    off = losses(trained, "fsdp learning rate of the first step", "off")
    verdict = loss_curves.compare_curves(baseline, off, loss_curves.tolerance_for(baseline, None))
    assert not verdict.passed and any("learning rate of step 2" in one for one in verdict.problems)
