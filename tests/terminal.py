"""A command on a real pseudo-terminal: what it wrote, and what is left on the screen at the end."""

import contextlib
import fcntl
import os
import pty
import re
import struct
import subprocess
import termios

from ranks import ROOT

BEGIN = "\r\x1b[K"  # to the begin of the line, which is erased


def on_terminal(command, *, env: dict[str, str], columns: int = 100) -> tuple[int, str]:
    """(exit status, all that the command wrote to a terminal of so many columns). Its standard error is written there, too."""
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    env = {
        name: value for name, value in env.items() if name not in ("COLUMNS", "LINES")
    }  # the terminal says it
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=its, stderr=its, env=env)
    os.close(its)
    found = b""
    with contextlib.suppress(OSError):  # Linux says so at the end
        while chunk := os.read(ours, 1 << 16):
            found += chunk
    os.close(ours)
    return process.wait(60), found.decode().replace("\r\n", "\n")


def screen_of(text: str) -> list[str]:
    """The lines that are left: each as it was written last. Raises ValueError for a control sequence that is not known here."""
    plain = text.replace("\x1b[0m", "")  # the default colour, which Ray asks for at its end
    lines = [re.split(f"{re.escape(BEGIN)}|\r", line)[-1] for line in plain.split("\n")]
    if any("\x1b" in line for line in lines):
        raise ValueError(repr(text))
    return lines


def states_of(text: str) -> list[str]:
    """What was shown on a line that moves, in order."""
    return [state.split("\n")[0] for state in text.split(BEGIN)[1:]]
