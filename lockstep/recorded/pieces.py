"""What is wrong with pieces of samples: which labels each has, and where it lies in the whole.

The reference puts pieces together as their positions say, and is given the labels that they had, so these faults are in it, too.
"""

import inspect
import math
from dataclasses import replace

import torch
import torch.nn.functional as F

from lockstep.ground.errors import UserError
from lockstep.recorded.reference import Reference
from lockstep.recorder import pieces
from lockstep.recorder.called import IGNORED, Called, Piece
from lockstep.verdict.computed import Computed
from lockstep.verdict.distance import distance_of
from lockstep.verdict.rows import StepVerdict

NEARER = 0.05  # of the error that is to be explained, what may be left of it


def judge(verdict: StepVerdict, called: Called, piece: Piece, ids: torch.Tensor, found: Computed) -> None:
    """Labels are shifted before samples are cut, and a piece has those of its own tokens."""
    own, targets = piece.pieces.places[piece.number], found.mean.targets
    inside = torch.ones(piece.pieces.length, dtype=torch.bool)
    # Where the next token is that of another piece
    inside[[*piece.pieces.seams().tolist(), -1]] = False
    lost = _is_lost(piece, ~inside)
    if targets is not None and found.mean.labels:
        labels = called.tensors[found.mean.labels]
        lost = not torch.equal(targets >= 0, torch.isin(labels, torch.tensor(IGNORED), invert=True))
    if lost:
        verdict.wrong.append(
            "labels are shifted after samples were cut, so the last position of a piece is trained to give no token; "
            "shift them before (shift_labels of transformers)"
        )
    if lost or targets is None:
        return
    following = F.pad(ids[:, 1:], (0, 1), value=-1)
    wrong = (targets >= 0) & (targets != following)
    # A window may be cut from a text that goes on: which token follows its last one is not known. But where pieces were exchanged, that is the
    # first one of a piece, and the end of the text is at a seam.
    seams = piece.pieces.seams()
    begins = torch.cat([ids[:, :1], ids[:, seams + 1]], 1)
    wrong[:, -1] &= (targets[:, seams] < 0).any(1) & (targets[:, -1:] == begins).any(1)
    if wrong.any() and not wrong[:, inside].any():
        verdict.wrong.append(
            f"the last position of the piece of rank {called.ranks[0]} is not trained to give the token after it: "
            "pieces do not lie where their positions say, or labels are shifted after samples were cut"
        )
    for other, places in zip(piece.all, piece.pieces.places, strict=True):
        if wrong[:, inside].any() and len(places) == len(own):
            known = (targets[:, own] >= 0) & inside[own]
            if torch.equal(targets[:, own][known], following[:, places][known]):
                verdict.wrong.append(
                    f"rank {called.ranks[0]} has the labels of the piece of rank {other.ranks[0]}"
                )


def _is_lost(piece: Piece, last: torch.Tensor) -> bool:
    """Whether no gradient arrives at the `last` position of any piece, though it does at those beside it."""
    arrived = [one for called in piece.all for one in called.arrived.values() if one.ndim == 3]
    whole = piece.pieces.joined([one.any(-1) for one in arrived]) if len(arrived) == len(piece.all) else None
    if whole is None:
        return False
    at = last[1:-1].nonzero()[:, 0] + 1
    beside = whole[:, at - 1] & whole[:, at + 1]
    return bool(beside.any()) and not bool(whole[:, at][beside].any())


def explain(reference: Reference, micro: list[Called], name: str) -> list[str]:
    """Why an output of a module, as forward/0/MODULE, is wrong, if ranks have pieces of the same samples whose positions begin again.

    Raises UserError if they are pieces, and nothing says so.
    """
    about = reference.recording.steps[reference.step - 1]
    groups = {tuple(group) for one in about.values() for group in one.groups}
    for group in sorted(groups, key=len):
        members = [one for one in micro if one.number == 0 and one.ranks[0] in group]
        shapes = {one.shape for called in members for one in called.tensors.values() if one.ndim == 2}
        if len(members) < 2 or len(shapes) != 1:
            continue
        given = any(pieces.positions_of(one.tensors) is not None for one in members)
        takes = "position_ids" in inspect.signature(reference.model.forward).parameters
        ((rows, length),) = shapes
        written = [reference.recording.of_modules(reference.step, one) for one in members]
        observed = [one[name][0][1] for one in written if name in one]
        right = [reference.outputs(called)[name] for called in members]
        for cut in pieces.layouts([length] * len(members)):
            joined = {key: cut.joined([one.tensors[key] for one in members]) for key in members[0].tensors}
            tensors = members[0].tensors | {key: one for key, one in joined.items() if one is not None}
            # Or transformers takes pieces for documents
            mask = tensors.get("attention_mask", torch.ones(rows, cut.length))
            again = cut.joined([torch.arange(length)[None]] * len(members))
            for positions in (again, torch.arange(cut.length)[None])[not takes :]:
                assert positions is not None
                instead = {"position_ids": positions, "attention_mask": mask}
                called = replace(members[0], tensors=tensors, instead=instead)
                whole = reference.outputs(called).get(name)
                if whole is None:  # such as of more positions than there are
                    continue
                parts = [cut.cut(whole, number, own.shape) for number, own in enumerate(observed)]
                if not explains(observed, parts, right):
                    continue
                who = f"ranks {', '.join(map(str, group))} have pieces of the same samples"
                if given or positions is again:
                    return [
                        f"{who}, and each begins at position 0: give the model the positions that they have in the whole"
                    ]
                raise UserError(
                    f"{who}, and nothing says where each belongs: give the model position_ids, or lockstep.record.batch(position_ids=...)"
                )
    return []


def explain_cache(reference: Reference, called: Called, name: str) -> list[str]:
    """Why an output of a module is wrong, if the model gave it while it kept keys and values, as it does without use_cache=False."""
    own = reference.recording.of_modules(reference.step, called).get(name)
    if own is None or "use_cache" not in inspect.signature(reference.model.forward).parameters:
        return []
    kept = replace(called, instead={"use_cache": called.about.plain.get("use_cache")})
    observed = [own[0][1]]
    with_it, without = ([reference.outputs(one)[name]] for one in (kept, called))
    if not explains(observed, with_it, without):
        return []
    return [
        "the model keeps keys and values, and then computes otherwise, as transformers does not look for documents in position_ids: call it with use_cache=False"
    ]


def explains(observed: list[torch.Tensor], instead: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    """Whether `instead` leaves next to nothing of the error that tensors have, held against what is `right`."""
    error, left = _error(observed, right), _error(observed, instead)
    return error > 0 and left <= NEARER * min(error, 1.0)


def _error(observed: list[torch.Tensor], right: list[torch.Tensor]) -> float:
    """The largest relative one; infinite for other shapes."""
    pairs = zip(observed, right, strict=True)
    return max(distance_of(*pair).relative if pair[0].shape == pair[1].shape else math.inf for pair in pairs)
