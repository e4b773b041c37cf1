"""What a recording has of an optimizer: its class, attributes and settings, and what it keeps of each parameter."""

from collections.abc import Iterable
from typing import Any

import torch

from lockstep.recorder import tree, wrapped

PLAIN = (bool, int, float, str, type(None))
SCALED = {"grad_scale", "found_inf"}  # of a GradScaler: recorded gradients are divided by it


def clip_by(bound: float, norm: float) -> float:
    """What `clip_grad_norm_` multiplies the gradients with."""
    return min(1.0, bound / (norm + 1e-6))


def bare() -> dict[str, Any]:
    """The attributes that every optimizer has."""
    return vars(torch.optim.Optimizer([torch.empty(0)], {}))


def described(
    optimizer: torch.optim.Optimizer, model: torch.nn.Module, number: int
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """(what builds an optimizer again, as JSON; the tensors that it refers to).

    These are state/KEY/NAME, which is kept of the model's parameter NAME, and attribute/KEY/NUMBER, of optimizer NUMBER of the step itself.
    """
    names = {id(one): name for name, one in wrapped.named_parameters(model).items()}
    describing = tree.Describing(model)
    describing.packages.add(tree.package_of(type(optimizer).__module__))
    describing.tensors |= names
    common = (bare().keys() | SCALED) - {"defaults"}
    own = {key: value for key, value in vars(optimizer).items() if key not in common}
    said: dict[str, Any] = {
        "class": tree.name_of(type(optimizer)),
        "attributes": describing.values(own, ""),
        "groups": list(_groups(optimizer, describing, names)),
        "state": {},
        "number": number,
    }
    of_all = {
        f"group {place}.{key}": one
        for place, group in enumerate(said["groups"])
        for key, one in group.items()
        if key != "lr"
    }  # which a schedule sets
    of_all = _numbers({**own, **of_all}) | describing.attributes
    tensors = {f"attribute/{key}/{number}": tensor for key, tensor in of_all.items()}
    for parameter, state in optimizer.state.items():
        name = names.get(id(parameter))
        if name is None:
            continue
        said["state"][name], kept = _state(state, describing)
        if said["class"].startswith("deepspeed.") and "step" in state:
            said["state"][name]["step"] = {"attribute": "step"}
            kept["step"] = torch.tensor(float(_steps(optimizer)))
        tensors |= {f"state/{key}/{name}": one for key, one in kept.items()}
    return said, tensors


def _groups(
    optimizer: torch.optim.Optimizer, describing: tree.Describing, names: dict[int, str]
) -> Iterable[dict[str, Any]]:
    """The settings of each group, and the names of its parameters. DeepSpeed's Adams have a setting beside the groups."""
    of_all = {key: bool(value) for key, value in vars(optimizer).items() if key == "adam_w_mode"}
    for number, group in enumerate(optimizer.param_groups):
        values = {
            key: float(value) if isinstance(value, torch.Tensor) and value.numel() == 1 else value
            for key, value in group.items()
            if key != "params"
        }
        held = [names.get(id(one)) for one in group["params"]]
        yield {**of_all, **describing.values(values, f".group {number}"), "params": held}


def _steps(optimizer: torch.optim.Optimizer) -> int:
    """DeepSpeed's FusedAdam counts in what it keeps of the last parameter alone."""
    return max(state["step"] for state in optimizer.state.values())


def tensors_of(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """What is kept of a parameter, by the KEY that it is recorded by: tensors, also in lists and dicts, and numbers."""
    return _state(state, tree.Describing(torch.nn.Module()))[1]


def _state(
    state: dict[str, Any], describing: tree.Describing
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    describing.attributes, describing.objects = {}, {}
    said = describing.values(state, "")
    return said, _numbers(state) | describing.attributes


def _numbers(values: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {
        key: torch.tensor(float(one), dtype=torch.float64)
        for key, one in values.items()
        if isinstance(one, (int, float))
    }
