"""What else a module computed, if its output is the first wrong tensor: from another input or weight, with another function or precision.

A linear layer, a norm, an activation function, a sum or a product is computed again from what the run captured, in float64. The right way
must give what the reference has. Then the wrong way that is nearest to the run is named, if it explains every wrong sample (ways.py).
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from lockstep.diagnosis import evidence
from lockstep.diagnosis.case import Case, describe
from lockstep.diagnosis.odd import wrong_elements
from lockstep.diagnosis.ways import (
    PRECISION,
    Way,
    gives_the_right,
    low_dtypes,
    nearest,
    right_tensors,
    wrong_parts,
)
from lockstep.dumps.layout import SEQUENCE
from lockstep.verdict.result import Cause

COPY = "just a copy"
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": torch.relu,
    "silu": functional.silu,
    "gelu": functional.gelu,
    "the tanh approximation of gelu": functools.partial(functional.gelu, approximate="tanh"),
    "gelu by a sigmoid": lambda x: x * torch.sigmoid(1.702 * x),
    "the square of relu": lambda x: torch.relu(x).square(),
    "tanh": torch.tanh,
    "a sigmoid": torch.sigmoid,
    COPY: torch.clone,
}
MOST = 1 << 26  # elements of an output that is computed again: 512 MiB
LARGEST_EPSILON = 0.1  # beyond, the output is nearly zero, which has other causes
NEAR = 24  # captured tensors, about as many as a layer has
INPUTS, SETTING = "module inputs", "module settings"
EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon")  # keys of a configuration


class Module(NamedTuple):
    """The right way to compute the output, from what the module is given; and further wrong ways."""

    compute: Callable[..., torch.Tensor]
    ways: Callable[[], Iterable[Way]]


def another_way(case: Case) -> Cause | None:
    """The output of a module is what another input, weight, function, epsilon or precision gives."""
    names = list(case.dump.layout.sources.get(case.path, ()))
    if not names or math.prod(case.entry["tensors"][case.first]["shape"]) > MOST:
        return None
    sources = right_tensors(case, [f"forward/{name}" for name in names])
    own, right = case.own(case.first), case.right(case.first)
    if not sources or own.ndim < 2 or own.shape[0] != sources[0].shape[0]:
        return None
    outputs = ((module, module.compute(*sources)) for module in _modules(case, names, sources, own.shape))
    module, again = next(
        ((one, it) for one, it in outputs if gives_the_right(case, it, right)), (None, right)
    )
    wrong = _wrong_parts(case, own, right)
    if module is None or not bool(wrong.any()):
        return None

    def ways() -> Iterator[Way]:
        yield from module.ways()
        yield from _other_inputs(case, module, names, sources, again)

    way = nearest(case, own, right, again, wrong, ways())
    return None if way is None else Cause(way[0], f"{describe(case.path)} {way[1]}, as recomputed")


def _wrong_parts(case: Case, own: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return a mask of what is wrong, by sample, by the cp rank that has a position, and by tp rank where a dim is cut over tp."""
    groups = [(0, torch.arange(len(own)))]
    if case.pieces and case.dump.layout.outputs[case.path][1] == SEQUENCE:
        groups.append((1, case.cp_rank_of(own.shape[1])))
    dim = case.sharded(case.first).get("tp", 0)
    if dim not in (place for place, _ in groups):
        size = own.shape[dim]
        groups.append((dim, torch.arange(size) // -(-size // case.mesh.tp)))  # as torch.chunk cuts
    return wrong_parts(wrong_elements(case, own, right), groups)


def _modules(
    case: Case, names: list[str], sources: list[torch.Tensor], shape: torch.Size
) -> Iterator[Module]:
    """Yield what the module may be, by its weight and by what it is given. `shape` is that of its output."""
    weight, x = case.weight_of(case.path), sources[0]
    if weight is not None:
        size = case.dump.layout.parameters[weight]
        if case.is_linear(case.path):
            num_in, num_out = size if case.is_transposed(case.path) else reversed(size)
            if (num_in, num_out) == (x.shape[-1], shape[-1]):
                yield _linear(case, x)
        elif len(size) == len(sources) == 1 and x.numel() == shape.numel() and x.shape[-1] % size[0] == 0:
            yield from _norms(case, x)
    elif all(source.shape == shape for source in sources):
        if len(sources) == 1:
            for name, function in ACTIVATIONS.items():
                # A module that returns what another one does, as a block does, is no activation function.
                yield Module(function, functools.partial(_activations, x) if name != COPY else tuple)
        else:
            yield Module(lambda *given: sum(given[1:], given[0]), lambda: _other_sums(names, sources))
            yield Module(lambda *given: functools.reduce(torch.mul, given), tuple)


def _other_inputs(
    case: Case, module: Module, names: list[str], sources: list[torch.Tensor], output: torch.Tensor
) -> Iterator[Way]:
    """Yield the output with another input, and with another tensor added. It is one that is captured shortly before or after."""
    shapes = case.dump.layout.outputs
    order = list(shapes)
    here = order.index(case.path)
    for other in order[max(0, here - NEAR) : here + NEAR]:
        is_added = shapes[other] == shapes[case.path]
        places = [
            place for place, name in enumerate(names) if shapes[name] == shapes[other] and other not in names
        ]
        tensors = right_tensors(case, [f"forward/{other}"]) if is_added or places else []
        if other == case.path or not tensors:
            continue
        if is_added:
            yield INPUTS, f"has {describe(other)} added", output + tensors[0]
        for place in places:
            given = [*sources[:place], *tensors, *sources[place + 1 :]]
            words = f"is computed from {describe(other)}, in the place of {describe(names[place])}"
            yield INPUTS, words, module.compute(*given)


def _linear(case: Case, x: torch.Tensor) -> Module:
    name, bias_name = case.weight_of(case.path), f"{case.path}.bias"
    assert name is not None, "it is linear"
    weight, is_transposed = case.before(name), case.is_transposed(case.path)
    bias = case.before(bias_name) if bias_name in case.dump.layout.parameters else 0.0

    def compute(x: torch.Tensor, weight: torch.Tensor = weight) -> torch.Tensor:
        return x @ (weight if is_transposed else weight.T) + bias

    def ways() -> Iterator[Way]:
        yield from _other_weights(case, name, lambda other: compute(x, other))
        if case.options["precision"] == "fp32":
            for word, low in low_dtypes(x, weight).items():
                low_x, low_weight = low(x), low(weight)
                changed = [
                    what
                    for what, a, b in (("input", x, low_x), ("weight", weight, low_weight))
                    if not torch.equal(a, b)
                ]
                operands = {
                    "input": (low_x, weight),
                    "weight": (x, low_weight),
                    "input and weight": (low_x, low_weight),
                }
                for what in dict.fromkeys([*changed, " and ".join(changed)] if changed else []):
                    value = compute(*operands[what])
                    yield PRECISION, f"is computed with its {what} rounded to {word}", value

    return Module(compute, ways)


def _norms(case: Case, x: torch.Tensor) -> Iterator[Module]:
    """Yield a norm as of RMSNorm, and one as of LayerNorm, which subtracts the mean."""
    name, bias_name = case.weight_of(case.path), f"{case.path}.bias"
    assert name is not None, "it is a norm"
    bias = case.before(bias_name) if bias_name in case.dump.layout.parameters else None
    architecture = case.dump.run["architecture"]
    known = [architecture[key] for key in EPSILONS if architecture.get(key) is not None]
    right = case.right(case.first)
    for is_centered in (False, True):
        norm = Norm(case.before(name), bias, 0.0, is_centered, right.shape)
        eps = known[0] if known else _epsilon(norm, x, right, torch.ones_like(right, dtype=torch.bool))
        norm = dataclasses.replace(norm, eps=eps)
        yield Module(norm, functools.partial(_other_norms, case, name, norm, x))


@dataclasses.dataclass(frozen=True)
class Norm:
    """y = (x - mean) / sqrt(variance + eps) weight + bias, or without a mean and a bias. Calling it computes this."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    eps: float
    is_centered: bool
    shape: torch.Size  # of the output
    parts: int = 1  # of the features, each of which is normed by itself
    dtype: torch.dtype = torch.float64  # of all intermediate results
    squares_dtype: torch.dtype = torch.float64
    variance_dtype: torch.dtype = torch.float64

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x, variance = self.moments(x)
        normed = (x * (variance + self.eps).rsqrt()).reshape(self.shape) * self.weight.to(self.dtype)
        return normed.double() + (0.0 if self.bias is None else self.bias)

    def moments(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the input with its features in the last dim, less their mean, and its variance."""
        x = x.unflatten(-1, (-1, len(self.weight) // self.parts)).to(self.dtype)
        x = x - x.mean(-1, keepdim=True) if self.is_centered else x
        squares = x.to(self.squares_dtype).square().to(self.dtype)
        return x, squares.mean(-1, keepdim=True).to(self.variance_dtype).to(self.dtype)


def _other_norms(case: Case, name: str, norm: Norm, x: torch.Tensor) -> Iterator[Way]:
    def way(cause: str, words: str, **changes: Any) -> Way:
        return cause, words, dataclasses.replace(norm, **changes)(x)

    yield from _other_weights(case, name, lambda other: dataclasses.replace(norm, weight=other)(x))
    own, weight = case.own(case.first), norm.weight
    eps = _epsilon(norm, x, own, wrong_elements(case, own, case.right(case.first)))
    if 0 <= eps <= LARGEST_EPSILON:
        yield way(SETTING, f"has an epsilon of {eps:.2g}, not {norm.eps:.2g}", eps=eps)
    twice = norm(dataclasses.replace(norm, weight=torch.ones_like(weight), bias=None)(x).reshape(x.shape))
    yield SETTING, "is that of an input that has been normed already", twice
    yield way(SETTING, "is not multiplied with its weight", weight=torch.ones_like(weight))
    yield way(SETTING, "is multiplied with 1 + its weight", weight=1 + weight)
    words = "has no mean subtracted" if norm.is_centered else "has the mean subtracted"
    yield way(SETTING, words, is_centered=not norm.is_centered)
    tp = case.mesh.tp
    if tp > 1 and len(weight) % tp == 0:
        # Each rank has some of the features, or each has all of them.
        is_cut = case.sharded(case.first).get("tp") == own.ndim - 1
        name, words = ("tp reduction missing", "each tp rank's") if is_cut else (SETTING, f"{tp} groups of")
        yield way(name, f"is normed over {words} features alone", parts=tp)
    if case.options["precision"] == "fp32":
        for word, dtype in evidence.SIXTEEN_BITS.items():
            yield way(PRECISION, f"is computed in {word}", dtype=dtype)
            yield way(PRECISION, f"has its variance rounded to {word}", variance_dtype=dtype)
            words = f"has its variance computed in {word}"
            yield way(PRECISION, words, squares_dtype=dtype, variance_dtype=dtype)
            yield way(
                PRECISION, f"is computed with its weight rounded to {word}", weight=weight.to(dtype).double()
            )
            yield PRECISION, f"is computed with its input rounded to {word}", norm(x.to(dtype).double())


def _epsilon(norm: Norm, x: torch.Tensor, output: torch.Tensor, chosen: torch.Tensor) -> float:
    """Return the epsilon that an output shows where it is `chosen`: without one, it is sqrt((variance + epsilon) / variance) times as large."""
    _, variance = norm.moments(x)
    without = dataclasses.replace(norm, eps=0.0, bias=None)(x)
    output = output if norm.bias is None else output - norm.bias
    output, without, chosen = (tensor.reshape(-1, len(norm.weight)) for tensor in (output, without, chosen))
    ratio = (output * without).sum(-1) / without.square().sum(-1)
    shown = (variance.flatten() * (ratio**-2 - 1))[chosen.any(-1)]
    return max(0.0, float(shown.median())) if len(shown) else norm.eps


def _other_weights(case: Case, name: str, compute: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[Way]:
    """Yield the output with the weight as it was before an earlier step, and with those of the same shape in this layer and its neighbours."""
    layer, shapes = case.names.layer_of(name), case.dump.layout.parameters
    for other in shapes:
        is_near = layer >= 0 and abs(case.names.layer_of(other) - layer) <= 1
        if other != name and is_near and shapes[other] == shapes[name]:
            yield "weights", f"is computed with {other}", compute(case.before(other))
    for step in range(1, case.step):
        output = compute(case.before(name, step))
        yield "weights", f"is computed with {name} as it was before step {step}", output


def _activations(x: torch.Tensor) -> Iterator[Way]:
    for name, function in ACTIVATIONS.items():
        yield "activation function", f"is {name} of its input", function(x)


def _other_sums(names: list[str], sources: list[torch.Tensor]) -> Iterator[Way]:
    total = sum(sources[1:], sources[0])
    for name, source in zip(names, sources, strict=True):
        yield INPUTS, f"lacks {describe(name)}", total - source
