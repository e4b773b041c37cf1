"""The catalogue of planted bugs: each a small patch of a live strategy or of a library call, in the real distributed run.

A fault is a generator function. The code before its `yield` runs before the strategy is built. `yield` gives the
strategy, which the code after it changes. The docstring says what went wrong in a system that people used.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lockstep.faults.planting import Plant, Planting
from lockstep.plan.config import JUDGED
from lockstep.plan.mesh import Mesh

# A sentence, several of which any will do, or a function that says whether a sentence will do.
Evidence = str | tuple[str, ...] | Callable[[str], bool]
# No rule has a true sentence for this fault, so every cause that is named, with whatever evidence, is wrong.
NO_SENTENCE: Evidence = ()
NUMBER = r"[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?"
# A factor from bfloat16 products is off by up to two in a thousand; a learning rate after one decay too many by four.
RELATIVE, ABSOLUTE = 3e-3, 1e-6


def agrees(expected: Evidence, said: str) -> bool:
    """Whether a sentence is the expected one.

    In the expected one, `#` stands for any number and `...` for any text. A number that is written there must agree to
    three in a thousand.
    """
    if callable(expected):
        return expected(said)
    if isinstance(expected, tuple):
        return any(agrees(sentence, said) for sentence in expected)
    parts = re.split(rf"({NUMBER}|#|\.\.\.)", expected)
    marks = {"#": NUMBER, "...": ".*"}
    pattern = [
        marks.get(part, f"({NUMBER})") if index % 2 else re.escape(part) for index, part in enumerate(parts)
    ]
    match = re.fullmatch("".join(pattern), said, re.DOTALL)
    expected_numbers = [float(part) for part in parts[1::2] if part not in marks]
    return match is not None and all(
        math.isclose(float(text), number, rel_tol=RELATIVE, abs_tol=ABSOLUTE)
        for text, number in zip(match.groups(), expected_numbers, strict=True)
    )


# The precisions of faults that weights in bfloat16 do not show: a step or a factor of one in a thousand is rounded away.
WEIGHTS_IN_FP32 = ("fp32", "autocast")

BUG_CLASSES = (
    "TP reduction missing",
    "TP reduction doubled",
    "DP reduction missing",
    "wrong group or scale",
    "grad norm, clipping",
    "accumulation, normalisation",
    "data",
    "random state",
    "weights",
    "precision, optimizer",
    "context parallelism",
    "sequence parallelism",
    "pipeline",
)


Planter = Callable[[Planting], Plant]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One planted bug and what the verdict must say about it."""

    name: str
    story: str  # one sentence
    plant: Planter
    seen_in: str  # OWNER/REPO number of a public thread
    bug_class: str
    cause: str  # what the diagnosis must name, if it names any
    evidence: Evidence  # what it must then say
    first: str  # the first tensor that it breaks
    step: int = 1  # in this step
    model: str = "tiny-qwen2"
    arguments: tuple[str, ...] = ()  # further flags that it needs to do anything
    # Those in which it does anything: rounding to bfloat16 is a fault in fp32 runs only
    precisions: tuple[str, ...] = JUDGED
    axes: tuple[str, ...] = ("dp",)  # the mesh axes that must have several ranks
    needs: tuple[str, ...] = ()  # the handles that the strategy must offer
    mesh: Mesh = Mesh(dp=2, tp=2)  # without the axes that the strategy cannot use
    flags: tuple[str, ...] = ()  # of the strategy alone, also in its run without the fault
    named: bool = False  # it names modules, as they are called in `model`
    only: str = ""  # the strategy that brings it; "": any that offers what it needs

    def __post_init__(self) -> None:
        if self.bug_class not in BUG_CLASSES:
            raise ValueError(f"{self.bug_class!r} is no class of bugs; choose from {BUG_CLASSES}")


CATALOGUE: dict[str, Fault] = {}


def fault(**about: Any) -> Callable[[Planter], Planter]:
    """Enter a generator function into the catalogue under its own name. `about`: the fields of `Fault` from `seen_in` on."""

    def enter(plant: Planter) -> Planter:
        story = " ".join((plant.__doc__ or "").split())
        CATALOGUE[plant.__name__] = Fault(name=plant.__name__, story=story, plant=plant, **about)
        return plant

    return enter
