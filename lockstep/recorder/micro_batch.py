"""A micro batch as the reference is called with it.

Ranks that were called with the same tensors share one. Where ranks have pieces of samples, the pieces are joined.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from lockstep.ground.errors import UserError
from lockstep.recorder import pieces
from lockstep.recorder.recorded_step import MicroBatchRecord

IGNORED = (-100, -1)  # labels of tokens that do not count
LABELS = ("label", "target")  # words in the names of arguments that are labels
# The relative rest of a gradient that is no multiple of another one, which rounding errors do not reach; also the share of rows that two
# losses of different samples may have in common
APART = 0.1
LOG_PROBS = "log_probs"  # the field that a model of TRL returns instead of logits


def is_label(name: str) -> bool:
    return any(word in name.lower() for word in LABELS)


@dataclass
class JoinedMicroBatch:
    """One micro batch, and the ranks that were called with it."""

    number: int  # of the micro batch in its step, from 0
    ranks: list[int]
    record: MicroBatchRecord
    tensors: dict[str, torch.Tensor]
    losses: dict[int, float] = field(default_factory=dict)  # by rank
    # The gradients that arrived from the loop at tensors that the model returned, by name, without those of zeros alone.
    # Those of scalars are in `record`.
    output_gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    # Class indices that a loss of the loop's own has for targets; -1 where a target does not count
    targets: torch.Tensor | None = None
    # By parameter: the part of its gradient that the loop's own loss gives it, not through what the model returned
    direct_gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    piece: "Piece | None" = None  # if the samples are cut into pieces
    # The state of torch's generator before the forward pass, if the model drew from it
    generator_state: torch.Tensor | None = None
    # Whether a gradient, perhaps of zeros, arrived at tensors that the model returned
    has_output_gradients: bool = False
    # Arguments that replace those that the model was called with, for a trial
    replaced_inputs: dict[str, Any] = field(default_factory=dict)

    @property
    def is_zero(self) -> bool:
        """Whether nothing but zeros arrived at what the model returned, or this is a piece without labels."""
        if self.piece is not None and self.piece.labels == 0:
            return True
        is_known = self.record.loss is None or self.has_output_gradients
        return is_known and not self.output_gradients and not any(self.record.scalars.values())

    @property
    def doubled(self) -> "JoinedMicroBatch":
        """The same micro batch, with twice the gradients that arrived."""
        scalars = {name: 2 * gradient for name, gradient in self.record.scalars.items()}
        arrived, beside = (
            {name: 2 * gradient for name, gradient in gradients.items()}
            for gradients in (self.output_gradients, self.direct_gradients)
        )
        about = self.record.model_copy(update={"scalars": scalars})
        return replace(self, record=about, output_gradients=arrived, direct_gradients=beside)

    def join_chunks(self, tensors: list[torch.Tensor]) -> torch.Tensor | None:
        """Join chunks along the dim of tokens, such as those of logits: (rows, tokens of the chunk, classes).

        One tensor is returned as it is. Tensors that are no chunks, such as those of several heads, give None. Scalars beside them, such as a
        router's loss, do not count.
        """
        tensors = [tensor for tensor in tensors if tensor.ndim]
        if len(tensors) < 2:
            return next(iter(tensors), None)
        if tensors[0].ndim != 3 or len({chunk.shape[::2] for chunk in tensors}) > 1:
            return None
        shape = (len(tensors[0]), sum(chunk.shape[1] for chunk in tensors))
        has_tokens = any(
            tensor.shape == shape and not tensor.is_floating_point() for tensor in self.tensors.values()
        )
        return torch.cat(tensors, 1) if has_tokens else None

    def add_zero_chunks(self, returned: dict[str, torch.Tensor]) -> None:
        """Add gradients of zeros for chunks in which no token counts, and put all chunks in their order.

        `returned` are the tensors that the model returns. `arrived` has no gradient of zeros.
        """
        first = next(iter(self.output_gradients.values()), None)
        if first is None or first.ndim != 3:
            return
        chunks = {name: tensor for name, tensor in returned.items() if tensor.shape[::2] == first.shape[::2]}
        if self.output_gradients.keys() <= chunks.keys() and self.join_chunks([*chunks.values()]) is not None:
            self.output_gradients = {
                name: self.output_gradients.get(name, first.new_zeros(chunk.shape))
                for name, chunk in chunks.items()
            }

    @property
    def first(self) -> "JoinedMicroBatch":
        """The first piece of the same samples; the micro batch itself if it is no piece."""
        return self if self.piece is None else self.piece.members[0]

    @property
    def loss_name(self) -> str | None:
        """The name of the one scalar that the loop trains on, if "loss" is in it, as in `total_loss`; else None.

        The model returns the scalar, or leaves it as an attribute of a module.
        """
        trained = [name for name, gradient in self.record.scalars.items() if gradient]
        is_alone = self.record.loss is None and not self.output_gradients and len(trained) == 1
        return trained[0] if is_alone and "loss" in trained[0].rpartition(":")[2].lower() else None

    @property
    def has_own_loss(self) -> bool:
        """Whether the loop computes a loss of its own, with or without the model's loss in it."""
        return self.loss_name is None and (self.record.loss is None or bool(self.output_gradients))

    def has_inputs(self, tensors: dict[str, torch.Tensor], about: MicroBatchRecord) -> bool:
        """Whether another micro batch, with these `tensors`, has the same inputs, bit for bit."""
        return (
            self.tensors.keys() == tensors.keys()
            and self.record.plain == about.plain
            and all(torch.equal(self.tensors[name], tensors[name]) for name in tensors)
        )


def are_of_other_samples(
    one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor], *, by_rows: bool
) -> bool:
    """Whether gradients at the outputs for the same inputs are those of losses of different samples.

    Each has the gradients that arrived, by the name of the output. `by_rows`: hardly a row is other than zero in both, as where each loss
    is of its own nodes of a graph. Otherwise, one is no multiple of the other.
    """
    for name in one.keys() & other.keys():
        x, y = one[name].double(), other[name].double()
        if x.shape != y.shape or not (x.any() and y.any()):
            continue
        if by_rows:
            rows, other_rows = ((of if of.ndim > 1 else of[:, None]).any(-1).flatten() for of in (x, y))
            shared = int((rows & other_rows).sum())
            are_apart = shared <= APART * min(int(rows.sum()), int(other_rows.sum()))
        else:
            x, y = x.flatten(), y.flatten()
            are_apart = float((y - x @ y / (x @ x) * x).norm()) > APART * float(y.norm())
        if are_apart:
            return True
    return False


@dataclass
class Piece:
    """One of the pieces that samples are cut into.

    The reference is called with all pieces, but with the labels of this one alone: labels of the others are ignored.
    """

    pieces: pieces.Pieces
    number: int
    members: list[JoinedMicroBatch]  # all pieces in order, with this one
    inputs: dict[str, torch.Tensor]  # what the ranks of this piece were called with
    labels: int | None  # how many labels count in this piece; None if no labels are known

    def cut(self, whole: torch.Tensor, shape: torch.Size | None = None) -> torch.Tensor:
        """Return the part of a tensor that this piece has."""
        return self.pieces.cut(whole, self.number, shape)


def join_pieces(found: list[JoinedMicroBatch], groups: list[list[int]]) -> None:
    """Join the pieces of samples that ranks were called with. Positions say which piece belongs where.

    `found` are the micro batches of a step; each piece gets the tensors of the whole. `groups` are the ranks of each
    process group: ranks with pieces of the same samples communicate.
    """
    for number, group in itertools.product(
        sorted({called.number for called in found}), sorted(groups, key=len)
    ):
        by_rank = {rank: called for called in found if called.number == number for rank in called.ranks}
        members = list({id(by_rank[rank]): by_rank[rank] for rank in group if rank in by_rank}.values())
        positions = [pieces.positions_of(called.tensors) for called in members]
        known = [of_piece for of_piece in positions if of_piece is not None]
        if len(known) < max(len(members), 2) or any(called.piece for called in members):
            continue
        cut = pieces.find(known)
        if cut is not None:
            parts = [called.tensors for called in members]
            shared = [name for name in parts[0] if all(name in tensors for tensors in parts)]
            joined = {name: cut.joined([tensors[name] for tensors in parts]) for name in shared}
            for index, called in enumerate(members):
                called.tensors = parts[index] | {
                    name: tensor for name, tensor in joined.items() if tensor is not None
                }
                called.piece = Piece(cut, index, members, parts[index], _mask_labels(called, cut, index))


def require_whole(micro_batch: JoinedMicroBatch) -> None:
    """Raise UserError if positions say that a micro batch is a piece of samples, and the other pieces were not found."""
    positions = None if micro_batch.piece else pieces.positions_of(micro_batch.tensors)
    # Position 1 is that of padding.
    if positions is None or int(positions.min()) <= 1:
        return
    # Otherwise the positions are those of some tokens, such as masked ones.
    if float((positions.diff(dim=1) == 1).double().mean()) > 0.5:
        raise UserError(
            f"positions of micro batch {micro_batch.number} of rank {micro_batch.ranks[0]} begin at {int(positions.min())}, and no process group has those before: "
            "a piece of samples is judged with the others, whose ranks are a group"
        )


def _mask_labels(micro_batch: JoinedMicroBatch, cut: pieces.Pieces, index: int) -> int | None:
    """Ignore all labels but those of piece `index`. Return how many of these count; None if no labels are known."""
    count = None
    for name, tensor in micro_batch.tensors.items():
        has_classes = is_label(name) and not tensor.is_floating_point()
        if has_classes and tensor.shape[-1:] == (cut.length,):
            ignored = next((label for label in IGNORED if bool((tensor == label).any())), IGNORED[0])
            at = cut.places[index]
            micro_batch.tensors[name] = torch.full_like(tensor, ignored).index_copy_(-1, at, tensor[..., at])
            count = (count or 0) + int((micro_batch.tensors[name] != ignored).sum())
    return count


def data_parallel_shares(micro: list[JoinedMicroBatch]) -> list[int]:
    """Return the data-parallel share of each micro batch.

    It is named by the first rank that was called with the micro batch or, if that is a piece, with the first piece.
    """
    return [called.first.ranks[0] for called in micro]
