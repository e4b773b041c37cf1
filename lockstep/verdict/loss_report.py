"""The report of a comparison of loss curves: statistics, verdict and figure."""

import itertools
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lockstep.dumps.history import History
from lockstep.ground.errors import printable
from lockstep.ground.files import FIGURE, write_atomically
from lockstep.inputs.architectures import in_words
from lockstep.plan.config import BASELINE, VERMILION
from lockstep.plan.contract import KNOWN_DIFFERENCES
from lockstep.plan.strategies import FURTHER_COLORS, color_of
from lockstep.verdict.loss_curves import FAIL, CurveVerdict
from lockstep.verdict.loss_folder import Judged
from lockstep.verdict.loss_tolerance import DERIVED_STEPS, Tolerance, loss_gap

# Of runs, one after another: where they agree, a marker of another shape shows through the one above it.
MARKERS = ("o", "x", "^", "+", "s")
_WIDE, _RULE = "=" * 60, "-" * 60


def statistics(histories: dict[str, History]) -> str:
    """Initial, final, smallest and mean loss of each run."""
    lines = [_WIDE, "LOSS CURVE STATISTICS", _WIDE]
    for history in histories.values():
        losses = [step["loss"] for step in history.steps]
        lines += [
            "",
            f"{history.run['label']}:",
            f"  Initial loss: {losses[0]:.6f}",
            f"  Final loss:   {losses[-1]:.6f}",
            f"  Min loss:     {min(losses):.6f}",
            f"  Mean loss:    {sum(losses) / len(losses):.6f}",
        ]
    return "\n".join(lines)


def verdict_block(judged: Judged) -> str:
    """What was trained, and the verdict on loss and gradient norm of each strategy, with the tolerances."""
    run, tolerance = judged.histories[BASELINE].run, judged.tolerated
    versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
    lines = ["", _RULE, f"{_title(run)}, {run['num_steps']} steps; {printable(versions, 300)}"]
    lines += ["Differences from DDP baseline: tolerances in brackets (docs/precision.md)"]
    for verdict in judged.verdicts.values():
        lines += [
            "",
            f"{verdict.label}: {verdict.outcome}",
            f"  loss       {verdict.outcome_of(verdict.red_loss_step)}  "
            f"first {abs(verdict.first_diff):.1e} (<= {tolerance.first:.1e})  "
            f"max {verdict.max_abs_diff:.1e} (<= {tolerance.maximum:.1e}) at step {verdict.worst_step}  "
            f"mean {verdict.mean_abs_diff:.1e} (<= {tolerance.mean:.1e})  "
            f"final {abs(verdict.final_diff):.1e}",
            f"  grad norm  {verdict.outcome_of(verdict.red_grad_norm_step)}  "
            f"max relative {verdict.max_grad_norm_diff:.1e} (<= {max(tolerance.grad_norm):.1e}) "
            f"at step {verdict.worst_grad_norm_step}",
            *(f"  {line}" for line in reasons(verdict)),
        ]
    return "\n".join([*lines, *(line for note in notes(judged) for line in ("", note))])


def reasons(verdict: CurveVerdict) -> list[str]:
    """Why a run fails, one line for each reason."""
    red = (("loss", verdict.red_loss_step), ("grad norm", verdict.red_grad_norm_step))
    lines = [f"{what} too far from step {step} on" for what, step in red if verdict.outcome_of(step) == FAIL]
    return [*lines, *(f"FAIL  {printable(problem, 400)}" for problem in verdict.problems)]


def notes(judged: Judged) -> list[str]:
    """Notes on the verdict as a whole."""
    lines = [f"Not judged: {judged.tolerated.doubt}"] if judged.tolerated.doubt else []
    longest = max(len(history.steps) for history in judged.histories.values())
    if longest > DERIVED_STEPS and judged.control is None:
        drift = f"in {longest}, correct runs may drift further"
        lines.append(f"Note: the tolerances are derived for {DERIVED_STEPS} steps; {drift}.")
    contracts = {
        history.run["label"]: history.contract for history in judged.histories.values() if history.contract
    }
    for key in KNOWN_DIFFERENCES:
        values = {label: contract.get(key) for label, contract in contracts.items()}
        if len({str(value) for value in values.values()}) > 1:
            lines.append(f"Note: {key} differs by strategy ({printable(values, 400)}); see docs/findings.md.")
    return lines


def _title(run: dict) -> str:
    """What was trained, in one line that is safe on a terminal."""
    config = run["config"]
    return (
        f"{printable(config['model_name'], 60)}, {in_words(run['architecture'])}, "
        f"{config['precision']}, learning rate {config['learning_rate']:g}"
    )


def _drawable(text: str) -> str:
    """Text that matplotlib shows unchanged: no formulas between dollars, no characters that its font lacks."""
    return text.encode("ascii", "backslashreplace").decode().replace("$", r"\$")


def colors(names: Iterable[str]) -> dict[str, str]:
    """A colour for each run: that of its strategy or its name, or another one if an earlier run has it."""
    chosen: dict[str, str] = {}
    for name in names:
        free = (color for color in (color_of(name), *FURTHER_COLORS) if color not in chosen.values())
        chosen[name] = next(free, color_of(name))
    return chosen


def draw(
    histories: dict[str, History], control: History | None, tolerance: Tolerance | None, path: Path
) -> None:
    """Two panels: the loss curves; the absolute difference from DDP, on a log axis that begins at 0, with the tolerance.

    A control run's difference is drawn as "noise floor (control run)".
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 7), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    baseline = histories.get(BASELINE)
    color, shown = colors(histories), list[float]()
    markers = itertools.cycle(MARKERS)
    for number, (name, history) in enumerate(histories.items()):
        steps = [step["step"] for step in history.steps]
        losses = [step["loss"] for step in history.steps]
        own_name = name != history.run["config"]["strategy"]  # runs of one strategy have one label
        label = f"{name}: {history.run['label']}" if own_name else history.run["label"]
        # thinner on top: curves that agree stay visible
        style = {"color": color[name], "linewidth": 6 - 4.5 * number / max(1, len(histories) - 1)}
        if name == BASELINE or baseline is None:
            top.plot(steps, losses, **style, label=_drawable(label))
            continue
        gaps = [*map(loss_gap, baseline.steps, history.steps)]
        shown += gaps
        marks = {"marker": next(markers), "markersize": 4, "markerfacecolor": "none", "markeredgewidth": 0.9}
        bottom.plot(steps[: len(gaps)], gaps, linestyle="", color=color[name], clip_on=False, **marks)
        top.plot(steps, losses, **style)
        top.plot([], [], **style, **marks, label=_drawable(label))
    if control is not None and baseline is not None:
        gaps = [*map(loss_gap, baseline.steps, control.steps)]
        shown += gaps
        label = "noise floor (control run)"
        bottom.fill_between(range(1, len(gaps) + 1), 0, gaps, color="0.85", step="mid", label=label, zorder=0)
    top.set_ylabel("loss, mean over DP ranks (nats)")
    top.set_title(_drawable(_title(next(iter(histories.values())).run)))
    if tolerance is not None:
        shown += [*tolerance.loss, tolerance.mean]
        red = {"color": VERMILION, "linestyle": "--"}
        bottom.plot(
            range(1, len(tolerance.loss) + 1),
            tolerance.loss,
            label=f"tolerated: up to {tolerance.maximum:.1e}",
            **red,
        )
        bottom.axhline(
            tolerance.mean, label=f"tolerated in the mean: {tolerance.mean:.1e}", **red | {"linestyle": ":"}
        )
    from_zero(bottom, shown)
    whole_steps(bottom)
    bottom.set_ylabel("|loss - DDP's loss| (nats)")
    bottom.set_xlabel("step")
    figure.legend(loc="outside lower center", ncols=2, frameon=False)  # beside the panels: it hides nothing
    for axes in (top, bottom):
        axes.grid(alpha=0.3)
    about = {"Creator": FIGURE.decode()}
    write_atomically(
        path, lambda temporary: figure.savefig(temporary, dpi=120, format=path.suffix[1:], metadata=about)
    )


def whole_steps(axes: Any) -> None:
    """Ticks at whole steps alone, however few there are."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 2.5, 5, 10], integer=True))


def from_zero(axes: Any, values: Iterable[float]) -> None:
    """A vertical axis from 0, for values that are not negative: linear up to the smallest that is not zero, then logarithmic."""
    positive = [value for value in values if 0 < value < math.inf]
    if positive:
        threshold = 10.0 ** math.floor(math.log10(min(positive)))
        axes.set_yscale("symlog", linthresh=threshold, linscale=0.5)
        axes.set_ylim(-threshold / 4, 2 * max(positive))  # a marker at 0 is whole
