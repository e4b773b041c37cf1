"""Negative controls of the loss verdict and of the loop's own guards. Faults of AutoTP and FSDP: test_run_faults.py."""

import shlex

import pytest
from ranks import CAPTURED, run_groups
from small_inputs import write_weights

from lockstep.dumps import history
from lockstep.dumps.dump import Dump
from lockstep.ground.errors import UserError
from lockstep.verdict.loss_curves import compare_curves, require_comparable_curves, tolerance_for

COMMON = shlex.split("--batch_size 4 --seq_length 64 --debug_steps 6")
BOTH = {"loss", "grad norm"}
# fault -> what is red within 6 steps, in fp32 and in autocast
DDP_FAULTS = {
    "none": {"fp32": set(), "autocast": set()},
    # without a control run, autocast may move the losses of so few tokens by more than this
    "one replica with other weights": {"fp32": BOTH, "autocast": {"grad norm"}},
}
PRECISIONS = ("fp32", "autocast")


STOPPED_DDP = {
    "at another place in the mesh": "rank 0: the strategy's groups put it at dp 1 of 2, tp 0 of 1, the mesh at dp 0 of 2, tp 0 of 1",
    "DP ranks really on the same batch": "step 1: DP ranks 0 and 1 saw the same batch",
    "nan": "step 3: the loss is nan on rank 1 (dp 1 of 2, tp 0 of 1)",
    **{
        f"norm is nan in step {step}": f"step {step}: the gradient norm is nan on rank 1 (dp 1 of 2, tp 0 of 1)"
        for step in (1, 3, 4)  # 4 is the last one
    },
    "replaces what nobody calls": "replaces_what_nobody_calls: its replacement of DDPStrategy.held was never used",
    "replaces what nobody reads": "replaces_what_nobody_reads: its replacement of DDPStrategy.parameters was never used",
    "one side clips, admitted": "max_grad_norm is 0.0, not 1.0",
    "weights changed after loading": "model.embed_tokens.weight differs from",
}
STOPPED_FSDP = {
    "TP peers really on different batches": "step 1: rank 0 and rank 1 share samples (dp 0) and saw different batches",
}
STOPPED = {2: ("ddp", STOPPED_DDP), 4: ("fsdp", STOPPED_FSDP)}  # by number of ranks
STEPS = 5
# What one rank alone meets: {"file_limit"}, {"saves"} or {"unreadable"} of `jobs.stopped`.
ALONE = {
    "safetensors": {"file_limit": 100_000},
    "pt": {"file_limit": 100_000},
    "first": {"saves": 0},
    "middle": {"saves": 2},
    "after_the_last_step": {"saves": STEPS - 1},
    "end": {"saves": STEPS},
    "unreadable": {"unreadable": 1},
    "none": {},
}


def alone(folder, name):
    """A case of `jobs.stopped`."""
    small = ["--batch_size", "2", "--seq_length", "32", "--debug_steps", str(STEPS), "--device", "cpu"]
    flags = [*small, "--loss_output_dir", str(folder / name), "--storage_path", str(folder)]
    if "file_limit" in ALONE[name]:
        flags += ["--save_init_weights", "--init_weights_path", str(folder / name / f"w.{name}")]
    return {"name": name, "arguments": flags, **ALONE[name]}


@pytest.fixture(scope="module")
def runs(new_folder):
    """All trainings of this file: one start, of two processes and of four."""
    folder = new_folder("faults")
    weights = ["--init_weights_path", str(write_weights(folder / "init.safetensors"))]

    def history_of(fault, precision):
        arguments = [*COMMON, "--precision", precision, "--dp_size", "2"]
        return {
            "name": f"ddp {precision} {fault}",
            "strategy": "ddp",
            "fault": fault,
            "arguments": arguments,
        }

    def stops(size):
        strategy, faults = STOPPED[size]
        for fault in faults:
            arguments = [*COMMON, "--precision", "fp32", "--debug_steps", "4"]
            arguments += weights * (fault == "weights changed after loading")
            yield "jobs:refused", fault, {"strategy": strategy, "fault": fault, "arguments": arguments}

    ddp = [history_of(f, p) for p in PRECISIONS for f in DDP_FAULTS] + [history_of("frozen", "fp32")]
    captured = {"arguments": [*CAPTURED, "--debug_steps", "3", "--capture_steps", "2"]}
    stopped = {"cases": [alone(folder / "2" / "alone", name) for name in ALONE]}
    two = [("jobs:histories", ".", {"runs": ddp}), *stops(2), ("jobs:replaced", "replaced", captured)]
    two.append(("jobs:stopped", "alone", stopped))
    run_groups([(2, "jobs:in_turn", folder / "2", two), (4, "jobs:in_turn", folder / "4", list(stops(4)))])
    return folder


def verdict_of(runs, fault, precision="fp32"):
    baseline = history.read(runs / "2" / f"ddp {precision} none" / "loss_ddp.json")
    other = history.read(runs / "2" / f"ddp {precision} {fault}" / "loss_ddp.json")
    require_comparable_curves(baseline, other)
    return compare_curves(baseline, other, tolerance_for(baseline))


def red(verdict):
    return {
        name
        for name, step in (("loss", verdict.red_loss_step), ("grad norm", verdict.red_grad_norm_step))
        if step is not None
    }


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("fault", DDP_FAULTS)
def test_ddp(runs, fault, precision):
    assert red(verdict_of(runs, fault, precision)) == DDP_FAULTS[fault][precision]


def test_a_run_in_which_nothing_moves_fails(runs):
    verdict = verdict_of(runs, "frozen")
    assert not verdict.passed and "no weight moved" in verdict.problems[0]


def test_two_runs_in_which_nothing_moves_fail_although_they_agree(runs):
    frozen = history.read(runs / "2" / "ddp fp32 frozen" / "loss_ddp.json")
    verdict = compare_curves(frozen, frozen, tolerance_for(frozen))
    assert not red(verdict) and not verdict.passed


@pytest.mark.parametrize(
    "size, fault, message",
    [(size, *case) for size, (_, faults) in STOPPED.items() for case in faults.items()],
)
def test_the_loop_stops_every_rank(runs, size, fault, message):
    folder = runs / str(size) / fault
    errors = [(folder / f"error{rank}.txt").read_text() for rank in range(size)]
    assert all(message in error for error in errors), errors
    if fault == "nan":
        stopped = history.read(folder / "loss_ddp.json")
        assert len(stopped.steps) == 3 and "step 3" in stopped.ended
        with pytest.raises(UserError, match="has 2 of 4 steps"):
            stopped.steps.pop()  # without the NaN it is merely an unfinished run, which is refused
            require_comparable_curves(stopped, stopped)


def errors_of(runs, name):
    return [(runs / "2" / "alone" / f"{name}-{rank}.txt").read_text() for rank in (0, 1)]


@pytest.mark.parametrize("case, message", [
    ("safetensors", "/w.safetensors: File too large; free space"), ("pt", "/w.pt: "),
    *((case, "loss_ddp.json: No space left on device") for case in ("first", "middle", "after_the_last_step", "end")),
    ("unreadable", "rank 1 has no such file"),
])  # fmt: skip
def test_what_one_rank_alone_meets_stops_both_with_one_line(runs, case, message):
    """test_one_rank_alone.py: what a person sees of it."""
    one, other = errors_of(runs, case)
    assert one == other and one.startswith("TrainingFailure: ") and message in one and "\n" not in one


def test_an_older_run_stays_until_the_first_step_of_its_replacement(runs):
    """History and dump of a run, after one that failed in the same place: in the strategy's constructor, in step 1, in step 2."""
    folder = runs / "2" / "replaced"
    good = contents(folder / "good")
    assert sorted(good) == [
        "ddp/manifest.json",
        "ddp/step_1.safetensors",
        "ddp/step_2.safetensors",
        "loss_ddp.json",
    ]
    assert contents(folder / "constructor") == good and contents(folder / "first") == good
    new = contents(folder / "second")  # negative control: half of it is no older run's
    kept = history.read(folder / "second" / "loss_ddp.json")
    assert len(kept.steps) == 1 and kept.ended == "RuntimeError: it fails"
    assert sorted(new) == ["ddp/manifest.json", "ddp/step_1.safetensors", "loss_ddp.json"]
    assert not set(new.values()) & set(good.values())
    with pytest.raises(UserError, match="1 of 2 steps"):
        Dump(folder / "second" / "ddp")


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_nothing_is_left_but_the_steps_that_were_written(runs):
    folder = runs / "2" / "alone"
    assert errors_of(runs, "none") == ["not stopped"] * 2  # negative control
    assert not list(folder.glob("*/*w.*")) and not (folder / "first" / "loss_ddp.json").exists()
    kept = history.read(folder / "middle" / "loss_ddp.json")
    assert len(kept.steps) == 2 and kept.ended is None
