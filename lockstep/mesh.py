"""(dp, tp) geometry. A rank's coordinates are a pure function of its number; TP peers are neighbours.

The layout is the one `torch.distributed.init_device_mesh(device, (dp, tp))` and DeepSpeed AutoTP both use,
so the three strategies agree on who shares a batch (a row) and who shares a shard (a column).
"""

from dataclasses import dataclass

AXES = ("dp", "tp")


@dataclass(frozen=True)
class Mesh:
    """A grid of dp_size x tp_size ranks, numbered row by row."""

    dp_size: int
    tp_size: int

    @property
    def world_size(self) -> int:
        return self.dp_size * self.tp_size

    def coordinates(self, rank: int) -> tuple[int, int]:
        """(dp_rank, tp_rank) of a rank."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is not on a mesh of {self.dp_size} x {self.tp_size} ranks")
        return divmod(rank, self.tp_size)

    def rank(self, dp_rank: int, tp_rank: int) -> int:
        return dp_rank * self.tp_size + tp_rank

    @property
    def label(self) -> str:
        return f"TP={self.tp_size}, DP={self.dp_size}"

    def draw(self) -> str:
        """The grid as text: a row is one model replica, a column holds the same shard."""
        head = "        " + "".join(f"tp {tp:<6}" for tp in range(self.tp_size))
        rows = [
            f"  dp {dp}  " + "".join(f"rank {self.rank(dp, tp):<4}" for tp in range(self.tp_size))
            for dp in range(self.dp_size)
        ]
        return "\n".join([head.rstrip(), *(row.rstrip() for row in rows)])


def share(length: int, rank: int, size: int) -> tuple[int, int]:
    """(start, length) of a rank's share of a dim cut as torch.chunk cuts it: equal shares, the last ones shorter."""
    each = -(-length // size)
    start = min(rank * each, length)
    return start, min(each, length - start)


def build_device_mesh(mesh: Mesh, device_type: str):
    """The torch DeviceMesh with axes ("dp", "tp"). Needs an initialised process group."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(device_type, (mesh.dp_size, mesh.tp_size), mesh_dim_names=AXES)
