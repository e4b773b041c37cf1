"""A recording whose model is cut among ranks by its own code, read as one of the whole model that another recording has.

The classes of such a model communicate, as Megatron's tensor-parallel layers do, so one process cannot call them. The same training by one
process has the same parameters, whole. Where each rank's part of a parameter lies in it is measured, never assumed: both runs begin with the
same weights, and so each row, or column, of a part is found by its bits.
"""

import itertools
import math
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import torch

from lockstep.ground.errors import UserError
from lockstep.recorder.module_hooks import module_of
from lockstep.recorder.recorded_step import Place, Step
from lockstep.recorder.recording import Recording

KINDS = ("weight", "gradient", "updated", "unclipped", "state")


class Run(NamedTuple):
    """Rows of a rank's part that lie beside each other in the whole, too."""

    own: int
    whole: int
    length: int

    @property
    def rows(self) -> range:
        """Of the whole."""
        return range(self.whole, self.whole + self.length)


class Cut(NamedTuple):
    """How a rank's part of a parameter, of the shape `own`, lies in the whole: rows along `dim`. Rows without a place are padding."""

    own: list[int]
    full: list[int]
    dim: int
    runs: list[Run]


def is_cut(own: Recording, whole: Recording) -> bool:
    """Whether a rank's parameters have other shapes than those of the other recording's model."""
    theirs = _parts(whole.steps[0][0])
    return any(
        shape != theirs.get(name, shape)
        for about in own.steps[0].values()
        for name, shape in _parts(about).items()
    )


def _parts(about: Step) -> dict[str, list[int]]:
    """The shapes of the parameters that a rank has, as its model has them."""
    return {
        name.removeprefix("weight/"): list(places[0].full or [])
        for name, places in about.places.items()
        if name.startswith("weight/")
    }


class CutByCode(Recording):
    """The recording in `folder`, as one of the model of `whole`. Raises UserError if its parameters are no parts of that model's."""

    def __init__(self, folder: Path, whole: Recording):
        super().__init__(folder)
        self.tree, self.model_folder, self._of_one_process = whole.tree, whole.folder, whole.needs_group
        self._blocks: dict[tuple[int, int, str], tuple[str, int, int, int]] = {}
        cuts = self._cuts(whole)
        for step, ranks in enumerate(self.steps, 1):
            for rank, about in ranks.items():
                about.attributes.clear()  # of classes that are not the reference's
                about.attributes.update(whole.steps[0][0].attributes)
                self._place(step, about, cuts[rank])

    @property
    def needs_group(self) -> bool:
        return self._of_one_process

    def _tensor(self, rank: int, step: int, key: str) -> torch.Tensor:
        if (rank, step, key) not in self._blocks:
            return self._stored(rank, step, key)
        stored, dim, start, length = self._blocks[rank, step, key]
        return self._stored(rank, step, stored).narrow(dim, start, length)

    def _cuts(self, whole: Recording) -> dict[int, dict[str, Cut]]:
        """Of each rank, the parameters that it has parts of."""
        found = self._by_values(whole)
        unclear = [(rank, name) for rank, own in found.items() for name in own if not _is_clear(name, found)]
        for rank, name in unclear:
            known = {other: cut for other, cut in found[rank].items() if (rank, other) not in unclear}
            runs = runs_like(known, name, found[rank][name], alike=self._are_alike(rank, name))
            found[rank][name] = found[rank][name]._replace(runs=runs)
        odd = next((name for _, name in unclear if not _is_clear(name, found)), None)
        if odd is not None:
            raise UserError(
                f"where the ranks' parts of {odd} lie in that of {whole.folder} is not known: their values are not there, or all alike; "
                "let both runs begin with the same weights, drawn at random"
            )
        runs_of: dict[str, list[Run]] = {}
        for own in found.values():
            for name, cut in own.items():
                runs_of.setdefault(name, []).extend(cut.runs)
        return {
            rank: {
                name: cut._replace(runs=[piece for run in cut.runs for piece in split(run, runs_of[name])])
                for name, cut in own.items()
            }
            for rank, own in found.items()
        }

    def _by_values(self, whole: Recording) -> dict[int, dict[str, Cut]]:
        """The same, as far as the values of the weights say where a part lies."""
        shapes, found = _parts(whole.steps[0][0]), dict[int, dict[str, Cut]]()
        for rank, about in self.steps[0].items():
            parts = _parts(about)
            alone = sorted(parts.keys() ^ shapes.keys())
            if alone:
                where = f"rank {rank} has" if alone[0] in parts else f"rank {rank} lacks"
                raise UserError(
                    f"--against {whole.folder} has another model: {where} {alone[0]}; record one process with the same model"
                )
            dims = {name: _cut_dim(name, part, shapes[name]) for name, part in parts.items()}
            found[rank] = {
                name: Cut(parts[name], shapes[name], dim, []) for name, dim in dims.items() if dim is not None
            }
        for name in shapes:
            cut = [rank for rank, own in found.items() if name in own]
            values = whole.whole(1, f"weight/{name}")[0] if cut else torch.empty(0)
            for rank in cut:
                runs = self._runs(rank, f"weight/{name}", values, found[rank][name].dim)
                found[rank][name] = found[rank][name]._replace(runs=runs)
        return found

    def _are_alike(self, rank: int, name: str) -> bool:
        """Whether all that a rank has of a parameter is one value."""
        blocks = range(len(self.steps[0][rank].places[f"weight/{name}"]) - 1)
        values = (self._stored(rank, 1, f"weight/{name}#{number}") for number in blocks)
        return all(bool((one == one.flatten()[0]).all()) for one in values if one.numel())

    def _runs(self, rank: int, name: str, whole: torch.Tensor, dim: int) -> list[Run]:
        """Where what a rank has of its part lies in the whole. FSDP2 may have cut the part once more."""
        found = list[Run]()
        blocks = self.steps[0][rank].places[name][1:]
        if not sum(math.prod(block.shape or ()) for block in blocks):
            return [Run(0, 0, 0)]
        for number, block in enumerate(blocks):
            within = tuple(slice(None) if at == dim else one for at, one in enumerate(block.within))
            first = (block.start or [0])[dim]
            runs = runs_in(self._stored(rank, 1, f"{name}#{number}"), whole[within], dim)
            if not runs:
                return []
            found += [one._replace(own=one.own + first) for one in runs]
        return found

    def _place(self, step: int, about: Step, cuts: dict[str, Cut]) -> None:
        """Say of each of a rank's tensors where it lies in the whole."""
        for name, (of_part, *blocks) in about.places.items():
            cut = _cut_of(name, of_part.full or [], cuts)
            if cut is None:
                continue
            placed: list[Place] = []
            for (number, block), run in itertools.product(enumerate(blocks), cut.runs):
                begins, sizes = list(block.start or ()), list(block.shape or ())
                first = max(begins[cut.dim], run.own)
                length = min(begins[cut.dim] + sizes[cut.dim], run.own + run.length) - first
                if length > 0:
                    key = about.rank, step, f"{name}#{len(placed)}"
                    self._blocks[key] = f"{name}#{number}", cut.dim, first - begins[cut.dim], length
                    begins[cut.dim], sizes[cut.dim] = run.whole + first - run.own, length
                    placed.append(Place(start=begins, shape=sizes))
            about.places[name] = [Place(full=cut.full), *placed]


def _cut_of(name: str, shape: list[int], cuts: dict[str, Cut]) -> Cut | None:
    """How a recorded tensor of this shape is cut; None for one that is not."""
    kind, _, rest = name.partition("/")
    if kind in ("forward", "backward"):
        # Several matrices on each other, each cut, give an output that is cut likewise. Other shards are put together in the order of ranks.
        cut = cuts.get(f"{module_of(name)}.weight")
        if cut is None or len(cut.runs) == 1 or shape[-1:] != [cut.own[cut.dim]]:
            return None
        if sum(run.length for run in cut.runs) < shape[-1]:  # FSDP2 has the other rows on other ranks
            return None
        return Cut(shape, [*shape[:-1], cut.full[cut.dim]], len(shape) - 1, cut.runs)
    cut = cuts.get(rest.partition("/")[2] if kind == "state" else rest)
    return cut if kind in KINDS and cut is not None and shape == cut.own else None


def _is_clear(name: str, found: dict[int, dict[str, Cut]]) -> bool:
    """Whether it is known where the ranks' parts of a parameter lie, and they make the whole."""
    cuts = [own[name] for own in found.values() if name in own]
    rows = {row for cut in cuts for run in cut.runs for row in run.rows}
    return all(cut.runs and len(rows) == cut.full[cut.dim] for cut in cuts)


def _rows(tensor: torch.Tensor, dim: int) -> list[bytes]:
    rows = tensor.movedim(dim, 0).reshape(tensor.shape[dim], -1).clone(memory_format=torch.contiguous_format)
    return [row.tobytes() for row in rows.view(torch.uint8).numpy()]


def _cut_dim(name: str, part: list[int], whole: list[int]) -> int | None:
    """None where the part is the whole."""
    odd = [dim for dim, (one, other) in enumerate(zip(part, whole, strict=False)) if one != other]
    if len(part) != len(whole) or len(odd) > 1:
        raise UserError(
            f"--against: {name} is {part} in this run, and {whole} in the other; only parts along one dim can be put together"
        )
    return odd[0] if odd else None


def runs_in(part: torch.Tensor, whole: torch.Tensor, dim: int) -> list[Run]:
    """Where the rows of a `part` are in the `whole`; none if that is not clear, such as of zeros.

    A row of zeros may be padding, so it is only where the row beside it says.
    """
    rows, own = _rows(whole.to(part.dtype), dim), _rows(part, dim)
    places, times = {row: place for place, row in enumerate(rows)}, Counter(rows)
    zeros = bytes(len(rows[0])) if rows else b""
    found = [-1 if row == zeros else places.get(row, -1) for row in own]
    if any(times[row] > 1 for row in own if row != zeros):
        return []
    for number, row in enumerate(own):
        before = found[number - 1] if number else -1
        after = found[number + 1] if number + 1 < len(found) else -1
        place = before + 1 if before >= 0 else after - 1
        if row == zeros and 0 <= place < len(rows) and rows[place] == zeros:
            found[number] = place
    runs: list[Run] = []
    for number, place in enumerate(found):
        last = runs[-1] if runs else None
        if last and (number, place) == (last.own + last.length, last.whole + last.length):
            runs[-1] = last._replace(length=last.length + 1)
        elif place >= 0:
            runs.append(Run(number, place, 1))
    return runs


def split(run: Run, others: list[Run]) -> list[Run]:
    """A run in pieces that end where `others` begin or end, so that those of two ranks are the same or have no row in common."""
    borders = {border for one in others for border in (one.whole, one.whole + one.length)}
    at = sorted({run.whole, run.whole + run.length} | {one for one in borders if one in run.rows})
    return [Run(run.own + one - run.whole, one, other - one) for one, other in itertools.pairwise(at)]


def runs_like(known: dict[str, Cut], name: str, cut: Cut, *, alike: bool) -> list[Run]:
    """Where a part lies whose rows do not say it: as another parameter of its module, or in the same turn as the others of its rank.

    Empty where that does not say it either, such as of values that are all `alike`, and may be in pieces as another parameter is.
    """
    own, full = cut.own[cut.dim], cut.full[cut.dim]
    for other, beside in known.items():
        sizes = beside.own[beside.dim], beside.full[beside.dim]
        if other.rpartition(".")[0] == name.rpartition(".")[0] and sizes == (own, full):
            return beside.runs
    in_one = [one for one in known.values() if len(one.runs) == 1 and one.runs[0].length]
    if alike and len(in_one) < len(known):
        return []
    turns = {one.runs[0].whole / one.own[one.dim] for one in in_one}
    start = round(turns.pop() * own) if len(turns) == 1 else full
    length = min(own, full - start)
    return [Run(0, start, length)] if length > 0 else []
