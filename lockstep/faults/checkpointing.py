"""Activation checkpointing: a layer that is computed again, and differently."""

import torch

from lockstep.faults.catalogue import fault
from lockstep.faults.evidence import NO_SENTENCE
from lockstep.faults.planting import Plant, Planting
from lockstep.training import recompute


@fault(
    seen_in="allenai/OLMo-core 828",
    bug_class="random state",
    cause="random numbers",
    evidence=NO_SENTENCE,
    first="gradient/model.layers.1.mlp.down_proj.weight",
    arguments=("--activation_checkpointing",),
    precisions=("fp32",),
    named=True,
)
def recomputed_with_other_random_numbers(run: Planting) -> Plant:
    """The state of the random numbers is not restored, so that a layer drops other elements when it is computed again.

    Here dropout, which these models do not have, acts in the second computation alone.
    """
    strategy = yield

    def drop(_module: torch.nn.Module, _inputs: object, output: torch.Tensor) -> torch.Tensor:
        if recompute.active():  # in place and unseen by autograd, or the second computation would save more tensors than the first
            output.detach().mul_(torch.nn.functional.dropout(torch.ones_like(output), 0.1))
        return output

    strategy.model.get_submodule("model.layers.1.mlp.act_fn").register_forward_hook(
        run.recorded("the output of act_fn", drop)
    )
