"""What a page shows, as plain data: the same for a comparison of strategies and for a recorded run. docs/page.md lists its entries.

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
SAID = 500  # sentences of a table
PICTURES = 960  # of a page: at most 4 MB
# Of a table, as in `Page.add`, with the digits that are shown
COLUMNS = {"share": 3, "error": 3, "tolerated": 2, "largest": 3, "tolerated_largest": 2}
# Entries of a configuration that say which heads an attention has
HEADS = ("num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size")
# To compute a step: what they are called, and what that is
WAYS = {
    "each module by itself": "Each module is computed again from the inputs that it had in the run, and from the gradient that arrived there. "
    "A tensor that is too far here is wrong by itself.",
    "from the batch": "The whole step is computed again from its batch. What follows from a wrong tensor is then too far as well. "
    "Updates are computed from the run's own gradients.",
}
BY_ITSELF, FROM_BATCH = WAYS
# Step, tensor, its share of what is tolerated, and whether only a factor has that share
Worst = tuple[int, str, float | None, bool]
# Of a tensor of a comparison, its shape, and axis -> the dim that it cuts; of a recorded one, [start, shape] of the parts of each rank
Placed = list[Any]


@dataclass
class Count:
    """Of the tensors of a view that were computed in one way, in all steps."""

    tensors: int = 0
    judged: int = 0
    far: int = 0
    worst: Worst | None = None


@dataclass
class View:
    """One set of tensors that a page switches to: a strategy's, or one way to judge a recording."""

    name: str  # of the run or the way; report.html#NAME opens it
    label: str
    verdict: str
    counted: str = ""  # what was judged in the place of tensors, in words
    first: tuple[int, str, str] | None = None  # step, tensor and what is wrong
    counts: dict[str, Count] = field(default_factory=dict)  # by way to compute
    further: str = ""  # what is wrong beside tensors, in words
    causes: list[tuple[str, str]] = field(default_factory=list)  # names and evidence
    excluded: list[str] = field(default_factory=list)
    observed: list[str] = field(default_factory=list)  # about the first wrong tensor
    ranks: list[dict[str, int]] = field(default_factory=list)  # the coordinates of each
    # Step, tensor, ranks whose copy is another; of a recording, of each in how many elements and by how much, relative to the first rank's,
    # and whether that one is right if it is near enough
    differing: Sequence[tuple] = ()
    contract: dict[str, Any] = field(default_factory=dict)
    placements: list[Placed] = field(default_factory=list)
    # number of a name -> that of its placement
    placed: dict[int, int] = field(default_factory=dict)
    by_itself: str = ""  # what was found of each module by itself, in a comparison


@dataclass
class Table:
    """The tensors of one view in one step, in order of execution, by column; errors are relative."""

    view: int
    step: int
    names: list[list[int]]  # their numbers, as runs of [first, how many]
    # Places of tensors that are too far, too small to judge, or in another convention, as such runs
    far: list[list[int]]
    small: list[list[int]]
    excused: list[list[int]]
    # Of modules by themselves in a comparison: it has shares, and what is wrong in words
    alone: bool
    unlike: int = 0  # further tensors, which come after others of which ranks have other copies
    columns: dict[str, list[float | None]] = field(default_factory=lambda: {name: [] for name in COLUMNS})
    # The micro batch and rank that a row is from
    where: dict[int, str] = field(default_factory=dict)
    ranks: dict[int, dict[int, float | None]] = field(
        default_factory=dict
    )  # the share of each, of one that is too far
    # Of the first, what is wrong by itself, or by which factor; and, where nothing but the factor shows it, the part that has it, () for all of it
    said: dict[int, tuple[str, tuple[int, ...] | None]] = field(default_factory=dict)
    pictures: dict[int, Picture] = field(default_factory=dict)


@dataclass
class Losses:
    """Loss and gradient norm by step of each run, one that broke down having fewer; the differences are from the first."""

    names: list[str]
    labels: list[str]
    steps: list[int]
    loss: list[list[float | None]]
    norm: list[list[float | None]]
    # Of the loss, by step: what is tolerated, and how far rounding errors take a control run; empty: not judged here
    tolerated: list[float | None] = field(default_factory=list)
    control: list[float | None] = field(default_factory=list)
    floor: float | None = None  # the noise floor that is derived for it


@dataclass
class Page:
    kind: str  # "verification" or "recording"
    verdict: str
    title: str
    lead: str  # what was compared or found, in a sentence or two
    sentences: list[str]  # what else is to be said
    found_out: list[tuple[str, str]]  # how: weights, batches, versions, machine, command
    views: list[View] = field(default_factory=list)
    # Of tensors, with the numbers that tables have
    names: dict[str, int] = field(default_factory=dict)
    tables: list[Table] = field(default_factory=list)
    losses: Losses | None = None
    # Module with an attention's projections, "" for all -> HEADS, as its configuration has them
    heads: dict[str, list] = field(default_factory=dict)
    # Of a recording, as a view has them
    causes: list[tuple[str, str]] = field(default_factory=list)
    tokens: Sequence[int] = ()  # of a recording's micro batch of ids: samples, positions
    command: str = ""  # that made the recorded run, or the comparison
    tolerance: str = ""  # why as much is tolerated
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
        """Adds the rows of a view in one step. `placed` says where tensors lie on the ranks, as far as that is known.

        `unlike` are further tensors, which are not judged since they come after others of which ranks have other copies.
        """
        if view not in self.views:
            self.views.append(view)
        named, known = [self.names.setdefault(row.name, len(self.names)) for row in rows], set(excused)
        way = view.name if self.kind == "recording" else BY_ITSELF if alone else FROM_BATCH
        count = view.counts.get(way, Count())
        view.counts = {one: view.counts.get(one, count) for one in WAYS if one in (way, *view.counts)}
        counted = [row for row in rows if row.name not in known and (row.judged or row.too_far)]
        count.tensors += len(rows)
        count.judged += len(counted)
        count.far += sum(row.too_far for row in counted)
        worst = max(counted, key=lambda row: row.multiple, default=None)
        before = -1.0 if count.worst is None else count.worst[2]
        if worst is not None and before is not None and not worst.multiple <= before:
            count.worst = worst.step, worst.name, short(worst.multiple, 2), _hidden(worst) is not None
        table = Table(
            self.views.index(view),
            step,
            runs(named),
            _places(row.too_far and row.name not in known for row in rows),
            _places(not row.judged and not row.too_far for row in rows),
            _places(row.name in known for row in rows),
            alone,
            unlike,
        )
        room = PICTURES - sum(len(one.pictures) for one in self.tables)
        for place, (number, row) in enumerate(zip(named, rows, strict=True)):
            distance = row.distance
            numbers = (
                row.multiple,
                distance.relative,
                relative(row.tolerated, distance.norm),
                distance.relative_largest,
                relative(row.tolerated_largest, distance.largest),
            )
            shown = numbers[:1] if alone else numbers
            for (column, digits), value in zip(COLUMNS.items(), shown, strict=False):
                table.columns[column].append(short(value, digits))
            if row.where:
                table.where[place] = row.where
            if not all(one <= 1 for one in row.ranks.values()):
                table.ranks[place] = {rank: short(one, 3) for rank, one in row.ranks.items()}
            if len(table.said) < SAID and (row.factor or row.distance.unequal or (alone and row.too_far)):
                table.said[place] = (row.describe(), _hidden(row))
            if row.picture is not None and (row.too_far or not alone) and len(table.pictures) < room:
                table.pictures[place] = row.picture
            where = placed.get(row.name, [])
            if any(where):
                if where not in view.placements:
                    view.placements.append(where)
                view.placed[number] = view.placements.index(where)
        self.tables.append(table)


def _places(holds: Iterable[bool]) -> list[list[int]]:
    return runs([place for place, one in enumerate(holds) if one])


def _hidden(row: Judgement) -> tuple[int, ...] | None:
    return None if row.factor is None or row.is_far else row.factor.part or ()


def short(value: float, digits: int = 4) -> float | None:
    """A number for people; None if it is not finite."""
    return float(f"{value:.{digits}g}") if math.isfinite(value) else None
