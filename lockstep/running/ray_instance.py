"""Ray: joined in the cluster that RAY_ADDRESS names, or started here; and left, or ended with all of its processes.

`python -m lockstep.running.ray_instance` starts a local one, prints its address, and ends with what started it.
"""

if __name__ == "__main__":
    import signal

    from lockstep.ground import startup

    # These signals are for the script that started this process.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    startup.begin()

import contextlib
import importlib
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from lockstep.ground import processes, startup
from lockstep.ground.errors import TrainingFailure, UserError, first_line, run_program

if TYPE_CHECKING:
    import psutil

RAY_ENVIRONMENT = {
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # workers stay where the scripts are
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",  # print is print
    "RAY_DEDUP_LOGS": "0",  # the stacks of ranks have many lines in common
    # The default of 2 s is also how late the end is noticed
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
    # One actor less to start; a preempted run is not resumed here
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_TRAIN_METRICS_ENABLED": "0",  # there is no dashboard to show them
}
CONNECT_TIMEOUT = 3.0  # seconds


def import_ray(name: str) -> ModuleType:
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


def connect(ray: ModuleType) -> None:
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
                # Without a dashboard Ray warns every second.
                logging_config=ray.LoggingConfig(log_level="ERROR"),
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
    """Keep our handler of SIGTERM (lockstep/ground/startup.py). Ray would set its own, which ends with a trace and another status."""
    ray_setter, our_handler = ray._private.utils.set_sigterm_handler, signal.getsignal(signal.SIGTERM)
    ray._private.utils.set_sigterm_handler = lambda _handler: None
    try:
        yield
    finally:
        ray._private.utils.set_sigterm_handler = ray_setter
        # Ray's native code sets a handler, too.
        signal.signal(signal.SIGTERM, our_handler)


def _require_cluster(ray: ModuleType, address: str) -> None:
    """Raise at once unless a cluster answers and accepts us; ray.init would try for minutes.

    A cluster made by `ray start` asks for a token if there is one, so ours is sent if RAY_AUTH_MODE is unset.
    """
    gcs_address = ray._private.services.canonicalize_bootstrap_address_or_die(address)
    host, _, port = gcs_address.rpartition(":")
    socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT).close()
    tokens = ray._raylet.AuthenticationTokenLoader.instance()
    if os.environ.get("RAY_AUTH_MODE") == "token" and not tokens.has_token(ignore_auth_mode=True):
        # Without a token, the client would end the process.
        raise ray.exceptions.AuthenticationError("no token")
    with _quiet():
        try:
            ray._raylet.GcsClient(address=gcs_address)
        except ray.exceptions.AuthenticationError:
            if "RAY_AUTH_MODE" in os.environ or not tokens.has_token(ignore_auth_mode=True):
                raise
            os.environ["RAY_AUTH_MODE"] = "token"
            # Ray has read the environment already; it must read it again.
            ray._raylet.Config.initialize("")
            ray._raylet.GcsClient(address=gcs_address)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress what native code writes to standard error; the exception says the same."""
    sys.stderr.flush()
    saved, devnull = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(devnull)


def shutdown(ray: ModuleType, *, clean: bool) -> None:
    """Leave the cluster, or end our own instance. `clean` removes the folder of logs that it leaves."""
    node = ray._private.worker._global_node
    session = Path(node.get_session_dir_path()) if node is not None and node.is_head() else None
    import psutil  # Ray brings it along

    children = psutil.Process().children(recursive=True)
    ray.shutdown()
    # Agents and new workers would try for up to a minute to reach their raylet.
    _kill(children)
    if clean and session is not None:
        shutil.rmtree(session, ignore_errors=True)
        latest = session.with_name("session_latest")
        if latest.is_symlink() and not latest.exists():
            latest.unlink(missing_ok=True)


def end_children() -> None:
    """After Ctrl-C: kill all children of this process, which are Ray's, and the workers and agents of its raylet.

    They have asked the kernel to end them with this process, except one that was only just forked and has not asked yet. A raylet is
    stopped before its workers are killed: a worker that it started later would try for up to a minute to reach it.
    """
    import psutil

    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended
            if child.name() == "raylet":
                child.suspend()
                # The signal may arrive while it starts a worker.
                while child.status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE):
                    time.sleep(0.001)
                _kill(child.children())
            child.kill()


def _kill(started: "list[psutil.Process]") -> None:
    import psutil

    for process in started:
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended
            process.kill()


def _end(*_: object) -> None:
    """End this process. Try again in a second: Python only prints what is raised in a callback, such as that of a fork."""
    signal.alarm(1)
    sys.exit(0)


def _print_ignored(ignored: "sys.UnraisableHookArgs") -> None:
    """Print an exception that Python ignores, except what `_end` raises: it is raised again."""
    if ignored.exc_type is not SystemExit:
        sys.__unraisablehook__(ignored)


def ended_by(*numbers: int) -> None:
    """Let these signals end this process, without a message."""
    sys.unraisablehook = _print_ignored
    for number in (*numbers, signal.SIGALRM):
        signal.signal(number, _end)


def _leave_nothing(folder: str) -> None:
    """End this process before it has started anything."""
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def _hold_local_ray() -> int:
    """Start a local Ray instance, print its address, and keep it until SIGUSR1 or the end of the parent process."""
    parent = os.environ.get("LOCKSTEP_PARENT")
    ended_by(signal.SIGUSR1)
    processes.end_with_parent(signal.SIGUSR1)
    # The parent may have ended before this process asked for the signal.
    if parent not in (None, str(os.getppid())):
        return 1
    temporary = os.environ.get("RAY_TMPDIR", "/tmp")
    try:
        # A short name, because the names of sockets must be short
        folder = tempfile.mkdtemp(prefix="lockstep-", dir=temporary)
    except OSError as error:
        raise UserError(
            f"RAY_TMPDIR: {temporary}: {error.strerror}; name a folder that can be written"
        ) from error
    os.environ["RAY_TMPDIR"] = folder
    # A half imported Ray cannot leave in order: it registers a callback of the interpreter's end, which imports Ray again.
    signal.signal(signal.SIGUSR1, lambda *_: _leave_nothing(folder))
    ray = import_ray("ray")
    ended_by(signal.SIGUSR1)
    try:
        connect(ray)
        print(ray.get_runtime_context().gcs_address, flush=True)
        while True:
            signal.pause()
    finally:
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        shutdown(ray, clean=True)
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    startup.end(run_program("lockstep.running.ray_instance", _hold_local_ray))
