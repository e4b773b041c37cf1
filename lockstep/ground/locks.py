"""One run at a time into one place: a lock that the kernel releases when its process ends, in whatever way.

python -m lockstep.ground.locks FD PATH     locks PATH, which a shell holds open as file descriptor FD; for the shell script
"""

import contextlib
import errno
import fcntl
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

from lockstep.ground.errors import UserError, run_program


def path_of(output: Path) -> Path:
    """The lock file of a file or folder: hidden, beside it."""
    return output.with_name(f".{output.name}.lock")


@contextlib.contextmanager
def held(*outputs: tuple[Path, str]) -> Iterator[None]:
    """Hold the locks of files or folders, given with the options that name them.

    Raises UserError at once if another process holds one. Lock files are removed at the end. One left behind by a killed
    run does no harm.
    """
    with contextlib.ExitStack() as stack:
        for output, option in outputs:
            stack.enter_context(_hold(path_of(output), f"{option}: ", str(output)))
        yield


def inside(folder: Path, name: str, option: str) -> contextlib.AbstractContextManager[None]:
    """Hold the lock of a whole folder, by the lock file .NAME.lock in it."""
    return _hold(folder / f".{name}.lock", f"{option}: ", str(folder))


@contextlib.contextmanager
def _hold(path: Path, who: str, output: str) -> Iterator[None]:
    """Hold one lock file, and remove it at the end. Messages begin with `who` and say what `output` is locked."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = _open_locked(path, who, output)
    except OSError as error:
        raise UserError(
            f"{who}{path}: cannot be written ({error.strerror or error}); choose another folder"
        ) from error
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
        os.close(file)


def _open_locked(path: Path, who: str, output: str) -> int:
    while True:
        # Not inherited by children: they would keep the lock
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            lock(file, who, output, os.getpid())
        except BaseException:
            os.close(file)
            raise
        with contextlib.suppress(FileNotFoundError):
            # If not, the holder before us has removed the file meanwhile
            if os.path.samestat(os.fstat(file), os.stat(path)):
                return file
        os.close(file)


def lock(file: int, who: str, output: str, holder: int) -> None:
    """Lock an open file and write into it that process `holder` has it. Raises UserError if another process has it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        other = os.pread(file, 200, 0).decode(errors="replace").strip()
        raise UserError(
            f"{who}another run{f' ({other})' if other else ''} is writing {output}; wait until it has ended, or choose another folder"
        ) from None
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        print(
            f"{output}: this file system has no locks; a second run into it at the same time will not be noticed",
            file=sys.stderr,
        )
    with contextlib.suppress(OSError):  # a full disk: the lock is there, its holder's name is not
        os.ftruncate(file, 0)
        os.pwrite(file, f"process {holder} on {socket.gethostname()}\n".encode(), 0)


def _main() -> int:
    lock(int(sys.argv[1]), "OUTPUT_DIR: ", sys.argv[2], os.getppid())
    return 0


if __name__ == "__main__":
    raise SystemExit(run_program("lockstep.ground.locks", _main))
