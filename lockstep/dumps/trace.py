"""Find a model's layout: one forward and backward pass of the model itself, over a few tokens.

On torch's meta device this costs nothing. A model whose code looks at numbers, as a mixture of experts at its router's, runs on the CPU, with
random weights that are views of short vectors. Outputs whose shape follows neither the batch nor the sequence, such as the tokens of
one expert, and those of modules that are called more than once, are not captured.
"""

import contextlib
import functools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import Node
from torch.overrides import TorchFunctionMode

from lockstep.dumps.layout import BATCH, SEQUENCE, Choice, Layout
from lockstep.ground import user_file
from lockstep.ground.errors import UserError, first_line
from lockstep.inputs import checkpoints
from lockstep.inputs.model import causal_lm_loss
from lockstep.inputs.shapes import build_empty, describe, from_config, quiet, use_eager_experts

Function = Callable[..., Any]
Given = tuple[Any, ...]  # by their places
Named = dict[str, Any]
SIZES = ((2, 3), (4, 5), (3, 7))  # batch and sequence of the passes
# Nodes of autograd whose result has the order of what they are given
IN_ORDER = ("SoftmaxBackward0", "SigmoidBackward0", "ToCopyBackward0", "ViewBackward0")


def layout_of(architecture: dict, attn_impl: str, *, positions: bool = False) -> Layout:
    """The layout of a model with this architecture (the fields of a Hugging Face config); `positions`: each sample has its own.

    Raises UserError if the model cannot be built or run.
    """
    return _layout(json.dumps(architecture, sort_keys=True), attn_impl, positions)


@functools.lru_cache(maxsize=8)
def _layout(architecture: str, attn_impl: str, positions: bool) -> Layout:
    config = json.loads(architecture)
    description = describe(config)
    try:
        with quiet():
            traces, tables = _traces(config, attn_impl, description.names.base, positions)
    except UserError:
        raise
    except Exception as error:  # noqa: BLE001 - transformers and torch raise anything for an architecture that is none
        lengths = ", ".join(str(length) for _, length in SIZES)
        why = f"{first_line(error)}{user_file.place_of(error)}"
        raise UserError(
            f"no model of this architecture can be run on sequences of {lengths} tokens, which show what each output is of ({why})"
        ) from error
    outputs, flat, unknown = {}, [], []
    first = traces[0]
    for name, tensor in first.tensors.items():
        shape = _symbols([tuple(trace.tensors[name].shape) for trace in traces if name in trace.tensors])
        repeated = any(trace.calls[trace.owners[name]] > 1 for trace in traces if name in trace.owners)
        numbers = (
            tensor.is_floating_point() or first.chosen(tensor) is not None
        )  # no masks, no complex tables
        if shape is None or repeated or not numbers:
            unknown.append(name)
            continue
        if len(shape) > len(tensor.shape):
            flat.append(name)
        outputs[name] = shape
    # The gradient of an output that is the same for all samples, as GPT-2's positions, is a sum over them: no rank has it.
    backward = tuple(name for name in first.backward if outputs.get(name, ())[:1] == (BATCH,))
    inputs = {
        module: {place: name for place, name in places.items() if name in outputs}
        for module, places in first.inputs.items()
    }
    names = description.names  # a module that is not called has no output
    called = {role: name for role in ("embedding", "head") if (name := getattr(names, role)) in outputs}
    names = names.model_copy(update={"embedding": "", "head": "", **called})
    return Layout(
        model=description.model_copy(update={"names": names}),
        outputs=outputs,
        backward=backward,
        inputs=inputs,
        sources=first.sources(outputs),
        flat=tuple(flat),
        choices=first.choices(outputs),
        unknown=tuple(unknown),
        state={},
        tables=tuple(tables),
    )


def _traces(config: dict, attn_impl: str, base: str, positions: bool) -> tuple[list["_Trace"], list[str]]:
    """A trace for each of SIZES, and the modules that are tables."""
    vocab_size = config["vocab_size"]

    def of(model: torch.nn.Module) -> tuple[list[_Trace], list[str]]:
        traces = [_Trace(model, base, vocab_size, *size, positions) for size in SIZES]
        if all(parameter.requires_grad for parameter in model.parameters()):
            return traces, traces[0].tables
        model.requires_grad_(True)  # what frozen weights make is no table
        return traces, _Trace(model, base, vocab_size, *SIZES[0], positions).tables

    if user_file.is_named(config["model_type"]):  # its buffers may matter
        with torch.random.fork_rng(devices=[]):
            return of(from_config(config, attn_impl=attn_impl))
    model = build_empty(config, attn_impl=attn_impl)
    with contextlib.suppress(Exception):  # it looks at numbers
        return of(model)
    model = build_empty(config, attn_impl=attn_impl)
    use_eager_experts(model)
    _fill(model)
    return of(model)


def _symbols(shapes: list[tuple[int, ...]]) -> tuple | None:
    """One shape, with symbols for the dims that follow the batch and the sequence.

    None if a dim follows neither, or one after the first follows the batch, as in the last state of a recurrent network.

    `shapes` are those of a tensor in the passes that have it. A first dim of all tokens becomes two dims.
    """
    batches, sequences = zip(*SIZES, strict=True)
    tokens = tuple(batch * sequence for batch, sequence in SIZES)
    if len(shapes) < len(SIZES) or len({len(shape) for shape in shapes}) > 1:
        return None
    found: tuple = ()
    for dim, sizes in enumerate(zip(*shapes, strict=True)):
        known = {
            batches: (BATCH,),
            sequences: (SEQUENCE,),
            **({tokens: (BATCH, SEQUENCE)} if dim == 0 else {}),
        }
        if len(set(sizes)) > 1 and sizes not in known:
            return None
        found += (sizes[0],) if len(set(sizes)) == 1 else known[sizes]
    # Samples are put together along the first dim.
    return None if BATCH in found[1:] else found


def _fill(model: torch.nn.Module) -> None:
    """Give a model on the meta device random weights that take no memory, in place; tied ones stay tied. Buffers are zeros."""
    made: dict[int, torch.nn.Parameter] = {}
    generator = torch.Generator().manual_seed(0)

    def few(tensor: torch.Tensor) -> torch.Tensor:
        """Element (i, j, ...) is number i + j + ... of a vector."""
        numbers = torch.randn(sum(tensor.shape) + 1, generator=generator) * 0.02 + (tensor.ndim == 1)
        return numbers.as_strided(tensor.shape, (1,) * tensor.ndim)

    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                made.setdefault(id(parameter), torch.nn.Parameter(few(parameter)))
                module._parameters[name] = made[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.zeros((), dtype=buffer.dtype).expand(buffer.shape)


class TopkArguments(NamedTuple):
    """What `torch.topk` is called with."""

    input: torch.Tensor
    k: int
    dim: int = -1
    largest: bool = True
    sorted: bool = True
    out: Any = None


class CountsTopk(TorchFunctionMode):
    """A mode that numbers the calls of `torch.topk`, from 0, and remembers of each the scores and the indices that were chosen."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[Any]()  # of calls that have numbers
        self.seen: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __torch_function__(
        self,
        function: Function,
        types: Iterable[type],
        args: Given = (),
        kwargs: Named | None = None,
    ) -> Any:
        result = self.call(function, args, kwargs or {})
        if function in (torch.topk, torch.Tensor.topk):
            number, arguments = self.counts["topk"], TopkArguments(*args, **(kwargs or {}))
            self.counts["topk"] += 1
            result = self.see_topk(number, arguments, result)
            self.seen[number] = arguments.input, result.indices
        return result

    def call(self, function: Function, args: Given, kwargs: Named) -> Any:
        """What a function of torch returns."""
        return function(*args, **kwargs)

    def see_topk(self, number: int, arguments: TopkArguments, result: Any) -> Any:
        """What the call returns, given its `result`."""
        return result


class _Trace:
    """A forward and a backward pass over a batch of this size, and the tensors seen on the way."""

    def __init__(
        self, model: torch.nn.Module, base: str, vocab_size: int, batch: int, sequence: int, positions: bool
    ):
        self.tensors: dict[str, torch.Tensor] = {}  # kept alive, so that no storage is used twice
        self.inputs: dict[str, dict[str, str]] = {}
        self.backward: list[str] = []
        self.tables: list[str] = []
        self.owners: dict[str, str] = {}  # name -> its module
        self.calls: Counter[str] = Counter()
        self._seen: set[tuple[int, int]] = set()
        handles = []
        for name, module in watched(model, base):
            handles.append(
                module.register_forward_pre_hook(functools.partial(self._enter, name), with_kwargs=True)
            )
            handles.append(module.register_forward_hook(functools.partial(self._leave, name)))
        device = next(model.parameters()).device
        ids = torch.arange(batch * sequence, device=device).view(batch, sequence) % vocab_size
        own = torch.arange(sequence, device=device).repeat(batch, 1) if positions else None
        with CountsTopk() as self._topk, device, checkpoints.left_out():
            loss = (
                _loss_on_meta(model, ids, own)
                if device.type == "meta"
                else causal_lm_loss(model, ids, ids, own)
            )
        with_gradient = [tensor for tensor in self.tensors.values() if tensor.requires_grad]
        # of the outputs alone: gradients of the weights would take memory
        torch.autograd.grad(loss, with_gradient, allow_unused=True)
        for handle in handles:
            handle.remove()

    def _enter(self, module: str, _module: torch.nn.Module, arguments: tuple, options: dict) -> None:
        self.calls[module] += 1
        for place, tensor in [*enumerate(arguments), *options.items()] if self.calls[module] == 1 else ():
            if not isinstance(tensor, torch.Tensor) or storage(tensor) in self._seen:
                continue
            if tensor.requires_grad or self.chosen(tensor) is not None:
                number = len(self.inputs.setdefault(module, {}))
                self.inputs[module][str(place)] = f"{module}.input.{number}" if number else f"{module}.input"
                self._note(module, self.inputs[module][str(place)], tensor)

    def _leave(self, module: str, _module: torch.nn.Module, _arguments: object, output: object) -> None:
        tensors = named_outputs(module, output)
        for name, tensor in tensors if self.calls[module] == 1 else ():
            self._note(module, name, tensor)
        floats = [tensor for _, tensor in tensors if tensor.is_floating_point() or tensor.is_complex()]
        if floats and not any(tensor.requires_grad for tensor in floats):
            self.tables.append(module)

    def _note(self, module: str, name: str, tensor: torch.Tensor) -> None:
        self.tensors[name], self.owners[name] = tensor, module
        self._seen.add(storage(tensor))
        if tensor.requires_grad:
            tensor.register_hook(lambda _gradient: self.backward.append(name))

    def chosen(self, tensor: torch.Tensor) -> int | None:
        """The number of the call of topk that returned these indices."""
        indices = [storage(indices) for _, indices in self._topk.seen.values()]
        return indices.index(storage(tensor)) if storage(tensor) in indices else None

    def choices(self, outputs: dict[str, tuple]) -> dict[str, Choice]:
        """Name -> choice, of the captured tensors that are indices of topk, or logits of them where no module returns the indices."""
        # Of modules that return one tensor, the first has it.
        nodes = {
            tensor.grad_fn: name
            for name, tensor in reversed(self.tensors.items())
            if tensor.grad_fn and name in outputs
        }
        found = {}
        for name in outputs:
            call = self.chosen(self.tensors[name])
            if call is not None:
                scores = self._topk.seen[call][0]
                nearest = _nearest(scores.grad_fn, nodes)
                source = nearest[0] if len(nearest) == 1 else ""
                found[name] = Choice(call=call, width=scores.shape[-1], scores=source, number=0)
        known = {choice.call for choice in found.values()}
        # Of the same logits, a term of the loss may choose again, perhaps where softmax has rounded two scores to one: of those it takes either
        chosen_from = {choice.scores for choice in found.values()}
        for call, (scores, indices) in self._topk.seen.items():
            logits, width = _ranked(scores.grad_fn, nodes), scores.shape[-1]
            if call in known or logits is None or logits in chosen_from:
                continue
            if self.tensors[logits].shape[-1] == width:
                found[logits] = Choice(call=call, width=width, scores=logits, number=indices.shape[-1])
        return found

    def sources(self, outputs: dict[str, tuple]) -> dict[str, tuple[str, ...]]:
        """Name -> the captured tensors that it is directly computed from, by autograd's graph."""
        by_node: dict[Node | None, str] = {}
        found: dict[str, tuple[str, ...]] = {}
        for name in outputs:
            node = self.tensors[name].grad_fn
            if node in by_node:  # the same tensor under another name
                found[name] = (by_node[node],)
                continue
            nearest = _nearest(node, by_node)
            found[name] = tuple(dict.fromkeys(other for other in self.tensors if other in nearest))
            if node is not None:
                by_node[node] = name
        return found


def _loss_on_meta(
    model: torch.nn.Module, ids: torch.Tensor, position_ids: torch.Tensor | None
) -> torch.Tensor:
    """The loss, with a mask of four dims, which is taken as it is: without one transformers looks at the positions' values."""
    mask = torch.zeros(len(ids), 1, ids.shape[1], ids.shape[1])
    return causal_lm_loss(model, ids, ids, position_ids, attention_mask=mask)


def _ranked(node: Node | None, named: dict[Node, str]) -> str | None:
    """The named tensor whose elements have the order of those that a node computed."""
    while node is not None and node not in named:
        node = node.next_functions[0][0] if node.name() in IN_ORDER else None
    return None if node is None else named[node]


def _nearest(node: Node | None, named: dict) -> list[str]:
    """The named tensors that a node is directly computed from."""
    waiting: list[Node | None] = [node]
    passed: set[Node] = set()
    nearest: list[str] = []
    while waiting:
        here = waiting.pop()
        if here in named:
            nearest.append(named[here])
        elif here is not None and here not in passed:
            passed.add(here)
            waiting += [before for before, _ in here.next_functions]
    return nearest


def watched(model: torch.nn.Module, base: str) -> Iterator[tuple[str, torch.nn.Module]]:
    """The modules whose outputs are captured, by name. Those of the model and its base model are outputs of modules inside them."""
    return ((name, module) for name, module in model.named_modules() if name not in ("", base))


def named_outputs(module: str, output: object) -> list[tuple[str, torch.Tensor]]:
    """(name, tensor) of the outputs of a module: MODULE, and MODULE.1, ... for the other tensors of a tuple."""
    if isinstance(output, torch.Tensor):
        return [(module, output)]
    if type(output) is not tuple:
        return []
    tensors = [item for item in output if isinstance(item, torch.Tensor)]
    return [(f"{module}.{number}" if number else module, tensor) for number, tensor in enumerate(tensors)]


def storage(tensor: torch.Tensor) -> tuple[int, int]:
    """An identity that a tensor shares with its views in other shapes."""
    return tensor.untyped_storage()._cdata, tensor.numel()
