"""The report of a recorded run: the verdict, what the gradient is a mean over, and what is too far."""

import dataclasses
import json
from pathlib import Path

from lockstep.ground.errors import printable
from lockstep.ground.files import write_text
from lockstep.ground.words import and_more
from lockstep.verdict.judgement import Judgement
from lockstep.verdict.report_tables import WRONG, wrong_rows
from lockstep.verdict.rows import RunVerdict, StepVerdict
from lockstep.verdict.tensor_report import BY_THEMSELVES, as_text, escaped

SHOWN = 5  # sentences of a step, at most


def first_wrong(steps: list[StepVerdict], run: RunVerdict) -> tuple[str, list[str]]:
    """Return what is wrong in the first step with anything wrong, as ("step 2: ", sentences).

    If no step is wrong, return ("", what is wrong with the whole run).
    """
    wrong_steps = ((f"step {verdict.step}: ", verdict.wrong) for verdict in steps if verdict.wrong)
    return next(wrong_steps, ("", run.wrong))


def lines(steps: list[StepVerdict], run: RunVerdict) -> list[str]:
    """Return the report for a terminal, in about a dozen lines. The last line is the verdict."""
    shown = []
    for verdict in steps:
        tokens = f", {verdict.tokens} tokens" if verdict.tokens else ""
        lowered = f", in {' and '.join(verdict.lowered)}" if verdict.lowered else ""
        pieces = f", in {verdict.pieces} pieces each" if verdict.pieces > 1 else ""
        shown.append(
            f"step {verdict.step}: {_count(verdict.micro_batches, 'micro batch', 'es')} of {_count(verdict.shares, 'data-parallel rank', 's')}{pieces}{tokens}{lowered}"
        )
        if verdict.named is not None:
            is_right = abs(verdict.factor - 1) <= verdict.tolerated_weights
            factor = "" if is_right else f"{verdict.factor:.7g} times "
            mean = verdict.named.weighting.label
            shown.append(f"  the gradient is {factor}that of {mean}{verdict.clipped}{verdict.difference}")
        farthest = max(verdict.rows, key=lambda row: row.multiple, default=None)
        if farthest is not None:
            near = sum(not row.too_far for row in verdict.rows)
            multiple = farthest.multiple
            how_far = f"{multiple:.2f} of" if multiple <= 1 else f"{multiple:.3g} times"
            shown.append(
                f"  {near} of {len(verdict.rows)} tensors and losses are near enough; the farthest, {farthest.name}, is {how_far} what is tolerated"
            )
        if verdict.hardly_judged:
            names = [row.name for row in verdict.hardly_judged]
            shown.append(
                f"  {len(names)} of these are hardly judged, as one process in the run's dtype is as far off: half of their size or more is tolerated of {and_more(names)}"
            )
        shown += [f"  {sentence}" for sentence in verdict.wrong[:SHOWN]]
        shown += [f"  note: {note}" for note in verdict.notes]
    shown.append(f"whole run: {run.steps} steps, {run.samples} samples")
    shown += [f"  {sentence}" for sentence in run.wrong]
    shown += [f"  note: {note}" for note in run.notes]
    ended = [f"the run ended in an error ({printable(run.ended)})"] if run.ended else []
    shown += [f"  {sentence}" for sentence in ended]
    step, wrong = first_wrong(steps, run)
    if wrong:
        return [*shown, f"FAIL: {step}{wrong[0]}"]
    unjudged = dict.fromkeys(sentence for verdict in steps for sentence in verdict.unjudged)
    computed = [row.name for verdict in steps for row in verdict.hardly_judged if row.which_pass != "update"]
    if computed:
        names = list(dict.fromkeys(computed))
        unjudged[f"{and_more(names)} {'is' if len(names) == 1 else 'are'} hardly judged"] = None
    means = dict.fromkeys(
        f"the gradient is that of {verdict.named.weighting.label}{verdict.difference}"
        for verdict in steps
        if verdict.named and verdict.difference
    )
    return [*shown, "; ".join([f"PASS: {len(steps)} steps", *list(means)[:1], *unjudged, *ended])]


def _count(number: int, word: str, ending: str) -> str:
    return f"{number} {word}{ending if number != 1 else ''}"


def show(steps: list[StepVerdict], run: RunVerdict, folder: Path) -> int:
    """Print the report, write report.md and report.json, and return the exit status."""
    verdict = write(steps, run, folder)
    print(verdict)
    return int(verdict.startswith("FAIL"))


def write(steps: list[StepVerdict], run: RunVerdict, folder: Path) -> str:
    """Print the report but for its last line, the verdict. Write report.md and report.json. Return the verdict."""
    shown = lines(steps, run)
    write_text(folder / "report.md", _in_markdown(shown, steps))
    content = {
        "verdict": shown[-1].split(":")[0],
        "steps": [
            {
                "step": verdict.step,
                "weighting": verdict.named and verdict.named.weighting.name,
                "factor": verdict.factor,
                "wrong": verdict.wrong,
                "notes": verdict.notes,
                "tensors": _numbers(verdict.rows),
                "tensors by themselves": _numbers(verdict.alone),
            }
            for verdict in steps
        ],
        "run": dataclasses.asdict(run),
    }
    write_text(folder / "report.json", json.dumps(content))
    print("\n".join(shown[:-1]))
    print(f"report: {folder / 'report.html'}, {folder / 'report.md'}")
    return shown[-1]


def _in_markdown(said: list[str], steps: list[StepVerdict]) -> str:
    """Return the lines `said` as Markdown: the verdict, then the first line of each step with a list below it.

    A table has all tensors that modules do not give from their recorded inputs.
    """
    *body, verdict = said
    below = [f"- {line.strip()}" if line.startswith("  ") else f"\n{line}\n" for line in body]
    wrong = wrong_rows(row for step in steps for row in step.alone)
    table = [f"\n{BY_THEMSELVES}\n", *as_text([WRONG, *wrong], escaped)] if wrong else []
    return "\n".join([verdict, *below, *table, "", "report.html has all tensors.", ""])


def _numbers(rows: list[Judgement]) -> dict[str, list[float]]:
    """Return (relative error, multiple of what is tolerated, scale against the reference) of each row, by name."""
    return {row.name: [row.distance.relative, row.multiple, row.distance.scale] for row in rows}
