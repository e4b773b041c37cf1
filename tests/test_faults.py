"""Negative controls: a bug planted in the real distributed run turns the verdict red, by loss, by grad norm or both."""

import pytest

from lockstep import history
from lockstep.compare import compare, require_comparable, tolerance_for
from lockstep.errors import UserError
from ranks import run_ranks

COMMON = ["--precision", "fp32", "--batch_size", "4", "--seq_length", "64", "--debug_steps", "12"]
FSDP_FAULTS = {  # fault -> what must be red
    "none": set(),
    "no DP synchronisation": {"loss", "grad norm"},
    "DP ranks on the same batch": {"loss", "grad norm"},
    "TP peers on different batches": {"loss", "grad norm"},
    "one side clips": {"loss", "grad norm"},
    "dropped row-parallel reduction": {"loss", "grad norm"},
}
DDP_FAULTS = {"none": set(), "one replica with other weights": {"loss", "grad norm"}}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """One start of two processes for DDP and one of four for FSDP; each trains once per fault."""
    folder = tmp_path_factory.mktemp("faults")
    ddp = [
        {"name": f"ddp {fault}", "strategy": "ddp", "fault": fault, "arguments": [*COMMON, "--dp_size", "2"]}
        for fault in (*DDP_FAULTS, "frozen")
    ]
    fsdp = [{"name": f"fsdp {f}", "strategy": "fsdp", "fault": f, "arguments": COMMON} for f in FSDP_FAULTS]
    run_ranks(2, "jobs:histories", folder, {"runs": ddp})
    run_ranks(4, "jobs:histories", folder, {"runs": fsdp})
    return folder


def verdict_of(runs, name, strategy):
    baseline = history.read(runs / "ddp none" / "loss_ddp.json")
    other = history.read(runs / f"{strategy} {name}" / f"loss_{strategy}.json")
    require_comparable(baseline, other)
    return compare(baseline, other, tolerance_for(baseline))


def red(verdict):
    return {name for name, passed in (("loss", verdict.loss_passed), ("grad norm", verdict.grad_norm_passed)) if not passed}


@pytest.mark.parametrize("fault", FSDP_FAULTS)
def test_fsdp(runs, fault):
    assert red(verdict_of(runs, fault, "fsdp")) == FSDP_FAULTS[fault]


@pytest.mark.parametrize("fault", DDP_FAULTS)
def test_ddp(runs, fault):
    assert red(verdict_of(runs, fault, "ddp")) == DDP_FAULTS[fault]


def test_a_run_in_which_nothing_moves_fails(runs):
    verdict = verdict_of(runs, "frozen", "ddp")
    assert not verdict.passed and "no weight moved" in verdict.problems[0]


def test_two_runs_in_which_nothing_moves_fail_although_they_agree(runs):
    frozen = history.read(runs / "ddp frozen" / "loss_ddp.json")
    verdict = compare(frozen, frozen, tolerance_for(frozen))
    assert verdict.loss_passed and verdict.grad_norm_passed and not verdict.passed


STOPPED = {
    "nan": ("ddp", 2, "step 3: the loss is nan on rank 1 (dp 1, tp 0)"),
    "one side clips, admitted": ("ddp", 2, "max_grad_norm is 0.0, not 1.0"),
    "weights changed after loading": ("ddp", 2, "model.embed_tokens.weight is not what"),
    "TP peers on different batches": ("fsdp", 4, "step 1: TP peers rank 0 and rank 1 (dp 0) saw different batches"),
}


@pytest.mark.parametrize("fault", STOPPED)
def test_the_loop_stops_every_rank(tmp_path, fault):
    strategy, size, message = STOPPED[fault]
    arguments = [*COMMON, "--debug_steps", "4"]
    job = "jobs:refused"
    if fault == "weights changed after loading":
        from test_weights import write_weights

        arguments += ["--init_weights_path", str(write_weights(tmp_path / "init.safetensors"))]
    if fault.startswith("TP peers"):
        job = "jobs:refused_data"
    run_ranks(size, job, tmp_path, {"strategy": strategy, "fault": fault, "arguments": arguments})
    errors = [(tmp_path / f"error{rank}.txt").read_text() for rank in range(size)]
    assert all(message in error for error in errors), errors
    if fault == "nan":
        stopped = history.read(tmp_path / "loss_ddp.json")
        assert len(stopped.steps) == 3 and "step 3" in stopped.ended
        with pytest.raises(UserError, match="has 2 of 4 steps"):
            stopped.steps.pop()  # without the NaN it is merely an unfinished run, which is refused
            require_comparable(stopped, stopped)
