"""A sample of the catalogue in real distributed runs: caught, at the right tensor, with the right cause. And the proof
that run_faults.py can fail."""

import collections
import dataclasses
import json

import pytest

import run_faults
from lockstep.faults import CATALOGUE, applies_to
from lockstep.faults.catalogue import BUG_CLASSES, NO_SENTENCE, agrees
from lockstep.ground.errors import TrainingFailure
from lockstep.inputs import architectures
from lockstep.plan.command_line import parse_config
from lockstep.plan.config import JUDGED
from lockstep.plan.mesh import Mesh
from lockstep.plan.strategies import others, spec_of

# fault -> how its cause must be named
SAMPLE = {
    "no_dp_reduction": "right",
    "tp_peers_read_different_samples": "right",
    "gradients_reduced_in_bfloat16": "right",
    "autocast_in_one_strategy_only": "right",
    "norm_gradients_times_tp": "right",
    "summed_instead_of_averaged": "right",
    "first_bucket_not_reduced": "right",  # of ZeRO
    "share_one_element_off": "right",
    "keys_in_the_order_of_ranks": "not explained",  # of the other dimensions
    "causal_mask_local_to_the_rank": "right",
    "rotary_positions_local_to_the_rank": "right",
    "key_gradients_not_summed": "right",
    "ranks_averaged_whatever_their_tokens": "right",
    "gradients_not_reduced_over_cp": "right",
    "exchange_without_a_gradient": "right",
    "last_micro_batch_dropped": "right",
    "only_the_last_micro_batch_over_replicas": "right",
    "last_micro_batch_left_out": "right",
    "average_updated_by_every_micro_batch": "right",
    "tied_gradients_not_summed_over_stages": "right",
    "sequence_parallel_norms_not_reduced": "right",
    "averaged_over_sp_twice": "right",
    "gradients_not_zeroed": "right",
    "moments_lost_between_steps": "right",
    "mean_of_all_means": "right",  # of samples
    "documents_see_each_other": "right",
    "mask_one_position_off": "right",
}
FACTORS = ("norm_gradients_times_tp", "summed_instead_of_averaged")
GRAVE = {"no_dp_reduction", "tp_peers_read_different_samples"}


def rows_of(folder, *arguments):
    output = folder / "faults.json"
    status = run_faults.main([*arguments, "--steps", "4", "--output", str(output)])
    return status, json.loads(output.read_text())["rows"]


@pytest.fixture(scope="module")
def fp32(new_folder):
    return rows_of(new_folder("fp32"), *SAMPLE)


def test_every_fault_is_caught_placed_and_named(fp32):
    status, rows = fp32
    assert status == 0 and len(rows) == 38
    assert [
        (row["fault"], row["first"], row["causes"])
        for row in rows
        if not (row["first_right"] and row["named"] == SAMPLE[row["fault"]])
    ] == []


def test_a_factor_of_four_is_told_from_one_of_two(fp32):
    """At tp 4 x dp 1 and at dp 4 x tp 1: where both are 2, a factor does not say which it is."""
    _, rows = fp32
    said = {fault: [row["causes"][0][1] for row in rows if row["fault"] == fault] for fault in FACTORS}
    assert all("4 = tp times" in evidence for evidence in said["norm_gradients_times_tp"])
    assert all("4 = dp times" in evidence for evidence in said["summed_instead_of_averaged"])


def test_the_loss_verdict_sees_the_grave_ones(fp32):
    """Within four steps, both by loss and by gradient norm."""
    _, rows = fp32
    for what in ("loss_step", "grad_norm_step"):
        assert {row["fault"] for row in rows if row[what] is not None} >= GRAVE


def test_in_autocast(tmp_path):
    """One norm weight is off by one in a thousand on one tp rank."""
    name = "norm_weight_differs_on_one_tp_rank"
    status, (row,) = rows_of(tmp_path, name, "--precision", "autocast", "--strategy", "fsdp")
    assert status == 0 and row["first_right"] and row["named"] == "right"


def test_run_faults_can_fail(tmp_path, monkeypatch, capsys):
    """One fault has no effect: it multiplies with the tensor-parallel size, which is 1. Of the others, another cause or other evidence was
    written down."""
    for name, changes in {
        "loss_multiplied_by_tp": {},
        "tie_broken": {"cause": "data"},
        "loss_divided_by_dp_as_well": {"evidence": CATALOGUE["loss_multiplied_by_tp"].evidence},
    }.items():
        changed = dataclasses.replace(CATALOGUE[name], mesh=Mesh(dp=2), **changes)
        monkeypatch.setitem(CATALOGUE, name, changed)
    names = ("loss_multiplied_by_tp", "tie_broken", "loss_divided_by_dp_as_well")
    status, rows = rows_of(tmp_path, *names, "--strategy", "fsdp")
    found = {row["fault"]: row for row in rows}
    idle, misnamed = found["loss_multiplied_by_tp"], found["tie_broken"]
    assert status == 1 and not any(map(run_faults.as_it_should_be, rows))
    assert not idle["changed"] and not idle["caught"] and idle["causes"] == []
    assert misnamed["caught"] and misnamed["named"] == "wrong" and misnamed["cause"] == "tied weights"
    said = found["loss_divided_by_dp_as_well"]
    assert said["caught"] and said["cause"] == "gradient scale" and said["named"] == "wrong"
    out = capsys.readouterr().out
    assert "CHANGED NOTHING: loss_multiplied_by_tp in fsdp" in out
    assert "NOT CAUGHT: loss_multiplied_by_tp in fsdp" in out
    assert "NAMED WRONG: tie_broken in fsdp: tied weights" in out and "named wrong: 2 of 3" in out
    assert (
        "NAMED WRONG: loss_divided_by_dp_as_well in fsdp: gradient scale: the gradient of the logits is 0.5 ="
        in out
    )


@pytest.mark.parametrize(
    "change",
    [{"failed": "it broke"}, {"caught": False}, {"changed": False}, {"named": "wrong"}],
)
def test_each_of_these_is_a_failure(change):
    good = {"caught": True, "changed": True, "named": "not explained"}
    assert run_faults.as_it_should_be(good) and not run_faults.as_it_should_be({**good, **change})


@pytest.mark.parametrize(
    "causes, named",
    [
        ([["data", "x is 2"]], "right"),
        ([], "not explained"),
        ([["weights", "x is 2"]], "wrong"),
        ([["data", "x is 3"]], "wrong"),
        ([["data", "x is 2"], ["weights", "x is 2"]], "wrong"),
        ([["data", "x is 2"], ["data", "y is 2"]], "wrong"),
    ],
)
def test_what_can_be_said_of_a_cause(causes, named):
    fault = dataclasses.replace(CATALOGUE["tie_broken"], cause="data", evidence="x is 2")
    assert run_faults.name_verdict(causes, fault) == named


@pytest.mark.parametrize(
    "expected, said, does",
    [
        ("all is well", "all is well", True),
        ("all is well", "all is well, nearly", False),
        ("it is 0.3333 = 1/3 of it", "it is 0.3327 = 1/3 of it", True),  # as bfloat16 has it
        ("it is 0.3333 = 1/3 of it", "it is 0.5 = 1/3 of it", False),
        ("the norm is 1.0001 times", "the norm is 1.414 times", False),
        ("rates [0.000996]", "rates [0.000996005996001]", True),
        ("rates [0.000996]", "rates [0.001]", False),
        ("weights (1, 1, 0; 1 is right)", "weights (1, 1, -2.78e-08; 1 is right)", True),
        ("weights (1, 1, 0; 1 is right)", "weights (1, 1, 0.01; 1 is right)", False),
        ("moved -0.1 of the way", "moved 0.1 of the way", False),
        ("the norm is # times", "the norm is 1.2e+00 times", True),
        ("the norm is # times", "the norm is so many times", False),
        ("layers.1.mlp is off", "layers.0.mlp is off", False),
        ("as recomputed (...)", "as recomputed (a: DP rank 1's; b: DP rank 0's)", True),
        ("as recomputed (...)", "as recomputed", False),
        (("one", "other"), "other", True),
        (("one", "other"), "neither", False),
        (NO_SENTENCE, "anything", False),
        (str.isupper, "YES", True),
        (str.isupper, "no", False),
    ],
)
def test_what_evidence_must_say(expected, said, does):
    assert agrees(expected, said) is does


def test_the_catalogue_covers_what_was_shipped():
    assert len(CATALOGUE) >= 32 and {fault.bug_class for fault in CATALOGUE.values()} == set(BUG_CLASSES)
    for strategy in others():
        assert sum(applies_to(fault, spec_of(strategy)) for fault in CATALOGUE.values()) >= 12
    assert all(fault.story and "/" in fault.seen_in for fault in CATALOGUE.values())


@pytest.mark.parametrize("precision", JUDGED)
def test_strategies_accept_the_runs_that_faults_are_planted_in(tmp_path, precision):
    options = run_faults.parse(["--precision", precision])
    for fault, row in run_faults.choose(options):
        group = run_faults.Group((fault.model, fault.arguments, fault.flags, fault.mesh), tmp_path, options)
        arguments = group.job(row.name, run_faults.CLEAN)["arguments"]
        config = parse_config(row.name, arguments)
        architecture, _ = architectures.resolve(fault.model)
        config.spec.require(config, architecture)


def test_a_crash_costs_one_fault_only(tmp_path, monkeypatch):
    """A job that fails is told apart from the others, which run all the same."""
    pairs = [(CATALOGUE[name], spec_of("fsdp")) for name in ("tie_broken", "no_dp_reduction")]
    group = run_faults.Group(("tiny-qwen2", (), (), Mesh(dp=2, tp=2)), tmp_path, run_faults.parse([]))
    started = []

    def start_groups(groups, folder, *, patience):
        started.append([job.get("fault") for _, jobs in groups for job in jobs])
        folder.mkdir()
        (folder / "log.txt").write_text("it broke")
        broken = "tie_broken" in started[-1]
        return [1.0] * (started[-1].index("tie_broken") if broken else len(started[-1])), int(broken)

    monkeypatch.setattr("lockstep.running.jobs.start_groups", start_groups)
    monkeypatch.setattr("lockstep.running.jobs.start_all_groups", lambda *_: None)
    outcome = run_faults.train({group: pairs}, tmp_path)
    assert (
        outcome[group, "tie_broken", "fsdp"] == "exit status 1: it broke"
        and outcome[group, "no_dp_reduction", "fsdp"] == 1.0
    )


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["no_such_fault"], "there is no fault no_such_fault"),
        (["tie_broken", "--steps", "1"], "train at least 2"),
        (["kv_input_gradient_not_reduced", "--strategy", "fsdp"], "none of these faults applies"),
        (["--precision", "mixed"], "invalid choice"),
        (["--output", "a.md"], "give another ending"),
        (["--output", "/proc/nothing/a.json"], "--output /proc/nothing: cannot be written"),
        (["--work_dir", "/proc/nothing"], "--work_dir /proc/nothing: cannot be written"),
    ],
)
def test_usage_errors(arguments, message, refusal):
    assert message in refusal(run_faults.main, arguments)


def test_list(capsys):
    assert run_faults.main(["--list"]) == 0
    out = capsys.readouterr().out
    assert collections.Counter(line.split("  ")[0] for line in out.splitlines())["tie_broken"] == 1


def test_a_temporary_folder_keeps_only_the_logs_that_an_error_names(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    outcome = {"error": TrainingFailure("it broke")}

    def run(options, folder):
        (folder / "jobs").mkdir()
        for name in ("log.txt", "tensors"):
            (folder / "jobs" / name).write_text("x")
        if "error" in outcome:
            raise outcome.pop("error")
        return 0

    monkeypatch.setattr(run_faults, "run", run)
    with pytest.raises(TrainingFailure):
        run_faults.in_temporary_folder(run_faults.parse([]))
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["log.txt"]
    (left,) = tmp_path.iterdir()
    assert run_faults.in_temporary_folder(run_faults.parse([])) == 0 and list(tmp_path.iterdir()) == [left]
