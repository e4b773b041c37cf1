"""The runs that --strategies names: each a strategy on a mesh, all fed the same global batches."""

import re
from dataclasses import dataclass

from lockstep.config import Config
from lockstep.errors import UserError
from lockstep.mesh import AXES, Mesh
from lockstep.strategies import BASELINE, Row, row_of

HELP = (
    "comma-separated strategies, each a name or path/to/file.py:Class; NAME@MESH sets its mesh, as in "
    "fsdp@tp1xdp4"
)


@dataclass(frozen=True)
class Run:
    """A strategy on a mesh. `batch_size` is that of a DP rank; it makes the global batch equal to the baseline's."""

    row: Row
    mesh: Mesh
    batch_size: int
    name: str  # in file names

    @property
    def arguments(self) -> list[str]:
        """The flags by which it differs from other runs."""
        own = ["--dp_size", str(self.mesh.dp), "--batch_size", str(self.batch_size)]
        if "tp" in self.row.axes:
            own += ["--tp_size", str(self.mesh.tp)]
        for axis in self.mesh.further_axes:
            own += [f"--{axis}_size", str(self.mesh.size(axis))]
        return own if self.name == self.row.name else [*own, "--run_name", self.name]


def runs_of(names: str, baseline: Config, tp_size: int) -> list[Run]:
    """The runs of a comma-separated list, the baseline's first.

    A strategy without a mesh of its own has the baseline's dp_size, and `tp_size` if it has tensor parallelism. Raises UserError for
    an unknown strategy, a mesh that it cannot have, or a run named twice.
    """
    asked = [_run(name, baseline, tp_size) for name in names.split(",") if name]
    runs = list({run.name: run for run in [_run(BASELINE, baseline, tp_size), *asked]}.values())
    if len(runs) == 1 or len({run.name for run in asked}) < len(asked):
        raise UserError(f"--strategies {names}: name at least one strategy besides {BASELINE}, each once")
    return runs


def _run(name: str, baseline: Config, tp_size: int) -> Run:
    strategy, at, text = name.rpartition("@")
    row = row_of(strategy if at else name)
    if not at:
        mesh = row.largest(Mesh(dp=baseline.dp_size, tp=tp_size))
        return Run(row, mesh, baseline.batch_size, row.name)
    sizes = dict(re.findall(r"([a-z]+)([1-9]\d{0,5})(?:x|$)", text))
    if not text or "x".join(map("".join, sizes.items())) != text or not sizes.keys() <= AXES.keys():
        raise UserError(f"--strategies {name}: {text or 'nothing'} is not a mesh; write it as tp1xdp4")
    unknown = next((axis for axis, size in sizes.items() if axis not in row.axes and int(size) > 1), None)
    if unknown:
        raise UserError(
            f"--strategies {name}: {row.label} has no axis {unknown}; it has {', '.join(row.axes)}"
        )
    mesh = Mesh(**{axis: int(size) for axis, size in sizes.items()})
    batch = baseline.dp_size * baseline.batch_size
    if batch % mesh.dp:
        raise UserError(
            f"--strategies {name}: {batch} sequences cannot be divided among {mesh.dp} DP ranks; change --batch_size or --dp_size"
        )
    return Run(row, mesh, batch // mesh.dp, f"{row.name}_{text}")
