"""run_verification.py from end to end, and what it says to usage errors."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from programs import completed
from ranks import ROOT
from real_runs import environment, gone

import run_verification
from lockstep.ground import files
from lockstep.ground.errors import UserError
from lockstep.inputs.architectures import BUILT_IN


def verify(*arguments, cwd=ROOT):
    command = [sys.executable, ROOT / "run_verification.py", *map(str, arguments)]
    return completed(command, cwd=cwd, env=environment())


def test_from_end_to_end(tmp_path, monkeypatch, capsys):
    """From another folder, with a model and an output folder of that folder."""
    folder = tmp_path / "the output"
    (tmp_path / "models" / "a model").mkdir(parents=True)
    (tmp_path / "models" / "a model" / "config.json").write_text(json.dumps(BUILT_IN["tiny-qwen3"]))
    arguments = [
        "--output_dir",
        "the output",
        "--seq_length",
        "64",
        "--steps",
        "2",
        "--model_name",
        "models/a model",
        "--strategies",
        "ddp,deepspeed:zero_stage=3,fsdp:sequence_parallel,fsdp@tp1xdp4",
        "--batch_size",
        "2",
    ]
    done = verify(*arguments, cwd=tmp_path)
    assert done.stderr == "" and "float64 reference: 2 steps" in (folder / "logs" / "log.txt").read_text()
    assert done.returncode == 0 and done.stdout.endswith("PASS\n"), done.stdout[-3000:] + done.stderr[-3000:]
    report = json.loads((folder / "report.json").read_text())
    assert report["verdict"] == "PASS" and {run["verdict"] for run in report["runs"].values()} == {"PASS"}
    first = f"{tmp_path}/models/a model, random weights, seed 0, fp32, steps 1 to 2"
    assert (
        done.stdout.splitlines()[0] == first
        and report["about"]["initial weights"] == "random weights, seed 0"
    )
    options = ["deepspeed_zero_stage-3", "fsdp_sequence_parallel"]
    assert list(report["runs"]) == ["ddp", *options, "fsdp_tp1xdp4"] and all(
        row["judged"] for row in report["tensors"]
    )
    text = (folder / "report.md").read_text()
    assert "DeepSpeed AutoTP (TP=2, DP=2, zero_stage=3): 356 of 356 tensors" in text
    order = [
        "Verdict",
        "First tensor that is too far",
        "Loss by DP rank",
        "Layer output norms",
        "Gradient norms",
        "Largest distances",
        "Largest differences",
        "Bit-identical tensors",
        "Replicas",
    ]
    places = [text.index(f"## {title}") for title in order]
    assert places == sorted(places) and "- batch: 2 of 2 tensors bit-identical" in text
    monkeypatch.chdir(tmp_path)
    assert run_verification.main(arguments) == 2 and "nothing is overwritten" in capsys.readouterr().err
    assert (folder / "report.md").exists()


OWN = """
import torch
from ddp_strategy import DDPStrategy

class Good(DDPStrategy):
    axes = ("dp",)

    def update(self):
        norm = super().update()
        self.optimizer.zero_grad()
        return norm

class Breaks(Good):
    def update(self):
        raise RuntimeError("it broke")

class Bad(Good):
    def update(self):
        self.model.get_input_embeddings().weight.grad *= 2
        return super().update()
"""


def test_a_strategy_that_fails_does_not_take_the_others_along(tmp_path):
    own, folder = tmp_path / "own.py", tmp_path / "out"
    own.write_text(OWN)
    arguments = ["--output_dir", folder, "--seq_length", "32", "--batch_size", "2", "--tp_size", "1"]
    done = verify(*arguments, "--strategies", f"ddp,{own}:Breaks,{own}:Good,{own}:Bad")
    reason = (
        rf"job 2 of 5, {own}:Breaks, failed: rank [01] failed: RuntimeError: it broke, .*own.py:15; .*log.txt"
    )
    assert re.search(rf"run_verification.py: {reason}; the other strategies go on", done.stderr), done.stderr
    assert done.returncode == 1 and done.stdout.endswith("FAIL\n"), done.stdout
    assert re.search(f"FAIL +breaks was not trained: {reason}\n", done.stdout), done.stdout
    report = json.loads((folder / "report.json").read_text())
    verdicts = {name: run["verdict"] for name, run in report["runs"].items()}
    assert verdicts == {"ddp": "PASS", "good": "PASS", "bad": "FAIL"} and [*report["untrained"]] == ["breaks"]
    assert "it broke" in (folder / "logs" / "log.txt").read_text()
    assert "breaks was not trained" in (folder / "report.html").read_text()


@pytest.mark.parametrize("strategies, number", [("Breaks", 2), ("Breaks,Breaks@tp1xdp4", 1)])
def test_where_no_strategy_is_left_nothing_is_judged(tmp_path, strategies, number):
    own, folder = tmp_path / "own.py", tmp_path / "out"
    own.write_text(OWN)
    named = ",".join(f"{own}:{name}" for name in strategies.split(","))
    arguments = ["--output_dir", folder, "--seq_length", "32", "--batch_size", "2", "--tp_size", "1"]
    done = verify(*arguments, "--strategies", f"ddp,{named}")
    assert done.returncode == 1 and f"job {number} of " in done.stderr.splitlines()[-1], done.stderr
    assert not (folder / "report.json").exists()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--precision", "mixed", "--strategies", "ddp,fsdp"], "no tolerance is derived"),
        (["--steps", "0"], "--steps 0"),
        (["--capture_dir", "x"], "is set by run_verification.py itself"),
    ],
)
def test_usage_errors_are_one_line_and_exit_2(tmp_path, refusal, arguments, message):
    assert message in refusal(run_verification.main, ["--output_dir", tmp_path / "verify", *arguments])
    assert list(tmp_path.iterdir()) == []


def older(folder):
    """What an older verification has left in a folder, a lock that stays, and a file of somebody."""
    for name in (
        "ddp/manifest.json",
        "ddp/step_1.safetensors",
        "other/manifest.json",
        "losses/thesis.tex",
        ".ddp.lock",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    for name, begins in files.REPORTS.items():
        (folder / name).write_bytes(begins)
    return contents(folder)


def test_an_older_verification_stays_until_a_step_is_captured(tmp_path, monkeypatch, capsys):
    """All but its reports, which speak of what is replaced. Each run is told that it may replace its own older results."""
    started, before = [], older(tmp_path)

    def start(groups, folder, *, shown):
        started.extend(groups)
        raise UserError("started")

    monkeypatch.setattr(run_verification.jobs, "start_all_groups", start)
    arguments = ["--output_dir", str(tmp_path), "--strategies", "ddp,fsdp"]
    assert run_verification.main(arguments) == 2 and "nothing is overwritten" in capsys.readouterr().err
    assert contents(tmp_path) == before and started == []
    assert run_verification.main([*arguments, "--overwrite"]) == 2 and "started" in capsys.readouterr().err
    assert contents(tmp_path) == before - {"report.md", "report.json", "report.html", ".ddp.lock"}
    (_, [ddp]), (_, [fsdp]), (_, [reference]) = started
    assert "--overwrite" in ddp["arguments"] and "--overwrite" in fsdp["arguments"]
    assert ("--save_init_weights" in ddp["arguments"]) and "--save_init_weights" not in fsdp["arguments"]
    assert reference["replays"] == [str(tmp_path / name) for name in ("ddp", "fsdp")]


def test_what_no_run_captured_is_not_replaced(tmp_path, capsys):
    before = older(tmp_path)
    (tmp_path / "fsdp").mkdir()
    (tmp_path / "fsdp" / "thesis.tex").write_text("mine")
    assert run_verification.main(["--output_dir", str(tmp_path), "--overwrite"]) == 2
    assert "fsdp already exists and holds thesis.tex, which is no captured step" in capsys.readouterr().err
    assert contents(tmp_path) == {*before, "fsdp/thesis.tex"}


def contents(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_it_takes_its_ranks_along(tmp_path, number):
    command = [
        sys.executable,
        ROOT / "run_verification.py",
        "--output_dir",
        str(tmp_path / "v"),
        "--steps",
        "50",
        "--strategies",
        "ddp,fsdp",
    ]
    process = subprocess.Popen(
        command,
        env=environment(LOCKSTEP_TEST=str(tmp_path)),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 100
    while not list(tmp_path.glob("v/ddp/*")) and time.monotonic() < deadline:
        time.sleep(0.1)
    os.kill(process.pid, number)
    _, said = process.communicate(timeout=60)
    expected = {
        signal.SIGINT: (130, "run_verification.py: interrupted; --overwrite starts again\n"),
        signal.SIGKILL: (-9, ""),
    }
    assert (process.returncode, said) == expected[number]
    assert gone(tmp_path, 40) is True
