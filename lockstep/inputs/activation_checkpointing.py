"""Activation checkpointing: a layer keeps its input alone, and computes the rest again in the backward pass (arXiv 1604.06174).

This is transformers' own, without reentrant autograd. `active()` tells what watches modules that a layer runs for the second time, whoever
has turned checkpointing on.
"""

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

OUTSIDE = -1  # what torch says of a thread that runs no backward pass


def active() -> bool:
    """Whether this thread computes something again: a forward pass within a backward pass is one."""
    return torch._C._current_graph_task_id() != OUTSIDE


def enable(model: "PreTrainedModel") -> None:
    """Checkpoint every layer of a model, in place. Call it before the model is sharded."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
