"""Functions that no file has by a name: a lambda that a module keeps, or a function that is defined inside of another.

One is found again by its place in its file, and is given what it encloses.
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
MOST = 100_000  # characters of JSON


class Names(dict[str, Any]):
    """The names of a script, whose statements run when a function first reads what they define: one that is merely kept runs none."""

    def __init__(self, path: str, definitions: Definitions, value: Callable[[Any], Any]):
        super().__init__(__file__=path, __builtins__=builtins)
        self.definitions, self.value = definitions, value

    def __missing__(self, name: str) -> Any:
        self.definitions.define({name}, self.value)
        return vars(self.definitions.module)[name]


def is_nameless(function: Any) -> bool:
    return isinstance(function, types.FunctionType) and "<" in function.__qualname__


def enclosed(function: types.FunctionType) -> dict[str, Any]:
    """The values that a function encloses, without those that are not there yet."""
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):
            found[name] = cell.cell_contents
    return found


def described(function: types.FunctionType, value: Callable[[Any, str], Any], where: str) -> TREE:
    """As JSON, with what `value` makes of the values that belong to it.

    Raises ValueError for one that encloses a name without a value, a name that it gives other values, or much data.
    """
    code = function.__code__
    if {one.argval for one in dis.get_instructions(code) if one.opname == "STORE_DEREF"} & {
        *code.co_freevars
    }:
        raise ValueError("a function that changes what it encloses")
    own = enclosed(function)
    if len(own) < len(code.co_freevars):
        raise ValueError("a function that encloses a name without a value")
    about = {
        "line": code.co_firstlineno,
        "path": function.__qualname__,
        "digest": _digest(code),
        "enclosed": {name: value(one, f"{where}.{name}") for name, one in own.items()},
        "defaults": value(function.__defaults__, where),
        "named_defaults": value(function.__kwdefaults__, where),
    }
    if len(json.dumps(about)) > MOST:
        raise ValueError("a function that encloses much data")
    return about


def made(about: TREE, source: bytes, names: TREE, value: Callable[[Any], Any]) -> types.FunctionType:
    """The function again, of the file's `source` and with its `names`. Raises ValueError if the file has it no more."""
    whole = compile(source, names["__file__"], "exec", dont_inherit=True)
    place = about["path"], about["line"], about["enclosed"].keys()
    there = [
        one for one in codes_in(whole) if (one.co_qualname, one.co_firstlineno, {*one.co_freevars}) == place
    ]
    if len(there) > 1:  # in one line
        there = [one for one in there if _digest(one) == about["digest"]]
    if len({_digest(one) for one in there}) > 1 or not there:
        file = Path(names["__file__"]).name
        raise ValueError(
            f"{file} has no function {about['path']} in line {about['line']} any more, or several"
        )
    code = there[0]
    cells = tuple(types.CellType(value(about["enclosed"][name])) for name in code.co_freevars)
    function = types.FunctionType(code, names, code.co_name, value(about["defaults"]), cells)
    function.__kwdefaults__ = value(about["named_defaults"])
    return function


def _digest(code: types.CodeType) -> str:
    """Of what it computes; another version of Python compiles it otherwise."""
    constants = [
        _digest(one)
        if isinstance(one, types.CodeType)
        else sorted(map(repr, one))
        if isinstance(one, frozenset)
        else one
        for one in code.co_consts
    ]
    return hashlib.sha256(repr((code.co_code, code.co_names, constants)).encode()).hexdigest()


def codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    """Of the functions that are defined inside."""
    for one in code.co_consts:
        if isinstance(one, types.CodeType):
            yield one
            yield from codes_in(one)
