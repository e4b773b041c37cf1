"""Functions that are replaced while a run is recorded, because torch has no hooks for them.

They are clipping, GradScaler's methods, collectives, torch.autograd.grad and os._exit.
"""

import functools
import inspect
import os
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.graph import GradientEdge
from torch.utils._pytree import tree_leaves

from lockstep.recorder.copies import original_of

REDUCING = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor")
Undo = Callable[[], None]


def replace(place: Any, name: str, own: Callable[..., Any]) -> Undo:
    """Put `own` in the place of a function or a method. Return a function that undoes it."""
    real = getattr(place, name)
    setattr(place, name, own)
    return functools.partial(setattr, place, name, real)


def see_calls(place: Any, name: str, see: Callable[..., None]) -> Undo:
    """Call `see` before every call of a method, with its arguments. Those given by keyword become positional."""
    real = getattr(place, name)
    signature = inspect.signature(real)

    def call(*arguments: Any, **options: Any) -> Any:
        see(*(signature.bind(*arguments, **options).args if options else arguments))
        return real(*arguments, **options)

    return replace(place, name, call)


def see_exit(see: Callable[[], None]) -> Undo:
    """Call `see` before the main thread ends this process by os._exit, which runs no exit handlers.

    Some training scripts end this way: a thread of gloo may abort the interpreter while it shuts down.
    """
    real, process_id = os._exit, os.getpid()

    def leave(status: int) -> None:
        try:
            if os.getpid() == process_id and threading.current_thread() is threading.main_thread():
                see()
        finally:
            real(status)

    return replace(os, "_exit", leave)


def see_clipping(see: Callable[[list[torch.Tensor], float, torch.Tensor], None]) -> list[Undo]:
    """Call `see` with (parameters, largest norm, norm) before gradients are clipped.

    The function that is replaced is the one that torch.nn.utils.clip_grad_norm_ calls. So it does not matter
    under which name a script imported that.
    """
    module: Any = torch.nn.utils.clip_grad
    real = module._clip_grads_with_norm_

    def noted(parameters: Any, max_norm: float, total_norm: torch.Tensor, *rest: Any, **options: Any) -> Any:
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        see(parameters, float(max_norm), total_norm)
        return real(parameters, max_norm, total_norm, *rest, **options)

    return [
        replace(module, "_clip_grads_with_norm_", noted),
        replace(torch.nn.utils, "clip_grads_with_norm_", noted),
    ]


def see_value_clipping(see: Callable[[list[torch.Tensor], float], None]) -> Undo:
    """Call `see` with (parameters, bound) before gradients are clipped by value.

    A script may have imported torch's function under any name. So the function inside of it is replaced.
    """
    # torch's function is a wrapper, _no_grad, which encloses the function that clips.
    (cell,) = torch.nn.utils.clip_grad_value_.__closure__  # type: ignore[misc]
    real = cell.cell_contents

    def noted(parameters: Any, clip_value: float, *rest: Any, **options: Any) -> None:
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        see(parameters, float(clip_value))
        real(parameters, clip_value, *rest, **options)

    return replace(cell, "cell_contents", noted)


def see_reductions(see: Callable[[int], None]) -> list[Undo]:
    """Call `see` with the number of elements in the largest argument of each collective that reduces.

    DDP's own calls are not seen, as they are not made from Python.
    """

    def counted(*arguments: Any) -> None:
        see(max(map(_number_of_elements, arguments), default=0))

    return [see_calls(dist, name, counted) for name in REDUCING]


def _number_of_elements(argument: Any) -> int:
    return sum(leaf.numel() for leaf in tree_leaves(argument) if isinstance(leaf, torch.Tensor))


# For each call of torch.autograd.grad that is running: the tensors that it gives the gradients of
ASKED: list[list[Any]] = []


def see_asking() -> Undo:
    """Keep ASKED up to date.

    A loop may ask torch.autograd.grad for gradients, such as those of each of its tasks.

    Where the loop asks for the gradient at the copy of an output, it is given that at the output itself.
    """
    real = torch.autograd.grad

    @functools.wraps(real)
    def grad(outputs: Any, inputs: Any, *arguments: Any, **options: Any) -> Any:
        inputs = [inputs] if isinstance(inputs, (torch.Tensor, GradientEdge)) else [*inputs]
        ASKED.append(inputs)
        try:
            return real(outputs, [original_of(tensor) for tensor in inputs], *arguments, **options)
        finally:
            ASKED.pop()

    return replace(torch.autograd, "grad", grad)


def see_skipped_steps(
    has_stepped: Callable[[], bool], skipped: Callable[[torch.optim.Optimizer], None]
) -> Undo:
    """Call `skipped` with the optimizer after a GradScaler skips its step, as gradients are not finite.

    It is not called if another optimizer had stepped before, as `has_stepped` says.
    """
    real = torch.amp.GradScaler.step

    def step(scaler: Any, optimizer: Any, *rest: Any, **options: Any) -> Any:
        had_stepped = has_stepped()
        returned = real(scaler, optimizer, *rest, **options)
        if not scaler.is_enabled():
            return returned
        found_infs = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values()
        if not had_stepped and any(float(found_inf) for found_inf in found_infs):
            skipped(optimizer)
        return returned

    return replace(torch.amp.GradScaler, "step", step)
