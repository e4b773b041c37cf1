"""Where a part of a tensor, such as the shard of a DTensor, lies in the whole: runs of consecutive places along each dim."""

import functools
from collections.abc import Iterator

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

# (start, length) of consecutive places along a dim of a full tensor, in a rank's own order
Runs = list[tuple[int, int]]
# (name, block, shape of the full tensor, start of the block in it), of the blocks that a rank holds
Held = Iterator[tuple[str, torch.Tensor, tuple[int, ...], tuple[int, ...]]]
# Modules, and where among the arguments of each the parts of a batch are: a name or a place
CalledModules = list[tuple[torch.nn.Module, dict[str, str | int]]]


def runs_of(places: list[int]) -> Runs:
    """The runs of places in this order."""
    runs: Runs = []
    for place in places:
        if runs and sum(runs[-1]) == place:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((place, 1))
    return runs or [(0, 0)]


def blocks(local: torch.Tensor, runs: list[Runs]) -> list[tuple[tuple[int, ...], torch.Tensor]]:
    """(start in the full tensor, block) of the blocks of a part that has these runs along its dims."""
    found: list[tuple[tuple[int, ...], torch.Tensor]] = [((), local)]
    for dim, along in enumerate(runs):
        lengths = [length for _, length in along]
        found = [
            ((*start, first), piece)
            for start, block in found
            for (first, _), piece in zip(along, block.split(lengths, dim), strict=True)
        ]
    return found


def pieces(tensor: torch.Tensor) -> list[tuple[tuple[int, ...], torch.Tensor]]:
    """(start in the full tensor, block) of the blocks that this rank's shard consists of. One, unless rows are packed in groups."""
    if not isinstance(tensor, DTensor):
        return [((0,) * tensor.ndim, tensor)]
    return blocks(tensor.to_local(), _runs(tensor.device_mesh, tensor.placements, tuple(tensor.shape)))


@functools.cache
def _runs(mesh: DeviceMesh, placements: tuple[Placement, ...], shape: tuple[int, ...]) -> list[Runs]:
    """Which places along every dim are this rank's: DTensor cuts a list of them as it cuts the tensor."""
    found: list[Runs] = []
    for dim, size in enumerate(shape):
        along = [_along(placement, dim) for placement in placements]
        if all(placement.is_replicate() for placement in along):
            found.append([(0, size)])
            continue
        places = torch.arange(size, device=mesh.device_type)
        found.append(runs_of(distribute_tensor(places, mesh, along, src_data_rank=None).to_local().tolist()))
    return found


def _along(placement: Placement, dim: int) -> Placement:
    """A placement of a tensor's dim, as one of a vector."""
    if getattr(placement, "dim", None) != dim:
        return Replicate()
    if isinstance(placement, _StridedShard):
        return _StridedShard(0, split_factor=placement.split_factor)
    return Shard(0)
