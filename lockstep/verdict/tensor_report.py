"""The report on a comparison of tensors: the verdict and the tables, as text, Markdown and JSON."""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from lockstep.ground.errors import printable
from lockstep.ground.files import REPORTS, plain, write_result
from lockstep.ground.words import and_more
from lockstep.verdict import report_tables as tables
from lockstep.verdict.distance import relative
from lockstep.verdict.judgement import Judgement
from lockstep.verdict.module_results import REMEDY, following, sentences
from lockstep.verdict.report_tables import Line
from lockstep.verdict.result import Findings, Result

BY_THEMSELVES = "Wrong by themselves"
SHORT = 14  # number of lines of a long section that are shown
LONGEST = 100_000  # number of characters of a line that are shown


def show(result: Result, output_dir: Path | None) -> int:
    """Print the report, the verdict last. Return the exit status, 0 or 1.

    If the report was written into a folder, only what fits on a screen is printed.
    """
    sections = _summary(result) if output_dir is not None else {**_tables(result), **_summary(result)}
    for title, lines in sections.items():
        text = [printable(line, LONGEST) for line in as_text(lines, lambda cell: cell)]
        print("\n".join(["", title, "-" * len(title), *text]))
    if output_dir is not None:
        print("\nReport: " + ", ".join(str(output_dir / name) for name in REPORTS))
    print(f"\n{result.outcome}")
    return 0 if result.outcome == "PASS" else 1


def write(result: Result, folder: Path) -> None:
    """Write report.md and report.json into a folder."""
    sections = {**_summary(result), **_tables(result)}
    text = "\n\n".join(
        f"## {title}\n\n" + "\n".join(map(_item, as_text(lines, escaped)))
        for title, lines in sections.items()
    )
    write_result(folder / "report.md", f"# Tensor by tensor: {result.outcome}\n\n" + text + "\n")
    write_result(folder / "report.json", json.dumps(plain(as_data(result)), indent=1) + "\n")


def _summary(result: Result) -> dict[str, Sequence[Line]]:
    """Return title -> lines of the sections that say what was found and why. Empty sections are left out."""
    sections = {
        "Verdict": verdict(result),
        "Configuration": configuration(result),
        "Notes": notes(result),
        "First tensor that is too far": first_tensors(result),
        "Each module by itself": by_themselves(result) if result.has_reference else [],
        "Cause": causes(result) if any(result.verdict(name) != "PASS" for name in result.runs) else [],
    }
    return {title: lines for title, lines in sections.items() if lines}


def _tables(result: Result) -> dict[str, Sequence[Line]]:
    """Return title -> lines of the other sections: text, or rows of tables as tuples, the head first.

    Long sections are cut, but for modules that are wrong by themselves.
    """
    origin = "the reference" if result.has_reference else "each other"
    sections: dict[str, Sequence[Line]] = {
        "What was compared": [f"{name}: {value}" for name, value in tables.about(result).items()],
        BY_THEMSELVES: tables.wrong_by_themselves(result),
        "Wrong tensors": tables.wrong_tensors(result),
        "Loss by DP rank": tables.losses(result),
        "Layer output norms": tables.norms(result, "forward"),
        "Gradient norms": tables.norms(result, "backward") + tables.norms(result, "gradient")[1:],
        f"Largest distances from {origin}": tables.worst(result),
        "Largest differences from the first": tables.differences(result),
        "Bit-identical tensors": tables.identical(result),
        "Replicas": tables.replicas(result),
    }
    return {title: _shortened(lines, title) for title, lines in sections.items() if len(lines) > 1}


def _shortened(lines: Sequence[Line], title: str) -> Sequence[Line]:
    """Return the first SHORT lines of a section, and how many more there are; all lines if these are few."""
    more = len(lines) - SHORT if title != BY_THEMSELVES else 0
    hint = "; report.html of --output_dir has all tensors" if title == "Wrong tensors" else ""
    return [*lines[:SHORT], f"... {more} more{hint}"] if more > 3 else lines


def as_text(lines: Sequence[Line], escape: Callable[[str], str]) -> list[str]:
    """Return lines as text, with rows of tables as Markdown tables. `escape` is applied to each cell and to each other line."""
    text: list[str] = []
    for number, line in enumerate(lines):
        if isinstance(line, str):
            text.append(escape(line))
            continue
        text.append(f"| {' | '.join(map(escape, line))} |")
        if number == 0 or isinstance(lines[number - 1], str):
            text.append(f"|{'---|' * len(line)}")
    return text


def escaped(text: str) -> str:
    """Escape text for a Markdown page: labels and paths come from files and command lines."""
    return re.sub(r"([\\`|<>*\[\]])", r"\\\1", printable(text, LONGEST))


def _item(line: str) -> str:
    """Make a line of text an item of a Markdown list. Tables, items and indented lines stay as they are."""
    return line if line.startswith(("|", "-", " ")) or not line else f"- {line}"


def verdict(result: Result) -> list[str]:
    """Return the verdict on each run, how many of its tensors are judged, and which are too small."""
    lines = []
    for name, run in result.runs.items():
        too_small = [row.name for row in run.rows if not row.judged]
        lines.append(
            f"{result.verdict(name):<10}  {result.label(name)}: {len(run.judged)} of {len(run.rows)} tensors of {steps_in_words(run.rows)} judged, "
            f"{len(too_small)} too small to judge"
        )
        lines += [f"  too small to judge: {and_more(sorted(set(too_small)))}"] if too_small else []
        if run.unjudged:
            are_updates = any(kind.startswith("parameter") for kind in run.unjudged)
            lines.append(
                f"  nothing is large enough to judge in: {', '.join(run.unjudged)}; agreement proves nothing there"
                + "; updates are larger with a larger --learning_rate" * are_updates
            )
    lines += [f"{'FAIL':<10}  {name} was not trained: {why}" for name, why in result.untrained.items()]
    if not result.has_reference:
        lines.append(
            "Without a reference: batch, forward, backward and gradients of step 1 only; updates and later steps were not compared"
        )
    return lines


def steps_in_words(rows: Sequence[Judgement]) -> str:
    """Return the steps that were judged, such as "step 1", "steps 1 and 2", "steps 1 to 5"."""
    steps = sorted({row.step for row in rows})
    if len(steps) < 2:
        return f"step {steps[0]}" if steps else "no step"
    return f"steps {steps[0]} {'and' if len(steps) == 2 else 'to'} {steps[-1]}"


def notes(result: Result) -> list[str]:
    """Return what is no failure and should be known: another convention, a norm that was summed in float32, what no step judges."""
    messages = []
    for name, run in result.runs.items():
        label = result.label(name)
        if result.is_no_yardstick(name):
            step, _, first, _ = run.failures[0]
            why = (
                "each is what its module gives from the inputs that it had, so rounding errors have grown on the way to it"
                if result.is_right_by_modules(name)
                else "the model or its optimizer jumps there or magnifies rounding errors, or this run is wrong"
            )
            messages.append(
                f"{label}: {len(run.failures)} tensors are too far from the reference to measure others by; the first is {first} in step "
                f"{step}: {why}"
            )
        if run.conventions:
            row = run.conventions[0]
            factors = {f"{row.distance.scale:.4g}" for row in run.conventions}
            times = f" but {factors.pop()} times that" if len(factors) == 1 and factors != {"1"} else ""
            messages.append(
                f"{label}: {len(run.conventions)} intermediate tensors are another convention, because what is made of them is right: they are not "
                f"the reference's{times}. The first is {row.name} in step {row.step}"
            )
        if run.skipped:
            modules = dict.fromkeys(name.partition("/")[2] for _, name in run.skipped)
            messages.append(
                f"{label}: no output of {and_more(list(modules))} was captured, as where one kernel computes several modules: each is judged together "
                "with the modules that follow it"
            )
        messages += [
            f"{label}: the gradient norm of step {norm.step} {norm.describe()}. A sum in float32 may be off by {norm.float32:.1e}"
            for norm in run.norms
            if norm.inexact and not norm.off
        ]
        if any(row.kind == "average" for row in run.rows):
            steps = steps_in_words(run.rows)
            messages.append(
                f"{label}: averages of the weights were judged in {steps}; they are not judged in later steps"
            )
    return messages


def configuration(result: Result) -> list[str]:
    """Return the differences of the effective contracts. They say nothing about arithmetic."""
    return [
        f"{result.label(name)}: {difference}"
        for name, run in result.runs.items()
        for difference in run.configuration.values()
    ]


def first_tensors(result: Result) -> list[str]:
    """Return the first failure of each run, in the order of execution, a line for each run."""
    lines = []
    for name, run in result.runs.items():
        if not run.failures:
            lines.append(f"{result.label(name)}: none")
            continue
        step, _, tensor, problem = run.failures[0]
        number = len(run.failures)
        lines.append(
            f"{result.label(name)}: step {step}, {tensor}: {problem} ({number} failure{'s' * (number > 1)} in all)"
        )
    return lines


def by_themselves(result: Result) -> list[str]:
    """Return what modules give from the inputs that they had in the run, a line for each run."""
    return [f"{result.label(name)}: {by_itself(run)}" for name, run in result.runs.items()]


def by_itself(run: Findings) -> str:
    """Return what the modules of a run give from the inputs that they had, as a sentence."""
    rows = run.by_themselves
    wrong = sentences(rows, run.choices_by_themselves)
    unlike = len(run.after_unlike)
    further = (
        f"{unlike} more are too far, but are computed after tensors whose copies differ between ranks"
        if unlike
        else ""
    )
    if wrong:
        return "; ".join([*wrong, *filter(None, [further])]) + following(rows, run.too_far)
    if rows:
        farthest = max(rows, key=lambda row: row.multiple)
        message = f"all {len(rows)} tensors are right; the farthest, {farthest.name}, is {farthest.multiple:.2f} of what is tolerated"
        return f"{message}; {further}" if further else message
    if run.alone is None:
        return f"not judged; {REMEDY}"
    return "not judged, since tensors are missing or in another convention"


def causes(result: Result) -> list[str]:
    """Return the diagnosis of each run that has one."""
    lines = []
    for name, run in result.runs.items():
        diagnosis = run.diagnosis
        if diagnosis is None:
            continue
        lines.append(f"{result.label(name)}:")
        lines += [f"- {cause.name}: {cause.evidence}" for cause in diagnosis.causes] or ["- not explained"]
        lines += [f"- observed in {run.diagnosed[2]}: {'; '.join(diagnosis.odd)}"] if diagnosis.odd else []
        lines += [f"- ruled out: {'; '.join(diagnosis.excluded)}"] if diagnosis.excluded else []
    if not lines and any(map(result.has_failed, result.runs)):
        return ["looked for only with a reference; name its folder, too"]
    return lines or ["nothing to explain"]


def as_data(result: Result) -> dict:
    """Return the report as data. `plain` (lockstep/ground/files.py) makes it fit for JSON."""
    rows = [(name, row) for name, run in result.runs.items() for row in run.rows]
    return {
        "verdict": result.outcome,
        "about": tables.about(result),
        "runs": {name: _run_data(result, name) for name in result.runs},
        "untrained": result.untrained,
        "notes": notes(result),
        "losses": result.losses,
        "tensors": [_row_data(*pair) for pair in sorted(rows, key=lambda pair: pair[1].step)],
        "tensors_by_themselves": [
            _row_data(name, row) for name, run in result.runs.items() for row in run.by_themselves
        ],
    }


def _run_data(result: Result, name: str) -> dict:
    run = result.runs[name]
    return {
        "label": run.dump.label,
        "verdict": result.verdict(name),
        "config": run.dump.run["config"],
        "configured_differently": run.configuration,
        "versions": run.dump.run["versions"],
        "origin": run.dump.run["origin"],
        "missing": run.dump.missing,
        "first_failure": run.failures[:1],
        "diagnosis": run.diagnosis,
        "num_failures": len(run.failures),
        "nearest": run.nearest,
        "not_judged": sorted({row.name for row in run.rows if not row.judged}),
    }


def _row_data(run: str, row: Judgement) -> dict:
    distance = row.distance
    return {
        "run": run,
        "step": row.step,
        "name": row.name,
        "pass": row.which_pass,
        "too_far": row.too_far,
        "distance": distance.relative,
        "largest": distance.relative_largest,
        "of_tolerated": row.multiple,
        "tolerated": relative(row.tolerated, distance.norm),
        "tolerated_largest": relative(row.tolerated_largest, distance.largest),
        "norm": distance.own_norm,
        "judged": row.judged,
        "factor": row.factor and row.factor.describe(),
    }
