"""What a page shows, as plain data: the same for a comparison of strategies and for a recorded run. docs/page.md describes it.

Numbers have as many digits as a person reads. What JSON does not have (NaN, infinity) is null.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lockstep.plan.mesh import runs
from lockstep.verdict.distance import relative
from lockstep.verdict.judgement import Judgement
from lockstep.verdict.picture import Picture

FORMAT = 9
# The most sentences of a table
SAID = 500
# The most pictures of a page: they have at most 4 MB
PICTURES = 960
# The columns of a table, in the order of the numbers in `Page.add`, with the digits that are shown
COLUMNS = {"share": 3, "error": 3, "tolerated": 2, "largest": 3, "tolerated_largest": 2}
# Entries of a model's configuration that say which heads an attention has
HEADS = ("num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size")
# The ways to compute a step: what they are called, and what they are
WAYS = {
    "each module by itself": "Each module is computed again from the inputs that it had in the run, and from the gradient that arrived there. "
    "A tensor that is too far here is wrong by itself.",
    "from the batch": "The whole step is computed again from its batch. What follows from a wrong tensor is then too far as well. "
    "Updates are computed from the run's own gradients.",
}
BY_ITSELF, FROM_BATCH = WAYS
# Step, tensor, its share of what is tolerated, and whether only a factor has that share
Worst = tuple[int, str, float | None, bool]
# In a comparison: the shape of a tensor, and axis -> the dim that it cuts. In a recording: for each rank, [start, shape] of its parts.
Placed = list[Any]


@dataclass
class Count:
    """Counts the tensors of a view that were computed in one way, in all steps."""

    tensors: int = 0
    judged: int = 0
    far: int = 0
    worst: Worst | None = None


@dataclass
class View:
    """One set of tensors that a page switches to: a strategy's, or one way to judge a recording."""

    # The name of the run or the way; report.html#NAME opens it
    name: str
    label: str
    verdict: str
    # What was judged in the place of tensors, in words
    counted: str = ""
    # The first wrong tensor: step, tensor and what is wrong
    first: tuple[int, str, str] | None = None
    # By way to compute
    counts: dict[str, Count] = field(default_factory=dict)
    # What is wrong beside tensors, in words
    further: str = ""
    # Names and evidence
    causes: list[tuple[str, str]] = field(default_factory=list)
    excluded: list[str] = field(default_factory=list)
    # What was observed about the first wrong tensor
    observed: list[str] = field(default_factory=list)
    # The coordinates of each rank
    ranks: list[dict[str, int]] = field(default_factory=list)
    # Step, tensor, ranks whose copy is another. In a recording also, for each of these ranks, in how many elements its copy differs from
    # the first rank's, and by how much, relative to that; and whether the first rank's copy is right if it is near enough.
    differing: Sequence[tuple] = ()
    contract: dict[str, Any] = field(default_factory=dict)
    placements: list[Placed] = field(default_factory=list)
    # Number of a tensor's name -> number of its placement
    placed: dict[int, int] = field(default_factory=dict)
    # What was found of each module by itself, in a comparison
    by_itself: str = ""


@dataclass
class Table:
    """The tensors of one view in one step, in order of execution, by column; errors are relative."""

    view: int
    step: int
    # The numbers of the names, as runs of [first, how many]
    names: list[list[int]]
    # Places of tensors that are too far, too small to judge, or in another convention, as such runs
    far: list[list[int]]
    small: list[list[int]]
    excused: list[list[int]]
    # Whether the tensors are those of modules by themselves in a comparison. The table then has shares, and what is wrong in words.
    alone: bool
    # The number of further tensors, which come after others of which ranks have other copies
    unlike: int = 0
    columns: dict[str, list[float | None]] = field(default_factory=lambda: {name: [] for name in COLUMNS})
    # Place of a row -> the micro batch and rank that it is from
    where: dict[int, str] = field(default_factory=dict)
    # Place of a row that is too far on some rank -> the share of each rank
    ranks: dict[int, dict[int, float | None]] = field(default_factory=dict)
    # Place of a row, for the first SAID -> what is wrong by itself, or by which factor. If nothing but the factor shows it, also the part
    # that has the factor, () for all of it.
    said: dict[int, tuple[str, tuple[int, ...] | None]] = field(default_factory=dict)
    pictures: dict[int, Picture] = field(default_factory=dict)


@dataclass
class Losses:
    """Loss and gradient norm by step of each run; a run that broke down has fewer steps. Differences are from the first run."""

    names: list[str]
    labels: list[str]
    steps: list[int]
    loss: list[list[float | None]]
    norm: list[list[float | None]]
    # By step, what is tolerated of the loss, and how far rounding errors take a control run; empty if it is not judged here
    tolerated: list[float | None] = field(default_factory=list)
    control: list[float | None] = field(default_factory=list)
    # The noise floor that is derived for the loss
    floor: float | None = None


@dataclass
class Page:
    """What report.html shows. Its fields become the payload, as JSON."""

    # "verification" or "recording"
    kind: str
    verdict: str
    title: str
    # What was compared or found, in a sentence or two
    lead: str
    # What else is to be said
    sentences: list[str]
    # How this was found out: weights, batches, versions, machine, command
    found_out: list[tuple[str, str]]
    views: list[View] = field(default_factory=list)
    # Names of tensors, with the numbers that tables have
    names: dict[str, int] = field(default_factory=dict)
    tables: list[Table] = field(default_factory=list)
    losses: Losses | None = None
    # Module with an attention's projections, "" for all of them -> the values of HEADS in its configuration
    heads: dict[str, list] = field(default_factory=dict)
    # In a recording, as a view of a comparison has them
    causes: list[tuple[str, str]] = field(default_factory=list)
    # The shape of a recording's micro batch of ids: samples, positions
    tokens: Sequence[int] = ()
    # The command that made the recorded run, or the comparison
    command: str = ""
    # Why as much is tolerated
    tolerance: str = ""
    ways: dict[str, str] = field(default_factory=lambda: WAYS)
    format: int = FORMAT

    def add(
        self,
        view: View,
        step: int,
        rows: Sequence[Judgement],
        placed: Mapping[str, Placed],
        excused: Iterable[str] = (),
        *,
        alone: bool = False,
        unlike: int = 0,
    ) -> None:
        """Add the rows of a view in one step.

        `placed` says where tensors lie on the ranks, as far as that is known. `excused` are names of tensors in another convention.
        `alone` says whether the rows are those of modules by themselves in a comparison. `unlike` is the number of further tensors,
        which are not judged since they come after others of which ranks have other copies.
        """
        if view not in self.views:
            self.views.append(view)
        numbers, exempt = [self.names.setdefault(row.name, len(self.names)) for row in rows], set(excused)
        way = view.name if self.kind == "recording" else BY_ITSELF if alone else FROM_BATCH
        count = view.counts.get(way, Count())
        # In the order of WAYS
        view.counts = {name: view.counts.get(name, count) for name in WAYS if name in (way, *view.counts)}
        counted = [row for row in rows if row.name not in exempt and (row.judged or row.too_far)]
        count.tensors += len(rows)
        count.judged += len(counted)
        count.far += sum(row.too_far for row in counted)
        worst = max(counted, key=lambda row: row.multiple, default=None)
        before = -1.0 if count.worst is None else count.worst[2]
        if worst is not None and before is not None and not worst.multiple <= before:
            count.worst = worst.step, worst.name, short(worst.multiple, 2), _hidden_part(worst) is not None
        table = Table(
            self.views.index(view),
            step,
            runs(numbers),
            _places(row.too_far and row.name not in exempt for row in rows),
            _places(not row.judged and not row.too_far for row in rows),
            _places(row.name in exempt for row in rows),
            alone,
            unlike,
        )
        room = PICTURES - sum(len(earlier.pictures) for earlier in self.tables)
        for place, (number, row) in enumerate(zip(numbers, rows, strict=True)):
            distance = row.distance
            values = (
                row.multiple,
                distance.relative,
                relative(row.tolerated, distance.norm),
                distance.relative_largest,
                relative(row.tolerated_largest, distance.largest),
            )
            shown = values[:1] if alone else values
            for (column, digits), value in zip(COLUMNS.items(), shown, strict=False):
                table.columns[column].append(short(value, digits))
            if row.where:
                table.where[place] = row.where
            if not all(share <= 1 for share in row.ranks.values()):
                table.ranks[place] = {rank: short(share, 3) for rank, share in row.ranks.items()}
            if len(table.said) < SAID and (row.factor or row.distance.unequal or (alone and row.too_far)):
                table.said[place] = (row.describe(), _hidden_part(row))
            if row.picture is not None and (row.too_far or not alone) and len(table.pictures) < room:
                table.pictures[place] = row.picture
            placement = placed.get(row.name, [])
            if any(placement):
                if placement not in view.placements:
                    view.placements.append(placement)
                view.placed[number] = view.placements.index(placement)
        self.tables.append(table)


def _places(holds: Iterable[bool]) -> list[list[int]]:
    """Return the runs of the places at which something holds."""
    return runs([place for place, is_true in enumerate(holds) if is_true])


def _hidden_part(row: Judgement) -> tuple[int, ...] | None:
    """Return the part of a tensor that has a factor, () for all of it, if nothing but the factor shows it; else None."""
    return None if row.factor is None or row.is_far else row.factor.part or ()


def short(value: float, digits: int = 4) -> float | None:
    """Return a number with as many digits as people read; None if it is not finite."""
    return float(f"{value:.{digits}g}") if math.isfinite(value) else None
