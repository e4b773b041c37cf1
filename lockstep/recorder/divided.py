"""Attributes of modules that a script divides by the size of a tensor-parallel group, as `attention.n_heads //= mesh.size()`.

The code of each rank then computes its shard. One process has the whole, and needs the number from before.
"""

import functools
import weakref
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lockstep.recorder.patches import Undo, replace

BEFORE = weakref.WeakKeyDictionary[torch.nn.Module, dict[str, int]]()


def see_divisions() -> Undo:
    """Until it is undone, numbers of modules are noted that are set to a divisor of what they were."""
    real = torch.nn.Module.__setattr__

    @functools.wraps(real)
    def set_attribute(module: torch.nn.Module, name: str, value: Any) -> None:
        before = vars(module).get(name)
        if type(value) is int and type(before) is int and 0 < value < before and before % value == 0:
            BEFORE.setdefault(module, {}).setdefault(name, before)
        real(module, name, value)

    return replace(torch.nn.Module, "__setattr__", set_attribute)


def sizes_of(model: torch.nn.Module) -> dict[int, set[int]]:
    """By the id of a parameter: the sizes of the mesh's dims that it is sharded over, but for FSDP2's."""
    if not BEFORE:  # as for most models, before each micro batch
        return {}
    of_fsdp = {  # how many dims of a parameter's mesh are FSDP2's, which come first
        id(one.sharded_param): group.mesh_info.mesh.ndim
        for module in model.modules()
        if isinstance(module, FSDPModule)
        for group in [module._get_fsdp_state()._fsdp_param_group]
        if group
        for one in group.fsdp_params
    }
    found: dict[int, set[int]] = {}
    for one in model.parameters():
        if isinstance(one, DTensor):
            dims = range(of_fsdp.get(id(one), 0), one.device_mesh.ndim)
            found[id(one)] = {one.device_mesh.size(dim) for dim in dims if one.placements[dim].is_shard()}
    return found


def wholes(module: torch.nn.Module, sizes: dict[int, set[int]]) -> dict[str, int]:
    """What attributes were before they were divided by a size that weights of the module are sharded over."""
    known = BEFORE.get(module)
    if not known:
        return {}
    of_module = set[int]().union(*(sizes.get(id(one), ()) for one in module.parameters()))
    return {
        name: before
        for name, before in known.items()
        if any(vars(module).get(name) == before / size for size in of_module)
    }
