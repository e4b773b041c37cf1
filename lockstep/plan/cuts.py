"""How an axis divides the work of a run: what the checks before a start, the contract and the capture ask of it.

A strategy's spec has a `lockstep.plan.config.Cut` for each axis that divides something inside of a sample or of the model, such as positions or layers.
Nothing here imports torch.
"""

from collections.abc import Callable
from dataclasses import dataclass

from lockstep.ground.errors import UserError
from lockstep.plan.config import Config, Cut
from lockstep.plan.mesh import balanced_share, runs, share

Pieces = list[tuple[int, int]]  # (start, length) of each


@dataclass(frozen=True)
class Positions:
    """cp: every rank has some pieces of each sequence. `pieces_of(length, rank, size)` are those of one rank."""

    pieces_of: Callable[[int, int, int], Pieces]
    each: int  # equal pieces that a rank has

    def require(self, config: Config, architecture: dict) -> None:
        number = self.each * config.cp_size
        if config.seq_length % number:
            raise UserError(
                f"--cp_size {config.cp_size}: --seq_length {config.seq_length} cannot be cut into {number} equal pieces; "
                f"choose a multiple of {number}"
            )
        if config.attn_impl != "sdpa":
            raise UserError(
                f"--cp_size {config.cp_size} --attn_impl {config.attn_impl}: attention over the positions of all ranks is computed by sdpa; "
                "leave --attn_impl out"
            )

    def expected(self, config: Config, architecture: dict) -> list[list[list[int]]]:
        """[start, length] of the runs of positions that each rank has."""
        own = (self.pieces_of(config.seq_length, rank, config.cp_size) for rank in range(config.cp_size))
        return [runs([start + at for start, length in pieces for at in range(length)]) for pieces in own]


BALANCED = Positions(balanced_share, each=2)
CONTIGUOUS = Positions(lambda length, rank, size: [share(length, rank, size)], each=1)


def of(config: Config) -> dict[str, Cut]:
    """Axis -> its cut, of the axes with more than one rank."""
    cuts = {"cp": BALANCED, **config.spec.cuts}
    return {axis: cuts[axis] for axis in config.mesh.axes if axis in cuts}


def require(config: Config, architecture: dict) -> None:
    """Raise UserError for a run that an axis cannot divide."""
    for cut in of(config).values():
        cut.require(config, architecture)


def positions(config: Config, rank: int) -> Pieces:
    """The pieces of each sequence that a rank along cp has."""
    cut = of(config).get("cp")
    if cut is None:
        return [(0, config.seq_length)]
    assert isinstance(cut, Positions)
    return cut.pieces_of(config.seq_length, rank, config.cp_size)
