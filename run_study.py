"""Train a control and runs that differ from it in one thing each, and compare them.

    python run_study.py --list
    python run_study.py studies/zero_stages.toml                     into runs/study-zero_stages
    python run_study.py studies/zero_stages.toml --resume            the runs that are finished are kept
    python run_study.py studies/zero_stages.toml --dry_run           every run, and what differs from the control

A study is a file (extras/studies/study.py). Writes report.html, report.md, report.json and losses.png. Exit status: 0 every run agrees with
the control, or was only to be measured; 1 one does not, or failed; 2 a usage error; 3 an internal error.
"""

if __name__ == "__main__":
    from lockstep.ground import startup

    startup.begin()  # first: from now on Ctrl-C and a missing package are one line each

import argparse
import shlex
import sys
from pathlib import Path
from typing import Protocol

from extras.studies import study as study_file
from extras.studies.study import Study
from lockstep.ground import files, locks, startup
from lockstep.ground.errors import UserError, run_program
from lockstep.ground.flags import Parser

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


class Kind(Protocol):
    """A kind of study: single runs beside a control, options that are varied, or several seeds of each run. All is checked."""

    def show(self) -> None:
        """Print every run."""

    def run(self, command: str) -> bool:
        """Train, judge and report, as `command` asked; returns whether every run is as it should be."""


def kind_of(study: Study, only: list[str], path: Path, place: Path) -> Kind:
    """The study of a file, into the folder `place`. Raises UserError for a run that could not be started."""
    if study.vary:
        from extras.studies.options_report import VariedOptions

        return VariedOptions(study, study.vary, only, place)
    if study.converging:
        from extras.studies.converging_report import SeveralSeeds

        return SeveralSeeds(study, study.converging, path, place)
    from extras.studies.report import SingleRuns

    return SingleRuns(study, study_file.plan(study, path, place), place)


def chosen(options: argparse.Namespace) -> Study:
    """The study, with the runs and the text that the command line chooses."""
    study = study_file.read(options.study)
    if options.only and not study.vary:
        unknown = next((name for name in options.only if name not in study.runs), None)
        if unknown:
            raise UserError(
                f"--only {unknown}: {options.study} has no such run; it has {', '.join(study.runs)}"
            )
        kept = {*options.only, *(study.converging.roles if study.converging else ())}
        runs = {name: run for name, run in study.runs.items() if name in kept}
        study = study.model_copy(update={"runs": runs})
    if options.dataset_name is not None:
        study = study.model_copy(update={"shared": {**study.shared, "dataset_name": options.dataset_name}})
    return study


def body(options: argparse.Namespace, argv: list[str]) -> int:
    """List the studies, or show or run the chosen one. Returns the exit status."""
    if options.list:
        for path in sorted(STUDIES.glob("*.toml")):
            print(f"{path.relative_to(STUDIES.parent)}  {study_file.read(path).title}")
        return 0
    if options.study is None:
        raise UserError("name the file of a study; --list shows those that come with Lockstep")
    folder = (options.output_dir or Path("runs") / f"study-{options.study.stem}").expanduser().absolute()
    kind = kind_of(chosen(options), options.only or [], options.study, folder)
    if options.dry_run:
        kind.show()
        return 0
    if not options.resume:
        files.require_empty_folder(folder, "--output_dir", "--resume to go on with its study")
    files.require_writable_folder(folder, "--output_dir")
    startup.state = "--resume keeps the finished runs and goes on"
    with locks.inside(folder, "study", "--output_dir"):
        passed = kind.run(shlex.join([NAME, *argv]))
    print(f"\n{'PASS' if passed else 'FAIL'}")
    return 0 if passed else 1


if __name__ == "__main__":
    startup.end(main())
