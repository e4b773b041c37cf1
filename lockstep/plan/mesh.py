"""The mesh: ranks on named axes, outermost first. A rank's coordinates are a pure function of its number.

    axis   cuts        ranks along it see                  gradients along it
    pp     layers      the same samples                    belong to other layers
    dp     samples     other samples                       averaged
    cp     positions   the same samples, other positions   summed; the loss is a mean over tokens
    tp     weights     the same samples and positions      whole on their shard

What an axis means follows from what it cuts (`AXES`). Ranks are numbered as in `init_device_mesh` and AutoTP: neighbours lie along
the innermost axis, along which most is communicated.
"""

import functools
import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


class Cuts(Enum):
    """What the ranks along an axis divide among them, and what this kind of parallelism is called."""

    LAYERS = "pipeline"
    SAMPLES = "data"
    POSITIONS = "context"
    WEIGHTS = "tensor"


Axis = Literal["pp", "dp", "cp", "tp"]
AXES: dict[str, Cuts] = {"pp": Cuts.LAYERS, "dp": Cuts.SAMPLES, "cp": Cuts.POSITIONS, "tp": Cuts.WEIGHTS}


@dataclass(frozen=True)
class Coordinates:
    """One rank's place along every axis, from 0."""

    pp: int = 0
    dp: int = 0
    cp: int = 0
    tp: int = 0

    def along(self, axis: str) -> int:
        return getattr(self, axis)


@dataclass(frozen=True)
class Mesh:
    """The number of ranks along every axis. An axis of size 1 cuts nothing."""

    pp: int = 1
    dp: int = 1
    cp: int = 1
    tp: int = 1

    @classmethod
    def of_options(cls, options: Mapping[str, Any]) -> "Mesh":
        """From the flags of a run, such as dp_size. An axis that is not among them has size 1."""
        return cls(**{axis: options.get(f"{axis}_size", 1) for axis in AXES})

    @property
    def sizes(self) -> dict[str, int]:
        """Axis -> size, outermost first."""
        return {axis: self.size(axis) for axis in AXES}

    @property
    def world_size(self) -> int:
        return math.prod(self.sizes.values())

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes with more than one rank, outermost first."""
        return tuple(axis for axis, size in self.sizes.items() if size > 1)

    def size(self, axis: str) -> int:
        return getattr(self, axis)

    def coordinates(self, rank: int) -> Coordinates:
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is not on a mesh of {self.world_size} ranks ({self.label})")
        return _coordinates(self)[rank]

    def rank(self, coordinates: Coordinates) -> int:
        rank = 0
        for axis, size in self.sizes.items():
            rank = rank * size + coordinates.along(axis)
        return rank

    def sample_share(self, rank: int) -> int:
        """The number of the share of the global batch that a rank is fed. Ranks that differ only along other axes share it."""
        return self.coordinates(rank).dp

    @property
    def num_sample_shares(self) -> int:
        return self.dp

    def first_with_share(self, share: int) -> int:
        """The lowest rank that is fed this share of the global batch."""
        return self.rank(Coordinates(dp=share))

    @property
    def num_loss_shares(self) -> int:
        """The number of ranks that compute the loss of different tokens; the loss is the mean over them."""
        return self.dp * self.cp

    def neighbour(self, rank: int, axis: str) -> int:
        """The next rank along an axis; after the last one, the first."""
        coordinates = self.coordinates(rank)
        following = (coordinates.along(axis) + 1) % self.size(axis)
        return self.rank(replace(coordinates, **{axis: following}))

    @property
    def label(self) -> str:
        """The sizes, as "TP=2, DP=2": tp and dp, then the other axes of more than one rank."""
        return ", ".join(f"{axis.upper()}={self.size(axis)}" for axis in ("tp", "dp", *self.further_axes))

    @property
    def further_axes(self) -> tuple[str, ...]:
        """The axes of more than one rank beside tp and dp."""
        return tuple(axis for axis in self.axes if axis not in ("tp", "dp"))

    def draw(self) -> str:
        """The grid as text: one line for the ranks along each innermost axis."""
        outer, innermost = list(self.sizes)[:-1], list(self.sizes)[-1]
        drawn_axes = [axis for axis in outer if self.size(axis) > 1 or axis == "dp"]
        header = " " * (2 + 6 * len(drawn_axes)) + "".join(
            f"{innermost} {place:<6}" for place in range(self.size(innermost))
        )
        lines = [header.rstrip()]
        for places in itertools.product(*(range(self.size(axis)) for axis in outer)):
            row = dict(zip(outer, places, strict=True))
            ranks = (
                self.rank(Coordinates(**row, **{innermost: place})) for place in range(self.size(innermost))
            )
            row_label = "".join(f"{axis} {row[axis]:<3}" for axis in drawn_axes)
            lines.append(("  " + row_label + "".join(f"rank {rank:<4}" for rank in ranks)).rstrip())
        return "\n".join(lines)


@dataclass(frozen=True)
class Geometry:
    """The sizes of the mesh and the coordinates of one rank, as planned or as read back from live groups."""

    mesh: Mesh
    coordinates: Coordinates

    @classmethod
    def of_rank(cls, mesh: Mesh, rank: int) -> "Geometry":
        return cls(mesh, mesh.coordinates(rank))

    @classmethod
    def of_groups(cls, groups: "Mapping[str, ProcessGroup | None]") -> "Geometry":
        """From live process groups by axis; None or a missing axis means size 1."""
        import torch.distributed as dist

        live = {axis: group for axis, group in groups.items() if group is not None}
        sizes = {axis: dist.get_world_size(group) for axis, group in live.items()}
        return cls(Mesh(**sizes), Coordinates(**{axis: dist.get_rank(group) for axis, group in live.items()}))

    def __str__(self) -> str:
        return ", ".join(
            f"{axis} {self.coordinates.along(axis)} of {size}"
            for axis, size in self.mesh.sizes.items()
            if size > 1 or axis in ("dp", "tp")
        )


@functools.cache  # a capture asks for every tensor
def _coordinates(mesh: Mesh) -> tuple[Coordinates, ...]:
    """The place of every rank, the innermost axis running fastest."""
    places = itertools.product(*(range(size) for size in mesh.sizes.values()))
    return tuple(Coordinates(**dict(zip(mesh.sizes, place, strict=True))) for place in places)


def share(length: int, rank: int, size: int) -> tuple[int, int]:
    """(start, length) of a rank's shard of a dim, as torch.chunk cuts it: equal lengths, but the last ones may be shorter."""
    longest = -(-length // size)
    start = min(rank * longest, length)
    return start, min(longest, length - start)


def balanced_share(length: int, rank: int, size: int) -> list[tuple[int, int]]:
    """(start, length) of the pieces of a sequence that a rank along cp has. Of 2 * size equal pieces, rank r has r and 2 * size - 1 - r.

    With size 1, it has the whole. Raises ValueError unless the pieces can be equal.
    """
    if size == 1:
        return [(0, length)]
    if length % (2 * size):
        raise ValueError(f"{length} positions cannot be cut into {2 * size} equal pieces")
    piece = length // (2 * size)
    return [(rank * piece, piece), ((2 * size - 1 - rank) * piece, piece)]


def runs(positions: Iterable[int]) -> list[list[int]]:
    """[start, length] of the runs of consecutive positions, in order."""
    pairs: list[list[int]] = []
    for position in positions:
        if pairs and position == sum(pairs[-1]):
            pairs[-1][1] += 1
        else:
            pairs.append([position, 1])
    return pairs


def build_device_mesh(mesh: Mesh, device_type: str) -> "DeviceMesh":
    """The torch DeviceMesh with all axes by name, including those of size 1. Needs an initialised process group.

    Runs in one process share it, as each would make new groups, whose threads stay.
    """
    import torch.distributed as dist

    return _device_mesh(dist.group.WORLD, mesh, device_type)


@functools.cache
def _device_mesh(_world: object, mesh: Mesh, device_type: str) -> "DeviceMesh":
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(device_type, tuple(mesh.sizes.values()), mesh_dim_names=tuple(mesh.sizes))
