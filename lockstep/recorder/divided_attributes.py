"""Attributes of modules that a script divides by the size of a tensor-parallel group, as `attention.n_heads //= mesh.size()`.

The code of each rank then computes its shard. One process has the whole, and needs the number from before the division.
"""

import functools
import weakref
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from lockstep.recorder.patches import Undo, replace
from lockstep.recorder.wrapped import fsdp_groups

# What attributes were before they were divided, by name, of each module
BEFORE = weakref.WeakKeyDictionary[torch.nn.Module, dict[str, int]]()


def see_divisions() -> Undo:
    """Note in BEFORE the integer attributes of modules that are set to a divisor of what they were, until this is undone."""
    real = torch.nn.Module.__setattr__

    @functools.wraps(real)
    def set_attribute(module: torch.nn.Module, name: str, value: Any) -> None:
        before = vars(module).get(name)
        if type(value) is int and type(before) is int and 0 < value < before and before % value == 0:
            BEFORE.setdefault(module, {}).setdefault(name, before)
        real(module, name, value)

    return replace(torch.nn.Module, "__setattr__", set_attribute)


def sizes_of(model: torch.nn.Module) -> dict[int, set[int]]:
    """Return the sizes of the mesh dims that each parameter is sharded over, by its id, without FSDP2's mesh dims."""
    # This is called before each micro batch, and most models have nothing divided.
    if not BEFORE:
        return {}
    # How many dims of a parameter's mesh are FSDP2's. They come first.
    fsdp_dims = {
        id(fsdp_parameter.sharded_param): group.mesh_info.mesh.ndim
        for group in fsdp_groups(model)
        for fsdp_parameter in group.fsdp_params
    }
    sizes: dict[int, set[int]] = {}
    for tensor in model.parameters():
        if isinstance(tensor, DTensor):
            dims = range(fsdp_dims.get(id(tensor), 0), tensor.device_mesh.ndim)
            sizes[id(tensor)] = {
                tensor.device_mesh.size(dim) for dim in dims if tensor.placements[dim].is_shard()
            }
    return sizes


def wholes(module: torch.nn.Module, sizes: dict[int, set[int]]) -> dict[str, int]:
    """Return the attributes of a module from before they were divided, by name.

    Only a division by a size that the module's weights are sharded over counts. `sizes` are those of `sizes_of`.
    """
    noted = BEFORE.get(module)
    if not noted:
        return {}
    module_sizes = set[int]().union(*(sizes.get(id(tensor), ()) for tensor in module.parameters()))
    return {
        name: before
        for name, before in noted.items()
        if any(vars(module).get(name) == before / size for size in module_sizes)
    }
