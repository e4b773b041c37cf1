"""Progress: one line that is rewritten on a terminal, plain lines elsewhere.

`screen` shows the lines of this process. A process whose output goes to a log calls `relay` first. Its lines then carry
a mark, and the process that reads the log hands them to its own screen (`Screen.take`).
"""

import contextlib
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from typing import TextIO

MARK = "@lockstep "
OFTEN = 0.2  # seconds between two states of the moving line


class Screen:
    """Shows lines on `stream`, or on standard output as it is at the time."""

    def __init__(self, stream: TextIO | None = None):
        self._stream, self._lock, self._moving = stream, threading.Lock(), False

    @property
    def stream(self) -> TextIO:
        return self._stream or sys.stdout

    def note(self, line: str) -> None:
        """Show a line that stays. It replaces the moving line."""
        self._write(line, stays=True)

    def state(self, line: str, *, stays: bool) -> None:
        """Show how far something is. On a terminal it replaces the last state; elsewhere it is shown if it `stays`."""
        if self.stream.isatty():  # a line that is wrapped could not be replaced
            self._write(line[: shutil.get_terminal_size().columns - 1], stays=False)
        elif stays:
            self._write(line, stays=True)

    def last(self, line: str) -> None:
        """Show the last line of a program, also with --quiet."""
        self._write(line, stays=True)

    def leave(self) -> None:
        """Let the moving line stay as it is: others write below it."""
        if self._moving:
            self._moving = False
            self.stream.write("\n")
            self.stream.flush()

    def take(self, text: str) -> bool:
        """Show a line of a log if `Relay` marked it; returns whether it did."""
        _, mark, rest = text.rstrip("\n").partition(MARK)
        kind, _, line = rest.partition(" ")
        if not mark:
            return False
        if kind == "note":
            self.note(line)
        else:
            self.state(line, stays=kind == "step")
        return True

    def _write(self, line: str, *, stays: bool) -> None:
        with self._lock:
            begin = "\r\x1b[K" if self._moving or not stays else ""
            self._moving = not stays
            self.stream.write(begin + line + ("\n" if stays else ""))
            self.stream.flush()


class Relay(Screen):
    """Writes marked lines into a log, for another process's screen."""

    def note(self, line: str) -> None:
        print(f"{MARK}note {line}", flush=True)

    def state(self, line: str, *, stays: bool) -> None:
        print(f"{MARK}{'step' if stays else 'state'} {line}", flush=True)


class Quiet(Screen):
    """Shows nothing (--quiet)."""

    def note(self, line: str) -> None:
        return

    def state(self, line: str, *, stays: bool) -> None:
        return


screen = Screen()


def relay() -> None:
    """From now on mark this process's lines for the process that reads its standard output."""
    global screen
    screen = Relay()


@contextlib.contextmanager
def shown_on(other: Screen) -> Iterator[None]:
    """Use another screen for a while, and leave it."""
    global screen
    before, screen = screen, other
    try:
        yield
    finally:
        other.leave()
        screen = before


class Steps:
    """Shows how far a run is: a state for every step. Without a terminal only every `interval`th is shown."""

    def __init__(self, label: str, total: int, interval: int):
        self._label, self._total, self._interval = label, total, interval
        # When the first step was done: it takes longer than the others
        self._begin: float | None = None
        self._shown = -OFTEN

    def add(self, step: dict, memory: int) -> None:
        """Show a step of the history, and the peak memory of this rank so far, in bytes."""
        number, now = step["step"], time.monotonic()
        stays = number == 1 or number % self._interval == 0
        if self._begin is None:
            self._begin = now
        if not stays and now - self._shown < OFTEN:
            return
        self._shown = now
        line = f"{self._label}: step {number}/{self._total}  loss {step['loss']:.6f}  grad norm {step['grad_norm']:.4f}"
        seconds = (now - self._begin) / (number - 1) if number > 1 else 0.0
        if seconds:
            line += f"  {duration((self._total - number) * seconds)} left  {step['tokens'] / seconds:.0f} tokens/s"
        line += f"  {memory / 2**30:.2f} GiB"
        screen.state(line, stays=stays)


@contextlib.contextmanager
def working(what: str) -> Iterator[None]:
    """Show what is being done (on a terminal with the time so far), and at the end how long it took."""
    begin, done = time.monotonic(), threading.Event()
    screen.state(what, stays=True)

    def count() -> None:
        while not done.wait(1):
            screen.state(f"{what}: {duration(time.monotonic() - begin)}", stays=False)

    thread = threading.Thread(target=count, daemon=True)
    thread.start()
    try:
        yield
        done.set()
        thread.join()
        screen.note(f"{what}: done in {duration(time.monotonic() - begin)}")
    finally:
        done.set()


def duration(seconds: float) -> str:
    """ "7 s", "3 min 20 s", "2 h 5 min"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


class Bytes:
    """Shows on stderr how far a long read is, in MB of `total` bytes (None: unknown). Shows nothing for a short one.

    Call `add` with each number of bytes read, and `end` at the end.
    """

    def __init__(self, what: str, total: int | None):
        self._what, self._total, self._done, self._has_shown = what, total, 0, False
        self._screen, self._start = Screen(sys.stderr), time.monotonic()
        first, often = (1.0, OFTEN) if sys.stderr.isatty() else (10.0, 30.0)
        self._next, self._often = self._start + first, often

    def add(self, count: int) -> None:
        self._done += count
        now = time.monotonic()
        if now < self._next:
            return
        self._next, self._has_shown = now + self._often, True
        line = f"{self._what}: {self._done / 1e6:.0f} MB"
        if self._total:
            left = (now - self._start) * max(0.0, self._total / self._done - 1) if self._done else 0.0
            line += f" of {self._total / 1e6:.0f}, {left:.0f} s left"
        self._screen.state(line, stays=True)

    def end(self) -> None:
        if self._has_shown:
            self._screen.note(
                f"{self._what}: {self._done / 1e6:.0f} MB in {duration(time.monotonic() - self._start)}"
            )
