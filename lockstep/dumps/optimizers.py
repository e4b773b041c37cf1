"""What a recording has of an optimizer: its settings, and what it keeps of each parameter."""

from collections.abc import Iterator
from typing import Any

import torch

PLAIN = (bool, int, float, str, type(None))


def clip_by(bound: float, norm: float) -> float:
    """What `clip_grad_norm_` multiplies the gradients with."""
    return min(1.0, bound / (norm + 1e-6))


def settings_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The plain values of each group of parameters. DeepSpeed's Adams have one beside the groups."""
    of_all = {key: bool(value) for key, value in vars(optimizer).items() if key == "adam_w_mode"}
    found = []
    for group in optimizer.param_groups:
        said = {key: value for key, value in group.items() if key != "params" and _is_plain(value)}
        said |= {key: float(value) for key, value in group.items() if isinstance(value, torch.Tensor)}
        found.append({**of_all, **said})
    return found


def kind_of(optimizer: torch.optim.Optimizer) -> str:
    """Where its class is found: "module:NAME"."""
    kind = type(optimizer)
    return f"{kind.__module__}:{kind.__qualname__}"


def state_of(optimizer: torch.optim.Optimizer, names: dict[int, str]) -> Iterator[tuple[str, torch.Tensor]]:
    """state/KEY/NAME -> what an optimizer keeps of the model's parameters; `names` are theirs by id."""
    for parameter, state in optimizer.state.items():
        name = names.get(id(parameter))
        for key, value in state.items() if name is not None else ():
            if isinstance(value, torch.Tensor):
                yield f"state/{key}/{name}", value
            elif key == "step":
                yield f"state/{key}/{name}", torch.tensor(float(_steps(optimizer)))


def _steps(optimizer: torch.optim.Optimizer) -> int:
    """DeepSpeed's FusedAdam counts in what it keeps of the last parameter alone."""
    return max(state["step"] for state in optimizer.state.values())


def _is_plain(value: Any) -> bool:
    return isinstance(value, PLAIN) or (
        isinstance(value, (tuple, list)) and all(isinstance(one, PLAIN) for one in value)
    )
