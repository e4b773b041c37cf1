"""The page of a recorded run: its tensors against the reference from the batch, and each module by itself."""

from collections.abc import Iterable, Iterator
from operator import attrgetter
from statistics import fmean
from typing import Any

import torch

from lockstep.ground import origin
from lockstep.page.payload import FROM_BATCH, HEADS, WAYS, Losses, Page, Placed, View, short
from lockstep.page.writing import write as write_page
from lockstep.recorded import report as recorded_report
from lockstep.recorder.recorded_step import StepRecord
from lockstep.recorder.recording import Recording
from lockstep.verdict.distance import distance_of
from lockstep.verdict.judgement import MULTIPLE
from lockstep.verdict.rows import RunVerdict, StepVerdict

# How the names begin that ranks wrote of a row's tensor: a module's output of the first micro batch, a gradient, an updated weight
KEYS = {"forward": "forward/0", "backward": "backward/0", "gradient": "gradient", "update": "updated"}
# How names begin, in the order of a step; what optimizers compute, and norms, come last.
ORDER = ("forward/", "loss", "backward/", "gradient/")


def write(recording: Recording, steps: list[StepVerdict], run: RunVerdict) -> None:
    """Write report.html into the recording's folder."""
    *lines, headline = recorded_report.lines(steps, run)
    verdict, _, lead = headline.partition(": ")
    where, problems = recorded_report.first_wrong(steps, run)
    if problems:
        lead = where + getattr(problems[0], "what", problems[0].partition(": ")[0])
    model = recording.skeleton
    page = Page(
        "recording",
        verdict,
        f"{type(model).__name__}, {_size(model)}, {_numbered(steps)} of {run.steps} judged",
        lead,
        [line.strip() for line in lines],
        _found_out(recording, model),
        command=recording.origin.command,
        causes=[(cause, "") for problem in problems if (cause := getattr(problem, "cause", problem))],
        tolerance=f"Tolerated: {MULTIPLE} times the error of one process in the run's own dtypes, and a few unit roundoffs. Of an update: a few ulps.",
    )
    ids = [x for x in recording.batch(1, 0, 0).values() if x.ndim == 2 and not x.is_floating_point()]
    page.tokens = ids[0].shape if ids else ()
    for name, module in model.named_modules():
        if hasattr(module, "config") and {"q_proj", "c_attn"} & dict(module.named_children()).keys():
            page.heads[name] = [getattr(module.config, entry, None) for entry in HEADS]
    ranks = [{"rank": rank} for rank in recording.steps[0]]
    differing = [copies for step in steps if step.wrong for copies in _differing(recording, step)]
    # Way to compute -> the function that gets its rows from a step's verdict
    ways = dict(zip(WAYS, map(attrgetter, ("alone", "rows")), strict=True))
    wrong = [
        (row.step, row.name, row.describe(), way)
        for way, rows_of in ways.items()
        for step in steps
        for row in rows_of(step)
        if row.too_far
    ]
    wrong += [
        (step, name, "not the same on all ranks that hold it", FROM_BATCH) for step, name, *_ in differing
    ]
    first = min(wrong, key=_when, default=None)
    for way, rows_of in ways.items():
        if not any(map(rows_of, steps)):
            continue
        view = View(way, way, verdict, ranks=ranks, differing=differing)
        view.first = first[:3] if first and first[-1] == way else None
        for step in steps:
            records = recording.steps[step.step - 1]
            placed = {row.name: _places(records.values(), row.name) for row in rows_of(step)}
            for name, shards in step.shards.items():
                placed[name] = [[shards[rank]] if rank in shards else [] for rank in records]
            page.add(view, step.step, rows_of(step), placed)
    if page.views:
        page.views[0].contract = _settings(recording.steps[0][0])
    page.losses = _losses(steps)
    write_page(page, recording.folder)


def _when(wrong: tuple[int, str, str, str]) -> tuple[int, int]:
    """Return when a tensor is computed: in which step, and in which part of it."""
    step, name, *_ = wrong
    return step, next((at for at, prefix in enumerate(ORDER) if name.startswith(prefix)), len(ORDER))


def _found_out(recording: Recording, model: torch.nn.Module) -> list[tuple[str, str]]:
    """Return how the verdict was found out, as (title, text): the model, the run, its precision, versions and so on."""
    first, run_origin = recording.steps[0][0], recording.origin
    records = recording.steps[0].values()
    micro = [micro_batch for record in records for micro_batch in record.micro_batches]
    precision = [
        *(f"weights in {parameter.dtype}" for parameter in model.parameters()),
        *(f"autocast to {micro_batch.autocast}" for micro_batch in micro if micro_batch.autocast),
        *(
            f"weights computed in {dtype}"
            for micro_batch in micro
            for dtype in sorted(micro_batch.param_dtypes)
        ),
    ]
    groups = {tuple(group) for record in records for group in record.groups if len(group) > 1}
    how = (
        ("command of the run", run_origin.command),
        ("script", run_origin.script),
        ("device", run_origin.device),
        ("seed", run_origin.seed),
    )
    mesh = "; ".join(", ".join(map(str, group)) for group in sorted(groups))
    weights = [placed for name, placed in first.places.items() if name.startswith("weight/")]
    cut = sum(not placed.is_whole for placed in weights)
    kinds = dict.fromkeys(optimizer.kind.replace(":", ".") for optimizer in first.optimizers)
    return [
        ("model", f"{type(model).__module__}.{type(model).__name__}, {_size(model)}"),
        (
            "recorded",
            f"{run_origin.date or 'at an unknown time'}, {len(recording.steps)} steps",
        ),
        *((title, text or "not recorded") for title, text in how),
        ("mesh", f"{first.world_size} ranks; groups of ranks: {mesh or 'none'}"),
        ("sharding", f"{cut} of {len(weights)} weights are cut between ranks"),
        ("precision", ", ".join(dict.fromkeys(precision)).replace("torch.", "")),
        ("optimizer", ", ".join(kinds)),
        ("reference", "the recorded model in float64, computed by one process on the recorded micro batches"),
        (
            "versions",
            ", ".join(f"{name} {v}" for name, v in (run_origin.versions or {"torch": first.torch}).items()),
        ),
        ("judged", f"{origin.now()} by {origin.command()}"),
        ("Lockstep", origin.commit()),
        ("processor of the judge", origin.machine(origin.about())),
    ]


def _settings(first: StepRecord) -> dict[str, Any]:
    """Return the settings of a rank's optimizers, by group of parameters, and the bounds that it clipped to."""
    contract: dict[str, Any] = {"clipped to": [clip.max_norm for clip in first.clips]}
    for optimizer in first.optimizers:
        for number, group in enumerate(optimizer.groups):
            settings = {key: value for key, value in group.items() if key != "params"}
            if settings not in contract.values():
                contract[f"{optimizer.kind.replace(':', '.')}, group {number}"] = settings
    return contract


def _losses(steps: list[StepVerdict]) -> Losses | None:
    """Return the mean of the micro batches' losses of each step that has any.

    None is returned if no step has any: the model returned no loss, or the loop computes its own.
    """
    known = [step for step in steps if step.losses]
    if not known:
        return None
    own, reference, tolerated = zip(*([*map(fmean, zip(*s.losses, strict=True))] for s in known), strict=True)
    numbers = [step.step for step in known]
    return Losses(
        ["reference", "run"],
        ["reference", "run"],
        numbers,
        [[*reference], [*own]],
        [],
        [*map(short, tolerated)],
    )


def _numbered(steps: list[StepVerdict]) -> str:
    """Return "step 1" or "steps 1, 2"."""
    numbers = [str(step.step) for step in steps]
    return f"step{'s' * (len(numbers) > 1)} {', '.join(numbers)}"


def _size(model: torch.nn.Module) -> str:
    return f"{sum(parameter.numel() for parameter in model.parameters()):,} parameters"


def _differing(recording: Recording, verdict: StepVerdict) -> Iterator[tuple]:
    """Yield gradients and updated weights whose copies differ between ranks, as in `View.differing`.

    A rank's copy is compared with that of the first rank that holds the same part.
    """
    step = verdict.step
    for kind, names in (("gradient", verdict.differ), ("update", recording.names(step, KEYS["update"]))):
        for name in names:
            key, first_of, odd = f"{KEYS[kind]}/{name}", dict[str, int](), list[tuple]()
            for rank, record in recording.steps[step - 1].items():
                first = first_of.setdefault(str(record.places.get(key)), rank)
                own, other = (recording.part(which, step, key) for which in (rank, first))
                if own is not None and other is not None and first != rank and not torch.equal(own, other):
                    distance = short(distance_of(own, other).relative, 3)
                    odd.append((rank, int((own != other).sum()), distance))
            if odd:
                yield step, f"{kind}/{name}", *zip(*odd, strict=True), verdict.is_of_known_mean


def _places(ranks: Iterable[StepRecord], name: str) -> Placed:
    """Return the parts of a tensor that each rank wrote, as [start, shape].

    Of a module's output, a rank has the whole for its own micro batch, or a part. The whole counts as no part.
    """
    kind, _, rest = name.partition("/")
    return [
        [(part.start, part.shape) for part in placed.blocks]
        if placed and (kind in ("gradient", "update") or not placed.is_whole)
        else []
        for placed in (record.places.get(f"{KEYS.get(kind)}/{rest}") for record in ranks)
    ]
