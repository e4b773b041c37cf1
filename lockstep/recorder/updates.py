"""Record the updates of a step: how gradients are clipped and set to zero, what each optimizer is given, and what it computes."""

import functools
import gc
import math
import weakref
from typing import Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from lockstep.recorder import patches, wrapped
from lockstep.recorder.callers import callers
from lockstep.recorder.optimizers import described
from lockstep.recorder.step import StepRecorder, harmless
from lockstep.recorder.step_tensors import digest_of, order_of, whole

# Packages whose wrappers of an optimizer only pass its step on
OF_LIBRARIES = {"accelerate", "lightning", "lightning_fabric", "pytorch_lightning", "torch", "transformers"}
ZERO_REDUNDANCY = "torch.distributed.optim.zero_redundancy_optimizer"


class Updates(StepRecorder):
    """Has the hooks on optimizers, and on what is done with gradients before the optimizers step."""

    def _see_updates(self) -> list[patches.Undo]:
        # Optimizer -> the first step in which it stepped
        self.first_steps = weakref.WeakKeyDictionary[torch.optim.Optimizer, int]()
        return [
            register_optimizer_step_pre_hook(self._before_update).remove,
            register_optimizer_step_post_hook(self._after_update).remove,
            *patches.see_clipping(self.see_clip),
            patches.see_value_clipping(self.see_value_clip),
            patches.see_calls(torch.optim.Optimizer, "zero_grad", self._see_zeroing),
            *patches.see_reductions(self._see_reduction),
        ]

    @harmless
    def see_clip(self, parameters: list[torch.Tensor], max_norm: float, total_norm: torch.Tensor) -> None:
        """Record that gradients are clipped by their norm."""
        own = self._own_parameters(parameters)
        # Otherwise, the gradients are those of another model, or other stages of the rank are still recorded.
        if not (own and self.removing):
            return
        norm = whole(total_norm)
        # In the dtype of the norm, which may be bfloat16
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        names = [name for name, parameter in own.items() if parameter.grad is not None]
        others = [p.grad for p in self._strangers(parameters) if p.grad is not None]
        norm_beside = whole(torch.nn.utils.get_total_norm(others))
        fields = {
            "max_norm": max_norm,
            "norm": float(norm),
            "factor": float(factor),
            "after": len(self.micro),
        }
        # Parameters of several meshes are clipped in groups, by one norm. An equal clip of other parameters is of an earlier group.
        equal = (clip for clip in self.clips if clip.items() >= fields.items())
        clip = next((clip for clip in equal if set(names).isdisjoint(clip["parameters"])), None)
        if clip is None:
            clip = {**fields, "parameters": [], "without_gradient": [], "beside": 0.0}
            self.clips.append(clip)
        clip["beside"] = math.hypot(clip["beside"], norm_beside)
        clip["parameters"] += names
        clip["without_gradient"] += sorted(own.keys() - set(names))
        # Gradients are None if an optimizer has stepped in the backward pass.
        clip["too_late"] = self._have_stepped(names or list(own))

    @harmless
    def see_value_clip(self, parameters: list[torch.Tensor], bound: float) -> None:
        """Record that each element of the gradients is clipped to at most `bound`, and the gradients before."""
        own = self._own_parameters(parameters) if self.removing else {}
        grads = {name: p.grad for name, p in own.items() if p.grad is not None}
        for name, gradient in grads.items():
            if f"unclipped/{name}" not in self.kept.places:
                self.kept.keep_shard(f"unclipped/{name}", gradient)
        if grads:
            clip = {
                "max_norm": bound,
                "norm": 0.0,
                "factor": 1.0,
                "by_value": True,
                "parameters": list(grads),
            }
            clip |= {"after": len(self.micro), "too_late": self._have_stepped(list(grads))}
            self.clips.append(clip)

    def _own_parameters(self, given: list[torch.Tensor]) -> dict[str, torch.nn.Parameter]:
        """Return the model's parameters among the given tensors, by name."""
        ids = {id(tensor) for tensor in given}
        return {name: p for name, p in wrapped.named_parameters(self.model).items() if id(p) in ids}

    def _strangers(self, given: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the given tensors that are no parameters of the model, nor of other stages of the rank: these have recorders."""
        stages = [self.model, *(self.stage.of_rank.values() if self.stage else ())]
        known = {id(p) for stage in stages for p in wrapped.named_parameters(stage).values()}
        return [tensor for tensor in given if id(tensor) not in known]

    def _have_stepped(self, names: list[str]) -> bool:
        """Whether the optimizer of any of these parameters has stepped."""
        held = (group["params"] for optimizer in self.optimizers for group in optimizer["groups"])
        return any(name in params for params in held for name in names)

    def _see_zeroing(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Note for which micro batches gradients had arrived when they are set to zero. A loop may skip a step whose norm is too large."""
        # Once optimizers have stepped, gradients that are set to zero have counted.
        if self.optimizers:
            return
        self.before_zeroing[_first_parameter(optimizer)] = [
            number for number, micro_batch in enumerate(self.micro) if micro_batch["used"]
        ]
        self.zeroed[_first_parameter(optimizer)] = [
            number for number, micro_batch in enumerate(self.micro) if micro_batch["reached"]
        ]
        self.given_up_on |= bool(self.clips) and not self._is_of_another_model(optimizer)

    def _see_reduction(self, number: int) -> None:
        self.reduced += number

    def _before_update(
        self, optimizer: torch.optim.Optimizer, arguments: tuple, options: dict[str, Any]
    ) -> Any:
        # Whether torch.compile compiles the optimizer's step
        self.compiled = torch.compiler.is_compiling()
        if self.compiled:
            return self._begin_update(optimizer, arguments, options)
        # torch calls hooks of all optimizers first. This one must come after the optimizer's own hooks, which may reduce gradients.
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
        # An optimizer inside of another holds nothing that the outer one does not hold.
        if self.stepping not in (None, optimizer):
            return None
        # The optimizer inside of it has this rank's shard, which is then sent to the other ranks.
        if type(optimizer).__module__ == ZERO_REDUNDANCY:
            return None
        # A step that calls the step of the class it is derived from is nested.
        self.nested += self.stepping is optimizer
        if self.nested:
            return None
        self.stepping = optimizer
        # The first argument is the optimizer itself.
        closure = options.get("closure") or next((arg for arg in arguments[1:] if callable(arg)), None)
        if closure is None:
            self._see_gradients(optimizer)
            return None

        @functools.wraps(closure)
        def then_seen() -> Any:
            """Call the closure. The gradients are final after it."""
            loss = closure()
            # L-BFGS calls it again, with other weights.
            if not self.updating:
                self._see_gradients(optimizer)
            return loss

        if "closure" in options:
            return arguments, {**options, "closure": then_seen}
        return tuple(then_seen if arg is closure else arg for arg in arguments), options

    @harmless
    def _see_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Record weights, gradients and optimizer as they are when the optimizer begins to update."""
        if not self.micro or self.engine_steps:
            return
        self._see_ranks()
        parameters = wrapped.named_parameters(self.model)
        names = {id(parameter): name for name, parameter in parameters.items()}
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        strangers = self._strangers(held)
        lasting = self.first_steps.setdefault(optimizer, self.step) < self.step
        if not self.optimizers and self._is_of_another_model(optimizer):
            if held and not strangers:
                return  # of another stage of the rank
            # The micro batches are in that model's loss, unless a gradient arrives later, or is kept until the model's own optimizer
            # steps. What arrived before this optimizer's gradients were set to zero was not for it.
            arrived_before = self.before_zeroing.get(_first_parameter(optimizer), ())
            for number, micro_batch in enumerate(self.micro):
                micro_batch["elsewhere"] |= number not in arrived_before
            self.arrived_since = False
            self.elsewhere += len(strangers)
            self.other_replicas += _replicas(strangers, lasting=lasting)
            return
        if not self.arrived_since:
            for micro_batch in self.micro:
                micro_batch["elsewhere"] = False
        # A forward pass may have unfrozen some.
        trained = {n for n in self.frozen if parameters[n].requires_grad and parameters[n].grad is not None}
        self.frozen = {name: digest for name, digest in self.frozen.items() if name not in trained}
        changed = next((n for n, digest in self.frozen.items() if digest_of(parameters[n]) != digest), None)
        if changed is not None:
            self.give_up(f"{changed} requires no gradient, and is not what it was when the step began")
            return
        self.updating = True
        # The gradients of another optimizer may be clipped only later.
        final = [parameter for parameter in held if id(parameter) in names]
        is_again = bool(final) and id(optimizer) in self.stepped
        self.first_parameters.append(_first_parameter(optimizer))
        self.stepped.add(id(optimizer))
        if not self.optimizers:
            final = list(parameters.values())
            # Weights are kept only now, when FSDP2 has its shards in their places again.
            for name, parameter in parameters.items():
                self.kept.keep_weight(name, parameter)
                order = order_of(parameter)
                self.orders |= {name: order} if order else {}
        # A GradScaler leaves it to a fused optimizer to unscale.
        scale = getattr(optimizer, "grad_scale", None)
        for parameter in final:
            gradient = parameter.grad
            if gradient is not None:
                gradient = gradient.to_dense() if gradient.is_sparse else gradient
                gradient = gradient if scale is None else gradient / scale
                self.kept.keep_shard(f"gradient/{names[id(parameter)]}", gradient)
        description, tensors = described(optimizer, self.model, len(self.optimizers))
        self.optimizers.append(
            {
                **description,
                "strangers": len(strangers),
                "replicas": _replicas(strangers, lasting=lasting),
                "again": is_again,
                # An optimizer may stand for others, which have stepped in the backward pass.
                "idle": bool(held) and all(parameter.grad is None for parameter in held),
                "compiled": self.compiled,
                "stepped_by": _stepped_by(optimizer),
            }
        )
        for name, tensor in tensors.items():
            self.kept.keep_state(name, tensor)

    def _is_of_another_model(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether an optimizer holds none of the model's parameters, and another one does. If none does, it may hold copies of them."""
        if id(optimizer) not in self.of_others:
            ids = {id(parameter) for parameter in wrapped.named_parameters(self.model).values()}
            holders = [
                obj
                for obj in gc.get_objects()
                if issubclass(type(obj), torch.optim.Optimizer)
                and any(id(parameter) in ids for group in obj.param_groups for parameter in group["params"])
            ]
            self.of_others[id(optimizer)] = bool(holders) and all(obj is not optimizer for obj in holders)
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
        parameters = wrapped.named_parameters(self.model)
        for name, parameter in parameters.items():
            self.kept.keep_updated(name, parameter)
        number = len(self.optimizers) - 1
        for name, tensor in described(optimizer, self.model, number)[1].items():
            self.kept.keep_updated_state(name, tensor)


def _stepped_by(optimizer: torch.optim.Optimizer) -> str:
    """Return the class of another optimizer whose step calls this one's, such as Lookahead, and may change the weights after it; or "".

    Wrappers of libraries only pass the call on.
    """
    for _, owner in callers(lambda code: code.co_name == "step"):
        if owner is optimizer or not isinstance(owner, torch.optim.Optimizer):
            continue
        if type(owner).__module__.partition(".")[0] not in OF_LIBRARIES:
            return type(owner).__name__
    return ""


def _replicas(parameters: list[torch.Tensor], *, lasting: bool) -> list[list[int]]:
    """Return the hashes of (weights, gradient) of those parameters that all ranks may hold.

    `lasting`: their optimizer has stepped in a step before. A tensor that is no nn.Parameter, and is held by a new optimizer each time,
    is a rank's own, such as a perturbation of its samples.
    """
    kinds = (torch.nn.Parameter, torch.Tensor) if lasting else (torch.nn.Parameter,)
    return [
        [digest_of(p), digest_of(p.grad)]
        for p in parameters
        if type(p) in kinds and p.grad is not None and p.grad.layout is torch.strided
    ]


def _first_parameter(optimizer: torch.optim.Optimizer) -> int:
    """Return the id of an optimizer's first parameter; 0 if it has none. A wrapper of the optimizer has the same."""
    return next((id(parameter) for group in optimizer.param_groups for parameter in group["params"]), 0)
