"""Functions that no file has by a name: a lambda that a module keeps, or a function that is defined inside of another.

Such a function is found again by its place in its file, and is given the values that it encloses.
"""

import builtins
import contextlib
import dis
import hashlib
import json
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lockstep.recorder.script import Definitions

TREE = dict[str, Any]
MOST = 100_000  # characters of a function's JSON


class Names(dict[str, Any]):
    """The globals of a script's functions. A statement of the script runs when a function first reads what it defines.

    So a function that is kept and never called runs no statement.
    """

    def __init__(self, path: str, definitions: Definitions, value: Callable[[Any], Any]):
        super().__init__(__file__=path, __builtins__=builtins)
        self.definitions, self.value = definitions, value

    def __missing__(self, name: str) -> Any:
        self.definitions.define({name}, self.value)
        return vars(self.definitions.module)[name]


def is_nameless(function: Any) -> bool:
    return isinstance(function, types.FunctionType) and "<" in function.__qualname__


def enclosed(function: types.FunctionType) -> dict[str, Any]:
    """Return the values that a function encloses, by name. Names without a value yet are left out."""
    values = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):
            values[name] = cell.cell_contents
    return values


def described(function: types.FunctionType, value: Callable[[Any, str], Any], where: str) -> TREE:
    """Describe a function as JSON. `value(v, where)` returns the JSON of a value that it encloses or has as a default.

    Raises ValueError if the function encloses a name without a value, a name that it assigns to, or much data.
    """
    code = function.__code__
    if {step.argval for step in dis.get_instructions(code) if step.opname == "STORE_DEREF"} & {
        *code.co_freevars
    }:
        raise ValueError("a function that changes what it encloses")
    enclosed_values = enclosed(function)
    if len(enclosed_values) < len(code.co_freevars):
        raise ValueError("a function that encloses a name without a value")
    description = {
        "line": code.co_firstlineno,
        "path": function.__qualname__,
        "digest": digest_of(code),
        "enclosed": {name: value(v, f"{where}.{name}") for name, v in enclosed_values.items()},
        "defaults": value(function.__defaults__, where),
        "named_defaults": value(function.__kwdefaults__, where),
    }
    if len(json.dumps(description)) > MOST:
        raise ValueError("a function that encloses much data")
    return description


def made(about: TREE, names: TREE, value: Callable[[Any], Any]) -> types.FunctionType:
    """Make the function again from its file, with `names` as its globals.

    Raises ValueError if the file no longer has it, or has several in its place.
    """
    file = Path(names["__file__"])
    file_code = compile(file.read_bytes(), file, "exec", dont_inherit=True)
    place = about["path"], about["line"], about["enclosed"].keys()
    candidates = [
        code
        for code in codes_in(file_code)
        if (code.co_qualname, code.co_firstlineno, {*code.co_freevars}) == place
    ]
    # One line may have several functions.
    if len(candidates) > 1:
        candidates = [code for code in candidates if digest_of(code) == about["digest"]]
    if len({digest_of(code) for code in candidates}) > 1 or not candidates:
        raise ValueError(
            f"{file.name} has no function {about['path']} in line {about['line']} any more, or several"
        )
    code = candidates[0]
    cells = tuple(types.CellType(value(about["enclosed"][name])) for name in code.co_freevars)
    function = types.FunctionType(code, names, code.co_name, value(about["defaults"]), cells)
    function.__kwdefaults__ = value(about["named_defaults"])
    return function


def digest_of(code: types.CodeType) -> str:
    """Return a hash of what code computes. Another version of Python compiles the same source to other code."""
    constants = [
        digest_of(constant)
        if isinstance(constant, types.CodeType)
        else sorted(map(repr, constant))
        if isinstance(constant, frozenset)
        else constant
        for constant in code.co_consts
    ]
    return hashlib.sha256(repr((code.co_code, code.co_names, constants)).encode()).hexdigest()


def codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield the code of all functions that are defined inside, at any depth."""
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield constant
            yield from codes_in(constant)
