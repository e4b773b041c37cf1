"""The errors that a person sees: one line each, and its exit status.

0 done, PASS    1 a failed verdict or run    2 a usage error    3 an internal error: a bug of Lockstep, no verdict
"""

import os
import sys
import traceback
from collections.abc import Callable

from lockstep.ground import startup

INTERNAL, BROKEN_PIPE = 3, 141  # BROKEN_PIPE is 128 + the signal, as in shells
LONGEST = 1000  # characters of a message


class UserError(ValueError):
    """A usage error: the request cannot be carried out. The message says what is wrong, where, and what to do (exit 2)."""

    exit_code = 2


LIBRARY_REFUSES = "the strategy's library refuses it"  # in the message of such an error


class TrainingFailure(RuntimeError):
    """Training started and had to stop: a non-finite loss, peers on different data, wrong weights (exit 1)."""

    exit_code = 1


def printable(text: object, limit: int = LONGEST) -> str:
    """The text on one line that a terminal can be given: control characters escaped, cut at `limit` characters.

    Text from files passes through here before it is shown: an ESC in a label could rewrite what the terminal shows.
    """
    text = str(text)
    shown = "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text[: limit + 1]
    )
    return shown if len(shown) <= limit else shown[: limit - 3] + "..."


class CannotComputeError(UserError):
    """One process cannot build the recorded model, or call it."""


def communicates(error: Exception) -> bool:
    """Whether this was raised where ranks communicate, or by code that looks for its process group."""
    inside = any("/torch/distributed/" in call.filename for call in traceback.extract_tb(error.__traceback__))
    return inside or "process group" in str(error).replace("_", " ")


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type if it has none."""
    return printable((str(error).strip().splitlines() or [type(error).__name__])[0], 160)


def run_program(name: str, body: Callable[[], int]) -> int:
    """Run `body` and return the exit status of the program `name`. Every program of the project ends here.

    An error is one line on stderr. Only an internal error shows its traceback, so that it can be reported.
    """
    try:
        status = body()
        sys.stdout.flush()
        return status
    except (UserError, TrainingFailure) as error:
        say(f"{name}: {printable(error)}")
        return error.exit_code
    except KeyboardInterrupt:
        message, status = startup.stopped()
        if startup.speaks():
            say(f"{name}: {message}")
        return status
    except BrokenPipeError:
        # The reader of our output is gone (`| head`). What is left to flush must not raise again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except Exception as error:  # noqa: BLE001 - status 1 would be taken for a verdict
        show_exception()
        say(
            f"{name}: internal error ({type(error).__name__}: {first_line(error)}); this is no verdict, please report it with the lines above"
        )
        return INTERNAL


def say(line: str) -> None:
    """Write a line to standard error, even if a script has replaced `print` so that only the first rank prints."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def show_exception() -> None:
    """Show the exception that is being handled, with its traceback, even if a script has replaced `print`.

    The functions of Python's `traceback` use `print`.
    """
    kind, error, trace = sys.exc_info()
    assert kind is not None and error is not None
    sys.__excepthook__(kind, error, trace)
