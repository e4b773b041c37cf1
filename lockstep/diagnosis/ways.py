"""Which of several wrong ways to compute the first wrong tensor gives what the run has."""

import math
from collections.abc import Iterable

import torch

from lockstep.diagnosis import evidence
from lockstep.diagnosis.case import LEFT, Case

PRECISION = "precision"
SAME = 1e-9  # by which the outputs of two ways may differ and be the same
# (name of the cause, what is done, the output)
Way = tuple[str, str, torch.Tensor]


def right_tensors(case: Case, names: list[str]) -> list[torch.Tensor]:
    """Return tensors of the run; [] unless all of them are captured and right."""
    is_known = case.has(*names) and not any(map(case.is_wrong, names))
    return [case.own(name) for name in names] if is_known else []


def gives_the_right(case: Case, value: torch.Tensor) -> bool:
    """Whether a value is what the first wrong tensor must be. What is not finite does not count."""
    left = torch.where(value.isfinite(), value - case.right(case.first), 0.0)
    return float(left.norm()) <= case.rows[case.first].tolerated


def nearest(
    case: Case, own: torch.Tensor, right: torch.Tensor, wrong: torch.Tensor, ways: Iterable[Way]
) -> tuple[str, str] | None:
    """Return (name of the cause, what is done) of the way that gives what the run has; None if none does, or if several do.

    `own` and `right` have the shape of the outputs. `wrong` is a mask of the parts that are held against them, such as whole samples.
    """
    near = [
        (left, name, words, value)
        for name, words, value in ways
        if (left := _share_left(own, value, right, wrong)) <= evidence.NEARER * LEFT
    ]
    near.sort(key=lambda way: way[0])
    if not near:
        return None
    left, name, words, best = near[0]
    rivals = (other for other, _, _, value in near[1:] if not _are_one(value, best, wrong))
    if left > LEFT or next(rivals, math.inf) <= evidence.NEARER * left:
        return None
    # An element that lies between two 16-bit numbers may be rounded to either of them.
    if name != PRECISION and not case.leaves_little(case.first, left * float((own - right).norm())):
        return None
    return name, words


def _share_left(own: torch.Tensor, value: torch.Tensor, right: torch.Tensor, wrong: torch.Tensor) -> float:
    """Return the share of the error that a value leaves.

    Elements that are not finite do not count: what a kernel computes for a query that sees no key means nothing. If they are more than
    half of what is wrong, the share is infinite.
    """
    is_known = value.isfinite() & wrong
    left, error = (float((own - other)[is_known].norm()) for other in (value, right))
    is_most = 2 * int(is_known.sum()) >= int(wrong.expand_as(own).sum())
    return left / error if is_most and error else math.inf


def _are_one(value: torch.Tensor, other: torch.Tensor, wrong: torch.Tensor) -> bool:
    """Whether two ways give the same wrong parts."""
    return torch.allclose(value * wrong, other * wrong, SAME, SAME, equal_nan=True)
