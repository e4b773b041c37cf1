"""The report of a recorded run: the verdict, what the gradient is a mean over, and what is too far."""

import dataclasses
import json
from pathlib import Path

from lockstep.ground.files import write_text
from lockstep.recorded.run import RunVerdict
from lockstep.verdict.judgement import Judgement
from lockstep.verdict.rows import StepVerdict

SHOWN = 5  # sentences of a step


def first_wrong(steps: list[StepVerdict], run: RunVerdict) -> tuple[str, list[str]]:
    """("step 2: ", what is wrong in it) of the first step with anything wrong; else ("", what is wrong with the whole run)."""
    found = ((f"step {one.step}: ", one.wrong) for one in steps if one.wrong)
    return next(found, ("", run.wrong))


def lines(steps: list[StepVerdict], run: RunVerdict) -> list[str]:
    """The verdict in a dozen lines, the verdict itself last."""
    found = []
    for verdict in steps:
        tokens = f", {verdict.tokens} tokens" if verdict.tokens else ""
        lowered = f", in {' and '.join(verdict.lowered)}" if verdict.lowered else ""
        pieces = f", in {verdict.pieces} pieces each" if verdict.pieces > 1 else ""
        found.append(
            f"step {verdict.step}: {_count(verdict.micro_batches, 'micro batch', 'es')} of {_count(verdict.shares, 'data-parallel rank', 's')}{pieces}{tokens}{lowered}"
        )
        if verdict.named is not None:
            right = abs(verdict.factor - 1) <= verdict.tolerated_weights
            factor = "" if right else f"{verdict.factor:.7g} times "
            mean = verdict.named.weighting.label
            found.append(f"  the gradient is {factor}that of {mean}{verdict.clipped}{verdict.difference}")
        farthest = max(verdict.rows, key=lambda row: row.multiple, default=None)
        if farthest is not None:
            near = sum(not row.too_far for row in verdict.rows)
            share = farthest.multiple
            how_far = f"{share:.2f} of" if share <= 1 else f"{share:.3g} times"
            found.append(
                f"  {near} of {len(verdict.rows)} tensors and losses are near enough; the farthest, {farthest.name}, is {how_far} what is tolerated"
            )
        found += [f"  {sentence}" for sentence in verdict.wrong[:SHOWN]]
        found += [f"  note: {note}" for note in verdict.notes]
    found.append(f"whole run: {run.steps} steps, {run.samples} samples")
    found += [f"  {sentence}" for sentence in run.wrong]
    found += [f"  note: {note}" for note in run.notes]
    where, wrong = first_wrong(steps, run)
    if wrong:
        return [*found, f"FAIL: {where}{wrong[0]}"]
    left = dict.fromkeys(said for verdict in steps if verdict.unseen for said in verdict.unseen.split("; "))
    means = dict.fromkeys(
        f"the gradient is that of {verdict.named.weighting.label}{verdict.difference}"
        for verdict in steps
        if verdict.named and verdict.difference
    )
    return [*found, "; ".join([f"PASS: {len(steps)} steps", *list(means)[:1], *left])]


def _count(number: int, word: str, ending: str) -> str:
    return f"{number} {word}{ending if number != 1 else ''}"


def show(steps: list[StepVerdict], run: RunVerdict, folder: Path) -> int:
    """Print the verdict, write the reports, return the exit status."""
    said = lines(steps, run)
    write_text(folder / "report.md", _in_markdown(said))
    content = {
        "verdict": said[-1].split(":")[0],
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
    print("\n".join(said[:-1]))
    print(f"report: {folder / 'report.html'}, {folder / 'report.md'}")
    print(said[-1])
    return int(content["verdict"] == "FAIL")


def _in_markdown(said: list[str]) -> str:
    """The verdict, then a list below the first line of each step."""
    *found, verdict = said
    below = [f"- {line.strip()}" if line.startswith("  ") else f"\n{line}\n" for line in found]
    return "\n".join([verdict, *below, "", "report.html has all tensors.", ""])


def _numbers(rows: list[Judgement]) -> dict[str, list[float]]:
    return {row.name: [row.distance.relative, row.multiple, row.distance.scale] for row in rows}
