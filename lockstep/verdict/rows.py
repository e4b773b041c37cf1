"""What was found of one recorded step: its tensors, each with what is tolerated, and what is wrong, in sentences."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from lockstep.dumps.dump import number_of_elements
from lockstep.verdict.distance import Distance, distance_of_numbers, distances_of
from lockstep.verdict.factors import Factors
from lockstep.verdict.gpu_arithmetic import CPU, Arithmetic
from lockstep.verdict.judgement import EXACT, Judgement, Yardstick, add_pictures
from lockstep.verdict.normalisation import Gradients, Named, Sum

DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


class Wrong(str):
    """A sentence about what is wrong. Its end may say why: `cause`, "" where nothing explains it. A plain text is a cause as a whole."""

    what: str
    cause: str

    def __new__(cls, what: str, why: str = "") -> "Wrong":
        said = super().__new__(cls, what + why)
        # The end of a sentence becomes one of its own.
        alone = why.replace(", which is", "the factor is", 1).replace("; they", "the gradients", 1)
        said.what, said.cause = what, alone.lstrip(":; ")
        return said


@dataclass
class StepVerdict:
    step: int
    arithmetic: Arithmetic = CPU  # of the run
    micro_batches: int = 0
    shares: int = 0  # of the samples: data-parallel ranks
    pieces: int = 1  # that samples are cut into
    # The ranks that have pieces of the same samples
    cut: list[tuple[int, ...]] = field(default_factory=list)
    tokens: int = 0  # of the global batch; 0 if it is not known
    named: Named | None = None  # what the gradient is a mean over
    factor: float = 1.0  # of the gradient, before clipping
    lowered: list[str] = field(
        default_factory=list
    )  # dtypes that it was computed in, but float32 and float64
    clipped: str = ""  # by how much, to be read after the gradient
    difference: str = ""  # of this mean from the one over all tokens, likewise
    views: bool = False  # whether micro batches are the same samples, for other random numbers
    nothing: bool = False  # whether its loss has no gradient
    unseen: str = ""  # what is not judged, of the loss or of an optimizer
    tolerated_weights: float = 0.0
    rows: list[Judgement] = field(default_factory=list)
    losses: list[tuple[float, float, float]] = field(
        default_factory=list
    )  # of each micro batch and rank: the run's, the reference's, what is tolerated
    # Of outputs that are put together from shards, rank -> (start, shape) of its own; {} where several groups of ranks have some
    shards: dict[str, dict[int, tuple[list[int], list[int]]]] = field(default_factory=dict)
    alone: list[Judgement] = field(
        default_factory=list
    )  # of modules that were computed from their recorded inputs
    # Gradients of which replicas have others, but for those that clipping by another norm explains
    differ: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)  # sentences, the first is the headline
    notes: list[str] = field(default_factory=list)

    @property
    def precision(self) -> str:
        """Of the arithmetic: whether it is float32 throughout."""
        return "autocast" if self.lowered else "fp32"

    @property
    def is_of_known_mean(self) -> bool:
        """Whether the first rank's gradient is a known mean, without another factor: it is right then, if it is near enough."""
        tolerated = self.tolerated_weights
        return self.named is not None and max(self.named.off, abs(self.factor - 1)) <= tolerated

    def leave(self, said: str) -> None:
        """Say with the verdict what was not judged."""
        self.unseen = f"{self.unseen}; {said}" if self.unseen else said

    def gradients(
        self, observed: Gradients, right: Gradients, near: Gradients, **more: Any
    ) -> list[Judgement]:
        """Rows of parameters' gradients, of the step: see `judged`, which has `more`."""
        return judged(
            self.step,
            observed,
            right,
            near,
            self.precision,
            arithmetic=self.arithmetic,
            kind="gradient/",
            **more,
        )

    def number(self, name: str, own: float, reference: float, tolerated: float) -> Judgement:
        """Adds a row of a single number; `tolerated` is absolute."""
        row = Judgement(self.step, name, distance_of_numbers(own, reference), tolerated, tolerated)
        self.rows.append(row)
        return row


def described(row: Judgement, alone: Judgement | None) -> str:
    """What is wrong with a row: the factor of a part, which is known to the same row of modules by themselves, or else its errors."""
    factor = alone.factor if alone is not None and alone.of_factor else None
    return (row if factor is None else factor).describe()


def judged(
    step: int,
    observed: Gradients,
    right: Gradients,
    near: Gradients,
    precision: str,
    *,
    arithmetic: Arithmetic = CPU,
    kind: str = "",
    factors: Factors | None = None,
    zeros: Collection[str] = (),
    dtypes: Mapping[str, torch.dtype] = {},
    where: Mapping[str, str] = {},
    rank: int | None = None,
) -> list[Judgement]:
    """The recorded tensors of one pass against `right`, by the rule that strategies are judged by: `near` is the yardstick, in the run's dtypes.

    `kind` is what names of rows begin with where these are parameters. `factors` is told of the tensors, too, and `where` each is and on which `rank`. `dtypes` has those that some were
    rounded to before, and `zeros` are names of rows that are zero in exact arithmetic; `precision` is "fp32" or "autocast".
    """
    own: dict[str, Distance] = {}
    yardstick: dict[str, Distance] = {}
    entries: dict[str, dict] = {}
    names = {f"{kind}{name}": name for name in right}
    for row, name in names.items():
        tensor, plain, reference = observed[name], near[name], right[name]
        distance, yardstick[row] = distances_of([tensor, plain], reference)
        terms = right.largest_term(name) if isinstance(right, Sum) else EXACT
        own[row] = replace(distance, terms=terms)
        entries[row] = {"shape": list(tensor.shape), "dtype": DTYPES[dtypes.get(name, tensor.dtype)]}
        if factors is not None:
            factors.add(
                row, tensor, plain, reference, is_weight=bool(kind), where=where.get(row, ""), rank=rank
            )
    measure = Yardstick(yardstick, entries, precision, arithmetic.floor, zeros)
    rows = [Judgement(step, row, one, *measure.tolerance(row, one)) for row, one in own.items()]
    add_pictures(
        rows,
        lambda row: number_of_elements(entries[row.name]),
        lambda row: (observed[names[row.name]], right[names[row.name]]),
    )
    return rows
