import json

import pytest
from synthetic import history

import plot_loss_curves
from lockstep.history import path_of


def folder(tmp_path, **changed):
    for strategy in ("ddp", "deepspeed", "fsdp"):
        changed.get(strategy, history(strategy)).save(path_of(tmp_path, strategy))
    return tmp_path


def plot(tmp_path, *more):
    return plot_loss_curves.main(["--input_dir", str(tmp_path), *more])


def test_pass(tmp_path, capsys):
    assert plot(folder(tmp_path), "--json", str(tmp_path / "v.json")) == 0
    out = capsys.readouterr().out
    assert out.startswith("=" * 60 + "\nLOSS CURVE STATISTICS\n" + "=" * 60 + "\n\nDDP (TP=1, DP=2):\n  Initial loss: 7.400000")
    assert "Differences from DDP baseline:" in out and out.rstrip().endswith("PASS")
    data = json.loads((tmp_path / "v.json").read_text())
    assert data["passed"] and {v["label"] for v in data["verdicts"]} == {
        "DeepSpeed AutoTP (TP=2, DP=2)",
        "FSDP+DTensor (TP=2, DP=2)",
    }
    assert (tmp_path / "loss_curves.png").read_bytes()[:4] == b"\x89PNG"


def test_fail_is_exit_1_and_says_who(tmp_path, capsys):
    assert plot(folder(tmp_path, fsdp=history("fsdp", shift=1e-3))) == 1
    out = capsys.readouterr().out
    assert "DeepSpeed AutoTP (TP=2, DP=2): PASS" in out and "FSDP+DTensor (TP=2, DP=2): FAIL" in out


def test_refusal_is_exit_2(tmp_path, capsys):
    other = history("fsdp")
    other.weights["initial_sha256"] = "x"
    assert plot(folder(tmp_path, fsdp=other)) == 2
    assert "different weights" in capsys.readouterr().err


@pytest.mark.parametrize("missing, message", [(("ddp",), "needs DDP"), (("ddp", "deepspeed", "fsdp"), "train first")])
def test_missing_histories(tmp_path, capsys, missing, message):
    folder(tmp_path)
    for strategy in missing:
        path_of(tmp_path, strategy).unlink()
    assert plot(tmp_path) == 2
    assert message in capsys.readouterr().err


def test_one_strategy_is_enough(tmp_path):
    path_of(folder(tmp_path), "deepspeed").unlink()
    assert plot(tmp_path) == 0


def test_the_figure_shows_both_panels(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path, **_: (drawn.append(self), path.write_bytes(b"x")))
    plot(folder(tmp_path, fsdp=history("fsdp", shift=1e-6)))
    top, bottom = drawn[0].axes
    assert len(top.lines) == 3 and bottom.get_yscale() == "log"
    assert any("tolerated" in str(line.get_label()) for line in bottom.lines)


def test_the_control_run_is_used_and_drawn(tmp_path, monkeypatch, capsys):
    from matplotlib.figure import Figure

    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path, **_: (drawn.append(self), path.write_bytes(b"x")))
    folder(tmp_path, fsdp=history("fsdp", shift=8e-7))
    assert plot(tmp_path) == 0
    quiet = history(shift=1e-9)
    quiet.run["label"], quiet.weights["initial_sha256"] = "control", "c"
    quiet.save(path_of(tmp_path, "control"))
    noisy = history("fsdp", shift=8e-7)
    noisy.steps[4]["loss"] += 4e-6
    noisy.save(path_of(tmp_path, "fsdp"))
    assert plot(tmp_path, "--json", str(tmp_path / "v.json")) == 1  # 5e-6 is within the rule, not within the noise
    assert "loss too far from step 5 on" in capsys.readouterr().out
    assert json.loads((tmp_path / "v.json").read_text())["control"] == "control"
    assert any("noise floor" in str(patch.get_label()) for patch in drawn[-1].axes[1].collections)
