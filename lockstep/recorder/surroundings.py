"""What a model's code reads beside the model: environment variables, and values of its files and classes that the program has set.

A script may set `os.environ["FLASH_ATTN"]`, a global of another file (`settings.scale = 2`) or an attribute of a class before it trains.
The judge imports the files anew, so these values are recorded, and it sets them, too. Nothing is recorded of packages that are installed,
nor of what is no plain value: numbers, texts, dtypes, members of torch's enumerations, and lists, tuples and dicts of them. An
object of the user's own class, such as a configuration, is recorded by its attributes, and the judge sets those of the one that it has in this place.
"""

import argparse
import ast
import contextlib
import enum
import functools
import importlib.util
import operator
import os
import re
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from lockstep.ground import origin, user_file
from lockstep.recorder import process_group
from lockstep.recorder.state import OF_PROCESSES
from lockstep.recorder.tree import (
    MAIN,
    PACKAGES,
    TREE,
    Describing,
    Unnamed,
    globals_of,
    name_of,
    named,
    package_of,
)

NOT_OWN = {*PACKAGES, "lockstep", "transformers"}  # wherever they are
# What a launcher says is so of the judge, which is one process.
ONE_PROCESS = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
DEPTH = 2  # of objects inside of objects
MOST = 1000  # elements or characters of a value: more is data
PLAIN = (type(None), bool, int, float, str, list, tuple, set, dict, torch.dtype)
CODE = (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType)


class Left:
    """In the place of an object that could not be recorded: the numbers and texts of it that the model's code may read."""

    def __init__(self, values: TREE):
        self.__dict__.update(values)

    def __getattr__(self, name: str) -> Any:
        of_processes = "; a judge has no process group" * bool(OF_PROCESSES.search(name.lower()))
        raise AttributeError(f"{name} is of an object that was left out{of_processes}")

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        raise TypeError("what the class is of an object that was left out is not known")


def describe(model: torch.nn.Module) -> TREE:
    """Of the files that the classes of a model are of, and of those that these use."""
    classes = _classes(model)
    files = _files(classes.values())
    read = {name: os.environ[name] for name in _names_in(files.values()) & os.environ.keys()}
    read |= {name: ONE_PROCESS[name] for name in ONE_PROCESS.keys() & read}
    return {
        "environment": {name: text for name, text in read.items() if _is_public(name, text)},
        "globals": {name: _plain(one) for name, one in files.items() if name not in MAIN},
        "classes": {name: _plain(vars(kind)) for name, kind in classes.items()},
    }


def give_back(recorded: TREE, model: torch.nn.Module, value: Callable[[Any], Any]) -> None:
    """Set what the recorded program had otherwise. `model` is built again; `value` makes a value of its JSON.

    Of a recording's names, those are set that the files of the model's code have here, with plain values.
    """
    classes = _classes(model)
    files = _files(classes.values())
    known = _names_in(files.values())
    _set_environment(recorded, known)
    for places, those in ((classes, recorded["classes"]), (files, recorded["globals"])):
        for name in places.keys() & those.keys():
            place = places[name] if isinstance(places[name], type) else sys.modules.get(name)
            # A module may have another name than it says
            here = _plain(vars(place)) if place else {}
            if isinstance(place, types.ModuleType) and hasattr(place, "__file__"):
                later = {key: one for key, one in those[name].items() if key not in here}
                _give_later(place, later, value)
            for key in here.keys() & those[name].keys():
                if here[key] != those[name][key] or here[key] == {"process group": None}:
                    inside, _, last = key.rpartition(".")
                    holder = operator.attrgetter(inside)(place) if inside else place
                    if isinstance(holder, (type, types.ModuleType)):
                        setattr(holder, last, value(those[name][key]))
                    else:  # which may refuse it, as a frozen dataclass does
                        vars(holder)[last] = value(those[name][key])


def _give_later(place: types.ModuleType, recorded: TREE, value: Callable[[Any], Any]) -> None:
    """What a program makes after it has imported a file: globals that a function of the file sets, and attributes of its objects."""
    made = _set_by_functions(str(place.__file__))
    for key, one in recorded.items():
        first, _, last = key.partition(".")
        if key in made and type(getattr(place, key, None)) in (type(None), Left):
            setattr(place, key, value(one))
        elif last and not _is_hidden(last) and _is_object(getattr(place, first, None)):
            vars(getattr(place, first))[last] = value(one)


def set_environment(tree: TREE) -> None:
    """Before the files of a model's classes are imported, which may read it then: the variables that these name."""
    names, trees = {*tree["scripts"]}, [tree]
    while trees:
        one = trees.pop()
        names.add(one["class"].partition(":")[0])
        trees += [child for child in one["children"].values() if child is not None]
    for name in names:
        with contextlib.suppress(Exception):  # what is not there is said when it is imported
            spec = None if name.endswith(".py") else importlib.util.find_spec(name)
            file = name if spec is None else spec.origin or ""
            if file.endswith(".py") and not user_file.is_installed(Path(file)):
                _set_environment(tree["surroundings"], _quoted(file))


def _set_environment(recorded: TREE, known: set[str]) -> None:
    texts = recorded["environment"].items()
    os.environ.update({name: text for name, text in texts if name in known and _is_public(name, text)})


@contextlib.contextmanager
def restored() -> Iterator[None]:
    """After it, environment variables are what they were before. Values of files and classes stay: others have files of their own."""
    with mock.patch.dict(os.environ):
        yield


def _classes(model: torch.nn.Module) -> dict[str, type]:
    """Those of the user's own files that the model's modules are of, by names that the judge has, too."""
    kinds = {base for module in model.modules() for base in type(module).__mro__}
    return {_name(kind): kind for kind in kinds if _is_own(_names_beside(kind)) and named(kind) is kind}


def _name(kind: type) -> str:
    names = _names_beside(kind)
    path = Path(names["__file__"]).absolute()
    is_script = kind.__module__ == user_file.module_name(path)  # as the judge has it
    return f"{path}:{kind.__qualname__}" if is_script else name_of(kind)


def _names_beside(value: Any) -> TREE:
    """The names of the file that a class or function is of."""
    if value.__module__ in MAIN:
        return globals_of(value)
    return vars(sys.modules[value.__module__]) if value.__module__ in sys.modules else {}


def _is_own(names: TREE) -> bool:
    """Whether the names are those of a file that is no part of an installed package."""
    file = Path(names.get("__file__") or "")
    of_others = user_file.is_installed(file) or any(map(_has_packages, file.parents))
    return not of_others and package_of(names.get("__name__") or "") not in NOT_OWN and file.is_file()


@functools.cache
def _has_packages(folder: Path) -> bool:
    """Whether packages are installed in a folder, as by pip's --target."""
    return next(folder.glob("*.dist-info"), None) is not None


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


@functools.cache  # a model is built several times
def _text_of(file: str) -> str:
    return Path(file).read_text(errors="replace")


def _names_in(files: Iterable[TREE]) -> set[str]:
    """What may be names of environment variables in them."""
    return set().union(*(_quoted(names["__file__"]) for names in files))


@functools.cache
def _quoted(file: str) -> set[str]:
    return {*re.findall(r"""["']([A-Za-z_]\w*)["']""", _text_of(file))}


def _is_public(name: str, value: Any) -> bool:
    """No secret, as far as names and forms show it, and no path or address, which are of one machine."""
    if origin.is_secret(name):
        return False
    return not isinstance(value, str) or not ("/" in value or origin.TOKEN.search(value))


def _plain(names: Mapping[str, Any], depth: int = DEPTH) -> TREE:
    """Their plain values, as JSON; those of objects as OBJECT.ATTRIBUTE.

    An object that holds process groups, and that a function of the file makes, is not there when the file is imported again: it is recorded by its plain values.
    """
    found: TREE = {}
    made = _set_by_functions(names["__file__"]) if "__file__" in names else set()
    for name, value in list(names.items()):
        # What is in a user's file may raise anything when it is looked at.
        with contextlib.suppress(Exception):
            if _is_hidden(name):
                continue
            if depth and _is_object(value):
                inside = _plain(vars(value), depth - 1) if _is_public(name, "") else {}
                of_data = {key for key, one in vars(value).items() if _is_data(key, one)}
                # One value is of no use without another that is no plain one, such as the length of a table
                if of_data <= {key.partition(".")[0] for key in inside}:
                    found |= {f"{name}.{key}": one for key, one in inside.items()}
                if name in made and any(map(process_group.is_group, vars(value).values())):
                    found[name] = {"left": inside}
            elif not isinstance(value, CODE):
                found[name] = _Plain(name).value(value, name)
    if "__file__" in names:
        for one in _set_together(names["__file__"]):
            together = one & names.keys()
            if not together <= found.keys():
                found = {name: one for name, one in found.items() if name not in together}
    return found


def _is_hidden(name: str) -> bool:
    of_others = OF_PROCESSES.search(name.lower()) and not _is_one_process()
    return not name.isidentifier() or name.startswith("__") or bool(of_others)


def _is_one_process() -> bool:
    """What a run of one process says of its processes is so of the judge."""
    several = torch.distributed.is_available() and torch.distributed.is_initialized()
    return not several or torch.distributed.get_world_size() == 1


def _is_data(name: str, value: Any) -> bool:
    """Whether it is a value that counts, and neither code nor a text, which may be a path."""
    code = isinstance(value, (*CODE, classmethod, staticmethod, property, str))
    of_processes = OF_PROCESSES.search(name.lower())
    return not (code or of_processes or _is_hidden(name)) and _is_public(name, "")


def _is_object(value: Any) -> bool:
    """Whether it is of a class of the user's own that keeps values, such as a configuration."""
    kind = type(value)  # isinstance may ask the value itself
    if issubclass(kind, (*CODE, torch.nn.Module, torch.Tensor, enum.Enum)) or not hasattr(value, "__dict__"):
        return False
    return issubclass(kind, (argparse.Namespace, types.SimpleNamespace)) or _is_own(_names_beside(kind))


@functools.cache
def _set_together(file: str) -> list[set[str]]:
    """The globals that each function sets, as a table and its length when they are first needed: one is of no use without the other."""
    try:
        whole = ast.parse(_text_of(file))
    except SyntaxError:
        return []
    defined = (one for one in ast.walk(whole) if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef)))
    inside = ([each.names for each in ast.walk(one) if isinstance(each, ast.Global)] for one in defined)
    return [{name for each in those for name in each} for those in inside if those]


def _set_by_functions(file: str) -> set[str]:
    """The globals that functions of a file set."""
    return set().union(*_set_together(file))


class _Plain(Describing):
    def __init__(self, name: str):
        super().__init__(torch.nn.Module())
        self.name = name
        self.left = MOST

    def value(self, value: Any, where: str) -> Any:
        if process_group.is_group(value):
            return super().value(value, where)
        is_plain = type(value) in PLAIN or hasattr(type(value), "__members__")  # of an enumeration
        if not is_plain or not _is_public(self.name, value):
            raise Unnamed("no plain value")
        self.left -= len(value) if isinstance(value, (str, list, tuple, set, dict)) else 1
        if type(value) is dict and not all(isinstance(key, str) and _is_public(key, "") for key in value):
            raise Unnamed("a secret, or no plain dict")
        if self.left < 0:
            raise Unnamed("data")
        return super().value(value, where)
