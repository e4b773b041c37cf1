import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from synthetic import control, history, rewrite, set_loss

import plot_loss_curves
from lockstep.ground import files
from lockstep.plan.config import history_file
from lockstep.verdict import loss_report as report


def folder(tmp_path, **changed):
    for strategy in ("ddp", "deepspeed", "fsdp"):
        changed.pop(strategy, history(strategy)).save(history_file(tmp_path, strategy))
    for name, run in changed.items():
        run.save(history_file(tmp_path, name))
    return tmp_path


def plot(tmp_path, *more):
    return plot_loss_curves.main(["--input_dir", str(tmp_path), *more])


def test_pass(tmp_path, capsys):
    assert plot(folder(tmp_path), "--json", str(tmp_path / "v.json")) == 0
    out = capsys.readouterr().out
    assert out.startswith(
        "=" * 60 + "\nLOSS CURVE STATISTICS\n" + "=" * 60 + "\n\nDDP (TP=1, DP=2):\n  Initial loss: 7.400000"
    )
    assert "Differences from DDP baseline:" in out and out.rstrip().endswith("PASS")
    data = json.loads((tmp_path / "v.json").read_text())
    assert (
        data["passed"]
        and data["outcome"] == "PASS"
        and data["command"].startswith("plot_loss_curves.py --input_dir")
    )
    assert (
        data["date"].endswith("+00:00")
        and data["histories"]["fsdp"]["run"]["config"]["model_name"] == "tiny-qwen2"
    )
    assert "tiny-qwen2, 2 layers, fp32, learning rate 0.001, 20 steps; torch 2, transformers 5\n" in out
    assert {v["label"] for v in data["verdicts"]} == {
        "DeepSpeed AutoTP (TP=2, DP=2)",
        "FSDP+DTensor (TP=2, DP=2)",
    }
    assert (tmp_path / "loss_curves.png").read_bytes()[:4] == b"\x89PNG"


def test_fail_is_exit_1_and_says_who(tmp_path, capsys):
    assert plot(folder(tmp_path, fsdp=history("fsdp", shift=1e-3))) == 1
    out = capsys.readouterr().out
    assert "DeepSpeed AutoTP (TP=2, DP=2): PASS" in out and "FSDP+DTensor (TP=2, DP=2): FAIL" in out


def lost(folder, *names):
    for name in names:
        history_file(folder, name).unlink()


def fifo(folder):
    lost(folder, "fsdp")
    os.mkfifo(history_file(folder, "fsdp"))


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda f: rewrite(history_file(f, "fsdp"), lambda c: c["weights"].update(initial_sha256="9" * 64)), "different weights"),
        (lambda f: lost(f, "ddp"), "needs DDP"),
        (lambda f: lost(f, "ddp", "deepspeed", "fsdp"), "train first"),
        (fifo, "not a regular file"),
        (lambda f: lost(f, "deepspeed"), None),  # one strategy is enough
    ],
)  # fmt: skip
def test_refusal_is_exit_2(tmp_path, capsys, change, message):
    change(folder(tmp_path))
    assert plot(tmp_path) == (2 if message else 0) and (message or "") in capsys.readouterr().err


@pytest.fixture
def drawn(monkeypatch):
    """The figures that are saved."""
    found = []
    monkeypatch.setattr(
        Figure, "savefig", lambda self, path, **_: (found.append(self), path.write_bytes(files.FIGURE))
    )
    return found


def beside(axes):
    """The labels beside a panel, from its top down."""
    texts = sorted(axes.texts, key=lambda text: -text.get_position()[1])
    return [text.get_text() for text in texts]


def test_the_figure_shows_both_panels(tmp_path, drawn):
    plot(folder(tmp_path, fsdp=history("fsdp", shift=8e-7)))
    top, bottom = drawn[0].axes
    assert bottom.get_yscale() == "symlog" and not drawn[0].legends
    assert beside(top) == ["DDP (TP=1, DP=2)", "DeepSpeed AutoTP (TP=2, DP=2)", "FSDP+DTensor (TP=2, DP=2)"]
    assert beside(bottom) == [
        "tolerated: up to 9.5e-06",
        "tolerated in the mean: 1.9e-06",
        "noise floor (derived): 9.5e-07",
        "at most 8.0e-07",
        "equal in every step",
    ]


def test_no_line_hides_another(tmp_path, drawn):
    """Later lines are thinner, and all have a colour and a marker of their own."""
    more = {f"fsdp-{number}": history("fsdp", run_name=f"fsdp-{number}") for number in range(2)}
    plot(folder(tmp_path, **more))
    curves = [line for line in drawn[0].axes[0].lines if len(line.get_xdata()) == 20]
    widths = [line.get_linewidth() for line in curves]
    assert len(curves) == 5 and widths == sorted(set(widths), reverse=True)
    for looks in ({line.get_color() for line in curves}, {line.get_marker() for line in curves}):
        assert len(looks) == 5


def test_the_first_step_too_far_is_named(tmp_path, drawn):
    one = history("fsdp")
    set_loss(one.steps[6], one.steps[6]["loss"] + 1e-3)
    plot(folder(tmp_path, fsdp=one))
    assert "at most 1.0e-03, too far first in step 7" in beside(drawn[0].axes[1])


def test_a_zero_is_drawn_as_zero(tmp_path, drawn):
    """And what is not zero has the axis, whose ticks are whole steps."""
    one = history("fsdp")
    set_loss(one.steps[4], one.steps[4]["loss"] + 3e-7)
    plot(folder(tmp_path, fsdp=one))
    bottom = drawn[0].axes[1]
    points = (line for line in bottom.lines if len(line.get_xdata()) == 20)
    gaps = {line.get_marker(): list(line.get_ydata()) for line in points if line.get_marker() != "None"}
    assert set(gaps) == {"o", "x"} and set(gaps["o"]) == {0.0}
    assert sorted(gaps["x"])[-2:] == [0.0, pytest.approx(3e-7, rel=1e-3)]
    assert bottom.transData.transform((0, 0))[1] > bottom.bbox.y0
    bottom.set_xlim(1, 2)
    assert all(tick == round(tick) for tick in bottom.get_xticks())


@pytest.mark.parametrize("worst", [1e-5, 1.0, 1e6])
def test_the_noise_has_a_third_of_the_panel_however_far_a_run_goes(worst):
    """An axis that is logarithmic from the smallest difference on spends nine decades on it."""
    axes = Figure().subplots()

    def share():
        low, high = axes.transData.transform([(0, 0), (0, 9.5e-7)])[:, 1]
        return (high - low) / axes.bbox.height

    report.from_zero(axes, [1e-10, worst], 9.5e-7)
    assert 0.3 < share() < 0.7
    report.from_zero(axes, [1e-10, 1e-5])
    assert share() > 0.7


def test_runs_that_agree_in_every_step_can_be_drawn():
    """There is no logarithm then."""
    axes = Figure().subplots()
    report.from_zero(axes, [0.0, 0.0])
    assert axes.get_yscale() == "linear"


def test_the_control_run_is_used_and_drawn(tmp_path, drawn, capsys):
    folder(tmp_path, fsdp=history("fsdp", shift=8e-7))
    assert plot(tmp_path) == 0
    control(lambda step: 1e-9).save(history_file(tmp_path, "control"))
    noisy = history("fsdp", shift=8e-7)
    set_loss(noisy.steps[4], noisy.steps[4]["loss"] + 4e-6)
    noisy.save(history_file(tmp_path, "fsdp"))
    assert (
        plot(tmp_path, "--json", str(tmp_path / "v.json")) == 1
    )  # 5e-6 is within the rule, not within the noise
    assert "loss too far from step 5 on" in capsys.readouterr().out
    assert json.loads((tmp_path / "v.json").read_text())["control"] == "DDP (TP=1, DP=2), control"
    bottom = drawn[-1].axes[1]
    assert any(label.startswith("noise floor (control run)") for label in beside(bottom)) and any(
        True for _ in bottom.collections
    )


def spiked(run, step, value):
    set_loss(run.steps[step - 1], value)
    return run


def test_a_spike_in_ddps_own_history_is_not_judged(tmp_path, capsys):
    """It would be as large in the control's difference, and be tolerated."""
    runs = {name: history(name) for name in ("deepspeed", "fsdp")}
    folder(tmp_path, ddp=spiked(history(), 6, 0.001), control=control(), **runs)
    assert plot(tmp_path, "--json", str(tmp_path / "v.json")) == 1
    out = capsys.readouterr().out
    assert (
        out.rstrip().endswith("\nNOT JUDGED")
        and "Not judged: in step 6 the control's loss is 6.9e+00 nats from DDP's" in out
    )
    assert json.loads((tmp_path / "v.json").read_text())["outcome"] == "NOT JUDGED"
    history_file(tmp_path, "control").unlink()
    assert plot(tmp_path) == 1 and capsys.readouterr().out.rstrip().endswith("\nFAIL")
    folder(tmp_path, control=control())
    assert plot(tmp_path) == 0


def test_a_history_under_another_name_is_refused(tmp_path, capsys):
    """A copy of DDP's own history agrees with it."""
    folder(tmp_path)
    history_file(tmp_path, "fsdp").write_bytes(history_file(tmp_path, "ddp").read_bytes())
    assert plot(tmp_path) == 2 and "is the history of ddp's run" in capsys.readouterr().err
    folder(tmp_path)
    rewrite(history_file(tmp_path, "fsdp"), lambda c: c["run"].update(label="DeepSpeed AutoTP (TP=2, DP=2)"))
    assert plot(tmp_path) == 2 and "it must be 'FSDP+DTensor (TP=2, DP=2)'" in capsys.readouterr().err


def test_what_a_file_says_is_shown_harmlessly(tmp_path, capsys):
    """Two dollars begin a formula in matplotlib; an escape character begins a command to a terminal."""
    folder(tmp_path)
    for name in ("ddp", "deepspeed", "fsdp"):
        rewrite(
            history_file(tmp_path, name),
            lambda c: c["run"]["config"].update(model_name="a$\\b{$\x1b[2J\n\u4e2d" + "x" * 99),
        )
    assert plot(tmp_path) == 0
    out = capsys.readouterr()
    assert "a$\\b{$\\x1b[2J\\n" in out.out and "\x1b" not in out.out + out.err


@pytest.mark.parametrize(
    "option, name, message",
    [
        ("--output", "loss.png/x/loss.png", "cannot be written"),
        ("--json", "loss.png/v.json", "cannot be written"),
        ("--json", "loss_ddp.json", "is a loss history"),
        ("--json", "folder", "is a folder"),
        ("--output", "loss.txt", "must end in .png"),
    ],
)
def test_outputs_are_checked_first(tmp_path, refusal, option, name, message):
    folder(tmp_path)
    (tmp_path / "loss.png").write_text("a file, no folder")
    (tmp_path / "folder").mkdir()
    said = refusal(plot_loss_curves.main, ["--input_dir", tmp_path, option, tmp_path / name])
    assert said.startswith(f"plot_loss_curves.py: {option} ") and message in said
    assert history_file(tmp_path, "ddp").is_file()


@pytest.mark.parametrize(
    "option, name",
    [("--output", "f.png"), ("--output", "f.pdf"), ("--output", "f.svg"), ("--json", "v.json")],
)
def test_results_are_replaced_and_nothing_else_is(tmp_path, capsys, option, name):
    """A figure of one's own is kept, and so is a link to one; a result is replaced as often as one likes."""
    path, other = folder(tmp_path) / name, ["--output", str(tmp_path / "other.png")] * (option == "--json")
    for _ in range(2):
        assert plot(tmp_path, option, str(path), *other) == 0
    whole = path.read_bytes()
    foreign = whole.replace(files.FIGURE, b"Somebody figure").replace(b'"passed"', b'"Passed"')
    path.write_bytes(foreign)
    assert foreign != whole and plot(tmp_path, option, str(path), *other) == 2
    (tmp_path / f"link-{name}").symlink_to(path)
    assert plot(tmp_path, option, str(tmp_path / f"link-{name}"), *other) == 2
    assert capsys.readouterr().err.count("was not written by Lockstep and is not replaced") == 2
    assert path.read_bytes() == foreign


def test_a_reader_that_leaves_early(tmp_path):
    script = Path(__file__).parents[2] / "plot_loss_curves.py"
    command = [sys.executable, script, "--input_dir", folder(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b"" and process.wait(60) == 141


def test_runs_of_a_figure_have_colours_of_their_own():
    names = ["ddp", "fsdp-float32", "ddp-bfloat16", "fsdp-bfloat16", "fsdp"]
    colors = report.colors(names)
    assert len(set(colors.values())) == len(names)
    assert (colors["ddp"], colors["fsdp"]) == (report.color_of("ddp"), report.color_of("fsdp"))
    many = report.colors(f"run-{number}" for number in range(20))  # more runs than colours
    assert set(many.values()) == {*report.FURTHER_COLORS, *(spec.color for spec in report.SPECS.values())}
