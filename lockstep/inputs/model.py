"""Build the model: a Hugging Face causal LM in float32 on the CPU, unsharded, from a seed or from a weights file."""

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from lockstep.inputs import modules, weights
from lockstep.inputs.shapes import from_config

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def build_model(
    architecture: dict, *, seed: int, attn_impl: str, init_weights_path: Path | None
) -> tuple["PreTrainedModel", dict[str, str] | None]:
    """The model, and the checksums of its weights file (None if the weights come from the seed).

    Every rank that calls this with the same arguments has the same weights. Sharding comes later.
    """
    from transformers.initialization import no_init_weights

    torch.manual_seed(seed)
    with no_init_weights() if init_weights_path else contextlib.nullcontext():
        model = from_config(architecture, attn_impl=attn_impl)
    modules.remember(model)
    sums = weights.load(init_weights_path, model) if init_weights_path else None
    return model, sums


def causal_lm_loss(
    model: torch.nn.Module,
    input_ids: torch.Tensor,
    labels: torch.Tensor,
    position_ids: torch.Tensor | None = None,
    num_labels: torch.Tensor | int | None = None,
    **further: torch.Tensor,
) -> torch.Tensor:
    """Mean cross-entropy over all B x S positions, in float32; `labels` (B, S) are already shifted by one.

    With `num_labels` it is the sum over the positions that have a label, divided by this number. `position_ids` (1, S) or (B, S) are the
    positions in the sequence or in its documents; None means all of them. `further` are other inputs of the model, such as a mask. The
    model's own `loss_function` is called, which a strategy with sharded logits replaces.
    """
    divisor = {} if num_labels is None else {"num_items_in_batch": num_labels}
    return model(
        input_ids=input_ids,
        labels=labels,
        shift_labels=labels,
        position_ids=position_ids,
        use_cache=False,
        **divisor,
        **further,
    ).loss


OUTSIDE = -1  # torch's id of the backward pass, in a thread that runs none


def being_recomputed() -> bool:
    """Whether this thread computes something again, whoever turned checkpointing on: the forward pass is within a backward pass."""
    return torch._C._current_graph_task_id() != OUTSIDE


def checkpoint_layers(model: "PreTrainedModel") -> None:
    """Let every layer keep only its input, and compute the rest again in the backward pass (arXiv 1604.06174), in place.

    This is transformers' own, without reentrant autograd. Call it before the model is sharded.
    """
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
