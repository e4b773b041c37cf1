"""The names under which files have classes and functions: "module:NAME", or "/path/to/script.py:NAME" for the running script."""

import functools
import importlib
import sys
import types
from pathlib import Path
from typing import Any

from lockstep.ground import user_file

# The script that runs, and the same in a process that it spawned
MAIN = {"__main__", "__mp_main__"}


def name_of(value: Any) -> str:
    """Return where a class or function is found: "module:NAME", or "/path/to/script.py:NAME" if the running script defines it."""
    module = str(script_of(globals_of(value))) if value.__module__ in MAIN else value.__module__
    return f"{module}:{_path_in_module(value)}"


def _path_in_module(value: Any) -> str:
    """Return NAME, or CLASS.NAME, of a class or function. One of C++, such as torch.tanh, may have another name than its qualified one."""
    is_of_c = isinstance(value, types.BuiltinFunctionType) or type(value).__name__ == "pybind11_type"
    return str(value.__name__ if is_of_c else value.__qualname__)


def script_of(names: dict[str, Any]) -> Path:
    """Return the path of the script with this namespace. In a notebook, and with Python's -c, it is the path of no file."""
    return Path(names.get("__file__") or "").absolute()


def globals_of(value: Any) -> dict[str, Any]:
    """Return the namespace of the script that defines a class or function.

    That is the script that runs, or globals that came with the value from another process, as with Ray's workers.
    """
    main = vars(sys.modules["__main__"])
    if value.__name__ in main:
        return main
    found = (getattr(v, "__globals__", {}) for v in (value, *getattr(value, "__dict__", {}).values()))
    return next((names for names in found if names.get("__name__") in MAIN), main)


def named(value: Any) -> Any:
    """Return what a file has under the name of a class or function; None if there is no such name."""
    names = globals_of(value)
    if value.__module__ in MAIN and not script_of(names).is_file():
        return None
    if names is not vars(sys.modules["__main__"]):
        return None if "<locals>" in value.__qualname__ else value
    try:
        return attribute_of(importlib.import_module(value.__module__), _path_in_module(value))
    except (AttributeError, ImportError, ValueError):
        return None


def attribute_of(module: types.ModuleType, path: str) -> Any:
    return functools.reduce(getattr, path.split("."), module)


@functools.cache  # it is asked for each module of a class
def source_of(kind: type) -> bytes:
    """Return the file that defines a class, if it is none of an installed package; else b""."""
    names = globals_of(kind) if kind.__module__ in MAIN else vars(sys.modules[kind.__module__])
    path = script_of(names)
    return path.read_bytes() if path.is_file() and not user_file.is_installed(path) else b""
