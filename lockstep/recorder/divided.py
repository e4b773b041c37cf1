"""Attributes of modules that a script divides by the size of a tensor-parallel group, as `attention.n_heads //= mesh.size()`.

The code of each rank then computes its shard. One process has the whole, and needs the number from before.
"""

import functools
import weakref
from typing import Any

import torch
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


def wholes(module: torch.nn.Module) -> dict[str, int]:
    """What attributes were before they were divided by the size of a mesh's dim that weights of the module are sharded over."""
    known = BEFORE.get(module)
    if not known:
        return {}
    sizes = {
        one.device_mesh.size(dim)
        for one in module.parameters()
        if isinstance(one, DTensor)
        for dim, placement in enumerate(one.placements)
        if placement.is_shard()
    }
    now = vars(module)
    return {
        name: before
        for name, before in known.items()
        if type(now.get(name)) is int and before / now[name] in sizes
    }
