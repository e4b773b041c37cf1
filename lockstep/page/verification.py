"""The page of a comparison of strategies."""

from dataclasses import replace
from pathlib import Path
from statistics import fmean

from lockstep.diagnosis.case import Case
from lockstep.dumps.dump import Dump, Dumps
from lockstep.ground import origin
from lockstep.page.payload import HEADS, Losses, Page, View, short
from lockstep.page.writing import write as write_page
from lockstep.plan.config import BASELINE
from lockstep.plan.mesh import Mesh
from lockstep.verdict import report_tables, tensor_report
from lockstep.verdict.judgement import COMPUTED, LIMIT, MULTIPLE, add_pictures
from lockstep.verdict.loss_folder import Judged
from lockstep.verdict.loss_tolerance import floors, loss_gap
from lockstep.verdict.result import Diagnosis, Findings, Result


def write(
    result: Result, folder: Path, reference: Dump | None, replays: Dumps, judged: Judged | None = None
) -> None:
    """Write report.html into a folder.

    `reference` and `replays` are what the result was judged by. `judged` has the losses of longer runs, if there are any.
    """
    run = next(iter(result.runs.values())).dump.run
    page = Page(
        "verification",
        result.outcome,
        f"{run['config']['model_name']} in {run['config']['precision']}",
        "A copy of each tensor was compared with a float64 reference, which one process computed from the same weights and batches."
        if reference
        else "The tensors of the runs were compared with each other.",
        [
            *(f"{name} was not trained: {why}" for name, why in result.untrained.items()),
            *tensor_report.configuration(result),
            *tensor_report.notes(result),
        ],
        list(report_tables.about(result).items()),
        losses=_losses(result) if judged is None else losses_of(judged),
        heads={"": [*map(run["architecture"].get, HEADS)]},
        command=origin.command(),
        tolerance=_tolerance(result, run["config"]["precision"]) if reference else "",
    )
    for name, findings in result.runs.items():
        view = _view(result, name, findings)
        for step in findings.dump.steps:
            if reference is not None:
                _draw(Case(result, name, reference, replays.get(name), (step, 0.0, "", "")))
            rows = sorted(findings.rows_of(step).values(), key=lambda row: findings.order[step][row.name])
            entries = findings.dump.steps[step]["tensors"].items()
            placed = {tensor: [entry["shape"], entry["sharded"]] for tensor, entry in entries}
            page.add(view, step, rows, placed, [tensor for at, tensor in findings.excused if at == step])
            # A tensor that is too far from the batch has its picture there.
            far = {row.name for row in rows if row.too_far}
            alone = [
                replace(row, picture=None) if row.name in far else row
                for row in findings.by_themselves
                if row.step == step
            ]
            unlike = sum(row.step == step for row in findings.after_unlike)
            if alone:
                page.add(view, step, alone, {}, alone=True, unlike=unlike)
    write_page(page, folder)


def _tolerance(result: Result, precision: str) -> str:
    yardstick = result.label(result.baseline)
    return (
        f"Tolerated of {yardstick}, the yardstick: {LIMIT[precision]:g}, relative to the reference. Of the others: {MULTIPLE} times {yardstick}'s own "
        "error in the tensor, and a few unit roundoffs. Of what an optimizer computes: a few ulps."
    )


def _draw(case: Case) -> None:
    """Draw pictures of the tensors of a run in a step that are too far, and of those that are nearest to it.

    Of the batch, only tensors that are too far are drawn.
    """
    for which in ("batch", *COMPUTED):
        add_pictures(
            [
                row
                for row in case.rows.values()
                if row.which_pass == which and (row.too_far or which != "batch")
            ],
            case.entry["tensors"],
            lambda row: (case.own(row.name), case.right(row.name)),
        )


def _view(result: Result, name: str, run: Findings) -> View:
    """Return the view of one run."""
    mesh = Mesh(**run.dump.run["mesh"])
    first, diagnosis = next(iter(run.failures), None), run.diagnosis or Diagnosis()
    # If the diagnosis is not of the first failure, what it observed begins with the tensor that it is of.
    prefix = f"{run.diagnosed[2]}: " if first and run.diagnosed != first else ""
    shown = {(row.step, row.name) for row in [*run.too_far, *run.by_themselves] if row.too_far}
    shown |= {(step, tensor) for step, tensor, _ in run.differing}
    others = sum((step, tensor) not in shown for step, _, tensor, _ in run.failures)
    return View(
        name,
        result.label(name),
        result.verdict(name),
        first=first and (first[0], first[2], first[3]),
        further=f"{others} more values wrong, such as losses and norms" if others else "",
        causes=[(cause.name, cause.evidence) for cause in diagnosis.causes],
        excluded=diagnosis.excluded,
        observed=[*(prefix + sentence for sentence in diagnosis.odd)],
        ranks=[
            {axis: mesh.coordinates(rank).along(axis) for axis in mesh.axes}
            for rank in range(mesh.world_size)
        ],
        differing=run.differing,
        contract=run.dump.contract,
        by_itself=tensor_report.by_itself(run) if result.has_reference else "",
    )


def _losses(result: Result) -> Losses:
    """Return the losses of the captured steps. What is tolerated of the mean over ranks is the mean of what is tolerated of each."""
    steps = {
        name: [step for number, step in run.dump.steps.items() if number] for name, run in result.runs.items()
    }
    curves = _curves({name: (result.label(name), run_steps) for name, run_steps in steps.items()})
    if result.has_reference:
        baseline = result.baseline
        curves.floor = short(floors(result.runs[baseline].dump.run, steps[baseline])[0])
    for step in curves.steps:
        losses = [loss for loss in result.losses if loss.step == step]
        # A run's loss may be right to differ from the baseline's. No tolerance of their difference is shown then.
        is_comparable = losses and not any(any(loss.moved.values()) for loss in losses)
        curves.tolerated.append(short(fmean(loss.tolerated for loss in losses)) if is_comparable else None)
    return curves


def losses_of(judged: Judged) -> Losses:
    """Return the losses of the runs of a folder."""
    curves = _curves({name: (h.run["label"], h.steps) for name, h in judged.histories.items()})
    if BASELINE in judged.histories:
        baseline = judged.histories[BASELINE]
        curves.floor = short(floors(baseline.run, baseline.steps)[0])
        if judged.control:
            curves.control = [*map(short, map(loss_gap, baseline.steps, judged.control.steps))]
    if judged.tolerance:
        curves.tolerated = [*map(short, judged.tolerance.loss)]
    return curves


def _curves(runs: dict[str, tuple[str, list[dict]]]) -> Losses:
    """Return the losses and gradient norms of runs. `runs` is name -> (label, steps)."""
    labels, steps = zip(*runs.values(), strict=True)
    loss, norm = ([[step[key] for step in run] for run in steps] for key in ("loss", "grad_norm"))
    return Losses([*runs], [*labels], [*range(1, max(map(len, loss)) + 1)], loss, norm)
