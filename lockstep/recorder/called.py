"""A micro batch as the reference is called with it: of the ranks that saw the same, and made whole where they have pieces of its samples."""

import itertools
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from lockstep.ground.errors import UserError
from lockstep.recorder import pieces
from lockstep.recorder.recorded_step import MicroBatch

IGNORED = (-100, -1)  # labels that count for no token
LABELS = ("label", "target")  # in the names of what a model is called with
LOG_PROBS = "log_probs"  # what a model of TRL returns in the place of logits


def is_label(name: str) -> bool:
    return any(word in name.lower() for word in LABELS)


@dataclass
class Called:
    """One micro batch, and the ranks that were called with it."""

    number: int  # in its step, from 0
    ranks: list[int]
    about: MicroBatch
    tensors: dict[str, torch.Tensor]
    losses: dict[int, float] = field(default_factory=dict)  # by rank
    # The gradients, other than zero, that arrived from the loop at tensors that the model returned; its scalars' are in `about`
    arrived: dict[str, torch.Tensor] = field(default_factory=dict)
    # Classes, of a loss that the loop makes itself; -1 where none counts
    targets: torch.Tensor | None = None
    # The part of a parameter's gradient that comes from the loop's own loss, not by way of what the model returned
    beside: dict[str, torch.Tensor] = field(default_factory=dict)
    piece: "Piece | None" = None  # of samples that are cut
    # The state of torch's generator before it, if the model drew from it
    random: torch.Tensor | None = None
    of_tensors: bool = (
        False  # whether a gradient, perhaps of zeros, arrived at tensors that the model returned
    )
    # Of what the model was called with, for a trial
    instead: dict[str, Any] = field(default_factory=dict)

    @property
    def is_zero(self) -> bool:
        """Whether zeros alone arrived at what the model returned, or a piece has no label."""
        if self.piece is not None and self.piece.labels == 0:
            return True
        known = self.about.loss is None or self.of_tensors
        return known and not self.arrived and not any(self.about.scalars.values())

    @property
    def twice(self) -> "Called":
        """The same, with twice the gradients that arrived."""
        scalars = {name: 2 * one for name, one in self.about.scalars.items()}
        arrived, beside = (
            {name: 2 * one for name, one in each.items()} for each in (self.arrived, self.beside)
        )
        about = self.about.model_copy(update={"scalars": scalars})
        return replace(self, about=about, arrived=arrived, beside=beside)

    def whole_of(self, tensors: list[torch.Tensor]) -> torch.Tensor | None:
        """One tensor, or chunks of the rows of tokens, such as of logits; None for others, such as those of several heads."""
        if len(tensors) < 2:
            return next(iter(tensors), None)
        if tensors[0].ndim != 3 or len({one.shape[::2] for one in tensors}) > 1:
            return None
        rows = (len(tensors[0]), sum(one.shape[1] for one in tensors))
        known = any(one.shape == rows and not one.is_floating_point() for one in self.tensors.values())
        return torch.cat(tensors, 1) if known else None

    def fill_chunks(self, returned: dict[str, torch.Tensor]) -> None:
        """Of chunks, zeros arrived where no token counts: let them be there, and all in their order."""
        some = next(iter(self.arrived.values()), None)
        if some is None or some.ndim != 3:
            return
        alike = {name: one for name, one in returned.items() if one.shape[::2] == some.shape[::2]}
        if self.arrived.keys() <= alike.keys() and self.whole_of([*alike.values()]) is not None:
            self.arrived = {
                name: self.arrived.get(name, some.new_zeros(one.shape)) for name, one in alike.items()
            }

    @property
    def first(self) -> "Called":
        """The first piece of its samples."""
        return self if self.piece is None else self.piece.all[0]

    @property
    def other_loss(self) -> str | None:
        """The scalar that the loop trains on alone, where the model returns it by a name like `total_loss`, or leaves it in a module by such a name."""
        trained = [name for name, one in self.about.scalars.items() if one]
        alone = self.about.loss is None and not self.arrived and len(trained) == 1
        return trained[0] if alone and "loss" in trained[0].rpartition(":")[2].lower() else None

    @property
    def has_own_loss(self) -> bool:
        """Whether the loop makes a loss of its own, with the model's own in it or without it."""
        return self.other_loss is None and (self.about.loss is None or bool(self.arrived))

    def has_same(self, tensors: dict[str, torch.Tensor], about: MicroBatch) -> bool:
        """Whether another micro batch is the same, bit for bit."""
        return (
            self.tensors.keys() == tensors.keys()
            and self.about.plain == about.plain
            and all(torch.equal(self.tensors[name], tensors[name]) for name in tensors)
        )


@dataclass
class Piece:
    """A micro batch is called again with all pieces, and with the labels of its own alone: what others have in their places counts for no token."""

    pieces: pieces.Pieces
    number: int
    all: list[Called]  # in their order; this one, too
    own: dict[str, torch.Tensor]  # what its ranks were called with
    labels: int | None  # that it has; None if none are known

    def cut(self, whole: torch.Tensor, shape: torch.Size | None = None) -> torch.Tensor:
        """What this piece has of a tensor."""
        return self.pieces.cut(whole, self.number, shape)


def put_together(found: list[Called], groups: list[list[int]]) -> None:
    """Micro batches that are pieces of the same samples, as their positions say, get the tensors of all. Their ranks communicate."""
    for number, group in itertools.product(sorted({one.number for one in found}), sorted(groups, key=len)):
        of_ranks = {rank: one for one in found if one.number == number for rank in one.ranks}
        members = list({id(of_ranks[rank]): of_ranks[rank] for rank in group if rank in of_ranks}.values())
        positions = [pieces.positions_of(one.tensors) for one in members]
        known = [one for one in positions if one is not None]
        if len(known) < max(len(members), 2) or any(one.piece for one in members):
            continue
        cut = pieces.find(known)
        if cut is not None:
            own = [one.tensors for one in members]
            shared = [name for name in own[0] if all(name in one for one in own)]
            whole = {name: cut.joined([one[name] for one in own]) for name in shared}
            for place, one in enumerate(members):
                one.tensors = own[place] | {name: of for name, of in whole.items() if of is not None}
                one.piece = Piece(cut, place, members, own[place], _mask_labels(one, cut, place))


def require_whole(called: Called) -> None:
    """Raise UserError for a piece, as its positions say, whose others were not found."""
    positions = None if called.piece else pieces.positions_of(called.tensors)
    if positions is None or int(positions.min()) <= 1:  # 1 is that of padding
        return
    # Not of some tokens, such as masked ones
    if float((positions.diff(dim=1) == 1).double().mean()) > 0.5:
        raise UserError(
            f"positions of micro batch {called.number} of rank {called.ranks[0]} begin at {int(positions.min())}, and no process group has those before: "
            "a piece of samples is judged with the others, whose ranks are a group"
        )


def _mask_labels(called: Called, cut: pieces.Pieces, place: int) -> int | None:
    """Leaves the labels of one piece; returns how many, None if none are known."""
    number = None
    for name, tensor in called.tensors.items():
        known = is_label(name) and not tensor.is_floating_point()
        if known and tensor.shape[-1:] == (cut.length,):
            ignored = next((one for one in IGNORED if bool((tensor == one).any())), IGNORED[0])
            own = cut.places[place]
            called.tensors[name] = torch.full_like(tensor, ignored).index_copy_(-1, own, tensor[..., own])
            number = (number or 0) + int((called.tensors[name] != ignored).sum())
    return number


def shares_of(micro: list[Called]) -> list[int]:
    """The data-parallel share of each micro batch, by the first rank that was called with it, or with another piece of it."""
    return [called.first.ranks[0] for called in micro]
