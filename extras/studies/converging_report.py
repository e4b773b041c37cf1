"""A study with a table [converging]: every run with several seeds, compared with the control by statistics."""

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np

from extras.studies import converging, report, training
from extras.studies import study as study_file
from extras.studies.converging import FEWEST_OTHERS, OTHER, SAME, Converging, Losses
from extras.studies.report import DID_NOT_RUN
from extras.studies.study import Planned, Study
from lockstep.dumps import history
from lockstep.ground.errors import TrainingFailure, UserError, printable
from lockstep.ground.files import write_atomically
from lockstep.ground.words import in_columns
from lockstep.page import payload
from lockstep.page.writing import write as write_page
from lockstep.plan import rates
from lockstep.plan.config import BLUE, ORANGE, VERMILION
from lockstep.plan.strategies import FURTHER_COLORS
from lockstep.verdict import loss_report as curve_report
from lockstep.verdict.loss_curves import FAIL, PASS

DASHES = ("--", ":", "-.")  # of faults in the figure
CONTROL, FOUND, MISSED = "control", "found", "not found"
Seeded = dict[str, list[Planned]]  # run -> one for each seed


class SeveralSeeds:
    """See `Kind` in run_study.py: every run with several seeds."""

    def __init__(self, study: Study, told: Converging, path: Path, place: Path):
        self.study, self.told, self.place = study, told, place
        self.planned = plan(study, told, path, place)

    def show(self) -> None:
        for runs in self.planned.values():
            report.show([runs[0]])

    def run(self, command: str) -> bool:
        flat = [run for runs in self.planned.values() for run in runs]
        report.note(f"{printable(self.study.title)}: {len(flat)} runs -> {printable(self.place)}")
        failed = training.train_alike(flat, self.place, note=report.note)
        found = rows(self.study, self.told, self.planned, failed)
        tolerances = write(self.study, self.told, self.planned, found, self.place, command)
        print("", *in_columns(table(found)), "", tolerances, "", sep="\n")
        report.tell_figure(self.place)
        return good(found)


def plan(study: Study, told: Converging, path: Path, folder: Path) -> Seeded:
    """Every run with every seed. Raises UserError, with the line, for one that could not be started."""
    content = path.read_text(encoding="utf-8")
    _require_roles(study, told, path, content)
    planned: Seeded = {}
    for name, run in study.runs.items():
        _require_slow(
            run.fault, f"{path}, line {study_file.line_of(content, f'runs.{name}', 'fault')}: run {name}"
        )
        number = told.control_seeds if name in told.roles else told.seeds
        try:
            planned[name] = [
                study_file.plan_run(
                    study, f"{name}-seed{seed}", run, {**study.shared, **run.flags, "seed": seed}, folder
                )
                for seed in range(number)
            ]
        except UserError as error:
            line = study_file.line_of(content, f"runs.{name}", "")
            raise UserError(f"{path}, line {line}: run {name}: {error}") from error
        steps = planned[name][0].inputs.num_steps
        if steps < told.window:
            line = study_file.line_of(content, "converging", "window")
            raise UserError(
                f"{path}, line {line}: window is {told.window}, and {name} has {steps} steps; lower it"
            )
    for name, runs in planned.items():
        problem = _incomparable(runs[0], planned[told.control][0], whole=name in told.roles)
        if problem:
            line = study_file.line_of(content, f"runs.{name}", problem.split()[0])
            raise UserError(f"{path}, line {line}: run {name}: {problem}; give it the control's")
    return planned


def _require_roles(study: Study, told: Converging, path: Path, content: str) -> None:
    """Raise UserError, with the line, unless there are a control and a twin, and nothing that such a study would ignore."""

    def refuse(table: str, key: str, why: str) -> None:
        raise UserError(f"{path}, line {study_file.line_of(content, table, key)}: {why}")

    for key, name in zip(("control", "twin", "second_twin"), told.roles, strict=True):
        if name not in study.runs:
            refuse("converging", key, f'{key} is "{name}", which is no run; name one of [runs]')
        if study.runs[name].fault:
            refuse(f"runs.{name}", "fault", f"run {name}: the {key} has a planted fault; leave it out")
    if len(set(told.roles)) < len(told.roles):
        refuse("converging", "twin", "control, twin and second_twin are three runs; name others")
    if study.runs[told.twin].flags.get("noise_control") is not True:
        refuse(
            "converging", "twin", f'twin is "{told.twin}", a run without noise_control = true; add it there'
        )
    if told.control_seeds - told.seeds < FEWEST_OTHERS:
        refuse(
            "converging",
            "seeds",
            f"seeds is {told.seeds}, and control_seeds must be at least {FEWEST_OTHERS} more; raise it",
        )
    ignored = {"vary": study.vary, "control": study.control, "tensors": study.tensors, "memory": study.memory}
    for key, value in ignored.items():
        if value:
            refuse(
                "" if key in ("tensors", "memory") else key,
                key,
                f"{key} means nothing beside [converging]; leave it out",
            )
    tables = {"shared": study.shared, **{f"runs.{name}": run.flags for name, run in study.runs.items()}}
    for table, flags in tables.items():
        for key in ("seed", "init_seed"):
            if key in flags:
                refuse(table, key, f"{key} is set by the study itself; leave it out")
        if "noise_control" in flags and table != f"runs.{told.twin}":
            refuse(table, "noise_control", "noise_control is for the twin alone; leave it out")
    for name, run in study.runs.items():
        for key in ("differs", "against"):
            if getattr(run, key) is not None:
                refuse(
                    f"runs.{name}", key, f"run {name}: {key} means nothing beside [converging]; leave it out"
                )


ALIKE = (
    "model_name", "num_layers", "dp_size", "batch_size", "seq_length", "gradient_accumulation_steps", "dataset_name", "optimizer",
    "learning_rate", "lr_schedule", "warmup_steps", "weight_decay", "max_grad_norm", "held_out",
)  # fmt: skip


def _incomparable(run: Planned, control: Planned, *, whole: bool) -> str:
    """In what a run differs from the control so that their losses cannot be compared; "" if in nothing."""
    mine, theirs = run.config.as_dict(), control.config.as_dict()
    for key in ALIKE:
        if mine[key] != theirs[key]:
            return f"{key} is {mine[key]}, the control's {theirs[key]}"
    steps, control_steps = run.inputs.num_steps, control.inputs.num_steps
    if steps > control_steps or (whole and steps != control_steps):
        return f"debug_steps is {steps}, the control's {control_steps}"
    schedules = [planned.config.schedule_steps or planned.inputs.num_steps for planned in (run, control)]
    if schedules[0] != schedules[1] and rates.changes(vars(run.config)):
        return f"schedule_steps is {schedules[0]}, the control's {schedules[1]}"
    return ""


def _require_slow(fault: str | None, place: str) -> None:
    from extras.studies.slow import SLOW

    if fault is not None and fault not in SLOW:
        raise UserError(f"{place}: there is no slow fault {fault}; choose from {', '.join(SLOW)}")


def rows(study: Study, told: Converging, planned: Seeded, failed: dict[str, str]) -> list[dict[str, Any]]:
    """One row for each run, in the study's order. Raises TrainingFailure if the control or a twin did not run."""
    for name in told.roles:
        lost = next((run.name for run in planned[name] if run.name in failed), None)
        if lost:
            raise TrainingFailure(f"{lost} did not run ({failed[lost]}); without it nothing can be compared")
    means = {
        name: converging.in_windows(_losses(runs), told.window)
        for name, runs in planned.items()
        if not any(run.name in failed for run in runs)
    }
    baseline = tuple(means[name] for name in told.roles)
    found = []
    for name, runs in planned.items():
        row: dict[str, Any] = {
            "run": name,
            "label": runs[0].config.label,
            "fault": study.runs[name].fault,
            "seeds": len(runs),
        }
        if name not in means:
            why = next(failed[run.name] for run in runs if run.name in failed)
            found.append({**row, "outcome": DID_NOT_RUN, "why": why})
            continue
        seeds = list(range(told.seeds))
        row |= {"steps": runs[0].inputs.num_steps, "windows": means[name].tolist()}
        if name == told.control:
            row["outcome"] = CONTROL
        else:
            tests = converging.judge(told, means[name][seeds], seeds, *baseline)
            row["tests"] = {test.test: {**dataclasses.asdict(test), "worst": test.worst} for test in tests}
            alarm = any(test.found_after is not None for test in tests)
            row["outcome"] = (FOUND if alarm else MISSED) if row["fault"] else FAIL if alarm else PASS
        found.append(row)
    return found


def _losses(runs: list[Planned]) -> Losses:
    return np.array([[step["loss"] for step in history.read(run.config.history_path).steps] for run in runs])


def good(found: list[dict[str, Any]]) -> bool:
    """Whether no correct run raises an alarm. A planted fault may be missed."""
    return all(row["outcome"] in (PASS, CONTROL, FOUND, MISSED) for row in found)


def table(found: list[dict[str, Any]]) -> list[list[str]]:
    """Head and rows of the table that a person reads."""
    head = [
        "run",
        "mesh",
        "seeds",
        "steps",
        "last window",
        *(f"{test}: worst / tolerated" for test in (OTHER, SAME)),
    ]
    lines = [[*head, "found after", ""]]
    fewest = min(row["seeds"] for row in found)  # the same seeds in all rows
    for row in found:
        cells = [row["run"], row["label"], str(row["seeds"])]
        if row["outcome"] == DID_NOT_RUN:
            lines.append([*cells, *[""] * (len(head) - 2), DID_NOT_RUN])
            continue
        cells += [str(row["steps"]), f"{np.mean(row['windows'][:fewest], axis=0)[-1]:.4f}"]
        tests = row.get("tests", {})
        cells += [f"{tests[test]['worst']:.2f}" if tests else "" for test in (OTHER, SAME)]
        after = [test["found_after"] for test in tests.values() if test["found_after"] is not None]
        lines.append([*cells, str(min(after)) if after else "", row["outcome"]])
    return lines


def about_tolerance(told: Converging, found: list[dict[str, Any]]) -> str:
    """Return how wide the tolerance is, and how often correct runs exceed it, as sentences."""
    means = {row["run"]: np.array(row["windows"]) for row in found if "windows" in row}
    alarms = converging.alarms_among_correct_runs(told, *(means[name] for name in told.roles))
    row = next(row for row in found if row["run"] == told.twin)
    widths = {test: row["tests"][test]["tolerated"] for test in (OTHER, SAME)}
    moved = np.exp(converging.drift(means[told.twin], means[told.control])[: told.seeds]).mean(0)[-1]
    tolerated = (
        f"other seeds: {min(widths[OTHER]):.2f} to {max(widths[OTHER]):.2f} nats; same seeds: {min(widths[SAME]):.0f} to {max(widths[SAME]):.0f} "
        f"times as far as one ulp of the weights, which moves a window by {moved:.1e} nats at the end"
    )
    counted = "; ".join(f"{test}: {count} of {trials}" for test, (count, trials) in alarms.items())
    correct = sum(not row["fault"] and row["outcome"] not in (CONTROL, DID_NOT_RUN) for row in found)
    return (
        f"A correct run exceeds a tolerance with probability {told.false_alarm_rate:g}, over all windows and both tests; one of these {correct} "
        f"with {min(1, correct * told.false_alarm_rate):.2g} at most. Tolerated: {tolerated}. "
        f"Alarms if choices of {told.seeds} seeds of {told.second_twin} are judged (they overlap): {counted}."
    )


def write(
    study: Study,
    told: Converging,
    planned: Seeded,
    found: list[dict[str, Any]],
    place: Path,
    command: str,
) -> str:
    """Write the reports and losses.png into the folder of the study; return what the report says of its tolerances."""
    machine = report.provenance(planned[told.control][0])
    lines, tolerances = table(found), about_tolerance(told, found)
    further = ["", tolerances, ""]
    further += [f"- {row['run']}: {_story(row['fault'])}" for row in found if row["fault"]]
    further += [
        f"- {row['run']}: {DID_NOT_RUN}: {printable(row['why'], 400)}"
        for row in found
        if row["outcome"] == DID_NOT_RUN
    ]
    pages = [f"losses/report.html#{row['run']}" if "windows" in row else "" for row in found]
    report.publish(
        study,
        found,
        place,
        command,
        machine,
        good(found),
        table=lines,
        further=further,
        listed=list(zip(lines[1:], pages, strict=True)),
        said=[tolerances],
        converging=told.model_dump(),
    )
    _write_losses(study, told, planned, found, place, tolerances, report.made_by(command, machine))
    draw(told, found, place / "losses.png")
    return tolerances


def _write_losses(
    study: Study,
    told: Converging,
    planned: Seeded,
    found: list[dict[str, Any]],
    place: Path,
    tolerated: str,
    made: str,
) -> None:
    """The page of the mean losses of windows, which shows each run beside the control."""
    ran = sorted((row for row in found if "windows" in row), key=lambda row: row["run"] != told.control)
    verdict, fewest = PASS if good(found) else FAIL, told.seeds
    means = [np.mean(row["windows"][:fewest], axis=0).tolist() for row in ran]
    twin = next(row for row in ran if row["run"] == told.twin)
    contracts = {row["run"]: history.read(planned[row["run"]][0].config.history_path).contract for row in ran}
    views = [
        payload.View(
            row["run"],
            row["label"],
            row["outcome"],
            f"{row['seeds']} seeds",
            contract=contracts[row["run"]] or {},
        )
        for row in ran
    ]
    content = payload.Page(
        "verification",
        verdict,
        study.title,
        f"Mean losses of windows of {told.window} steps, over the first {fewest} seeds, beside those of {told.control}.",
        [tolerated],
        [("made", made)],
        views,
        losses=payload.Losses(
            [row["run"] for row in ran],
            [row["label"] for row in ran],
            [told.window * (window + 1) for window in range(max(map(len, means)))],
            means,
            [],
            twin["tests"][OTHER]["tolerated"],
        ),
    )
    write_page(content, place / "losses")


def _story(fault: str) -> str:
    from extras.studies.slow import SLOW

    return SLOW[fault].story


def draw(told: Converging, found: list[dict[str, Any]], path: Path) -> None:
    """Three panels over steps: the mean losses, and what either test compares, with what it tolerates.

    Runs without a fault have one colour and one entry of the legend; each fault has its own colour and dashes.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(
        3, 1, figsize=(9, 10), sharex=True, height_ratios=(3, 2, 2), layout="constrained"
    )
    ran = [row for row in found if "windows" in row]
    correct = [row for row in ran if not row["fault"] and row["run"] != told.control]
    labels = {row["run"]: row["run"] for row in ran if row not in correct}
    labels |= {row["run"]: f"{len(correct)} runs without a fault" for row in correct[:1]}
    styles = itertools.cycle(itertools.product(DASHES, (ORANGE, VERMILION, *FURTHER_COLORS[:2])))
    shown: list[float] = []
    for row in ran:
        at = np.arange(1, len(row["windows"][0]) + 1) * told.window
        if row["run"] == told.control:
            style: dict[str, Any] = {"color": "black", "linewidth": 5}
        elif row in correct:  # a run of one window is a point
            style = {"color": BLUE, "linewidth": 1, "marker": ".", "markersize": 4}
        else:
            dashes, color = next(styles)
            style = {"color": color, "linestyle": dashes, "linewidth": 1.8}
        mean = np.mean(row["windows"][: told.seeds], axis=0)
        panels[0].plot(at, mean, **style, label=labels.get(row["run"]))
        for panel, test in zip(panels[1:], (OTHER, SAME), strict=True):
            if "tests" in row:
                panel.plot(at, row["tests"][test]["differences"], **style)
                shown += row["tests"][test]["differences"] * (test == SAME)
    twin = next(row for row in ran if row["run"] == told.twin)
    for panel, test in zip(panels[1:], (OTHER, SAME), strict=True):
        tolerated = np.array(twin["tests"][test]["tolerated"])
        at = np.arange(1, len(tolerated) + 1) * told.window
        low = -tolerated if test == OTHER else np.zeros_like(tolerated)
        panel.fill_between(at, low, tolerated, color="0.88", zorder=0)
    panels[1].set_ylabel("from the control,\nother seeds (nats)")
    curve_report.from_zero(panels[2], shown)
    curve_report.whole_steps(panels[2])
    panels[2].set_ylabel("how many times as far\nas one ulp, same seeds")
    panels[0].set_ylabel(f"mean loss of {told.window} steps (nats)")
    panels[-1].set_xlabel("step")
    for panel in panels:
        panel.grid(alpha=0.3)
    figure.legend(loc="outside right upper", frameon=False)
    write_atomically(path, lambda temporary: figure.savefig(temporary, dpi=110, format=path.suffix[1:]))
    pyplot.close(figure)
