"""Compare every strategy with a float64 reference, tensor by tensor.

    python run_verification.py --output_dir runs/verify
    python run_verification.py --model_name Qwen/Qwen2.5-0.5B --num_layers 2 --batch_size 2 --seq_length 128

Trains with every strategy and --capture_dir, computes the reference, compares (lockstep/compare.py), and writes report.md and
report.json. All other flags are those that all training scripts have; options of one strategy are given in --strategies. Exit status: 0 every tensor is as close to the reference as the same
tensor of a correct run; 1 some tensor is not, a run failed, or the verdict is NOT JUDGED or CONFIGURED DIFFERENTLY; 2 a usage error;
3 an internal error.
"""

if __name__ == "__main__":
    from lockstep.ground import startup

    startup.begin()  # first: from now on Ctrl-C and a missing package are one line each

import argparse
import contextlib
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from lockstep.ground import files, locks, startup
from lockstep.ground.errors import UserError, printable, run_program
from lockstep.ground.flags import Parser
from lockstep.plan import command_line, initial_weights
from lockstep.plan.config import BASELINE, Config
from lockstep.plan.runs import HELP, Run, runs_of
from lockstep.plan.strategies import SPECS
from lockstep.running import jobs
from lockstep.training import preflight
from lockstep.verdict.loss_tolerance import RULES
from lockstep.verification import check_reference

NAME = "run_verification.py"
OLDER = ".older"  # the folder of an older verification until the new one has captured a step
OURS = ("reference", "losses", "logs", "initial_weights.safetensors", "report.md", "report.json")
SET_HERE = (
    "--capture_dir",
    "--capture_steps",
    "--debug_steps",
    "--save_init_weights",
    "--dry_run",
    "--num_workers",
    "--num_epochs",
    "--loss_output_dir",
    "--storage_path",
    "--experiment_name",
)


def parse(argv: list[str] | None) -> tuple[argparse.Namespace, list[str]]:
    defaults = Config
    parser = Parser(prog="run_verification.py", description=__doc__.splitlines()[0], allow_abbrev=False)
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
        default=defaults.capture_steps,
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
        "--overwrite", action="store_true", help="remove an older verification in --output_dir"
    )
    parser.epilog = "All other flags are given to all runs; they are those that all training scripts have (train_ddp.py --help), such as --model_name, --num_layers, --batch_size, --seq_length, --precision."
    options, rest = parser.parse_known_args(argv)
    clash = next((flag for flag in rest if flag.split("=")[0] in SET_HERE), None)
    if clash:
        raise UserError(f"{clash} is set by run_verification.py itself; leave it out")
    if options.steps < 1:
        raise UserError(f"--steps {options.steps}: compare at least one step")
    return options, rest


def ours(path: Path) -> bool:
    """Whether a verification wrote this file or folder, even one that was killed meanwhile. Locks are never removed."""
    if path.name == OLDER or (path.name.startswith(".") and path.name.endswith(".lock")):
        return True
    if path.is_dir() and path.name not in OURS:
        held = list(path.iterdir())
        return bool(held) and all(files.is_captured(each) for each in held)
    unfinished = re.fullmatch(r"\.(.+)\.\d+\.tmp", path.name)
    return (unfinished[1] if unfinished else path.name) in OURS


def check_folder(options: argparse.Namespace) -> Path:
    """The output folder: empty, or holding only an older verification that may be removed. Raises UserError otherwise."""
    folder = options.output_dir.expanduser().absolute()
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--output_dir {folder} is a file; choose a folder")
    try:
        found = sorted(folder.iterdir()) if folder.is_dir() else []
    except OSError as error:
        raise UserError(
            f"--output_dir {folder}: cannot be read ({error.strerror}); choose another folder"
        ) from error
    if any(path.name == OLDER or not path.name.startswith(".") for path in found) and not options.overwrite:
        raise UserError(
            f"--output_dir {folder} is not empty, and nothing is overwritten; choose another, or add --overwrite"
        )
    foreign = next((path.name for path in found if not ours(path)), None)
    if foreign:
        raise UserError(
            f"--output_dir {folder} holds {foreign}, which no verification wrote; choose another folder"
        )
    return folder


def require_outside(folder: Path, config: Config) -> None:
    """Raise UserError if an input of the run lies in the folder that is emptied before it."""
    inputs = {
        "--init_weights_path": config.init_weights_path,
        "--model_name": config.model_name,
        "--dataset_name": config.dataset_name,
    }
    for option, value in inputs.items():
        path = os.path.realpath(os.path.expanduser(value or os.devnull))
        if os.path.exists(path) and Path(path).is_relative_to(os.path.realpath(folder)):
            raise UserError(
                f"{option} {value} lies in --output_dir {folder}, whose contents are replaced; choose another --output_dir"
            )


@contextlib.contextmanager
def replacing(folder: Path) -> Iterator[None]:
    """Set an older verification aside. It is back at the end unless a step of the new one was captured.

    It lies in OLDER meanwhile, and stays there if this process is killed: the next verification finds it.
    """
    older = folder / OLDER
    if has_captured(folder):
        empty(older)
        older.mkdir(exist_ok=True)
        for path in inside(folder):
            path.rename(older / path.name)
    empty(folder)  # of what a killed one left before its first step
    try:
        yield
    finally:
        if has_captured(folder):
            empty(older)
        elif older.is_dir():
            empty(folder, but="logs")  # they say why there is no new one
            for path in inside(older):
                if path.name != "logs":
                    path.rename(folder / path.name)
            empty(older)
        with contextlib.suppress(FileNotFoundError):
            older.rmdir()


def has_captured(folder: Path) -> bool:
    """Whether a verification has captured a step there."""
    return any(folder.glob("*/manifest.json"))


def inside(folder: Path) -> list[Path]:
    """What a verification has written into a folder. Not locks: a run whose script was killed may still hold them."""
    return [
        path
        for path in (folder.iterdir() if folder.is_dir() else ())
        if path.name != OLDER and not path.name.endswith(".lock")
    ]


def empty(folder: Path, but: str = "") -> None:
    """Remove what a verification has written into a folder, except what is named `but`."""
    for path in inside(folder):
        if path.name != but:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def main(argv: list[str] | None = None) -> int:
    return run_program(NAME, lambda: verify(*parse(argv)))


def verify(options: argparse.Namespace, rest: list[str]) -> int:
    rest = [*rest, "--dp_size", str(options.dp_size), "--debug_steps", str(options.steps)]
    folder = check_folder(options)
    runs = runs_of(options.strategies, command_line.parse_config(BASELINE, rest), options.tp_size)
    files.require_writable_folder(folder, "--output_dir", keep=False)
    elsewhere = ["--loss_output_dir", str(folder / "losses"), "--storage_path", str(folder / "losses")]
    configs = []
    for run in runs:  # a usage error is answered before anything is removed or started
        dry = ["--dry_run"]  # leaves no folder behind
        config = command_line.parse_config(run.spec.place, [*rest, *elsewhere, *dry, *run.arguments])
        if config.precision not in RULES:
            raise UserError(
                f"no tolerance is derived for --precision {config.precision}; use {' or '.join(RULES)}"
            )
        require_outside(folder, config)
        inputs = preflight.load_inputs(config)
        preflight.check_environment(config, inputs.architecture)
        configs.append(config)
    check_reference(config, inputs)
    for line in dict.fromkeys(line for each in configs for line in preflight.notes(each)):
        print(printable(line), file=sys.stderr)
    baseline = configs[0]
    about = f"{baseline.model_name}, {initial_weights.describe(baseline)}, {baseline.precision}, steps 1 to {options.steps}"
    print(printable(about))
    startup.state = "--overwrite starts again"
    with locks.inside(folder, "verification", "--output_dir"):
        check_folder(options)  # another run may have ended before we had the lock
        # nor does a run that outlived its script write there
        with locks.held(*((folder / run.name, "--output_dir") for run in runs)), replacing(folder):
            rest = [
                argument for argument in rest if argument != "--pretrained"
            ]  # the baseline's run writes them down for all
            save = (
                ["--save_init_weights", *(["--pretrained"] if config.pretrained else [])]
                if config.init_weights_path is None
                else []
            )
            if save:
                rest += ["--init_weights_path", str(folder / "initial_weights.safetensors")]
            return train_and_compare(options, runs, [*rest, *elsewhere], save, folder)


def train_and_compare(
    options: argparse.Namespace, runs: list[Run], rest: list[str], save: list[str], folder: Path
) -> int:
    """Train all runs and compare them. `save` are flags of the baseline only, which write the initial weights."""
    rest = [*rest, "--capture_steps", str(options.steps), "--capture_dir", str(folder)]
    groups: dict[int | None, list[dict]] = {}  # by number of ranks, the baseline's first
    for run in runs:
        own = [*(save if run.is_baseline else []), *run.arguments]
        groups.setdefault(run.mesh.world_size, []).append(
            {"strategy": run.spec.place, "arguments": [*rest, *own]}
        )
    groups[None] = [{"strategy": jobs.REFERENCE, "arguments": rest}]
    jobs.start_all_groups(list(groups.items()), folder / "logs", shown=True)
    from lockstep import compare  # torch is not needed to answer a usage error
    from lockstep.verdict import tensor_report

    judged = compare.judge([folder / name for name in (*(run.name for run in runs), "reference")], folder)
    return tensor_report.show(judged, folder)


if __name__ == "__main__":
    startup.end(main())
