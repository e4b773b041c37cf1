"""Run a training script and record its first steps: what its model is called with, its gradients and its updates.

    python -m lockstep.record --output runs/mine train.py --my --args
    torchrun --nproc_per_node 4 -m lockstep.record --output runs/mine train.py --my --args
    torchrun --nproc_per_node 4 -m lockstep.record --output runs/mine -m package.train --my --args

The command finds the model: the first one that is called in training mode. In a script of your own,
`with lockstep.record(model, "runs/mine"):` around the loop does the same. `python -m lockstep.judge runs/mine` then
judges the recording. Exit status: the script's own; 2 for a usage error.
"""

import argparse
import functools
import importlib.util
import multiprocessing
import os
import runpy
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.ground.errors import UserError, run_program, say, show_exception
from lockstep.ground.files import require_writable_folder
from lockstep.ground.flags import Parser

if TYPE_CHECKING:
    import torch

    from lockstep.recorder.model_finder import ModelFinder


def main(argv: list[str] | None = None) -> int:
    from lockstep.recorder.model_finder import ModelFinder
    from lockstep.recorder.recorder import EVERY_MODULE, STEPS

    parser = Parser(prog="python -m lockstep.record", description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument(
        "--output",
        type=Path,
        required=True,
        help="the folder that is written; an earlier recording there is replaced",
    )
    parser.add_argument(
        "--steps", type=int, default=STEPS, help="how many steps are recorded (default: %(default)s)"
    )
    parser.add_argument(
        "--modules",
        metavar="PATTERN",
        default=EVERY_MODULE,
        help="the modules whose outputs are recorded, such as 'model.layers.{0,13}.*'; '' for none (default: '%(default)s', all)",
    )
    # Some launchers give this option to the program that they start. Here, that program is not the script.
    parser.add_argument("--local_rank", "--local-rank", help=argparse.SUPPRESS)
    parser.add_argument(
        "-m", "--module", action="store_true", help="SCRIPT is the name of a module, as with python -m"
    )
    parser.add_argument("script", help="the training script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the script")

    def body() -> int:
        options = parser.parse_args(argv)
        if options.steps < 1:
            raise UserError(f"--steps {options.steps}: give a number of at least 1")
        script = _path_of_module(options.script) if options.module else Path(options.script)
        if not script.is_file():
            raise UserError(f"{script}: there is no such file; name the training script")
        # The script may change the working folder.
        output = options.output.absolute()
        if script.resolve().is_relative_to(output.resolve()):
            raise UserError(
                f"--output {options.output}: the script is in this folder, and the judge runs no code of a recording's folder; name another one"
            )
        require_writable_folder(output, "--output")
        launcher_arguments = [] if options.local_rank is None else [f"--local_rank={options.local_rank}"]
        arguments = [*launcher_arguments, *options.arguments]
        sys.argv = [str(script), *arguments]
        if options.module:
            run = functools.partial(runpy.run_module, options.script, alter_sys=True)
        else:
            sys.path.insert(0, str(script.absolute().parent))
            run = functools.partial(runpy.run_path, str(script))
        return _run(run, str(script), ModelFinder(output, options.steps, options.modules))

    return run_program("lockstep.record", body)


def _path_of_module(name: str) -> Path:
    """Return the file that `python -m name` runs. Raises UserError if there is none."""
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except (ImportError, ValueError):
        spec = None
    if spec is None or spec.origin is None:
        raise UserError(f"-m {name}: there is no such module; name it as for python -m, from this folder")
    return Path(spec.origin)


def _run(run: Callable[..., Any], script: str, finding: "ModelFinder") -> int:
    """Run a script as Python does, while `finding` looks for its model. Return the script's exit status.

    Raises UserError if nothing was recorded.
    """
    start_time = time.time()
    status = 0
    try:
        run(run_name="__main__")
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except UserError:
        raise
    except Exception as error:  # noqa: BLE001 - the script's own: errors of the recorder end the recording alone
        show_exception()
        finding.see_error(error)
        return 1
    finally:
        finding.stop()
    for process in multiprocessing.active_children() if finding.started else ():
        # Python joins these, too, when it ends.
        if not process.daemon:
            process.join()
    if finding.recorder is None and not (finding.started and _is_written_since(finding.output, start_time)):
        program = f"{script}, or a process that it started," if finding.started else script
        message = (
            f"{program} called {type(next(iter(finding.in_evaluation))).__name__} in evaluation mode alone, and no optimizer stepped it, so nothing was recorded"
            if finding.in_evaluation
            else f"{program} called no model in training mode, so nothing was recorded"
        )
        rank = os.environ.get("RANK", "0")
        if rank == "0":
            raise UserError(f"{message}; name the script that trains")
        # This rank may have another role, such as to serve samples. The launcher would take another status for a failure.
        say(f"lockstep.record: {message} (rank {rank})")
    return status


def _is_written_since(output: Path, start_time: float) -> bool:
    """Whether a recording was written into the folder after `start_time`, in seconds since the epoch."""
    path = output / "model.json"
    return path.is_file() and path.stat().st_mtime >= start_time


def batch(**tensors: "torch.Tensor") -> None:
    """Record tensors that the loss needs and the model is not called with, such as labels.

    They belong to the micro batch that the model is called with next. `python -m lockstep.judge --loss` has them.
    Without a recording this does nothing.
    """
    from lockstep.recorder.recorder import NOTED

    NOTED.update(tensors)


class _CallableModule(types.ModuleType):
    """The class of this module, so that `lockstep.record` is both the module and what a user calls."""

    def __call__(
        self,
        model: "torch.nn.Module",
        folder: str | Path,
        steps: int | None = None,
        modules: str | None = None,
    ) -> Any:
        """Record the first steps (default: 2) of the loop inside of `with`, into a folder of its own.

        `modules` is a pattern of the names of the modules whose outputs are recorded (default: all).
        """
        from lockstep.recorder.recorder import EVERY_MODULE, STEPS, recording

        return recording(
            model, folder, STEPS if steps is None else steps, EVERY_MODULE if modules is None else modules
        )


sys.modules[__name__].__class__ = _CallableModule

if __name__ == "__main__":
    sys.exit(main())
