"""Draw the yardstick again: how far one process in the run's own dtype may be from the reference.

Rounding errors are random. Where few elements dominate a tensor, or one number is behind all gradients, the
yardstick's error is a single draw, and may be small by chance: of two such draws, one is more than four times
the other in one case of three. So a run that is a little too far is judged once more, by the largest error of
several draws. Each further draw is the same pass from weights perturbed by one ulp.
"""

import statistics

import torch

from lockstep.recorded.model_pass import ModelPass
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
    model_pass: ModelPass,
    yardstick: Computed,
    reference: Computed,
    micro_batch: JoinedMicroBatch,
    told: dict[str, torch.Tensor],
) -> None:
    """Replace each tensor of `yardstick`, and its loss, by the draw that is farthest from `reference`.

    Both are results of `micro_batch`. `model_pass` computed `yardstick`, and draws again.
    `told` are the choices that the model is told, as for `ModelPass.compute`.
    """
    typical = _typical_error(yardstick, reference)
    for number in range(1, DRAWS + 1):
        model_pass.perturb(number)
        draw = model_pass.compute(micro_batch, told)
        # An error of 0, as of integers, says nothing of a jump.
        if typical and _typical_error(draw, reference) > JUMP * typical:
            continue
        for name, tensor in reference.modules.items():
            in_both = name in yardstick.modules and name in draw.modules
            if in_both and _is_farther(draw.modules[name], yardstick.modules[name], tensor):
                yardstick.modules[name] = draw.modules[name]
        reference_loss = reference.loss
        if reference_loss is not None and yardstick.loss is not None and draw.loss is not None:
            yardstick.loss = max(yardstick.loss, draw.loss, key=lambda loss: abs(loss - reference_loss))
        yardstick.gradients = _farthest(draw.gradients, yardstick.gradients, reference.gradients)
        for name in yardstick.terms.keys() & draw.terms.keys() & reference.terms.keys():
            yardstick_term, drawn_term, reference_term = (
                yardstick.terms[name],
                draw.terms[name],
                reference.terms[name],
            )
            yardstick_term.gradients = _farthest(
                drawn_term.gradients, yardstick_term.gradients, reference_term.gradients
            )
    model_pass.perturb(0)


def _typical_error(computed: Computed, reference: Computed) -> float:
    """Return the median relative error of the gradients."""
    errors = [
        _distance(computed.gradients[name], gradient) / float(gradient.norm())
        for name, gradient in reference.gradients.items()
        if name in computed.gradients and gradient.any()
    ]
    return statistics.median(errors) if errors else 0.0


def _farthest(one: Gradients, other: Gradients, reference: Gradients) -> Gradients:
    """Return the gradients of `other`, each replaced by that of `one` where that is farther from `reference`."""
    in_both = [name for name in reference if name in one and name in other]
    farther = {name for name in in_both if _is_farther(one[name], other[name], reference[name])}
    return Lazy(other, lambda name: (one if name in farther else other)[name])


def _is_farther(one: torch.Tensor, other: torch.Tensor, reference: torch.Tensor) -> bool:
    """Whether `one` is farther from `reference` than `other` is. Integers and other shapes are not compared."""
    is_comparable = one.shape == other.shape == reference.shape and reference.is_floating_point()
    return is_comparable and _distance(one, reference) > _distance(other, reference)


def _distance(tensor: torch.Tensor, reference: torch.Tensor) -> float:
    return float((tensor.double() - reference).norm())
