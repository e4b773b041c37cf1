"""The copies of what a model returns that a loop is given: at them, only what the loop itself makes of each arrives, not what the model does."""

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from lockstep.recorder.module_hooks import before_function

COPY = "lockstep"  # in the metadata of the function that made a copy


def copy_of(tensor: torch.Tensor, *, has_its_hooks: bool) -> torch.Tensor:
    """Of a tensor that requires gradients. The loop may change the copy in place.

    `has_its_hooks`: the model makes its loss of the tensor, so hooks that are put on the copy see what arrives at the tensor, as without a recording.
    """
    own = tensor.clone()
    assert own.grad_fn is not None
    own.grad_fn.metadata[COPY] = True  # type: ignore[index] # a property to mypy
    if has_its_hooks and tensor.grad_fn is not None:
        register = functools.partial(_register_hook, tensor.grad_fn, tensor.output_nr)
        own.register_hook = register  # type: ignore[method-assign]
        own.retain_grad = functools.partial(_retain_grad, weakref.ref(own), register)  # type: ignore[method-assign]
    return own


def _register_hook(function: Node, place: int, hook: Callable[[torch.Tensor], Any]) -> RemovableHandle:
    """What a tensor's register_hook does, for the tensor that is this output of the function."""
    return before_function(function, place, lambda gradient: None if gradient is None else hook(gradient))


def _retain_grad(copy: weakref.ref[torch.Tensor], register: Callable[..., RemovableHandle]) -> None:
    """What a tensor's retain_grad does, for the tensor that it is a copy of."""

    def keep(gradient: torch.Tensor) -> None:
        own = copy()
        if own is not None:  # it has what the loop alone gives it by now
            own.grad = gradient

    own = copy()
    assert own is not None  # its method is called
    torch.Tensor.retain_grad(own)
    register(keep)


def original_of(one: Any) -> Any:
    """What a loop means that asks for the gradient at the copy that it has: other outputs depend on what it is a copy of."""
    function = getattr(one, "grad_fn", None)
    if function is None or COPY not in function.metadata:
        return one
    return GradientEdge(*function.next_functions[0])


def reached_beside(
    roots: Any, begun: int, returned: int
) -> tuple[list[tuple[Node, int, torch.Tensor]], list[Node]]:
    """What a backward pass reaches, but not through copies of what the model returns: leaves, and functions of the model's forward pass.

    A leaf is (a function, the number of its input, the leaf). The forward pass made the functions from number `begun` on, before the copies, the
    last of which is `returned`. What was made before it is left out.
    """
    leaves, inside = list[tuple[Node, int, torch.Tensor]](), list[Node]()
    seen: set[Node] = set()
    left = [one.grad_fn for one in tree_leaves(roots)]
    while left:
        node = left.pop()
        if node is None or node in seen or COPY in node.metadata:
            continue
        seen.add(node)
        if node._sequence_nr() < returned:
            inside += [node] * (node._sequence_nr() >= begun)
            continue
        for place, (after, _) in enumerate(node.next_functions):
            if type(after).__name__ == "AccumulateGrad":
                leaves.append((node, place, after.variable))
            else:
                left.append(after)
    return leaves, inside
