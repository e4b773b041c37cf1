"""A run under Ray Train, in the instance of lockstep/running/ray_instance.py.

The output of Ray and the workers goes to a log beside the history. Only the progress lines of the loop are shown.
"""

import concurrent.futures
import contextlib
import datetime
import io
import os
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

from lockstep.ground import hang, processes, progress, startup
from lockstep.ground.errors import TrainingFailure, UserError, first_line
from lockstep.inputs.data import Inputs
from lockstep.plan import strategies
from lockstep.plan.config import Config, Spec
from lockstep.plan.resources import share_cores
from lockstep.running.ray_instance import connect, end_children, import_ray, shutdown

if TYPE_CHECKING:
    from ray.train.torch import TorchTrainer

    from lockstep.training.strategy import MakeStrategy

Returned = TypeVar("Returned")
MakeTrainer = Callable[..., "TorchTrainer"]


def _worker(arguments: dict) -> tuple[bool, str]:
    """One Ray Train worker; Ray has set up the process group. Returns (whether it succeeded, one line).

    A TrainingFailure is returned, because all ranks have it and Ray would print each rank's traceback. Any other error is raised, or
    the other ranks would wait for this one.
    """
    with startup.importing():
        from ray import train
        from ray.train.torch import get_device

        from lockstep.training import loop as training

        config = replace(arguments["config"], spec=strategies.spec_of(arguments["strategy"]))
    progress.relay()
    os.environ[hang.VARIABLE] = arguments["patience"]
    local_size, device = train.get_context().get_local_world_size(), get_device()

    def trained() -> tuple[bool, str]:
        share_cores(config, local_size)
        try:
            return True, training.run_with_control(
                config, arguments["inputs"], arguments["make_strategy"], device
            )
        except TrainingFailure as error:
            return False, str(error)

    # Training runs in another thread, so that this one can end the run if it hangs.
    result = _in_background(trained)
    hang.fail = lambda line: result.set_exception(TrainingFailure(line))
    return result.result()


def run(
    config: Config,
    inputs: Inputs,
    make_strategy: "MakeStrategy",
    make_trainer: MakeTrainer,
    begin: Callable[[], None],
) -> str:
    """Train under Ray Train; returns a closing sentence. Calls `begin` once there is a cluster.

    Raises TrainingFailure, or UserError if there is no cluster at RAY_ADDRESS.
    """
    ray = import_ray("ray")
    # The import takes as long as Ray takes to start.
    training_library = _in_background(lambda: import_ray("ray.train.torch"))
    startup.end_helpers.append(end_children)
    connect(ray)
    training_library.result()
    path = config.loss_output_dir / "logs" / f"{config.history_path.stem}.txt"
    with _log_at(path) as log:
        begin()
        try:
            return _train(ray, config, make_trainer, {"inputs": inputs, "make_strategy": make_strategy})
        except WorkersLost as error:
            hint = (
                f"its log {path} ends where it could not be written ({log.lost})"
                if log.lost
                else f"the full output is in {path}"
            )
            raise TrainingFailure(f"{error}; {hint}") from error


class WorkersLost(TrainingFailure):
    """Ray or a worker ended the run, not the loop. The log says more."""


def _train(ray: ModuleType, config: Config, make_trainer: MakeTrainer, worker_inputs: dict[str, Any]) -> str:
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig
    from ray.train.v2.api.exceptions import TrainingFailedError

    name = config.experiment_name or f"{config.name}-{datetime.datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}"
    cpu = min(1, (os.cpu_count() or 1) / config.num_workers)
    resources = {"CPU": 1, "GPU": 1} if config.device == "cuda" else {"CPU": cpu}
    gpus = int(ray.cluster_resources().get("GPU", 0))
    if config.device == "cuda" and gpus < config.num_workers:
        progress.screen.note(
            f"{config.label}: waiting for {config.num_workers} GPUs, the cluster has {gpus} now"
        )
    records, is_new_storage = config.storage_path / name, not config.storage_path.exists()
    went_well = False
    try:
        trainer = make_trainer(
            # What it returns is the result's return_value.
            _worker,
            train_loop_config={
                # Ray cannot import a user's file, so workers find its spec again by its place.
                "config": replace(config, spec=Spec()),
                "strategy": config.spec.place,
                "patience": str(hang.patience()),
                **worker_inputs,
            },
            torch_config=TorchConfig(backend=config.backend),
            scaling_config=ScalingConfig(
                num_workers=config.num_workers,
                use_gpu=config.device == "cuda",
                resources_per_worker=resources,
            ),
            run_config=RunConfig(
                name=name, storage_path=str(config.storage_path), failure_config=FailureConfig(max_failures=0)
            ),
        )
        # Ray Train would handle Ctrl-C itself in the main thread. From another thread, Ctrl-C ends this process
        # (lockstep/ground/startup.py), and Ray ends what it started. Ray annotates `fit` with the Result of an older Ray Train.
        result: Any = _in_background(trainer.fit).result()
        went_well, line = result.return_value
    except TrainingFailedError as error:
        raise WorkersLost(_reason(error)) from error
    except ray.exceptions.RayError as error:
        raise WorkersLost(f"Ray stopped the run: {first_line(error)}") from error
    finally:
        shutdown(ray, clean=went_well)
        _remove_records(records, *([config.storage_path] if is_new_storage else []))
    if not went_well:
        raise TrainingFailure(line)
    return line


def _in_background(function: Callable[[], Returned]) -> concurrent.futures.Future[Returned]:
    """Call the function in a thread that ends with this process."""
    future: concurrent.futures.Future[Returned] = concurrent.futures.Future()

    def call() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # noqa: BLE001 - whoever asks for the result gets it
            future.set_exception(error)

    threading.Thread(target=call, daemon=True).start()
    return future


class _Log(io.TextIOBase):
    """Receives printed text: marked lines go to the screen, all others to a file, which is cut when it grows too large."""

    def __init__(self, path: Path):
        path.write_bytes(b"")
        self._path, self._size = path, 0
        self._file: TextIO = open(path, "a", encoding="utf-8", errors="replace")  # noqa: SIM115 - see close
        self._lock, self._unfinished, self.lost = threading.Lock(), "", ""

    def write(self, text: str) -> int:
        with self._lock:  # Ray prints from a thread
            *lines, self._unfinished = (self._unfinished + text).split("\n")
            for line in lines:
                if not progress.screen.take(line):
                    self._keep(line + "\n")
        return len(text)

    def _keep(self, text: str) -> None:
        try:
            if not self.lost:
                self._size += self._file.write(text)
                self._file.flush()
                if self._size > processes.LARGEST and processes.cut(self._path):
                    self._size = self._path.stat().st_size
        except OSError as error:
            # The disk may be full; the reason why the run stops must still be shown.
            self.lost = error.strerror or str(error)

    def close(self) -> None:
        with self._lock:
            self._keep(self._unfinished)
        with contextlib.suppress(OSError):  # `lost` has the reason
            self._file.close()


@contextlib.contextmanager
def _log_at(path: Path) -> Iterator[_Log]:
    """Inside, the output of Ray and its workers goes to a file, and marked lines to the screen."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        log = _Log(path)
    except OSError as error:
        raise UserError(
            f"--loss_output_dir: {path} cannot be written ({error.strerror}); choose another folder"
        ) from error
    with (
        contextlib.closing(log),
        contextlib.redirect_stdout(log),
        contextlib.redirect_stderr(log),
    ):
        yield log


def _remove_records(*folders: Path) -> None:
    """Remove the folder that Ray Train makes for each run, if it holds nothing but Ray Train's test file."""
    for folder in folders:
        (folder / ".validate_storage_marker").unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # there is something in it
            folder.rmdir()


def _reason(error: Exception) -> str:
    """Why Ray Train gave up, in one line: the last line of a failed worker, preferably not one about a lost connection."""
    lines = {
        rank: (str(failure).strip().splitlines() or [type(failure).__name__])[-1]
        for rank, failure in sorted(getattr(error, "worker_failures", {}).items())
    }
    if not lines:
        return f"Ray Train stopped the run: {first_line(error)}"
    rank = min(lines, key=lambda rank: (bool(processes.LOST.search(lines[rank])), rank))
    return f"worker {rank} failed: {re.sub(r'^lockstep[.]ground[.]errors[.][A-Za-z]+: ', '', lines[rank])}"
