"""Judge pieces of samples: which labels each has, and where it lies in the whole.

The reference joins pieces as their positions say, and is given the labels that they had. So errors in these
are in the reference, too, and are looked for here.
"""

import inspect
import math
from dataclasses import replace

import torch
import torch.nn.functional as F

from lockstep.ground.errors import UserError
from lockstep.recorded.model_pass import ModelPass
from lockstep.recorder import pieces
from lockstep.recorder.micro_batch import IGNORED, JoinedMicroBatch, Piece
from lockstep.verdict.computed import Computed
from lockstep.verdict.distance import distance_of
from lockstep.verdict.rows import StepVerdict

# The share of an error that may be left where something explains it
NEARER = 0.05


def judge(
    verdict: StepVerdict, micro_batch: JoinedMicroBatch, piece: Piece, ids: torch.Tensor, found: Computed
) -> None:
    """Judge whether labels were shifted before samples were cut, and whether a piece has the labels of its own tokens.

    `ids` (rows, length) are the tokens of the whole samples, and `found` is what the reference gave for the
    piece.
    """
    positions, targets = piece.pieces.places[piece.number], found.mean.targets
    # The positions whose next token is in the same piece
    inside = torch.ones(piece.pieces.length, dtype=torch.bool)
    inside[[*piece.pieces.seams().tolist(), -1]] = False
    is_lost = _is_lost(piece, ~inside)
    if targets is not None and found.mean.labels:
        labels = micro_batch.tensors[found.mean.labels]
        is_lost = not torch.equal(targets >= 0, torch.isin(labels, torch.tensor(IGNORED), invert=True))
    if is_lost:
        verdict.wrong.append(
            "labels are shifted after samples were cut, so the last position of a piece is trained to give no token; "
            "shift them before (shift_labels of transformers)"
        )
    if is_lost or targets is None:
        return
    next_ids = F.pad(ids[:, 1:], (0, 1), value=-1)
    is_wrong = (targets >= 0) & (targets != next_ids)
    # A sequence may be cut from a text that goes on, so which token follows its last one is not known. But if
    # pieces were exchanged, the last target is the first token of a piece, and the text ends at a seam.
    seams = piece.pieces.seams()
    first_ids = torch.cat([ids[:, :1], ids[:, seams + 1]], 1)
    is_wrong[:, -1] &= (targets[:, seams] < 0).any(1) & (targets[:, -1:] == first_ids).any(1)
    if is_wrong.any() and not is_wrong[:, inside].any():
        verdict.wrong.append(
            f"the last position of the piece of rank {micro_batch.ranks[0]} is not trained to give the token after it: "
            "pieces do not lie where their positions say, or labels are shifted after samples were cut"
        )
    for other, places in zip(piece.members, piece.pieces.places, strict=True):
        if is_wrong[:, inside].any() and len(places) == len(positions):
            known = (targets[:, positions] >= 0) & inside[positions]
            if torch.equal(targets[:, positions][known], next_ids[:, places][known]):
                verdict.wrong.append(
                    f"rank {micro_batch.ranks[0]} has the labels of the piece of rank {other.ranks[0]}"
                )


def _is_lost(piece: Piece, last: torch.Tensor) -> bool:
    """Whether no gradient arrived at the last position of any piece, though they arrived at those beside it.

    `last` (length) says which positions of the whole are the last of a piece.
    """
    gradients = [
        g for micro_batch in piece.members for g in micro_batch.output_gradients.values() if g.ndim == 3
    ]
    whole = (
        piece.pieces.joined([g.any(-1) for g in gradients]) if len(gradients) == len(piece.members) else None
    )
    if whole is None:
        return False
    at = last[1:-1].nonzero()[:, 0] + 1
    beside = whole[:, at - 1] & whole[:, at + 1]
    return bool(beside.any()) and not bool(whole[:, at][beside].any())


def explain(reference: ModelPass, micro: list[JoinedMicroBatch], name: str) -> list[str]:
    """Explain why an output of a module, forward/0/MODULE, is wrong, if ranks have pieces of the same samples.

    Returns a sentence if positions that begin at 0 in each piece explain the output, and [] if nothing does.
    Raises UserError if ranks have pieces of the same samples and nothing says where each belongs.
    """
    records = reference.recording.steps[reference.step - 1]
    groups = {tuple(group) for record in records.values() for group in record.groups}
    for group in sorted(groups, key=len):
        members = [member for member in micro if member.number == 0 and member.ranks[0] in group]
        shapes = {x.shape for member in members for x in member.tensors.values() if x.ndim == 2}
        if len(members) < 2 or len(shapes) != 1:
            continue
        has_positions = any(pieces.positions_of(member.tensors) is not None for member in members)
        takes_positions = "position_ids" in inspect.signature(reference.model.forward).parameters
        ((rows, length),) = shapes
        recorded = [reference.recording.of_modules(reference.step, member) for member in members]
        observed = [outputs[name][0][1] for outputs in recorded if name in outputs]
        computed = [reference.outputs(member).get(name) for member in members]
        reference_outputs = [output for output in computed if output is not None]
        if not len(observed) == len(reference_outputs) == len(members):
            continue
        for cut in pieces.layouts([length] * len(members)):
            joined = {k: cut.joined([member.tensors[k] for member in members]) for k in members[0].tensors}
            tensors = members[0].tensors | {k: whole for k, whole in joined.items() if whole is not None}
            # Without a mask, transformers takes the pieces for documents.
            mask = tensors.get("attention_mask", torch.ones(rows, cut.length))
            from_zero = cut.joined([torch.arange(length)[None]] * len(members))
            for positions in (from_zero, torch.arange(cut.length)[None])[not takes_positions :]:
                assert positions is not None
                instead = {"position_ids": positions, "attention_mask": mask}
                trial = replace(members[0], tensors=tensors, replaced_inputs=instead)
                output = reference.outputs(trial).get(name)
                # The model may not take as many positions.
                if output is None:
                    continue
                parts = [cut.cut(output, number, tensor.shape) for number, tensor in enumerate(observed)]
                if not explains(observed, parts, reference_outputs):
                    continue
                who = f"ranks {', '.join(map(str, group))} have pieces of the same samples"
                if has_positions or positions is from_zero:
                    return [
                        f"{who}, and each begins at position 0: give the model the positions that they have in the whole"
                    ]
                raise UserError(
                    f"{who}, and nothing says where each belongs: give the model position_ids, or lockstep.record.batch(position_ids=...)"
                )
    return []


def explain_cache(reference: ModelPass, micro_batch: JoinedMicroBatch, name: str) -> list[str]:
    """Explain why an output of a module is wrong, if the model keeps keys and values, as without use_cache=False.

    Returns a sentence if that explains the output, and [] if it does not.
    """
    recorded = reference.recording.of_modules(reference.step, micro_batch).get(name)
    if recorded is None or "use_cache" not in inspect.signature(reference.model.forward).parameters:
        return []
    as_recorded = replace(
        micro_batch, replaced_inputs={"use_cache": micro_batch.record.plain.get("use_cache")}
    )
    observed = [recorded[0][1]]
    with_cache, without = (reference.outputs(trial).get(name) for trial in (as_recorded, micro_batch))
    # The reference may not take what the run was called with.
    if with_cache is None or without is None or not explains(observed, [with_cache], [without]):
        return []
    return [
        "the model keeps keys and values, and then computes otherwise, as transformers does not look for documents in position_ids: call it with use_cache=False"
    ]


def explains(
    observed: list[torch.Tensor], instead: list[torch.Tensor], reference: list[torch.Tensor]
) -> bool:
    """Whether `instead` explains the error of the observed tensors against `reference`: it leaves next to nothing of it."""
    error, rest = _largest_error(observed, reference), _largest_error(observed, instead)
    return error > 0 and rest <= NEARER * min(error, 1.0)


def _largest_error(observed: list[torch.Tensor], reference: list[torch.Tensor]) -> float:
    """Return the largest relative error of the tensors; infinite if shapes differ."""
    pairs = zip(observed, reference, strict=True)
    return max(distance_of(*pair).relative if pair[0].shape == pair[1].shape else math.inf for pair in pairs)
