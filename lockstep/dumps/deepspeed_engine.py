"""Record a DeepSpeed engine. Its optimizers are none of torch's: the engine says when a step is, and its own readers make tensors whole."""

import sys
from collections.abc import Callable
from typing import Any, Protocol

import torch

from lockstep.dumps import tree


class Recorder(Protocol):
    """What is used of lockstep/dumps/recorder.py."""

    model: torch.nn.Module
    micro: list[dict[str, Any]]
    clips: list[dict[str, Any]]
    optimizers: list[dict[str, Any]]
    removing: list[Callable[[], None]]
    engine_steps: bool

    def keep_shard(self, name: str, tensor: torch.Tensor) -> None: ...
    def keep_weight(self, name: str, tensor: torch.Tensor) -> None: ...
    def keep_updated(self, name: str, tensor: torch.Tensor) -> None: ...


def watch(recorder: Recorder) -> bool:
    """Wrap the engine's step, if DeepSpeed is imported by now; returns whether it is."""
    if "deepspeed" not in sys.modules:
        return False
    from deepspeed.runtime.engine import DeepSpeedEngine

    real = DeepSpeedEngine.step

    def step(engine: Any, *arguments: Any, **options: Any) -> Any:
        ends = (
            engine.is_gradient_accumulation_boundary()
            and tree.inner(engine) is recorder.model
            and recorder.micro
        )
        if ends:
            recorder.engine_steps = True
            _see_gradients(recorder, engine)
        result = real(engine, *arguments, **options)
        if ends:
            _see_weights(recorder, recorder.keep_updated)
            norm = engine.get_global_grad_norm()
            if engine.gradient_clipping() > 0 and norm is not None:
                bound = float(engine.gradient_clipping())
                recorder.clips.append({"max_norm": bound, "norm": float(norm), "later": True})
        return result

    DeepSpeedEngine.step = step
    recorder.removing.append(lambda: setattr(DeepSpeedEngine, "step", real))
    return True


def _see_weights(recorder: Recorder, keep: Callable[[str, torch.Tensor], None]) -> None:
    from deepspeed.utils import safe_get_full_fp32_param

    for name, parameter in tree.named_parameters(recorder.model).items():
        whole = safe_get_full_fp32_param(parameter)
        keep(name, parameter if whole is None else whole)


def _see_gradients(recorder: Recorder, engine: Any) -> None:
    from deepspeed.utils import safe_get_full_grad

    _see_weights(recorder, recorder.keep_weight)
    names = tree.named_parameters(recorder.model)
    for about in recorder.micro:
        about["param_dtype"] = str(
            next(iter(names.values())).dtype
        )  # of the forward pass; the engine steps float32 copies
    for name, parameter in names.items():
        gradient = safe_get_full_grad(parameter)
        if gradient is not None:
            recorder.keep_shard(f"gradient/{name}", gradient)
    trained = [name for name, parameter in names.items() if parameter.requires_grad]
    kind = f"deepspeed:{type(engine.optimizer).__qualname__}"
    recorder.optimizers.append({"class": kind, "groups": [{"params": trained}], "strangers": 0})
