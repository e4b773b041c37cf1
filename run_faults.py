"""Plant bugs in real distributed runs; check that each is caught and its first tensor and cause are named correctly.

    python run_faults.py                                   the whole catalogue (lockstep/faults/), AutoTP and FSDP
    python run_faults.py no_dp_reduction tie_broken        some of it
    python run_faults.py --list                            what there is
    python run_faults.py --precision autocast --output results/faults-autocast.json

Exit status: 0 every fault changed something, was caught by tensors and had no wrong cause named; 1 otherwise; 2 a usage error;
3 an internal error.
"""

if __name__ == "__main__":
    from lockstep.ground import startup

    startup.begin()  # first: from now on Ctrl-C and a missing package are one line each

import argparse
import collections
import contextlib
import importlib.metadata
import itertools
import json
import math
import operator
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.dumps import history
from lockstep.ground import locks, origin, startup
from lockstep.ground.errors import TrainingFailure, UserError, run_program
from lockstep.ground.files import (
    PAGE,
    require_new_folder,
    require_ours,
    require_writable_file,
    require_writable_folder,
    write_result,
)
from lockstep.ground.flags import Parser
from lockstep.ground.words import in_markdown
from lockstep.plan.config import BASELINE, CONTROL, JUDGED, Spec, history_file
from lockstep.plan.strategies import others, recorded, spec_of

if TYPE_CHECKING:
    from lockstep.dumps.dump import Dump
    from lockstep.faults import Fault
    from lockstep.verdict.loss_curves import CurveVerdict
    from lockstep.verdict.result import Result

# How the JSON file and the Markdown page of the table begin
BEGINS = b'{\n "precision": '
TITLE = "# Planted faults, "
CLEAN = "clean"  # the name of a run without a fault
REFERENCE = "reference"  # the name of the job that writes the reference
HANGS_AFTER = 120  # seconds without progress; the models are tiny
COLUMNS = ("fault", "strategy", "loss", "grad norm", "first tensor", "right", "cause", "named", "s")
RIGHT, NOT_EXPLAINED, WRONG = "right", "not explained", "wrong"  # how a cause was named
NAMED = {RIGHT: "named right", NOT_EXPLAINED: "not explained", WRONG: "named wrong"}


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(prog="run_faults.py", description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("faults", nargs="*", help="names of faults (default: all)")
    parser.add_argument(
        "--strategy",
        help="strategy to plant in, by name or as path/to/file.py:Class (default: all but the baseline)",
    )
    parser.add_argument(
        "--precision",
        choices=JUDGED,
        default="fp32",
        help="precision of all runs (default: %(default)s)",
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=30,
        help="number of steps to train, for the loss verdict (default: %(default)s)",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("runs/faults.json"),
        help="JSON file for the table; the same table goes to a .md and a .html beside it (default: %(default)s)",
    )
    parser.add_argument(
        "--work_dir",
        type=Path,
        help="folder in which the runs are kept, each dump with its report (default: a temporary folder)",
    )
    parser.add_argument("--list", action="store_true", help="print the catalogue; run nothing")
    return parser.parse_args(argv)


def rows_of(options: argparse.Namespace) -> dict[str, Spec]:
    """The strategies to plant in, by name."""
    return {spec.name: spec for spec in map(spec_of, [options.strategy] if options.strategy else others())}


def choose(options: argparse.Namespace) -> list[tuple]:
    """The (fault, spec of a strategy) pairs that the options choose. Raises UserError for an unknown name or an empty choice."""
    from lockstep.faults import CATALOGUE, applies_to

    unknown = next((name for name in options.faults if name not in CATALOGUE), None)
    if unknown:
        raise UserError(f"there is no fault {unknown}; see run_faults.py --list")
    if options.steps < 2:
        raise UserError(f"--steps {options.steps}: some faults show in the second step; train at least 2")
    wanted = [CATALOGUE[name] for name in options.faults or CATALOGUE]
    pairs = [
        (fault, spec)
        for fault in wanted
        for spec in rows_of(options).values()
        if options.precision in fault.precisions and applies_to(fault, spec)
    ]
    if not pairs:
        raise UserError(
            f"none of these faults applies to {options.strategy or 'any strategy'} in {options.precision}; see --list"
        )
    return pairs


def print_catalogue(options: argparse.Namespace) -> None:
    from lockstep.faults import CATALOGUE, applies_to

    for fault in CATALOGUE.values():
        labels = [spec.label for spec in rows_of(options).values() if applies_to(fault, spec)]
        print(f"{fault.name}  ({', '.join(labels)}; {', '.join(fault.precisions)})\n  {fault.story}")
        print(
            f"  {fault.bug_class}; {fault.seen_in}; breaks {fault.first} in step {fault.step}; cause: {fault.cause}"
        )


class Group:
    """Runs that share model, flags and mesh, and therefore DDP's run and the reference."""

    def __init__(self, key: tuple, folder: Path, options: argparse.Namespace):
        self.model, self.arguments, self.flags, self.mesh = key
        self.rows = {**rows_of(options), BASELINE: spec_of(BASELINE)}
        self.folder, self.options = folder, options

    def job(self, strategy: str, name: str) -> dict:
        """One run for lockstep/running/jobs.py; `name` is its fault's. The strategy "control" is DDP's control run.

        Its dump goes to FOLDER/NAME/STRATEGY, its losses beside it.
        """
        arguments = [
            "--model_name",
            self.model,
            "--precision",
            self.options.precision,
            "--dp_size",
            str(self.mesh.dp),
        ]
        arguments += ["--batch_size", "2", "--seq_length", "64", "--debug_steps", str(self.options.steps)]
        arguments += [
            "--loss_output_dir",
            str(self.history_folder(strategy, name)),
            "--storage_path",
            str(self.folder),
            *self.arguments,
        ]
        if strategy == CONTROL:
            return {"strategy": BASELINE, "arguments": [*arguments, "--noise_control"]}
        arguments += ["--capture_steps", "2", "--capture_dir", str(self.folder / name)]
        if strategy == REFERENCE:
            return {"strategy": REFERENCE, "arguments": arguments}
        spec = self.rows[strategy]
        mesh = spec.largest(self.mesh)
        for axis in ("tp", *mesh.further_axes):
            arguments += [f"--{axis}_size", str(mesh.size(axis))]
        arguments += self.flags * (strategy != BASELINE)
        return {"strategy": spec.place, "fault": None if name == CLEAN else name, "arguments": arguments}

    def dump(self, strategy: str, name: str) -> Path:
        return self.folder / name / strategy

    def history_folder(self, strategy: str, name: str) -> Path:
        return self.folder / name / f"losses_{strategy}"

    def losses(self, strategy: str, name: str) -> history.History:
        return history.read(history_file(self.history_folder(strategy, name), strategy))


# (group, fault name, strategy)
Planned = tuple[Group, str, str]


def train(groups: dict[Group, list[tuple["Fault", Spec]]], folder: Path) -> dict[Planned, float | str]:
    """Run everything. Returns for each run its seconds, or why it failed."""
    from lockstep.running import jobs

    outcome = run_all(planned(groups, (BASELINE, CONTROL)), folder)
    replays = []
    for group in groups:
        finished = [
            run
            for run, seconds in outcome.items()
            if run[0] is group and run[2] not in (BASELINE, CONTROL) and not isinstance(seconds, str)
        ]
        dumps = [str(group.dump(strategy, name)) for _, name, strategy in finished]
        replays.append({**group.job(REFERENCE, CLEAN), "replays": dumps})
    jobs.start_all_groups([(None, replays)], folder / "reference")
    return outcome


def grouped(
    pairs: list[tuple["Fault", Spec]], folder: Path, options: argparse.Namespace
) -> dict[Group, list[tuple["Fault", Spec]]]:
    """Group the pairs by what their runs share. Each group has a folder in `folder`."""
    by_key = collections.defaultdict(list)
    for fault, spec in pairs:
        by_key[fault.model, fault.arguments, fault.flags, fault.mesh].append((fault, spec))
    return {
        Group(key, folder / f"group{number}", options): members
        for number, (key, members) in enumerate(by_key.items())
    }


def planned(
    groups: dict[Group, list[tuple["Fault", Spec]]], alone: tuple[str, ...]
) -> dict[tuple[int, ...], list[Planned]]:
    """The runs on each mesh. For every group: the runs of `alone`, then each strategy's without a fault, then with each of its faults."""
    # By mesh, because a strategy may be unable to change its mesh within a process (docs/findings.md)
    by_mesh: dict[tuple[int, ...], list[Planned]] = collections.defaultdict(list)
    for group, pairs in groups.items():
        mesh = spec_of(BASELINE).largest(group.mesh)
        by_mesh[tuple(mesh.sizes.values())] += [(group, CLEAN, name) for name in alone]
        for spec in dict.fromkeys(spec for _, spec in pairs):
            mesh = spec.largest(group.mesh)
            faulty = [(group, fault.name, spec.name) for fault, other_spec in pairs if other_spec == spec]
            by_mesh[tuple(mesh.sizes.values())] += [(group, CLEAN, spec.name), *faulty]
    return by_mesh


def run_all(by_mesh: dict[tuple[int, ...], list[Planned]], folder: Path) -> dict[Planned, float | str]:
    """Run what is planned on each mesh. Returns for each run its seconds, or why it failed."""
    from lockstep.running import jobs

    outcome: dict[Planned, float | str] = {}
    remaining = [(mesh, run) for mesh, runs in sorted(by_mesh.items()) for run in runs]
    while remaining:
        jobs_folder = folder / f"jobs_{len(remaining)}"
        meshes = [
            (math.prod(sizes), [group.job(strategy, name) for _, (group, name, strategy) in runs])
            for sizes, runs in itertools.groupby(remaining, key=operator.itemgetter(0))
        ]
        finished, status = jobs.start_groups(meshes, jobs_folder, patience=HANGS_AFTER)
        for (_, run), seconds in zip(remaining, finished, strict=False):
            outcome[run] = seconds
        if len(finished) < len(remaining):
            outcome[remaining[len(finished)][1]] = jobs.why(jobs_folder, status)
        remaining = remaining[len(finished) + 1 :]
    return outcome


def verdicts(
    group: Group, name: str, strategy: str, report: Path | None = None
) -> tuple["Result", "CurveVerdict"]:
    """Compare the tensors and the losses of one run. The report is written into the folder `report` if one is given."""
    from lockstep import compare
    from lockstep.verdict import loss_curves
    from lockstep.verdict.loss_folder import Judged

    baseline, control, losses = (
        group.losses(*key) for key in ((BASELINE, CLEAN), (CONTROL, CLEAN), (strategy, name))
    )
    tolerance = loss_curves.tolerance_for(baseline, control)
    curve = loss_curves.compare_curves(baseline, losses, tolerance)
    curves = Judged({BASELINE: baseline, strategy: losses}, control, tolerance, {strategy: curve}, "")
    dumps = [*(group.dump(job, CLEAN) for job in (REFERENCE, BASELINE)), group.dump(strategy, name)]
    return compare.judge(dumps, report, curves), curve


def require_clean(group: Group, strategy: str) -> None:
    """Raise TrainingFailure if the run without a fault fails: then a failure with one proves nothing."""
    result, curve = verdicts(group, CLEAN, strategy)
    if result.outcome != "PASS" or not curve.passed:
        first = [" ".join(failure[2:]) for run in result.runs.values() for failure in run.failures[:1]]
        why = [reason for reason in (*first, *curve.problems, curve.doubt) if reason]
        raise TrainingFailure(
            f"{strategy} fails without a fault (tensors {result.outcome}, losses {curve.outcome}) on {group.model}: {'; '.join(why)}"
        )


def judge(group: Group, fault: "Fault", strategy: str) -> dict:
    """What the two verdicts and the diagnosis say of one planted fault."""
    from lockstep.dumps.dump import Dump
    from lockstep.verdict.result import Diagnosis

    result, curve = verdicts(group, fault.name, strategy, report_of(group.options, fault.name, strategy))
    run = result.runs[strategy]
    failures, dump, diagnosis = run.failures, run.dump, run.diagnosis or Diagnosis()
    step, first = (failures[0][0], failures[0][2]) if failures else (None, None)
    guards = group.history_folder(strategy, fault.name) / "guards.txt"
    causes = [[cause.name, cause.evidence] for cause in diagnosis.causes]
    return {
        "fault": fault.name,
        "strategy": strategy,
        "class": fault.bug_class,
        "seen_in": fault.seen_in,
        "story": fault.story,
        "loss_step": curve.red_loss_step,
        "grad_norm_step": curve.red_grad_norm_step,
        "step": step,
        "first": first,
        "expected_first": fault.first,
        "caught": bool(failures),
        "first_right": (first, step) == (fault.first, fault.step),
        "cause": causes[0][0] if causes else None,
        "expected_cause": fault.cause,
        "named": name_verdict(causes, fault),
        "causes": causes,
        "excluded": diagnosis.excluded,
        "odd": diagnosis.odd,
        "changed": differ(dump, Dump(group.dump(strategy, CLEAN))),
        "guard": guards.read_text(encoding="utf-8").splitlines()[0] if guards.is_file() else None,
    }


def report_of(options: argparse.Namespace, fault: str, strategy: str) -> Path:
    """The folder of the report on the run of a strategy with a fault: beside the table."""
    return options.output.absolute().with_suffix("") / f"{fault}-{strategy}"


def name_verdict(causes: list[list[str]], fault: "Fault") -> str:
    """Whether the causes [name, evidence] are right: RIGHT, NOT_EXPLAINED if there are none, WRONG.

    One cause with another name or other evidence makes them wrong, wherever it stands.
    """
    from lockstep.faults.catalogue import agrees

    if not causes:
        return NOT_EXPLAINED
    right = all(name == fault.cause and agrees(fault.evidence, evidence) for name, evidence in causes)
    return RIGHT if right else WRONG


def differ(one: "Dump", other: "Dump") -> bool:
    """Whether two dumps hold any different number."""
    return any(
        any(one.steps[step][key] != entry[key] for key in ("loss", "rank_losses", "grad_norm"))
        or any(
            one.steps[step]["tensors"].get(name, {}).get("checksum") != tensor["checksum"]
            for name, tensor in entry["tensors"].items()
        )
        for step, entry in other.steps.items()
    )


def table(rows: list[dict]) -> list[str]:
    return in_markdown([COLUMNS, *map(cells, rows)])


def cells(row: dict) -> list[str]:
    """A row of the table, by COLUMNS."""
    columns = [row["fault"], recorded(row["strategy"]).label]
    if row.get("failed"):
        return [*columns, "did not run", "", "", "", "", "", str(row["seconds"])]
    columns += [_step(row["loss_step"]), _step(row["grad_norm_step"])]
    columns += [f"{row['first']}, step {row['step']}" if row["first"] else "none", _word(row["first_right"])]
    columns += [row["cause"] or "-", row["named"].upper() if row["named"] == WRONG else row["named"]]
    return [*columns, str(row["seconds"])]


def write_page(options: argparse.Namespace, rows: list[dict]) -> None:
    """Write the table as a page to sort and to filter. Each row that was judged links to its page."""
    from lockstep.page.writing import write_listing

    path = options.output.with_suffix(".html").absolute()
    pages = [report_of(options, row["fault"], row["strategy"]) / "report.html" for row in rows]
    links = [
        "" if row.get("failed") else str(page.relative_to(path.parent))
        for row, page in zip(rows, pages, strict=True)
    ]
    linked_rows = list(zip(map(cells, rows), links, strict=True))
    notes = [
        *summary(rows, options.steps),
        f"How this was found out: {origin.command()}, {origin.now()}, Lockstep {origin.commit()}, {origin.machine(origin.about())}, torch {importlib.metadata.version('torch')}",
    ]
    write_listing(path, f"Planted faults, {options.precision}", notes, COLUMNS, linked_rows)


def _step(step: int | None) -> str:
    return "-" if step is None else f"step {step}"


def _word(right: bool) -> str:
    return "yes" if right else "NO"


def summary(rows: list[dict], steps: int) -> list[str]:
    ran = [row for row in rows if not row.get("failed")]
    count = len(rows)

    def share(text: str, hits: int) -> str:
        return f"{text}: {hits} of {count} ({100 * hits / count:.0f} %)"

    return [
        share("caught by tensors", sum(row["caught"] for row in ran)),
        share("first tensor right", sum(row["first_right"] for row in ran)),
        *(
            share(verdict, sum(row["caught"] and row["named"] == named for row in ran))
            for named, verdict in NAMED.items()
        ),
        share(f"missed by the loss curve in {steps} steps", sum(row["loss_step"] is None for row in ran)),
        share(
            "missed by loss and gradient norm",
            sum(row["loss_step"] is None and row["grad_norm_step"] is None for row in ran),
        ),
        *(f"NOT CAUGHT: {row['fault']} in {row['strategy']}" for row in ran if not row["caught"]),
        *(
            f"NAMED WRONG: {row['fault']} in {row['strategy']}: {cause}: {evidence}"
            for row in ran
            if row["named"] == WRONG
            for cause, evidence in row["causes"]
        ),
        *(f"CHANGED NOTHING: {row['fault']} in {row['strategy']}" for row in ran if not row["changed"]),
        *(f"DID NOT RUN: {row['fault']} in {row['strategy']}" for row in rows if row.get("failed")),
    ]


def run(options: argparse.Namespace, folder: Path) -> int:
    pairs = choose(options)
    groups = grouped(pairs, folder, options)
    print(f"{len(pairs)} runs with a fault, {options.precision}, {options.steps} steps each", flush=True)
    outcome = train(groups, folder)
    rows = []
    for group, members in groups.items():
        for name in (BASELINE, CONTROL, *dict.fromkeys(spec.name for _, spec in members)):
            if isinstance(outcome[group, CLEAN, name], str):
                raise TrainingFailure(f"{name} fails without a fault: {outcome[group, CLEAN, name]}")
            if name not in (BASELINE, CONTROL):
                require_clean(group, name)
        for fault, spec in members:
            seconds = outcome[group, fault.name, spec.name]
            failed = {"fault": fault.name, "strategy": spec.name, "failed": seconds, "seconds": "-"}
            try:
                rows.append(
                    failed
                    if isinstance(seconds, str)
                    else {**judge(group, fault, spec.name), "seconds": round(seconds, 1)}
                )
            except UserError as error:
                # A run that ended early has no dump to judge.
                rows.append({**failed, "failed": str(error)})
    lines = [*table(rows), "", *summary(rows, options.steps)]
    print("\n".join(lines))
    content = {"precision": options.precision, "steps": options.steps, "cores": os.cpu_count(), "rows": rows}
    write_result(options.output, json.dumps(content, indent=1) + "\n")
    write_result(
        options.output.with_suffix(".md"),
        "\n".join([TITLE + options.precision, "", *lines]) + "\n",
    )
    write_page(options, rows)
    if any(row.get("failed") for row in rows):
        print(f"\nLogs of what did not run: {folder}")
    print(
        f"\nTable: {options.output.with_suffix('.html')}, {options.output.with_suffix('.md')}, {options.output}"
    )
    return 0 if all(as_it_should_be(row) for row in rows) else 1


def as_it_should_be(row: dict) -> bool:
    """Whether a fault ran, changed something, was caught, and was not named wrong."""
    return not row.get("failed") and row["caught"] and row["changed"] and row["named"] != WRONG


def main(argv: list[str] | None = None) -> int:
    return run_program("run_faults.py", lambda: checked(parse(argv)))


def checked(options: argparse.Namespace) -> int:
    """Check everything that can be checked before a start, then run. Returns the exit status."""
    if options.list:
        print_catalogue(options)
        return 0
    choose(options)
    if options.output.suffix in ("", ".md", ".html"):
        reason = "the pages go to a folder of this name"
        if options.output.suffix:
            reason = f"the table goes to a {options.output.suffix} beside it"
        raise UserError(f"--output {options.output}: {reason}; give another ending, such as .json")
    pages = {".md": TITLE.encode(), ".html": PAGE}
    for path, begins in (
        (options.output, BEGINS),
        *((options.output.with_suffix(end), page_begins) for end, page_begins in pages.items()),
    ):
        require_writable_file(path, "--output")
        require_ours(path, "--output", begins)
    if options.work_dir is None:
        with locks.held((options.output, "--output")), startup.cleaning_up():
            return in_temporary_folder(options)
    require_new_folder(options.work_dir, "--work_dir")
    require_writable_folder(options.work_dir, "--work_dir", keep=False)
    with (
        locks.held((options.work_dir.absolute(), "--work_dir"), (options.output, "--output")),
        startup.cleaning_up(),
    ):
        # Another run may have filled the folder before this one got the lock.
        require_new_folder(options.work_dir, "--work_dir")
        return run(options, options.work_dir.absolute())


def in_temporary_folder(options: argparse.Namespace) -> int:
    """Call `run` in a temporary folder. The logs of runs that failed are kept, because the error names them."""
    folder = Path(tempfile.mkdtemp(prefix="lockstep-faults-"))
    failed = False
    try:
        status = run(options, folder)
        failed = status != 0
        return status
    except TrainingFailure:
        failed = True
        raise
    finally:
        # First what is in a folder, then the folder
        for path in sorted(folder.rglob("*"), reverse=True):
            with contextlib.suppress(OSError):  # a folder with a log in it
                if path.is_dir():
                    path.rmdir()
                elif not (failed and path.name == "log.txt"):
                    path.unlink()
        with contextlib.suppress(OSError):
            folder.rmdir()


if __name__ == "__main__":
    startup.end(main())
