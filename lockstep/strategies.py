"""The registry: one row per strategy, with everything that others may ask about it. No other file compares a strategy's name.

A user's own strategy is a row made on the spot, from `path/to/file.py:Class`.
"""

import argparse
import hashlib
import importlib
import importlib.util
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any

from lockstep.errors import UserError, first_line
from lockstep.inputs import user_file
from lockstep.inputs.user_file import import_file
from lockstep.mesh import AXES, Mesh

BASELINE = "ddp"  # what the others are held against; it writes the initial weights
TORCH_HANDLES = "lockstep.faults.torch_handles:TorchHandles"
BALANCED_POSITIONS = {"cp": "lockstep.training.cuts:BALANCED"}
# The colours of figures are those of Okabe and Ito, which colour-blind people tell apart. Vermilion is a tolerance's, or what was missed.
BLUE, ORANGE, VERMILION = "#0072B2", "#E69F00", "#D55E00"
FURTHER_COLORS = ("#009E73", "#CC79A7", "#56B4E9", "#F0E442")  # green, purple, sky blue, yellow
# Options of all strategies that one of several compared runs may have, and the value that leaves them out
PER_RUN = {"activation_checkpointing": False, "compile": "off"}


@dataclass(frozen=True)
class Row:
    """What is known about a strategy."""

    name: str  # on the command line, in file names
    label: str  # to people
    color: str  # in figures
    axes: tuple[str, ...]  # the mesh axes that it can use
    factory: str  # "module:Class" or "/path/to/file.py:Class"; imported when it is built
    handles: str = TORCH_HANDLES  # what planted faults take hold of
    program: str = "python -m lockstep.train"  # what starts it
    whole_replicas: bool = False  # every rank holds all weights, gradients and moments
    # Under autocast with tensor parallelism, a float32 bias is added to a bfloat16 product, and the sum is not rounded again. This is
    # by design and no reason to refuse a comparison (docs/findings.md).
    float32_biases_under_autocast: bool = False
    ranks_share_gpus: bool = True  # over gloo, several ranks may use one GPU
    faults: str = ""  # a module with planted bugs that only it can have
    also_called: dict[str, str] = (
        field(  # flag of all strategies -> the name that its library has for it, a flag, too
            default_factory=dict, hash=False
        )
    )
    options: str = ""  # "module:Class", a dataclass: flags beyond those that all strategies have
    file_option: str = (
        ""  # of those, the flag that takes its library's own configuration, a file or JSON itself
    )
    library: str = ""  # a package beyond torch that it runs on; histories and dumps record its version
    sharding: str = ""  # "module:function" from a configuration to what its contract says is sharded, and how gradients are reduced
    contract: str = ""  # "module:function" from a configuration to entries of its contract in which its options differ by design
    cuts: dict[str, str] = (
        field(  # mesh axis -> "module:NAME" of a lockstep.training.cuts.Cut: how the axis divides the work
            default_factory=lambda: BALANCED_POSITIONS, hash=False
        )
    )
    requires: str = ""  # "module:function" of a configuration and an architecture; raises UserError if something is missing or contradictory
    defaults: str = (
        ""  # "module:function" from the parsed flags to the defaults that a file among them gives to others
    )
    resolved: str = ""  # "module:function" of a configuration and an architecture: what the library is told, as text for people
    preload: str = ""  # "module:function" that imports, in a process that forks ranks for CPUs, what they would import one by one

    @property
    def is_baseline(self) -> bool:
        return self.name == BASELINE

    @property
    def place(self) -> str:
        """Its name on a command line, valid in any folder."""
        return self.name if self.name in ROWS else self.factory

    def own_options(self) -> tuple[Field, ...]:
        """The flags that only this strategy has; the metadata of a field are the arguments of argparse's add_argument."""
        return fields(load(self.options)) if self.options else ()

    def recorded_options(self) -> list[str]:
        """The names of the flags that only this strategy has, and that a run records: all but those that name a path."""
        return [option.name for option in self.own_options() if option.metadata.get("type") is not Path]

    def label_of(self, mesh: Mesh, config: Mapping[str, Any]) -> str:
        """A run to people: the strategy, its mesh, and those of its options that are not at their defaults.

        `config` is a configuration as a run has it, or as it records it. Paths are left out, because they are not recorded.
        """
        options = config.get("own", {})
        defaults = {option.name: option.default for option in self.own_options()}
        changed = {name: value for name, value in options.items() if value != defaults.get(name)}
        changed |= {name: config[name] for name, off in PER_RUN.items() if config.get(name, off) != off}
        shown = [
            f"{name}={str(value).lower()}"
            if isinstance(value, (int, float, str)) and value is not True
            else name
            for name, value in changed.items()
            if not isinstance(value, Path)
        ]
        return f"{self.label} ({', '.join([mesh.label, *shown])})"

    def would_take(self, name: str, value: object) -> bool:
        """Whether a flag that only this strategy has can have given this value, as a run records it."""
        option = next((option for option in self.own_options() if option.name == name), None)
        if option is None or value is None:
            return option is not None and option.default is None
        if option.metadata.get("action") == "store_true":
            return isinstance(value, bool)
        if "type" not in option.metadata:
            return isinstance(value, str) and value in option.metadata.get("choices", [value])
        try:  # as JSON: the parser of a flag that takes a file would open one that a string names
            given = option.metadata["type"](json.dumps(value))
        except (argparse.ArgumentTypeError, ValueError):
            return False
        return getattr(given, "recorded", given) == value and value in option.metadata.get("choices", [value])

    def largest(self, mesh: Mesh) -> Mesh:
        """The given mesh without the axes that the strategy cannot use."""
        return Mesh(**{axis: size for axis, size in mesh.sizes.items() if axis in self.axes})


ROWS = {
    row.name: row
    for row in (
        Row(
            name=BASELINE,
            label="DDP",
            color="black",
            axes=("dp",),
            factory="ddp_strategy:DDPStrategy",
            handles="lockstep.faults.torch_handles:DDPHandles",
            program="train_ddp.py",
            whole_replicas=True,
            options="lockstep.training.ddp_options:Options",
            sharding="lockstep.training.ddp_options:expected",
            contract="lockstep.training.ddp_options:contract",
            requires="lockstep.training.ddp_options:require",
        ),
        Row(
            name="deepspeed",
            label="DeepSpeed AutoTP",
            color=ORANGE,
            axes=("dp", "cp", "tp"),
            factory="autotp_strategy:AutoTPStrategy",
            handles="lockstep.deepspeed.handles:AutoTPHandles",
            program="train_deepspeed.py",
            float32_biases_under_autocast=True,
            ranks_share_gpus=False,
            faults="lockstep.deepspeed.faults",
            also_called={"cp_size": "sp_size"},
            options="lockstep.deepspeed.options:Options",
            file_option="deepspeed_config",
            library="deepspeed",
            sharding="lockstep.deepspeed.zero:expected",
            cuts={"cp": "lockstep.training.cuts:CONTIGUOUS"},
            requires="lockstep.deepspeed.build:require",
            defaults="lockstep.deepspeed.configuration:defaults",
            resolved="lockstep.deepspeed.configuration:text",
            preload="lockstep.deepspeed.build:preload",
        ),
        Row(
            name="fsdp",
            label="FSDP+DTensor",
            color=BLUE,
            axes=("pp", "dp", "cp", "tp"),
            factory="fsdp_strategy:FSDPStrategy",
            handles="lockstep.faults.torch_handles:FSDPHandles",
            program="train_fsdp.py",
            faults="lockstep.faults.sharding",
            options="lockstep.training.fsdp_options:Options",
            sharding="lockstep.training.fsdp_options:expected",
            cuts={**BALANCED_POSITIONS, "pp": "lockstep.training.fsdp_options:PIPELINE"},
            requires="lockstep.training.fsdp_options:require",
        ),
    )
}


def row_of(name: str) -> Row:
    """The row of a registered name, or of a user's `path/to/file.py:Class`. Raises UserError for anything else.

    The class may have the attributes `label` (default: its name), `axes` (dp and tp), `handles` (TORCH_HANDLES), `cuts` (cp: an early and a
    late piece of each sequence).
    """
    if name in ROWS:
        return ROWS[name]
    path, separator, class_name = name.rpartition(":")
    if not separator or not path.endswith(".py"):
        raise UserError(
            f"there is no strategy {name}; choose from {', '.join(ROWS)}, or give your own as path/to/file.py:Class"
        )
    factory = user_file.absolute(name)
    own = load(factory)
    axes = _require_strategy(own, f"{path}: {class_name}")
    return Row(
        name=re.sub(r"\W", "_", class_name).lower(),
        label=getattr(own, "label", class_name),
        color=color_of(class_name),
        axes=axes,
        factory=factory,
        handles=getattr(own, "handles", TORCH_HANDLES),
        cuts=getattr(own, "cuts", BALANCED_POSITIONS),
    )


def _require_strategy(own: Any, where: str) -> tuple[str, ...]:
    """The axes of a user's class. Raises UserError unless it has the methods of a strategy, and axes of the mesh."""
    protocol = load("lockstep.training.strategy:Strategy")
    methods = [
        name for name, member in vars(protocol).items() if not name.startswith("_") and callable(member)
    ]
    missing = [name for name in methods if not hasattr(own, name)]
    if not isinstance(own, type) or missing:
        what = f"has no {', '.join(missing)}" if isinstance(own, type) else "is no class"
        raise UserError(
            f"{where} {what}; derive it from TorchStrategy, or write what docs/your-own-strategy.md lists"
        )
    axes = getattr(own, "axes", ("dp", "tp"))
    unknown = [str(axis) for axis in axes if axis not in AXES]
    if unknown or isinstance(axes, str):
        raise UserError(f"{where}: axes is {axes!r}; it must be a tuple of some of {', '.join(AXES)}")
    return tuple(axes)


def recorded(name: str) -> Row:
    """The row of a recorded strategy. The file of a user's own may be gone; then the row has what follows from its name."""
    if name in ROWS or ":" in name:
        return row_of(name)
    return Row(name=name, label=name, color=color_of(name), axes=tuple(AXES), factory="")


def color_of(name: str) -> str:
    """The colour of a run in figures: its strategy's, or one that is chosen by its name."""
    number = int(hashlib.sha256(name.encode()).hexdigest(), 16)
    return ROWS[name].color if name in ROWS else FURTHER_COLORS[number % len(FURTHER_COLORS)]


def in_order(names: Iterable[str]) -> list[str]:
    """Names of runs: the baseline first, then in the registry's order, then by name."""
    order = list(ROWS)
    return sorted(names, key=lambda name: (order.index(name) if name in ROWS else len(order), name))


def others() -> list[str]:
    """The registered strategies that are held against the baseline."""
    return [name for name in ROWS if name != BASELINE]


def load(place: str) -> Any:
    """What "module:Name" or "/path/to/file.py:Name" names. Raises UserError if it is not there."""
    module_name, _, name = place.rpartition(":")
    try:
        module = (
            import_file(Path(module_name))
            if module_name.endswith(".py")
            else importlib.import_module(module_name)
        )
    except (OSError, SyntaxError, ImportError) as error:
        raise UserError(f"{module_name}: cannot be imported ({first_line(error)})") from error
    if not hasattr(module, name):
        raise UserError(f"{module_name} has no {name}; name the class of the strategy")
    return getattr(module, name)
