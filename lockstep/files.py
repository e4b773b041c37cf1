"""Atomic writes: a reader sees the old file or the new one, never half of one."""

import os
from collections.abc import Callable
from pathlib import Path

from lockstep.errors import UserError


def write_atomically(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a temporary file beside `path`, then rename it into place.

    Raises UserError naming the file when the disk is full or the folder cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(temporary)
        os.replace(temporary, path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}; free space or choose another folder") from error
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Replace `path` with UTF-8 text, atomically."""
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def require_writable_folder(path: Path, option: str) -> None:
    """Make the folder if need be; raise UserError naming the option when nothing can be written there."""
    probe = path / f".lockstep-write-test.{os.getpid()}"
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"x")
    except OSError as error:
        raise UserError(f"{option} {path}: cannot be written ({error.strerror or error}); choose another folder") from error
    finally:
        try:
            probe.unlink(missing_ok=True)
        except OSError:  # the folder itself does not exist or is no folder: said above
            pass


def require_new_folder(path: Path, option: str) -> None:
    """Raise UserError naming the option if there is something in the folder already, or if it is a file."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UserError(f"{option}: {path} is there already, and nothing is overwritten; remove it, or choose another folder")
