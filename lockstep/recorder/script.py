"""The classes of a script that trains, without the training.

A class of a script is made again of its definition and of what that refers to: imports, functions, other classes, assignments. Nothing else
of the script runs. A name that has a plain value, such as a setting from the command line, has the value of the recorded run.
"""

import ast
import dis
import functools
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from lockstep.ground import user_file
from lockstep.ground.errors import communicates
from lockstep.recorder.process_group import NoGroup

DEFINING = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
ASSIGNING = (ast.Assign, ast.AnnAssign, ast.AugAssign)
STAR = "*"


class Script:
    def __init__(self, path: Path, source: bytes):
        self.path = path
        body = ast.parse(source, str(path)).body
        self.future = [one for one in body if isinstance(one, ast.ImportFrom) and one.module == "__future__"]
        own = [one for one in body if _only_binds(one)]
        inside = [one for statement in body if statement not in own for one in _binding(statement)]
        # Of a name that several have, which one counts is not known
        bound = Counter(name for one in own + inside for name in _bound(one))
        own += [one for one in inside if all(bound[name] == 1 for name in _bound(one))]
        self.statements = [(one, _bound(one)) for one in sorted(own, key=lambda one: one.lineno)]

    def needed(self, names: set[str], has_value: Callable[[str], bool]) -> set[str]:
        """These names of the script, and all that their definitions refer to; not what the names that have values are computed from."""
        found: set[str] = set()
        new = names
        while new:
            found |= new
            defined = {name for name in new if not has_value(name)}
            read = [self._names_read(one) for one, bound in self.statements if bound & defined]
            new = set().union(*read) - found
        return found

    def _names_read(self, statement: ast.stmt) -> set[str]:
        return set(names_of(self.compiled(statement)))

    def compiled(self, statement: ast.stmt) -> types.CodeType:
        body = [*(one for one in self.future if one is not statement), statement]
        return compile(ast.Module(body, []), str(self.path), "exec")


class Definitions:
    """What is found by name in a script. `values` are those that the recording has, which `value` reads."""

    def __init__(self, script: Script, package: str | None, values: Mapping[str, Any]):
        self.script, self.values = script, values
        self.module = types.ModuleType(user_file.module_name(script.path))
        self.module.__dict__.update(__file__=str(script.path), __package__=package)
        self.done: set[Any] = set()

    def enlist(self) -> None:
        """Let the module be where Python looks for it, as dataclasses do."""
        sys.modules[self.module.__name__] = self.module

    def find(self, path: str, value: Callable[[Any], Any]) -> Any:
        self.define({path.partition(".")[0]}, value)
        return functools.reduce(getattr, path.split("."), self.module)

    def define(self, names: set[str], value: Callable[[Any], Any]) -> None:
        """Let the module have these names, as far as the script has them."""
        needed = self.script.needed({*names, STAR}, self.values.__contains__)
        given = {name: value(self.values[name]) for name in sorted((needed & self.values.keys()) - self.done)}
        self.done |= given.keys()
        vars(self.module).update(given)
        for statement, bound in self.script.statements:
            if statement not in self.done and bound & needed - self.values.keys():
                self.done.add(statement)
                self._run(statement)
                vars(self.module).update(given)  # which an `import *` computes again

    def _run(self, statement: ast.stmt) -> None:
        try:
            exec(self.script.compiled(statement), vars(self.module))
        except SystemExit as ended:  # such as a parser's, which is given the judge's command line
            raise ImportError(f"line {statement.lineno} of {self.script.path} ends the program") from ended
        except Exception as error:
            if not (isinstance(statement, ASSIGNING) and communicates(error)):
                raise
            vars(self.module).update(dict.fromkeys(_bound(statement), NoGroup()))


def _only_binds(statement: ast.stmt) -> bool:
    """Whether a statement does nothing but give names; so do an `if` and a `try` that are made of such."""
    if isinstance(statement, (ast.If, ast.Try)):
        return all(_only_binds(one) for one in _inside(statement))
    return isinstance(statement, (*DEFINING, *ASSIGNING, ast.Pass))


def _binding(statement: ast.stmt) -> Iterator[ast.stmt]:
    """The statements inside of one that does more, such as `if __name__ == "__main__"`, that only bind."""
    if isinstance(statement, (ast.If, ast.Try)):
        for one in _inside(statement):
            yield from [one] if _only_binds(one) else _binding(one)


def _inside(statement: ast.If | ast.Try) -> Iterator[ast.stmt]:
    yield from (*statement.body, *statement.orelse)
    if isinstance(statement, ast.Try):
        yield from (one for handler in statement.handlers for one in handler.body)
        yield from statement.finalbody


def _bound(statement: ast.stmt) -> set[str]:
    """The names that a statement gives, and those of what it gives attributes or elements."""
    if isinstance(statement, (ast.If, ast.Try)):
        return set().union(*map(_bound, _inside(statement)))
    if isinstance(statement, (ast.Import, ast.ImportFrom)):
        return {(one.asname or one.name).partition(".")[0] for one in statement.names}
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return {statement.name}
    targets = getattr(statement, "targets", None) or [getattr(statement, "target", statement)]
    return set().union(*map(_roots, targets))


def _roots(target: ast.AST) -> set[str]:
    """Of `a, b.c = ...`, a and b."""
    while isinstance(target, (ast.Attribute, ast.Subscript, ast.Starred)):
        target = target.value
    if isinstance(target, (ast.Tuple, ast.List)):
        return set().union(*map(_roots, target.elts))
    return {target.id} if isinstance(target, ast.Name) else set()


def names_of(code: types.CodeType) -> Iterator[str]:
    """The names of the file that code reads, not those of its own functions and attributes."""
    for one in dis.get_instructions(code):
        if one.opname.startswith(("LOAD_NAME", "LOAD_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS")):
            yield one.argval
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from names_of(inner)
