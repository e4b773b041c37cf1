"""Where a rank's part of an output lies in the whole one: rows by DP rank, positions by the cut of cp, one more dim by tp."""

from dataclasses import dataclass

import torch

from lockstep.dumps.layout import BATCH, SEQUENCE
from lockstep.ground.blocks import Runs
from lockstep.plan.cuts import Pieces
from lockstep.plan.mesh import AXES, Coordinates, Cuts, Mesh, share


@dataclass
class Placement:
    """Where the outputs of one rank lie: the one at the coordinates `here`, which computes these `positions` of each sequence.

    `rows` is the number of sequences of a global batch.
    """

    mesh: Mesh
    here: Coordinates
    rows: int
    seq_length: int
    positions: Pieces

    def of(self, name: str, local: torch.Tensor, symbols: tuple) -> tuple[tuple[int, ...], list[Runs], bool]:
        """Return (the full shape, the runs of each of its dims that this rank's first micro batch covers, whether this rank writes them).

        Raises ValueError for a shape that is no share of the full tensor.
        """
        sizes = {BATCH: self.rows, SEQUENCE: self.seq_length}
        full = tuple(sizes.get(symbol, symbol) for symbol in symbols)
        cut = {
            # Stages of a pipeline have files of their own.
            Cuts.LAYERS: True,
            Cuts.SAMPLES: symbols[0] == BATCH,
            Cuts.POSITIONS: SEQUENCE in symbols,
            Cuts.WEIGHTS: False,
        }
        runs = [
            self.positions if symbol == SEQUENCE else [(0, size)]
            for symbol, size in zip(symbols, full, strict=True)
        ]
        if cut[Cuts.SAMPLES]:
            share_of_rank = self.mesh.sample_share(self.mesh.rank(self.here))
            # That all of its rows come is checked at the end of the step
            runs[0] = [(share_of_rank * (self.rows // self.mesh.num_sample_shares), local.shape[0])]
        for dim in range(1, len(full)) if local.ndim == len(full) else ():
            if local.shape[dim] != _length(runs[dim]) and not cut[Cuts.WEIGHTS]:
                cut[Cuts.WEIGHTS] = True
                runs[dim] = _part(runs[dim], *share(_length(runs[dim]), self.here.tp, self.mesh.tp))
        if list(local.shape) != list(map(_length, runs)):
            is_of_samples = symbols[0] != BATCH and tuple(local.shape[1:]) == full[1:]
            remedy = (
                "all samples share it in the reference: call the model with the inputs that it is fed, and no others"
                if is_of_samples
                else "call each module with all positions, or not at all"
            )
            raise ValueError(
                f"{name} has shape {tuple(local.shape)}, which is no share of the full tensor {full}: {remedy}"
            )
        return full, runs, all(cut[AXES[axis]] or not self.here.along(axis) for axis in AXES)


def _length(runs: Runs) -> int:
    return sum(length for _, length in runs)


def _part(runs: Runs, start: int, length: int) -> Runs:
    """Return the part of the runs that has `length` places and begins with their `start`-th place."""
    part = []
    for first, size in runs:
        begin, end = max(start, 0), min(start + length, size)
        if begin < end:
            part.append((first + begin, end - begin))
        start -= size
    return part or [(sum(runs[-1]), 0)]
