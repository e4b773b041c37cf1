"""Read a recording whose model is cut among ranks by its own code as one of the whole model, which another recording has.

The classes of such a model communicate, as Megatron's tensor-parallel layers do, so one process cannot call them. The same training by one
process has the same parameters, whole. A rank's part of a parameter is what the model's code gives it; FSDP2 may have sharded the part once
more, into the blocks that the recording has. Where the part lies in the whole is measured, never assumed: both runs begin with the same
weights, so each row, or column, of a part is found by its bits.
"""

import itertools
import math
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import torch

from lockstep.ground.errors import UserError
from lockstep.recorder.module_hooks import module_of
from lockstep.recorder.recorded_step import Block, Placed, StepRecord
from lockstep.recorder.recording import Recording

KINDS = ("weight", "gradient", "updated", "unclipped", "state")


class Run(NamedTuple):
    """Rows of a rank's part that lie beside each other in the whole, too."""

    # The first row in the part, and in the whole
    own: int
    whole: int
    length: int

    @property
    def rows(self) -> range:
        """The rows of the whole."""
        return range(self.whole, self.whole + self.length)


class Cut(NamedTuple):
    """How a rank's part of a parameter lies in the whole: in runs of rows along `dim`. Rows that are in no run are padding.

    `own` is the shape of the part, `full` that of the whole.
    """

    own: list[int]
    full: list[int]
    dim: int
    runs: list[Run]


def is_cut(own: Recording, whole: Recording) -> bool:
    """Whether some rank's parameters have other shapes than those of the other recording's model."""
    full = whole.steps[0][0].shapes
    return any(
        shape != full.get(name, shape)
        for record in own.steps[0].values()
        for name, shape in record.shapes.items()
    )


class CutByCode(Recording):
    """The recording in `folder`, read as one of the model of `whole`. Raises UserError if its parameters are no parts of that model's."""

    def __init__(self, folder: Path, whole: Recording):
        super().__init__(folder)
        self.tree, self.model_folder, self.needs_group = whole.tree, whole.folder, whole.needs_group
        # (rank, step, name of a placed block) -> (the stored block that it is cut from, dim, start, length)
        self._slices: dict[tuple[int, int, str], tuple[str, int, int, int]] = {}
        cuts = self._cuts(whole)
        for step, ranks in enumerate(self.steps, 1):
            for rank, record in ranks.items():
                # They are of classes that are not the reference's.
                record.attributes.clear()
                record.attributes.update(whole.steps[0][0].attributes)
                self._place(step, record, cuts[rank])

    def _tensor(self, rank: int, step: int, key: str) -> torch.Tensor:
        if (rank, step, key) not in self._slices:
            return self._stored(rank, step, key)
        stored, dim, start, length = self._slices[rank, step, key]
        return self._stored(rank, step, stored).narrow(dim, start, length)

    def _content(self, rank: int, step: int, key: str) -> str | None:
        return None if (rank, step, key) in self._slices else super()._content(rank, step, key)

    def _cuts(self, whole: Recording) -> dict[int, dict[str, Cut]]:
        """Return how each rank's parameters are cut, by rank and name. Runs end where those of other ranks begin or end.

        Raises UserError if it is not known.
        """
        cuts = self._by_values(whole)
        unclear = [
            (rank, name) for rank, of_rank in cuts.items() for name in of_rank if not _is_clear(name, cuts)
        ]
        for rank, name in unclear:
            known = {other: cut for other, cut in cuts[rank].items() if (rank, other) not in unclear}
            runs = runs_like(known, name, cuts[rank][name], alike=self._are_alike(rank, name))
            cuts[rank][name] = cuts[rank][name]._replace(runs=runs)
        unknown = next((name for _, name in unclear if not _is_clear(name, cuts)), None)
        if unknown is not None:
            raise UserError(
                f"where the ranks' parts of {unknown} lie in that of {whole.folder} is not known: their values are not there, or all alike; "
                "let both runs begin with the same weights, drawn at random"
            )
        runs_of: dict[str, list[Run]] = {}
        for of_rank in cuts.values():
            for name, cut in of_rank.items():
                runs_of.setdefault(name, []).extend(cut.runs)
        return {
            rank: {
                name: cut._replace(runs=[piece for run in cut.runs for piece in split(run, runs_of[name])])
                for name, cut in of_rank.items()
            }
            for rank, of_rank in cuts.items()
        }

    def _by_values(self, whole: Recording) -> dict[int, dict[str, Cut]]:
        """Return the same as far as the values of the weights say it: a part that they do not place has no runs."""
        shapes, cuts = whole.steps[0][0].shapes, dict[int, dict[str, Cut]]()
        for rank, record in self.steps[0].items():
            parts = record.shapes
            unmatched = sorted(parts.keys() ^ shapes.keys())
            if unmatched:
                who = f"rank {rank} has" if unmatched[0] in parts else f"rank {rank} lacks"
                raise UserError(
                    f"--against {whole.folder} has another model: {who} {unmatched[0]}; record one process with the same model"
                )
            dims = {name: _cut_dim(name, part, shapes[name]) for name, part in parts.items()}
            cuts[rank] = {
                name: Cut(parts[name], shapes[name], dim, []) for name, dim in dims.items() if dim is not None
            }
        for name in shapes:
            ranks = [rank for rank, of_rank in cuts.items() if name in of_rank]
            weight = whole.whole(1, f"weight/{name}")[0] if ranks else torch.empty(0)
            for rank in ranks:
                runs = self._runs(rank, f"weight/{name}", weight, cuts[rank][name].dim)
                cuts[rank][name] = cuts[rank][name]._replace(runs=runs)
        return cuts

    def _are_alike(self, rank: int, name: str) -> bool:
        """Whether all values that a rank has of a parameter are equal."""
        numbers = range(len(self.steps[0][rank].places[f"weight/{name}"].blocks))
        blocks = (self._stored(rank, 1, f"weight/{name}#{number}") for number in numbers)
        return all(bool((block == block.flatten()[0]).all()) for block in blocks if block.numel())

    def _runs(self, rank: int, name: str, whole: torch.Tensor, dim: int) -> list[Run]:
        """Return where a rank's blocks of its part lie in the whole; [] if that is not clear. FSDP2 may have cut the part once more."""
        runs = list[Run]()
        blocks = self.steps[0][rank].places[name].blocks
        if not sum(math.prod(block.shape) for block in blocks):
            return [Run(0, 0, 0)]
        for number, block in enumerate(blocks):
            within = tuple(slice(None) if axis == dim else rows for axis, rows in enumerate(block.within))
            first = block.start[dim]
            of_block = runs_in(self._stored(rank, 1, f"{name}#{number}"), whole[within], dim)
            if not of_block:
                return []
            runs += [run._replace(own=run.own + first) for run in of_block]
        return runs

    def _place(self, step: int, about: StepRecord, cuts: dict[str, Cut]) -> None:
        """Change the places of a rank's tensors in its parts to those in the whole."""
        for name, part in about.places.items():
            cut = _cut_of(name, part.full, cuts)
            if cut is None:
                continue
            blocks: list[Block] = []
            for (number, block), run in itertools.product(enumerate(part.blocks), cut.runs):
                start, shape = list(block.start), list(block.shape)
                first = max(start[cut.dim], run.own)
                length = min(start[cut.dim] + shape[cut.dim], run.own + run.length) - first
                if length > 0:
                    key = about.rank, step, f"{name}#{len(blocks)}"
                    self._slices[key] = f"{name}#{number}", cut.dim, first - start[cut.dim], length
                    start[cut.dim], shape[cut.dim] = run.whole + first - run.own, length
                    blocks.append(Block(start=start, shape=shape))
            about.places[name] = Placed(full=cut.full, blocks=blocks)


def _cut_of(name: str, shape: list[int], cuts: dict[str, Cut]) -> Cut | None:
    """Return how a recorded tensor of this shape is cut; None if it is not."""
    kind, _, rest = name.partition("/")
    if kind in ("forward", "backward"):
        # If a weight is several matrices on each other, each of them cut, its output is cut likewise. Shards of other outputs are put
        # together in the order of ranks.
        cut = cuts.get(f"{module_of(name)}.weight")
        if cut is None or len(cut.runs) == 1 or shape[-1:] != [cut.own[cut.dim]]:
            return None
        # FSDP2 may have the other rows on other ranks.
        if sum(run.length for run in cut.runs) < shape[-1]:
            return None
        return Cut(shape, [*shape[:-1], cut.full[cut.dim]], len(shape) - 1, cut.runs)
    cut = cuts.get(rest.partition("/")[2] if kind == "state" else rest)
    return cut if kind in KINDS and cut is not None and shape == cut.own else None


def _is_clear(name: str, cuts: dict[int, dict[str, Cut]]) -> bool:
    """Whether it is known where the ranks' parts of a parameter lie, and they make the whole."""
    parts = [of_rank[name] for of_rank in cuts.values() if name in of_rank]
    rows = {row for part in parts for run in part.runs for row in run.rows}
    return all(part.runs and len(rows) == part.full[part.dim] for part in parts)


def _rows(tensor: torch.Tensor, dim: int) -> list[bytes]:
    """Return the bytes of each row of a tensor along `dim`."""
    rows = tensor.movedim(dim, 0).reshape(tensor.shape[dim], -1).clone(memory_format=torch.contiguous_format)
    return [row.tobytes() for row in rows.view(torch.uint8).numpy()]


def _cut_dim(name: str, part: list[int], whole: list[int]) -> int | None:
    """Return the dim in which the shape of a part differs from that of the whole; None if the part is the whole.

    Raises UserError if they differ in several dims, or have other numbers of dims.
    """
    dims = [dim for dim, (size, full) in enumerate(zip(part, whole, strict=False)) if size != full]
    if len(part) != len(whole) or len(dims) > 1:
        raise UserError(
            f"--against: {name} is {part} in this run, and {whole} in the other; only parts along one dim can be put together"
        )
    return dims[0] if dims else None


def runs_in(part: torch.Tensor, whole: torch.Tensor, dim: int) -> list[Run]:
    """Return where the rows of a `part` are in the `whole`; [] if that is not clear, such as of zeros.

    A row of zeros may be padding, so it has a place only if the row beside it says which.
    """
    rows, part_rows = _rows(whole.to(part.dtype), dim), _rows(part, dim)
    places, times = {row: place for place, row in enumerate(rows)}, Counter(rows)
    zeros = bytes(len(rows[0])) if rows else b""
    # The place of each row of the part, -1 if it has none
    placed = [-1 if row == zeros else places.get(row, -1) for row in part_rows]
    if any(times[row] > 1 for row in part_rows if row != zeros):
        return []
    for number, row in enumerate(part_rows):
        before = placed[number - 1] if number else -1
        after = placed[number + 1] if number + 1 < len(placed) else -1
        place = before + 1 if before >= 0 else after - 1
        if row == zeros and 0 <= place < len(rows) and rows[place] == zeros:
            placed[number] = place
    runs: list[Run] = []
    for number, place in enumerate(placed):
        last = runs[-1] if runs else None
        if last and (number, place) == (last.own + last.length, last.whole + last.length):
            runs[-1] = last._replace(length=last.length + 1)
        elif place >= 0:
            runs.append(Run(number, place, 1))
    return runs


def split(run: Run, others: list[Run]) -> list[Run]:
    """Return a run in pieces that end where `others` begin or end, so that those of two ranks are the same or have no row in common."""
    ends = {end for other in others for end in (other.whole, other.whole + other.length)}
    bounds = sorted({run.whole, run.whole + run.length} | {end for end in ends if end in run.rows})
    return [Run(run.own + start - run.whole, start, end - start) for start, end in itertools.pairwise(bounds)]


def runs_like(known: dict[str, Cut], name: str, cut: Cut, *, alike: bool) -> list[Run]:
    """Return where a part lies whose rows do not say it.

    It lies as another parameter of its module, or in the same turn as the other parameters of its rank: if these are the second of equal
    parts, so is it. Returns [] if that does not say it either, as where its values are all `alike`: then it may also be in several runs,
    as another parameter is.
    """
    size, full = cut.own[cut.dim], cut.full[cut.dim]
    for beside, other in known.items():
        sizes = other.own[other.dim], other.full[other.dim]
        if beside.rpartition(".")[0] == name.rpartition(".")[0] and sizes == (size, full):
            return other.runs
    in_one_run = [other for other in known.values() if len(other.runs) == 1 and other.runs[0].length]
    if alike and len(in_one_run) < len(known):
        return []
    turns = {other.runs[0].whole / other.own[other.dim] for other in in_one_run}
    start = round(turns.pop() * size) if len(turns) == 1 else full
    length = min(size, full - start)
    return [Run(0, start, length)] if length > 0 else []
