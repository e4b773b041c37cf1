"""Records the updates of a step: how gradients are clipped and set to zero, what each optimizer is given, and what it makes of that."""

import functools
import gc
import math
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from lockstep.recorder import patches, wrapped
from lockstep.recorder.kept import digest_of, order_of
from lockstep.recorder.optimizers import described
from lockstep.recorder.step import Recorded, harmless

ZERO_REDUNDANCY = "torch.distributed.optim.zero_redundancy_optimizer"


class Updates(Recorded):
    """The hooks on optimizers, and on what is done with gradients before they step."""

    def __init__(self, model: torch.nn.Module, folder: Path, steps: int, modules: str):
        super().__init__(model, folder, steps, modules)
        self.removing += [
            register_optimizer_step_pre_hook(self._before_update).remove,
            register_optimizer_step_post_hook(self._after_update).remove,
            *patches.see_clipping(self.model, self.see_clip),
            patches.see_value_clipping(self.see_value_clip),
            patches.see_calls(torch.optim.Optimizer, "zero_grad", self._see_zeroing),
            *patches.see_reductions(self._see_reduction),
        ]

    @harmless
    def see_clip(self, parameters: list[torch.Tensor], max_norm: float, norm: float, factor: float) -> None:
        own = self._among(parameters)
        names = [name for name, one in own.items() if one.grad is not None]
        of_model = {id(one) for one in own.values()}
        others = [one.grad for one in parameters if id(one) not in of_model and one.grad is not None]
        beside = torch.nn.utils.get_total_norm(others)
        beside = beside.full_tensor() if isinstance(beside, DTensor) else beside
        about = {"max_norm": max_norm, "norm": norm, "factor": factor, "after": len(self.micro)}
        clip = next((one for one in self.clips if one.items() >= about.items()), None)
        # A clip that is there already is of another group: parameters of several meshes are clipped in groups, by one norm
        if clip is None:
            clip = {**about, "parameters": [], "beside": 0.0}
            self.clips.append(clip)
        clip["beside"] = math.hypot(clip["beside"], beside)
        clip["parameters"] += names
        # An optimizer in the backward pass has set gradients to None.
        clip["too_late"] = self._have_stepped(names or list(own))

    @harmless
    def see_value_clip(self, parameters: list[torch.Tensor], bound: float) -> None:
        own = {name: one.grad for name, one in self._among(parameters).items() if one.grad is not None}
        for name, gradient in own.items():
            if f"unclipped/{name}" not in self.kept.places:
                self.kept.keep_shard(f"unclipped/{name}", gradient)
        if own:
            about = {"max_norm": bound, "norm": 0.0, "factor": 1.0, "by_value": True, "parameters": list(own)}
            about |= {"after": len(self.micro), "too_late": self._have_stepped(list(own))}
            self.clips.append(about)

    def _among(self, given: list[torch.Tensor]) -> dict[str, torch.nn.Parameter]:
        """The model's parameters among these, by name."""
        places = {id(one) for one in given}
        return {name: one for name, one in wrapped.named_parameters(self.model).items() if id(one) in places}

    def _have_stepped(self, names: list[str]) -> bool:
        """Whether the optimizer of any of these parameters has stepped."""
        held = (group["params"] for one in self.optimizers for group in one["groups"])
        return any(name in params for params in held for name in names)

    def _see_zeroing(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """A loop may skip a step whose norm is too large."""
        if self.optimizers:  # have stepped: what is set to zero now, counted
            return
        self.before_zeroing[_first(optimizer)] = [
            number for number, about in enumerate(self.micro) if about["used"]
        ]
        self.zeroed[_first(optimizer)] = [
            number for number, about in enumerate(self.micro) if about["reached"]
        ]
        self.given_up_on |= bool(self.clips) and not self._is_of_another_model(optimizer)

    def _see_reduction(self, number: int) -> None:
        self.reduced += number

    def _before_update(
        self, optimizer: torch.optim.Optimizer, arguments: tuple, options: dict[str, Any]
    ) -> Any:
        self.compiled = torch.compiler.is_compiling()  # the optimizer's step
        if self.compiled:
            return self._begin_update(optimizer, arguments, options)
        # After the optimizer's own hooks, which may reduce gradients: those of all optimizers come first.
        self._remove_last_hook(optimizer)
        self.last_hooks[id(optimizer)] = optimizer.register_step_pre_hook(self._begin_update).remove
        return None

    def _remove_last_hook(self, optimizer: torch.optim.Optimizer) -> None:
        self.last_hooks.pop(id(optimizer), lambda: None)()

    @torch.compiler.disable
    @harmless
    def _begin_update(
        self, optimizer: torch.optim.Optimizer, arguments: tuple, options: dict[str, Any]
    ) -> Any:
        if self.stepping not in (None, optimizer):
            return None  # one inside of another, which holds all that this one does
        if type(optimizer).__module__ == ZERO_REDUNDANCY:
            return None  # the one inside has this rank's share, which is then sent to the others
        # A step that calls the step of the class it is derived from is nested
        self.nested += self.stepping is optimizer
        if self.nested:
            return None
        self.stepping = optimizer
        # The first argument is the optimizer itself.
        closure = options.get("closure") or next((one for one in arguments[1:] if callable(one)), None)
        if closure is None:
            self._see_gradients(optimizer)
            return None

        @functools.wraps(closure)
        def then_seen() -> Any:  # the gradients are final after the closure
            loss = closure()
            if not self.updating:  # L-BFGS calls it again, with other weights
                self._see_gradients(optimizer)
            return loss

        if "closure" in options:
            return arguments, {**options, "closure": then_seen}
        return tuple(then_seen if one is closure else one for one in arguments), options

    @harmless
    def _see_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        if not self.micro or self.engine_steps:
            return
        self._see_ranks()
        own = wrapped.named_parameters(self.model)
        names = {id(parameter): name for name, parameter in own.items()}
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if not self.optimizers and self._is_of_another_model(optimizer):
            # Unless a gradient arrives later, or is kept until the model's own optimizer steps. What arrived before this one's
            # gradients were set to zero was not for it.
            known = self.before_zeroing.get(_first(optimizer), ())
            for number, about in enumerate(self.micro):
                about["elsewhere"] |= number not in known
            self.arrived_since = False
            self.elsewhere += len(held)
            self.other_replicas += _replicas(held)
            return
        if not self.arrived_since:
            for about in self.micro:
                about["elsewhere"] = False
        # A forward pass may have unfrozen some.
        trained = {name for name in self.frozen if own[name].requires_grad and own[name].grad is not None}
        self.frozen = {name: was for name, was in self.frozen.items() if name not in trained}
        changed = next((name for name, was in self.frozen.items() if digest_of(own[name]) != was), None)
        if changed is not None:
            self.give_up(f"{changed} requires no gradient, and is not what it was when the step began")
            return
        self.updating = True
        # another optimizer's may be clipped only later
        final = [one for one in held if id(one) in names]
        again = bool(final) and id(optimizer) in self.stepped
        self.first_parameters.append(_first(optimizer))
        self.stepped.add(id(optimizer))
        if not self.optimizers:
            final = list(own.values())
            # Only now: FSDP2 has its shards in their places again
            for name, parameter in own.items():
                self.kept.keep_weight(name, parameter)
                order = order_of(parameter)
                self.orders |= {name: order} if order else {}
        scale = getattr(
            optimizer, "grad_scale", None
        )  # which a GradScaler leaves to an optimizer that is fused
        for parameter in final:
            gradient = parameter.grad
            if gradient is not None:
                gradient = gradient.to_dense() if gradient.is_sparse else gradient
                gradient = gradient if scale is None else gradient / scale
                self.kept.keep_shard(f"gradient/{names[id(parameter)]}", gradient)
        said, tensors = described(optimizer, self.model, len(self.optimizers))
        self.optimizers.append(
            {
                **said,
                "strangers": sum(id(one) not in names for one in held),
                "replicas": _replicas([one for one in held if id(one) not in names]),
                "again": again,
                # Such as one that stands for others, which have stepped in the backward pass
                "idle": bool(held) and all(one.grad is None for one in held),
                "compiled": self.compiled,
            }
        )
        for name, value in tensors.items():
            self.kept.keep_state(name, value)

    def _is_of_another_model(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether an optimizer holds none of the model's parameters, and another one does. If none does, it may hold copies of them."""
        if id(optimizer) not in self.of_others:
            own = {id(parameter) for parameter in wrapped.named_parameters(self.model).values()}
            holding = [
                one
                for one in gc.get_objects()
                if issubclass(type(one), torch.optim.Optimizer)
                and any(id(parameter) in own for group in one.param_groups for parameter in group["params"])
            ]
            self.of_others[id(optimizer)] = bool(holding) and all(one is not optimizer for one in holding)
        return self.of_others[id(optimizer)]

    @torch.compiler.disable
    @harmless
    def _after_update(self, optimizer: torch.optim.Optimizer, _arguments: tuple, _options: dict) -> None:
        self._remove_last_hook(optimizer)
        if optimizer is not self.stepping:
            return
        if self.nested:
            self.nested -= 1
            return
        self.updating, self.stepping = False, None
        if not self.optimizers or self.engine_steps:
            return
        own = wrapped.named_parameters(self.model)
        for name, parameter in own.items():
            self.kept.keep_updated(name, parameter)
        number = len(self.optimizers) - 1
        for name, value in described(optimizer, self.model, number)[1].items():
            self.kept.keep_updated_state(name, value)


def _replicas(parameters: list[torch.Tensor]) -> list[list[int]]:
    """Hashes of (weights, gradient) of those that all ranks may hold."""
    return [
        [digest_of(one), digest_of(one.grad)]
        for one in parameters
        if type(one) is torch.nn.Parameter and one.grad is not None and one.grad.layout is torch.strided
    ]


def _first(optimizer: torch.optim.Optimizer) -> int:
    """The id of its first parameter: that of a wrapper, too."""
    return next((id(one) for group in optimizer.param_groups for one in group["params"]), 0)
