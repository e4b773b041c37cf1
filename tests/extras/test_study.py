"""run_study.py: what a study's file may hold, what is kept, and what a failed run costs."""

import json
import os
import signal
import subprocess
import sys
import time

import listed
import pytest
import synthetic
from own_strategy import own_strategy
from programs import completed
from ranks import ROOT
from real_runs import environment

import run_study
from extras.studies import converging_report, report
from extras.studies import study as study_file
from lockstep.ground.errors import UserError

SMALL = """title = "small"
tensors = 1

[shared]
batch_size = 2
seq_length = 32
debug_steps = 3
dp_size = 1

[control]

[runs.sharded]
strategy = "fsdp"
tp_size = 1
"""


def written(tmp_path, text):
    (tmp_path / "s.toml").write_text(text)
    return tmp_path / "s.toml"


@pytest.mark.parametrize(
    "change, message",
    [
        (("tp_size = 1", "tp_size = 3"), "s.toml, line 14: run sharded: --tp_size 3"),
        (("tp_size = 1", "tp_sise = 1"), "s.toml, line 14: run sharded: unrecognized arguments: --tp_sise"),
        (("tensors = 1", 'tensors = "one"'), "s.toml, line 2: tensors is 'one'"),
        (("[runs.sharded]", "[runs.ddp]"), "line 12: the name is the control's"),
        (("dp_size = 1", 'run_name = "x"'), "line 8: run_name is set by the study itself"),
        (('[runs.sharded]\nstrategy = "fsdp"\ntp_size = 1\n', ""), "line 1: a study has either tables"),
        (
            ("tp_size = 1", 'against = "ddp"'),
            'line 14: run sharded: against is "ddp", which is no run of ddp',
        ),
        (
            ("tp_size = 1", 'against = "x"\ndiffers = "y"\n[runs.x]\nstrategy = "ddp"'),
            'line 14: run sharded: against: a run with "differs" is judged by none',
        ),
    ],
)
def test_a_study_that_cannot_be_run_is_refused_with_its_line(tmp_path, refusal, change, message):
    assert change[0] in SMALL
    path = written(tmp_path, SMALL.replace(*change))
    assert message in refusal(run_study.main, [path, "--output_dir", tmp_path / "out"])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "name the file of a study"),
        (["nosuch.toml"], "nosuch.toml"),
        (["s.toml", "--only", "other"], "has no such run; it has sharded"),
    ],
)
def test_usage_errors(tmp_path, monkeypatch, refusal, arguments, message):
    written(tmp_path, SMALL)
    monkeypatch.chdir(tmp_path)
    assert message in refusal(run_study.main, arguments)


def test_where_losses_part():
    one, other = synthetic.history(steps=40), synthetic.history(steps=40)
    other.steps[4]["loss"] += 0.5
    other.steps[39]["loss"] += 0.25
    assert report.ranges(40) == [(1, 1), (2, 3), (4, 10), (11, 30), (31, 40)]
    assert report.ranges(1) == [(1, 1)] and report.ranges(3) == [(1, 1), (2, 3)]
    assert [row[1] for row in report.parting({"a": (one, other)})[1:]] == [
        "0.0e+00",
        "0.0e+00",
        "5.0e-01",
        "0.0e+00",
        "2.5e-01",
    ]


def test_a_dry_run_shows_what_differs(tmp_path, capsys):
    path = written(tmp_path, SMALL)
    assert run_study.main([str(path), "--dry_run", "--output_dir", str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    assert "sharded: FSDP+DTensor (TP=1, DP=1)\n  strategy                     fsdp (control: ddp)\n" in out
    assert not (tmp_path / "out").exists()
    (tmp_path / "text.txt").write_text("one two three " * 4000)
    other = ["--dataset_name", str(tmp_path / "text.txt")]
    assert run_study.main([str(path), "--dry_run", "--output_dir", str(tmp_path / "out"), *other]) == 0
    assert f"dataset_name                 {tmp_path}/text.txt" in capsys.readouterr().out


def test_the_studies_that_come_with_it_can_be_planned(tmp_path, capsys):
    assert run_study.main(["--list"]) == 0
    assert "studies/zero_stages.toml" in capsys.readouterr().out
    for path in run_study.STUDIES.glob("*.toml"):
        study = study_file.read(path)
        if study.converging:
            assert converging_report.plan(study, study.converging, path, tmp_path / "out")
        else:
            assert study_file.plan(study, path, tmp_path / "out")
    with pytest.raises(UserError, match="no such file|cannot be read"):
        study_file.read(tmp_path / "gone.toml")


BROKEN = """

class Broken(Mine):
    label, axes = "Broken", ("dp",)

    def forward_backward(self, micro_batches):
        raise RuntimeError("it broke")
"""


def test_a_failed_run_loses_no_other_and_finished_ones_are_kept(tmp_path, capsys):
    """First one run, as if the study had been interrupted after it; then all."""
    own_strategy(tmp_path / "mine.py", name="Mine", then=BROKEN)
    more = f'[runs.broken]\nstrategy = "{tmp_path}/mine.py:Broken"\n[runs.mine]\nstrategy = "{tmp_path}/mine.py:Mine"\n'
    more += 'differs = "to be measured"\nlearning_rate = 0.01\n'
    more += '[runs.cast]\nstrategy = "ddp"\nparam_dtype = "bfloat16"\ndiffers = "another dtype"\n'
    more += (
        f'[runs.mine-cast]\nstrategy = "{tmp_path}/mine.py:Mine"\nlearning_rate = 0.01\nagainst = "cast"\n'
    )
    path, out = written(tmp_path, SMALL + more), tmp_path / "out"
    arguments = [str(path), "--output_dir", str(out)]
    assert run_study.main([*arguments, "--only", "sharded"]) == 0, capsys.readouterr().err
    first = {each.name: each.read_bytes() for each in (out / "losses").glob("loss_*.json")}
    assert set(first) == {"loss_ddp.json", "loss_control.json", "loss_sharded.json"}
    assert run_study.main(arguments) == 2 and "--resume" in capsys.readouterr().err
    assert run_study.main([*arguments, "--resume"]) == 1
    said = capsys.readouterr().out
    assert (
        said.endswith("FAIL\n")
        and "broken: DID NOT RUN: rank 0 failed: RuntimeError: it broke, at mine.py:" in said
    )
    assert {name: (out / "losses" / name).read_bytes() for name in first} == first
    found = {row["run"]: row for row in json.loads((out / "report.json").read_text())["runs"]}
    assert {name: row["outcome"] for name, row in found.items()} == {
        "ddp": "control",
        "sharded": "PASS",
        "broken": "DID NOT RUN",
        "mine": "measured",
        "cast": "measured",
        "mine-cast": "NOT COMPARABLE",
    }
    assert found["sharded"]["tensors"] == "PASS" and found["sharded"]["worst tensor of tolerated"] < 1
    assert found["mine"]["largest loss difference"] > 1e-3
    assert (
        "they were configured differently, learning_rate is 0.01 against 0.001" in found["mine-cast"]["why"]
    )
    page = (out / "report.md").read_text()
    assert (
        "| steps | control run of ddp | sharded from ddp | mine from ddp | cast from ddp | control run of cast |"
        in page
    )
    assert (out / "losses.png").is_file()
    pages = listed.pages(out / "report.html")
    assert pages.pop("broken") is None
    assert {name: view["verdict"] for name, (_, view) in pages.items()} == {
        **{name: found[name]["outcome"] for name in ("mine", "cast", "mine-cast")},
        **dict.fromkeys(("ddp", "sharded"), "PASS"),  # of their tensors
    }
    has_tensors = {name for name, (content, _) in pages.items() if content["tables"]}
    assert has_tensors == {"ddp", "sharded"}
    for content, view in pages.values():
        assert view["name"] in content["losses"]["names"] and len(content["losses"]["steps"]) == 3
        assert len(content["losses"]["control"]) == 3 and content["losses"]["floor"] > 0


def test_an_interrupted_study_ends_with_the_same_numbers(tmp_path):
    """Two runs are the same. Ctrl-C comes while the second trains. --resume keeps the first and trains the second again: every loss, gradient
    norm and final weight is the first one's, bit for bit."""
    twice = '\n[runs.again]\nstrategy = "fsdp"\ntp_size = 1\n'
    steps = SMALL.replace("tensors = 1", "tensors = 0").replace("debug_steps = 3", "debug_steps = 24")
    path, out = written(tmp_path, steps + twice), tmp_path / "out"
    command = [sys.executable, ROOT / "run_study.py", path, "--output_dir", out]
    study = subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    first, again = (out / "losses" / f"loss_{name}.json" for name in ("sharded", "again"))
    end = time.monotonic() + 200
    while not again.exists():
        assert study.poll() is None and time.monotonic() < end, study.communicate()
        time.sleep(0.02)
    os.kill(study.pid, signal.SIGINT)
    _, err = study.communicate(timeout=60)
    assert study.returncode == 130
    assert err == "run_study.py: interrupted; --resume keeps the finished runs and goes on\n"
    kept = first.read_bytes()
    assert json.loads(again.read_text())["ended"] != "finished"
    # With the environment of the first: how many threads there are may change the last digits.
    resumed = completed([*command, "--resume"], env=environment())
    assert resumed.returncode == 0, resumed.stderr
    assert first.read_bytes() == kept
    one, other = (json.loads(each.read_text()) for each in (first, again))
    assert len(one["steps"]) == 24 and one["weights"] == other["weights"]
    for key in ("loss", "grad_norm"):
        assert [step[key] for step in one["steps"]] == [step[key] for step in other["steps"]]
