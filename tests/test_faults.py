"""Negative controls of the loss verdict and of the loop's own guards. Faults of AutoTP and FSDP: test_run_faults.py."""

import pytest
from ranks import run_ranks

from lockstep.errors import UserError
from lockstep.losses.curves import compare_curves, require_comparable_curves, tolerance_for
from lockstep.training import history

COMMON = ["--batch_size", "4", "--seq_length", "64", "--debug_steps", "12"]
BOTH = {"loss", "grad norm"}
# fault -> what is red within 12 steps, in fp32 and in autocast
DDP_FAULTS = {
    "none": {"fp32": set(), "autocast": set()},
    "one replica with other weights": {"fp32": BOTH, "autocast": BOTH},
}
PRECISIONS = ("fp32", "autocast")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """One start of two processes, which train once per fault and precision."""
    folder = tmp_path_factory.mktemp("faults")

    def job(strategy, fault, precision, *more):
        arguments = [*COMMON, "--precision", precision, *more]
        return {
            "name": f"{strategy} {precision} {fault}",
            "strategy": strategy,
            "fault": fault,
            "arguments": arguments,
        }

    ddp = [job("ddp", f, p, "--dp_size", "2") for p in PRECISIONS for f in (*DDP_FAULTS, "frozen")]
    run_ranks(2, "jobs:histories", folder, {"runs": ddp})
    return folder


def verdict_of(runs, fault, strategy, precision="fp32"):
    baseline = history.read(runs / f"ddp {precision} none" / "loss_ddp.json")
    other = history.read(runs / f"{strategy} {precision} {fault}" / f"loss_{strategy}.json")
    require_comparable_curves(baseline, other)
    return compare_curves(baseline, other, tolerance_for(baseline))


def red(verdict):
    return {
        name
        for name, passed in (("loss", verdict.loss_passed), ("grad norm", verdict.grad_norm_passed))
        if not passed
    }


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("fault", DDP_FAULTS)
def test_ddp(runs, fault, precision):
    assert red(verdict_of(runs, fault, "ddp", precision)) == DDP_FAULTS[fault][precision]


def test_a_run_in_which_nothing_moves_fails(runs):
    verdict = verdict_of(runs, "frozen", "ddp")
    assert not verdict.passed and "no weight moved" in verdict.problems[0]


def test_two_runs_in_which_nothing_moves_fail_although_they_agree(runs):
    frozen = history.read(runs / "ddp fp32 frozen" / "loss_ddp.json")
    verdict = compare_curves(frozen, frozen, tolerance_for(frozen))
    assert verdict.loss_passed and verdict.grad_norm_passed and not verdict.passed


STOPPED = {
    "at another place in the mesh": (
        "ddp",
        2,
        "rank 0: the strategy's groups put it at dp 1 of 2, tp 0 of 1, the mesh at dp 0 of 2, tp 0 of 1",
    ),
    "DP ranks really on the same batch": ("ddp", 2, "step 1: DP ranks 0 and 1 saw the same batch"),
    "nan": ("ddp", 2, "step 3: the loss is nan on rank 1 (dp 1 of 2, tp 0 of 1)"),
    "one side clips, admitted": ("ddp", 2, "max_grad_norm is 0.0, not 1.0"),
    "weights changed after loading": ("ddp", 2, "model.embed_tokens.weight differs from"),
    "TP peers really on different batches": (
        "fsdp",
        4,
        "step 1: TP peers rank 0 and rank 1 (dp 0) saw different batches",
    ),
}


@pytest.mark.parametrize("fault", STOPPED)
def test_the_loop_stops_every_rank(tmp_path, fault):
    strategy, size, message = STOPPED[fault]
    arguments = [*COMMON, "--precision", "fp32", "--debug_steps", "4"]
    if fault == "weights changed after loading":
        from test_weights import write_weights

        arguments += ["--init_weights_path", str(write_weights(tmp_path / "init.safetensors"))]
    run_ranks(size, "jobs:refused", tmp_path, {"strategy": strategy, "fault": fault, "arguments": arguments})
    errors = [(tmp_path / f"error{rank}.txt").read_text() for rank in range(size)]
    assert all(message in error for error in errors), errors
    if fault == "nan":
        stopped = history.read(tmp_path / "loss_ddp.json")
        assert len(stopped.steps) == 3 and "step 3" in stopped.ended
        with pytest.raises(UserError, match="has 2 of 4 steps"):
            stopped.steps.pop()  # without the NaN it is merely an unfinished run, which is refused
            require_comparable_curves(stopped, stopped)
