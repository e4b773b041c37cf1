"""Where a part of a tensor, such as the shard of a DTensor, lies in the whole.

A place is an index along a dim of the full tensor. A part has runs of consecutive places along each dim.
"""

import functools
from collections.abc import Iterator

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor.placement_types import _StridedShard

# (start, length) of consecutive places along a dim of a full tensor, in a rank's own order
Runs = list[tuple[int, int]]
# (name, block, shape of the full tensor, start of the block in it), of the blocks that a rank holds
Held = Iterator[tuple[str, torch.Tensor, tuple[int, ...], tuple[int, ...]]]
# (module, part of a batch -> where it is among the module's arguments: a name or a place)
CalledModules = list[tuple[torch.nn.Module, dict[str, str | int]]]


def runs_of(places: list[int]) -> Runs:
    """Return the runs of these places, in the order of the list; one of length 0 if there are no places."""
    runs: Runs = []
    for place in places:
        if runs and sum(runs[-1]) == place:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((place, 1))
    return runs or [(0, 0)]


def blocks(local: torch.Tensor, runs: list[Runs]) -> list[tuple[tuple[int, ...], torch.Tensor]]:
    """Cut a part of a tensor, with its runs along each dim, into blocks: (start in the full tensor, block) of each."""
    cut: list[tuple[tuple[int, ...], torch.Tensor]] = [((), local)]
    for dim, dim_runs in enumerate(runs):
        lengths = [length for _, length in dim_runs]
        cut = [
            ((*start, first), piece)
            for start, block in cut
            for (first, _), piece in zip(dim_runs, block.split(lengths, dim), strict=True)
        ]
    return cut


def pieces(tensor: torch.Tensor) -> list[tuple[tuple[int, ...], torch.Tensor]]:
    """Return (start in the full tensor, block) of the blocks of this rank's shard: one, unless rows are packed in groups."""
    if not isinstance(tensor, DTensor):
        return [((0,) * tensor.ndim, tensor)]
    return blocks(tensor.to_local(), _runs(tensor.device_mesh, tensor.placements, tuple(tensor.shape)))


@functools.cache
def _runs(mesh: DeviceMesh, placements: tuple[Placement, ...], shape: tuple[int, ...]) -> list[Runs]:
    """Return this rank's runs along each dim. A vector of a dim's places is cut as DTensor cuts the tensor: mesh dim by mesh dim."""
    coordinate = mesh.get_coordinate()  # None outside of the mesh, where nothing is held
    runs: list[Runs] = []
    for dim, size in enumerate(shape):
        cuts = [
            (axis, _of_vector(placement))
            for axis, placement in enumerate(placements)
            if getattr(placement, "dim", None) == dim
        ]
        if not cuts:
            runs.append([(0, size)])
            continue
        places = torch.arange(size)
        for axis, placement in cuts:
            shards, _ = placement._split_tensor(places, mesh.size(axis), with_padding=False)
            places = places[:0] if coordinate is None else shards[coordinate[axis]]
        runs.append(runs_of(places.tolist()))
    return runs


def _of_vector(placement: Placement) -> Shard | _StridedShard:
    """Return the placement of a vector that is cut as a tensor is along the dim of `placement`."""
    return (
        _StridedShard(0, split_factor=placement.split_factor)
        if isinstance(placement, _StridedShard)
        else Shard(0)
    )
