"""What was found of one recorded step: its tensors, each with what is tolerated, and what is wrong, in sentences."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from lockstep.verdict.distance import Distance, distance_of, distance_of_numbers
from lockstep.verdict.factors import Factors
from lockstep.verdict.judgement import Judgement, Yardstick, add_pictures
from lockstep.verdict.normalisation import Gradients, Named, Sum

MOSTLY = 0.9  # of an error that a factor on all of a tensor explains
DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


# How the end of a sentence begins, and how it begins alone
SUBJECTS = {"which is": "the factor is", "they were": "the gradients were"}


class Wrong(str):
    """A sentence about what is wrong. Its end may say why: `cause`, "" where nothing explains it. A plain text is a cause as a whole."""

    what: str
    cause: str

    def __new__(cls, what: str, why: str = "") -> "Wrong":
        said = super().__new__(cls, what + why)
        said.what, said.cause = what, why.lstrip(":;, ")
        for word, subject in SUBJECTS.items():
            said.cause = re.sub(f"^{word}", subject, said.cause)
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
    wrong: list[str] = field(default_factory=list)  # sentences, the first is the headline
    notes: list[str] = field(default_factory=list)

    @property
    def too_far(self) -> list[Judgement]:
        return [row for row in self.rows if row.too_far]

    @property
    def nearest(self) -> Judgement | None:
        """The row that is nearest to what is tolerated, or farthest beyond."""
        return max(self.rows, key=lambda row: row.multiple, default=None)

    def leave(self, said: str) -> None:
        """Say with the verdict what was not judged."""
        self.unseen = f"{self.unseen}; {said}" if self.unseen else said

    def by_itself(self, name: str) -> Judgement | None:
        return next((row for row in self.alone if row.name == name), None)

    def number(self, name: str, own: float, reference: float, tolerated: float) -> Judgement:
        """Adds a row of a single number; `tolerated` is absolute."""
        row = Judgement(self.step, name, distance_of_numbers(own, reference), tolerated, tolerated)
        self.rows.append(row)
        return row


def times(row: Judgement) -> str:
    """By what factor a row is off, to be read after its errors; "" if its error is not mostly a factor, or one is told of a part."""
    distance = row.distance
    mostly = not row.of_factor and abs(distance.scale - 1) * distance.change > MOSTLY * distance.error
    what = "it" if distance.change == distance.norm else "its change"
    return f"; {what} is {distance.scale:.5g} times the reference's" if mostly else ""


def described(row: Judgement, alone: Judgement | None) -> str:
    """What is wrong with a row: the factor of a part, which is known to the same row of modules by themselves, or else its errors."""
    factor = alone.factor if alone is not None and alone.of_factor else None
    return factor.describe() if factor is not None else row.describe() + times(row)


def briefly(row: Judgement) -> str:
    """What is wrong with a row: its factor, or else its errors."""
    return row.of_factor or row.describe() + times(row)


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
        distance = distance_of(observed[name], reference)
        own[f"gradient/{name}"] = replace(distance, terms=right.largest_term(name))
        yardstick[f"gradient/{name}"] = distance_of(plain, reference)
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
