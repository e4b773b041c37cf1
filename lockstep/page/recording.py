"""The page of a recorded run: its tensors in a free pass of the reference, and each module by itself."""

from collections.abc import Iterable, Iterator
from operator import attrgetter
from statistics import fmean
from typing import Any

import torch

from lockstep.ground import origin
from lockstep.page.payload import FROM_BATCH, HEADS, WAYS, Losses, Page, Placed, View, short
from lockstep.page.writing import write as write_page
from lockstep.recorded import report as recorded_report
from lockstep.recorded.run import RunVerdict
from lockstep.recorder.recorded_step import Step
from lockstep.recorder.recording import Recording
from lockstep.verdict.distance import distance_of
from lockstep.verdict.judgement import MULTIPLE
from lockstep.verdict.rows import StepVerdict

# What the ranks wrote of a row's tensor: a module's output of the first micro batch, a gradient, an updated weight.
KEYS = {"forward": "forward/0", "backward": "backward/0", "gradient": "gradient", "update": "updated"}
# How names begin, in the order of a step; what optimizers compute, and norms, come last.
ORDER = ("forward/", "loss", "backward/", "gradient/")


def write(recording: Recording, steps: list[StepVerdict], run: RunVerdict) -> None:
    """Write report.html into the recording's folder."""
    *said, headline = recorded_report.lines(steps, run)
    verdict, _, lead = headline.partition(": ")
    where, wrong_there = recorded_report.first_wrong(steps, run)
    if wrong_there:
        lead = where + getattr(wrong_there[0], "what", wrong_there[0].partition(": ")[0])
    model = recording.skeleton
    page = Page(
        "recording",
        verdict,
        f"{type(model).__name__}, {_size(model)}, {_numbered(steps)} of {run.steps} judged",
        lead,
        [line.strip() for line in said],
        _found_out(recording, model),
        command=recording.origin.command,
        causes=[(cause, "") for one in wrong_there if (cause := getattr(one, "cause", one))],
        tolerance=f"Tolerated: {MULTIPLE} times the error of one process in the run's own dtypes, and a few unit roundoffs. Of an update: a few ulps.",
    )
    ids = [one for one in recording.batch(1, 0, 0).values() if one.ndim == 2 and not one.is_floating_point()]
    page.tokens = ids[0].shape if ids else ()
    for name, module in model.named_modules():
        if hasattr(module, "config") and {"q_proj", "c_attn"} & dict(module.named_children()).keys():
            page.heads[name] = [getattr(module.config, entry, None) for entry in HEADS]
    ranks = [{"rank": rank} for rank in recording.steps[0]]
    differing = [each for step in steps if step.wrong for each in _differing(recording, step)]
    judged = dict(zip(WAYS, map(attrgetter, ("alone", "rows")), strict=True))
    wrong = [
        (row.step, row.name, row.describe(), way)
        for way, rows_of in judged.items()
        for step in steps
        for row in rows_of(step)
        if row.too_far
    ]
    wrong += [
        (step, name, "not the same on all ranks that hold it", FROM_BATCH) for step, name, *_ in differing
    ]
    first = min(wrong, key=_when, default=None)
    for way, rows_of in judged.items():
        if not any(map(rows_of, steps)):
            continue
        view = View(way, way, verdict, ranks=ranks, differing=differing)
        view.first = first[:3] if first and first[-1] == way else None
        for step in steps:
            about = recording.steps[step.step - 1]
            placed = {row.name: _places(about.values(), row.name) for row in rows_of(step)}
            for name, shards in step.shards.items():
                placed[name] = [[shards[rank]] if rank in shards else [] for rank in about]
            page.add(view, step.step, rows_of(step), placed)
    if page.views:
        page.views[0].contract = _settings(recording.steps[0][0])
    page.losses = _losses(steps)
    write_page(page, recording.folder)


def _when(wrong: tuple[int, str, str, str]) -> tuple[int, int]:
    """When a tensor is computed: in which step, and in which part of it."""
    step, name, *_ = wrong
    return step, next((at for at, one in enumerate(ORDER) if name.startswith(one)), len(ORDER))


def _found_out(recording: Recording, model: torch.nn.Module) -> list[tuple[str, str]]:
    first, made = recording.steps[0][0], recording.origin
    ranks = recording.steps[0].values()
    micro = [one for about in ranks for one in about.micro_batches]
    precision = [
        *(f"weights in {one.dtype}" for one in model.parameters()),
        *(f"autocast to {one.autocast}" for one in micro if one.autocast),
        *(f"FSDP2 computes in {one.param_dtype}" for one in micro if one.param_dtype),
    ]
    groups = {tuple(group) for about in ranks for group in about.groups if len(group) > 1}
    how = (
        ("command of the run", made.command),
        ("script", made.script),
        ("device", made.device),
        ("seed", made.seed),
    )
    mesh = "; ".join(", ".join(map(str, group)) for group in sorted(groups))
    held = [places for name, places in first.places.items() if name.startswith("weight/")]
    cut = sum(any(part.shape != whole.full for part in parts) for whole, *parts in held)
    kinds = dict.fromkeys(optimizer.kind.replace(":", ".") for optimizer in first.optimizers)
    return [
        ("model", f"{type(model).__module__}.{type(model).__name__}, {_size(model)}"),
        (
            "recorded",
            f"{made.date or 'at an unknown time'}, {len(recording.steps)} steps",
        ),
        *((what, said or "not recorded") for what, said in how),
        ("mesh", f"{first.world_size} ranks; groups of ranks: {mesh or 'none'}"),
        ("sharding", f"{cut} of {len(held)} weights are cut between ranks"),
        ("precision", ", ".join(dict.fromkeys(precision)).replace("torch.", "")),
        ("optimizer", ", ".join(kinds)),
        ("reference", "the recorded model in float64, computed by one process on the recorded micro batches"),
        (
            "versions",
            ", ".join(f"{name} {one}" for name, one in (made.versions or {"torch": first.torch}).items()),
        ),
        ("judged", f"{origin.now()} by {origin.command()}"),
        ("Lockstep", origin.commit()),
        ("processor of the judge", origin.machine(origin.about())),
    ]


def _settings(first: Step) -> dict[str, Any]:
    """What the optimizers of a rank were told, by group of parameters, and by what it clipped."""
    found: dict[str, Any] = {"clipped to": [clip.max_norm for clip in first.clips]}
    for one in first.optimizers:
        for number, group in enumerate(one.groups):
            settings = {key: value for key, value in group.items() if key != "params"}
            if settings not in found.values():
                found[f"{one.kind.replace(':', '.')}, group {number}"] = settings
    return found


def _losses(steps: list[StepVerdict]) -> Losses | None:
    """Of each step, the mean of the micro batches' losses; None where the model returned none, or a loop made its own."""
    known = [one for one in steps if one.losses]
    if not known:
        return None
    own, right, tolerated = zip(*([*map(fmean, zip(*one.losses, strict=True))] for one in known), strict=True)
    numbers = [one.step for one in known]
    return Losses(
        ["reference", "run"], ["reference", "run"], numbers, [[*right], [*own]], [], [*map(short, tolerated)]
    )


def _numbered(steps: list[StepVerdict]) -> str:
    numbers = [str(one.step) for one in steps]
    return f"step{'s' * (len(numbers) > 1)} {', '.join(numbers)}"


def _size(model: torch.nn.Module) -> str:
    return f"{sum(one.numel() for one in model.parameters()):,} parameters"


def _differing(recording: Recording, verdict: StepVerdict) -> Iterator[tuple]:
    """Gradients and updated weights of which ranks have other copies than the first one that holds the same, as `View.differing`."""
    step = verdict.step
    for kind, names in (("gradient", verdict.differ), ("update", recording.names(step, KEYS["update"]))):
        for name in names:
            place, first, odd = f"{KEYS[kind]}/{name}", dict[str, int](), list[tuple]()
            for rank, about in recording.steps[step - 1].items():
                one = first.setdefault(str(about.places.get(place)), rank)
                own, other = (recording.part(which, step, place) for which in (rank, one))
                if own is not None and other is not None and one != rank and not torch.equal(own, other):
                    apart = short(distance_of(own, other).relative, 3)
                    odd.append((rank, int((own != other).sum()), apart))
            if odd:
                yield step, f"{kind}/{name}", *zip(*odd, strict=True), verdict.is_of_known_mean


def _places(ranks: Iterable[Step], name: str) -> Placed:
    """What each rank wrote of a tensor: the parts of weights. A rank has the whole output of a module for its own micro batch, or a part."""
    kind, _, rest = name.partition("/")
    return [
        [
            (part.start, part.shape)
            for part in places[1:]
            if kind in ("gradient", "update") or part.shape != places[0].full
        ]
        for places in (about.places.get(f"{KEYS.get(kind)}/{rest}", []) for about in ranks)
    ]
