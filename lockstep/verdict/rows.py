"""What was found of a recorded step: its tensors, each with what is tolerated of it, and sentences about what is wrong; and of the whole run."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch

from lockstep.verdict.distance import Distance, distance_of, distances_of
from lockstep.verdict.factors import Factors
from lockstep.verdict.gpu_arithmetic import CPU, Arithmetic
from lockstep.verdict.judgement import Judgement, Yardstick, add_pictures
from lockstep.verdict.normalisation import Gradients, Named, Sum

DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


class Wrong(str):
    """A sentence about what is wrong. It is `what`, followed by why.

    `cause` is the reason as a sentence of its own, "" if nothing explains it. A plain str in the place of a Wrong is a cause as a whole.
    """

    what: str
    cause: str

    def __new__(cls, what: str, why: str = "") -> "Wrong":
        sentence = super().__new__(cls, what + why)
        # The end of the sentence becomes a sentence of its own.
        cause = why.replace(", which is", "the factor is", 1).replace("; they", "the gradients", 1)
        sentence.what, sentence.cause = what, cause.lstrip(":; ")
        return sentence


@dataclass
class StepVerdict:
    """What was found of one recorded step."""

    step: int
    arithmetic: Arithmetic = CPU  # of the run
    micro_batches: int = 0
    shares: int = 0  # of the samples: the number of data-parallel ranks
    pieces: int = 1  # number of pieces that each sample is cut into
    # The groups of ranks that have pieces of the same samples
    cut: list[tuple[int, ...]] = field(default_factory=list)
    tokens: int = 0  # of the global batch; 0 if it is not known
    named: Named | None = None  # what the gradient is a mean over
    factor: float = 1.0  # of the gradient, before clipping
    # The dtypes that the step was computed in, but for float32 and float64
    lowered: list[str] = field(default_factory=list)
    clipped: str = ""  # by how much the gradient was clipped, to be read after it
    difference: str = ""  # of this mean from the mean over all tokens, likewise
    views: bool = False  # whether micro batches are the same samples, for other random numbers
    shared_inputs: bool = False  # whether micro batches are the same inputs, for losses of different samples
    nothing: bool = False  # whether the loss has no gradient
    unjudged: list[str] = field(default_factory=list)  # what is not judged, such as a loss or an optimizer
    tolerated_weights: float = 0.0  # relative error that is tolerated of the micro batches' weights
    rows: list[Judgement] = field(default_factory=list)
    # By (rank, number) of a micro batch: the weight that the gradient should have which follows from what arrives at its outputs
    weights: dict[tuple[int, int], float] = field(default_factory=dict)
    # For each micro batch and rank: the run's loss, the reference's, what is tolerated of their difference
    losses: list[tuple[float, float, float]] = field(default_factory=list)
    # Output that is put together from shards -> rank -> (start, shape) of its shard; {} where several groups of ranks have shards of it
    shards: dict[str, dict[int, tuple[list[int], list[int]]]] = field(default_factory=dict)
    # Rows of modules that were computed from their recorded inputs
    alone: list[Judgement] = field(default_factory=list)
    # Names of gradients whose replicas differ, but for those where clipping by another norm explains it
    differ: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)  # sentences; the first is the headline
    notes: list[str] = field(default_factory=list)

    @property
    def precision(self) -> str:
        """Of the arithmetic: "fp32" if it is float32 or float64 throughout, else "autocast"."""
        return "autocast" if self.lowered else "fp32"

    @property
    def is_of_known_mean(self) -> bool:
        """Whether the first rank's gradient is a known mean without another factor. It is right then, if it is near enough."""
        tolerated = self.tolerated_weights
        return self.named is not None and max(self.named.off, abs(self.factor - 1)) <= tolerated

    def leave(self, sentence: str) -> None:
        """Note something that was not judged, for the verdict to say."""
        if sentence not in self.unjudged:
            self.unjudged.append(sentence)

    @property
    def hardly_judged(self) -> list[Judgement]:
        """Rows of which half of their size or more is tolerated, so that zeros in their place might not be noticed."""
        return [row for row in self.rows if not (row.judged or row.too_far or row.exact_zero)]

    def number(self, name: str, own: float, reference: float, tolerated: float) -> Judgement:
        """Add a row of a single number, and return it. `tolerated` is absolute."""
        distance = distance_of(*torch.tensor([own, reference], dtype=torch.float64))
        row = Judgement(self.step, name, distance, tolerated, tolerated)
        self.rows.append(row)
        return row

    def judged(
        self,
        observed: Gradients,
        reference: Gradients,
        yardstick: Gradients,
        *,
        kind: str = "",
        factors: Factors | None = None,
        zeros: Collection[str] = (),
        dtypes: Mapping[str, torch.dtype] = {},
        rank: int | None = None,
    ) -> list[Judgement]:
        """Judge the recorded tensors of one pass, by the rule that strategies are judged by. Return a row for each tensor of `reference`.

        `reference` has the reference's tensors, and `yardstick` the same computed in the run's dtypes. `kind` is what names of rows begin
        with where the tensors are parameters'. `dtypes` has the dtypes of tensors that were rounded to another one before. `zeros` are
        names of rows that are zero in exact arithmetic. `factors` is given if modules were computed by themselves. It is given the
        tensors, too, and their `rank`.
        """
        distances: dict[str, Distance] = {}
        yardstick_distances: dict[str, Distance] = {}
        entries: dict[str, dict] = {}
        names = {f"{kind}{name}": name for name in reference}
        for key, name in names.items():
            tensor, yardstick_tensor, reference_tensor = observed[name], yardstick[name], reference[name]
            distance, yardstick_distances[key] = distances_of([tensor, yardstick_tensor], reference_tensor)
            if isinstance(reference, Sum):
                distance.terms = reference.largest_term(name)
            distances[key] = distance
            entries[key] = {"shape": list(tensor.shape), "dtype": DTYPES[dtypes.get(name, tensor.dtype)]}
            if factors is not None:
                factors.add(
                    key,
                    tensor,
                    yardstick_tensor,
                    reference_tensor,
                    is_weight=bool(kind),
                    rank=rank,
                )
        tolerances = Yardstick(
            yardstick_distances,
            entries,
            self.precision,
            self.arithmetic.floor,
            zeros,
            alone=factors is not None,
        )
        rows = [
            Judgement(
                self.step,
                key,
                distance,
                *tolerances.tolerance(key, distance),
                exact_zero=tolerances.is_zero(key, distance),
            )
            for key, distance in distances.items()
        ]
        add_pictures(
            rows,
            entries,
            lambda row: (observed[names[row.name]], reference[names[row.name]]),
        )
        return rows


@dataclass
class RunVerdict:
    """What was found of a whole recorded run."""

    steps: int
    samples: int = 0  # seen by all data-parallel ranks together
    wrong: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    ended: str = ""  # the error that the run ended in


def described(row: Judgement, alone: Judgement | None) -> str:
    """Return what is wrong with a row, in words: a factor, if the row `alone` has one, or else its errors.

    `alone` is the row of the same tensor where modules were computed by themselves.
    """
    factor = alone.factor if alone is not None and alone.of_factor else None
    return (row if factor is None else factor).describe()
