"""Losses that converge: the quantiles, what the two tests find and how often they are wrong, and a small study through real runs."""

import json

import listed
import numpy as np
import pytest

import run_study
from extras.studies import converging, converging_report, slow
from extras.studies import study as study_file
from extras.studies.converging import OTHER, SAME, Converging
from extras.studies.slow import SLOW
from lockstep.faults import CATALOGUE, planted
from lockstep.ground.errors import UserError
from lockstep.plan import rates
from lockstep.plan.command_line import parse_config
from lockstep.training.preflight import load_inputs

TOLD = Converging(control="control", twin="twin", second_twin="second", control_seeds=10, seeds=3, window=10)


@pytest.mark.parametrize(
    "probability, freedom, t",
    [(0.05, 9, 2.2622), (0.01, 6, 3.7074), (0.05, 1, 12.7062), (0.001, 30, 3.6460)],
)
def test_quantiles_are_those_of_printed_tables(probability, freedom, t):
    assert converging.quantile(probability, freedom) == pytest.approx(t, abs=1e-4)


def test_means_are_of_whole_windows():
    losses = np.array([[1.0, 3.0, 5.0, 7.0, 100.0]])
    assert converging.in_windows(losses, 2).tolist() == [[2.0, 6.0]]


def curves(generator, *, runs=3, seeds=10, windows=20):
    """A control with a spread over seeds of 0.05, and runs that rounding errors move: in each seed they grow by another factor, up to 1e-3."""
    control = 3 + 0.05 * generator.standard_normal((seeds, windows))
    scale = 10 ** (-4.5 + 0.7 * generator.standard_normal((seeds, 1))) * np.linspace(0.01, 1, windows)
    return control, *(
        control
        + scale
        * np.exp(0.6 * generator.standard_normal((seeds, 1)))
        * generator.standard_normal((seeds, windows))
        for _ in range(runs)
    )


def judge(run, *baseline):
    found = converging.judge(TOLD, run, [0, 1, 2], *baseline)
    return {one.test: one.found_after for one in found}


def test_correct_runs_raise_no_more_alarms_than_stated():
    """Of 1000 correct runs, 5 in the mean for either test; 14 are more than 999 of 1000 times."""
    alarms = {OTHER: 0, SAME: 0}
    for seed in range(1000):
        generator = np.random.default_rng(seed)
        control, twin, second, run = curves(generator)
        for test, after in judge(run[:3], control, twin, second).items():
            alarms[test] += after is not None
    assert max(alarms.values()) <= 14
    assert alarms[OTHER] > 0  # a test that cannot fail would be no test


def test_each_test_finds_what_it_can():
    *baseline, run = curves(np.random.default_rng(0))
    right = run[:3].copy()
    assert judge(right, *baseline) == {OTHER: None, SAME: None}
    # The control itself: no farther than the twin
    assert judge(baseline[0][:3], *baseline)[SAME] is None
    small, large, late = right + 0.05, right + 1.0, right.copy()
    late[:, 12:] += 0.5
    assert judge(small, *baseline) == {OTHER: None, SAME: 10}  # hidden in the spread over seeds
    assert judge(large, *baseline) == {OTHER: 10, SAME: 10}
    assert judge(late, *baseline)[SAME] == 130
    assert judge(right[:, :4] + 0.05, *baseline) == {OTHER: None, SAME: 10}
    assert judge(np.full((3, 20), np.nan), *baseline) == {OTHER: 10, SAME: 10}


def test_alarms_are_counted_among_the_twins_own_seeds():
    control, twin, second, _ = curves(np.random.default_rng(1))
    counted = converging.alarms_among_correct_runs(TOLD, control, twin, second)
    assert counted[SAME][1] == counted[OTHER][1] == 120
    second[0] += 5.0  # one seed of it is wrong
    assert converging.alarms_among_correct_runs(TOLD, control, twin, second)[OTHER][0] >= 36


SMALL = """title = "small"

[converging]
control = "fsdp"
twin = "ulp"
second_twin = "eager"
control_seeds = 6
seeds = 2
window = 4

[shared]
dp_size = 1
batch_size = 2
seq_length = 16
debug_steps = 8
lr_schedule = "cosine"
warmup_steps = 2
learning_rate = 3e-3

[runs.fsdp]
strategy = "fsdp"
tp_size = 1

[runs.ulp]
strategy = "ddp"
noise_control = true

[runs.eager]
strategy = "ddp"
attn_impl = "eager"

[runs.stops-earlier]
strategy = "ddp"
debug_steps = 4
schedule_steps = 8

[runs.low]
strategy = "fsdp"
tp_size = 1
fault = "rate_one_percent_low"

[runs.cannot]
strategy = "FILE:Mine"
"""
RAISES = """from ddp_strategy import DDPStrategy


class Mine(DDPStrategy):
    def parallelize(self, model, device_mesh):
        raise RuntimeError("cannot be built")
"""


@pytest.fixture(scope="module")
def trained(new_folder):
    folder = new_folder("converging")
    (folder / "mine.py").write_text(RAISES)
    (folder / "small.toml").write_text(SMALL.replace("FILE", str(folder / "mine.py")))
    status = run_study.main([str(folder / "small.toml"), "--output_dir", str(folder / "out")])
    return status, folder / "out"


def test_a_study_finds_the_fault_and_not_the_others(trained):
    status, place = trained
    assert status == 1  # one run could not be trained
    rows = {row["run"]: row for row in json.loads((place / "report.json").read_text())["runs"]}
    outcomes = {name: row["outcome"] for name, row in rows.items()}
    assert outcomes == {
        "fsdp": "control",
        "ulp": "PASS",
        "eager": "PASS",
        "stops-earlier": "PASS",
        "low": "found",
        "cannot": "DID NOT RUN",
    }
    assert (
        rows["low"]["tests"][SAME]["found_after"] == 4 and rows["low"]["tests"][OTHER]["found_after"] is None
    )
    assert rows["stops-earlier"]["steps"] == 4 and len(rows["stops-earlier"]["windows"][0]) == 1
    assert (place / "losses.png").stat().st_size > 10_000
    report = (place / "report.md").read_text()
    pages = listed.pages(place / "report.html")
    assert pages.pop("cannot") is None and {name: view["verdict"] for name, (_, view) in pages.items()} == {
        name: outcome for name, outcome in outcomes.items() if name != "cannot"
    }
    losses = pages["low"][0]["losses"]
    assert losses["names"][0] == "fsdp" and losses["steps"] == [4, 8] and len(losses["tolerated"]) == 2
    assert len(losses["loss"][losses["names"].index("stops-earlier")]) == 1
    assert "with probability 0.01" in report and "of 15" in report and "one percent too low" in report


def test_it_goes_on_where_it_was(trained, capsys):
    status, place = trained
    path = place.parent / "small.toml"
    path.write_text(SMALL[: SMALL.index("[runs.cannot]")])
    assert run_study.main([str(path), "--output_dir", str(place), "--resume"]) == 0
    assert "run 1 of" not in capsys.readouterr().out  # all that is left has been trained


@pytest.mark.parametrize(
    "change, message",
    [
        (('twin = "ulp"', 'twin = "ulps"'), 'line 5: twin is "ulps", which is no run'),
        (
            ("schedule_steps = 8", "schedule_steps = 3"),
            "run stops-earlier: --schedule_steps 3: the run has 4",
        ),
        (("seeds = 2", "seeds = 3"), "line 8: seeds is 3, and control_seeds must be at least 4 more"),
        (("noise_control = true", ""), 'line 5: twin is "ulp", a run without noise_control = true'),
        (('twin = "ulp"', 'twin = "fsdp"'), "line 5: control, twin and second_twin are three runs"),
        (
            ("noise_control = true", 'noise_control = true\nfault = "rate_drifts"'),
            "the twin has a planted fault",
        ),
        (("dp_size = 1", "dp_size = 1\ninit_seed = 1"), "line 13: init_seed is set by the study itself"),
        (("[shared]", "[control]\ndp_size = 1\n[shared]"), "line 11: control means nothing beside"),
        (
            ("debug_steps = 4\nschedule_steps = 8", "debug_steps = 16"),
            "run stops-earlier: debug_steps is 16, the control's 8",
        ),
        (("window = 4", "window = 9"), "line 9: window is 9, and fsdp has 8 steps"),
        (('"rate_one_percent_low"', '"nosuch"'), "line 40: run low: there is no slow fault nosuch"),
    ],
)
def test_what_cannot_be_compared_is_refused_with_its_line(tmp_path, refusal, change, message):
    assert change[0] in SMALL
    text = SMALL[: SMALL.index("[runs.cannot]")]
    (tmp_path / "s.toml").write_text(text.replace(*change))
    assert message in refusal(run_study.main, [tmp_path / "s.toml", "--output_dir", tmp_path / "out"])


def test_faults_are_for_such_studies_alone(tmp_path):
    text = 'title = "t"\n[runs.x]\nstrategy = "ddp"\nfault = "rate_drifts"\n'
    (tmp_path / "s.toml").write_text(text)
    with pytest.raises(UserError, match="line 4: only a study with a table"):
        study_file.read(tmp_path / "s.toml")


@pytest.mark.parametrize(
    "fault, flags, message",
    [
        ("rate_drifts", [], "add --lr_schedule"),
        ("schedule_starts_again", [], "add --lr_schedule"),
        ("one_shard_in_a_thousand_repeated", [], "one shard in 1000, and the run has fewer"),
        ("second_moments_in_bfloat16", ["--optimizer", "sgd"], "use --optimizer adamw"),
    ],
)
def test_a_fault_that_would_do_nothing_is_refused(fault, flags, message):
    config = parse_config("ddp", ["--device", "cpu", "--dp_size", "1", "--debug_steps", "3", *flags])
    inputs = load_inputs(config)
    name = f"{slow.__file__}:{fault}"
    with pytest.raises(UserError, match=message), planted(name, config, inputs, lambda *_: None) as make:
        make()


def test_the_schedule_of_a_run_that_stops_earlier_is_the_whole_ones():
    whole = {"learning_rate": 1.0, "lr_schedule": "cosine", "warmup_steps": 2, "schedule_steps": 0}
    short = {**whole, "schedule_steps": 10}
    assert [rates.rate_of(short, step, 4) for step in range(1, 5)] == [
        rates.rate_of(whole, step, 10) for step in range(1, 5)
    ]


def test_the_study_that_comes_with_lockstep_has_what_it_names():
    study = study_file.read(run_study.STUDIES / "loss_converging.toml")
    told = study.converging
    assert told is not None and set(told.roles) <= set(study.runs)
    faults = [run.fault for run in study.runs.values() if run.fault]
    assert sorted(faults) == sorted(SLOW) and len(faults) >= 5 and not set(SLOW) & set(CATALOGUE)
    assert converging_report.good([{"outcome": "not found"}, {"outcome": "PASS"}])
    assert not converging_report.good([{"outcome": "FAIL"}])
