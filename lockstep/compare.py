"""Compare dumps: is every tensor of every run as close to the reference as a correct run's?

    python -m lockstep.compare runs/verify/fsdp runs/verify/reference         a dump and the reference (and DDP's beside it)
    python -m lockstep.compare runs/verify/{ddp,fsdp,reference}               several dumps and the reference
    python -m lockstep.compare runs/one/fsdp runs/two/fsdp                    any two dumps

The yardstick is DDP's own distance from the float64 reference; docs/verification.md derives the tolerances. The order of the folders
does not matter. Exit status: 0 PASS; 1 any other verdict; 2 a usage error, or dumps that cannot be compared; 3 an internal error.
"""

if __name__ == "__main__":
    from lockstep.ground import startup

    startup.begin()  # first: from now on Ctrl-C and a missing package are one line each

from collections.abc import Sequence
from pathlib import Path

from lockstep.diagnosis.diagnose import diagnose
from lockstep.dumps.dump import Dump, Dumps
from lockstep.ground.errors import UserError, run_program
from lockstep.ground.files import REPORTS, require_ours, require_writable_folder
from lockstep.ground.flags import Parser
from lockstep.page import verification
from lockstep.plan.config import BASELINE, REPLAY
from lockstep.verdict import module_results, tensor_report
from lockstep.verdict.comparison import compare_dumps, compare_two
from lockstep.verdict.loss_folder import Judged
from lockstep.verdict.result import Result


def judge(
    folders: Sequence[Path],
    output_dir: Path | None = None,
    curves: Judged | None = None,
    untrained: dict[str, str] | None = None,
) -> Result:
    """Compare the dumps in the folders, and diagnose every run that failed.

    One of them is the reference. DDP's dump may lie beside it; a replay lies beside the dump of its run, or beside the reference. Any two
    dumps are compared without a reference, and not diagnosed. Writes report.md, report.json and report.html into `output_dir` if one is
    given; `curves` are losses of the same runs, for the page. `untrained` says of further runs why their training failed.

    Raises UserError for folders that hold no dumps, or dumps that cannot be compared.
    """
    opened = [Dump(folder) for folder in folders]
    replay = next((dump for dump in opened if dump.is_replay), None)
    if replay:
        raise UserError(
            f"{replay.folder}: a replay, which is found beside the reference; name the reference and the dump that it replays"
        )
    reference: Dump | None = None
    replays: Dumps = {}
    if len(opened) == 2 and not any(dump.is_reference for dump in opened):
        result = compare_two(*opened)
    else:
        reference, dumps, replays = arrange(opened)
        result = compare_dumps(reference, dumps, replays)
        for name, run in result.runs.items():
            run.alone = module_results.read(run.dump, reference.folder.resolve().parent)
            if result.has_failed(name):
                run.diagnosis = diagnose(result, name, reference, replays)
    result.untrained = untrained or {}
    if output_dir is not None:
        tensor_report.write(result, output_dir)
        verification.write(result, output_dir, reference, replays, curves)
    return result


def arrange(opened: list[Dump]) -> tuple[Dump, Dumps, Dumps]:
    """Return (the reference, the dumps by strategy, the replays by strategy), for `compare_dumps`.

    Raises UserError unless exactly one dump is a reference, and no two others are of one strategy.
    """
    references = [dump for dump in opened if dump.is_reference]
    if len(references) != 1:
        raise UserError(
            f"{len(references)} of the {len(opened)} dumps are references; to compare more than two dumps, name exactly one"
        )
    (reference,) = references
    dumps: Dumps = {}
    for dump in opened:
        if dump is reference:
            continue
        if dump.name in dumps:
            raise UserError(
                f"{dumps[dump.name].folder} and {dump.folder} are both dumps of {dump.name}; name one dump for each strategy, or capture with --run_name"
            )
        dumps[dump.name] = dump
    folder = reference.folder.resolve().parent
    if BASELINE not in dumps:
        dumps[BASELINE] = Dump(folder / BASELINE)
    replays: Dumps = {}
    for name, dump in dumps.items():
        candidates = (dump.folder.with_name(f"{REPLAY}{dump.folder.name}"), folder / f"{REPLAY}{name}")
        replay = next((replay for replay in candidates if replay.is_dir()), None)
        replays |= {name: Dump(replay)} if replay else {}
    return reference, dumps, replays


def require_distinct(folders: list[Path]) -> None:
    """Raise UserError for a folder named twice: that a dump agrees with itself proves nothing."""
    resolved = [folder.resolve() for folder in folders]
    for path, folder in zip(resolved, folders, strict=True):
        first = folders[resolved.index(path)]
        if first is not folder:
            raise UserError(f"{first} and {folder} are the same folder; name the dumps of two runs")


def main(argv: list[str] | None = None) -> int:
    parser = Parser(
        prog="python -m lockstep.compare", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    parser.add_argument(
        "dumps", type=Path, nargs="+", help="two or more dump folders; one may be the reference"
    )
    parser.add_argument("--output_dir", type=Path, help="write report.json, report.md and report.html there")

    def body() -> int:
        options = parser.parse_args(argv)
        if len(options.dumps) < 2:
            raise UserError("give two dump folders or more")
        require_distinct(options.dumps)
        if options.output_dir is not None:
            require_writable_folder(options.output_dir, "--output_dir", keep=False)
            for name, begins in REPORTS.items():
                require_ours(options.output_dir / name, "--output_dir", begins)
        return tensor_report.show(judge(options.dumps, options.output_dir), options.output_dir)

    return run_program("lockstep.compare", body)


if __name__ == "__main__":
    startup.end(main())
