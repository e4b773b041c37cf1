"""torch.compile: the forward pass of every layer is a graph of its own. What is outside of layers stays eager.

A compiled layer has no modules inside that could be watched: hooks would cut the very graph that is to be judged. So a capture has what
enters and leaves layers, and all gradients, moments and weights. Nothing here imports torch before a model is compiled.
"""

import os
import shutil
from typing import TYPE_CHECKING, Literal

from lockstep.ground.errors import UserError
from lockstep.inputs import modules

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

Backend = Literal["off", "aot_eager", "inductor"]


def enable(model: "PreTrainedModel", backend: str) -> None:
    """Compile the layers of a model, in place, when they are first called. Call it after the model is sharded."""
    import torch
    from torch._dynamo.utils import counters

    torch.compiler.reset()  # forgets earlier runs in this process
    counters.clear()
    for layer in _layers(model):
        layer.forward = torch.compile(layer.forward, backend=backend)


def _layers(model: "torch.nn.Module") -> list["torch.nn.Module"]:
    name = modules.names_in(model).layers
    return list(model.get_submodule(name).children()) if name else []


def has_compiler() -> bool:
    """Whether a C++ compiler is on the PATH."""
    return bool(shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++"))


def require(backend: str) -> None:
    """Raise UserError where the backend's code cannot be compiled."""
    if backend == "inductor" and not has_compiler():
        raise UserError(
            "--compile inductor needs a C++ compiler, and none (c++ or g++) is on the PATH; install the package g++, or use aot_eager"
        )


def observed(model: "PreTrainedModel") -> list[bool]:
    """Whether layers run as compiled graphs; both answers if only some do. Call it after a first forward pass."""
    from torch._dynamo.utils import counters

    layers = _layers(model)
    has_compiled = counters["frames"]["ok"] > 0
    are_compiled = {has_compiled and hasattr(layer.forward, "_torchdynamo_orig_callable") for layer in layers}
    return sorted(are_compiled) or [False]  # a model without layers


def is_hidden(names: modules.Names, backend: str, tensor: str) -> bool:
    """Whether a module, or a tensor that is named after one, is inside of a compiled layer."""
    return backend != "off" and names.layer_of(tensor) >= 0
