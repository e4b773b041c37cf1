"""The two ends of run_verification_main.sh: the checks before its runs, and the verdict after them.

    python -m lockstep.verification plan --strategies ddp,fsdp --tp_size 2 FLAGS      a line NAME, FLAGS, PROGRAM, STRATEGY for every run, with tabs
    python -m lockstep.verification verdict --strategies ddp,fsdp --tp_size 2 FLAGS   the table, the figure, the reports

FLAGS are those of the training scripts. Flags about the initial weights go to the baseline only, which writes them. With --capture_dir
the tensors of the captured steps are judged as well.
"""

if __name__ == "__main__":
    from lockstep.ground import startup

    startup.begin()  # first: from now on Ctrl-C and a missing package are one line each

import argparse
import dataclasses
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.ground import processes, progress, startup
from lockstep.ground.errors import UserError, printable, run_program
from lockstep.ground.files import FIGURE, REPORTS, VERDICT, require_ours, require_writable_folder
from lockstep.ground.flags import Parser
from lockstep.inputs import architectures
from lockstep.inputs.data import Inputs
from lockstep.plan import command_line, limit
from lockstep.plan.config import BASELINE, CONTROL, Config, history_file
from lockstep.plan.runs import HELP, Run, runs_of
from lockstep.plan.strategies import SPECS
from lockstep.training import preflight
from lockstep.verdict.loss_tolerance import RULES

if TYPE_CHECKING:
    from lockstep.verdict.loss_folder import Judged
    from lockstep.verdict.result import Result

NAME = "lockstep.verification"


def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog=f"python -m {NAME}", description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("what", choices=("plan", "verdict"))
    parser.add_argument("--strategies", default=",".join(SPECS), help=HELP)
    parser.add_argument("--tp_size", type=int, default=2)
    for flag in ("--save_init_weights", "--pretrained", "--control"):  # the baseline's alone
        parser.add_argument(flag, action="store_true")
    parser.add_argument("--init_weights_path")

    def body() -> int:
        if os.environ.get("LOCKSTEP_PARENT") == str(os.getppid()):  # as in lockstep/launch.py
            processes.end_with_parent(signal.SIGKILL)
        options, flags = parser.parse_known_args(argv)
        return (plan if options.what == "plan" else verdict)(options, flags)

    return run_program(NAME, body)


def plan(options: argparse.Namespace, flags: list[str]) -> int:
    """Check everything that can be checked before a run, and print the runs. Leaves no folder behind."""
    runs = runs_of(options.strategies, command_line.parse_config(BASELINE, flags), options.tp_size)
    for run in runs:
        config, inputs = checked(run, options, flags)
    require_ours(config.loss_output_dir / "loss_curves.png", "OUTPUT_DIR", FIGURE, anywhere=True)
    require_ours(config.loss_output_dir / "verdict.json", "OUTPUT_DIR", VERDICT)
    if config.capture_dir is not None:
        for name, begins in REPORTS.items():
            require_ours(config.capture_dir / name, "OUTPUT_DIR", begins)
        if config.precision not in RULES:
            raise UserError(
                f"--precision {config.precision}: no tolerance is derived for its tensors; leave them out (TENSORS=0)"
            )
        check_reference(config, inputs)
    for run in runs:
        print(run.name, " ".join(run.arguments), run.spec.program, run.spec.place, sep="\t")
    return 0


def checked(run: Run, options: argparse.Namespace, flags: list[str]) -> tuple[Config, Inputs]:
    """A run's configuration and inputs. Raises UserError if it could not be started with them."""
    own = [*run.arguments, "--dry_run"]
    if run.is_baseline:
        own += [
            f"--{name}" for name in ("save_init_weights", "pretrained", "control") if getattr(options, name)
        ]
        own += ["--init_weights_path", options.init_weights_path] if options.init_weights_path else []
    config = command_line.parse_config(run.spec.place, [*flags, *own])
    inputs = preflight.load_inputs(config)
    preflight.check_environment(config, inputs.architecture)
    return config, inputs


def check_reference(config: Config, inputs: Inputs) -> None:
    """Raise UserError if the reference would not fit into memory, or is not the model that a user brings."""
    limit.require(dataclasses.replace(config, run_name="reference"), inputs.architecture, config.num_workers)
    if not architectures.is_built_in(inputs.architecture_source):
        from lockstep.verdict import model_check  # imports torch

        model_check.check(config, inputs)


def verdict(options: argparse.Namespace, flags: list[str]) -> int:
    """Judge the losses, and the tensors if they were captured; draw, write and print. Returns 0, or 1 unless all PASS."""
    from lockstep.verdict import loss_folder as folder
    from lockstep.verdict import loss_report as curve_report

    weights = ["--init_weights_path", options.init_weights_path] if options.init_weights_path else []
    config = command_line.parse_config(BASELINE, [*flags, *weights])
    place = config.loss_output_dir
    require_writable_folder(place, "--loss_output_dir")
    figure, data = place / "loss_curves.png", place / "verdict.json"
    names = [run.name for run in runs_of(options.strategies, config, options.tp_size)]
    found = {name: history_file(place, name) for name in (*names, *([CONTROL] if options.control else []))}
    missing = next((path for path in found.values() if not path.exists()), None)
    if missing:
        raise UserError(f"{missing}: no such file; run the training first")
    judged = folder.judge(place, *folder.read(found))
    result, report = None, ""
    if config.capture_dir is not None:
        try:
            result = judge_tensors(config, config.capture_dir, names)
        except UserError:
            if not judged.problem:  # else it says what is wrong with both
                raise
    if result is not None and config.capture_dir is not None:
        from lockstep.verdict import tensor_report  # imports torch

        steps = tensor_report.steps_in_words([row for run in result.runs.values() for row in run.rows])
        report = f"Tensors  of {steps}: {printable(config.capture_dir / 'report.md')}"
    if judged.problem and result is not None and result.outcome == "CONFIGURED DIFFERENTLY":
        print("\n".join(["", *explanations(judged, result), report, "", result.outcome]))
        return 1
    curve_report.draw(judged.histories, judged.control, judged.tolerance, figure)
    if judged.problem:
        raise UserError(judged.problem)
    tensors = (
        None if result is None else ("FAIL" if result.outcome == "CONFIGURED DIFFERENTLY" else result.outcome)
    )
    folder.write(judged, data, f"run_verification_main.sh ({' '.join(flags)})", tensors=tensors)
    print("\n".join(["", *table(judged, result), "", *explanations(judged, result)]))
    print(f"Figure   {printable(figure)}")
    if report:
        print(report)
    print(f"Data     {printable(data)}; all that the libraries said: {printable(place / 'logs')}")
    outcome = folder.worst([judged.outcome, *([tensors] if tensors else [])])
    print(f"\n{outcome}")
    return 0 if outcome == "PASS" else 1


def judge_tensors(config: Config, place: Path, names: list[str]) -> "Result":
    """The tensors captured in `place`, compared with the float64 reference, which is computed now; the report is written there, too."""
    with progress.working("Comparing every tensor with a float64 reference"):
        with startup.importing():
            import transformers.modeling_utils  # noqa: F401 - the model's module needs it

            from lockstep import compare
            from lockstep.ground.collective import init_alone
            from lockstep.verdict import reference as exact_run

        init_alone()
        exact_run.run(config, preflight.load_inputs(config))
        return compare.judge([place / name for name in (*names, "reference")], place)


def table(judged: "Judged", result: "Result | None") -> list[str]:
    """A line for each run: how far from DDP and from the reference, of what is tolerated."""
    from lockstep.verdict.loss_folder import worst

    tolerance = judged.tolerated
    rows = [
        ("", "loss", "gradient norm", "tensors", ""),
        ("", "max nats from DDP", "max relative to DDP", "worst / tolerated", ""),
    ]
    for name, one in judged.histories.items():
        verdict, outcomes = judged.verdicts.get(name), []
        cells = [one.run["label"], "baseline", "baseline", "not captured"]
        if verdict is not None:
            outcomes.append(verdict.outcome)
            cells[1] = f"{verdict.max_abs_diff:.1e} of {tolerance.maximum:.1e}"
            cells[2] = f"{verdict.max_grad_norm_diff:.1e} of {max(tolerance.grad_norm):.1e}"
        if result is not None:
            run = result.runs[name]
            cells[3] = f"{run.nearest:.2g} ({len(run.judged)} tensors)"
            outcomes.append("FAIL" if result.has_failed(name) else result.verdict(name))
        rows.append((*cells, worst(outcomes) if outcomes else ""))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        printable("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip(), 300)
        for row in rows
    ]


def explanations(judged: "Judged", result: "Result | None") -> list[str]:
    """Why what failed has failed: by the losses, and by the first tensor and its cause."""
    from lockstep.verdict import tensor_report
    from lockstep.verdict.loss_report import notes, reasons

    lines = [f"{one.label}: {line}" for one in judged.verdicts.values() for line in reasons(one)]
    lines += [line for line in notes(judged) if line.startswith("Not judged")]
    lines += tensor_report.notes(result) if result is not None else []
    if result is not None and result.outcome != "PASS":
        lines += [
            f"First tensor too far, {line}"
            for line in tensor_report.first_tensors(result)
            if not line.endswith(": none")
        ]
        if any(run.diagnosis for run in result.runs.values()):
            lines += ["Cause", *tensor_report.causes(result)]
        lines += tensor_report.configuration(result)
    return [*(printable(line) for line in lines), ""] if lines else []


if __name__ == "__main__":
    startup.end(main())
