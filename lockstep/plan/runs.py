"""The runs that --strategies names: each a strategy on a mesh, with options of its own, all fed the same global batches."""

import hashlib
import re
from dataclasses import dataclass, fields

from lockstep.ground.errors import UserError
from lockstep.ground.flags import is_switch
from lockstep.plan.config import BASELINE, PER_RUN, Config, Spec
from lockstep.plan.mesh import AXES, Mesh
from lockstep.plan.strategies import spec_of

HELP = (
    "comma-separated strategies, each a name or path/to/file.py:Class; NAME@MESH sets its mesh, as in fsdp@tp1xdp4; options of one run follow "
    "a colon, with + between them, as in fsdp:sequence_parallel or NAME@tp1xdp2:zero_stage=3+offload_param=cpu; a value cannot hold "
    "commas, + or blanks: give a file, not JSON itself"
)
# STRATEGY, @MESH, :OPTIONS; a strategy is a name, or a file and the class in it
OWN = re.compile(r"(?P<strategy>.+?\.py:[^:@]*)(@(?P<mesh>[^:@]*))?(:(?P<options>.*))?")
REGISTERED = re.compile(r"(?P<strategy>[^:@]*)(@(?P<mesh>[^:@]*))?(:(?P<options>.*))?")


@dataclass(frozen=True)
class Run:
    """A strategy on a mesh, with options. `batch_size` is that of a DP rank; it makes the global batch equal to the baseline's."""

    spec: Spec
    mesh: Mesh
    batch_size: int
    options: tuple[str, ...]  # flags of this run alone
    name: str  # in file names

    @property
    def is_baseline(self) -> bool:
        """Whether it is the run that the others are held against, not another one of the same strategy."""
        return self.name == BASELINE

    @property
    def arguments(self) -> list[str]:
        """The flags by which it differs from other runs."""
        arguments = ["--dp_size", str(self.mesh.dp), "--batch_size", str(self.batch_size)]
        if "tp" in self.spec.axes:
            arguments += ["--tp_size", str(self.mesh.tp)]
        for axis in self.mesh.further_axes:
            arguments += [f"--{axis}_size", str(self.mesh.size(axis))]
        arguments += self.options
        return arguments if self.name == self.spec.name else [*arguments, "--run_name", self.name]


def runs_of(names: str, baseline: Config, tp_size: int) -> list[Run]:
    """The runs of a comma-separated list, the baseline's first.

    A strategy without a mesh of its own has the baseline's dp_size, and `tp_size` if it has tensor parallelism. Raises UserError for
    an unknown strategy, a mesh or an option that it cannot have, or a run named twice.
    """
    asked = [_run(name, baseline, tp_size) for name in names.split(",") if name]
    runs = list({run.name: run for run in [_run(BASELINE, baseline, tp_size), *asked]}.values())
    if len(runs) == 1 or len({run.name for run in asked}) < len(asked):
        raise UserError(f"--strategies {names}: name at least one strategy besides {BASELINE}, each once")
    return runs


def _run(name: str, baseline: Config, tp_size: int) -> Run:
    """The run that one entry of the list, NAME@MESH:OPTIONS, names."""
    parts = OWN.fullmatch(name) or REGISTERED.fullmatch(name)
    if parts is None:
        raise UserError(
            f"--strategies {name}: write NAME@MESH:OPTIONS, as in fsdp@tp1xdp4:prefetch=1+wrap=layer"
        )
    spec = spec_of(parts["strategy"])
    mesh, batch_size = spec.largest(Mesh(dp=baseline.dp_size, tp=tp_size)), baseline.batch_size
    words = [spec.name]
    if parts["mesh"] is not None:
        mesh = _mesh(parts["mesh"], spec, f"--strategies {name}")
        batch = baseline.dp_size * baseline.batch_size
        if batch % mesh.dp:
            raise UserError(
                f"--strategies {name}: {batch} sequences cannot be divided among {mesh.dp} DP ranks; change --batch_size or --dp_size"
            )
        batch_size = batch // mesh.dp
        words.append(parts["mesh"])
    options = {}
    if parts["options"] is not None:
        options = _options(parts["options"], spec, f"--strategies {name}")
    words += [key if value is None else f"{key}-{_in_a_name(value)}" for key, value in options.items()]
    flags = [f"--{key}" if value is None else f"--{key}={value}" for key, value in options.items()]
    return Run(spec, mesh, batch_size, tuple(flags), _short("_".join(words), 100))


def _mesh(text: str, spec: Spec, where: str) -> Mesh:
    """The mesh that a text such as tp1xdp4 names. Raises UserError, beginning with `where`, for one that the strategy cannot have."""
    # Written again, the sizes are the text, unless some of it is no size, or an axis is named twice.
    sizes = dict(re.findall(r"([a-z]+)([1-9]\d{0,5})(?:x|$)", text))
    if not text or "x".join(map("".join, sizes.items())) != text:
        raise UserError(f"{where}: {text or 'nothing'} is not a mesh; write it as tp1xdp4")
    unknown = next((axis for axis in sizes if axis not in AXES), None)
    if unknown:
        meant = {library: flag for flag, library in spec.also_called.items()}.get(f"{unknown}_size")
        remedy = f"write {meant.removesuffix('_size')}" if meant else f"the axes are {', '.join(AXES)}"
        raise UserError(f"{where}: there is no axis {unknown}; {remedy}")
    unused = next((axis for axis, size in sizes.items() if axis not in spec.axes and int(size) > 1), None)
    if unused:
        raise UserError(f"{where}: {spec.label} has no axis {unused}; it has {', '.join(spec.axes)}")
    return Mesh(**{axis: int(size) for axis, size in sizes.items()})


def _options(text: str, spec: Spec, where: str) -> dict[str, str | None]:
    """Option -> value, None for one without a value. Raises UserError for one that the strategy does not have."""
    # Option -> whether it is a switch, which takes no value
    known = {option.name: is_switch(spec.options, option) for option in fields(spec.options)}
    known |= {name: off is False for name, off in PER_RUN.items()}
    values: dict[str, str | None] = {}
    for part in text.split("+"):
        name, equals, value = part.partition("=")
        if name not in known:
            raise UserError(
                f"{where}: {spec.label} has no option {name or 'without a name'}; it has {', '.join(known)}"
            )
        if name in values:
            raise UserError(f"{where}: {name} is given twice; leave one out")
        if equals and known[name]:
            raise UserError(f"{where}: {name} takes no value; leave ={value} out")
        if equals and (not value or value.startswith("{") or re.search(r"\s", value)):
            raise UserError(
                f"{where}: {name} needs a value without blanks, or the path of a file, not JSON itself"
            )
        values[name] = value if equals else None
    return values


def _in_a_name(value: str) -> str:
    """A value as a part of a file name: letters, digits, _ and dots, and a hash where anything else is replaced or cut."""
    kept = re.sub(r"[^A-Za-z0-9_.]", "-", value)[-20:]
    return kept if kept == value else f"{kept}-{_hash(value)}"


def _short(name: str, most: int) -> str:
    """A name cut to `most` characters, with a hash at its end if it was cut."""
    return name if len(name) <= most else f"{name[: most - 7]}-{_hash(name)}"


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:6]
