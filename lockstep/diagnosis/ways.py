"""Which of several wrong ways to compute the first wrong tensor gives what the run has."""

import math
from collections.abc import Iterable, Sequence

import torch

from lockstep.diagnosis import evidence
from lockstep.diagnosis.case import LEFT, Case

PRECISION = "precision"
SAME = 1e-9  # relative and absolute difference of elements of two ways that are the same
# (name of the cause, what is done, the output)
Way = tuple[str, str, torch.Tensor]


def right_tensors(case: Case, names: list[str]) -> list[torch.Tensor]:
    """Return tensors of the run; [] unless all of them are captured and right."""
    is_known = case.has(*names) and not any(map(case.is_wrong, names))
    return [case.own(name) for name in names] if is_known else []


def gives_the_right(case: Case, value: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether a value is the right one, or of some samples of it. What is not finite does not count."""
    if value.shape != right.shape:
        return False
    row, left = case.rows[case.first], torch.where(value.isfinite(), value - right, 0.0)
    share = float(right.norm()) / row.distance.norm if row.distance.norm else 1.0
    return float(left.norm()) <= share * row.tolerated


def wrong_parts(wrong: torch.Tensor, groups: Sequence[tuple[int, torch.Tensor]]) -> torch.Tensor:
    """Return a mask of the parts of a tensor that have a wrong element. `wrong` is the mask of these elements.

    A group is (dim, the number of the part that each place along it belongs to), as of the ranks that have them.
    """
    dims = [dim for dim, _ in groups]
    others = [dim for dim in range(wrong.ndim) if dim not in dims]
    parts = (wrong.any(others, keepdim=True) if others else wrong).clone()
    for dim, part_of_place in groups:
        for number in part_of_place.unique():
            places = (part_of_place == number).nonzero()[:, 0]
            chosen = parts.index_select(dim, places)
            parts.index_copy_(dim, places, chosen.any(dim, keepdim=True).expand_as(chosen))
    return parts


def nearest(
    case: Case, own: torch.Tensor, right: torch.Tensor, wrong: torch.Tensor, ways: Iterable[Way]
) -> tuple[str, str] | None:
    """Return (name of the cause, what is done) of the way that gives what the run has; None if none does, or if several do.

    `own` and `right` have the shape of the outputs, and may be some samples of the first wrong tensor. `wrong` is a mask of the parts that
    count. A multiple of the right output is a rival that has no name: many bugs give one.
    """
    multiple = evidence.multiple_of(own * wrong, right * wrong) * right
    rivals = [_share_left(own, multiple, right, wrong)]
    near: list[tuple[float, str, str, torch.Tensor]] = []
    for name, words, value in ways:
        left = _share_left(own, value, right, wrong)
        if left <= evidence.NEARER * LEFT:
            near.append((left, name, words, value))
    near.sort(key=lambda way: way[0])
    if not near:
        return None
    left, name, words, best = near[0]
    rivals += [other for other, _, _, value in near[1:] if not _are_one(value, best, wrong)]
    if left > LEFT or min(rivals) <= evidence.NEARER * left:
        return None
    # An element that lies between two 16-bit numbers may be rounded to either of them.
    if name != PRECISION and not case.leaves_little(case.first, left * case.rows[case.first].distance.error):
        return None
    return name, words


def _share_left(own: torch.Tensor, value: torch.Tensor, right: torch.Tensor, wrong: torch.Tensor) -> float:
    """Return the share of the error that a value leaves.

    Elements that are not finite do not count: what a kernel computes for a query that sees no key means nothing. The share is infinite if
    fewer than half of the wrong elements count.
    """
    is_known = value.isfinite() & wrong
    left, error = (float((own - other)[is_known].norm()) for other in (value, right))
    is_most = 2 * int(is_known.sum()) >= int(wrong.expand_as(own).sum())
    return left / error if is_most and error else math.inf


def _are_one(value: torch.Tensor, other: torch.Tensor, wrong: torch.Tensor) -> bool:
    """Whether two ways give the same wrong parts."""
    return torch.allclose(value * wrong, other * wrong, SAME, SAME, equal_nan=True)
