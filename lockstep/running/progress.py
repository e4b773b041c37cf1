"""How far a long piece of work is: a line that moves on a terminal, a line now and then elsewhere, nothing when it is short."""

import sys
import time


class Progress:
    """`add` what has been done, of `total` in the same unit (None: nobody knows); `end` when it is over. Writes to stderr."""

    def __init__(self, what: str, total: int | None):
        self._what, self._total, self._done, self._said = what, total, 0, False
        self._moves = sys.stderr.isatty()
        self._start = time.monotonic()
        self._next = self._start + (1 if self._moves else 10)

    def add(self, count: int) -> None:
        self._done += count
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + (0.2 if self._moves else 30)
        self._said = True
        line = f"{self._what}: {self._done / 1e6:.0f} MB"
        if self._total:
            left = (now - self._start) * max(0.0, self._total / self._done - 1) if self._done else 0.0
            line += f" of {self._total / 1e6:.0f}, {left:.0f} s left"
        sys.stderr.write(f"\r\x1b[K{line}" if self._moves else line + "\n")
        sys.stderr.flush()

    def end(self) -> None:
        if self._said:
            line = f"{self._what}: {self._done / 1e6:.0f} MB in {time.monotonic() - self._start:.0f} s\n"
            sys.stderr.write(f"\r\x1b[K{line}" if self._moves else line)
            sys.stderr.flush()
