"""Draw the yardstick again: how far one process in the run's own dtype may be from the reference.

Rounding errors are random. Where few elements dominate a tensor, or one number is behind all gradients, the
yardstick's error is a single draw, and may be small by chance: of two such draws, one is more than four times
the other in one case of three. So a run that is a little too far is judged once more, by the largest error of
several draws. Each further draw is the same pass from weights perturbed by one ulp.
"""

import statistics

import torch

from lockstep.recorded.reference import Reference
from lockstep.recorder.micro_batch import JoinedMicroBatch
from lockstep.verdict.computed import Computed
from lockstep.verdict.lazy import Lazy
from lockstep.verdict.normalisation import Gradients
from lockstep.verdict.rows import StepVerdict

DRAWS = 4  # besides the first
# The beginnings of the names of rows that a draw is of
DRAWN = ("forward/", "backward/", "gradient/", "loss of ")
A_LITTLE = 10  # times what is tolerated
# A draw is dropped if its typical error is more than so many times the first draw's: the perturbation then
# changed a choice, such as of an expert.
JUMP = 10


def may_be_chance(verdict: StepVerdict) -> bool:
    """Whether only tensors and losses of the pass from the batch are too far, and each by a little."""
    far = [row for row in verdict.rows if row.is_far]
    is_wrong_alone = any(row.too_far for row in verdict.alone)
    return (
        bool(far)
        and not is_wrong_alone
        and all(row.name.startswith(DRAWN) and row.multiple <= A_LITTLE for row in far)
    )


def draw_again(
    plain: Reference,
    near: Computed,
    exact: Computed,
    micro_batch: JoinedMicroBatch,
    told: dict[str, torch.Tensor],
) -> None:
    """Replace each tensor of `near`, and its loss, by the draw that is farthest from `exact`.

    `near` is what `plain` computed for the micro batch `micro_batch`, and `exact` what the reference computed.
    `told` are the choices that the model is told, as for `Reference.compute`.
    """
    typical = _typical_error(near, exact)
    for number in range(1, DRAWS + 1):
        plain.perturb(number)
        draw = plain.compute(micro_batch, told)
        # An error of 0, as of integers, says nothing of a jump.
        if typical and _typical_error(draw, exact) > JUMP * typical:
            continue
        for name, right in exact.modules.items():
            in_both = name in near.modules and name in draw.modules
            if in_both and _is_farther(draw.modules[name], near.modules[name], right):
                near.modules[name] = draw.modules[name]
        right_loss = exact.loss
        if right_loss is not None and near.loss is not None and draw.loss is not None:
            near.loss = max(near.loss, draw.loss, key=lambda loss: abs(loss - right_loss))
        near.gradients = _farthest(draw.gradients, near.gradients, exact.gradients)
        for name in near.terms.keys() & draw.terms.keys() & exact.terms.keys():
            near_term, drawn_term, exact_term = near.terms[name], draw.terms[name], exact.terms[name]
            near_term.gradients = _farthest(drawn_term.gradients, near_term.gradients, exact_term.gradients)
    plain.perturb(0)


def _typical_error(computed: Computed, exact: Computed) -> float:
    """Return the median relative error of the gradients."""
    errors = [
        _distance(computed.gradients[name], right) / float(right.norm())
        for name, right in exact.gradients.items()
        if name in computed.gradients and right.any()
    ]
    return statistics.median(errors) if errors else 0.0


def _farthest(one: Gradients, other: Gradients, exact: Gradients) -> Gradients:
    """Return the gradients of `other`, each replaced by that of `one` where that is farther from `exact`."""
    in_both = [name for name in exact if name in one and name in other]
    farther = {name for name in in_both if _is_farther(one[name], other[name], exact[name])}
    return Lazy(other, lambda name: (one if name in farther else other)[name])


def _is_farther(one: torch.Tensor, other: torch.Tensor, exact: torch.Tensor) -> bool:
    """Whether `one` is farther from `exact` than `other` is. Integers and other shapes are not compared."""
    is_comparable = one.shape == other.shape == exact.shape and exact.is_floating_point()
    return is_comparable and _distance(one, exact) > _distance(other, exact)


def _distance(tensor: torch.Tensor, exact: torch.Tensor) -> float:
    return float((tensor.double() - exact).norm())
