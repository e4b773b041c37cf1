"""Micro batches with wrong weights."""

from lockstep.faults.catalogue import fault
from lockstep.faults.planting import Plant, Planting

CLASS = "accumulation, normalisation"
THREE = ("--gradient_accumulation_steps", "3")


@fault(
    seen_in="huggingface/accelerate 3533",
    bug_class=CLASS,
    cause="accumulation",
    evidence="the gradient of the logits is 0.3333 = 1/accumulation steps times what it should be, evenly for all samples",
    first="backward/lm_head",
    arguments=THREE,
)
def divided_by_the_steps_twice(run: Planting) -> Plant:
    """The loop and the library both divide the loss of a micro batch by the accumulation steps."""
    run.scale_backward((yield), lambda _call: 1 / run.config.gradient_accumulation_steps)


@fault(
    seen_in="huggingface/accelerate 3533",
    bug_class=CLASS,
    cause="accumulation",
    evidence="the gradient of the logits is 3 = accumulation steps times what it should be, evenly for all samples",
    first="backward/lm_head",
    arguments=THREE,
)
def not_divided_by_the_steps(run: Planting) -> Plant:
    """The gradients of the micro batches are summed and never divided."""
    run.scale_backward((yield), lambda _call: run.config.gradient_accumulation_steps)


@fault(
    seen_in="huggingface/transformers 34191",
    bug_class=CLASS,
    cause="accumulation",
    evidence="in the gradient of the logits the micro batches have different weights (0.5, 1, 1.5; 1 is right), the same on all DP ranks",
    first="backward/lm_head",
    arguments=THREE,
)
def micro_batches_weighted_unequally(run: Planting) -> Plant:
    """Each micro batch is weighted by a token count that is not its own: 1/2, 1 and 3/2 times what it should."""
    run.scale_backward((yield), lambda call: (call % 3 + 1) / 2)
