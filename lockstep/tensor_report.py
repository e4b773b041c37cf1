"""What a person sees of a tensor-level comparison: the verdict and the tables, as text, Markdown and JSON."""

import json
import math
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from lockstep.config import STRATEGIES
from lockstep.diagnose import Diagnosis
from lockstep.files import write_result
from lockstep.verdict import PASSES, Result

SHORT = 12  # rows of a long table that are printed; the file has all


def show(result: Result, diagnoses: dict[str, Diagnosis], output_dir: Path | None) -> int:
    """Print the report, write report.md and report.json if a folder is given; returns the exit status, 0 or 1.

    `diagnoses` has one of every run that failed.
    """
    sections = {
        "Verdict": verdict(result),
        "Configuration": configuration(result),
        "First tensor that is too far": first_tensors(result),
        "Likely cause": causes(result, diagnoses),
        "Loss by DP rank": losses(result),
        "Layer output norms": norms(result, "forward"),
        "Gradient norms": norms(result, "backward") + norms(result, "gradient")[2:],
        "Largest distances from the reference": worst(result),
        "Largest differences from the first": differences(result),
        "Bit-identical tensors": identical(result),
        "Replicas": replicas(result),
    }
    for title, lines in sections.items():
        lines = lines[: lines.index("")] if "" in lines else lines
        more = [f"... {len(lines) - SHORT} more rows" + (" in report.md" if output_dir else "; --output_dir writes all")]
        print("\n".join(["", title, "-" * len(title), *(lines if len(lines) <= SHORT + 3 else [*lines[:SHORT], *more])]))
    if output_dir is not None:
        text = "\n\n".join(f"## {title}\n\n" + "\n".join(map(_item, lines)) for title, lines in sections.items())
        write_result(output_dir / "report.md", "# Tensor by tensor\n\n" + text + "\n")
        write_result(output_dir / "report.json", json.dumps(as_data(result, diagnoses), indent=1) + "\n")
        print(f"\nReport: {output_dir / 'report.md'}, {output_dir / 'report.json'}")
    print(f"\n{result.outcome}")
    return 0 if result.outcome == "PASS" else 1


def _item(line: str) -> str:
    return line if line.startswith(("|", "-", " ")) or not line else f"- {line}"


def _label(result: Result, name: str) -> str:
    return result.columns[name].label if name in STRATEGIES else name


def verdict(result: Result) -> list[str]:
    lines = []
    for name in result.dumps:
        rows = [row for row in result.rows if row.strategy == name]
        judged = sum(row.judged for row in rows)
        lines.append(f"{result.verdict(name):<10}  {_label(result, name)}: {judged} of {len(rows)} tensors judged, {len(rows) - judged} too small")
        small = sorted({row.name for row in rows if not row.judged})
        lines += [f"  too small: {', '.join(small)}"] if small else []
        unjudged = result.unjudged(name)
        if unjudged:
            lines.append(f"  nothing is large enough to judge in: {', '.join(unjudged)}; agreement proves nothing there")
    if result.baseline != "ddp":
        lines.append("Without a reference: batch, forward, backward and gradients of step 1 only; updates and later steps were not compared")
    return lines


def configuration(result: Result) -> list[str]:
    """What the runs really ran with, where it was not the same: no statement about their arithmetic."""
    lines = [f"{_label(result, name)}: {what}" for name, found in result.configuration.items() for what in found.values()]
    return lines or ["the same effective contract in all runs"]


def first_tensors(result: Result) -> list[str]:
    lines = []
    for name in result.dumps:
        failures = result.failures(name)
        if not failures:
            lines.append(f"{_label(result, name)}: none")
            continue
        step, _, tensor, what = failures[0]
        kind, _, where = tensor.partition("/")
        which = f"{PASSES[kind]} pass, {kind} of {where}" if where else tensor
        lines.append(f"{_label(result, name)}: step {step}, {which}: {what} ({len(failures)} tensors in all)")
    return lines


def causes(result: Result, diagnoses: dict[str, Diagnosis]) -> list[str]:
    lines = []
    for name, diagnosis in diagnoses.items():
        lines += [f"{_label(result, name)}:"]
        lines += [f"- {number}. {cause.name}: {cause.evidence}" for number, cause in enumerate(diagnosis.causes, 1)]
        lines += [f"- excluded: {'; '.join(diagnosis.excluded)}"]
    if not lines and any(result.has_failed(name) for name in result.dumps):
        return ["looked for only with a reference; name its folder, too"]
    return lines or ["nothing to explain"]


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *(f"| {' | '.join(row)} |" for row in rows)]


def losses(result: Result) -> list[str]:
    names = list(result.columns)
    rows = []
    for loss in result.losses:
        base = loss.by_strategy[result.baseline]
        row = [str(loss.step), str(loss.dp_rank), f"{loss.reference:.9f}"]
        row += [f"{loss.by_strategy[name]:.9f} ({abs(loss.by_strategy[name] - base) / base:.1e})" for name in names]
        rows.append([*row, f"{loss.tolerated / base:.1e}"])
    return _table(["step", "DP rank", "reference", *(_label(result, name) for name in names), "tolerated"], rows)


def norms(result: Result, kind: str) -> list[str]:
    """2-norms in the first step, of every column, and the largest relative difference of a norm from the baseline's."""
    rows = []
    for name, tensor in result.pairs.items():
        if name.startswith(f"{kind}/"):
            own = [distance.own_norm for distance in tensor.distances]
            base = own[list(result.columns).index(result.baseline)]
            apart = max(abs(norm - base) for norm in own) / base if base else 0.0
            rows.append([name, *(f"{norm:.6e}" for norm in own), f"{apart:.1e}"])
    return _table(["tensor", *(_label(result, name) for name in result.columns), "relative"], rows)


def worst(result: Result) -> list[str]:
    """By run and pass: the largest relative distance, and the largest share of what is tolerated."""
    table = []
    for name in result.dumps:
        for which in dict.fromkeys(PASSES.values()):
            rows = [row for row in result.rows if row.strategy == name and row.which_pass == which and row.judged]
            if rows:
                far = max(rows, key=lambda row: row.distance.relative)
                near = max(rows, key=lambda row: row.multiple)
                table.append([
                    _label(result, name), which, str(len(rows)), f"{far.distance.relative:.1e}", far.name,
                    f"{near.multiple:.2f}", near.name,
                ])  # fmt: skip
    return _table(["run", "pass", "tensors", "largest distance", "of", "largest share of the tolerated", "of"], table)


def differences(result: Result) -> list[str]:
    """In the first step, of every tensor: the largest absolute and the relative difference from the first column."""
    names, rows = list(result.columns)[1:], []
    for tensor, measured in result.pairs.items():
        row = [tensor]
        for (size, largest), distance in zip(measured.from_first[1:], measured.distances[1:], strict=True):
            row += [f"{largest:.2e}", f"{size / distance.norm if distance.norm else 0.0:.2e}"]
        rows.append(row)
    head = [f"{_label(result, name)} {what}" for name in names for what in ("max abs", "relative")]
    return _table(["tensor", *head], rows)


def identical(result: Result) -> list[str]:
    """How many tensors of the first step are the same, bit for bit, in the last two columns, by pass."""
    if len(result.columns) < 2:
        return []
    names = list(result.columns)[-2:]
    total, same = Counter(), Counter()
    exceptions = []
    for name, tensor in result.pairs.items():
        which = PASSES[name.split("/")[0]]
        total[which] += 1
        same[which] += tensor.last_two_identical
        if not tensor.last_two_identical:
            exceptions.append(name)
    lines = [f"{_label(result, names[0])} and {_label(result, names[1])}, step 1:"]
    lines += [f"- {which}: {same[which]} of {count} tensors bit-identical" for which, count in total.items()]
    return [*lines, *(["- the first that is not: " + exceptions[0], "", "Not identical: " + ", ".join(exceptions)] if exceptions else [])]


def replicas(result: Result) -> list[str]:
    lines = []
    for name, dump in result.dumps.items():
        odd = [(step, tensor, ranks) for step, entry in dump.steps.items() for tensor, ranks in entry["replicas_differ"].items()]
        count = sum(len(entry["tensors"]) for entry in dump.steps.values())
        lines.append(f"{_label(result, name)}: {count - len(odd)} of {count} tensors equal on all ranks that hold them")
        lines += [f"- step {step}: {tensor} differs on ranks {', '.join(map(str, ranks))}" for step, tensor, ranks in odd]
    return lines


def as_data(result: Result, diagnoses: dict[str, Diagnosis]) -> dict:
    """The same as JSON: null for numbers that JSON does not have."""
    return {
        "verdict": result.outcome,
        "runs": {
            name: {
                "label": dump.label,
                "verdict": result.verdict(name),
                "config": dump.run["config"],
                "configured_differently": result.configuration.get(name, {}),
                "versions": dump.run["versions"],
                "first_failure": list(result.failures(name)[:1]),
                "causes": [asdict(cause) for cause in diagnoses[name].causes] if name in diagnoses else [],
                "num_failures": len(result.failures(name)),
                "not_judged": sorted({row.name for row in result.rows if row.strategy == name and not row.judged}),
            }
            for name, dump in result.dumps.items()
        },
        "losses": [_strict(asdict(loss)) for loss in result.losses],
        "tensors": [
            {
                "run": row.strategy, "step": row.step, "name": row.name, "pass": row.which_pass, "too_far": row.too_far,
                "distance": _finite(row.distance.relative), "largest": _finite(row.distance.relative_largest),
                "of_tolerated": _finite(row.multiple), "norm": _finite(row.distance.own_norm), "judged": row.judged,
            }
            for row in result.rows
        ],
    }  # fmt: skip


def _strict(loss: dict) -> dict:
    by_strategy = {name: _finite(value) for name, value in loss["by_strategy"].items()}
    return {**{key: _finite(value) for key, value in loss.items() if key != "by_strategy"}, "by_strategy": by_strategy}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
