"""Versions of libraries: those that Lockstep is tested with, which requirements.txt pins, and in which ones two runs differ."""

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
    """ "torch 2.12.1 found, tested with 2.13.0"; "" if the versions are equal, or there is no such library here."""
    try:
        found = importlib.metadata.version(library).split("+")[0]  # torch 2.13.0+cpu is 2.13.0
    except importlib.metadata.PackageNotFoundError:
        return ""
    pinned = versions()[library]
    return "" if found == pinned else f"{library} {found} found, tested with {pinned}"


def unlike(one: dict[str, str], other: dict[str, str]) -> str:
    """ "torch 2.13.0 against 2.12.1": the libraries that two runs recorded with different versions, or one of them not at all."""
    names = [name for name in (one | other) if one.get(name) != other.get(name)]
    return ", ".join(
        f"{name} {one.get(name, 'missing')} against {other.get(name, 'missing')}" for name in names
    )
