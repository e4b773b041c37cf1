"""The yardstick drawn again: how far one process in the run's own dtype may be from the reference.

Rounding errors are random. Where few elements dominate a tensor, or one number is behind all gradients, the yardstick's error is a single
draw, and may be small by chance: of two such draws, one is more than four times the other in one case of three. So a run that is a little
too far is judged once more, by the largest error of several draws. Each further one is the same pass from weights perturbed by one ulp.
"""

import statistics

import torch

from lockstep.recorded.reference import Reference
from lockstep.recorder.called import Called
from lockstep.verdict.computed import Computed
from lockstep.verdict.lazy import Lazy
from lockstep.verdict.normalisation import Gradients
from lockstep.verdict.rows import StepVerdict

DRAWS = 4  # besides the first
DRAWN = ("forward/", "backward/", "gradient/", "loss of ")  # names begin so
A_LITTLE = 10  # times what is tolerated
# Times the first draw's typical error: the perturbation turned a choice, such as of an expert
JUMP = 10


def may_be_chance(verdict: StepVerdict) -> bool:
    """Whether nothing but tensors and losses of the pass from the batch is too far, and each by a little."""
    far = [row for row in verdict.rows if row.is_far]
    alone = any(row.too_far for row in verdict.alone)
    return (
        bool(far)
        and not alone
        and all(row.name.startswith(DRAWN) and row.multiple <= A_LITTLE for row in far)
    )


def draw_again(
    plain: Reference, near: Computed, exact: Computed, called: Called, told: dict[str, torch.Tensor]
) -> None:
    """Gives `near`, which `plain` computed, of each tensor and of the loss the draw that is farthest from `exact`."""
    typical = _typical(near, exact)
    for draw in range(1, DRAWS + 1):
        plain.perturb(draw)
        again = plain.compute(called, told)
        if _typical(again, exact) > JUMP * typical:
            continue
        for name, right in exact.modules.items():
            both = name in near.modules and name in again.modules
            if both and _is_farther(again.modules[name], near.modules[name], right):
                near.modules[name] = again.modules[name]
        right_loss = exact.loss
        if right_loss is not None and near.loss is not None and again.loss is not None:
            near.loss = max(near.loss, again.loss, key=lambda one: abs(one - right_loss))
        near.gradients = _farthest(again.gradients, near.gradients, exact.gradients)
        for name in near.terms.keys() & again.terms.keys() & exact.terms.keys():
            mine, other, term = near.terms[name], again.terms[name], exact.terms[name]
            mine.gradients = _farthest(other.gradients, mine.gradients, term.gradients)
    plain.perturb(0)


def _typical(computed: Computed, exact: Computed) -> float:
    """The median relative error of gradients."""
    errors = [
        _distance(computed.gradients[name], right) / float(right.norm())
        for name, right in exact.gradients.items()
        if name in computed.gradients and right.any()
    ]
    return statistics.median(errors) if errors else 0.0


def _farthest(one: Gradients, other: Gradients, exact: Gradients) -> Gradients:
    both = [name for name in exact if name in one and name in other]
    farther = {name for name in both if _is_farther(one[name], other[name], exact[name])}
    return Lazy(other, lambda name: (one if name in farther else other)[name])


def _is_farther(one: torch.Tensor, other: torch.Tensor, exact: torch.Tensor) -> bool:
    comparable = one.shape == other.shape == exact.shape and exact.is_floating_point()
    return comparable and _distance(one, exact) > _distance(other, exact)


def _distance(tensor: torch.Tensor, exact: torch.Tensor) -> float:
    return float((tensor.double() - exact).norm())
