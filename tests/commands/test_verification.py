"""What run_verification_main.sh asks of run_verification.py: what the plan refuses, and a verdict without tensors."""

import json

import pytest
from synthetic import history

import run_verification
from lockstep.plan.config import history_file


def flags(folder):
    return ["--loss_output_dir", str(folder), "--storage_path", str(folder / "ray"), "--device", "cpu"]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--tp_size", "3"], "--tp_size 3 does not divide"),
        (["--model_name", "nosuch"], "no built-in model"),
        (
            ["--precision", "mixed", "--strategies", "ddp,fsdp", "--capture_dir", "captured"],
            "no tolerance is derived for its tensors",
        ),
        (["--strategies", "nosuch"], "there is no strategy nosuch"),
    ],
)
def test_the_plan_refuses_a_usage_error(tmp_path, monkeypatch, refusal, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert message in refusal(run_verification.main, ["--part", "plan", *flags(tmp_path / "out"), *arguments])
    assert list(tmp_path.iterdir()) == []


def test_the_plan_has_a_line_for_every_run(tmp_path, capsys):
    """The flags that make the first weights, and the control run, are the baseline's alone."""
    asked = ["--strategies", "ddp,fsdp@tp1xdp4", "--save_init_weights", "--control"]
    asked += ["--init_weights_path", str(tmp_path / "w.pt")]
    assert run_verification.main(["--part", "plan", *flags(tmp_path / "out"), *asked]) == 0
    lines = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert [own.split()[4:] for _, own, *_ in lines] == [
        ["--save_init_weights", "--control"],
        ["--tp_size", "1", "--run_name", "fsdp_tp1xdp4"],
    ]
    assert [(name, program) for name, _, program, _ in lines] == [
        ("ddp", "train_ddp.py"),
        ("fsdp_tp1xdp4", "train_fsdp.py"),
    ]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("shift, outcome, status", [(0.0, "PASS", 0), (0.1, "FAIL", 1)])
def test_a_verdict_of_the_losses_alone(tmp_path, capsys, shift, outcome, status):
    history().save(history_file(tmp_path, "ddp"))
    history("fsdp", shift=shift).save(history_file(tmp_path, "fsdp"))
    assert (
        run_verification.main(["--part", "verdict", *flags(tmp_path), "--strategies", "ddp,fsdp"]) == status
    )
    out = capsys.readouterr().out
    assert out.endswith(f"{outcome}\n") and "not captured" in out
    written = json.loads((tmp_path / "verdict.json").read_text())
    assert (written["losses"], written["tensors"]) == (outcome, None)
    assert (tmp_path / "loss_curves.png").is_file()
