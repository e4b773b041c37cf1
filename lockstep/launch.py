"""From a command line to a run: under Ray Train (lockstep/running/under_ray.py), or in place under torchrun or the deepspeed launcher."""

import contextlib
import functools
import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.ground import files, locks, processes, progress, startup
from lockstep.ground.errors import TrainingFailure, UserError, first_line, printable, run_program
from lockstep.inputs import architectures
from lockstep.inputs.data import Inputs
from lockstep.plan import command_line, resources, strategies
from lockstep.plan.config import Config
from lockstep.plan.resources import training_device
from lockstep.training import preflight

if TYPE_CHECKING:
    from lockstep.running.under_ray import MakeTrainer
    from lockstep.training.strategy import MakeStrategy

# Seconds that a rank waits for rank 0 to report an error that both have found
PATIENCE = 15.0


class RankFailure(TrainingFailure):
    """Only this rank failed, and reports it itself."""


def launch(
    strategy: str,
    make_strategy: "MakeStrategy",
    make_trainer: "MakeTrainer",
    argv: list[str] | None = None,
) -> int:
    """Train with a strategy, by its name or as path/to/file.py:Class; returns the exit status (lockstep/ground/errors.py).

    `make_strategy` is called on every rank with the model, the configuration, the mesh and the device. Unless a launcher has started the
    ranks, `make_trainer` is called with the worker and the settings of Ray's TorchTrainer.
    """
    spec = strategies.SPECS.get(strategy)
    name = spec.program if spec else "lockstep.train"
    processes.end_with_script()

    def body() -> int:
        return _launch(strategy, make_strategy, make_trainer, argv)

    if not resources.launched_in_place():
        return run_program(name, body)
    status = run_program(name, lambda: _one_of_many(body))
    # A thread of gloo that still wants the interpreter while it shuts down aborts the process, about once in fifty
    # runs: the launcher would take a finished run for a failed one.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _one_of_many(body: Callable[[], int]) -> int:
    """Run `body` as one rank of a launcher that kills all other ranks when one ends.

    Rank 0 reports an error that every rank finds. The others wait meanwhile and keep their connections to rank 0. A rank that is still
    alive after PATIENCE was the only one to find the error, and reports it.
    """
    try:
        return body()
    except RankFailure:
        raise
    except (UserError, TrainingFailure) as error:
        if _is_rank_zero():
            raise
        time.sleep(PATIENCE)
        raise RankFailure(f"rank {os.environ['RANK']}: {error}") from error


def _is_rank_zero() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _launch(
    strategy: str, make_strategy: "MakeStrategy", make_trainer: "MakeTrainer", argv: list[str] | None
) -> int:
    config = command_line.parse_config(strategy, argv)
    inputs = preflight.load_inputs(config)
    if not _is_rank_zero() and config.dry_run:
        return 0
    preflight.check_environment(config, inputs.architecture)
    for line in preflight.notes(config) if _is_rank_zero() else ():
        print(line, file=sys.stderr)
    if config.dry_run:
        print(describe(config, inputs))
        return 0
    # The screen shows the program's own output. Ray's goes to a log.
    screen = progress.Quiet(sys.stdout) if config.quiet else progress.Screen(sys.stdout)
    held = locks.held(*outputs(config)) if _is_rank_zero() else contextlib.nullcontext()
    with held, progress.shown_on(screen):
        if resources.launched_in_place():
            line = _run_in_place(config, inputs, make_strategy)
        else:
            from lockstep.running import under_ray

            begin = functools.partial(_begin, config, inputs)
            line = under_ray.run(config, inputs, make_strategy, make_trainer, begin)
        if _is_rank_zero():
            screen.last(printable(line))
    return 0


def _begin(config: Config, inputs: Inputs) -> None:
    """Begin the run on rank 0, once the locks are held.

    An older run's history and captured steps stay until the first step of this one is written.
    """
    # Another run may have filled the folder before this one got the lock.
    if config.capture_dir is not None:
        files.require_new_folder(config.capture_folder, "--capture_dir", overwrite=config.overwrite)
    progress.screen.note(banner(config, inputs))
    older = _version(config.history_path)

    def so_far() -> str:
        if _version(config.history_path) != older:
            return "the history holds the steps so far"
        return "no step was written" + ("; the older history is as it was" if older else "")

    startup.state = so_far


def _version(path: Path) -> tuple[int, int] | None:
    """Return what differs between two versions of a file that is replaced whole; None if there is no file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def outputs(config: Config) -> list[tuple[Path, str]]:
    """(path, flag that names it) of everything that a run writes and no other run may write meanwhile."""
    paths = [(run.history_path, "--loss_output_dir") for run in preflight.runs(config)]
    if config.capture_dir is not None:
        paths.append((config.capture_folder, "--capture_dir"))
    if config.start.written is not None:
        paths.append((config.start.written, "--init_weights_path"))
    option_paths = [(value, f"--{name}") for name, value in config.own.items() if isinstance(value, Path)]
    return paths + option_paths


def banner(config: Config, inputs: Inputs) -> str:
    gpus = resources.local_gpus()
    return (
        f"{config.label}: {printable(inputs.architecture_source)}, {architectures.in_words(inputs.architecture)}, "
        f"{printable(inputs.start.describe())}, {config.precision}, tokenizer {printable(inputs.batches.corpus.tokenizer_name)}; "
        f"{config.num_workers} workers on {config.device} over {config.backend} "
        f"({gpus} GPUs, {os.cpu_count()} CPU cores here)"
    )


def describe(config: Config, inputs: Inputs) -> str:
    """What --dry_run prints: the resolved configuration, the mesh as a grid, the contract."""
    from lockstep.training.observe import demanded

    return "\n".join(
        [
            banner(config, inputs),
            "",
            "configuration",
            *(f"  {key:<28} {printable(value)}" for key, value in config.as_dict().items()),
            f"  {'steps':<28} {inputs.num_steps}",
            f"  {'tokens per step':<28} {inputs.batches.tokens_per_step}",
            "",
            f"mesh ({config.mesh.label}): a row shares a batch, a column shares a shard of the weights",
            config.mesh.draw(),
            "",
            "contract (read back from the live objects after the first step; any difference stops the run)",
            *(f"  {key:<28} {json.dumps(value)}" for key, value in demanded(config, inputs).items()),
        ]
    )


def _run_in_place(config: Config, inputs: Inputs, make_strategy: "MakeStrategy") -> str:
    """Run one rank of a launcher: make the process group from the environment, then run the loop."""
    if _is_rank_zero():
        _begin(config, inputs)
    with startup.importing():
        import torch.distributed as dist

        from lockstep.training import loop as training
    device = training_device(config)
    with startup.cleaning_up():
        try:
            dist.init_process_group(config.backend)
            line = training.run_with_control(config, inputs, make_strategy, device)
        except (UserError, TrainingFailure, BrokenPipeError):
            raise
        except Exception as error:
            if processes.LOST.search(str(error)):
                # The rank that ended has said why, and the launcher ends this one
                time.sleep(PATIENCE)
            traceback.print_exc()
            raise RankFailure(
                f"rank {os.environ['RANK']} failed: {type(error).__name__}: {first_line(error)}"
            ) from error
        # Strategies hold cycles; their process groups must go before the default one.
        gc.collect()
        dist.destroy_process_group()
        return line
