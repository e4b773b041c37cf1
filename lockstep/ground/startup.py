"""What a program does before it imports anything that takes time, and how it ends.

Ctrl-C, SIGTERM and a missing package are one line each.

Every program begins with

    if __name__ == "__main__":
        from lockstep.ground import startup

        startup.begin()

and ends with `startup.end(status)`. In between, Ctrl-C ends it at once, with one line and status 130, and SIGTERM, which
SLURM sends, with status 143. A KeyboardInterrupt would not do: libraries lose it or turn it into other errors. There is
nothing to clean up while they are imported or while Ray starts (its processes end with this one). Code that has something
to clean up runs in `cleaning_up`, which raises KeyboardInterrupt for both. This file must be readable by Python 3.6.
"""

import atexit
import contextlib
import gc
import importlib.util
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import NoReturn

# The packages that a recorded run is judged with
JUDGING = ("numpy", "pydantic", "safetensors", "torch", "jinja2")
PACKAGES = (*JUDGING, "transformers")  # what every other program needs
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
# Signal -> the word for a program that it has ended. A signal that the parent ignores, as a shell does with SIGINT for `&`,
# is ignored here, too.
WORDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}
# The handlers of these signals unless somebody has set others
DEFAULTS = (signal.default_int_handler, signal.SIG_DFL)
# What the line says after the word, or a function that finds it out in that moment. A program may set it.
state: "str | Callable[[], str]" = ""
# Functions that end processes which would outlive this one for a while
end_helpers: "list[Callable[[], object]]" = []


def program() -> str:
    """The name of the running program in its error messages."""
    if sys.argv[0] == "-m":  # while the package is imported for `python -m lockstep.NAME`
        return sys.orig_argv[sys.orig_argv.index("-m") + 1]
    path = os.path.abspath(sys.argv[0])
    if path.startswith(os.path.join(ROOT, "lockstep", "")):
        return os.path.relpath(path, ROOT)[: -len(".py")].replace(os.sep, ".")
    return os.path.basename(path)


def stopped() -> "tuple[str, int]":
    """(message about the signal that has ended the program, its exit status: 128 + the signal)."""
    remark = state() if callable(state) else state
    return WORDS[_received] + (f"; {remark}" if remark else ""), 128 + _received


def speaks() -> bool:
    """Whether this process says that a signal has ended it.

    Of a launcher's ranks only the first one does, and only for Ctrl-C: SIGTERM is how the launcher ends the ranks when one
    has failed.
    """
    rank = os.environ.get("RANK")
    return rank is None or (rank == "0" and _received == signal.SIGINT)


def stop_at_once(number: int = signal.SIGINT, _frame: object = None) -> NoReturn:
    """Say that the program was stopped, and end it. A second signal does not wait."""
    _receive(number)
    for handled in WORDS:
        signal.signal(handled, lambda *_: os._exit(128 + number))
    with contextlib.suppress(Exception):  # it may be what was interrupted
        sys.stdout.flush()
    if speaks():
        os.write(2, f"{program()}: {stopped()[0]}\n".encode())
    for end in end_helpers:
        with contextlib.suppress(Exception):
            end()
    os._exit(128 + number)


def _stop_cleanly(number: int, _frame: object) -> NoReturn:
    _receive(number)
    for handled in WORDS:
        signal.signal(handled, stop_at_once)  # the second one does not wait for the cleaning up
    raise KeyboardInterrupt(WORDS[_received])


def _receive(number: int) -> None:
    """Remember the signal. End a forked process, such as a child that has not become another program yet.

    Signals reach the whole group of processes.
    """
    global _received
    if os.getpid() != _process:
        os._exit(128 + number)
    _received = signal.Signals(number)


@contextlib.contextmanager
def importing() -> "Iterator[None]":
    """Around imports of torch, transformers or Ray: the garbage collector would look through what stays, again and again.

    That is a second of a core while they are imported, and later half a second in each process that is forked from this
    one, whose memory is copied when it is looked at.
    """
    thresholds = gc.get_threshold()
    gc.set_threshold(100_000, 50, 100)
    try:
        yield
    finally:
        gc.freeze()
        gc.set_threshold(*thresholds)


@contextlib.contextmanager
def cleaning_up() -> "Iterator[None]":
    """Ctrl-C and SIGTERM raise KeyboardInterrupt in here: there are files to remove or processes to end."""
    ours = [number for number in WORDS if signal.getsignal(number) is stop_at_once]
    for number in ours:
        signal.signal(number, _stop_cleanly)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, stop_at_once)


def _require_environment(packages: "tuple[str, ...]") -> None:
    """End with status 2 and one line unless this Python is recent enough and has the packages."""
    problem = ""
    if sys.version_info < (3, 11):  # noqa: UP036 - an older Python comes this far
        problem = f"this is Python {sys.version_info[0]}.{sys.version_info[1]}, and 3.11 or later is needed"
    else:
        missing = [name for name in packages if importlib.util.find_spec(name) is None]
        if missing:
            problem = f"{sys.executable or 'this Python'} has no package {missing[0]}"
    if problem:
        activate = os.path.join(ROOT, ".venv", "bin", "activate")
        enter = "source " + os.path.relpath(activate)
        if not os.path.exists(activate):
            enter = "run ./run_verification_main.sh, which makes .venv, then source .venv/bin/activate"
        os.write(2, f"{program()}: {problem}; enter the environment first: {enter}\n".encode())
        os._exit(2)


def begin(packages: "tuple[str, ...]" = PACKAGES) -> None:
    """From now on Ctrl-C and SIGTERM end the program with one line.

    Ends it now, with status 2, if one of the packages is missing.
    """
    global _process
    _process = os.getpid()
    for number in WORDS:
        if signal.getsignal(number) in DEFAULTS:
            signal.signal(number, stop_at_once)
    atexit.register(_leave)  # handlers run last in, first out: those of the libraries run before it
    _require_environment(packages)


def end(status: int) -> NoReturn:
    """End the program with this exit status."""
    global _status
    _status = status
    raise SystemExit(status)


_process = 0  # the id of the process that called `begin`
_received = signal.SIGINT  # the signal that stops this process
_status: "int | None" = None  # None: an error ends the program, and the interpreter says so


def _leave() -> None:
    """Leave it to the kernel to free everything. The interpreter would take torch and transformers apart for a second."""
    if _status is None:
        return
    with contextlib.suppress(Exception):  # what cannot be written the interpreter reports itself
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_status)
