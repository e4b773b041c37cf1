"""A run under Ray Train: in a Ray instance of its own, or in the cluster that RAY_ADDRESS names. The only file that imports ray.

The output of Ray and the workers goes to a log beside the history. Only the progress lines of the loop are shown.

    python -m lockstep.running.under_ray       starts a local Ray instance, prints its address, and ends with what started it
"""

if __name__ == "__main__":
    import signal

    from lockstep.ground import startup

    for number in (signal.SIGINT, signal.SIGTERM):  # they are for the script that started this
        signal.signal(number, signal.SIG_IGN)
    startup.begin()

import concurrent.futures
import contextlib
import datetime
import importlib
import io
import logging
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

from lockstep.ground import hang, processes, progress, startup
from lockstep.ground.errors import TrainingFailure, UserError, first_line, run_program
from lockstep.inputs.data import Inputs
from lockstep.plan import strategies
from lockstep.plan.config import Config, Spec
from lockstep.training.device import share_cores

if TYPE_CHECKING:
    import psutil
    from ray.train.torch import TorchTrainer

    from lockstep.training.strategy import MakeStrategy

RAY_ENVIRONMENT = {
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # workers stay where the scripts are
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",  # print is print
    "RAY_DEDUP_LOGS": "0",  # the stacks of ranks have many lines in common
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",  # the default of 2 s is also how late the end is noticed
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",  # one actor less to start; a preempted run is not resumed here
    "RAY_TRAIN_METRICS_ENABLED": "0",  # there is no dashboard to show them
}
CONNECT_TIMEOUT = 3.0  # seconds
Given = TypeVar("Given")
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

    # This thread is free to end the run if the one that trains hangs.
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
    ray = _import("ray")
    # it takes as long as Ray takes to start
    training_library = _in_background(lambda: _import("ray.train.torch"))
    startup.end_helpers.append(_end_children)
    _connect(ray)
    training_library.result()
    path = config.loss_output_dir / "logs" / f"{config.history_path.stem}.txt"
    with _log_at(path) as log:
        begin()
        try:
            return _train(ray, config, make_trainer, {"inputs": inputs, "make_strategy": make_strategy})
        except WorkersLost as error:
            said = (
                f"its log {path} ends where it could not be written ({log.lost})"
                if log.lost
                else f"the full output is in {path}"
            )
            raise TrainingFailure(f"{error}; {said}") from error


def map_tasks(function: Callable[[Given], Returned], given: list[Given]) -> list[Returned]:
    """What a function returns for each, every call a task of Ray. Raises what a call raises, or UserError if there is no cluster at RAY_ADDRESS."""
    ray = _import("ray")
    startup.end_helpers.append(_end_children)
    _connect(ray)
    clean = False
    try:
        here = {"env_vars": {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}}  # code of the user's
        task = ray.remote(function).options(runtime_env=here)
        found = ray.get([task.remote(one) for one in given])
        clean = True
        return found
    except ray.exceptions.RayTaskError as error:
        raise error.cause from error
    finally:
        _shutdown(ray, clean=clean)


class WorkersLost(TrainingFailure):
    """Ray or a worker ended the run, not the loop. The log says more."""


def _train(ray: ModuleType, config: Config, make_trainer: MakeTrainer, told: dict[str, Any]) -> str:
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
    kept, ours = config.storage_path / name, not config.storage_path.exists()
    went_well = False
    try:
        trainer = make_trainer(
            _worker,  # its value is the result's return_value
            train_loop_config={
                # A spec of a user's file is found again by its place: Ray cannot import that file.
                "config": replace(config, spec=Spec()),
                "strategy": config.spec.place,
                "patience": str(hang.patience()),
                **told,
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
        # Only in the main thread does Ray Train take Ctrl-C for itself. It ends this process (lockstep/ground/startup.py), and Ray
        # ends what it started.
        result: Any = _in_background(trainer.fit).result()  # annotated as the Result of an older Ray Train
        went_well, line = result.return_value
    except TrainingFailedError as error:
        raise WorkersLost(_reason(error)) from error
    except ray.exceptions.RayError as error:
        raise WorkersLost(f"Ray stopped the run: {first_line(error)}") from error
    finally:
        _shutdown(ray, clean=went_well)
        _remove_records(kept, *([config.storage_path] if ours else []))
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
        except OSError as error:  # a full disk: the reason why the run stops must still be shown
            self.lost = error.strerror or str(error)

    def close(self) -> None:
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
    """Why Ray Train gave up, in one line: the last line of a failed worker, if possible not that of a lost connection."""
    lines = {
        rank: (str(failure).strip().splitlines() or [type(failure).__name__])[-1]
        for rank, failure in sorted(getattr(error, "worker_failures", {}).items())
    }
    if not lines:
        return f"Ray Train stopped the run: {first_line(error)}"
    rank = min(lines, key=lambda rank: (bool(processes.LOST.search(lines[rank])), rank))
    return f"worker {rank} failed: {re.sub(r'^lockstep[.]ground[.]errors[.][A-Za-z]+: ', '', lines[rank])}"


def _import(name: str) -> ModuleType:
    """Import a module of Ray, after setting the environment variables that it reads while it is imported."""
    for key, value in RAY_ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    try:
        with startup.importing():
            return importlib.import_module(name)
    except ImportError as error:
        raise UserError(
            f"ray cannot be imported ({first_line(error)}); install requirements.txt, or use torchrun"
        ) from error


def _connect(ray: ModuleType) -> None:
    """Join the cluster that RAY_ADDRESS names, or start a Ray instance that ends with this process."""
    address = os.environ.get("RAY_ADDRESS") or "local"
    if address.startswith("ray://"):
        raise UserError(
            f"RAY_ADDRESS {address}: Ray Client is not supported; give the HOST:PORT that `ray start --head` printed"
        )
    try:
        if address != "local":
            _require_cluster(ray, address)
        with _our_sigterm(ray):
            ray.init(
                address=address,
                **({"include_dashboard": False} if address == "local" else {}),
                logging_level=logging.ERROR,
                logging_config=ray.LoggingConfig(
                    log_level="ERROR"
                ),  # without a dashboard Ray warns every second
            )
    except ray.exceptions.AuthenticationError as error:
        raise UserError(
            f"RAY_ADDRESS {address}: the Ray cluster asks for a token, and the one here is missing or wrong; copy the cluster's "
            "~/.ray/auth_token, or set RAY_AUTH_TOKEN, and leave RAY_AUTH_MODE unset or set it to token"
        ) from error
    except (OSError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        if address == "local":
            raise TrainingFailure(f"no Ray instance could be started: {first_line(error)}") from error
        raise UserError(
            f"RAY_ADDRESS {address}: no Ray cluster answers there ({first_line(error)}); start it, or unset RAY_ADDRESS"
        ) from error


@contextlib.contextmanager
def _our_sigterm(ray: ModuleType) -> Iterator[None]:
    """Ray takes SIGTERM for itself while it starts, to end with a trace and its own status. Here lockstep/ground/startup.py answers it."""
    takes, ours = ray._private.utils.set_sigterm_handler, signal.getsignal(signal.SIGTERM)
    ray._private.utils.set_sigterm_handler = lambda _handler: None
    try:
        yield
    finally:
        ray._private.utils.set_sigterm_handler = takes
        signal.signal(signal.SIGTERM, ours)  # its native code takes it, too


def _require_cluster(ray: ModuleType, address: str) -> None:
    """Raise at once unless a cluster answers and accepts us; ray.init would try for minutes.

    A cluster made by `ray start` asks for a token if there is one, so ours is sent if RAY_AUTH_MODE is unset.
    """
    found = ray._private.services.canonicalize_bootstrap_address_or_die(address)
    host, _, port = found.rpartition(":")
    socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT).close()
    tokens = ray._raylet.AuthenticationTokenLoader.instance()
    if os.environ.get("RAY_AUTH_MODE") == "token" and not tokens.has_token(ignore_auth_mode=True):
        raise ray.exceptions.AuthenticationError("no token")  # the client would end the process
    with _quiet():
        try:
            ray._raylet.GcsClient(address=found)
        except ray.exceptions.AuthenticationError:
            if "RAY_AUTH_MODE" in os.environ or not tokens.has_token(ignore_auth_mode=True):
                raise
            os.environ["RAY_AUTH_MODE"] = "token"
            ray._raylet.Config.initialize("")  # Ray has read the environment already
            ray._raylet.GcsClient(address=found)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress what native code writes to standard error; the exception says the same."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _shutdown(ray: ModuleType, *, clean: bool) -> None:
    """Leave the cluster, or end our own instance. `clean` removes the folder of logs that it leaves."""
    node = ray._private.worker._global_node
    session = Path(node.get_session_dir_path()) if node is not None and node.is_head() else None
    import psutil  # Ray brings it along

    started = psutil.Process().children(recursive=True)
    ray.shutdown()
    _kill(started)  # agents and new workers would try for up to a minute to reach their raylet
    if clean and session is not None:
        shutil.rmtree(session, ignore_errors=True)
        latest = session.with_name("session_latest")
        if latest.is_symlink() and not latest.exists():
            latest.unlink(missing_ok=True)


def _end_children() -> None:
    """After Ctrl-C: kill all children of this process, which are Ray's, and the workers and agents of its raylet.

    They have asked the kernel to end them with this process, except one that was only just forked and has not asked yet. A raylet is stopped
    before its workers are killed. A worker that it started later would try for up to a minute to reach it.
    """
    import psutil

    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended
            if child.name() == "raylet":
                child.suspend()
                # the signal may arrive while it starts one
                while child.status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE):
                    time.sleep(0.001)
                _kill(child.children())
            child.kill()


def _kill(found: "list[psutil.Process]") -> None:
    import psutil

    for process in found:
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended
            process.kill()


def _hold_local_ray() -> int:
    """Start a local Ray instance, print its address, and keep it until SIGUSR1 or the end of the parent process."""
    parent = os.environ.get("LOCKSTEP_PARENT")
    signal.signal(signal.SIGUSR1, lambda *_: sys.exit(0))
    processes.end_with_parent(signal.SIGUSR1)
    if parent not in (None, str(os.getppid())):  # it ended before we could ask
        return 1
    folder = tempfile.mkdtemp(
        prefix="lockstep-", dir=os.environ.get("RAY_TMPDIR", "/tmp")
    )  # short: the names of sockets must be
    os.environ["RAY_TMPDIR"] = folder
    ray = _import("ray")
    try:
        _connect(ray)
        print(ray.get_runtime_context().gcs_address, flush=True)
        while True:
            signal.pause()
    finally:
        _shutdown(ray, clean=True)
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    startup.end(run_program("lockstep.running.under_ray", _hold_local_ray))
