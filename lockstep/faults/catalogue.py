"""The catalogue of planted bugs: each a small patch of a live strategy or of a library call, in the real distributed run.

A fault is a generator function. The code before its `yield` runs before the strategy is built. `yield` gives the strategy, which the
code after it changes. The docstring says what went wrong in a system that people used.
"""

from collections.abc import Callable
from dataclasses import dataclass

from lockstep.faults.evidence import Evidence
from lockstep.faults.planting import Plant, Planting
from lockstep.mesh import Mesh

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


@dataclass(frozen=True)
class Fault:
    """One planted bug and what the verdict must say about it."""

    name: str
    story: str  # one sentence
    seen_in: str  # OWNER/REPO number of a public thread
    bug_class: str
    cause: str  # that the diagnosis must name, if it names any
    evidence: Evidence  # what it must then say
    first: str  # the first tensor that it breaks
    step: int  # in this step
    model: str
    arguments: tuple[str, ...]  # further flags that it needs to do anything
    precisions: tuple[
        str, ...
    ]  # in which it does anything: rounding to bfloat16 is a fault in fp32 runs only
    axes: tuple[str, ...]  # the mesh axes that must have several ranks
    needs: tuple[str, ...]  # the handles (handles.py) that the strategy must offer
    mesh: Mesh  # without the axes that the strategy cannot use
    plant: Planter
    flags: tuple[str, ...] = ()  # of the strategy alone, in its run without the fault as well
    named: bool = False  # it names modules, as they are called in `model`
    only: str = ""  # the strategy that brings it; "": any that offers what it needs


SMALL_MESH = Mesh(dp=2, tp=2)
CATALOGUE: dict[str, Fault] = {}


def fault(
    *,
    seen_in: str,
    bug_class: str,
    cause: str,
    evidence: Evidence,
    first: str,
    step: int = 1,
    model: str = "tiny-qwen2",
    arguments: tuple[str, ...] = (),
    precisions: tuple[str, ...] = ("fp32", "autocast"),
    axes: tuple[str, ...] = ("dp",),
    needs: tuple[str, ...] = (),
    mesh: Mesh = SMALL_MESH,
    flags: tuple[str, ...] = (),
    named: bool = False,
    only: str = "",
) -> Callable[[Planter], Planter]:
    """Enter a generator function into the catalogue under its own name."""
    if bug_class not in BUG_CLASSES:
        raise ValueError(f"{bug_class!r} is no class of bugs; choose from {BUG_CLASSES}")

    def enter(plant: Planter) -> Planter:
        story = " ".join((plant.__doc__ or "").split())
        CATALOGUE[plant.__name__] = Fault(
            plant.__name__,
            story,
            seen_in,
            bug_class,
            cause,
            evidence,
            first,
            step,
            model,
            arguments,
            precisions,
            axes,
            needs,
            mesh,
            plant,
            flags,
            named,
            only,
        )
        return plant

    return enter
