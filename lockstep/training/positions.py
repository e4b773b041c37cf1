"""The positions of each sequence that a rank computes: of context parallelism and of Ulysses."""

import torch
import torch.distributed as dist

from lockstep.ground.collective import gather_objects
from lockstep.plan.cuts import Positions
from lockstep.plan.mesh import runs


class OwnPositions:
    """The positions of each sequence of `seq_length` that this rank of a group has."""

    def __init__(self, group: dist.ProcessGroup, cut: Positions, seq_length: int):
        self.group, self.size, self.rank = group, dist.get_world_size(group), dist.get_rank(group)
        self.pieces = cut.pieces_of(seq_length, self.rank, self.size)
        own = [torch.arange(start, start + length) for start, length in self.pieces]
        self.positions = self.seen = torch.cat(own)  # `seen`: those of the last forward pass

    def cut(
        self, input_ids: torch.Tensor, labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """This rank's part of a micro batch, each (B, S), and its positions (1, S / cp). Labels are already shifted."""
        positions = self.seen = self.positions.to(input_ids.device)
        return input_ids[:, positions], labels[:, positions], positions[None]

    def mean(self, loss: torch.Tensor) -> torch.Tensor:
        """The mean over the group, in place, of losses that are means over equally many positions each."""
        dist.all_reduce(loss, group=self.group)
        loss /= self.size
        return loss

    def contract(self) -> list[list[list[int]]]:
        """[start, length] of the runs of positions that each rank was called with. Collective."""
        return gather_objects(runs(self.seen.tolist()), self.group)
