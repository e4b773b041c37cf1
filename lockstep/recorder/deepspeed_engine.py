"""Record a DeepSpeed engine that updates copies of the weights: ZeRO 1 to 3, fp16, bf16.

DeepSpeed's own readers make tensors whole. The engine's optimizer holds flat pieces, none of which is a parameter. So the
engine says when it steps, its readers say what the optimizer keeps of each parameter, and its groups say with which
settings the parameter is updated. An engine of stage 0 in float32 steps the parameters themselves. Torch's hooks see that,
except for the norm that it clips by.
"""

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from lockstep.ground.errors import UserError
from lockstep.recorder import names, wrapped
from lockstep.recorder.optimizers import clip_by, described
from lockstep.recorder.patches import replace
from lockstep.recorder.step import harmless
from lockstep.recorder.updates import Updates


def watch(recorder: Updates) -> bool:
    """Wrap the engine's update if DeepSpeed has been imported. Return whether it has."""
    if "deepspeed" not in sys.modules:
        return False
    from deepspeed.runtime import engine as file
    from deepspeed.runtime import lr_schedules

    own_schedules = [
        kind for kind in vars(lr_schedules).values() if isinstance(kind, type) and "step" in vars(kind)
    ]
    recorder.whole_run.see_schedules(own_schedules)
    # An engine of a pipeline makes its update without `step`.
    real_update, real_clip = file.DeepSpeedEngine._take_model_step, file.clip_grad_norm_

    def update(engine: Any, *arguments: Any, **options: Any) -> Any:
        is_recorded = (
            wrapped.inner(engine) is recorder.model
            and recorder.micro
            and not isinstance(engine.optimizer, torch.optim.Optimizer)
        )
        if is_recorded:
            if getattr(engine.optimizer, "round_robin_gradients", False):
                raise UserError(
                    "round_robin_gradients: DeepSpeed's readers take the copies of other parameters then, so nothing can be recorded; leave it out of the recorded run"
                )
            recorder.engine_steps = True
            _see_gradients(recorder, engine)
        result = real_update(engine, *arguments, **options)
        if is_recorded:
            _see_update(recorder, engine)
        return result

    def clip(parameters: Any, max_norm: float, *arguments: Any, **options: Any) -> Any:
        parameters = list(parameters)
        norm = real_clip(parameters, max_norm, *arguments, **options)
        recorder.see_clip(parameters, float(max_norm), torch.as_tensor(norm))
        return norm

    recorder.removing += [
        replace(file.DeepSpeedEngine, "_take_model_step", update),
        replace(file, "clip_grad_norm_", clip),
    ]
    return True


@harmless
def _see_update(recorder: Updates, engine: Any) -> None:
    _see_weights(recorder, engine.optimizer, recorder.kept.keep_updated)
    for name, value in _state_of(recorder, engine.optimizer):
        recorder.kept.keep_updated_state(name, value)
    norm = engine.get_global_grad_norm()
    if engine.gradient_clipping() > 0 and norm is not None:
        bound = float(engine.gradient_clipping())
        clipping = {"max_norm": bound, "norm": float(norm), "factor": clip_by(bound, float(norm))}
        recorder.clips.append({**clipping, "later": True})


def _see_weights(recorder: Updates, engine_optimizer: Any, keep: Callable[[str, torch.Tensor], None]) -> None:
    """Give `keep` the weights of all parameters, whole, in the dtype that the optimizer updates them in."""
    from deepspeed.utils import safe_get_full_fp32_param

    dtype = _dtype_of_copies(engine_optimizer)
    for name, parameter in wrapped.named_parameters(recorder.model).items():
        whole = safe_get_full_fp32_param(parameter)
        keep(name, parameter if whole is None else whole.to(dtype))


def _dtype_of_copies(engine_optimizer: Any) -> torch.dtype:
    """Return the dtype of the copies that the engine's optimizer updates.

    DeepSpeed's readers return float32, even for copies in bfloat16. To round these is up to the optimizer.
    """
    flat = [tensor for group in engine_optimizer.optimizer.param_groups for tensor in group["params"]]
    # Stage 3 lists them only when it steps.
    return (flat or engine_optimizer.fp32_partitioned_groups_flat)[0].dtype


@harmless
def _see_gradients(recorder: Updates, engine: Any) -> None:
    from deepspeed.utils import safe_get_full_grad

    _see_weights(recorder, engine.optimizer, recorder.kept.keep_weight)
    parameters = wrapped.named_parameters(recorder.model)
    # The dtype of the forward pass; the engine steps float32 copies.
    param_dtype = str(next(iter(parameters.values())).dtype)
    for micro_batch in recorder.micro:
        micro_batch["param_dtype"] = param_dtype
    dtype = _dtype_of_copies(engine.optimizer)
    # The engine takes the scale of fp16 off while it steps. Optimizers for other dtypes have none.
    scale = float(getattr(engine.optimizer, "loss_scale", 1.0))
    for name, parameter in parameters.items():
        gradient = safe_get_full_grad(parameter)
        if gradient is not None:
            recorder.kept.keep_shard(f"gradient/{name}", gradient.to(dtype) / scale)
    # The tensors of this description are flat pieces, so they are left out.
    description, _ = described(engine.optimizer.optimizer, recorder.model, 0)
    if not _is_linked(recorder):
        description["class"] = names.name_of(type(engine.optimizer))
    for name, value in _state_of(recorder, engine.optimizer):
        recorder.kept.keep_state(name, value)
        _, key, parameter_name = name.split("/", 2)
        description["state"].setdefault(parameter_name, {})[key] = {"attribute": key}
    groups = list(_groups(recorder, engine.optimizer, description["groups"]))
    recorder.optimizers.append({**description, "groups": groups, "strangers": 0})


def _is_linked(recorder: Updates) -> bool:
    """Whether DeepSpeed's readers know which part of the copies is which parameter's. In stage 0, fp16 or bf16, they do not."""
    parameters = list(recorder.model.parameters())
    return any(hasattr(tensor, "ds_id") or hasattr(tensor, "_hp_mapping") for tensor in parameters)


def _state_of(recorder: Updates, engine_optimizer: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (state/KEY/NAME, what the optimizer keeps of the parameter, whole); nothing before its first step."""
    from deepspeed.utils import safe_get_full_optimizer_state

    inner = engine_optimizer.optimizer
    states = list(inner.state.values()) if _is_linked(recorder) else []
    keys = {
        key: value.dtype for state in states for key, value in state.items() if getattr(value, "ndim", 0) == 1
    }
    # All parameters are stepped together, so one count is that of all.
    count = next((state["step"] for state in states if "step" in state), None)
    for parameters, group in zip(_parameter_lists(engine_optimizer), inner.param_groups, strict=False):
        # DeepSpeed 0.19 links all groups after it has stepped the first one, so its reader finds nothing of the others.
        for tensor in parameters if keys else ():
            mapping = getattr(tensor, "_hp_mapping", None)
            if mapping is not None:
                (flat,) = group["params"]
                mapping.set_optim_state_fragment(flat, inner.state[flat])
    for name, parameter in wrapped.named_parameters(recorder.model).items():
        if not parameter.requires_grad:
            continue
        for key, dtype in sorted(keys.items()):
            state = safe_get_full_optimizer_state(parameter, key)
            # None if the optimizer does not hold the parameter
            if state is not None:
                yield f"state/{key}/{name}", state.to(dtype)
        if count is not None:
            yield f"state/step/{name}", torch.tensor(float(count))


def _parameter_lists(engine_optimizer: Any) -> list[list[torch.nn.Parameter]]:
    """Return a list of the model's parameters for each group of the optimizer. Stage 3 divides groups once more."""
    return next(
        vars(engine_optimizer)[key]
        for key in ("bit16_groups", "bf16_groups", "fp16_groups")
        if key in vars(engine_optimizer)
    )


def _groups(
    recorder: Updates, engine_optimizer: Any, settings: list[dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """Yield the `settings` of each group, with the names of the model's parameters that it updates as "params"."""
    names = {id(parameter): name for name, parameter in wrapped.named_parameters(recorder.model).items()}
    group_of_list = vars(engine_optimizer).get("sub_group_to_group_id", {})
    for number, group in enumerate(settings):
        held = [
            parameter
            for list_number, parameters in enumerate(_parameter_lists(engine_optimizer))
            if group_of_list.get(list_number, list_number) == number
            for parameter in parameters
        ]
        yield {**group, "params": [names.get(id(parameter)) for parameter in held]}
