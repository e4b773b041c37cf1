"""Let checkpoints in a model's own code recompute nothing: the reference computes what it would be without them.

What is recomputed in a backward pass is outside of the mode in which float32 means float64, and a mode that counts calls would count it twice.
A reentrant checkpoint gives no gradient to what is inside of it if none of its inputs needs one. A checkpoint that does not keep the random
state recomputes other numbers than it computed.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch.utils.checkpoint

OWN = "of_lockstep"


def own(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a function of Lockstep's own, which a checkpoint recomputes all the same. It must enter its mode again."""
    setattr(function, OWN, True)
    return function


def left_out() -> contextlib.AbstractContextManager[Any]:
    """Return the context in which nothing is recomputed but functions of Lockstep's own."""
    original: Any = torch.utils.checkpoint._checkpoint_without_reentrant_generator

    def generator(function: Callable[..., Any], *given: Any, **named: Any) -> Any:
        return original(function, *given, **named) if hasattr(function, OWN) else _nothing_around()

    return mock.patch.multiple(
        torch.utils.checkpoint,
        CheckpointFunction=_NoCheckpoint,
        _checkpoint_without_reentrant_generator=generator,
    )


class _NoCheckpoint:
    """Takes the place of the class that makes reentrant checkpoints: it calls the function, and nothing is recomputed."""

    @staticmethod
    def apply(function: Callable[..., Any], _keep_random_state: bool, *arguments: Any) -> Any:
        return function(*arguments)


def _nothing_around() -> Iterator[None]:
    """Take the place of the generator that torch's checkpoint runs around the function."""
    yield
