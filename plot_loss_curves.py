"""Compare the loss histories in a folder: statistics, a figure and a verdict.

    python plot_loss_curves.py --input_dir runs/loss_curves --output runs/loss_curves/loss_curves.png

Exit status: 0 PASS, every strategy agrees with DDP within the tolerance; 1 FAIL, a strategy differs by more than the tolerance, updates
no weight, or has a NaN; 1 NOT JUDGED, the control run is no measure of rounding errors; 2 the runs cannot be compared (different weights,
batches, length or contract; a damaged file), or a usage error; 3 an internal error.
"""

if __name__ == "__main__":
    from lockstep.ground import startup

    startup.begin()  # first: from now on Ctrl-C and a missing package are one line each

import os
import shlex
import sys
from pathlib import Path

from lockstep.ground.errors import UserError, printable, run_program
from lockstep.ground.files import FIGURE, VERDICT, require_ours, require_writable_file
from lockstep.ground.flags import Parser
from lockstep.plan.config import BASELINE, history_file
from lockstep.verdict import loss_folder as folder
from lockstep.verdict import loss_report as report
from lockstep.verdict.loss_curves import PASS

FIGURES = (".png", ".pdf", ".svg")


def main(argv: list[str] | None = None) -> int:
    return run_program("plot_loss_curves.py", lambda: _main(argv))


def _main(argv: list[str] | None) -> int:
    parser = Parser(prog="plot_loss_curves.py", description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument(
        "--input_dir", type=Path, default=Path("runs/loss_curves"), help="folder with loss_*.json"
    )
    parser.add_argument(
        "--output", type=Path, help="figure to write (default: loss_curves.png in the folder)"
    )
    parser.add_argument("--json", type=Path, help="write the comparison as JSON to this file")
    options = parser.parse_args(argv)
    output = options.output or options.input_dir / "loss_curves.png"
    _require_outputs(options.input_dir, output, options.json)
    command = shlex.join(["plot_loss_curves.py", *(sys.argv[1:] if argv is None else argv)])
    return run(options.input_dir, output, options.json, command)


def _require_outputs(input_dir: Path, output: Path, json_path: Path | None) -> None:
    """Raise UserError for outputs that could not be written in the end. Remove an older verdict, which could be taken for the new one."""
    if output.suffix not in FIGURES:
        raise UserError(f"--output {output}: the name must end in {', '.join(FIGURES)}")
    if not input_dir.is_dir():
        raise UserError(
            f"--input_dir {input_dir}: no such folder; give the --loss_output_dir of the training runs"
        )
    inputs = {os.path.realpath(path) for path in folder.paths(input_dir).values()}
    for option, path in (("--output", output), ("--json", json_path)):
        if path is None:
            continue
        require_writable_file(path, option)
        if os.path.realpath(path) in inputs:
            raise UserError(f"{option} {path}: is a loss history of this comparison; choose another name")
    require_ours(output, "--output", FIGURE, anywhere=True)
    if json_path is not None:
        if os.path.realpath(json_path) == os.path.realpath(output):
            raise UserError(f"--json {json_path}: is also the name of the figure; choose another name")
        require_ours(json_path, "--json", VERDICT)
        json_path.unlink(missing_ok=True)


def run(input_dir: Path, output: Path, json_path: Path | None, command: str) -> int:
    """Print statistics and verdict, draw the figure, write the JSON. Returns the exit status."""
    histories, control = folder.read(folder.paths(input_dir))
    if not histories:
        raise UserError(
            f"--input_dir {input_dir}: no {history_file(Path(), BASELINE)} and no other loss_NAME.json; train first"
        )
    print(report.statistics(histories))
    judged = folder.judge(input_dir, histories, control)
    report.draw(histories, control, judged.tolerance, output)
    print(f"\nFigure: {printable(output)}")
    if judged.verdicts:
        print(report.verdict_block(judged))
    if judged.problem:
        raise UserError(judged.problem)
    print(f"\n{judged.outcome}")
    if json_path is not None:
        folder.write(judged, json_path, command)
    return 0 if judged.outcome == PASS else 1


if __name__ == "__main__":
    startup.end(main())
