"""A study of single runs beside a control; and what the reports of every study have: report.md, report.html and report.json."""

import json
import statistics
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from extras.studies import training
from extras.studies.study import Planned, Study, differences
from lockstep.dumps import history
from lockstep.dumps.history import History
from lockstep.ground import origin
from lockstep.ground.errors import UserError, printable
from lockstep.ground.files import write_text
from lockstep.ground.words import in_columns, in_markdown
from lockstep.page import verification
from lockstep.page.payload import Page, View
from lockstep.page.writing import write as write_page
from lockstep.page.writing import write_listing
from lockstep.plan.config import BASELINE, CONTROL, history_file
from lockstep.verdict import loss_curves
from lockstep.verdict import loss_folder as folder
from lockstep.verdict import loss_report as curve_report
from lockstep.verdict.loss_curves import FAIL, NOT_JUDGED, PASS
from lockstep.verdict.loss_folder import Judged
from lockstep.verdict.loss_tolerance import loss_gap

if TYPE_CHECKING:
    from lockstep.verdict.result import Result

MEASURED, DID_NOT_RUN, REFUSED = "measured", "DID NOT RUN", "NOT COMPARABLE"
MEMORY = (
    "On CPUs the peak memory is that of the process, with Python and its libraries (0.3 GiB and more); predicted are the tensors alone, with "
    "buffers that were allocated and never written, which are not resident (docs/memory.md)."
)
ENDS = (1, 3, 10, 30, 100, 300, 1000, 3000, 10000)  # of the ranges
WARM_UP = 3  # steps that are left out of times, if there are more


class SingleRuns:
    """See `Kind` in run_study.py: the runs of a study, the control first."""

    def __init__(self, study: Study, planned: list[Planned], place: Path):
        self.study, self.planned, self.place = study, planned, place

    def show(self) -> None:
        show(self.planned)

    def run(self, command: str) -> bool:
        study, planned, place = self.study, self.planned, self.place
        print(f"{printable(study.title)}: {len(planned)} runs -> {printable(place)}", flush=True)
        # While one core imports for the first ranks, the other imports for the report.
        with ThreadPoolExecutor(max_workers=1) as executor:
            executor.submit(prepare, planned[0])
            failed = training.train(planned, place, apart=study.memory, note=note)
            if study.tensors:
                training.reference(planned, place)
        found = rows(study, planned, failed, place)
        write(study, planned, found, place, command)
        print("", *in_columns(table(study, found)), "", sep="\n")
        for row in found:
            if row.get("why"):
                print(f"{row['run']}: {row['outcome']}: {printable(row['why'], 400)}")
        tell_figure(place)
        return good(found)


def note(line: str) -> None:
    print(line, flush=True)


def tell_figure(place: Path) -> None:
    print(f"Report  {printable(place / 'report.md')}\nFigure  {printable(place / 'losses.png')}")


def show(planned: list[Planned]) -> None:
    """Every flag of the control, and what differs from it in each other run."""
    control = planned[0]
    print(f"{control.name}: {control.config.label}, the control")
    for key, value in control.config.as_dict().items():
        print(f"  {key:<28} {printable(value)}")
    for run in planned[1:]:
        print(f"{run.name}: {run.config.label}" + (f"; measured only: {run.differs}" if run.differs else ""))
        for key, (run_value, control_value) in differences(run, control).items():
            of_control = "" if control_value is None else f" (control: {printable(control_value)})"
            print(f"  {key:<28} {printable(run_value)}{of_control}")


def rows(study: Study, planned: list[Planned], failed: dict[str, str], place: Path) -> list[dict[str, Any]]:
    """One row for each run, the control's first, with its page. Raises UserError if the control has no usable history."""
    ran = [run for run in planned if run.name not in failed]
    bases = {run.name: _base(run) for run in ran if run is planned[0] or run.is_base}
    histories = {run.name: history.read(run.config.history_path) for run in ran}
    losses = Judged(histories, _noise(planned[0]), bases[planned[0].name][1], {}, "")
    result = judge_tensors(place, ran, losses) if study.tensors else None
    found = [_row(run, planned[0], bases, failed.get(run.name), result) for run in planned]
    outcomes = {row["run"]: row["outcome"] for row in found}
    verdict = PASS if good(found) else FAIL
    write_losses(losses, study, verdict, outcomes, place / "losses")
    for row in found:
        which = "tensors" if result is not None and row["run"] in result.runs else "losses"
        row["page"] = f"{which}/report.html#{row['run']}" if row["run"] in histories else ""
    return (
        [{**row, **predicted(run)} for row, run in zip(found, planned, strict=True)]
        if study.memory
        else found
    )


def write_losses(judged: Judged, study: Study, verdict: str, outcomes: dict[str, str], folder: Path) -> None:
    """Write the page of the runs' losses. `outcomes`: name of a run -> its outcome."""
    views = [
        View(name, log.run["label"], outcomes[name], f"{len(log.steps)} losses", contract=log.contract or {})
        for name, log in judged.histories.items()
    ]
    lead = "The loss of each step beside the control's."
    versions = ", ".join(
        f"{name} {version}" for name, version in judged.histories[BASELINE].run["versions"].items()
    )
    found_out = [
        ("versions", versions),
        ("compared", f"{origin.now()} by {origin.command()}"),
        ("Lockstep", origin.commit()),
    ]
    losses = verification.losses_of(judged)
    page = Page("verification", verdict, study.title, lead, [], found_out, views, losses=losses)
    page.command = origin.command()
    write_page(page, folder)


def prepare(run: Planned) -> None:
    """Import what the report needs, which takes seconds. What goes wrong here goes wrong in `rows` and `write` again."""
    import matplotlib.pyplot  # noqa: F401

    if run.config.capture_dir is not None:
        from lockstep import compare  # noqa: F401
        from lockstep.dumps.trace import layout_of

        layout_of(run.inputs.architecture, run.config.attn_impl)


def _base(run: Planned) -> tuple[History, loss_curves.Tolerance]:
    """What other runs are judged by: this run's history, and the tolerance that its control run shows."""
    baseline = history.read(run.config.history_path)
    return baseline, loss_curves.tolerance_for(baseline, _noise(run))


def _noise(base: Planned) -> History:
    """The control run of a run that others are judged by."""
    return history.read(history_file(base.config.loss_output_dir, CONTROL))


def predicted(run: Planned) -> dict[str, Any]:
    """What the memory plan says of a rank; nothing for a strategy that has none."""
    from extras.memory import plan

    try:
        memory_plan = plan.of(run.config, run.inputs.architecture)
    except UserError:  # what it keeps is not known
        return {}
    moment, peak = memory_plan.peak
    if run.config.device == "cpu" and memory_plan.built > peak:
        moment, peak = "building the model", memory_plan.built
    return {"predicted memory": {"bytes": peak, "moment": moment}}


def judge_tensors(place: Path, ran: list[Planned], losses: Judged) -> "Result":
    """Judge every captured tensor against the float64 reference.

    report.html, report.md and report.json of the tensors are written beside the dumps.
    """
    from lockstep import compare

    names = [run.name for run in ran if run.config.capture_dir is not None]
    folders = [place / "tensors" / name for name in (*names, "reference")]
    return compare.judge(folders, place / "tensors", losses)


def _row(
    run: Planned,
    control: Planned,
    bases: dict[str, tuple[History, loss_curves.Tolerance]],
    failure: str | None,
    result: "Result | None",
) -> dict[str, Any]:
    row: dict[str, Any] = {
        "run": run.name,
        "label": run.config.label,
        "differs from the control in": {key: pair[0] for key, pair in differences(run, control).items()},
        "told_sha256": None,
    }
    if failure:
        return {**row, "outcome": DID_NOT_RUN, "why": failure}
    log = history.read(run.config.history_path)
    row |= {"told_sha256": log.run.get("told_sha256"), **measured(log, run.inputs.batches.steps_per_epoch)}
    if run is control:
        return {**row, "outcome": "control"}
    baseline, tolerance = bases[control.name]
    row |= _gaps(log, baseline)
    if run.differs is not None:
        return {**row, "outcome": MEASURED, "why": run.differs}
    if run.against is not None:
        if run.against not in bases:
            return {
                **row,
                "outcome": DID_NOT_RUN,
                "why": f"{run.against}, which it is judged by, did not run",
            }
        baseline, tolerance = bases[run.against]
        row |= {"judged by": run.against, "from the control": _gaps(log, bases[control.name][0])}
        row |= _gaps(log, baseline)
    try:
        loss_curves.require_comparable_curves(baseline, log)
    except UserError as error:
        return {**row, "outcome": REFUSED, "why": str(error)}
    curve = loss_curves.compare_curves(baseline, log, tolerance)
    row |= {"losses": curve.outcome, "tolerated loss difference": tolerance.maximum}
    outcomes = [curve.outcome]
    if result is not None and run.against is None:
        findings = result.runs[run.name]
        verdict = FAIL if result.has_failed(run.name) else result.verdict(run.name)
        first = [" ".join(map(str, failure)) for failure in findings.failures[:1]]
        row |= {
            "tensors": verdict,
            "worst tensor of tolerated": findings.nearest,
            "tensors judged": len(findings.judged),
            "first wrong": first,
        }
        outcomes.append(verdict)
    row["outcome"] = folder.worst(outcomes)
    return {**row, "why": curve.doubt} if row["outcome"] == NOT_JUDGED else row


def _gaps(log: History, baseline: History) -> dict[str, Any]:
    """How far losses (nats) and gradient norms of groups (relative) are from those of another run."""
    pairs = list(zip(log.steps, baseline.steps, strict=False))
    gaps = [abs(a["loss"] - b["loss"]) for a, b in pairs]
    cells: dict[str, Any] = {
        "largest loss difference": max(gaps),
        "mean loss difference": statistics.fmean(gaps),
        "last loss difference": gaps[-1],
        "largest gradient norm difference": max(loss_curves.norm_gap(b, a) for a, b in pairs),
    }
    if all("group_norms" in step for pair in pairs for step in pair):
        cells["mean difference of group norms"] = {
            group: statistics.fmean(
                abs(a["group_norms"][group] - b["group_norms"][group]) / b["group_norms"][group]
                for a, b in pairs
            )
            for group in baseline.steps[0]["group_norms"]
        }
    return cells


def measured(mine: History, steps_per_epoch: int) -> dict[str, Any]:
    """First and last loss, time and memory of a finished run."""
    steady = mine.steps[WARM_UP:] or mine.steps
    seconds = statistics.median(step["seconds"] for step in steady)
    memory = mine.run["peak_memory"]
    return {
        "first loss": mine.steps[0]["loss"],
        "last loss": mine.steps[-1]["loss"],
        "steps": len(mine.steps),
        "median seconds per step": seconds,
        "tokens per second": mine.steps[0]["tokens"] / seconds,
        "samples per second": mine.steps[0]["tokens"] / mine.run["config"]["seq_length"] / seconds,
        "seconds per epoch": seconds * steps_per_epoch,
        "peak memory": {"kind": memory["kind"], "bytes by rank": memory["bytes_by_rank"]},
        **({"held out": mine.run["held_out"]} if "held_out" in mine.run else {}),
    }


def ranges(steps: int) -> list[tuple[int, int]]:
    """(first, last) of the ranges that `steps` steps make."""
    ends = [*(end for end in ENDS if end < steps), steps]
    return [(before + 1, end) for before, end in zip([0, *ends], ends, strict=False)]


def _largest(one: History, other: History, first: int, last: int) -> float:
    """The largest difference of the losses (nats) in the steps from `first` to `last`."""
    pairs = zip(one.steps[first - 1 : last], other.steps[first - 1 : last], strict=True)
    return max(loss_gap(*pair) for pair in pairs)


def parting(pairs: dict[str, tuple[History, History]]) -> list[list[str]]:
    """The table of the largest loss differences in ranges of steps, its head first.

    `pairs`: title of a column -> the two runs that it compares.
    """
    steps = min(len(run.steps) for pair in pairs.values() for run in pair)
    return [
        ["steps", *pairs],
        *(
            [f"{first} to {last}", *(f"{_largest(*pair, first, last):.1e}" for pair in pairs.values())]
            for first, last in ranges(steps)
        ),
    ]


def _parting(planned: list[Planned], histories: dict[str, History]) -> list[str]:
    """Lines of a table: where losses part.

    Each run is compared with the one that it is judged by, and that one with its own control run.
    """
    pairs: dict[str, tuple[History, History]] = {}
    for run in planned:
        base = run.against or planned[0].name
        if run is not planned[0] and {run.name, base} <= histories.keys():
            pairs[f"{run.name} from {base}"] = (histories[run.name], histories[base])
        if run.name in histories and (run is planned[0] or run.is_base):
            pairs[f"control run of {run.name}"] = (_noise(run), histories[run.name])
    about = "Largest difference of the losses (nats). A control run starts from weights perturbed by one ulp: rounding errors alone do that."
    return ["", about, "", *in_markdown(parting(pairs))]


def resources(found: list[dict[str, Any]]) -> list[str]:
    """Lines of a table: time of an epoch and memory of each rank.

    The last line says which runs that pass need least of either.
    """
    lines = [
        [
            "run",
            "s an epoch",
            "samples/s",
            "mean loss of the first and last step",
            "peak memory of the ranks",
            "of the plan",
        ]
    ]
    ran = [row for row in found if "peak memory" in row]
    for row in ran:
        memory = ", ".join(f"{size / 2**20:.0f}" for size in row["peak memory"]["bytes by rank"])
        plan = row.get("predicted memory")
        of_plan = f"{max(row['peak memory']['bytes by rank']) / plan['bytes']:.2f}" if plan else "not known"
        times = [f"{row['seconds per epoch']:.1f}", f"{row['samples per second']:.1f}"]
        losses = f"{row['first loss']:.4f}, {row['last loss']:.4f}"
        lines.append([row["run"], *times, losses, f"{memory} MiB", of_plan])
    right = [row for row in ran if row["outcome"] in ("control", PASS)]
    fastest = max(right, key=lambda row: row["samples per second"])
    smallest = min(right, key=lambda row: max(row["peak memory"]["bytes by rank"]))
    return [
        "",
        *in_markdown(lines),
        "",
        f"Of the runs that compute the same, {fastest['run']} was the fastest here, and {smallest['run']} took the least memory.",
    ]


def group_norms(found: list[dict[str, Any]]) -> list[str]:
    """Lines of a table: how far the gradient norm of each group of parameters is from that of the run that it is judged by.

    This is a mean over the steps.
    """
    key = "mean difference of group norms"
    with_norms = [row for row in found if key in row]
    if not with_norms:
        return []
    names = [row["run"] + (f" (from {row['judged by']})" if "judged by" in row else "") for row in with_norms]
    about = "Gradient norm of each group of parameters: relative difference from the control, mean over the steps."
    lines = [[group, *(f"{row[key][group]:.1e}" for row in with_norms)] for group in with_norms[0][key]]
    return ["", about, "", *in_markdown([["group", *names], *lines])]


def good(found: list[dict[str, Any]]) -> bool:
    """Whether all runs, given as rows, are as they should be."""
    return all(row["outcome"] in ("control", PASS, MEASURED) for row in found)


def table(study: Study, found: list[dict[str, Any]]) -> list[list[str]]:
    """Head and rows of the table that a person reads."""
    head = ["run", "mesh", "loss", "from the control", "tensors / tolerated", "s a step", "tokens/s"]
    held_out = any("held out" in row for row in found)
    head += ["held-out loss, accuracy"] if held_out else []
    head += ["peak memory of a rank", "predicted"] if study.memory else []
    lines = [[*head, ""]]
    for row in found:
        if row["outcome"] == DID_NOT_RUN:
            lines.append([row["run"], row["label"], *[""] * (len(head) - 2), DID_NOT_RUN])
            continue
        gap = "" if row["outcome"] == "control" else f"{row.get('largest loss difference', 0):.1e}"
        if "tolerated loss difference" in row:
            gap += f" of {row['tolerated loss difference']:.1e}"
        if "judged by" in row:
            gap += f", from {row['judged by']}"
        worst = (
            f"{row['worst tensor of tolerated']:.2g} ({row['tensors judged']})" if "tensors" in row else ""
        )
        cells = [row["run"], row["label"], f"{row['first loss']:.4f} -> {row['last loss']:.4f}", gap, worst]
        cells += [f"{row['median seconds per step']:.3f}", f"{row['tokens per second']:.0f}"]
        if held_out:
            cells.append(f"{row['held out']['loss']:.4f}, {100 * row['held out']['accuracy']:.2f} %")
        if study.memory:
            largest = max(row["peak memory"]["bytes by rank"])
            cells.append(f"{largest / 2**20:.0f} MiB")
            plan = row.get("predicted memory")
            cells.append(f"{plan['bytes'] / 2**20:.0f} MiB" if plan else "not known")
        lines.append([*cells, row["outcome"]])
    return lines


def provenance(control: Planned) -> dict[str, Any]:
    """What the control's history records of libraries and machine."""
    run = history.read(control.config.history_path).run
    return {"versions": run["versions"], "origin": run["origin"]}


def made_by(command: str, machine: dict[str, Any]) -> str:
    origin = machine["origin"]
    libraries = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    return (
        f"Made by `{printable(command, 400)}`, commit {printable(origin['commit'])}, on {origin['cores']} cores of "
        f"{printable(origin['cpu'])}, with {printable(libraries, 400)}."
    )


def publish(
    study: Study,
    rows: list[dict[str, Any]],
    place: Path,
    command: str,
    machine: dict[str, Any],
    passed: bool,
    *,
    table: list[list[str]],
    further: Sequence[str],
    listed: Sequence[tuple[Sequence[str], str]],
    head: Sequence[str] = (),
    said: Sequence[str] = (),
    **content: Any,
) -> None:
    """Write report.md, report.html and report.json into the folder of a study.

    `machine` is the `provenance`, `further` are lines after the `table`. The page has the sentences `said`, and below them a
    table with the `head` (default: that of `table`) and the lines `listed`, each with what it links to. `content` goes into
    the JSON, too.
    """
    report = {"title": study.title, "command": command, **machine, "good": passed, **content, "runs": rows}
    write_text(place / "report.json", json.dumps(report, indent=1) + "\n")
    about, made = [study.about.strip()] if study.about else [], made_by(command, machine)
    parts = [
        f"# {study.title}",
        *about,
        made,
        "\n".join(in_markdown([[cell.replace("|", "\\|") for cell in line] for line in table])),
    ]
    write_text(place / "report.md", "\n\n".join(parts) + "\n" + "\n".join(further) + "\n")
    outcome = PASS if passed else FAIL
    write_listing(
        place / "report.html", study.title, [*about, *said, made], head or table[0], listed, outcome
    )


def write(
    study: Study, planned: list[Planned], found: list[dict[str, Any]], place: Path, command: str
) -> None:
    """Write report.md, report.html, report.json and losses.png into the folder of the study."""
    lines, further = table(study, found), []
    if study.memory:
        further += ["", MEMORY, *resources(found)]
    changed = (row["differs from the control in"].items() for row in found[1:])
    cells = (printable(", ".join(f"{key} {value}" for key, value in items), 400) for items in changed)
    pairs = [(row["run"], cell) for row, cell in zip(found[1:], cells, strict=True)]
    further += ["", *in_markdown([("run", "differs from the control in"), *pairs])]
    further += [*group_norms(found), ""]
    further += [
        f"- {row['run']}: {row['outcome']}: {printable(row['why'], 600)}" for row in found if row.get("why")
    ]
    further += [
        f"- {row['run']}: first wrong tensor: {row['first wrong'][0]}"
        for row in found
        if row.get("first wrong")
    ]
    ran = {row["run"] for row in found if row["outcome"] not in (DID_NOT_RUN, REFUSED)}
    histories = {run.name: history.read(run.config.history_path) for run in planned if run.name in ran}
    further += _parting(planned, histories)
    links = [(line, row["page"]) for line, row in zip(lines[1:], found, strict=True)]
    machine, passed = provenance(planned[0]), good(found)
    publish(study, found, place, command, machine, passed, table=lines, further=further, listed=links)
    noise = _noise(planned[0])
    curve_report.draw(
        histories, noise, loss_curves.tolerance_for(histories[BASELINE], noise), place / "losses.png"
    )
