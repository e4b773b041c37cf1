"""Where, when and with which versions something was computed."""

import contextlib
import datetime
import functools
import importlib.metadata
import os
import platform
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from lockstep import __version__
from lockstep.ground.errors import printable
from lockstep.ground.processes import ROOT

CPUINFO = Path("/proc/cpuinfo")
LONGEST_COMMAND = 4000  # characters
# Words in the names of options whose values are secret
SECRET = {"token", "key", "apikey", "secret", "password", "passwd", "passphrase", "credentials", "auth"}
TOKEN = re.compile(r"[a-zA-Z0-9]{20,}")
LOGIN = re.compile(r"://[^/@\s]+@")
HIDDEN = "HIDDEN"
# Instruction sets on which the kernels of torch and oneDNN depend, and so the order of sums: x86, then ARM.
INSTRUCTION_SETS = ("avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve", "bf16")


def about() -> dict:
    """The origin that a history, a dump and a table of results record."""
    return {
        "lockstep": __version__,
        "commit": commit(),
        "python": platform.python_version(),
        "date": now(),
        "cpu": cpu(),
        "cores": os.cpu_count(),
        "instruction_sets": instruction_sets(),
    }


def machine(made: dict[str, Any]) -> str:
    """The processor of an origin, in words."""
    return ", ".join((made["cpu"], *made["instruction_sets"], f"{made['cores']} cores"))


def now() -> str:
    """The time in UTC, as ISO 8601 writes it."""
    return f"{datetime.datetime.now(datetime.UTC):%Y-%m-%dT%H:%M:%SZ}"


def command() -> str:
    """The command line of this process, or of torchrun that started it, as typed in the folder of the programs.

    What may be secret is left out.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        with contextlib.suppress(OSError):  # a container may hide the parent
            first, *typed = Path(f"/proc/{os.getppid()}/cmdline").read_text().split("\0")[1:-1]
            # Python may have options of its own before it.
            while first.startswith("-") and first != "-m" and "-m" in typed:
                first, *typed = typed
            started = ["python", "-m"] if first == "-m" else [Path(first).name]
            return printable(shlex.join([*started, *without_secrets(typed)]), LONGEST_COMMAND)
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    program = ["-m", spec.name] if spec else [Path(sys.argv[0]).name]
    # Nobody typed the arguments of a worker of Ray, and the address of a cluster is among them.
    typed = [] if _is_worker() else without_secrets(sys.argv[1:])
    return printable(shlex.join(["python", *program, *typed]), LONGEST_COMMAND)


def _is_worker() -> bool:
    return Path(sys.argv[0]).name == "default_worker.py"


def without_secrets(arguments: list[str]) -> list[str]:
    """Arguments of any program, to be shown, with HIDDEN in the place of what may be secret.

    This is so for values of options named as secrets are, for what looks like a token, and for logins in URLs.
    """
    shown: list[str] = []
    secret_follows = False  # the argument before is the name of a secret option
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        is_hidden = is_secret(name) and (bool(equals) or name.startswith("-"))
        if secret_follows and not argument.startswith("-"):
            shown.append(HIDDEN)
        elif is_hidden and equals:
            shown.append(f"{name}={HIDDEN}")
        else:
            shown.append(TOKEN.sub(HIDDEN, LOGIN.sub(f"://{HIDDEN}@", argument)))
        secret_follows = is_hidden and not equals
    return shown


def is_secret(name: str) -> bool:
    """Whether a name, such as --api_key or apiKey, has one of the words SECRET in it."""
    words = re.split(r"[^a-z]+", re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower())
    return not SECRET.isdisjoint(words)


def without_secret_values(named: dict[str, Any]) -> dict[str, Any]:
    """The same values by name, with HIDDEN in the place of texts under names such as "api_key"."""
    return {
        key: HIDDEN if isinstance(value, str) and is_secret(key) else value for key, value in named.items()
    }


def of_run() -> dict:
    """What a recording says of a run: its command and script, the time, and versions.

    These are the versions of Python, of torch, and of the loaded libraries that need torch.
    """
    loaded = {"python": platform.python_version()}
    for name in sorted(name for name in sys.modules if "." not in name):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError, ValueError):
            requirements = importlib.metadata.requires(name) or []
            if name == "torch" or any(re.match(r"torch(?![\w-])", line) for line in requirements):
                loaded[name] = importlib.metadata.version(name)
    script = "" if _is_worker() else printable(sys.argv[0])
    return {"command": command(), "script": script, "date": now(), "versions": loaded}


@functools.cache
def commit() -> str:
    """Lockstep's commit, with "-dirty" if files differ from it; "unknown" outside a git checkout of Lockstep."""
    if not (ROOT / ".git").exists():  # an enclosing checkout is somebody else's
        return "unknown"
    try:
        done = subprocess.run(
            ["git", "--no-optional-locks", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"],
            capture_output=True,
            text=True,
            timeout=20,
        )
    except (OSError, subprocess.TimeoutExpired):  # no git here
        return "unknown"
    return printable(done.stdout.strip(), 200) if done.returncode == 0 and done.stdout.strip() else "unknown"


@functools.cache
def cpu() -> str:
    """The model of the processor."""
    lines = _cpuinfo()
    models = [
        line.split(":", 1)[1].strip() for line in lines if line.startswith("model name") and ":" in line
    ]
    return printable(next(filter(None, [*models, platform.processor(), platform.machine()]), "unknown"), 200)


@functools.cache
def instruction_sets() -> list[str]:
    """Those of INSTRUCTION_SETS that the processor has."""
    flags = {
        flag for line in _cpuinfo() if line.lower().startswith(("flags", "features")) for flag in line.split()
    }
    return [name for name in INSTRUCTION_SETS if name in flags]


def has_bfloat16() -> bool:
    """Whether the processor has instructions for bfloat16 products.

    Without them they are emulated, several times slower than float32.
    """
    return bool({"avx512_bf16", "amx_bf16", "bf16"} & set(instruction_sets()))


def _cpuinfo() -> list[str]:
    return CPUINFO.read_text(errors="replace").splitlines() if CPUINFO.is_file() else []


REQUIREMENTS = ROOT / "requirements.txt"


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
    """ "torch 2.13.0 against 2.12.1": the libraries that two runs recorded with different versions.

    A library that only one of them recorded is "missing" in the other.
    """
    names = [name for name in (one | other) if one.get(name) != other.get(name)]
    return ", ".join(
        f"{name} {one.get(name, 'missing')} against {other.get(name, 'missing')}" for name in names
    )
