"""The yardstick drawn again: how far one process in the run's own dtype may be from the reference.

Rounding errors are random. Where few elements dominate a tensor, or one number is behind all gradients, the yardstick's error is a single
draw, and may be small by chance: of two such draws, one is more than four times the other in one case of three. So a run that is a little
too far is judged once more, by the largest error of several draws. Each further one is the same pass from weights perturbed by one ulp.
"""

import torch

from lockstep.dumps.recording import Called
from lockstep.verdict.computed import Computed
from lockstep.verdict.lazy import Lazy
from lockstep.verdict.normalisation import Gradients
from lockstep.verdict.recorded_reference import Reference
from lockstep.verdict.recorded_rows import StepVerdict

DRAWS = 4  # besides the first
A_LITTLE = 10  # times what is tolerated


def may_be_chance(verdict: StepVerdict) -> bool:
    """Whether all that is too far is so by a little."""
    far = [row for row in (*verdict.rows, *verdict.alone) if row.is_far]
    return bool(far) and all(row.multiple <= A_LITTLE for row in far)


def draw_again(
    plain: Reference, near: Computed, exact: Computed, called: Called, told: dict[str, torch.Tensor]
) -> None:
    """Gives `near`, which `plain` computed, of each tensor the draw that is farthest from `exact`."""
    for draw in range(1, DRAWS + 1):
        plain.perturb(draw)
        again = plain.compute(called, told)
        for name, right in exact.modules.items():
            if name in near.modules and _is_farther(again.modules[name], near.modules[name], right):
                near.modules[name] = again.modules[name]
        near.gradients = _farthest(again.gradients, near.gradients, exact.gradients)
        for name, term in exact.terms.items():
            mine, other = near.terms[name], again.terms[name]
            mine.gradients = _farthest(other.gradients, mine.gradients, term.gradients)
    plain.perturb(0)


def _farthest(one: Gradients, other: Gradients, exact: Gradients) -> Gradients:
    farther = {name for name in exact if name in other and _is_farther(one[name], other[name], exact[name])}
    return Lazy(other, lambda name: (one if name in farther else other)[name])


def _is_farther(one: torch.Tensor, other: torch.Tensor, exact: torch.Tensor) -> bool:
    return one.shape == other.shape == exact.shape and _distance(one, exact) > _distance(other, exact)


def _distance(tensor: torch.Tensor, exact: torch.Tensor) -> float:
    return float((tensor.double() - exact).norm())
