"""Which of several wrong ways to compute the first wrong tensor gives what the run has."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch

from lockstep.diagnosis import evidence
from lockstep.diagnosis.case import LEFT, Case
from lockstep.verdict.gpu_arithmetic import rounded as to_tf32

PRECISION = "precision"
SAME = 1e-9  # relative and absolute difference of elements of two ways that are the same
# (name of the cause, what is done, the output)
Way = tuple[str, str, torch.Tensor]
Rounding = Callable[[torch.Tensor], torch.Tensor]
Found = TypeVar("Found")


def _with_its_gradient(rounded: Rounding) -> Rounding:
    """Return a function that rounds, and whose gradient is that of a cast."""
    return lambda x: x + (rounded(x.detach()).double() - x.detach())


TO_BFLOAT16, TO_FLOAT16, TO_TF32 = (
    _with_its_gradient(torch.Tensor.bfloat16),
    _with_its_gradient(torch.Tensor.half),
    _with_its_gradient(lambda x: to_tf32(x.float())),
)


def low_dtypes(*operands: torch.Tensor) -> dict[str, Rounding]:
    """Return the ways to round operands, by name. float16 and TF32 have as many digits; float16 has fewer for small numbers alone."""
    pairs = [(TO_FLOAT16(x), TO_TF32(x), x) for x in operands]
    if all(float((half - tf32).norm()) <= LEFT * float((tf32 - x).norm()) for half, tf32, x in pairs):
        return {"bfloat16": TO_BFLOAT16, "float16 or TF32": TO_TF32}
    return {"bfloat16": TO_BFLOAT16, "float16": TO_FLOAT16, "TF32": TO_TF32}


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
    case: Case,
    own: torch.Tensor,
    right: torch.Tensor,
    again: torch.Tensor,
    wrong: torch.Tensor,
    ways: Iterable[Way],
) -> tuple[str, str] | None:
    """Return (name of the cause, what is done) of the way that gives what the run has; None if none does, or if several do.

    `own` and `right` have the shape of the outputs, and may be some samples of the first wrong tensor. `wrong` is a mask of the parts that
    count. `again` is the right way from what the run had, whose errors may be too small to be seen where they are made. It is a rival
    without a name, and so are multiples of it and of the right output, which many bugs give, and each of `ways` whose name is "".
    """
    known = again.nan_to_num()
    multiples = (evidence.multiple_of(own * wrong, value * wrong) * value for value in (right, known))
    rivals = [_share_left(own, value, right, wrong) for value in (again, *multiples)]
    near: list[tuple[float, str, str, torch.Tensor]] = []
    for name, words, value in ways:
        left = _share_left(own, value, right, wrong)
        if left <= evidence.NEARER * LEFT:
            near.append((left, name, words, value))
    near.sort(key=lambda way: way[0])
    if not near:
        return None
    left, name, words, best = near[0]
    for other, _, other_words, value in near[1:]:
        if not _are_one(value, best, wrong):
            rivals.append(other)
        elif other_words != words:  # such as weights of one, and none
            words += f", or {other_words}"
    if not name or left > LEFT or min(rivals) <= evidence.NEARER * left:
        return None
    # An element that lies between two 16-bit numbers may be rounded to either of them.
    if name != PRECISION and not case.leaves_little(case.first, left * case.rows[case.first].distance.error):
        return None
    return name, words


def nearest_that_explains(case: Case, values: Iterable[tuple[Found, torch.Tensor]]) -> Found | None:
    """Return what comes with the value that explains the first wrong tensor; None if none does, or if several do.

    In autocast, several values may explain it within the noise. The nearest one counts if the others are farther by more than chance.
    """
    own = case.own(case.first)
    near = [
        (float((own - value).norm()), found) for found, value in values if case.explains(case.first, value)
    ]
    near.sort(key=lambda pair: pair[0])
    is_one = near and (len(near) == 1 or near[1][0] > evidence.NEARER * near[0][0])
    return near[0][1] if is_one else None


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
