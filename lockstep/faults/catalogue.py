"""The catalogue of planted bugs: each a small patch of a live strategy or of a library call, in the real distributed run.

A fault is a generator function. The code before its `yield` runs before the strategy is built. `yield` gives the strategy, which the
code after it changes. The docstring says what went wrong in a system that people used.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lockstep.faults.evidence import Evidence
from lockstep.faults.planting import Plant, Planting
from lockstep.plan.mesh import Mesh

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
    cause: str  # that the diagnosis must name, if it names any
    evidence: Evidence  # what it must then say
    first: str  # the first tensor that it breaks
    step: int = 1  # in this step
    model: str = "tiny-qwen2"
    arguments: tuple[str, ...] = ()  # further flags that it needs to do anything
    # In which it does anything: rounding to bfloat16 is a fault in fp32 runs only
    precisions: tuple[str, ...] = ("fp32", "autocast")
    axes: tuple[str, ...] = ("dp",)  # the mesh axes that must have several ranks
    needs: tuple[str, ...] = ()  # the handles that the strategy must offer
    mesh: Mesh = Mesh(dp=2, tp=2)  # without the axes that the strategy cannot use
    flags: tuple[str, ...] = ()  # of the strategy alone, in its run without the fault as well
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
