"""Record a DeepSpeed engine that updates copies of the weights: ZeRO 1 to 3, fp16, bf16. Its own readers make tensors whole.

The engine's optimizer holds flat pieces, none of them a parameter. So the engine says when a step is, its readers say what the optimizer
keeps of each parameter, and its groups say by which settings that is updated. An engine of stage 0 in float32 steps the parameters
themselves: the hooks of torch see that, but for the norm that it clips by.
"""

import sys
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from lockstep.recorder import tree, wrapped
from lockstep.recorder.kept import Kept
from lockstep.recorder.optimizers import clip_by, described
from lockstep.recorder.patches import replace


class Recorder(Protocol):
    """What is used of lockstep/recorder/recorder.py."""

    model: torch.nn.Module
    kept: Kept
    micro: list[dict[str, Any]]
    clips: list[dict[str, Any]]
    optimizers: list[dict[str, Any]]
    removing: list[Callable[[], None]]
    engine_steps: bool

    def see_clip(
        self, parameters: list[torch.Tensor], max_norm: float, norm: float, factor: float
    ) -> None: ...


def watch(recorder: Recorder) -> bool:
    """Wrap the engine's step, if DeepSpeed is imported by now; returns whether it is."""
    if "deepspeed" not in sys.modules:
        return False
    from deepspeed.runtime import engine as file

    real_step, real_clip = file.DeepSpeedEngine.step, file.clip_grad_norm_

    def step(engine: Any, *arguments: Any, **options: Any) -> Any:
        ends = (
            engine.is_gradient_accumulation_boundary()
            and wrapped.inner(engine) is recorder.model
            and recorder.micro
            and not isinstance(engine.optimizer, torch.optim.Optimizer)
        )
        if ends:
            recorder.engine_steps = True
            _see_gradients(recorder, engine)
        result = real_step(engine, *arguments, **options)
        if ends:
            _see_weights(recorder, engine.optimizer, recorder.kept.keep_updated)
            for name, value in _state_of(recorder, engine.optimizer):
                recorder.kept.keep_updated_state(name, value)
            norm = engine.get_global_grad_norm()
            if engine.gradient_clipping() > 0 and norm is not None:
                bound = float(engine.gradient_clipping())
                about = {"max_norm": bound, "norm": float(norm), "factor": clip_by(bound, float(norm))}
                recorder.clips.append({**about, "later": True})
        return result

    def clip(parameters: Any, max_norm: float, *arguments: Any, **options: Any) -> Any:
        parameters = list(parameters)
        norm = real_clip(parameters, max_norm, *arguments, **options)
        recorder.see_clip(parameters, float(max_norm), float(norm), clip_by(float(max_norm), float(norm)))
        return norm

    recorder.removing += [replace(file.DeepSpeedEngine, "step", step), replace(file, "clip_grad_norm_", clip)]
    return True


def _see_weights(recorder: Recorder, engine: Any, keep: Callable[[str, torch.Tensor], None]) -> None:
    from deepspeed.utils import safe_get_full_fp32_param

    dtype = _dtype_of_copies(engine)
    for name, parameter in wrapped.named_parameters(recorder.model).items():
        whole = safe_get_full_fp32_param(parameter)
        keep(name, parameter if whole is None else whole.to(dtype))


def _dtype_of_copies(engine: Any) -> torch.dtype:
    """Of what the engine's optimizer updates. The readers give float32, also of copies in bfloat16, whose rounding is the optimizer's own."""
    flat = [one for group in engine.optimizer.param_groups for one in group["params"]]
    # stage 3 lists them when it steps
    return (flat or engine.fp32_partitioned_groups_flat)[0].dtype


def _see_gradients(recorder: Recorder, engine: Any) -> None:
    from deepspeed.utils import safe_get_full_grad

    _see_weights(recorder, engine.optimizer, recorder.kept.keep_weight)
    names = wrapped.named_parameters(recorder.model)
    for about in recorder.micro:
        about["param_dtype"] = str(
            next(iter(names.values())).dtype
        )  # of the forward pass; the engine steps float32 copies
    dtype = _dtype_of_copies(engine.optimizer)
    for name, parameter in names.items():
        gradient = safe_get_full_grad(parameter)
        if gradient is not None:
            recorder.kept.keep_shard(f"gradient/{name}", gradient.to(dtype))
    # Its tensors are those of the flat pieces, so they are left out.
    said, _ = described(engine.optimizer.optimizer, recorder.model, 0)
    if not _is_linked(recorder):
        said["class"] = tree.name_of(type(engine.optimizer))
    for name, value in _state_of(recorder, engine.optimizer):
        recorder.kept.keep_state(name, value)
        _, key, own = name.split("/", 2)
        said["state"].setdefault(own, {})[key] = {"attribute": key}
    groups = list(_groups(recorder, engine.optimizer, said["groups"]))
    recorder.optimizers.append({**said, "groups": groups, "strangers": 0})


def _is_linked(recorder: Recorder) -> bool:
    """Whether DeepSpeed's readers know the parts of the copies that are the model's parameters: not so of fp16 and bf16 in stage 0."""
    parameters = list(recorder.model.parameters())
    return any(hasattr(one, "ds_id") or hasattr(one, "_hp_mapping") for one in parameters)


def _state_of(recorder: Recorder, engine: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """state/KEY/NAME -> what the optimizer keeps of a parameter, whole; nothing before its first step. `engine` is the engine's optimizer."""
    from deepspeed.utils import safe_get_full_optimizer_state

    inner = engine.optimizer
    states = list(inner.state.values()) if _is_linked(recorder) else []
    keys = {
        key: value.dtype for state in states for key, value in state.items() if getattr(value, "ndim", 0) == 1
    }
    # All are stepped together
    count = next((state["step"] for state in states if "step" in state), None)
    for parameters, group in zip(_lists(engine), inner.param_groups, strict=False):
        # DeepSpeed 0.19 links all groups after it has stepped the first one, so its reader finds nothing of the others.
        for one in parameters if keys else ():
            mapping = getattr(one, "_hp_mapping", None)
            if mapping is not None:
                (flat,) = group["params"]
                mapping.set_optim_state_fragment(flat, inner.state[flat])
    for name, parameter in wrapped.named_parameters(recorder.model).items():
        if not parameter.requires_grad:
            continue
        for key, dtype in sorted(keys.items()):
            state = safe_get_full_optimizer_state(parameter, key)
            if state is not None:  # else the optimizer does not hold the parameter
                yield f"state/{key}/{name}", state.to(dtype)
        if count is not None:
            yield f"state/step/{name}", torch.tensor(float(count))


def _lists(engine: Any) -> list[list[torch.nn.Parameter]]:
    """The model's parameters, of each group of the optimizer; stage 3 divides groups again."""
    return next(
        vars(engine)[key] for key in ("bit16_groups", "bf16_groups", "fp16_groups") if key in vars(engine)
    )


def _groups(recorder: Recorder, engine: Any, settings: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The `settings` of each group, and the model's parameters that it updates; `engine` is the engine's optimizer."""
    names = {id(one): name for name, one in wrapped.named_parameters(recorder.model).items()}
    of_list = vars(engine).get("sub_group_to_group_id", {})
    for number, said in enumerate(settings):
        own = [
            one
            for place, some in enumerate(_lists(engine))
            if of_list.get(place, place) == number
            for one in some
        ]
        yield {**said, "params": [names.get(id(one)) for one in own]}
