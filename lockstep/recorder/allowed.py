"""Which classes and functions a recording may name. Others may run text as code, or load files."""

import builtins
import types
from collections.abc import Collection
from typing import Any

# Packages whose objects are configurations
CONFIGURATIONS = {"addict", "easydict", "ml_collections", "omegaconf", "yacs"}
# Packages whose functions and classes a tree may name, beside the model's own
PACKAGES = CONFIGURATIONS | {
    "argparse",
    "builtins",
    "collections",
    "functools",
    "inspect",
    "math",
    "torch",
    "types",
    "typing",
}
# Python's built-ins that a recording may name: classes, and functions that run no text as code and open no file
HARMLESS = {
    *(builtin for builtin in vars(builtins).values() if isinstance(builtin, type)),
    *(abs, all, any, divmod, len, max, min, pow, print, round, sorted, sum),
}
# Modules of torch and Python whose functions a recording may name
FUNCTIONS = {
    "math",
    "torch.functional",
    "torch.nn.functional",
    "torch.nn.init",
    "torch.utils.checkpoint",
    *("torch", *(f"torch._C._{part}" for part in ("nn", "linalg", "special", "fft", "sparse"))),
}


def package_of(name: str) -> str:
    """Return the first part of a name like package.module:NAME."""
    return name.partition(":")[0].partition(".")[0]


def is_allowed(value: Any, name: str, packages: Collection[str]) -> bool:
    """Whether a recording may name a class or function of an installed package. `packages` are those that it may be of.

    A package's module also has other modules among its names, such as os. And some of Python's built-in functions run text as code.
    """
    package = package_of(getattr(value, "__module__", None) or name)
    if package not in packages:
        return False
    if any(value is builtin for builtin in vars(builtins).values()):
        return value in HARMLESS
    # Union is callable, too.
    is_function = not isinstance(value, type) and callable(value) and type(value).__module__ != "typing"
    return not is_function or package not in PACKAGES or _module_of(value) in FUNCTIONS


def _module_of(function: Any) -> str:
    """Return the name of the module that defines a function; "" if there is none.

    "torch" is returned for built-in functions alone, such as torch.tanh; other functions of that module get "".
    """
    module = getattr(function, "__module__", None) or ""
    return "" if module == "torch" and not isinstance(function, types.BuiltinFunctionType) else module
