"""Child processes that end with this one, what their logs keep, and the reason why one failed."""

import ctypes
import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

from lockstep.ground.errors import printable

ROOT = Path(__file__).parents[2]
PATIENCE = 30  # seconds for a program to end
# What gloo and NCCL say of another rank that has ended. It does not say why.
LOST = re.compile("closed by peer|reset by peer|Broken pipe|remote process exited")
# What C++, the C library and Python say before they abort their process. It does not say which rank's.
ABORTED = re.compile(
    r"^(?:terminate called|\s*what\(\)|Fatal Python error|free\(\)|malloc\(|double free|corrupted (?:size|double|unsorted)).*",
    re.M,
)
LARGEST = 16 << 20  # bytes of a log; a strategy that prints in every step must not fill the disk
KEPT = 4 << 20  # bytes of the beginning of a log that is cut, and as many of its end
_PR_SET_PDEATHSIG = 1
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # of glibc
_libc = ctypes.CDLL(None)


def environment() -> dict[str, str]:
    """This process's environment with one thread per rank. Modules are found from any folder, but not in that folder."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    changed = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1"}
    return {**os.environ, **changed}


def start(command: list[str], **options: Any) -> subprocess.Popen:
    """Start a program that ends with this one, even if this one is killed. Ctrl-C reaches this one only."""
    return subprocess.Popen(command, start_new_session=True, preexec_fn=end_with_parent, **options)


def end_with_parent(by: int = signal.SIGTERM) -> None:
    """Let the kernel send this process a signal when its parent ends. Linux only."""
    _libc.prctl(_PR_SET_PDEATHSIG, by)


def keep_memory() -> None:
    """Let freed memory stay with this process, for the next large tensor: the system would clear each page anew. glibc only."""
    _libc.mallopt(_M_MMAP_MAX, 0)
    _libc.mallopt(_M_TRIM_THRESHOLD, -1)  # never


def own_memory() -> int:
    """Return the bytes of memory that are this process's alone, without files that it has mapped; 0 if the system does not say."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return 0
    found = re.search(r"^RssAnon:\s+(\d+) kB", status, re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def give_back_memory() -> None:
    """Give the memory that this process has freed and kept back to the system. glibc only."""
    _libc.malloc_trim(0)


def end_with_script() -> None:
    """End with run_verification_main.sh, if it started this process, even if it is killed."""
    if os.environ.get("LOCKSTEP_PARENT") == str(os.getppid()):
        end_with_parent(signal.SIGKILL)


def end(process: subprocess.Popen) -> None:
    """End a process that `start` started; its ranks end with it."""
    process.terminate()
    try:
        process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def killed_by(number: int) -> str:
    """ "killed by SIGTERM", with what it may mean."""
    return f"killed by {signal.Signals(number).name}" + (
        " (the machine may be short of memory)" if number == signal.SIGKILL else ""
    )


def failure(program: str, status: int, log: str) -> str:
    """Why a program failed, in one line, from its exit status and its output."""
    said = [line.removeprefix(f"{program}: ") for line in log.splitlines() if line.startswith(f"{program}: ")]
    if said:
        # The first line that says more than that another rank has ended, if there is one
        line = min(said, key=lambda line: bool(LOST.search(line)))
        words = ABORTED.findall(log.partition(line)[0]) if signal.SIGABRT.name in line else []
        return printable("; ".join([line, *(word.strip() for word in words[-2:])]))
    if status < 0:
        return killed_by(-status)
    last = next((line for line in reversed(log.splitlines()) if line.strip()), "no output")
    return printable(f"exit status {status}: {last.strip()}", 300)


def cut(path: Path) -> bool:
    """Cut a log that is larger than LARGEST; return whether it was.

    Whole lines of its beginning and its end are kept, and a line between them says so. What others append in this very
    moment may be lost.
    """
    if path.stat().st_size <= LARGEST:
        return False
    with open(path, "rb") as file:
        file.seek(KEPT)
        file.readline()
        beginning = file.tell()
        file.seek(-KEPT, os.SEEK_END)
        file.readline()
        end = file.read()
    os.truncate(path, beginning)
    with open(path, "ab") as file:
        file.write(
            f"[lockstep: lines are left out here; a log keeps {KEPT} bytes of each end]\n".encode() + end
        )
    return True
