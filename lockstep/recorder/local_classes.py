"""Classes that a function defines, such as a model inside of `main`. No file has them by a name.

Such a class is made again from its place in its file, and is given what its methods enclose.
"""

import builtins
import functools
import inspect
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lockstep.recorder import functions
from lockstep.recorder.functions import TREE
from lockstep.recorder.script import names_of


def is_local(kind: type) -> bool:
    return "<locals>" in kind.__qualname__


def described(kind: type, source: bytes, value: Callable[[Any], Any]) -> TREE:
    """Describe a class as JSON. `source` is its file; `value(v)` returns the JSON of what it encloses, or of a class that it is derived of.

    Raises ValueError if the file has not one class of this path, or if a value is not known, as what only the class's body reads.
    """
    code = _code_in(source, kind.__qualname__)
    enclosed: TREE = {}
    for attribute in vars(kind).values():
        parts = (attribute.fget, attribute.fset) if isinstance(attribute, property) else (attribute,)
        for part in parts:
            function = inspect.unwrap(getattr(part, "__func__", part)) if callable(part) else part
            enclosed |= functions.enclosed(function) if isinstance(function, types.FunctionType) else {}
    missing = [name for name in code.co_freevars if name not in enclosed]
    if missing:
        raise ValueError(f"a class whose body reads {missing[0]} of the function that defines it")
    return {
        "path": kind.__qualname__,
        "digest": functions.digest_of(code),
        # Methods may name the class itself, as for super.
        "enclosed": {n: None if enclosed[n] is kind else value(enclosed[n]) for n in code.co_freevars},
        "itself": [name for name in code.co_freevars if enclosed[name] is kind],
        "bases": [value(base) for base in kind.__bases__],
    }


def made(about: TREE, names: TREE, value: Callable[[Any], Any]) -> type:
    """Make the class again from its file, with `names` as its globals.

    Raises ValueError if the file no longer has it.
    """
    code = _code_in(Path(names["__file__"]).read_bytes(), about["path"])
    if functions.digest_of(code) != about["digest"]:
        raise ValueError(f"the class {about['path']} is no longer what it was")
    cells = [
        types.CellType() if name in about["itself"] else types.CellType(value(about["enclosed"][name]))
        for name in code.co_freevars
    ]
    body = types.FunctionType(code, names, code.co_name, None, tuple(cells))
    kind: type = builtins.__build_class__(body, code.co_name, *map(value, about["bases"]))
    for name, cell in zip(code.co_freevars, cells, strict=True):
        if name in about["itself"]:
            cell.cell_contents = kind
    return kind


def names_read(source: bytes, path: str) -> set[str]:
    """Return the names of its file that a class reads."""
    return set(names_of(_code_in(source, path)))


@functools.lru_cache(maxsize=64)  # it is asked for each module of a class
def _code_in(source: bytes, path: str) -> types.CodeType:
    """Return the code of the body of a class. Raises ValueError if the file has not one class of this path."""
    file_code = compile(source, "", "exec", dont_inherit=True)
    found = [code for code in functions.codes_in(file_code) if code.co_qualname == path]
    if len(found) != 1:
        raise ValueError(f"its file has {len(found)} classes {path}")
    return found[0]
