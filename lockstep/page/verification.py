"""The page of a comparison of strategies."""

import functools
import itertools
from collections.abc import Sequence
from pathlib import Path

import torch

from lockstep.diagnosis.case import Case
from lockstep.dumps.dump import Dump, Dumps, number_of_elements
from lockstep.page.payload import HEADS, Losses, Page, Placed, View, nearest_of, short
from lockstep.page.writing import write as write_page
from lockstep.plan.config import BASELINE
from lockstep.plan.mesh import Mesh
from lockstep.verdict import report_tables, tensor_report
from lockstep.verdict.judgement import COMPUTED, Judgement, add_pictures
from lockstep.verdict.loss_folder import Judged
from lockstep.verdict.loss_tolerance import floors, loss_gap
from lockstep.verdict.result import Findings, Result


def write(
    result: Result, folder: Path, reference: Dump | None, replays: Dumps, judged: Judged | None = None
) -> None:
    """Write report.html. `reference` and `replays` are what the result was judged by; `judged` has the losses of longer runs, if any."""
    if reference is not None:
        for name, run in result.runs.items():
            _draw(result, name, run, reference, replays.get(name))
    run = next(iter(result.runs.values())).dump.run
    page = Page(
        "verification",
        result.outcome,
        f"{run['config']['model_name']} in {run['config']['precision']}, tensor by tensor",
        _lead(result),
        [*tensor_report.configuration(result), *tensor_report.notes(result)],
        list(report_tables.about(result).items()),
        losses=_losses(result) if judged is None else losses_of(judged),
        heads={"": [*map(run["architecture"].get, HEADS)]},
    )
    for name, found in result.runs.items():
        view = _view(result, name, found)
        for step in map(int, found.dump.steps):
            rows = sorted(found.rows_of(step).values(), key=lambda row: found.order[step][row.name])
            excused = [tensor for at, tensor in found.excused if at == step]
            page.add(
                view, step, rows, functools.partial(_cut, found.dump.steps[str(step)]["tensors"]), excused
            )
    write_page(page, folder)


def _lead(result: Result) -> str:
    """What was compared; if all is right, how near the nearest tensor came."""
    *others, last = map(result.label, result.runs)
    labels = f"{', '.join(others)} and {last}"
    steps = tensor_report.steps_in_words([row for run in result.runs.values() for row in run.rows])
    of = "a float64 reference" if result.has_reference else "each other"
    said = f"Every tensor of {steps} of {labels} was held against {of}."
    nearest = max((row for run in result.runs.values() for row in run.counted), key=lambda row: row.multiple)
    if result.outcome == "PASS":
        said += f" The nearest came to {nearest.multiple:.2g} of what is tolerated: {nearest.name} in step {nearest.step}."
    return said


def _draw(result: Result, name: str, run: Findings, reference: Dump, replay: Dump | None) -> None:
    """Pictures of the tensors of a run that are too far, and of those that are nearest to it."""
    for step in map(int, run.dump.steps):
        case = Case(result, name, reference, replay, (step, 0.0, "", ""))

        def size_of(row: Judgement, case: Case = case) -> int:
            return number_of_elements(case.entry["tensors"][row.name])

        def pair_of(row: Judgement, case: Case = case) -> tuple[torch.Tensor, torch.Tensor]:
            return case.own(row.name), case.right(row.name)

        for which in COMPUTED:
            rows = [row for row in run.rows_of(step).values() if row.which_pass == which]
            add_pictures(rows, size_of, pair_of)


def _view(result: Result, name: str, run: Findings) -> View:
    mesh = Mesh(**run.dump.run["mesh"])
    first, found = next(iter(run.failures), None), run.diagnosis
    return View(
        name,
        result.label(name),
        result.verdict(name),
        f"{len(run.judged)} of {len(run.rows)} tensors of {tensor_report.steps_in_words(run.rows)}",
        first and (first[0], first[2], first[3]),
        nearest_of(run.counted),
        len(run.failures),
        [(cause.name, cause.evidence) for cause in found.causes] if found else [],
        found.excluded if found else [],
        found.odd if found else [],
        [{axis: mesh.coordinates(rank).along(axis) for axis in mesh.axes} for rank in range(mesh.world_size)],
        [(*each, []) for each in run.differing],
        run.dump.contract,
    )


def _cut(tensors: dict[str, dict], name: str) -> Placed:
    """How the mesh cuts a tensor."""
    return [tensors[name]["shape"], tensors[name]["sharded"]]


def _losses(result: Result) -> Losses:
    """The losses of the captured steps."""
    dumps = [run.dump for run in result.runs.values()]
    steps = [[step for number, step in dump.steps.items() if number != "0"] for dump in dumps]
    return _curves([*result.runs], [*map(result.label, result.runs)], steps)


def losses_of(judged: Judged) -> Losses:
    runs = judged.histories.values()
    found = _curves([*judged.histories], [run.run["label"] for run in runs], [run.steps for run in runs])
    if BASELINE in judged.histories:
        baseline = judged.histories[BASELINE]
        found.floor = short(floors(baseline)[0])
        if judged.control:
            found.control = [*map(short, map(loss_gap, baseline.steps, judged.control.steps))]
    if judged.tolerance:
        found.tolerated = [*map(short, judged.tolerance.loss)]
    return found


def _curves(names: list[str], labels: list[str], runs: Sequence[Sequence[dict]]) -> Losses:
    """A run that broke down has fewer steps than others: nothing is drawn behind its last."""
    loss, norm = (
        [list(each) for each in zip(*itertools.zip_longest(*columns), strict=True)]
        for columns in ([[step[key] for step in run] for run in runs] for key in ("loss", "grad_norm"))
    )
    return Losses(names, labels, list(range(1, len(loss[0]) + 1)), loss, norm)
