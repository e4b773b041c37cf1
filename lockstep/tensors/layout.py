"""The tensors that a captured step of a model must hold, in order of execution, found in the model itself.

They come from one forward and one backward pass on torch's meta device, which computes shapes only. Captured are

    MODULE          the output of a module (MODULE.1 for the second tensor of a tuple)
    MODULE.input    the input of a module, if it depends on the weights and is not captured already, such as the output of the
                    attention itself, which enters its output layer

and, backward, the gradient of the loss with respect to each of them.
"""

import functools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.autograd.graph import Node

from lockstep.errors import UserError, first_line
from lockstep.inputs import modules
from lockstep.inputs.shapes import build_empty

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BATCH, SEQUENCE = "batch", "sequence"
# of what a strategy holds per parameter
KINDS = ("gradient", "exp_avg", "exp_avg_sq", "parameter", "average")


def kinds_of(config: dict) -> tuple[str, ...]:
    """Those of KINDS that a recorded configuration has: SGD keeps no moments, and an average is kept only if asked for."""
    without = {"average"} if config.get("ema_decay", 1.0) == 1 else set()
    without |= {"exp_avg", "exp_avg_sq"} if config["optimizer"] != "adamw" else set()
    return tuple(kind for kind in KINDS if kind not in without)


@dataclass(frozen=True)
class Layout:
    """The tensors of one model. Shapes are whole, not sharded; "batch" and "sequence" stand for those dims."""

    outputs: dict[str, tuple]  # name -> shape of captured outputs and inputs, in order of execution
    backward: tuple[str, ...]  # those of them that have a gradient, in order of the backward pass
    inputs: dict[str, dict[int, str]]  # module -> position among its arguments -> name of a captured input
    sources: dict[str, tuple[str, ...]]  # name -> the captured tensors that it is directly computed from
    parameters: dict[str, tuple[int, ...]]  # name -> shape; tied ones once

    def of_step(self, kinds: tuple[str, ...], rows: int, seq_length: int) -> dict[str, tuple[int, ...]]:
        """Name -> shape (rows of the global batch, ...) of all tensors of a step, in order of execution.

        `kinds` are the KINDS that the step has. With "gradient" it has a batch, a forward and a backward pass, too. Order: forward;
        backward, each output gradient followed by the gradients of its module's own parameters; update.
        """
        found: dict[str, tuple[int, ...]] = {}
        if "gradient" in kinds:
            sizes = {BATCH: rows, SEQUENCE: seq_length}
            found = {f"batch/{name}": (rows, seq_length) for name in ("input_ids", "labels")}
            shapes = {
                name: tuple(sizes.get(size, size) for size in shape) for name, shape in self.outputs.items()
            }
            found |= {f"forward/{name}": shape for name, shape in shapes.items()}
            for name in self.backward:
                found[f"backward/{name}"] = shapes[name]
                found |= {f"gradient/{own}": self.parameters[own] for own in self._parameters_of(name)}
        for name, shape in self.parameters.items():
            found |= {f"{kind}/{name}": shape for kind in KINDS if kind in kinds}
        return found

    def is_further(self, name: str) -> bool:
        """Whether a name is that of an output of a module beside its first."""
        module, _, number = name.rpartition(".")
        return number.isdigit() and module in self.outputs and not module.endswith(".input")

    def _parameters_of(self, module: str) -> list[str]:
        return [name for name in (f"{module}.weight", f"{module}.bias") if name in self.parameters]


def layout_of(architecture: dict, attn_impl: str) -> Layout:
    """The layout of a model with this architecture (the fields of a Hugging Face config).

    Raises UserError if transformers cannot build or run the model.
    """
    return _layout(json.dumps(architecture, sort_keys=True), attn_impl)


@functools.lru_cache(maxsize=8)
def _layout(architecture: str, attn_impl: str) -> Layout:
    model = build_empty(json.loads(architecture), attn_impl=attn_impl)
    try:
        first, second = (_Trace(model, batch, sequence) for batch, sequence in ((2, 3), (4, 5)))
    except Exception as error:  # noqa: BLE001 - transformers and torch raise anything for an architecture that is none
        raise UserError(f"no model of this architecture can be run ({first_line(error)})") from error
    symbols = {(2, 4): BATCH, (3, 5): SEQUENCE}
    outputs = {
        name: tuple(
            a if a == b else symbols[a, b]
            for a, b in zip(tensor.shape, second.tensors[name].shape, strict=True)
        )
        for name, tensor in first.tensors.items()
    }
    parameters = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    # The gradient of an output that is the same for all samples, as GPT-2's positions, is a sum over them: no rank has it.
    backward = tuple(name for name in first.backward if outputs[name][:1] == (BATCH,))
    return Layout(outputs, backward, first.inputs, first.sources(), parameters)


class _Trace:
    """A forward and a backward pass over a batch of this size, and the tensors seen on the way."""

    def __init__(self, model: "PreTrainedModel", batch: int, sequence: int):
        self.tensors: dict[str, torch.Tensor] = {}  # kept alive, so that no storage is used twice
        self.inputs: dict[str, dict[int, str]] = {}
        self.backward: list[str] = []
        self._seen: set[tuple[int, int]] = set()
        handles = []
        for name, module in watched(model):
            handles.append(
                module.register_forward_pre_hook(functools.partial(self._enter, name), with_kwargs=True)
            )
            handles.append(module.register_forward_hook(functools.partial(self._leave, name)))
        with torch.device("meta"):
            # a mask of four dims is taken as it is; without one transformers would look into the positions' values
            mask = torch.zeros(batch, 1, sequence, sequence)
            logits = model(
                torch.zeros(batch, sequence, dtype=torch.int64), attention_mask=mask, use_cache=False
            ).logits
        logits.sum().backward()
        for handle in handles:
            handle.remove()

    def _enter(self, module: str, _module: torch.nn.Module, arguments: tuple, options: dict) -> None:
        for position, tensor in enumerate([*arguments, *options.values()]):
            if (
                isinstance(tensor, torch.Tensor)
                and tensor.requires_grad
                and _storage(tensor) not in self._seen
            ):
                number = len(self.inputs.setdefault(module, {}))
                self.inputs[module][position] = f"{module}.input.{number}" if number else f"{module}.input"
                self._note(self.inputs[module][position], tensor)

    def _leave(self, module: str, _module: torch.nn.Module, _arguments: object, output: object) -> None:
        for name, tensor in named_outputs(module, output):
            self._note(name, tensor)

    def _note(self, name: str, tensor: torch.Tensor) -> None:
        self.tensors[name] = tensor
        self._seen.add(_storage(tensor))
        if tensor.requires_grad:
            tensor.register_hook(lambda _gradient: self.backward.append(name))

    def sources(self) -> dict[str, tuple[str, ...]]:
        """Name -> the captured tensors that it is directly computed from, by autograd's graph."""
        by_node: dict[Node | None, str] = {}
        found: dict[str, tuple[str, ...]] = {}
        for name, tensor in self.tensors.items():
            node = tensor.grad_fn
            if node in by_node:  # the same tensor under another name
                found[name] = (by_node[node],)
                continue
            waiting: list[Node | None] = [node]
            passed: set[Node] = set()
            nearest: list[str] = []
            while waiting:
                here = waiting.pop()
                if here in by_node:
                    nearest.append(by_node[here])
                elif here is not None and here not in passed:
                    passed.add(here)
                    waiting += [before for before, _ in here.next_functions]
            found[name] = tuple(dict.fromkeys(other for other in self.tensors if other in nearest))
            if node is not None:
                by_node[node] = name
        return found


def watched(model: "PreTrainedModel") -> Iterator[tuple[str, torch.nn.Module]]:
    """The modules whose outputs are captured, by name. Those of the model and its base model are outputs of modules inside them."""
    base = modules.names_in(model).base
    return ((name, module) for name, module in model.named_modules() if name not in ("", base))


def named_outputs(module: str, output: object) -> list[tuple[str, torch.Tensor]]:
    """(name, tensor) of the outputs of a module: MODULE, and MODULE.1, ... for the other tensors of a tuple."""
    if isinstance(output, torch.Tensor):
        return [(module, output)]
    if type(output) is not tuple:
        return []
    tensors = [item for item in output if isinstance(item, torch.Tensor)]
    return [(f"{module}.{number}" if number else module, tensor) for number, tensor in enumerate(tensors)]


def _storage(tensor: torch.Tensor) -> tuple[int, int]:
    """An identity that a tensor shares with its views in other shapes."""
    return tensor.untyped_storage()._cdata, tensor.numel()
