"""The model inside of wrappers, and its parameters by the names that it has for them itself."""

from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule


def inner(model: torch.nn.Module) -> torch.nn.Module:
    """Return the model inside of DDP, an engine, torch.compile, checkpointing and Lightning's Fabric."""
    # A ScriptModule has its children in a class of its own.
    while not isinstance(model, torch.jit.ScriptModule):
        model = model._modules.get("_original_module") or model
        for name in ("_orig_mod", "_checkpoint_wrapped_module", "module"):
            child = model._modules.get(name)
            if child is not None and len(model._modules) == 1 and not model._parameters:
                model = child
                break
        else:
            break
    return model


def clean(name: str) -> str:
    """Return the name of a parameter or module without the names of wrappers inside of the model."""
    for wrapper in ("_checkpoint_wrapped_module", "_orig_mod"):
        name = name.replace(f"{wrapper}.", "").removesuffix(f".{wrapper}")
    return name


def named_parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return the live parameters by clean name. Tied parameters have the first of their names.

    For a parameter that FSDP2 has cut, the shard is returned, which optimizers hold. In a backward pass, where optimizers may step
    in hooks, whole parameters are in the places of the shards.
    """
    shards = {id(whole): shard for whole, shard in _shards(model)}
    return {clean(name): shards.get(id(p), p) for name, p in model.named_parameters()}


def fsdp_groups(model: torch.nn.Module) -> Iterator[Any]:
    """Yield FSDP2's groups of parameters. A module has several if its parameters are sharded over several meshes."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            if hasattr(state, "_fsdp_param_groups"):  # in newer releases of torch
                yield from state._fsdp_param_groups
            elif state._fsdp_param_group:
                yield state._fsdp_param_group


def _shards(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Parameter, torch.nn.Parameter]]:
    """Yield what FSDP2 has in the place of each parameter now, and the shard of the parameter."""
    for group in fsdp_groups(model):
        for fsdp_param in group.fsdp_params:
            place = fsdp_param._module_info
            yield getattr(place.module, place.param_name), fsdp_param.sharded_param
