"""The copies of a model's outputs that a loop is given.

At a copy arrives only the gradient from what the loop computes of the output, not from what the model computes of it.
"""

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from lockstep.recorder.module_hooks import before_function

COPY = "lockstep"  # a key in the metadata of the autograd function that made a copy


def copy_of(tensor: torch.Tensor, *, has_its_hooks: bool) -> torch.Tensor:
    """Return a copy of a tensor that requires gradients. The loop may change the copy in place.

    `has_its_hooks`: the model computes its loss from the tensor. Hooks that are put on the copy then see the whole
    gradient that arrives at the tensor, as they would without a recording.
    """
    copy = tensor.clone()
    assert copy.grad_fn is not None
    copy.grad_fn.metadata[COPY] = True  # type: ignore[index] # a property to mypy
    if has_its_hooks and tensor.grad_fn is not None:
        register = functools.partial(_register_hook, tensor.grad_fn, tensor.output_nr)
        copy.register_hook = register  # type: ignore[method-assign]
        copy.retain_grad = functools.partial(_retain_grad, weakref.ref(copy), register)  # type: ignore[method-assign]
    return copy


def _register_hook(function: Node, place: int, hook: Callable[[torch.Tensor], Any]) -> RemovableHandle:
    """Do what register_hook of a tensor does, for the tensor that is output number `place` of the function."""
    return before_function(function, place, lambda gradient: None if gradient is None else hook(gradient))


def _retain_grad(copy: weakref.ref[torch.Tensor], register: Callable[..., RemovableHandle]) -> None:
    """Do what retain_grad of a tensor does, for the tensor that this is a copy of."""

    def keep(gradient: torch.Tensor) -> None:
        tensor = copy()
        if tensor is not None:
            # By now it has the gradient from the loop alone.
            tensor.grad = gradient

    tensor = copy()
    # It exists, as its method is called.
    assert tensor is not None
    torch.Tensor.retain_grad(tensor)
    register(keep)


def original_of(one: Any) -> Any:
    """Return the edge of the tensor that this is a copy of; anything else is returned as it is.

    A loop that asks for the gradient at a copy means that tensor: other outputs depend on it, and not on the copy.
    """
    function = getattr(one, "grad_fn", None)
    if function is None or COPY not in function.metadata:
        return one
    return GradientEdge(*function.next_functions[0])


def reached_beside(
    roots: Any, begun: int, returned: int
) -> tuple[list[tuple[Node, int, torch.Tensor]], list[Node]]:
    """Return what a backward pass from `roots` reaches other than through the copies of the model's outputs.

    Returns (leaves, autograd functions of the model's forward pass). A leaf is (function, number of its input, tensor).
    `begun` is the sequence number at which the forward pass begins, `returned` that of the last copy. Functions that
    were made before the forward pass are left out.
    """
    leaves, functions = list[tuple[Node, int, torch.Tensor]](), list[Node]()
    seen: set[Node] = set()
    pending = [root.grad_fn for root in tree_leaves(roots)]
    while pending:
        node = pending.pop()
        if node is None or node in seen or COPY in node.metadata:
            continue
        seen.add(node)
        if node._sequence_nr() < returned:
            functions += [node] * (node._sequence_nr() >= begun)
            continue
        for place, (following, _) in enumerate(node.next_functions):
            if type(following).__name__ == "AccumulateGrad":
                leaves.append((node, place, following.variable))
            else:
                pending.append(following)
    return leaves, functions
