"""What a model's code reads beside the model: environment variables, and values of its files and classes that the program has set.

A script may set `os.environ["FLASH_ATTN"]`, a global of another file (`settings.scale = 2`) or an attribute of a class before it trains.
The judge imports the files anew, so these values are recorded, and it sets them, too. Nothing is recorded of packages that are installed,
nor of what is no plain value.
"""

import argparse
import contextlib
import dataclasses
import os
import re
import sys
import sysconfig
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from lockstep.ground import origin
from lockstep.recorder.tree import TREE, Describing, Unnamed, globals_of, name_of, named, package_of

INSTALLED = {Path(sysconfig.get_path(kind)) for kind in ("stdlib", "platstdlib", "purelib", "platlib")}
# What a launcher says is so of the judge, which is one process.
ONE_PROCESS = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
MOST = 1000  # elements of a value: more is data
CODE = (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType)


def describe(model: torch.nn.Module) -> TREE:
    """Of the files that the classes of a model are of, and of those that these use."""
    packages, classes = Describing(model).packages, _classes(model)
    files = _files(classes)
    read = {name: os.environ[name] for name in _names_in(files.values()) & os.environ.keys()}
    read |= {name: ONE_PROCESS[name] for name in ONE_PROCESS.keys() & read}
    return {
        "environment": {name: value for name, value in _shown(read).items() if _is_of_no_machine(value)},
        "globals": {name: _plain(one, packages) for name, one in files.items() if name != "__main__"},
        "classes": {name_of(kind): _plain(vars(kind), packages) for kind in classes},
    }


def give_back(
    recorded: TREE, model: torch.nn.Module, find: Callable[[str], Any], value: Callable[[Any], Any]
) -> None:
    """Set what the recorded program had otherwise. `model` is built again; `find` finds a class by its name, `value` makes a value of its JSON.

    Of a recording's names, those are set that the files of the model's code have here.
    """
    packages, classes = Describing(model).packages, _classes(model)
    files = _files(classes)
    known = _names_in(files.values())
    environment = recorded["environment"].items()
    os.environ.update({name: text for name, text in environment if name in known and _is_of_no_machine(text)})
    own = [(sys.modules[name], values) for name, values in recorded["globals"].items() if name in files]
    found = [(find(name), values) for name, values in recorded["classes"].items()]
    for place, values in (*own, *((kind, values) for kind, values in found if kind in classes)):
        here = _plain(vars(place), packages)
        for name, about in values.items():
            is_code = name.startswith("__") or issubclass(type(vars(place).get(name)), CODE)
            if not is_code and (name not in here or here[name] != about):
                setattr(place, name, value(about))


@contextlib.contextmanager
def restored() -> Iterator[None]:
    """After it, environment variables are what they were before."""
    with mock.patch.dict(os.environ):
        yield


def _classes(model: torch.nn.Module) -> set[type]:
    """Those of the user's own files that the model's modules are of."""
    kinds = {base for module in model.modules() for base in type(module).__mro__}
    return {kind for kind in kinds if _is_own(_names_beside(kind)) and named(kind) is kind}


def _names_beside(value: Any) -> TREE:
    """The names of the file that a class or function is of."""
    if value.__module__ == "__main__":
        return globals_of(value)
    return vars(sys.modules[value.__module__]) if value.__module__ in sys.modules else {}


def _is_own(names: TREE) -> bool:
    """Whether the names are those of a file that is no part of an installed package."""
    file = Path(names.get("__file__") or "")
    installed = not INSTALLED.isdisjoint(file.parents) or package_of(names.get("__name__", "")) == "lockstep"
    return not installed and file.is_file()


def _files(classes: Iterable[type]) -> dict[str, TREE]:
    """The names that user's own files have, by module: the classes' files, and all that these import."""
    found: dict[str, TREE] = {}
    new = [_names_beside(kind) for kind in classes]
    while new:
        names = new.pop()
        if not _is_own(names) or names["__name__"] in found:
            continue
        found[names["__name__"]] = names
        for value in list(names.values()):
            kind = type(value)  # isinstance may ask the value itself
            if issubclass(kind, types.ModuleType):
                new.append(vars(value))
            elif issubclass(kind, (type, types.FunctionType)) and isinstance(value.__module__, str):
                new.append(_names_beside(value))
    return found


def _names_in(files: Iterable[TREE]) -> set[str]:
    """What may be names of environment variables in them."""
    texts = (Path(names["__file__"]).read_text(errors="replace") for names in files)
    return {name for text in texts for name in re.findall(r"""["']([A-Za-z_]\w*)["']""", text)}


def _is_of_no_machine(text: str) -> bool:
    """Whether it may be the same on another machine: no path and no address."""
    return "/" not in text


def _shown(values: Mapping[str, Any]) -> dict[str, Any]:
    """Without texts under names such as "api_key"."""
    return {
        name: one
        for name, one in origin.without_secret_values(dict(values)).items()
        if one is not origin.HIDDEN
    }


def _plain(names: Mapping[str, Any], packages: set[str]) -> TREE:
    """Their plain values, as JSON."""
    found: TREE = {}
    for name, value in list(names.items()):
        describing = _Plain(torch.nn.Module())
        describing.packages |= packages
        # What is in a user's file may raise anything when it is looked at.
        with contextlib.suppress(Exception):
            if name.startswith("__") or isinstance(value, CODE) or not _shown({name: value}):
                continue
            about = describing.value(value, name)
            if not describing.left_out:
                found[name] = about
    return found


class _Plain(Describing):
    def value(self, value: Any, where: str) -> Any:
        of_torch = isinstance(value, (torch.Tensor, torch.nn.Module))
        if of_torch or (isinstance(value, (list, tuple, set, dict)) and len(value) > MOST):
            raise Unnamed("no plain value")
        return super().value(value, where)

    def _object(self, value: object, where: str) -> TREE:
        """Of settings alone."""
        if not (
            isinstance(value, (argparse.Namespace, types.SimpleNamespace)) or dataclasses.is_dataclass(value)
        ):
            raise Unnamed(f"a {type(value).__qualname__}")
        if _shown(vars(value)).keys() != vars(value).keys():
            raise Unnamed("a secret")
        return super()._object(value, where)
