"""Compare the loss histories in a folder: statistics, a figure of two panels, and a verdict.

    python plot_loss_curves.py --input_dir runs/loss_curves --output runs/loss_curves/loss_curves.png

Exit status: 0 every strategy agrees with DDP within the tolerance; 1 one does not, moves nothing, or has a NaN;
2 the runs cannot be compared (different weights, batches, length or contract), or a mistake in the command.
"""

if __name__ == "__main__":
    from lockstep import startup

    startup.begin()  # first: from now on Ctrl-C and a missing package are one line each

import json
import math
import sys
from pathlib import Path

from lockstep import history, report
from lockstep.compare_losses import RULES, compare, require_comparable, tolerance_for
from lockstep.config import STRATEGIES, Parser
from lockstep.errors import UserError
from lockstep.files import write_text

FIGURES = (".png", ".pdf", ".svg")


def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="plot_loss_curves.py", description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--input_dir", type=Path, default=Path("runs/loss_curves"), help="folder with loss_*.json")
    parser.add_argument("--output", type=Path, help="figure to write (default: loss_curves.png in the folder)")
    parser.add_argument("--json", type=Path, help="write the same comparison as data to this file")
    try:
        options = parser.parse_args(argv)
        output = options.output or options.input_dir / "loss_curves.png"
        if output.suffix not in FIGURES:
            raise UserError(f"--output {output}: the name must end in {', '.join(FIGURES)}")
        if options.json:
            options.json.unlink(missing_ok=True)  # an older verdict must not pass for this one
        return run(options.input_dir, output, options.json)
    except UserError as error:
        print(f"plot_loss_curves.py: {error}", file=sys.stderr)
        return error.exit_code


def run(input_dir: Path, output: Path, json_path: Path | None) -> int:
    paths = {name: history.path_of(input_dir, name) for name in STRATEGIES}
    histories = {name: history.read(path) for name, path in paths.items() if path.is_file()}
    if not histories:
        raise UserError(f"--input_dir {input_dir}: no loss_ddp.json, loss_deepspeed.json or loss_fsdp.json; train first")
    for name, one in histories.items():
        if not one.steps:
            raise UserError(f"{paths[name]}: no step was recorded ({one.ended or 'killed'}); run its training again")
    print(report.statistics(histories))
    baseline, others = histories.get("ddp"), [one for name, one in histories.items() if name != "ddp"]
    comparable = baseline is not None and bool(others)
    precision = next(iter(histories.values())).run["config"]["precision"]
    control_path = history.path_of(input_dir, history.CONTROL)
    control = history.read(control_path) if control_path.is_file() else None
    judged = comparable and (precision in RULES or control is not None)
    tolerance = tolerance_for(baseline, control) if judged else None
    report.draw(histories, control, tolerance, output)
    print(f"\nFigure: {output}")
    if not comparable:
        raise UserError(f"--input_dir {input_dir}: only {', '.join(histories)}; a verdict needs DDP and another strategy")

    if tolerance is None:
        tolerance_for(baseline)  # says why there is none
    verdicts, refusals = [], []
    for other in others:
        try:
            require_comparable(baseline, other)
            verdicts.append(compare(baseline, other, tolerance))
        except UserError as error:
            refusals.append(str(error))
    if verdicts:
        print(report.differences(verdicts))
        print(report.verdict_block(histories, verdicts, tolerance, precision, controlled=control is not None))
    if refusals:
        raise UserError("; ".join(refusals))
    passed = all(verdict.passed for verdict in verdicts)
    print(f"\n{'PASS' if passed else 'FAIL'}")
    if json_path is not None:
        content = {
            "passed": passed,
            "precision": precision,
            "tolerance": tolerance.as_dict(),
            "control": control.run["label"] if control else None,
            "runs": {name: one.run["label"] for name, one in histories.items()},
            "verdicts": [verdict.as_dict() for verdict in verdicts],
        }
        write_text(json_path, json.dumps(_strict(content), indent=2) + "\n")
    return 0 if passed else 1


def _strict(value):
    """The same data with null for numbers that JSON does not have."""
    if isinstance(value, dict):
        return {key: _strict(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_strict(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


if __name__ == "__main__":
    raise SystemExit(main())
