"""Child processes: started so that they end with this one, and what they said when they failed."""

import ctypes
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from lockstep.errors import TrainingFailure, printable

ROOT = Path(__file__).parents[2]
PATIENCE = 30  # seconds for a launcher to end its ranks
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


class ChildFailure(TrainingFailure):
    """A program that this one started has failed; `exit_code` is that program's, where it is one of Lockstep's."""

    def __init__(self, message: str, status: int):
        super().__init__(message)
        self.exit_code = status if status in (1, 2, 3) else 1


def ranks(number: int) -> list[str]:
    """The command that starts so many ranks on this machine, without the script."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(number)]


def environment() -> dict[str, str]:
    """This process's environment, one thread per rank; modules are found from any folder, and not looked for in it."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1"}


def start(command: list[str], **options) -> subprocess.Popen:
    """Start a program that ends with this one, even if this one is killed, and is not interrupted behind its back."""
    return subprocess.Popen(command, start_new_session=True, preexec_fn=end_with_parent, **options)


def end_with_parent(by: int = signal.SIGTERM) -> None:
    """Have the kernel end this process, by that signal, when the one that started it ends. Linux."""
    _libc.prctl(_PR_SET_PDEATHSIG, by)


def end(process: subprocess.Popen) -> None:
    """End a process that `start` started; a launcher ends its ranks."""
    process.terminate()
    try:
        process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def failure(program: str, status: int, log: str) -> tuple[str, int]:
    """Why a program failed, in one line, and its exit status, from its own status and all that it and its launcher said.

    torchrun's own status is 1 whatever its ranks' are; it names theirs.
    """
    said = [line.removeprefix(f"{program}: ") for line in log.splitlines() if line.startswith(f"{program}: ")]
    codes = [int(code) for code in re.findall(r"exitcode: (-?\d+)\) local_rank", log)]
    status = codes[0] if codes else status
    if said:
        first = min(range(len(said)), key=lambda index: ("closed by peer" in said[index], index))
        return printable(said[first]), status
    if status < 0:
        killed = " (the machine may be short of memory)" if status == -signal.SIGKILL else ""
        return f"killed by {signal.Signals(-status).name}{killed}", status
    last = next((line for line in reversed(log.splitlines()) if line.strip()), "it said nothing")
    return printable(f"exit status {status}: {last.strip()}", 300), status
