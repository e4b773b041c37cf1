"""Compare the loss histories in a folder: statistics, a figure of two panels, and a verdict.

    python plot_loss_curves.py --input_dir runs/loss_curves --output runs/loss_curves/loss_curves.png

Exit status: 0 PASS, every strategy agrees with DDP within the tolerance; 1 FAIL, one does not, moves nothing, or has a NaN,
or NOT JUDGED, the control run is no measure of rounding; 2 the runs cannot be compared (different weights, batches, length
or contract; a damaged file), or a usage error; 3 an internal error.
"""

if __name__ == "__main__":
    from lockstep import startup

    startup.begin()  # first: from now on Ctrl-C and a missing package are one line each

import datetime
import json
import math
import os
import shlex
import sys
from pathlib import Path

from lockstep import strategies
from lockstep.config import Parser
from lockstep.errors import UserError, printable, run_program
from lockstep.files import require_writable_folder, write_text
from lockstep.losses import curve_report as report
from lockstep.losses.curves import (
    FAIL,
    NOT_JUDGED,
    PASS,
    compare,
    require_comparable,
    tolerance_for,
)
from lockstep.mesh import Mesh
from lockstep.strategies import BASELINE, in_order
from lockstep.training import history
from lockstep.training.history import History

FIGURES = (".png", ".pdf", ".svg")


def main(argv: list[str] | None = None) -> int:
    return run_program("plot_loss_curves.py", lambda: _main(argv))


def _main(argv: list[str] | None) -> int:
    parser = Parser(prog="plot_loss_curves.py", description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--input_dir", type=Path, default=Path("runs/loss_curves"), help="folder with loss_*.json")
    parser.add_argument("--output", type=Path, help="figure to write (default: loss_curves.png in the folder)")
    parser.add_argument("--json", type=Path, help="write the same comparison as data to this file")
    options = parser.parse_args(argv)
    output = options.output or options.input_dir / "loss_curves.png"
    _require_outputs(options.input_dir, output, options.json)
    command = shlex.join(["plot_loss_curves.py", *(sys.argv[1:] if argv is None else argv)])
    return run(options.input_dir, output, options.json, command)


def _require_outputs(input_dir: Path, output: Path, json_path: Path | None) -> None:
    """Raise UserError for outputs that could not be written in the end. Remove an older verdict: it must not pass for it."""
    if output.suffix not in FIGURES:
        raise UserError(f"--output {output}: the name must end in {', '.join(FIGURES)}")
    if not input_dir.is_dir():
        raise UserError(f"--input_dir {input_dir}: no such folder; give the --loss_output_dir of the training runs")
    inputs = {os.path.realpath(path) for path in _paths(input_dir).values()}
    for option, path in (("--output", output), ("--json", json_path)):
        if path is None:
            continue
        require_writable_folder(path.parent, option)
        if path.is_dir():
            raise UserError(f"{option} {path}: is a folder; give the name of a file")
        if os.path.realpath(path) in inputs:
            raise UserError(f"{option} {path}: is a loss history, which is read and not written; choose another name")
    if json_path is not None:
        if os.path.realpath(json_path) == os.path.realpath(output):
            raise UserError(f"--json {json_path}: is the figure's name, too; choose another name")
        json_path.unlink(missing_ok=True)


def _paths(input_dir: Path) -> dict[str, Path]:
    """Every loss_NAME.json of a folder by its NAME: the baseline's first, the control's last."""
    names = {path.stem.removeprefix("loss_") for path in input_dir.glob("loss_*.json")}
    ordered = in_order(names - {history.CONTROL})
    return {name: history.path_of(input_dir, name) for name in (*ordered, *(names & {history.CONTROL}))}


def _read(input_dir: Path) -> tuple[dict[str, History], History | None]:
    """The strategies' histories, in their order, and the control's. Raises UserError for one that is not what its name says."""
    found = {name: history.read(path) for name, path in _paths(input_dir).items() if os.path.lexists(path)}
    if not found.keys() - {history.CONTROL}:
        raise UserError(f"--input_dir {input_dir}: no {history.path_of(Path(), BASELINE)} and no other loss_NAME.json; train first")
    for name, one in found.items():
        path, run = _paths(input_dir)[name], one.run
        config = run["config"]
        row, mine = strategies.recorded(config["strategy"]), config["run_name"] or config["strategy"]
        if mine != (BASELINE if name == history.CONTROL else name) or run["config"]["noise_control"] != (name == history.CONTROL):
            what = f"{mine}'s" + (" control" if run["config"]["noise_control"] else "")
            raise UserError(f"{path}: is a history of {what} run, and not what its name says; put each under its own name")
        label = f"{row.label} ({Mesh(dp=run['mesh'][0], tp=run['mesh'][1]).label})" + (", control" if name == history.CONTROL else "")
        if run["label"] != label and row.factory:
            raise UserError(f"{path}: label is {printable(run['label'], 80)!r}, it must be {label!r}; run its training again")
        if not one.steps:
            raise UserError(f"{path}: no step was recorded ({printable(one.ended or 'killed', 200)}); run its training again")
    control = found.pop(history.CONTROL, None)
    return found, control


def run(input_dir: Path, output: Path, json_path: Path | None, command: str) -> int:
    histories, control = _read(input_dir)
    print(report.statistics(histories))
    baseline, others = histories.get(BASELINE), [one for name, one in histories.items() if name != BASELINE]
    tolerance = None
    why_none = UserError(f"--input_dir {input_dir}: only {', '.join(histories)}; a verdict needs DDP and another run")
    if baseline is not None and others:
        try:
            tolerance = tolerance_for(baseline, control)
        except UserError as error:
            why_none = error
    report.draw(histories, control, tolerance, output)
    print(f"\nFigure: {printable(output)}")
    if tolerance is None:
        raise why_none

    verdicts, refusals = [], []
    for other in others:
        try:
            require_comparable(baseline, other)
            verdicts.append(compare(baseline, other, tolerance))
        except UserError as error:
            refusals.append(str(error))
    if verdicts:
        print(report.differences(verdicts))
        print(report.verdict_block(histories, verdicts, tolerance, controlled=control is not None))
    if refusals:
        raise UserError("; ".join(refusals))
    outcomes = {verdict.outcome for verdict in verdicts}
    outcome = next(word for word in (FAIL, NOT_JUDGED, PASS) if word in outcomes)
    print(f"\n{outcome}")
    if json_path is not None:
        everyone = histories | ({history.CONTROL: control} if control else {})
        content = {
            "passed": outcome == PASS,
            "outcome": outcome,
            "precision": baseline.run["config"]["precision"],
            "tolerance": tolerance.as_dict(),
            "control": control.run["label"] if control else None,
            "runs": {name: one.run["label"] for name, one in histories.items()},
            "verdicts": [verdict.as_dict() for verdict in verdicts],
            "command": command,
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "histories": {name: {"run": one.run, "weights": one.weights} for name, one in everyone.items()},
        }
        write_text(json_path, json.dumps(_strict(content), indent=2) + "\n")
    return 0 if outcome == PASS else 1


def _strict(value):
    """The same data with null for numbers that JSON does not have."""
    if isinstance(value, dict):
        return {key: _strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


if __name__ == "__main__":
    raise SystemExit(main())
