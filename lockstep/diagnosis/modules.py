"""What else a module computed, if its output is the first wrong tensor: from another input or weight, with another function or precision.

A linear layer, a norm, an activation function, a sum or a product is computed again from what the run captured, in float64. The right way
must give what the reference has. Then the wrong way that is nearest to the run is named, if it explains every wrong sample (ways.py).
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from lockstep.diagnosis.case import Case, describe
from lockstep.diagnosis.odd import MANY, wrong_elements
from lockstep.diagnosis.ways import PRECISION, Way, gives_the_right, nearest, right_tensors
from lockstep.verdict.result import Cause

LOW = {"bfloat16": torch.bfloat16, "float16": torch.float16}
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": torch.relu,
    "silu": functional.silu,
    "gelu": functional.gelu,
    "the tanh approximation of gelu": functools.partial(functional.gelu, approximate="tanh"),
    "gelu by a sigmoid": lambda x: x * torch.sigmoid(1.702 * x),
    "the square of relu": lambda x: torch.relu(x).square(),
    "tanh": torch.tanh,
    "a sigmoid": torch.sigmoid,
    "just a copy": torch.clone,
}
LARGEST_EPSILON = 0.1  # a larger one would say that the output is nearly zero
NEAR = 24  # captured tensors, about as many as a layer has
INPUT, SETTING = "another input", "module settings"
EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon")  # keys of a configuration


class Module(NamedTuple):
    """The right way to compute the output, from what the module is given; and further wrong ways."""

    compute: Callable[..., torch.Tensor]
    ways: Callable[[], Iterator[Way]]


def another_way(case: Case) -> Cause | None:
    """The output of a module is what another input, weight, function, epsilon or precision gives."""
    names = list(case.dump.layout.sources.get(case.path, ()))
    sources = right_tensors(case, [f"forward/{name}" for name in names])
    own, right = case.own(case.first), case.right(case.first)
    if not sources or own.numel() > MANY:
        return None
    is_right = (
        module for module in _modules(case, names, sources) if gives_the_right(case, module.compute(*sources))
    )
    module = next(is_right, None)
    wrong = _wrong_samples(case, own, right)
    if module is None or not bool(wrong.any()):
        return None

    def ways() -> Iterator[Way]:
        yield from module.ways()
        yield from _other_inputs(case, module, names, sources)

    way = nearest(case, own, right, wrong, ways())
    return None if way is None else Cause(way[0], f"{describe(case.path)} {way[1]}, as recomputed")


def _wrong_samples(case: Case, own: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return a mask of the samples that have a wrong element, of each tp rank by itself."""
    wrong, dim = wrong_elements(case, own, right), case.sharded(case.first).get("tp")
    shards = [wrong] if not dim else wrong.chunk(case.mesh.tp, dim)
    ones = [1] * (own.ndim - 1)
    return torch.cat([shard.flatten(1).any(1).view(-1, *ones).expand_as(shard) for shard in shards], dim or 1)


def _modules(case: Case, names: list[str], sources: list[torch.Tensor]) -> Iterator[Module]:
    """Yield what the module may be, by its weight and what it is given."""
    weight, module = case.weight_of(case.path), case.path
    if case.is_linear(module):
        yield _linear(case, sources[0])
    elif weight and len(case.dump.layout.parameters[weight]) == 1 and len(sources) == 1:
        yield from _norms(case, sources[0])
    elif len(sources) == 1:
        for function in ACTIVATIONS.values():
            yield Module(function, lambda: _activations(sources[0]))
    elif all(source.shape == sources[0].shape for source in sources):
        yield Module(lambda *given: sum(given[1:], given[0]), lambda: _other_sums(names, sources))
        yield Module(lambda *given: functools.reduce(torch.mul, given), lambda: iter(()))


def _other_inputs(case: Case, module: Module, names: list[str], sources: list[torch.Tensor]) -> Iterator[Way]:
    """Yield the output with a tensor that is captured shortly before or after: added, or in the place of one that it is computed from."""
    shapes = case.dump.layout.outputs
    order = list(shapes)
    here = order.index(case.path)
    for other in order[max(0, here - NEAR) : here + NEAR]:
        tensors = right_tensors(case, [f"forward/{other}"])
        if other == case.path or not tensors:
            continue
        if shapes[other] == shapes[case.path]:
            yield INPUT, f"has {describe(other)} added", module.compute(*sources) + tensors[0]
        for place, source in enumerate(names):
            if other not in names and shapes[other] == shapes[source]:
                given = [*sources[:place], *tensors, *sources[place + 1 :]]
                words = f"is computed from {describe(other)}, in the place of {describe(source)}"
                yield INPUT, words, module.compute(*given)


def _linear(case: Case, x: torch.Tensor) -> Module:
    name, bias_name = case.weight_of(case.path), f"{case.path}.bias"
    assert name is not None, "it is linear"
    weight, is_transposed = case.before(name), case.is_transposed(case.path)
    bias = case.before(bias_name) if bias_name in case.dump.layout.parameters else 0.0

    def compute(x: torch.Tensor, weight: torch.Tensor = weight) -> torch.Tensor:
        return x @ (weight if is_transposed else weight.T) + bias

    def ways() -> Iterator[Way]:
        yield from _earlier_weights(case, name, lambda old: compute(x, old))
        if case.options["precision"] == "fp32":
            for word, dtype in LOW.items():
                low_x, low_weight = x.to(dtype).double(), weight.to(dtype).double()
                for what, value in (
                    ("input and weight", compute(low_x, low_weight)),
                    ("input", compute(low_x)),
                    ("weight", compute(x, low_weight)),
                ):
                    yield PRECISION, f"is computed with its {what} rounded to {word}", value

    return Module(compute, ways)


def _norms(case: Case, x: torch.Tensor) -> Iterator[Module]:
    """Yield a norm as of RMSNorm, and one as of LayerNorm, which subtracts the mean."""
    name, bias_name = case.weight_of(case.path), f"{case.path}.bias"
    assert name is not None, "it is a norm"
    bias = case.before(bias_name) if bias_name in case.dump.layout.parameters else None
    architecture = case.dump.run["architecture"]
    eps = next((architecture[key] for key in EPSILONS if key in architecture), 0.0)
    shape = case.own(case.first).shape
    for is_centered in (False, True):
        norm = Norm(case.before(name), bias, eps, is_centered, shape)
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

    yield from _earlier_weights(case, name, lambda old: dataclasses.replace(norm, weight=old)(x))
    eps, weight = _epsilon(case, norm, x), norm.weight
    if 0 <= eps <= LARGEST_EPSILON:
        yield way(SETTING, f"has an epsilon of {eps:.2g}, not {norm.eps:.2g}", eps=eps)
    yield way(SETTING, "is not multiplied with its weight", weight=torch.ones_like(weight))
    yield way(SETTING, "is multiplied with 1 + its weight", weight=1 + weight)
    words = "has no mean subtracted" if norm.is_centered else "has the mean subtracted"
    yield way(SETTING, words, is_centered=not norm.is_centered)
    if case.mesh.tp > 1 and len(weight) % case.mesh.tp == 0:
        yield way("tp reduction missing", "is normed over each tp rank's features alone", parts=case.mesh.tp)
    if case.options["precision"] == "fp32":
        for word, dtype in LOW.items():
            yield way(PRECISION, f"is computed in {word}", dtype=dtype)
            yield way(PRECISION, f"has its variance rounded to {word}", variance_dtype=dtype)
            words = f"has its variance computed in {word}"
            yield way(PRECISION, words, squares_dtype=dtype, variance_dtype=dtype)
            yield way(
                PRECISION, f"is computed with its weight rounded to {word}", weight=weight.to(dtype).double()
            )
            yield PRECISION, f"is computed with its input rounded to {word}", norm(x.to(dtype).double())


def _epsilon(case: Case, norm: Norm, x: torch.Tensor) -> float:
    """Return the epsilon that the wrong rows show: the output is sqrt(variance / (variance + epsilon)) times the one without."""
    own, (_, variance) = case.own(case.first), norm.moments(x)
    without = dataclasses.replace(norm, eps=0.0, bias=None)(x)
    own = own if norm.bias is None else own - norm.bias
    own, without = (tensor.reshape(-1, len(norm.weight)) for tensor in (own, without))
    ratio = (own * without).sum(-1) / without.square().sum(-1)
    wrong = wrong_elements(case, case.own(case.first), case.right(case.first)).reshape(own.shape).any(-1)
    shown = variance.flatten() * (ratio**-2 - 1)
    return max(0.0, float(shown[wrong].median())) if bool(wrong.any()) else norm.eps


def _earlier_weights(case: Case, name: str, compute: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[Way]:
    for step in range(1, case.step):
        yield (
            "weights",
            f"is computed with {name} as it was before step {step}",
            compute(case.before(name, step)),
        )


def _activations(x: torch.Tensor) -> Iterator[Way]:
    for name, function in ACTIVATIONS.items():
        yield "activation function", f"is {name} of its input", function(x)


def _other_sums(names: list[str], sources: list[torch.Tensor]) -> Iterator[Way]:
    total = sum(sources[1:], sources[0])
    for name, source in zip(names, sources, strict=True):
        yield INPUT, f"lacks {describe(name)}", total - source
