"""The versions of libraries that Lockstep is tested with: those that requirements.txt pins."""

import functools
import importlib.metadata
import re
from pathlib import Path

REQUIREMENTS = Path(__file__).parents[1] / "requirements.txt"


@functools.cache
def versions() -> dict[str, str]:
    """Library -> version. Where Lockstep is installed without its tree, its metadata holds the same lines."""
    if REQUIREMENTS.exists():
        lines = REQUIREMENTS.read_text(encoding="utf-8").splitlines()
    else:
        lines = importlib.metadata.requires("lockstep") or []
    pins = (re.match(r"([\w-]+)(?:\[.*\])?==([\w.]+)$", line) for line in lines)
    return {pin[1]: pin[2] for pin in pins if pin}


def difference(library: str) -> str:
    """ "deepspeed 0.18.2 found, tested with 0.19.8"; "" if the versions are equal, or there is no such library here."""
    try:
        found = importlib.metadata.version(library).split("+")[0]  # torch 2.13.0+cpu is 2.13.0
    except importlib.metadata.PackageNotFoundError:
        return ""
    pinned = versions()[library]
    return "" if found == pinned else f"{library} {found} found, tested with {pinned}"
