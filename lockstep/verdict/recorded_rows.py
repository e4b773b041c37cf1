"""What was found of one recorded step: its tensors, each with what is tolerated, and what is wrong, in sentences."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from lockstep.verdict.distance import Distance, distance_of_numbers, distances_of
from lockstep.verdict.factors import Factors
from lockstep.verdict.judgement import Judgement, Yardstick, add_pictures
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
    micro_batches: int = 0
    shares: int = 0  # of the samples: data-parallel ranks
    pieces: int = 1  # that samples are cut into
    cut: list[tuple[int, ...]] = field(default_factory=list)  # the ranks that have pieces of the same samples
    tokens: int = 0  # of the global batch; 0 if it is not known
    named: Named | None = None  # what the gradient is a mean over
    factor: float = 1.0  # of the gradient, before clipping
    lowered: list[str] = field(
        default_factory=list
    )  # dtypes that it was computed in, but float32 and float64
    clipped: str = ""  # by how much, to be read after the gradient
    difference: str = ""  # of this mean from the one over all tokens, likewise
    nothing: bool = False  # whether its loss has no gradient
    unseen: str = ""  # what is not judged, of the loss or of an optimizer
    tolerated_weights: float = 0.0
    rows: list[Judgement] = field(default_factory=list)
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
    own: dict[str, Distance],
    near: dict[str, Distance],
    tensors: dict[str, torch.Tensor],
    precision: str,
    dtypes: Mapping[str, torch.dtype] = {},
) -> list[Judgement]:
    """Tensors of one pass, by the rule that strategies are judged by: `near` are the yardstick's distances, one process in the run's dtype.

    `tensors` are the run's own, for their shapes and dtypes, unless `dtypes` has one that it was rounded to before; `precision` is "fp32" or "autocast".
    """
    entries: dict[str, dict] = {
        name: {"shape": list(tensor.shape), "dtype": DTYPES[dtypes.get(name, tensor.dtype)]}
        for name, tensor in tensors.items()
    }
    yardstick = Yardstick(near, entries, precision)
    return [
        Judgement(step, name, distance, *yardstick.tolerance(name, distance))
        for name, distance in own.items()
    ]


def judged_gradients(
    step: int,
    observed: Mapping[str, torch.Tensor],
    right: Sum,
    near: Gradients,
    precision: str,
    factors: Factors | None = None,
    reduced_in: Mapping[str, torch.dtype] = {},
) -> list[Judgement]:
    """The recorded gradients, in their own dtypes, against `right`; `near` is the yardstick. `factors` is told of them, too; `reduced_in` is by parameter."""
    own: dict[str, Distance] = {}
    yardstick: dict[str, Distance] = {}
    for name, reference in right.items():
        plain = near[name]
        distance, yardstick[f"gradient/{name}"] = distances_of([observed[name], plain], reference)
        own[f"gradient/{name}"] = replace(distance, terms=right.largest_term(name))
        if factors is not None:
            factors.add(f"gradient/{name}", observed[name], plain, reference, is_weight=True)
    tensors = {f"gradient/{name}": tensor for name, tensor in observed.items()}
    dtypes = {f"gradient/{name}": dtype for name, dtype in reduced_in.items()}
    rows = judged(step, own, yardstick, tensors, precision, dtypes)
    add_pictures(
        rows,
        lambda row: tensors[row.name].numel(),
        lambda row: (tensors[row.name], right[row.name.removeprefix("gradient/")]),
    )
    return rows
