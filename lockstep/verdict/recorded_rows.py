"""What was found of one recorded step: its tensors, each with what is tolerated, and what is wrong, in sentences."""

import math
from dataclasses import dataclass, field

from lockstep.verdict.normalisation import Named


@dataclass
class Row:
    """One tensor or number: how far it is, relative to its size, and what is tolerated."""

    name: str
    error: float
    tolerated: float
    scale: float = 1.0  # <own, reference> / <reference, reference>

    @property
    def too_far(self) -> bool:
        return not self.error <= self.tolerated

    @property
    def share(self) -> float:
        """The error as a multiple of what is tolerated."""
        return self.error / self.tolerated if self.tolerated else math.inf


@dataclass
class StepVerdict:
    step: int
    micro_batches: int = 0
    shares: int = 0  # of the samples: data-parallel ranks
    tokens: int = 0  # of the global batch; 0 if it is not known
    named: Named | None = None  # what the gradient is a mean over
    factor: float = 1.0  # of the gradient, before clipping
    clipped: str = ""  # by how much, to be read after the gradient
    difference: str = ""  # of this mean from the one over all tokens, likewise
    losses: bool = False  # whether they are judged
    tolerated_weights: float = 0.0
    rows: list[Row] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)  # sentences, the first is the headline
    notes: list[str] = field(default_factory=list)

    @property
    def too_far(self) -> list[Row]:
        return [row for row in self.rows if row.too_far]

    @property
    def nearest(self) -> Row | None:
        """The row that is nearest to what is tolerated, or farthest beyond."""
        return max(self.rows, key=lambda row: row.share, default=None)
