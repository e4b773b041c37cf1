"""What is recorded of an optimizer: its class, attributes, groups of parameters and state."""

from collections.abc import Iterable
from typing import Any

import torch

from lockstep.recorder import tree, wrapped
from lockstep.recorder.allowed import package_of
from lockstep.recorder.names import name_of

# Attributes that a GradScaler sets. They are left out, as recorded gradients are divided by the scale.
SCALED = {"grad_scale", "found_inf"}


def clip_by(bound: float, norm: float) -> float:
    """Return the factor by which `clip_grad_norm_` multiplies gradients."""
    return min(1.0, bound / (norm + 1e-6))


def bare() -> dict[str, Any]:
    """Return the attributes that every optimizer has."""
    return vars(torch.optim.Optimizer([torch.empty(0)], {}))


def described(
    optimizer: torch.optim.Optimizer, model: torch.nn.Module, number: int
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Describe an optimizer. Return (what it can be built again from, as JSON; the tensors that this refers to).

    `number` says which optimizer of the step it is. The tensors are state/KEY/NAME, which it keeps of the model's
    parameter NAME, and attribute/KEY/NUMBER, which are its own.
    """
    names = {id(parameter): name for name, parameter in wrapped.named_parameters(model).items()}
    describing = tree.Describing(model)
    describing.packages.add(package_of(type(optimizer).__module__))
    describing.tensors |= names
    common = (bare().keys() | SCALED) - {"defaults"}
    attributes = {key: value for key, value in vars(optimizer).items() if key not in common}
    description: dict[str, Any] = {
        "class": name_of(type(optimizer)),
        "attributes": describing.values(attributes, ""),
        "groups": list(_groups(optimizer, describing, names)),
        "state": {},
        "number": number,
    }
    # The learning rate is left out, as a schedule sets it.
    settings = {
        f"group {place}.{key}": value
        for place, group in enumerate(description["groups"])
        for key, value in group.items()
        if key != "lr"
    }
    settings = _numbers({**attributes, **settings}) | describing.attributes
    tensors = {f"attribute/{key}/{number}": tensor for key, tensor in settings.items()}
    for parameter, state in optimizer.state.items():
        name = names.get(id(parameter))
        if name is None:
            continue
        description["state"][name], state_tensors = _state(state, describing)
        if description["class"].startswith("deepspeed.") and "step" in state:
            description["state"][name]["step"] = {"attribute": "step"}
            state_tensors["step"] = torch.tensor(float(_number_of_steps(optimizer)))
        tensors |= {f"state/{key}/{name}": tensor for key, tensor in state_tensors.items()}
    return description, tensors


def _groups(
    optimizer: torch.optim.Optimizer, describing: tree.Describing, names: dict[int, str]
) -> Iterable[dict[str, Any]]:
    """Yield the settings of each group, with the names of its parameters as "params".

    DeepSpeed's Adams have one setting outside of the groups. It is added to each.
    """
    common = {key: bool(value) for key, value in vars(optimizer).items() if key == "adam_w_mode"}
    for number, group in enumerate(optimizer.param_groups):
        values = {
            key: float(value) if isinstance(value, torch.Tensor) and value.numel() == 1 else value
            for key, value in group.items()
            if key != "params"
        }
        held = [names.get(id(tensor)) for tensor in group["params"]]
        yield {**common, **describing.values(values, f".group {number}"), "params": held}


def _number_of_steps(optimizer: torch.optim.Optimizer) -> int:
    """Return how many steps an optimizer has made. DeepSpeed's FusedAdam counts them for the last parameter alone."""
    return max(state["step"] for state in optimizer.state.values())


def tensors_of(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return what an optimizer's `state` of a parameter has, by the KEY that it is recorded by.

    This is tensors, also those in lists and dicts, and numbers as tensors.
    """
    return _state(state, tree.Describing(torch.nn.Module()))[1]


def _state(
    state: dict[str, Any], describing: tree.Describing
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return (the state of one parameter as JSON, its tensors and numbers by key)."""
    describing.attributes, describing.objects = {}, {}
    description = describing.values(state, "")
    return description, _numbers(state) | describing.attributes


def _numbers(values: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the numbers among `values` as tensors of float64."""
    return {
        key: torch.tensor(float(value), dtype=torch.float64)
        for key, value in values.items()
        if isinstance(value, (int, float))
    }
