"""What a model's code reads beside the model: environment variables, and values of its files and classes that the program has set.

A script may set `os.environ["FLASH_ATTN"]`, a global of another file (`settings.scale = 2`) or an attribute of a class before it trains.
The judge imports the files anew, so these values are recorded, and it sets them, too. Nothing is recorded of installed
packages, and only plain values are recorded: numbers, texts, dtypes, members of torch's enumerations, and lists, tuples and
dicts of them. An object of the user's own class, such as a configuration, is recorded by its attributes. The judge sets the
attributes of the object that it has in this place.
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
from lockstep.recorder.allowed import PACKAGES, package_of
from lockstep.recorder.module_state import OF_PROCESSES
from lockstep.recorder.names import MAIN, globals_of, name_of, named
from lockstep.recorder.tree import TREE, Describing, Unnamed, nodes

# Packages that are not the user's own, wherever their files are
NOT_OWN = {*PACKAGES, "lockstep", "transformers"}
# Variables that a launcher sets, with the values that they have in the judge, which is one process
ONE_PROCESS = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
DEPTH = 2  # of objects inside of objects
MOST = 1000  # elements or characters of a value: more is data
PLAIN = (type(None), bool, int, float, str, list, tuple, set, dict, torch.dtype)
CODE = (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType)


class Left:
    """Stands for an object that could not be recorded. It has those numbers and texts of it that the model's code may read."""

    def __init__(self, values: TREE):
        self.__dict__.update(values)

    def __getattr__(self, name: str) -> Any:
        reason = "; a judge has no process group" * bool(OF_PROCESSES.search(name.lower()))
        raise AttributeError(f"{name} is of an object that was left out{reason}")

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        raise TypeError("what the class is of an object that was left out is not known")


def describe(model: torch.nn.Module) -> TREE:
    """Return what the code of a model reads beside the model, as JSON: `give_back` sets it again.

    It is looked for in the files that define the model's classes, and in the files that these use.
    """
    classes = _classes(model)
    files = _files(classes.values())
    variables = {name: os.environ[name] for name in _quoted_in(files.values()) & os.environ.keys()}
    variables |= {name: ONE_PROCESS[name] for name in ONE_PROCESS.keys() & variables}
    return {
        "environment": {name: text for name, text in variables.items() if _is_public(name, text)},
        "globals": {name: _plain_values(names) for name, names in files.items() if name not in MAIN},
        "classes": {name: _plain_values(vars(kind)) for name, kind in classes.items()},
    }


def give_back(recorded: TREE, model: torch.nn.Module, value: Callable[[Any], Any]) -> None:
    """Set what the recorded program had set to other values. `model` is built again; `value` makes a value of its JSON.

    Names are set that the files of the model's code have here, with plain values, and what these files make only later (`_give_later`).
    """
    classes = _classes(model)
    files = _files(classes.values())
    quoted = _quoted_in(files.values())
    _set_environment(recorded, quoted)
    for owners, recorded_values in ((classes, recorded["classes"]), (files, recorded["globals"])):
        for name in owners.keys() & recorded_values.keys():
            owner = owners[name] if isinstance(owners[name], type) else sys.modules.get(name)
            # A module may be imported under another name than its __name__.
            current = _plain_values(vars(owner)) if owner else {}
            if isinstance(owner, types.ModuleType) and hasattr(owner, "__file__"):
                later = {key: tree for key, tree in recorded_values[name].items() if key not in current}
                _give_later(owner, later, value)
            for key in current.keys() & recorded_values[name].keys():
                if current[key] != recorded_values[name][key] or current[key] == {"process group": None}:
                    path, _, attribute = key.rpartition(".")
                    holder = operator.attrgetter(path)(owner) if path else owner
                    if isinstance(holder, (type, types.ModuleType)):
                        setattr(holder, attribute, value(recorded_values[name][key]))
                    else:
                        # setattr may be refused, as by a frozen dataclass.
                        vars(holder)[attribute] = value(recorded_values[name][key])


def _give_later(module: types.ModuleType, recorded: TREE, value: Callable[[Any], Any]) -> None:
    """Set what a program makes after it has imported a file: globals that a function of the file sets, and attributes of its objects."""
    set_by_functions = _set_by_functions(str(module.__file__))
    for key, tree in recorded.items():
        name, _, attribute = key.partition(".")
        if key in set_by_functions and type(getattr(module, key, None)) in (type(None), Left):
            setattr(module, key, value(tree))
        elif attribute and not _is_hidden(attribute) and _is_object(getattr(module, name, None)):
            vars(getattr(module, name))[attribute] = value(tree)


def set_environment(tree: TREE) -> None:
    """Set the recorded environment variables that the files of a model's classes name.

    Call it before these files are imported, as they may read the variables then.
    """
    for name in {*tree["scripts"], *(node["class"].partition(":")[0] for node in nodes(tree))}:
        # A file that is missing is an error when it is imported.
        with contextlib.suppress(Exception):
            spec = None if name.endswith(".py") else importlib.util.find_spec(name)
            file = name if spec is None else spec.origin or ""
            if file.endswith(".py") and not user_file.is_installed(Path(file)):
                _set_environment(tree["surroundings"], _quoted(file))


def _set_environment(recorded: TREE, quoted: set[str]) -> None:
    """Set those recorded environment variables whose names are quoted in the files of the model's code."""
    texts = recorded["environment"].items()
    os.environ.update({name: text for name, text in texts if name in quoted and _is_public(name, text)})


@contextlib.contextmanager
def restored() -> Iterator[None]:
    """Restore environment variables when it ends. Values of files and classes stay set: other models have files of their own."""
    with mock.patch.dict(os.environ):
        yield


def _classes(model: torch.nn.Module) -> dict[str, type]:
    """Return the classes of the model's modules, and their bases, that the user's own files define. The judge has the same names of them."""
    kinds = {base for module in model.modules() for base in type(module).__mro__}
    return {_class_name(kind): kind for kind in kinds if _is_own(_namespace_of(kind)) and named(kind) is kind}


def _class_name(kind: type) -> str:
    names = _namespace_of(kind)
    path = Path(names["__file__"]).absolute()
    # The judge imports a script under this name.
    is_script = kind.__module__ == user_file.module_name(path)
    return f"{path}:{kind.__qualname__}" if is_script else name_of(kind)


def _namespace_of(value: Any) -> TREE:
    """Return the namespace of the file that defines a class or function."""
    if value.__module__ in MAIN:
        return globals_of(value)
    return vars(sys.modules[value.__module__]) if value.__module__ in sys.modules else {}


def _is_own(names: TREE) -> bool:
    """Whether a namespace is that of a file of the user's own, which is no part of an installed package."""
    file = Path(names.get("__file__") or "")
    is_installed = user_file.is_installed(file) or any(map(_has_packages, file.parents))
    return not is_installed and package_of(names.get("__name__") or "") not in NOT_OWN and file.is_file()


@functools.cache
def _has_packages(folder: Path) -> bool:
    """Whether packages are installed in a folder, as by pip's --target."""
    return next(folder.glob("*.dist-info"), None) is not None


def _files(classes: Iterable[type]) -> dict[str, TREE]:
    """Return the namespaces of the user's own files, by module: the classes' files, and all that these import."""
    files: dict[str, TREE] = {}
    pending = [_namespace_of(kind) for kind in classes]
    while pending:
        names = pending.pop()
        if not _is_own(names) or names["__name__"] in files:
            continue
        files[names["__name__"]] = names
        for value in list(names.values()):
            # isinstance may ask the value itself.
            kind = type(value)
            if issubclass(kind, types.ModuleType):
                pending.append(vars(value))
            elif issubclass(kind, (type, types.FunctionType)) and isinstance(value.__module__, str):
                pending.append(_namespace_of(value))
    return files


@functools.cache  # a model is built several times
def _text_of(file: str) -> str:
    return Path(file).read_text(errors="replace")


def _quoted_in(files: Iterable[TREE]) -> set[str]:
    """Return the words in quotes in these files: they may be names of environment variables."""
    return set().union(*(_quoted(names["__file__"]) for names in files))


@functools.cache
def _quoted(file: str) -> set[str]:
    return {*re.findall(r"""["']([A-Za-z_]\w*)["']""", _text_of(file))}


def _is_public(name: str, value: Any) -> bool:
    """Whether a value is no secret, as far as its name and form show it, and no path or address, which are of one machine."""
    if origin.is_secret(name):
        return False
    return not isinstance(value, str) or not ("/" in value or origin.TOKEN.search(value))


def _plain_values(names: Mapping[str, Any], depth: int = DEPTH) -> TREE:
    """Return the plain values of a namespace, as JSON; those of objects as OBJECT.ATTRIBUTE.

    An object that holds process groups, and that a function of the file makes, is not there when the file is imported
    again. It is recorded as a whole, by its plain values.
    """
    values: TREE = {}
    set_by_functions = _set_by_functions(names["__file__"]) if "__file__" in names else set()
    for name, value in list(names.items()):
        # A value of a user's file may raise anything when it is looked at.
        with contextlib.suppress(Exception):
            if _is_hidden(name):
                continue
            if depth and _is_object(value):
                inside = _plain_values(vars(value), depth - 1) if _is_public(name, "") else {}
                data_names = {key for key, attribute in vars(value).items() if _is_data(key, attribute)}
                # The length of a table, for instance, is of no use without the table, which is no plain value.
                if data_names <= {key.partition(".")[0] for key in inside}:
                    values |= {f"{name}.{key}": tree for key, tree in inside.items()}
                if name in set_by_functions and any(map(process_group.is_group, vars(value).values())):
                    values[name] = {"left": inside}
            elif not isinstance(value, CODE):
                values[name] = _PlainDescribing(name).value(value, name)
    if "__file__" in names:
        for set_names in _set_together(names["__file__"]):
            together = set_names & names.keys()
            if not together <= {key.partition(".")[0] for key in values}:
                values = {name: tree for name, tree in values.items() if name not in together}
    return values


def _is_hidden(name: str) -> bool:
    """Whether values of this name are not recorded: Python's own, or about the processes of a run of several."""
    is_of_processes = OF_PROCESSES.search(name.lower()) and not _is_one_process()
    return not name.isidentifier() or name.startswith("__") or bool(is_of_processes)


def _is_one_process() -> bool:
    """Whether the run is of one process. What it says of its processes then holds for the judge, too."""
    is_distributed = torch.distributed.is_initialized()
    return not is_distributed or torch.distributed.get_world_size() == 1


def _is_data(name: str, value: Any) -> bool:
    """Whether a value counts as data: it is neither code nor a text, which may be a path."""
    is_code = isinstance(value, (*CODE, classmethod, staticmethod, property, str))
    is_of_processes = OF_PROCESSES.search(name.lower())
    return not (is_code or is_of_processes or _is_hidden(name)) and _is_public(name, "")


def _is_object(value: Any) -> bool:
    """Whether a value is of a class of the user's own that keeps values, such as a configuration."""
    # isinstance may ask the value itself.
    kind = type(value)
    if issubclass(kind, (*CODE, torch.nn.Module, torch.Tensor, enum.Enum)) or not hasattr(value, "__dict__"):
        return False
    return issubclass(kind, (argparse.Namespace, types.SimpleNamespace)) or _is_own(_namespace_of(kind))


@functools.cache
def _set_together(file: str) -> list[set[str]]:
    """Return the globals that each function of a file sets; functions that set none are left out.

    A function may set a table and its length, for instance, when they are first needed: one is of no use without the other.
    """
    try:
        root = ast.parse(_text_of(file))
    except SyntaxError:
        return []
    nodes = (node for node in ast.walk(root) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))
    declared = ([inner.names for inner in ast.walk(node) if isinstance(inner, ast.Global)] for node in nodes)
    return [{name for names in lists for name in names} for lists in declared if lists]


def _set_by_functions(file: str) -> set[str]:
    """Return the globals that functions of a file set."""
    return set().union(*_set_together(file))


class _PlainDescribing(Describing):
    """Describes the plain value of one name. `value` raises Unnamed for any other value, for secrets and for much data."""

    def __init__(self, name: str):
        super().__init__(torch.nn.Module())
        self.name = name
        self.left = MOST

    def value(self, value: Any, where: str) -> Any:
        if process_group.is_group(value):
            return super().value(value, where)
        # A type with __members__ is an enumeration.
        is_plain = type(value) in PLAIN or hasattr(type(value), "__members__")
        if not is_plain or not _is_public(self.name, value):
            raise Unnamed("no plain value")
        self.left -= len(value) if isinstance(value, (str, list, tuple, set, dict)) else 1
        if type(value) is dict and not all(isinstance(key, str) and _is_public(key, "") for key in value):
            raise Unnamed("a secret, or no plain dict")
        if self.left < 0:
            raise Unnamed("data")
        return super().value(value, where)
