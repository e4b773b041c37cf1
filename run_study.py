"""Train a control and runs that differ from it in one thing each, and compare them.

    python run_study.py --list
    python run_study.py studies/zero_stages.toml                     into runs/study-zero_stages
    python run_study.py studies/zero_stages.toml --resume            the runs that are finished are kept
    python run_study.py studies/zero_stages.toml --dry_run           every run, and what differs from the control

A study is a file (extras/studies/study.py). Writes report.html, report.md, report.json and losses.png. Exit status: 0 every run agrees with the control,
or was only to be measured; 1 one does not, or failed; 2 a usage error; 3 an internal error.
"""

if __name__ == "__main__":
    from lockstep.ground import startup

    startup.begin()  # first: from now on Ctrl-C and a missing package are one line each

import argparse
import json
import shlex
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from extras.studies import compositions, variations
from extras.studies import study as study_file
from extras.studies.study import Planned, Study, Vary
from extras.studies.variations import Group
from lockstep.ground import files, locks, startup
from lockstep.ground.errors import UserError, printable, run_program
from lockstep.ground.flags import Parser

if TYPE_CHECKING:
    from extras.studies.converging import Converging
    from extras.studies.converging_report import Seeded

NAME = "run_study.py"
STUDIES = Path(__file__).parent / "studies"


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(prog=NAME, description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument(
        "study", type=Path, nargs="?", help="file of the study, such as studies/zero_stages.toml"
    )
    parser.add_argument("--list", action="store_true", help="show the studies that come with Lockstep")
    parser.add_argument(
        "--only", metavar="RUN", action="append", help="train only this run and the control; may be repeated"
    )
    parser.add_argument(
        "--dry_run",
        action="store_true",
        help="show every run and what differs from the control; train nothing",
    )
    parser.add_argument(
        "--resume", action="store_true", help="keep the finished runs of an interrupted study"
    )
    parser.add_argument(
        "--dataset_name", help="text to train on, as for the training scripts (default: the study's)"
    )
    parser.add_argument("--output_dir", type=Path, help="folder for everything (default: runs/study-NAME)")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    return run_program(NAME, lambda: body(parse(argv), sys.argv[1:] if argv is None else argv))


def body(options: argparse.Namespace, argv: list[str]) -> int:
    if options.list:
        for path in sorted(STUDIES.glob("*.toml")):
            print(f"{path.relative_to(STUDIES.parent)}  {study_file.read(path).title}")
        return 0
    if options.study is None:
        raise UserError("name the file of a study; --list shows those that come with Lockstep")
    place = (options.output_dir or Path("runs") / f"study-{options.study.stem}").expanduser().absolute()
    study = study_file.read(options.study)
    if options.only and not study.vary:
        unknown = next((name for name in options.only if name not in study.runs), None)
        if unknown:
            raise UserError(
                f"--only {unknown}: {options.study} has no such run; it has {', '.join(study.runs)}"
            )
        told = study.converging
        kept = {*options.only, *(told.roles if told else ())}
        chosen = {name: run for name, run in study.runs.items() if name in kept}
        study = study.model_copy(update={"runs": chosen})
    if options.dataset_name is not None:
        study = study.model_copy(update={"shared": {**study.shared, "dataset_name": options.dataset_name}})
    if study.vary:
        groups = compositions.groups(study.vary) if study.vary.each_up_to else variations.groups(study.vary)
        if options.only:
            groups = variations.only(groups, options.only)
        if options.dry_run:
            show_groups(groups)
            return 0
    elif study.converging:
        from extras.studies import converging_report

        seeded = converging_report.plan(study, study.converging, options.study, place)
        if options.dry_run:
            for runs in seeded.values():
                show([runs[0]])
            return 0
    else:
        planned = study_file.plan(study, options.study, place)
        if options.dry_run:
            show(planned)
            return 0
    if not options.resume:
        files.require_empty_folder(place, "--output_dir", "--resume to go on with its study")
    files.require_writable_folder(place, "--output_dir")
    startup.state = "--resume keeps the finished runs and goes on"
    command = shlex.join([NAME, *argv])
    with locks.inside(place, "study", "--output_dir"):
        if study.vary:
            return run_groups(study, study.vary, groups, place, command)
        if study.converging:
            return run_seeds(study, study.converging, seeded, place, command)
        return run(study, planned, place, command)


def show(planned: list[Planned]) -> None:
    control = planned[0]
    print(f"{control.name}: {control.config.label}, the control")
    for key, value in control.config.as_dict().items():
        print(f"  {key:<28} {printable(value)}")
    for each in planned[1:]:
        print(
            f"{each.name}: {each.config.label}" + (f"; measured only: {each.differs}" if each.differs else "")
        )
        for key, (mine, theirs) in study_file.differences(each, control).items():
            of_control = "" if theirs is None else f" (control: {printable(theirs)})"
            print(f"  {key:<28} {printable(mine)}{of_control}")


def show_groups(groups: list[Group]) -> None:
    for group in groups:
        print(f"{group.name}: {len(group.cases)} runs")
        for case in group.cases:
            print(f"  {case.name}: {json.dumps(case.choice)}")


def run_groups(study: Study, vary: Vary, groups: list[Group], place: Path, command: str) -> int:
    """Every group against its own control. What is refused is a result, too."""
    from extras.studies import options_report, report, training

    rows = []
    for number, group in enumerate(groups):
        folder = place / "groups" / group.name
        planned, refused = variations.plan(study, vary, group, folder)
        print(
            f"{number + 1} of {len(groups)}, {group.name}: {len(group.cases)} runs, {len(refused)} refused",
            flush=True,
        )
        failed = training.train(
            planned, folder, apart=False, note=lambda line: print(f"  {line}", flush=True)
        )
        training.reference([run for run in planned if run.name not in failed], folder)
        found = report.rows(study, planned, failed, folder)
        rows += options_report.results(group, planned, found, refused)
        machine = report.provenance(planned[0])
        options_report.write(study, rows, place, command, machine)  # what is known so far
    print(f"\n{report.text(options_report.table(study, rows))}\n")
    print(f"Report  {printable(place / 'report.md')}")
    return concluded(options_report.good(rows))


def run_seeds(study: Study, told: "Converging", planned: "Seeded", place: Path, command: str) -> int:
    """Every run with several seeds, compared with the control by statistics."""
    from extras.studies import converging_report, report, training

    flat = [run for runs in planned.values() for run in runs]
    print(f"{printable(study.title)}: {len(flat)} runs -> {printable(place)}", flush=True)
    failed = training.train_alike(flat, place, note=lambda line: print(line, flush=True))
    found = converging_report.rows(study, told, planned, failed)
    said = converging_report.write(study, told, planned, found, place, command)
    print(f"\n{report.text(converging_report.table(found))}\n\n{said}\n")
    print(f"Report  {printable(place / 'report.md')}\nFigure  {printable(place / 'losses.png')}")
    return concluded(converging_report.good(found))


def run(study: Study, planned: list[Planned], place: Path, command: str) -> int:
    from extras.studies import report, training

    print(f"{printable(study.title)}: {len(planned)} runs -> {printable(place)}", flush=True)
    # While one core imports for the first ranks, the other imports for the report.
    with ThreadPoolExecutor(max_workers=1) as aside:
        aside.submit(report.prepare, planned[0])
        failed = training.train(planned, place, apart=study.memory, note=lambda line: print(line, flush=True))
        if study.tensors:
            training.reference(planned, place)
    found = report.rows(study, planned, failed, place)
    report.write(study, planned, found, place, command)
    print(f"\n{report.text(report.table(study, found))}\n")
    for row in found:
        if row.get("why"):
            print(f"{row['run']}: {row['outcome']}: {printable(row['why'], 400)}")
    print(f"Report  {printable(place / 'report.md')}\nFigure  {printable(place / 'losses.png')}")
    return concluded(report.good(found))


def concluded(passed: bool) -> int:
    """Print the verdict; returns the exit status."""
    print(f"\n{'PASS' if passed else 'FAIL'}")
    return 0 if passed else 1


if __name__ == "__main__":
    startup.end(main())
