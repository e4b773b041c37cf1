"""What of torch is replaced while a run is recorded, where torch has no hook: clipping, GradScaler's methods, collectives."""

import functools
import inspect
import os
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.graph import GradientEdge
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from lockstep.recorder import wrapped
from lockstep.recorder.copies import original_of

REDUCING = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor")
Undo = Callable[[], None]


def replace(place: Any, name: str, own: Callable[..., Any]) -> Undo:
    """Put `own` in the place of a function or a method."""
    real = getattr(place, name)
    setattr(place, name, own)
    return functools.partial(setattr, place, name, real)


def see_calls(place: Any, name: str, see: Callable[..., None]) -> Undo:
    """Let `see` be told of every call of a method. It is given arguments in their places, however they were said."""
    real = getattr(place, name)
    signature = inspect.signature(real)

    def call(*arguments: Any, **options: Any) -> Any:
        see(*(signature.bind(*arguments, **options).args if options else arguments))
        return real(*arguments, **options)

    return replace(place, name, call)


def see_exit(see: Callable[[], None]) -> Undo:
    """Let `see` be told before the main thread ends this process by os._exit, which leaves all that waits for the end undone.

    Training scripts end so where a thread of gloo may abort the interpreter while it shuts down.
    """
    real, process = os._exit, os.getpid()

    def leave(status: int) -> None:
        try:
            if os.getpid() == process and threading.current_thread() is threading.main_thread():
                see()
        finally:
            real(status)

    return replace(os, "_exit", leave)


def see_clipping(
    model: torch.nn.Module, see: Callable[[list[torch.Tensor], float, float, float], None]
) -> list[Undo]:
    """Let `see` be told of (parameters, largest norm, norm, factor) where some of the model's are clipped.

    torch.nn.utils.clip_grad_norm_ calls this function of its file, under whatever name it was imported itself.
    """
    module: Any = torch.nn.utils.clip_grad
    real = module._clip_grads_with_norm_

    def noted(parameters: Any, max_norm: float, total_norm: torch.Tensor, *rest: Any, **options: Any) -> Any:
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        whole = total_norm.full_tensor() if isinstance(total_norm, DTensor) else total_norm
        own = {id(one) for one in wrapped.named_parameters(model).values()}
        if any(id(one) in own for one in parameters):  # else another model's
            # In the dtype of the norm, which may be bfloat16
            factor = torch.clamp(max_norm / (whole + 1e-6), max=1.0)
            see(parameters, float(max_norm), float(whole), float(factor))
        return real(parameters, max_norm, total_norm, *rest, **options)

    return [
        replace(module, "_clip_grads_with_norm_", noted),
        replace(torch.nn.utils, "clip_grads_with_norm_", noted),
    ]


def see_value_clipping(see: Callable[[list[torch.Tensor], float], None]) -> Undo:
    """Let `see` be told of (parameters, bound) before gradients are clipped by value.

    Any file may have imported torch's function, under any name. So what that function wraps is replaced, and not a name.
    """
    (cell,) = torch.nn.utils.clip_grad_value_.__closure__  # type: ignore[misc] # of its _no_grad
    real = cell.cell_contents

    def noted(parameters: Any, clip_value: float, *rest: Any, **options: Any) -> None:
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        see(parameters, float(clip_value))
        real(parameters, clip_value, *rest, **options)

    return replace(cell, "cell_contents", noted)


def see_reductions(see: Callable[[int], None]) -> list[Undo]:
    """Let `see` be told how many elements are given to collectives that reduce, by calls from Python, which DDP's own are not."""

    def watched(name: str) -> Undo:
        real = getattr(dist, name)

        @functools.wraps(real)
        def counted(*arguments: Any, **options: Any) -> Any:
            see(max(map(_number_of_elements, (*arguments, *options.values())), default=0))
            return real(*arguments, **options)

        return replace(dist, name, counted)

    return [watched(name) for name in REDUCING]


def _number_of_elements(given: Any) -> int:
    return sum(one.numel() for one in tree_leaves(given) if isinstance(one, torch.Tensor))


# Of each call of torch.autograd.grad that runs: what it gives the gradients of
ASKED: list[list[Any]] = []


def see_asking() -> Undo:
    """Lets ASKED tell of torch.autograd.grad, which a loop may ask for gradients such as those of each of its tasks."""
    real = torch.autograd.grad

    @functools.wraps(real)
    def grad(outputs: Any, inputs: Any, *arguments: Any, **options: Any) -> Any:
        inputs = [inputs] if isinstance(inputs, (torch.Tensor, GradientEdge)) else [*inputs]
        ASKED.append(inputs)
        try:
            return real(outputs, [original_of(one) for one in inputs], *arguments, **options)
        finally:
            ASKED.pop()

    return replace(torch.autograd, "grad", grad)


def see_skipped_steps(
    has_stepped: Callable[[], bool], skipped: Callable[[torch.optim.Optimizer], None]
) -> Undo:
    """`skipped` is called with the optimizer after a step that a GradScaler skips, as gradients are not finite, unless another optimizer had stepped."""
    real = torch.amp.GradScaler.step

    def step(scaler: Any, optimizer: Any, *rest: Any, **options: Any) -> Any:
        others = has_stepped()
        returned = real(scaler, optimizer, *rest, **options)
        if not scaler.is_enabled():
            return returned
        found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values()
        if not others and any(float(one) for one in found):
            skipped(optimizer)
        return returned

    return replace(torch.amp.GradScaler, "step", step)
