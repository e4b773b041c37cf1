"""Activation checkpointing: a layer keeps its input alone, and computes the rest again in the backward pass (arXiv 1604.06174).

This is transformers' own, without reentrant autograd. `active()` tells what watches modules that a layer runs for the second time.
"""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_running = 0


def active() -> bool:
    """Whether a layer is being computed again."""
    return _running > 0


def enable(model: "PreTrainedModel", *, compiled: bool) -> None:
    """Checkpoint every layer of a model, in place. Call it before the model is sharded.

    `active` says nothing about compiled layers, which have no modules inside that could be watched.
    """
    told: dict[str, Any] = {"use_reentrant": False}
    if not compiled:  # torch would refuse the context
        told["context_fn"] = lambda: (contextlib.nullcontext(), _again())
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=told)


@contextlib.contextmanager
def _again() -> Iterator[None]:
    global _running
    _running += 1
    try:
        yield
    finally:
        _running -= 1
