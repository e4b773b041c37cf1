"""The registry: the strategies by name, each with its spec. A user's own, `path/to/file.py:Class`, may bring one."""

import hashlib
import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from lockstep.ground import user_file
from lockstep.ground.errors import UserError
from lockstep.plan.config import BASELINE, Spec, is_taken
from lockstep.plan.ddp import DDP
from lockstep.plan.deepspeed import DeepSpeed
from lockstep.plan.fsdp import FSDP
from lockstep.plan.mesh import AXES

# green, purple, sky blue; yellow is too pale for a line
FURTHER_COLORS = ("#009E73", "#CC79A7", "#56B4E9")
SPECS: dict[str, Spec] = {spec.name: spec for spec in (DDP(), DeepSpeed(), FSDP())}


def spec_of(name: str) -> Spec:
    """The spec of a registered name, or of a user's `path/to/file.py:Class`. Raises UserError for anything else.

    The class may have an attribute `spec`, or single fields of one: `label` (default: its name), `axes` (dp and tp), `handles`
    (TORCH_HANDLES), `cuts` (cp: an early and a late piece of each sequence).
    """
    if name in SPECS:
        return SPECS[name]
    path, separator, class_name = name.rpartition(":")
    if not separator or not path.endswith(".py"):
        raise UserError(
            f"there is no strategy {name}; choose from {', '.join(SPECS)}, or give your own as path/to/file.py:Class"
        )
    factory = user_file.absolute(name)
    cls = load(factory)
    attributes = {key: getattr(cls, key) for key in ("label", "axes", "handles", "cuts") if hasattr(cls, key)}
    spec = replace(getattr(cls, "spec", Spec()), **attributes)
    if not isinstance(spec.axes, tuple) or not set(spec.axes) <= AXES.keys():
        raise UserError(
            f"{path}: {class_name}: axes is {spec.axes!r}; it must be a tuple of some of {', '.join(AXES)}"
        )
    name = re.sub(r"\W", "_", class_name).lower()
    if name in SPECS or is_taken(name):
        raise UserError(
            f"{path}: {class_name}: a run of this strategy would be called {name}, as one of Lockstep's own; rename the class"
        )
    return replace(
        spec,
        name=name,
        label=spec.label or class_name,
        color=color_of(class_name),
        factory=factory,
        program=Spec.program,
    )


def recorded(name: str) -> Spec:
    """The spec of a recorded strategy. The file of a user's own may be gone; then the spec has what follows from its name."""
    return SPECS.get(name) or Spec(name=name, label=name, color=color_of(name), axes=tuple(AXES))


def color_of(name: str) -> str:
    """The colour of a run in figures: its strategy's, or one that is chosen by its name."""
    number = int(hashlib.sha256(name.encode()).hexdigest(), 16)
    return SPECS[name].color if name in SPECS else FURTHER_COLORS[number % len(FURTHER_COLORS)]


def in_order(names: Iterable[str]) -> list[str]:
    """Names of runs: the baseline first, then in the registry's order, then by name."""
    order = list(SPECS)
    return sorted(names, key=lambda name: (order.index(name) if name in SPECS else len(order), name))


def others() -> list[str]:
    """The registered strategies that are held against the baseline."""
    return [name for name in SPECS if name != BASELINE]


def load(place: str) -> Any:
    """What "module:Name" or "/path/to/file.py:Name" names. Raises UserError if it is not there."""
    return user_file.load(place, "--strategy")
