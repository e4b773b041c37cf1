"""The comparison of real dumps."""

from pathlib import Path

from lockstep.dumps.dump import Dump
from lockstep.verdict.comparison import compare_dumps
from lockstep.verdict.result import Result


def replays(**dumps: Path) -> dict[str, Dump]:
    """The replay of each dump, which lies beside it."""
    return {name: Dump(path.with_name(f"replay_{path.name}")) for name, path in dumps.items()}


def compared(plain: Path, **runs: Path) -> Result:
    """Dumps of runs, held against PLAIN/reference and PLAIN/ddp."""
    dumps = {"ddp": plain / "ddp", **runs}
    found = {name: Dump(path) for name, path in dumps.items()}
    return compare_dumps(Dump(plain / "reference"), found, replays(**dumps))
