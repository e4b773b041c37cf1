"""A run under Ray Train: in a Ray instance of its own, or in the cluster that RAY_ADDRESS names. The only file that imports ray.

    python -m lockstep.under_ray        starts a local Ray instance and prints its address; it ends when standard input closes
"""

import contextlib
import datetime
import logging
import os
import re
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from lockstep import startup
from lockstep.config import Config
from lockstep.errors import TrainingFailure, UserError, first_line, run_program
from lockstep.launch import set_threads

RAY_ENVIRONMENT = {
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # workers stay where the scripts are
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",  # print is print
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",  # the default of 2 s is also how late the end is noticed
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",  # one actor less to start; a preempted run is not resumed here
    "RAY_TRAIN_METRICS_ENABLED": "0",  # there is no dashboard to show them
}
CONNECT_TIMEOUT = 3.0  # seconds
# Children of a raylet that outlive it for up to a minute: its agents, under either name, and workers that have just been started.
SLOW_TO_END = re.compile(r"ray::\w*Agent|agent\.py|agent/main\.py|default_worker\.py")
# A Ray instance of our own has one turn. A run takes all of it, so that a script started early trains after the one before
# it, also where there are CPUs or GPUs for both.
TURN = "lockstep_turn"
# What Ray Train starts an actor for, each with 1.5 s of CPU time, and we have no use for: there is no Ray Data here, and an
# instance of our own, which ends with the script, needs no cleaning up. The names are private to Ray; where they are others, these
# actors start again, and nothing else changes.
NO_DATA, NO_CLEANING = "DatasetsCallback", "PlacementGroupCleanerCallback"
WENT_WELL = "went well"  # what the shell script says to the instance that it holds, before it closes its input


def _worker(arguments: dict) -> tuple[bool, str]:
    """One Ray Train worker; Ray has set up the process group. Returns whether it went well, and one line.

    A TrainingFailure is every rank's, so it is returned: Ray would print each rank's traceback over it. Anything else
    is raised, or the other ranks would wait for this one.
    """
    from ray import train
    from ray.train.torch import get_device

    from lockstep import training

    config = arguments["config"]
    context = train.get_context()
    set_threads(config, context.get_local_world_size())
    try:
        return True, training.run(config, arguments["inputs"], arguments["make_strategy"], get_device())
    except TrainingFailure as error:
        return False, str(error)


def run(config: Config, inputs, make_strategy, begin: Callable[[], None]) -> str:
    """Train under Ray Train; returns a closing sentence. Calls `begin` when there is a cluster to train in.

    Raises TrainingFailure, or UserError when no cluster is where RAY_ADDRESS says.
    """
    ray = _import_ray(train=True)
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer
    from ray.train.v2.api.exceptions import TrainingFailedError

    name = config.experiment_name or f"{config.strategy}-{datetime.datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}"
    cpu = min(1, (os.cpu_count() or 1) / config.num_workers)
    resources = {"CPU": 1, "GPU": 1} if config.device == "cuda" else {"CPU": cpu}
    startup.end_helpers.append(_end_agents)
    _connect(ray)
    # where the reader of our output is gone (`| head`), it is ours to say so, and Ray would say it for every line
    logging.getLogger("ray._private.worker").addFilter(lambda record: "[Errno 32] Broken pipe" not in record.getMessage())
    begin()
    needless = {NO_DATA}
    gpus = int(ray.cluster_resources().get("GPU", 0))
    if config.device == "cuda" and gpus < config.num_workers:
        print(f"{config.label}: waiting for {config.num_workers} GPUs, the cluster has {gpus} now", flush=True)
    if TURN in ray.cluster_resources():
        needless.add(NO_CLEANING)
        os.environ["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] = "86400"  # to wait for a turn is no failure
        resources[TURN] = 10_000 // config.num_workers / 10_000  # Ray counts in ten-thousandths
        if ray.available_resources().get(TURN, 0) < resources[TURN]:
            print(f"{config.label}: waiting for the run before it to end", flush=True)

    class Trainer(TorchTrainer):
        def _create_default_callbacks(self) -> list:
            return [callback for callback in super()._create_default_callbacks() if type(callback).__name__ not in needless]

        def _register_sigint_handler(self, controller) -> None:
            """Ctrl-C ends this process (lockstep/startup.py), and Ray ends what it started."""

    kept, ours = config.storage_path / name, not config.storage_path.exists()
    went_well = False
    try:
        trainer = Trainer(
            _worker,
            train_loop_config={"config": config, "inputs": inputs, "make_strategy": make_strategy},
            torch_config=TorchConfig(backend=config.backend),
            scaling_config=ScalingConfig(
                num_workers=config.num_workers, use_gpu=config.device == "cuda", resources_per_worker=resources
            ),
            run_config=RunConfig(
                name=name, storage_path=str(config.storage_path), failure_config=FailureConfig(max_failures=0)
            ),
        )
        went_well, line = trainer.fit().return_value
    except TrainingFailedError as error:
        raise TrainingFailure(_reason(error)) from error
    except ray.exceptions.RayError as error:
        raise TrainingFailure(f"Ray stopped the run: {first_line(error)}") from error
    finally:
        _shutdown(ray, clean=went_well)
        _remove_records(kept, *([config.storage_path] if ours else []))
    if not went_well:
        raise TrainingFailure(line)
    return line


def _remove_records(*folders: Path) -> None:
    """Remove the folder that Ray Train makes for each run, if all that is in it is the file by which it tests the folder."""
    for folder in folders:
        (folder / ".validate_storage_marker").unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # there is something in it
            folder.rmdir()


def _reason(error) -> str:
    """One line on why Ray Train gave up: of the failed workers' last lines, one that is no mere lost connection."""
    lines = {
        rank: (str(failure).strip().splitlines() or [type(failure).__name__])[-1]
        for rank, failure in sorted(getattr(error, "worker_failures", {}).items())
    }
    if not lines:
        return f"Ray Train stopped the run: {first_line(error)}"
    rank = min(lines, key=lambda rank: ("closed by peer" in lines[rank], rank))
    return f"worker {rank} failed: {re.sub(r'^lockstep[.]errors[.][A-Za-z]+: ', '', lines[rank])}"


def _import_ray(*, train: bool = False):
    """ray, with the settings that must be in the environment before it is imported."""
    for key, value in RAY_ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    try:
        import ray

        if train:
            import ray.train.torch
    except ImportError as error:
        raise UserError(f"ray cannot be imported ({first_line(error)}); install requirements.txt, or use torchrun") from error
    return ray


def _connect(ray) -> None:
    """Join the cluster that RAY_ADDRESS names, or start a Ray instance that ends with this process."""
    address = os.environ.get("RAY_ADDRESS") or "local"
    if address.startswith("ray://"):
        raise UserError(f"RAY_ADDRESS {address}: Ray Client is not supported; give the HOST:PORT that `ray start --head` printed")
    try:
        if address != "local":
            _require_cluster(ray, address)
        ray.init(
            address=address,
            **({"include_dashboard": False, "resources": {TURN: 1}} if address == "local" else {}),
            logging_level=logging.ERROR,
            logging_config=ray.LoggingConfig(log_level="ERROR"),  # without a dashboard Ray warns every second
        )
    except ray.exceptions.AuthenticationError as error:
        raise UserError(
            f"RAY_ADDRESS {address}: the Ray cluster there asks for a token, and the one here is missing or another one; copy its "
            "~/.ray/auth_token, or set RAY_AUTH_TOKEN, and leave RAY_AUTH_MODE unset or set it to token"
        ) from error
    except (OSError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        if address == "local":
            raise TrainingFailure(f"no Ray instance could be started: {first_line(error)}") from error
        raise UserError(
            f"RAY_ADDRESS {address}: no Ray cluster answers there ({first_line(error)}); start it, or unset RAY_ADDRESS"
        ) from error


def _require_cluster(ray, address: str) -> None:
    """Raise, at once, unless a cluster answers and lets us in: ray.init would try for minutes, or for half a minute.

    `ray start` makes a cluster that wants a token wherever there is one, so we show ours where RAY_AUTH_MODE says nothing.
    """
    found = ray._private.services.canonicalize_bootstrap_address_or_die(address)
    host, _, port = found.rpartition(":")
    socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT).close()
    tokens = ray._raylet.AuthenticationTokenLoader.instance()
    if os.environ.get("RAY_AUTH_MODE") == "token" and not tokens.has_token(ignore_auth_mode=True):
        raise ray.exceptions.AuthenticationError("no token")  # the client would end the process
    try:
        with _quiet():
            ray._raylet.GcsClient(address=found)
    except ray.exceptions.AuthenticationError:
        if "RAY_AUTH_MODE" in os.environ or not tokens.has_token(ignore_auth_mode=True):
            raise
        os.environ["RAY_AUTH_MODE"] = "token"
        ray._raylet.Config.initialize("")  # Ray has read the environment already
        with _quiet():
            ray._raylet.GcsClient(address=found)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what native code writes to standard error: the exception says the same."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _shutdown(ray, *, clean: bool) -> None:
    """Leave the cluster, or end the instance of our own; `clean` removes the folder of logs that such an instance leaves."""
    node = ray._private.worker._global_node
    session = Path(node.get_session_dir_path()) if node is not None and node.is_head() else None
    ray.shutdown()
    if clean and session is not None:
        shutil.rmtree(session, ignore_errors=True)
        latest = session.with_name("session_latest")
        if latest.is_symlink() and not latest.exists():
            latest.unlink(missing_ok=True)


def _end_agents() -> None:
    """Kill what would try to reach the raylet of this process after its end."""
    for task in Path("/proc/self/task").iterdir():
        for child in (task / "children").read_text().split():
            for process in Path(f"/proc/{child}/task/{child}/children").read_text().split():
                if SLOW_TO_END.search(Path(f"/proc/{process}/cmdline").read_text()):
                    os.kill(int(process), signal.SIGKILL)


def _hold_local_ray() -> int:
    """Start a local Ray instance, print its address, and keep it until standard input closes."""
    ray = _import_ray()
    _connect(ray)
    print(ray.get_runtime_context().gcs_address, flush=True)
    _shutdown(ray, clean=sys.stdin.read().strip() == WENT_WELL)
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the script, which closes the input
    raise SystemExit(run_program("lockstep.under_ray", _hold_local_ray))
