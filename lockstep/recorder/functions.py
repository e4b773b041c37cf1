"""Functions that no file has by a name: a lambda that a module keeps, or a function that is defined inside of another.

One is found again by its place in its file, and is given what it encloses.
"""

import hashlib
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

TREE = dict[str, Any]


def is_nameless(function: Any) -> bool:
    return isinstance(function, types.FunctionType) and "<" in function.__qualname__


def described(function: types.FunctionType, value: Callable[[Any, str], Any], where: str) -> TREE:
    """As JSON, with what `value` makes of the values that belong to it. Raises ValueError for one that encloses a name without a value."""
    code = function.__code__
    cells = function.__closure__ or ()
    enclosed = {name: cell.cell_contents for name, cell in zip(code.co_freevars, cells, strict=True)}
    return {
        "line": code.co_firstlineno,
        "path": function.__qualname__,
        "digest": _digest(code),
        "enclosed": {name: value(one, f"{where}.{name}") for name, one in enclosed.items()},
        "defaults": value(function.__defaults__, where),
        "named_defaults": value(function.__kwdefaults__, where),
    }


def made(about: TREE, source: bytes, names: TREE, value: Callable[[Any], Any]) -> types.FunctionType:
    """The function again, of the file's `source` and with its `names`. Raises ValueError if the file has it no more."""
    whole = compile(source, names["__file__"], "exec", dont_inherit=True)
    place = about["path"], about["line"], about["enclosed"].keys()
    there = [
        one for one in _codes(whole) if (one.co_qualname, one.co_firstlineno, {*one.co_freevars}) == place
    ]
    if len(there) > 1:  # in one line
        there = [one for one in there if _digest(one) == about["digest"]]
    if not there:
        file = Path(names["__file__"]).name
        raise ValueError(f"{file} has no function {about['path']} in line {about['line']} any more")
    code = there[0]
    cells = tuple(types.CellType(value(about["enclosed"][name])) for name in code.co_freevars)
    function = types.FunctionType(code, names, code.co_name, value(about["defaults"]), cells)
    function.__kwdefaults__ = value(about["named_defaults"])
    return function


def _digest(code: types.CodeType) -> str:
    """Of what it computes; another version of Python compiles it otherwise."""
    constants = [one for one in code.co_consts if not isinstance(one, types.CodeType)]
    return hashlib.sha256(repr((code.co_code, code.co_names, constants)).encode()).hexdigest()


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    for one in code.co_consts:
        if isinstance(one, types.CodeType):
            yield one
            yield from _codes(one)
