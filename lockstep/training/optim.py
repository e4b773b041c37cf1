"""The optimizer, with one meaning in all strategies: torch AdamW or SGD over the same decay groups."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from lockstep.ground import user_file
from lockstep.ground.blocks import Held
from lockstep.ground.errors import TrainingFailure, UserError, first_line
from lockstep.plan.config import BETAS, EPS, OPTIMIZERS

if TYPE_CHECKING:
    from lockstep.training.strategy import Optimizer


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


OPTION = "--optimizer"


class Several:
    """Optimizers of different parameters, stepped one after the other."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]):
        self.optimizers = optimizers

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @property
    def state(self) -> dict[torch.Tensor, dict[str, Any]]:
        return {key: state for optimizer in self.optimizers for key, state in optimizer.state.items()}

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()


AnyOptimizer = torch.optim.Optimizer | Several
Named = list[tuple[str, torch.nn.Parameter]]


def named_trained(model: torch.nn.Module) -> Named:
    """(name, parameter) of the parameters that are trained."""
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]


def trained(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [parameter for _, parameter in named_trained(model)]


def direction(first: Any, second: Any, step: float, eps: float = EPS) -> Any:
    """AdamW's direction, which is multiplied with the learning rate, from the two moments after `step` (from 1); numpy or torch.

    (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)
    """
    b1, b2 = BETAS
    return first / (1 - b1**step) / ((second / (1 - b2**step)) ** 0.5 + eps)


def build_optimizer(
    groups: list[dict[str, Any]], *, optimizer: str, learning_rate: float, named: Named | None = None
) -> AnyOptimizer:
    """The optimizer that --optimizer asks for.

    adamw is AdamW (decoupled decay, Loshchilov and Hutter 2019, arXiv 1711.05101), fused; sgd has no momentum and is not fused: torch's
    fused SGD cannot work on DTensors (docs/findings.md). Another name is a class of torch.optim with its own defaults, and
    path/to/file.py:FUNCTION is called with the `named` parameters, learning_rate and weight_decay, and returns an optimizer or a list of
    them. Raises UserError for an optimizer that cannot be made, or does not hold all parameters.
    """
    if optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=learning_rate, betas=BETAS, eps=EPS, fused=True)
    if optimizer == "sgd":
        return torch.optim.SGD(groups, lr=learning_rate, foreach=False)
    if named is None:
        raise UserError(f"{OPTION} {optimizer}: this strategy steps adamw and sgd alone; choose one of them")
    try:
        if user_file.is_named(optimizer):
            decay = max((group["weight_decay"] for group in groups), default=0.0)
            result = user_file.load(optimizer, OPTION)(named, learning_rate=learning_rate, weight_decay=decay)
        else:
            result = getattr(torch.optim, optimizer)(groups, lr=learning_rate)
    except UserError:
        raise
    except Exception as error:  # noqa: BLE001 - torch, or a user's function, may raise anything
        raise UserError(
            f"{OPTION} {optimizer}: it cannot be made ({first_line(error)}); docs/models.md says how"
        ) from error
    optimizers = result if isinstance(result, list) else [result]
    if not optimizers or not all(isinstance(member, torch.optim.Optimizer) for member in optimizers):
        raise UserError(
            f"{OPTION} {optimizer}: the function returned no torch.optim.Optimizer, and no list of them"
        )
    held = {id(p) for member in optimizers for group in member.param_groups for p in group["params"]}
    missing = next((name for name, parameter in named if id(parameter) not in held), None)
    if missing:
        raise UserError(f"{OPTION} {optimizer}: it does not hold {missing}, which would never be trained")
    return optimizers[0] if len(optimizers) == 1 else Several(optimizers)


def require_known(optimizer: str) -> None:
    """Raise UserError unless --optimizer names something."""
    if optimizer in OPTIMIZERS:
        return
    if user_file.is_named(optimizer):
        user_file.load(optimizer, OPTION)
    elif not (
        isinstance(optimizer_class := getattr(torch.optim, optimizer, None), type)
        and issubclass(optimizer_class, torch.optim.Optimizer)
    ):
        raise UserError(
            f"{OPTION} {optimizer}: not {', '.join(OPTIMIZERS)}, no class of torch.optim, and not path/to/file.py:FUNCTION; choose one of these"
        )


def set_rate(optimizer: "Optimizer", rate: float, learning_rate: float) -> None:
    """Set the learning rate of a step. Groups whose rate is not --learning_rate keep their proportion to it."""
    for group in optimizer.param_groups:
        initial = group.setdefault("initial_lr", group["lr"])
        group["lr"] = rate if initial == learning_rate else initial * (rate / learning_rate)


def require_supported(optimizer: AnyOptimizer) -> None:
    """Raise TrainingFailure for an optimizer that is neither AdamW nor SGD without momentum. Call it after a step, when there is state."""
    kind, has_momentum = type(optimizer), any(group.get("momentum") for group in optimizer.param_groups)
    is_known = isinstance(optimizer, torch.optim.Adam | torch.optim.SGD) or is_own_adam(optimizer)
    if not is_known or has_momentum:
        raise TrainingFailure(
            f"the optimizer is {kind.__name__}{' with momentum' if has_momentum else ''}, and {OPTION} says adamw or sgd; give the optimizer "
            f"itself: {OPTION} path/to/file.py:FUNCTION"
        )


def is_own_adam(optimizer: AnyOptimizer) -> bool:
    """Whether an optimizer that is not torch's keeps Adam's two moments of every parameter."""
    states = [state for state in optimizer.state.values() if state]
    is_own = not type(optimizer).__module__.startswith("torch.optim")
    return is_own and bool(states) and all({"exp_avg", "exp_avg_sq"} <= set(state) for state in states)


def state_kinds(optimizer: AnyOptimizer) -> list[str]:
    """The names of the tensors that the optimizer keeps of parameters, sorted. Scalars, such as the step, are left out."""
    return sorted(
        {
            key
            for state in optimizer.state.values()
            for key, value in state.items()
            if isinstance(value, torch.Tensor) and value.ndim > 0
        }
    )


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
    """The parameter in float32 at least: in bfloat16 a step of a tenth of a percent would be rounded away."""
    return parameter.detach().to(torch.promote_types(parameter.dtype, torch.float32))


def gradient_of(parameter: torch.Tensor, name: str = "") -> torch.Tensor:
    """The gradient of a parameter. Raises TrainingFailure if it has none: the loss does not depend on it."""
    if parameter.grad is None:
        raise TrainingFailure(
            f"{name or f'a parameter of shape {tuple(parameter.shape)}'} has no gradient: the loss does not depend on it; freeze it with "
            "requires_grad_(False), or take it out of the model"
        )
    return parameter.grad


def held_tensors(
    model: torch.nn.Module,
    optimizer: AnyOptimizer,
    kind: str,
    average: WeightAverage | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of every parameter: "parameter", "gradient", "average", or what the optimizer keeps under this name.

    Parameters without such a tensor are left out.
    """
    if kind == "average":
        yield from average.averages.items() if average is not None else ()
        return
    states = optimizer.state
    for name, parameter in model.named_parameters():
        if kind == "parameter":
            yield name, parameter.detach()
        elif kind == "gradient":
            if parameter.requires_grad:
                yield name, gradient_of(parameter, name)
        elif kind in states.get(parameter, {}):
            yield name, states[parameter][kind]


def held_whole(
    model: torch.nn.Module,
    optimizer: AnyOptimizer,
    kind: str,
    average: WeightAverage | None = None,
) -> Held:
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
