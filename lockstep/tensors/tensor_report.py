"""The report of a tensor-level comparison: the verdict and the tables, as text, Markdown and JSON."""

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from lockstep import origin
from lockstep.diagnosis.diagnose import Diagnosis
from lockstep.errors import printable
from lockstep.files import write_result
from lockstep.inputs.architectures import in_words
from lockstep.mesh import Mesh
from lockstep.tensors.judgement import COMPUTED, Judgement, Result, pass_of

SHORT = 12  # rows of a long table that are printed; the file has all
LONGEST = 100_000  # characters of a line
Line = str | tuple[str, ...]  # a line of text, or a row of a table


def show(result: Result, diagnoses: dict[str, Diagnosis], output_dir: Path | None) -> int:
    """Print the report, the verdict last, and write report.md and report.json if a folder is given. Returns the exit status, 0 or 1.

    If a folder is given, only what fits on a screen is printed. `diagnoses` has one for every run that failed.
    """
    short = _summary(result, diagnoses)
    tables = {} if output_dir is not None else _tables(result)
    for title, lines in (*tables.items(), *short.items()):
        lines = lines[: lines.index("")] if "" in lines else lines
        more = [f"... {len(lines) - SHORT} more rows; --output_dir writes all"]
        shown = [*lines[:SHORT], *more] if title in tables and len(lines) > SHORT + 3 else lines
        text = [printable(line, LONGEST) for line in _as_text(shown, lambda cell: cell)]
        print("\n".join(["", title, "-" * len(title), *text]))
    if output_dir is not None:
        write(result, diagnoses, output_dir)
        print(f"\nReport: {output_dir / 'report.md'}, {output_dir / 'report.json'}")
    print(f"\n{result.outcome}")
    return 0 if result.outcome == "PASS" else 1


def write(result: Result, diagnoses: dict[str, Diagnosis], folder: Path) -> None:
    """Write report.md and report.json into a folder."""
    sections = {**_summary(result, diagnoses), **_tables(result)}
    text = "\n\n".join(
        f"## {title}\n\n" + "\n".join(map(_item, _as_text(lines, _escaped)))
        for title, lines in sections.items()
    )
    write_result(folder / "report.md", f"# Tensor by tensor: {result.outcome}\n\n" + text + "\n")
    write_result(folder / "report.json", json.dumps(as_data(result, diagnoses), indent=1) + "\n")


def _summary(result: Result, diagnoses: dict[str, Diagnosis]) -> dict[str, Sequence[Line]]:
    """Title -> lines of the sections that say what was found and why. Those that have nothing to say are left out."""
    differing = any(result.configuration.values())
    said = notes(result)
    return {
        "Verdict": verdict(result),
        **({"Configuration": configuration(result)} if differing else {}),
        **({"Notes": said} if said else {}),
        "First tensor that is too far": first_tensors(result),
        **({"Cause": causes(result, diagnoses)} if result.outcome != "PASS" else {}),
    }


def _tables(result: Result) -> dict[str, Sequence[Line]]:
    """Title -> lines of the other sections: text, or rows of tables as tuples, the head first."""
    wrong = wrong_tensors(result)
    return {
        "What was compared": [f"{what}: {value}" for what, value in about(result).items()],
        **({"Wrong tensors": wrong} if len(wrong) > 1 else {}),
        "Loss by DP rank": losses(result),
        "Layer output norms": norms(result, "forward"),
        "Gradient norms": norms(result, "backward") + norms(result, "gradient")[1:],
        "Largest distances from the reference"
        if result.has_reference
        else "Largest distances from each other": worst(result),
        "Largest differences from the first": differences(result),
        "Bit-identical tensors": identical(result),
        "Replicas": replicas(result),
    }


def _as_text(lines: Sequence[Line], escape: Callable[[str], str]) -> list[str]:
    """Rows of tables as Markdown tables; `escape` is applied to each cell and to each other line."""
    text: list[str] = []
    for number, line in enumerate(lines):
        if isinstance(line, str):
            text.append(escape(line))
            continue
        text.append(f"| {' | '.join(map(escape, line))} |")
        if number == 0 or isinstance(lines[number - 1], str):
            text.append(f"|{'---|' * len(line)}")
    return text


def _escaped(text: str) -> str:
    """Text escaped for a Markdown page: labels and paths come from files and command lines."""
    return re.sub(r"([\\`|<>*\[\]])", r"\\\1", printable(text, LONGEST))


def _item(line: str) -> str:
    return line if line.startswith(("|", "-", " ")) or not line else f"- {line}"


def about(result: Result) -> dict[str, str]:
    """Model, options, meshes, versions, commits, machines and dates of the comparison."""
    dumps = result.columns
    run = next(iter(dumps.values())).run
    config, architecture = run["config"], run["architecture"]
    alike = lambda of: _alike({_label(result, name): of(dump) for name, dump in dumps.items()})  # noqa: E731
    options = (
        "optimizer",
        "learning_rate",
        "weight_decay",
        "max_grad_norm",
        "seq_length",
        "gradient_accumulation_steps",
        "attn_impl",
    )
    return {
        "model": f"{config['model_name']}, {in_words(architecture)} ({run['architecture_source']})",
        "precision": config["precision"],
        "mesh": alike(
            lambda dump: f"{Mesh(**dump.run['mesh']).label}, batch_size {dump.run['config']['batch_size']} on {dump.run['config']['device']}"
        ),
        "initial weights": alike(lambda dump: dump.run["initial_weights"]),
        "seed": alike(lambda dump: str(dump.run["config"]["seed"])),
        "steps": f"{', '.join(next(iter(dumps.values())).steps)} captured of {alike(lambda dump: str(dump.run['num_steps']))}",
        "options": ", ".join(f"{key} {config[key]}" for key in options),
        "dataset": f"{alike(lambda dump: dump.run['config']['dataset_name'])} (SHA-256 of the tokens {run['corpus_sha256'][:16]}), tokenizer {run['tokenizer']}",
        "versions": ", ".join(f"{name} {version}" for name, version in run["versions"].items()),
        "Lockstep": f"captured at {alike(lambda dump: dump.run['origin']['commit'])}; compared at {origin.commit()}",
        "processor": alike(
            lambda dump: ", ".join((dump.run["origin"]["cpu"], *dump.run["origin"]["instruction_sets"]))
        ),
        "captured": alike(lambda dump: dump.run["origin"]["date"]),
        "compared": f"{origin.now()} by {origin.command()}",
    }


def _alike(found: dict[str, str]) -> str:
    """The value if all are the same, else each with its label."""
    values = set(found.values())
    return (
        values.pop() if len(values) == 1 else ", ".join(f"{label}: {value}" for label, value in found.items())
    )


def _label(result: Result, name: str) -> str:
    return result.columns[name].label if result.has_reference else name


def verdict(result: Result) -> list[str]:
    lines = []
    for name in result.dumps:
        rows = [row for row in result.rows if row.strategy == name]
        judged = sum(row.judged for row in rows)
        lines.append(
            f"{result.verdict(name):<10}  {_label(result, name)}: {judged} of {len(rows)} tensors of {steps_in_words(rows)} judged, "
            f"{len(rows) - judged} too small to judge"
        )
        small = sorted({row.name for row in rows if not row.judged})
        lines += [f"  too small to judge: {', '.join(small)}"] if small else []
        unjudged = result.unjudged(name)
        if unjudged:
            lines.append(
                f"  nothing is large enough to judge in: {', '.join(unjudged)}; agreement proves nothing there"
            )
    if not result.has_reference:
        lines.append(
            "Without a reference: batch, forward, backward and gradients of step 1 only; updates and later steps were not compared"
        )
    return lines


def steps_in_words(rows: Sequence[Judgement]) -> str:
    """ "step 1", "steps 1 and 2", "steps 1 to 5": the steps that were judged."""
    steps = sorted({row.step for row in rows})
    if len(steps) < 2:
        return f"step {steps[0]}" if steps else "no step"
    return f"steps {steps[0]} {'and' if len(steps) == 2 else 'to'} {steps[-1]}"


def notes(result: Result) -> list[str]:
    """What is no failure and should be known: another convention, a norm that was summed in float32, what no step judges."""
    said = []
    for name in result.dumps:
        label, found = _label(result, name), result.conventions(name)
        if result.is_no_yardstick(name) and (failures := result.failures(name)):
            said.append(
                f"{label}: {len(failures)} tensors are too far from the reference to measure others by, first {failures[0][2]} in step "
                f"{failures[0][0]}: the model or its optimizer jumps there or magnifies rounding errors, or this run is wrong"
            )
        if found:
            first = found[0]
            factors = {f"{row.distance.scale:.4g}" for row in found}
            times = f" but {factors.pop()} times that" if len(factors) == 1 and factors != {"1"} else ""
            said.append(
                f"{label}: {len(found)} intermediate tensors are another convention, because what is made of them is right: they are not "
                f"the reference's{times}. The first is {first.name} in step {first.step}"
            )
        said += [
            f"{label}: the gradient norm of step {norm.step} was recorded as {norm.recorded:.9g}; the gradients' is {norm.held:.9g}. A sum "
            f"in float32 may be off by {norm.float32:.1e}"
            for norm in result.norms
            if norm.strategy == name and norm.inexact and not norm.off
        ]
        if any(row.kind == "average" for row in result.rows if row.strategy == name):
            steps = steps_in_words([row for row in result.rows if row.strategy == name])
            said.append(f"{label}: averages of the weights were judged in {steps}; nothing judges them later")
    return said


def wrong_tensors(result: Result) -> list[Line]:
    """All tensors that are too far, in order of execution, with what is tolerated of each."""
    rows = []
    for name, dump in result.dumps.items():
        excused = {(row.step, row.name) for row in result.conventions(name)}
        mine = [
            row
            for row in result.rows
            if row.strategy == name and row.too_far and (row.step, row.name) not in excused
        ]
        order = {step: list(dump.expected(step)) for step in {row.step for row in mine}}
        for row in sorted(mine, key=lambda row: (row.step, order[row.step].index(row.name))):
            distance = row.distance
            rows.append(
                [
                    _label(result, name),
                    str(row.step),
                    row.name,
                    f"{distance.relative:.2e}",
                    f"{_ratio(row.tolerated, distance.norm):.1e}",
                    f"{distance.relative_largest:.2e}",
                    f"{_ratio(row.tolerated_largest, distance.largest):.1e}",
                ]
            )
    return _table(
        ["run", "step", "tensor", "relative error", "tolerated", "largest element", "tolerated"], rows
    )


def configuration(result: Result) -> list[str]:
    """Differences of the effective contracts. They say nothing about arithmetic."""
    lines = [
        f"{_label(result, name)}: {what}"
        for name, found in result.configuration.items()
        for what in found.values()
    ]
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
        which = f"{pass_of(tensor)} pass, {kind} of {where}" if where else tensor
        lines.append(
            f"{_label(result, name)}: step {step}, {which}: {what} ({len(failures)} tensors too far in all)"
        )
    return lines


def causes(result: Result, diagnoses: dict[str, Diagnosis]) -> list[str]:
    lines = []
    for name, diagnosis in diagnoses.items():
        lines += [f"{_label(result, name)}:"]
        lines += [f"- {cause.name}: {cause.evidence}" for cause in diagnosis.causes] or ["- not explained"]
        lines += (
            [f"- observed in {result.failures(name)[0][2]}: {'; '.join(diagnosis.odd)}"]
            if diagnosis.odd
            else []
        )
        lines += [f"- excluded: {'; '.join(diagnosis.excluded)}"] if diagnosis.excluded else []
    if not lines and any(result.has_failed(name) for name in result.dumps):
        return ["looked for only with a reference; name its folder, too"]
    return lines or ["nothing to explain"]


def _table(head: list[str], rows: list[list[str]]) -> list[Line]:
    return [tuple(head), *map(tuple, rows)]


def losses(result: Result) -> list[Line]:
    names = list(result.columns)
    rows = []
    for loss in result.losses:
        base = loss.by_strategy[result.baseline]
        row = [
            str(loss.step),
            str(loss.dp_rank),
            *([f"{loss.reference:.9f}"] if result.has_reference else []),
        ]
        row += [
            f"{loss.by_strategy[name]:.9f} ({_ratio(abs(loss.by_strategy[name] - base), base):.1e})"
            for name in names
        ]
        rows.append([*row, f"{_ratio(loss.tolerated, base):.1e}"])
    reference = ["reference"] if result.has_reference else []
    return _table(
        ["step", "DP rank", *reference, *(_label(result, name) for name in names), "tolerated"], rows
    )


def _ratio(part: float, whole: float) -> float:
    return part / abs(whole) if whole else math.inf


def norms(result: Result, kind: str) -> list[Line]:
    """2-norms in the first step, by column, and the largest relative difference from the baseline's."""
    rows = []
    for name, tensor in result.pairs.items():
        if name.startswith(f"{kind}/"):
            own = [distance.own_norm for distance in tensor.distances]
            base = own[list(result.columns).index(result.baseline)]
            apart = max(abs(norm - base) for norm in own) / base if base else 0.0
            rows.append([name, *(f"{norm:.6e}" for norm in own), f"{apart:.1e}"])
    return _table(["tensor", *(_label(result, name) for name in result.columns), "relative"], rows)


def worst(result: Result) -> list[Line]:
    """By run and pass: the largest relative distance, and the largest share of its tolerance."""
    table = []
    for name in result.dumps:
        for which in ("batch", *COMPUTED):
            rows = [
                row for row in result.rows if row.strategy == name and row.which_pass == which and row.judged
            ]
            if rows:
                far = max(rows, key=lambda row: row.distance.relative)
                near = max(rows, key=lambda row: row.multiple)
                table.append(
                    [
                        _label(result, name),
                        which,
                        str(len(rows)),
                        f"{far.distance.relative:.1e}",
                        f"{_ratio(far.tolerated, far.distance.norm):.1e}",
                        far.name,
                        f"{near.multiple:.2f}",
                        near.name,
                    ]
                )
    return _table(
        [
            "run",
            "pass",
            "tensors",
            "largest distance",
            "tolerated",
            "of",
            "largest share of the tolerated",
            "of",
        ],
        table,
    )


def differences(result: Result) -> list[Line]:
    """By tensor of the first step: the largest absolute and the relative difference from the first column."""
    names, rows = list(result.columns)[1:], []
    for tensor, measured in result.pairs.items():
        row = [tensor]
        for (size, largest), distance in zip(measured.from_first[1:], measured.distances[1:], strict=True):
            row += [f"{largest:.2e}", f"{size / distance.norm if distance.norm else 0.0:.2e}"]
        rows.append(row)
    head = [f"{_label(result, name)} {what}" for name in names for what in ("max abs", "relative")]
    return _table(["tensor", *head], rows)


def identical(result: Result) -> list[str]:
    """By pass: the number of tensors of the first step that are bit-identical in the last two columns."""
    if len(result.columns) < 2:
        return []
    names = list(result.columns)[-2:]
    total: Counter[str] = Counter()
    same: Counter[str] = Counter()
    exceptions = []
    for name, tensor in result.pairs.items():
        which = pass_of(name)
        total[which] += 1
        same[which] += tensor.last_two_identical
        if not tensor.last_two_identical:
            exceptions.append(name)
    lines = [f"{_label(result, names[0])} and {_label(result, names[1])}, step 1:"]
    lines += [f"- {which}: {same[which]} of {count} tensors bit-identical" for which, count in total.items()]
    return [
        *lines,
        *(
            ["- the first that is not: " + exceptions[0], "", "Not identical: " + ", ".join(exceptions)]
            if exceptions
            else []
        ),
    ]


def replicas(result: Result) -> list[str]:
    lines = []
    for name, dump in result.dumps.items():
        odd = [
            (step, tensor, ranks)
            for step, entry in dump.steps.items()
            for tensor, ranks in entry["replicas_differ"].items()
        ]
        count = sum(len(entry["tensors"]) for entry in dump.steps.values())
        lines.append(
            f"{_label(result, name)}: {count - len(odd)} of {count} tensors equal on all ranks that hold them"
        )
        alike: dict[tuple[int | str, tuple[int, ...]], list[str]] = {}
        for step, tensor, ranks in odd:
            alike.setdefault((step, tuple(ranks)), []).append(tensor)
        lines += [
            f"- step {step}: {len(tensors)} tensors differ on ranks {', '.join(map(str, ranks))}, the first {tensors[0]}"
            for (step, ranks), tensors in alike.items()
        ]
    return lines


def as_data(result: Result, diagnoses: dict[str, Diagnosis]) -> dict:
    """The report as data for JSON, with null for numbers that JSON does not have."""
    return {
        "verdict": result.outcome,
        "about": about(result),
        "runs": {
            name: {
                "label": dump.label,
                "verdict": result.verdict(name),
                "config": dump.run["config"],
                "configured_differently": result.configuration.get(name, {}),
                "versions": dump.run["versions"],
                "origin": dump.run["origin"],
                "missing": [[step, tensor] for run, step, tensor in result.missing if run == name],
                "first_failure": list(result.failures(name)[:1]),
                "diagnosis": asdict(diagnoses[name]) if name in diagnoses else None,
                "num_failures": len(result.failures(name)),
                "not_judged": sorted(
                    {row.name for row in result.rows if row.strategy == name and not row.judged}
                ),
            }
            for name, dump in result.dumps.items()
        },
        "notes": notes(result),
        "losses": [_strict(asdict(loss)) for loss in result.losses],
        "tensors": [
            {
                "run": row.strategy,
                "step": row.step,
                "name": row.name,
                "pass": row.which_pass,
                "too_far": row.too_far,
                "distance": _finite(row.distance.relative),
                "largest": _finite(row.distance.relative_largest),
                "of_tolerated": _finite(row.multiple),
                "tolerated": _finite(_ratio(row.tolerated, row.distance.norm)),
                "tolerated_largest": _finite(_ratio(row.tolerated_largest, row.distance.largest)),
                "norm": _finite(row.distance.own_norm),
                "judged": row.judged,
            }
            for row in result.rows
        ],
    }


def _strict(loss: dict) -> dict:
    return {
        key: {name: _finite(each) for name, each in value.items()}
        if isinstance(value, dict)
        else _finite(value)
        for key, value in loss.items()
    }


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
