"""run_verification.py from end to end, and what it says to usage errors."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from programs import completed
from ranks import ROOT
from real_runs import environment, gone

import run_verification
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
    (folder / "thesis.tex").write_text("")
    assert run_verification.main([*arguments, "--overwrite"]) == 2
    assert "holds thesis.tex, which no verification wrote" in capsys.readouterr().err
    assert (folder / "report.md").exists()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--tp_size", "4"], "does not divide the model's 2 KV heads"),
        (["--precision", "bf16"], "no tolerance is derived"),
        (["--steps", "0"], "--steps 0"),
        (["--nosuch", "1"], "unrecognized arguments"),
        (["--model_name", "nosuch"], "no built-in model"),
        (["--capture_dir", "x"], "is set by run_verification.py itself"),
    ],
)
def test_usage_errors_are_one_line_and_exit_2(tmp_path, refusal, arguments, message):
    assert message in refusal(run_verification.main, ["--output_dir", tmp_path / "verify", *arguments])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "name, ours",
    [
        ("ddp/manifest.json", True),
        ("MyStrategy/step_1.safetensors.part", True),
        ("losses/anything", True),
        (".ddp.lock", True),
        (".report.md.42.tmp", True),
        (".initial_weights.safetensors.7.tmp", True),
        ("thesis.tex", False),
        (".thesis.tex.42.tmp", False),
        ("thesis/chapter.tex", False),
        (".ssh/id", False),
        (".report.md.tmp", False),
    ],
)
def test_what_a_killed_verification_leaves_is_its_own(tmp_path, name, ours):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("")
    assert run_verification.ours(next(tmp_path.iterdir())) is ours


def verification(folder, text):
    """What an older verification has left in a folder, and a lock that stays."""
    for name in ("ddp/manifest.json", "ddp/step_1.safetensors", "losses/loss_ddp.json", "logs/log.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "report.md").write_text(text)
    (folder / ".ddp.lock").write_text("")
    return contents(folder)


def contents(folder):
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("killed_before", [False, True])
def test_an_older_verification_stays_until_a_step_is_captured(tmp_path, killed_before):
    older = verification(tmp_path, "older")
    if killed_before:  # so it was set aside, and something of the killed one lies in its place
        (tmp_path / run_verification.OLDER).mkdir()
        for path in run_verification.inside(tmp_path):
            path.rename(tmp_path / run_verification.OLDER / path.name)
        (tmp_path / "initial_weights.safetensors").write_text("killed")
        assert run_verification.ours(tmp_path / run_verification.OLDER)
    with pytest.raises(KeyboardInterrupt), run_verification.replacing(tmp_path):
        assert [path.name for path in run_verification.inside(tmp_path)] == []
        (tmp_path / "logs").mkdir()
        (tmp_path / "logs" / "log.txt").write_text("why")
        (tmp_path / "initial_weights.safetensors").write_text("new")
        raise KeyboardInterrupt
    assert contents(tmp_path) == {**older, "logs/log.txt": "why"}
    with pytest.raises(KeyboardInterrupt), run_verification.replacing(tmp_path):
        (tmp_path / "ddp").mkdir()
        (tmp_path / "ddp" / "manifest.json").write_text("new")
        raise KeyboardInterrupt
    assert contents(tmp_path) == {"ddp/manifest.json": "new", ".ddp.lock": ""}


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
