"""What of torch is replaced while a run is recorded, where torch has no hook: clipping by a norm, and the step of a GradScaler."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

Undo = Callable[[], None]


def replace(place: Any, name: str, own: Callable[..., Any]) -> Undo:
    """Put `own` in the place of a function or a method."""
    real = getattr(place, name)
    setattr(place, name, own)
    return functools.partial(setattr, place, name, real)


def see_calls(place: Any, name: str, see: Callable[..., None]) -> Undo:
    """Let `see` be told of every call of a method."""
    real = getattr(place, name)

    def call(*arguments: Any, **options: Any) -> Any:
        see(*arguments)
        return real(*arguments, **options)

    return replace(place, name, call)


def see_clipping(
    model: torch.nn.Module, see: Callable[[list[torch.Tensor], float, float], None]
) -> list[Undo]:
    """Let `see` be told of (parameters, largest norm, norm) where some of the model's are clipped.

    torch.nn.utils.clip_grad_norm_ calls this function of its file, under whatever name it was imported itself.
    """
    module: Any = torch.nn.utils.clip_grad
    real = module._clip_grads_with_norm_

    def noted(parameters: Any, max_norm: float, total_norm: torch.Tensor, *rest: Any, **options: Any) -> Any:
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        whole = total_norm.full_tensor() if isinstance(total_norm, DTensor) else total_norm
        own = {id(one) for one in model.parameters()}
        if any(id(one) in own for one in parameters):  # else another model's
            see(parameters, float(max_norm), float(whole))
        return real(parameters, max_norm, total_norm, *rest, **options)

    return [
        replace(module, "_clip_grads_with_norm_", noted),
        replace(torch.nn.utils, "clip_grads_with_norm_", noted),
    ]


def see_skipped_steps(has_stepped: Callable[[], bool], skipped: Callable[[], None]) -> Undo:
    """`skipped` is called after a step that a GradScaler skips, as gradients are not finite, unless another optimizer had stepped."""
    real = torch.amp.GradScaler.step

    def step(scaler: Any, optimizer: Any, *rest: Any, **options: Any) -> Any:
        others = has_stepped()
        returned = real(scaler, optimizer, *rest, **options)
        if not scaler.is_enabled():
            return returned
        found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values()
        if not others and any(float(one) for one in found):
            skipped()
        return returned

    return replace(torch.amp.GradScaler, "step", step)
