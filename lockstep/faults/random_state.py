"""Random numbers that one strategy draws alone, or another time: dropout, and a layer that is computed again."""

import functools
from collections.abc import Callable

import torch
import torch.distributed as dist

from lockstep.faults.catalogue import NO_SENTENCE, agrees, fault
from lockstep.faults.planting import Plant, Planting
from lockstep.inputs.model import being_recomputed

DROPPED = "model.layers.0.self_attn.o_proj"
random_fault = functools.partial(
    fault,
    seen_in="pytorch/pytorch 168058",
    bug_class="random state",
    cause="random numbers",
    first=f"forward/{DROPPED}",
    named=True,
)


def _a_tenth(where: str = "") -> Callable[[str], bool]:
    """Return the evidence of dropout: about a tenth of the elements are zero."""
    expected = (
        f"# % of the elements of {DROPPED}'s output are zero, scattered, and the others larger to make up for it"
        f"{where}: dropout"
    )
    return lambda sentence: agrees(expected, sentence) and 9 < float(sentence.split()[0]) < 11


def _dropout(run: Planting, seed: Callable[[], int]) -> Plant:
    """Dropout of one tenth on an attention block's output, which the other strategies do not have."""
    yield
    generator = torch.Generator().manual_seed(seed())

    def drop(output: torch.Tensor) -> torch.Tensor:
        keep = torch.rand(output.shape, generator=generator) >= 0.1
        return output * keep / 0.9

    run.change_output(DROPPED, drop)


@random_fault(evidence=_a_tenth(", not the same on all ranks that hold it"), axes=("tp",))
def dropout_differs_between_tp_peers(run: Planting) -> Plant:
    """Tensor-parallel peers draw different dropout masks for the same activation."""
    return _dropout(run, dist.get_rank)


@random_fault(evidence=_a_tenth())
def dropout_in_one_strategy_only(run: Planting) -> Plant:
    """Dropout is on in one strategy and off in the other; tensor-parallel peers agree."""
    return _dropout(run, lambda: run.config.mesh.sample_share(dist.get_rank()))


@random_fault(
    evidence="configured differently: dropout is 0.1, not 0.0",
    first="forward/model.layers.0.self_attn.o_proj.input",
)
def attention_dropout_in_one_strategy_only(run: Planting) -> Plant:
    """The attention layers drop a tenth of their probabilities, though the configuration says none."""
    strategy = yield
    torch.manual_seed(dist.get_rank())
    for layer in strategy.model.model.layers:
        run.patch(layer.self_attn, "attention_dropout", 0.1)


@random_fault(
    seen_in="allenai/OLMo-core 828",
    evidence=NO_SENTENCE,
    first="gradient/model.layers.1.mlp.down_proj.weight",
    arguments=("--activation_checkpointing",),
)
def recomputed_with_other_random_numbers(run: Planting) -> Plant:
    """The state of the random numbers is not restored, so that a layer drops other elements when it is computed again.

    Here dropout, which these models do not have, acts in the second computation alone.
    """
    yield

    def drop(output: torch.Tensor) -> torch.Tensor:
        # in place and unseen by autograd, or the second computation would save more tensors than the first
        if being_recomputed():
            output.detach().mul_(torch.nn.functional.dropout(torch.ones_like(output), 0.1))
        return output

    run.change_output("model.layers.1.mlp.act_fn", drop)
