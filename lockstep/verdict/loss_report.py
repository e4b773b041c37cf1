"""The report on a comparison of loss curves: statistics, verdict and figure."""

import itertools
import math
from collections.abc import Iterable, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from lockstep.dumps.history import History
from lockstep.ground.errors import printable
from lockstep.ground.files import FIGURE, write_atomically
from lockstep.inputs.architectures import in_words
from lockstep.plan.config import BASELINE, VERMILION
from lockstep.plan.contract import KNOWN_DIFFERENCES
from lockstep.plan.strategies import FURTHER_COLORS, SPECS, color_of
from lockstep.verdict.loss_curves import FAIL, CurveVerdict
from lockstep.verdict.loss_folder import Judged
from lockstep.verdict.loss_tolerance import DERIVED_STEPS, Tolerance, floors, loss_gap

# Markers and dashes of successive runs. Where runs agree, a marker of another shape shows through the one above it.
LOOKS = (
    ("o", "-"),
    ("x", (0, (4, 1.5))),
    ("^", (0, (2, 1))),
    ("+", (0, (6, 1.5, 1, 1.5))),
    ("s", (0, (1, 1))),
)
Style = dict[str, Any]  # keyword arguments of matplotlib for a line
_DOUBLE_RULE, _RULE = "=" * 60, "-" * 60


def statistics(histories: dict[str, History]) -> str:
    """Return initial, final, smallest and mean loss of each run, as text."""
    lines = [_DOUBLE_RULE, "LOSS CURVE STATISTICS", _DOUBLE_RULE]
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
    """Return what was trained, and the verdict on loss and gradient norm of each run with the tolerances, as text."""
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
    """Return why a run fails, one line for each reason."""
    red = (("loss", verdict.red_loss_step), ("grad norm", verdict.red_grad_norm_step))
    lines = [f"{name} too far from step {step} on" for name, step in red if verdict.outcome_of(step) == FAIL]
    return [*lines, *(f"FAIL  {printable(problem, 400)}" for problem in verdict.problems)]


def notes(judged: Judged) -> list[str]:
    """Return notes on the verdict as a whole, one line each."""
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
    """Return what was trained, in one line that is safe on a terminal."""
    config = run["config"]
    return (
        f"{printable(config['model_name'], 60)}, {in_words(run['architecture'])}, "
        f"{config['precision']}, learning rate {config['learning_rate']:g}"
    )


def _drawable(text: str) -> str:
    """Escape text so that matplotlib shows it as it is: no formulas between dollars, no characters that its font lacks."""
    return text.encode("ascii", "backslashreplace").decode().replace("$", r"\$")


def colors(names: Iterable[str]) -> dict[str, str]:
    """Return a colour for each run: that of its strategy or its name, or another one if an earlier run has that."""
    names, color_by_name = list(names), dict[str, str]()
    others = [*FURTHER_COLORS, *(spec.color for spec in SPECS.values() if spec.name not in names)]
    for name in names:
        free = (color for color in (color_of(name), *others) if color not in color_by_name.values())
        color_by_name[name] = next(free, color_of(name))
    return color_by_name


def draw(
    histories: dict[str, History], control: History | None, tolerance: Tolerance | None, path: Path
) -> None:
    """Draw a figure of two panels into the file `path`.

    The upper panel has the loss curves. The lower one has the absolute differences from DDP, with the tolerance, the noise floor and the
    control run's difference. Each line is labelled beside its end. The lower panel's vertical axis is linear from 0 to the noise floor,
    by which correct runs differ, and logarithmic above it.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 7), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    styles = _styles(list(histories))
    _draw_losses(top, histories, styles)
    if BASELINE in histories:
        _draw_differences(bottom, histories, control, tolerance, styles)
    whole_steps(bottom)
    for axes, label in ((top, "loss, mean over DP ranks (nats)"), (bottom, "|loss - DDP's loss| (nats)")):
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
    bottom.set_xlabel("step")
    metadata = {"Creator": FIGURE.decode()}
    write_atomically(
        path, lambda temporary: figure.savefig(temporary, dpi=120, format=path.suffix[1:], metadata=metadata)
    )


def _styles(names: list[str]) -> dict[str, Style]:
    """Return the style of each run's line.

    Lines of runs that agree lie on each other, so a later line is thinner, and has other dashes and another marker.
    """
    color_by_name, looks = colors(names), itertools.cycle(LOOKS)
    styles: dict[str, Style] = {}
    for number, name in enumerate(names):
        thinness = number / max(1, len(names) - 1)
        marker, dashes = ("", "-") if name == BASELINE else next(looks)
        styles[name] = {
            "color": color_by_name[name],
            "marker": marker,
            "linestyle": dashes,
            "linewidth": 6 - 4.5 * thinness,
            "markersize": 7 - 3 * thinness,
            "markerfacecolor": "none",
            "markeredgewidth": 1.2,
        }
    return styles


def _draw_losses(axes: Any, histories: dict[str, History], styles: dict[str, Style]) -> None:
    labels = []
    for number, (name, history) in enumerate(histories.items()):
        losses = [step["loss"] for step in history.steps]
        # The markers of different runs are at different steps.
        interval = max(1, len(losses) // 12)
        marked = (number * interval // len(histories), interval)
        axes.plot(range(1, len(losses) + 1), losses, **styles[name], markevery=marked)
        # Several runs of one strategy have the same label, so their names are shown, too.
        has_own_name = name != history.run["config"]["strategy"]
        label = f"{name}: {history.run['label']}" if has_own_name else history.run["label"]
        labels.append((losses[-1], label, styles[name]))
    axes.set_title(_drawable(_title(history.run)))
    _label_beside(axes, labels)


def _draw_differences(
    axes: Any,
    histories: dict[str, History],
    control: History | None,
    tolerance: Tolerance | None,
    styles: dict[str, Style],
) -> None:
    steps = histories[BASELINE].steps
    floor = floors(histories[BASELINE].run, histories[BASELINE].steps)[0]
    lines: list[tuple[str, Sequence[float], Style]] = []
    for name, history in histories.items():
        gaps = [*map(loss_gap, steps, history.steps)]
        if name != BASELINE:
            lines.append(
                (_in_words(gaps, tolerance), gaps, {**styles[name], "linestyle": "", "clip_on": False})
            )
    horizontal = [(f"noise floor (derived): {floor:.1e}", floor, {"color": "0.4", "linestyle": "-."})]
    if tolerance is not None:
        red = {"color": VERMILION, "linestyle": "--"}
        lines.append((f"tolerated: up to {tolerance.maximum:.1e}", tolerance.loss, red))
        horizontal.append(
            (f"tolerated in the mean: {tolerance.mean:.1e}", tolerance.mean, red | {"linestyle": ":"})
        )
    lines += [(label, [value] * len(steps), style) for label, value, style in horizontal]
    for _, values, style in lines:
        axes.plot(range(1, len(values) + 1), values, **style)
    if control is not None:
        gaps = [*map(loss_gap, steps, control.steps)]
        lines.append(
            (f"noise floor (control run): at most {max(gaps):.1e}", gaps, {"color": "0.85", "linewidth": 6})
        )
        axes.fill_between(range(1, len(gaps) + 1), 0, gaps, color="0.85", step="mid", zorder=0)
    from_zero(axes, [value for _, values, _ in lines for value in values], floor)
    _label_beside(axes, [(max(values), label, style) for label, values, style in lines])


def _in_words(gaps: list[float], tolerance: Tolerance | None) -> str:
    """Return the largest difference in words, and the first step whose difference is not tolerated, if there is one."""
    message = f"at most {max(gaps):.1e}" if any(gaps) else "equal in every step"
    is_far = [gap > bound for gap, bound in zip(gaps, tolerance.loss if tolerance else (), strict=False)]
    return f"{message}, too far first in step {is_far.index(True) + 1}" if any(is_far) else message


def _label_beside(axes: Any, labels: list[tuple[float, str, Style]]) -> None:
    """Put labels at the right of a panel, each with a piece of its line.

    A label is (value at which its line ends, text, style of the line). It stands at the height of this value, or as near as there is room.
    """
    from matplotlib.lines import Line2D

    axes.autoscale_view()
    to_axes = axes.transData - axes.transAxes
    # Of lines that end together, the first is on top.
    heights = [
        (round(to_axes.transform((0, value))[1], 2), text, style) for value, text, style in reversed(labels)
    ]
    label_height = 0.24 / (axes.get_position().height * axes.figure.get_figheight())
    y, labels_above = -label_height, len(heights)
    for height, text, style in sorted(heights, key=itemgetter(0)):
        labels_above -= 1
        y = max(min(height, 1 - label_height * labels_above), y + label_height)
        line_style = {**style, "transform": axes.transAxes, "clip_on": False, "markevery": [1]}
        axes.add_line(Line2D([1.015, 1.035, 1.055], [y] * 3, **line_style))
        axes.text(1.075, y, _drawable(text), transform=axes.transAxes, va="center", fontsize=9)


def whole_steps(axes: Any) -> None:
    """Put ticks of the horizontal axis at whole steps only, however few there are."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 2.5, 5, 10], integer=True))


def from_zero(axes: Any, values: Iterable[float], linear: float | None = None) -> None:
    """Make the vertical axis begin at 0, for values that are not negative.

    It is linear up to `linear`, and logarithmic above; by default `linear` is the smallest positive value, rounded down to a power of ten.
    It begins a little below 0, so that a marker at 0 is drawn whole.
    """
    positive = [value for value in values if 0 < value < math.inf]
    if positive:
        threshold = linear or 10.0 ** math.floor(math.log10(min(positive)))
        high = 2 * max(positive)
        # The noise has a third of the panel, or more.
        linscale = max(0.5, math.log10(max(high / threshold, 1)) / 2) if linear else 0.5
        axes.set_yscale("symlog", linthresh=threshold, linscale=linscale)
        axes.set_ylim(-threshold / 8 / linscale, high)
        if linear:
            axes.set_yticks([tick for tick in axes.get_yticks() if tick == 0 or threshold <= tick <= high])
            axes.set_yticks([threshold / 2], [f"{threshold / 2:.1e}"], minor=True)
