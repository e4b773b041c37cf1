"""Compare every strategy with a float64 reference, tensor by tensor.

    python run_verification.py --output_dir runs/verify
    python run_verification.py --model_name Qwen/Qwen2.5-0.5B --num_layers 2 --batch_size 2 --seq_length 128

Trains with every strategy and --capture_dir, computes the reference, compares (lockstep/compare.py), and writes report.html, report.md and
report.json. All other flags are those that all training scripts have; options of one strategy are given in --strategies. Exit status:
0 every tensor is as close to the reference as the same tensor of a correct run; 1 some tensor is not, a run failed, or the verdict is NOT
JUDGED or CONFIGURED DIFFERENTLY; 2 a usage error; 3 an internal error.

run_verification_main.sh trains with the scripts. Before and after that it calls this program, with the flags that it gives them.
`--part plan` checks, and prints a line NAME, FLAGS, PROGRAM, STRATEGY for every run, with tabs. `--part verdict` judges losses and tensors,
and writes and prints the table, the figure and the reports.
"""

if __name__ == "__main__":
    from lockstep.ground import startup

    startup.begin()  # first: from now on Ctrl-C and a missing package are one line each

import argparse
import dataclasses
import itertools
import operator
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.ground import files, locks, processes, progress, startup
from lockstep.ground.errors import UserError, printable, run_program, say
from lockstep.ground.flags import Parser
from lockstep.ground.words import in_columns
from lockstep.inputs import architectures
from lockstep.plan import command_line, resources
from lockstep.plan.config import BASELINE, CONTROL, JUDGED, Config, history_file
from lockstep.plan.runs import HELP, Run, runs_of
from lockstep.plan.strategies import SPECS
from lockstep.running import jobs
from lockstep.training import preflight

if TYPE_CHECKING:
    from lockstep.verdict.loss_folder import Judged
    from lockstep.verdict.result import Result

NAME = "run_verification.py"
# Switches of the baseline alone, which writes the initial weights for all
FIRST = ("save_init_weights", "pretrained", "control")
# Flags that users may not give
SET_HERE = (
    "--capture_dir",
    "--capture_steps",
    "--debug_steps",
    "--save_init_weights",
    "--control",
    "--dry_run",
    "--num_workers",
    "--num_epochs",
    "--loss_output_dir",
    "--storage_path",
    "--experiment_name",
)
# A run, the flags that it alone has, and its configuration
Planned = tuple[Run, list[str], Config]


def parse(argv: list[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Return this program's options, and the flags that all runs have."""
    arguments = sys.argv[1:] if argv is None else argv
    parser = Parser(prog=NAME, description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument(
        "--output_dir",
        type=Path,
        default=Path("runs/verify"),
        help="folder for dumps and report (default: %(default)s)",
    )
    parser.add_argument(
        "--strategies",
        default=",".join(SPECS),
        help=f"{HELP} (default: %(default)s)",
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=Config.capture_steps,
        help="number of steps to compare (default: %(default)s)",
    )
    parser.add_argument(
        "--tp_size",
        type=int,
        default=2,
        help="tensor-parallel size of the strategies that have tensor parallelism (default: %(default)s)",
    )
    parser.add_argument("--dp_size", type=int, default=2, help="data-parallel size (default: %(default)s)")
    parser.add_argument(
        "--profile",
        type=int,
        default=Config.profile,
        help="number of further steps that torch's profiler records (default: %(default)s)",
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="remove an older verification in --output_dir"
    )
    parser.add_argument("--part", choices=("plan", "verdict"), help=argparse.SUPPRESS)
    parser.add_argument("--init_weights_path", help=argparse.SUPPRESS)
    for name in FIRST:
        parser.add_argument(f"--{name}", action="store_true", help=argparse.SUPPRESS)
    parser.epilog = "All other flags are given to all runs; they are those that all training scripts have (train_ddp.py --help), such as --model_name, --num_layers, --batch_size, --seq_length, --precision."
    options, flags = parser.parse_known_args(arguments)
    flags += ["--dp_size", str(options.dp_size), "--profile", str(options.profile)]
    flags += ["--overwrite"] * options.overwrite
    # With --part, run_verification_main.sh gives all other flags itself.
    if options.part:
        return options, flags
    clash = next((flag for flag in arguments if flag.split("=")[0] in SET_HERE), None)
    if clash:
        raise UserError(f"{clash} is set by run_verification.py itself; leave it out")
    if options.steps < 1:
        raise UserError(f"--steps {options.steps}: compare at least one step")
    folder = options.output_dir = options.output_dir.expanduser().absolute()
    flags += [
        "--debug_steps",
        str(options.steps + max(options.profile, 0)),
        "--capture_steps",
        str(options.steps),
        "--capture_dir",
        str(folder),
    ]
    flags += ["--loss_output_dir", str(folder / "losses"), "--storage_path", str(folder / "losses")]
    if options.init_weights_path is None:
        options.init_weights_path = str(folder / "initial_weights.safetensors")
        options.save_init_weights = True
    return options, flags


def main(argv: list[str] | None = None) -> int:
    def body() -> int:
        processes.end_with_script()
        options, flags = parse(argv)
        return {"plan": show_plan, "verdict": verdict, None: verify}[options.part](options, flags)

    return run_program(NAME, body)


def show_plan(options: argparse.Namespace, flags: list[str]) -> int:
    """Check every run, and print a line for each (`--part plan`)."""
    for run, run_flags, _ in plan(options, flags):
        print(run.name, " ".join(run_flags), run.spec.program, run.spec.place, sep="\t")
    return 0


def verify(options: argparse.Namespace, flags: list[str]) -> int:
    """Check, train, compare."""
    folder = options.output_dir
    require_free(options)
    planned = plan(options, flags)
    for line in dict.fromkeys(line for *_, config in planned for line in preflight.notes(config)):
        print(printable(line), file=sys.stderr)
    baseline = planned[0][2]
    heading = f"{baseline.model_name}, {baseline.start.describe()}, {baseline.precision}, steps 1 to {options.steps}"
    print(printable(heading))
    groups: dict[int | None, list[jobs.Job]] = {}  # by number of ranks, the baseline's first
    for run, run_flags, _ in planned:
        job = {"strategy": run.spec.place, "arguments": [*flags, *weights(options), *run_flags]}
        groups.setdefault(run.mesh.world_size, []).append(job)
    startup.state = "--overwrite starts again"
    # A run that outlived its script must not write there, either.
    dumps = locks.held(*((config.capture_folder, "--output_dir") for *_, config in planned))
    with locks.inside(folder, "verification", "--output_dir"), dumps:
        # Another run may have ended before this one got the lock.
        require_free(options)
        # No report may lie beside dumps that it did not judge.
        for name in files.REPORTS:
            (folder / name).unlink(missing_ok=True)
        result = judge_tensors(
            options, flags, baseline, [run.name for run, *_ in planned], list(groups.items())
        )
    from lockstep.verdict import tensor_report

    status = tensor_report.show(result, folder)
    tell_trackers(baseline, {"verdict": result.outcome, **tensors_in_numbers(result)}, folder)
    return status


def require_free(options: argparse.Namespace) -> None:
    """Raise UserError unless the output folder can be written, and is empty or may be overwritten."""
    files.require_writable_folder(options.output_dir, "--output_dir", keep=False)
    if not options.overwrite:
        files.require_empty_folder(options.output_dir, "--output_dir", "--overwrite")


def weights(options: argparse.Namespace) -> list[str]:
    return ["--init_weights_path", options.init_weights_path] if options.init_weights_path else []


def plan(options: argparse.Namespace, flags: list[str]) -> list[Planned]:
    """Return every run, the baseline's first. Raises UserError for whatever can be known before a start. Leaves no folder behind.

    An older result may be replaced, a file that Lockstep did not write may not.
    """
    planned = []
    for run in runs_of(options.strategies, command_line.parse_config(BASELINE, flags), options.tp_size):
        run_flags, start_flags = list(run.arguments), []
        # The weights of the other runs are there once the baseline has run.
        if run.is_baseline:
            run_flags += [f"--{name}" for name in FIRST if getattr(options, name)]
            start_flags = weights(options)
        config, inputs = preflight.checked(run.spec.place, [*flags, *run_flags, *start_flags])
        planned.append((run, run_flags, config))
    option = "OUTPUT_DIR" if options.part else "--output_dir"
    files.require_ours(config.loss_output_dir / "loss_curves.png", option, files.FIGURE, anywhere=True)
    files.require_ours(config.loss_output_dir / "verdict.json", option, files.VERDICT)
    if config.capture_dir is not None:
        for name, begins in files.REPORTS.items():
            files.require_ours(config.capture_dir / name, option, begins)
        if config.precision not in JUDGED:
            raise UserError(
                f"--precision {config.precision}: no tolerance is derived for its tensors; use {' or '.join(JUDGED)}, "
                "or leave the tensors out (TENSORS=0 ./run_verification_main.sh)"
            )
        reference = dataclasses.replace(config, run_name=jobs.REFERENCE)
        resources.require_memory(reference, inputs.architecture, config.num_workers)
        if not architectures.is_built_in(inputs.architecture_source):
            from lockstep.verdict import model_check  # imports torch

            model_check.check(config, inputs)
    return planned


def judge_tensors(
    options: argparse.Namespace,
    flags: list[str],
    config: Config,
    names: list[str],
    groups: Sequence[jobs.Group] = (),
    curves: "Judged | None" = None,
) -> "Result":
    """Train the jobs of `groups`, compute the float64 reference, compare the named runs with it, and write the reports beside them.

    If a strategy's training fails, the others are judged. Raises JobFailed if then none is left.
    """
    capture_folder = config.capture_dir
    assert capture_folder is not None, "asked only of runs that capture"
    reference: jobs.Job = {"strategy": jobs.REFERENCE, "arguments": [*flags, *weights(options)]}
    todo = [(size, job) for size, group in groups for job in group]
    logs = (config.loss_output_dir if options.part else options.output_dir) / "logs"
    untrained: dict[str, str] = {}
    while True:
        folders = [capture_folder / name for name in names if name not in untrained]
        reference["replays"] = [str(folder) for folder in folders]
        sizes = itertools.groupby([*todo, (None, reference)], key=operator.itemgetter(0))
        started = [(size, [job for _, job in pairs]) for size, pairs in sizes]
        try:
            jobs.start_all_groups(started, logs, shown=bool(groups) and not config.quiet)
            break
        except jobs.JobFailed as failure:
            # Nothing can be judged without the reference, the baseline, or another strategy. Status 2 and 3 are no failed training.
            if failure.finished == len(todo) or len(folders) == 2 or failure.exit_code != 1:
                raise
            name = jobs.configured(todo[failure.finished][1]).capture_folder.name
            if name == names[0]:
                raise
            say(f"{NAME}: {failure}; the other strategies go on")
            untrained[name] = str(failure)
            todo, logs = todo[failure.finished + 1 :], logs / f"without_{name}"
    from lockstep import compare  # torch is not needed to answer a usage error

    return compare.judge([*folders, capture_folder / jobs.REFERENCE], capture_folder, curves, untrained)


def verdict(options: argparse.Namespace, flags: list[str]) -> int:
    """Judge the losses, and the tensors if they were captured; draw, write and print. Returns 0, or 1 unless all PASS."""
    from lockstep.verdict import loss_folder as folder
    from lockstep.verdict import loss_report as curve_report

    config = command_line.parse_config(BASELINE, [*flags, *weights(options)])
    output = config.loss_output_dir
    files.require_writable_folder(output, "--loss_output_dir")
    figure, data = output / "loss_curves.png", output / "verdict.json"
    names = [run.name for run in runs_of(options.strategies, config, options.tp_size)]
    paths = {name: history_file(output, name) for name in (*names, *([CONTROL] if options.control else []))}
    missing = next((path for path in paths.values() if not path.exists()), None)
    if missing:
        raise UserError(f"{missing}: no such file; run the training first")
    judged = folder.judge(output, *folder.read(paths))
    result, report = None, ""
    if config.capture_dir is not None:
        try:
            screen = progress.Quiet() if config.quiet else progress.screen
            with (
                progress.shown_on(screen),
                progress.working("Comparing every tensor with a float64 reference"),
            ):
                result = judge_tensors(options, flags, config, names, curves=judged)
        except (UserError, jobs.JobFailed):
            # A problem of the losses says what is wrong with the tensors, too.
            if not judged.problem:
                raise
    if result is not None and config.capture_dir is not None:
        from lockstep.verdict import tensor_report  # imports torch

        steps = tensor_report.steps_in_words([row for run in result.runs.values() for row in run.rows])
        report = f"Tensors  of {steps}: {printable(config.capture_dir / 'report.html')} and report.md"
    if judged.problem and result is not None and any(run.configuration for run in result.runs.values()):
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
    print(f"Data     {printable(data)}; all that the libraries said: {printable(output / 'logs')}")
    outcome = folder.worst([judged.outcome, *([tensors] if tensors else [])])
    numbers = losses_in_numbers(judged) | (tensors_in_numbers(result) if result is not None else {})
    tell_trackers(config, {"verdict": outcome, **numbers}, config.capture_dir or output, figure, data)
    print(f"\n{outcome}")
    return 0 if outcome == "PASS" else 1


def tell_trackers(config: Config, found: dict[str, str | float], folder: Path, *more: Path) -> None:
    """Tell the trackers of --report_to what was found, with the reports of a folder and more files."""
    if not config.report_to:
        return
    from lockstep.training.trackers import Trackers  # imports torch

    reports = (folder / name for name in ("report.md", "report.html", "report.json"))
    files = [path for path in (*reports, *more) if path.exists()]
    texts = {name: value for name, value in found.items() if isinstance(value, str)}
    numbers = {name: value for name, value in found.items() if not isinstance(value, str)}
    trackers = Trackers(config.report_to, "verification", config.loss_output_dir, config.recorded())
    trackers.tell(lambda client: client.result(texts, numbers, files))
    trackers.tell(lambda client: client.close(0))


def tensors_in_numbers(result: "Result") -> dict[str, str | float]:
    """For each run its verdict, and the error, the tolerance and their ratio of the tensor that is farthest from the reference."""
    from lockstep.verdict.distance import relative

    values: dict[str, str | float] = {}
    for name, run in result.runs.items():
        values[f"{name}/tensors"] = result.verdict(name)
        if run.counted:
            row = max(run.counted, key=lambda row: row.multiple)
            values[f"{name}/worst_tensor"] = f"step {row.step}, {row.name}"
            values[f"{name}/worst_error"] = row.distance.relative
            values[f"{name}/worst_tolerated"] = relative(row.tolerated, row.distance.norm)
            values[f"{name}/worst_of_tolerated"] = row.multiple
    return values


def losses_in_numbers(judged: "Judged") -> dict[str, str | float]:
    """What is tolerated of loss and gradient norm, and for each run its verdict and its largest differences from DDP."""
    tolerance = judged.tolerated
    values: dict[str, str | float] = {
        "loss_tolerated": tolerance.maximum,
        "grad_norm_tolerated": max(tolerance.grad_norm),
    }
    for name, verdict in judged.verdicts.items():
        values[f"{name}/losses"] = verdict.outcome
        values[f"{name}/loss_difference"] = verdict.max_abs_diff
        values[f"{name}/grad_norm_difference"] = verdict.max_grad_norm_diff
    return values


def table(judged: "Judged", result: "Result | None") -> list[str]:
    """The table, a line for each run: its distance from DDP and from the reference, and what is tolerated."""
    from lockstep.verdict.loss_folder import worst

    tolerance = judged.tolerated
    rows = [
        ("", "loss", "gradient norm", "tensors", ""),
        ("", "max nats from DDP", "max relative to DDP", "worst / tolerated", ""),
    ]
    for name, history in judged.histories.items():
        verdict, outcomes = judged.verdicts.get(name), []
        cells = [history.run["label"], "baseline", "baseline", "not captured"]
        if verdict is not None:
            outcomes.append(verdict.outcome)
            cells[1] = f"{verdict.max_abs_diff:.1e} of {tolerance.maximum:.1e}"
            cells[2] = f"{verdict.max_grad_norm_diff:.1e} of {max(tolerance.grad_norm):.1e}"
        if result is not None:
            run = result.runs[name]
            cells[3] = f"{run.nearest:.2g} ({len(run.judged)} tensors)"
            outcomes.append("FAIL" if result.has_failed(name) else result.verdict(name))
        rows.append((*cells, worst(outcomes) if outcomes else ""))
    return in_columns(rows)


def explanations(judged: "Judged", result: "Result | None") -> list[str]:
    """The lines that say why runs have failed: by their losses, and by the first tensor and its cause."""
    from lockstep.verdict import tensor_report
    from lockstep.verdict.loss_report import notes, reasons

    lines = [f"{curve.label}: {line}" for curve in judged.verdicts.values() for line in reasons(curve)]
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
