"""The logs of what libraries and ranks print: a strategy that prints in every step must not fill the disk."""

import os
from pathlib import Path

LARGEST = 16 << 20  # bytes; a log that has grown beyond is cut
KEPT = 4 << 20  # bytes of its beginning, and as many of its end


def begin(path: Path) -> None:
    """Make an empty log in the place of an older one. Whoever writes must append: the file may be cut meanwhile."""
    path.write_bytes(b"")


def cut(path: Path) -> bool:
    """Cut a log that is larger than LARGEST: whole lines of its beginning and its end are kept, and a line between them says so.

    Returns whether it was. What others append in this very moment may be lost.
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
