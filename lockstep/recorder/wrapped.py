"""The model inside of wrappers, and its parameters by the names that it has for them itself."""

from collections.abc import Iterator

import torch
from torch.distributed.fsdp import FSDPModule


def inner(model: torch.nn.Module) -> torch.nn.Module:
    """The model inside of DDP, an engine, torch.compile, checkpointing and Lightning's Fabric."""
    # A ScriptModule has its children in a class of its own
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
    """The name of a parameter or module, without those of wrappers inside of the model."""
    for wrapper in ("_checkpoint_wrapped_module", "_orig_mod"):
        name = name.replace(f"{wrapper}.", "").removesuffix(f".{wrapper}")
    return name


def named_parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Clean name -> live parameter; of tied ones, the first name.

    Of FSDP2's it is the shard, which optimizers hold: in a backward pass, where optimizers may step in hooks, whole ones are in their places.
    """
    shards = {id(whole): shard for whole, shard in _shards(model)}
    return {clean(name): shards.get(id(one), one) for name, one in model.named_parameters()}


def _shards(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Parameter, torch.nn.Parameter]]:
    """What FSDP2 has in the place of each parameter now, and its shard."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            group = module._get_fsdp_state()._fsdp_param_group
            for one in group.fsdp_params if group else ():
                place = one._module_info
                yield getattr(place.module, place.param_name), one.sharded_param
