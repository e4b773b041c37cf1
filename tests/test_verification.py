"""The two ends of run_verification_main.sh: what the plan refuses, and a verdict without tensors."""

import json

import pytest
from synthetic import history

from lockstep import verification
from lockstep.plan.config import history_file


def flags(folder):
    return ["--loss_output_dir", str(folder), "--storage_path", str(folder / "ray"), "--device", "cpu"]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--tp_size", "3"], "--tp_size 3 does not divide"),
        (["--model_name", "nosuch"], "no built-in model"),
        (["--precision", "bf16", "--capture_dir", "captured"], "no tolerance is derived for its tensors"),
        (["--strategies", "nosuch"], "there is no strategy nosuch"),
    ],
)
def test_the_plan_refuses_a_usage_error(tmp_path, monkeypatch, refusal, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert message in refusal(verification.main, ["plan", *flags(tmp_path / "out"), *arguments])
    assert list(tmp_path.iterdir()) == []


def test_the_plan_has_a_line_for_every_run(tmp_path, capsys):
    assert verification.main(["plan", *flags(tmp_path / "out"), "--strategies", "ddp,fsdp@tp1xdp4"]) == 0
    lines = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert [(name, program) for name, _, program, _ in lines] == [
        ("ddp", "train_ddp.py"),
        ("fsdp_tp1xdp4", "train_fsdp.py"),
    ]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("shift, outcome, status", [(0.0, "PASS", 0), (0.1, "FAIL", 1)])
def test_a_verdict_of_the_losses_alone(tmp_path, capsys, shift, outcome, status):
    history().save(history_file(tmp_path, "ddp"))
    history("fsdp", shift=shift).save(history_file(tmp_path, "fsdp"))
    assert verification.main(["verdict", *flags(tmp_path), "--strategies", "ddp,fsdp"]) == status
    out = capsys.readouterr().out
    assert out.endswith(f"{outcome}\n") and "not captured" in out
    written = json.loads((tmp_path / "verdict.json").read_text())
    assert (written["losses"], written["tensors"]) == (outcome, None)
    assert (tmp_path / "loss_curves.png").is_file()
