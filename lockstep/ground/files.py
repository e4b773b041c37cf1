"""Files: read strictly and written atomically. A reader sees the old file or the new one, never half of one."""

import contextlib
import errno
import hashlib
import json
import math
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

from lockstep.ground.errors import UserError, first_line

# The files of a dump (lockstep/dumps/dump.py)
CAPTURED = re.compile(r"manifest\.json|step_\d+\.safetensors(\.part\d*)?")
# By these bytes a file is known to be an older result, which a new one may replace. A figure has them in its metadata,
# any other result begins with them.
FIGURE = b"Lockstep figure"
VERDICT = b'{\n  "passed": '
PAGE = b"<!doctype html>\n<!-- Lockstep: "
REPORTS = {
    "report.md": b"# Tensor by tensor",
    "report.json": b'{\n "verdict": ',
    "report.html": PAGE,
}
LARGEST_JSON = 1 << 28  # bytes; the manifest of a 70-billion-parameter model is a hundredth of it


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/lockstep, else ~/.cache/lockstep."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return Path(base if os.path.isabs(base) else os.path.expanduser("~/.cache")) / "lockstep"


def require_regular(path: Path) -> int:
    """The size in bytes of a regular file.

    Raises UserError for anything else: reading a FIFO hangs, and /dev/zero never ends.
    """
    try:
        status = os.stat(path)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise UserError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from error
    if not stat.S_ISREG(status.st_mode):
        raise UserError(f"{path}: not a regular file; give a file")
    return status.st_size


def read_json(path: Path, *, limit: int = LARGEST_JSON) -> Any:
    """The value of a JSON file (RFC 8259, and the words NaN and Infinity, which a schema may allow).

    Raises UserError for a file that is not regular, is larger than `limit` bytes, is not UTF-8, starts with a byte order
    mark, is nested too deeply, has a key twice in one object, or a number beyond float64.
    """
    size = require_regular(path)
    if size > limit:
        raise UserError(f"{path}: {size} bytes of JSON; a file of this kind has at most {limit}")
    try:
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error})") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 ({error.reason} at byte {error.start})") from error
    try:
        return parse_json(text)
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON ({first_line(error)})") from error


def parse_json(text: str) -> Any:
    """The value of a JSON text, as strictly as `read_json`; raises ValueError."""
    if text.startswith("\ufeff"):
        raise ValueError("it starts with a byte order mark; save it as UTF-8 without one")
    try:
        return json.loads(text, object_pairs_hook=_without_duplicates, parse_float=_finite)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _without_duplicates(pairs: list[tuple]) -> dict:
    """Make an object of its pairs. Raises ValueError for a key that appears twice."""
    content = dict(pairs)
    if len(content) < len(pairs):
        keys = [key for key, _ in pairs]
        duplicate = next(key for number, key in enumerate(keys) if key in keys[:number])
        raise ValueError(f"the key {duplicate!r} appears twice in one object")
    return content


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is not a float64 number")
    return value


def plain(value: Any) -> Any:
    """Data for strict JSON: dataclasses as objects, and null for NaN and infinity, which it does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return plain(vars(value)) if is_dataclass(value) else value


def seal(content: Mapping[str, Any]) -> str:
    """The SHA-256 of the content of a file without the seal itself; the order of keys counts."""
    return hashlib.sha256(
        json.dumps({key: value for key, value in content.items() if key != "sha256"}).encode()
    ).hexdigest()


def write_atomically(path: Path, write: Callable[[Path], object], *, size: int | None = None) -> None:
    """Let `write` fill a temporary file beside `path`, then rename it into place.

    Raises UserError naming the file when the disk is full (with the `size` wanted, in bytes, if it is known) or the folder
    cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(temporary)
        os.replace(temporary, path)
    except Exception as error:
        reason = why_not_written(error, temporary, size)
        if reason is None:
            raise
        raise UserError(f"cannot write {path}: {reason}; free space or choose another folder") from error
    finally:
        with contextlib.suppress(OSError):  # it would hide the error above
            temporary.unlink(missing_ok=True)


def why_not_written(error: Exception, path: Path, size: int | None = None) -> str | None:
    """Why a file could not be written, in a few words, from the error that writing it raised; None for any other error.

    For a full disk it includes the `size` wanted, in bytes, and the room for it. safetensors and torch raise errors of
    their own, some without the system's error number.
    """
    code = getattr(error, "errno", None) if isinstance(error, OSError) else None
    match = re.search(r"\(os error (\d+)\)", str(error))
    if code is None and match:
        code = int(match[1])
    if code is None and not isinstance(error, OSError):
        if not re.search("inline_container|PytorchStreamWriter|iostream error", str(error)):
            return None
        code = errno.ENOSPC if _room(path) < 1 << 20 else errno.EIO
    reason = os.strerror(code) if code else first_line(error)
    if code in (errno.ENOSPC, errno.EDQUOT):
        wanted = "" if size is None else f"{size:,} bytes are wanted, "
        reason += f" ({wanted}{_room(path):,} are free)"
    return reason


def _room(path: Path) -> int:
    """Bytes that would be free on the disk of a file if that file were removed."""
    folder = path.parent
    while not folder.exists():
        folder = folder.parent
    taken = path.stat().st_blocks * 512 if path.is_file() else 0
    return shutil.disk_usage(folder).free + taken


def write_text(path: Path, text: str) -> None:
    """Replace `path` with UTF-8 text, atomically."""
    content = text.encode("utf-8")
    write_atomically(path, lambda temporary: temporary.write_bytes(content), size=len(content))


def write_result(path: Path, text: str) -> None:
    """`write_text` for a result that took minutes: if it cannot be written, it goes into a temporary folder.

    Raises UserError then, which says where it is.
    """
    try:
        write_text(path, text)
    except UserError as error:
        elsewhere = Path(tempfile.mkdtemp(prefix="lockstep-")) / path.name
        elsewhere.write_text(text, encoding="utf-8")
        raise UserError(f"{error}; the result is in {elsewhere}") from error


def require_writable_folder(path: Path, option: str, *, keep: bool = True) -> None:
    """Make the folder if needed; raise UserError naming the option if nothing can be written there.

    Without `keep` no folder is made: the one in which it would be made is tried.
    """
    try:
        if keep:
            path.mkdir(parents=True, exist_ok=True)
        existing = next(folder for folder in (path, *path.parents) if folder.exists())
        with tempfile.TemporaryFile(dir=existing, buffering=0) as probe:
            probe.write(b"x")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{option} {path}: cannot be written ({reason}); choose another folder") from error


def require_writable_file(path: Path, option: str) -> None:
    """Raise UserError naming the option unless the file can be written. For outputs, before the work starts."""
    if path.is_dir():
        raise UserError(f"{option} {path}: is a folder; give the name of a file")
    require_writable_folder(path.absolute().parent, option, keep=False)


def require_new_folder(path: Path, option: str, *, overwrite: bool = False) -> None:
    """Raise UserError naming the option if the folder is not empty, or is a file.

    With `overwrite` it may hold captured steps of an earlier run, and nothing else.
    """
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return
    entries = sorted(path.iterdir()) if path.is_dir() else [path]
    foreign = next((entry.name for entry in entries if not is_captured(entry)), None)
    if not overwrite:
        remedy = "choose another folder" + (", or add --overwrite" if foreign is None else "")
        raise UserError(f"{option}: {path} already exists, and nothing is overwritten; {remedy}")
    if foreign is not None:
        raise UserError(
            f"{option}: {path} already exists and holds {foreign}, which is no captured step; choose another folder"
        )


def require_empty_folder(path: Path, option: str, overwrite: str) -> None:
    """Raise UserError naming the option, and `overwrite`, the flag that allows it, if the folder is not empty.

    Hidden files, such as locks, do not count.
    """
    try:
        is_occupied = path.exists() and any(not entry.name.startswith(".") for entry in path.iterdir())
    except OSError as error:
        raise UserError(
            f"{option} {path}: cannot be read ({error.strerror}); choose another folder"
        ) from error
    if is_occupied:
        raise UserError(
            f"{option} {path} is not empty, and nothing is overwritten; choose another, or add {overwrite}"
        )


def is_captured(path: Path) -> bool:
    """Whether this is a file of a dump, by its name."""
    return bool(CAPTURED.fullmatch(path.name)) and path.is_file() and not path.is_symlink()


def remove_captured(folder: Path, but: Path | None = None) -> None:
    """Remove the captured steps of an earlier run, after `require_new_folder` has allowed it. The file `but` stays.

    The manifest goes first: without it, nothing that is left is taken for a dump.
    """
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if is_captured(path) and path != but:
            path.unlink(missing_ok=True)


def require_ours(path: Path, option: str, begins: bytes, *, anywhere: bool = False) -> None:
    """Raise UserError if `path` is a file that this project did not write; those that it wrote begin with `begins`.

    With `anywhere` they hold these bytes at any place.
    """
    if not os.path.lexists(path):
        return
    try:
        size = require_regular(path)
        with open(path, "rb") as file:
            head = file.read(min(size, LARGEST_JSON) if anywhere else len(begins))
        is_ours = begins in head if anywhere else head == begins
    except (UserError, OSError):
        is_ours = False
    if not is_ours:
        raise UserError(
            f"{option}: {path} was not written by Lockstep and is not replaced; choose another path, or remove it"
        )
