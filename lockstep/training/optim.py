"""The optimizer, with one meaning in all strategies: torch AdamW or SGD over the same decay groups."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from lockstep.config import BETAS, EPS
from lockstep.errors import TrainingFailure


def decays(ndim: int) -> bool:
    """Weight decay acts on matrices; norms and biases (one dim) are left alone."""
    return ndim >= 2


def parameter_groups(parameters: Iterable[torch.nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Two groups, decayed and not, in the order of the parameters; an empty group is left out."""
    parameters = list(parameters)
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if decays(p.ndim)], "weight_decay": weight_decay},
        {"params": [p for p in parameters if not decays(p.ndim)], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def build_optimizer(
    groups: list[dict[str, Any]], *, optimizer: str, learning_rate: float
) -> torch.optim.Optimizer:
    """AdamW (decoupled decay, Loshchilov and Hutter 2019, arXiv 1711.05101), fused, or SGD without momentum.

    SGD is not fused: torch's fused SGD cannot work on DTensors (docs/findings.md).
    """
    if optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=learning_rate, betas=BETAS, eps=EPS, fused=True)
    return torch.optim.SGD(groups, lr=learning_rate, foreach=False)


def require_supported(optimizer: torch.optim.Optimizer) -> None:
    """Raise TrainingFailure for an optimizer whose update the reference does not follow. Call it after a step, when there is state."""
    kind, momentum = type(optimizer), any(group.get("momentum") for group in optimizer.param_groups)
    known = isinstance(optimizer, torch.optim.Adam | torch.optim.SGD) or is_own_adam(optimizer)
    if not known or momentum:
        raise TrainingFailure(
            f"the optimizer is {kind.__name__}{' with momentum' if momentum else ''}; AdamW, and SGD without momentum, are supported: leave it "
            "to --optimizer"
        )


def is_own_adam(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer that is not torch's keeps Adam's two moments of every parameter."""
    states = [state for state in optimizer.state.values() if state]
    ours = not type(optimizer).__module__.startswith("torch.optim")
    return ours and bool(states) and all({"exp_avg", "exp_avg_sq"} <= set(state) for state in states)


def keeps(optimizer: torch.optim.Optimizer, kind: str) -> bool:
    """Whether the optimizer has this kind of tensor for every parameter: SGD without momentum has no moments."""
    if kind in ("parameter", "gradient"):
        return True
    require_supported(optimizer)
    return not isinstance(optimizer, torch.optim.SGD)


class WeightAverage:
    """The exponential moving average of a model's weights: after each update, decay x average + (1 - decay) x weights, in float32 at least.

    It begins with the weights themselves. Every rank averages its own shards, because the average is elementwise.
    """

    def __init__(self, model: torch.nn.Module, decay: float):
        self.decay = decay
        self.parameters = dict(model.named_parameters())
        self.averages = {name: _wide(parameter).clone() for name, parameter in self.parameters.items()}

    @torch.no_grad()
    def update(self) -> None:
        for name, average in self.averages.items():
            average.lerp_(_wide(self.parameters[name]), 1 - self.decay)


def _wide(parameter: torch.Tensor) -> torch.Tensor:
    """In bfloat16 a step of a tenth of a percent would be rounded away."""
    return parameter.detach().to(torch.promote_types(parameter.dtype, torch.float32))


def gradient_of(parameter: torch.Tensor) -> torch.Tensor:
    """The gradient of a parameter. Raises ValueError if it has none: the loss does not depend on it."""
    if parameter.grad is None:
        raise ValueError(f"a parameter of shape {tuple(parameter.shape)} has no gradient")
    return parameter.grad


def held_tensors(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    kind: str,
    average: WeightAverage | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of every parameter: "parameter", "gradient", "average", or the moment "exp_avg" or "exp_avg_sq".

    SGD keeps no moments and yields none, and so does a run without an average. A parameter that the optimizer has never stepped has none.
    """
    if kind == "average":
        yield from average.averages.items() if average is not None else ()
        return
    if not keeps(optimizer, kind):
        return
    for name, parameter in model.named_parameters():
        if kind == "parameter":
            yield name, parameter.detach()
        elif kind == "gradient":
            yield name, gradient_of(parameter)
        elif kind in optimizer.state.get(parameter, {}):
            yield name, optimizer.state[parameter][kind]


def held_whole(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    kind: str,
    average: WeightAverage | None = None,
) -> Iterator[tuple[str, torch.Tensor, tuple[int, ...], tuple[int, ...]]]:
    """What `Strategy.held` yields if every rank holds whole tensors."""
    for name, tensor in held_tensors(model, optimizer, kind, average):
        yield name, tensor, tuple(tensor.shape), (0,) * tensor.ndim


def total_norm(gradients: Iterable[torch.Tensor]) -> torch.Tensor:
    """The 2-norm over all gradients together, as a float64 scalar (a DTensor if they are).

    Summed in float64: torch's float32 norm on the CPU is off by 1e-5 for 10^6 elements and by 1 % for 10^8
    (docs/findings.md), which is more than two correct strategies differ by.
    """
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float64) for gradient in gradients]
    return torch.linalg.vector_norm(torch.stack(norms))
