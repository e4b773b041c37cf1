"""The classes of a script that trains, without the training.

A class of a script is made again from its definition and from what that refers to: imports, functions, other
classes, assignments. Nothing else of the script runs. A name that has a plain value, such as a setting from
the command line, has the value of the recorded run.
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
from lockstep.ground.errors import communicates, first_line
from lockstep.recorder.process_group import NoGroup

DEFINING = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
ASSIGNING = (ast.Assign, ast.AnnAssign, ast.AugAssign)
STAR = "*"


class Script:
    """The statements of a script that only bind names."""

    def __init__(self, path: Path, source: bytes):
        self.path = path
        body = ast.parse(source, str(path)).body
        self.future = [
            node for node in body if isinstance(node, ast.ImportFrom) and node.module == "__future__"
        ]
        binding = [node for node in body if _only_binds(node)]
        inner = [node for statement in body if statement not in binding for node in _bindings(statement)]
        # If several statements bind a name, it is not known which one counts.
        times = Counter(name for node in binding + inner for name in _bound(node))
        binding += [node for node in inner if all(times[name] == 1 for name in _bound(node))]
        self.statements = [(node, _bound(node)) for node in sorted(binding, key=lambda node: node.lineno)]

    def needed(self, names: set[str], has_value: Callable[[str], bool]) -> set[str]:
        """Return these names of the script, and all names that their definitions refer to.

        If a name has a value, the names that it is computed from are left out.
        """
        needed: set[str] = set()
        new = names
        while new:
            needed |= new
            defined = {name for name in new if not has_value(name)}
            read = [self._names_read(statement) for statement, bound in self.statements if bound & defined]
            new = set().union(*read) - needed
        return needed

    def _names_read(self, statement: ast.stmt) -> set[str]:
        return set(names_of(self.compiled(statement)))

    def compiled(self, statement: ast.stmt) -> types.CodeType:
        """Return the code of one statement, with the script's imports from __future__."""
        body = [*(future for future in self.future if future is not statement), statement]
        return compile(ast.Module(body, []), str(self.path), "exec")


class Definitions:
    """The module of a script, which gets what the script defines when a name is asked for.

    `values` are the recorded values, by name. The methods are given a function that reads one, `value`.
    """

    def __init__(self, script: Script, package: str | None, values: Mapping[str, Any]):
        self.script, self.values = script, values
        self.module = types.ModuleType(user_file.module_name(script.path))
        self.module.__dict__.update(__file__=str(script.path), __package__=package)
        # Statements that have run, and names whose values are read
        self.done: set[Any] = set()
        self.given: dict[str, Any] = {}  # the values that were read

    def enlist(self) -> None:
        """Register the module with Python. Dataclasses look it up."""
        sys.modules[self.module.__name__] = self.module

    def find(self, path: str, value: Callable[[Any], Any]) -> Any:
        """Return what a path of names leads to, such as CLASS.METHOD."""
        self.define({path.partition(".")[0]}, value)
        return functools.reduce(getattr, path.split("."), self.module)

    def define(self, names: set[str], value: Callable[[Any], Any]) -> None:
        """Give the module these names, as far as the script has them."""
        needed = self.script.needed({*names, STAR}, self.values.__contains__)
        for name in sorted(needed & self.values.keys()):
            if name not in self.done:
                # Before it is read: what it refers to may need it, too.
                self.done.add(name)
                self.given[name] = vars(self.module)[name] = value(self.values[name])
        self._run_those_of(needed - self.values.keys())

    def _run_those_of(self, names: set[str]) -> None:
        """Run the statements that bind these names and have not run."""
        for statement, bound in self.script.statements:
            if statement not in self.done and bound & names:
                self.done.add(statement)
                self._run(statement)
                # An `import *` may have set these names otherwise.
                vars(self.module).update(self.given)

    def _run(self, statement: ast.stmt) -> None:
        try:
            exec(self.script.compiled(statement), vars(self.module))
        # Such as that of a parser, which is given the judge's command line
        except SystemExit as request:
            raise ImportError(f"line {statement.lineno} of {self.script.path} ends the program") from request
        except NameError as error:
            # Such as a registry, whose value has the class that is about to be added to it
            if error.name is None or error.name not in self.values.keys() - self.given.keys():
                raise
            self._run_those_of(self.script.needed({error.name}, self.given.__contains__))
            if error.name not in vars(self.module):
                raise
            self._run(statement)
        except Exception as error:
            if not (isinstance(statement, ASSIGNING) and communicates(error)):
                raise ImportError(
                    f"line {statement.lineno} of {self.script.path} fails without the training: {type(error).__name__}: {first_line(error)}"
                ) from error
            vars(self.module).update(dict.fromkeys(_bound(statement), NoGroup()))


def _only_binds(statement: ast.stmt) -> bool:
    """Whether a statement only binds names. An `if` or a `try` does so if all statements inside do."""
    if isinstance(statement, (ast.If, ast.Try)):
        return all(_only_binds(inner) for inner in _statements_inside(statement))
    return isinstance(statement, (*DEFINING, *ASSIGNING, ast.Pass))


def _bindings(statement: ast.stmt) -> Iterator[ast.stmt]:
    """Yield the statements that only bind names inside of one that does more, such as `if __name__ == ...`."""
    if isinstance(statement, (ast.If, ast.Try)):
        for inner in _statements_inside(statement):
            yield from [inner] if _only_binds(inner) else _bindings(inner)


def _statements_inside(statement: ast.If | ast.Try) -> Iterator[ast.stmt]:
    yield from (*statement.body, *statement.orelse)
    if isinstance(statement, ast.Try):
        yield from (inner for handler in statement.handlers for inner in handler.body)
        yield from statement.finalbody


def _bound(statement: ast.stmt) -> set[str]:
    """Return the names that a statement binds, and those of objects whose attributes or elements it sets."""
    if isinstance(statement, (ast.If, ast.Try)):
        return set().union(*map(_bound, _statements_inside(statement)))
    if isinstance(statement, (ast.Import, ast.ImportFrom)):
        return {(alias.asname or alias.name).partition(".")[0] for alias in statement.names}
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return {statement.name}
    targets = getattr(statement, "targets", None) or [getattr(statement, "target", statement)]
    return set().union(*map(_root_names, targets))


def _root_names(target: ast.AST) -> set[str]:
    """Return the names that an assignment's target begins with: a and b for `a, b.c = ...`."""
    while isinstance(target, (ast.Attribute, ast.Subscript, ast.Starred)):
        target = target.value
    if isinstance(target, (ast.Tuple, ast.List)):
        return set().union(*map(_root_names, target.elts))
    return {target.id} if isinstance(target, ast.Name) else set()


def names_of(code: types.CodeType) -> Iterator[str]:
    """Yield the file's names that code reads, not those of local variables and attributes."""
    for instruction in dis.get_instructions(code):
        if instruction.opname.startswith(("LOAD_NAME", "LOAD_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS")):
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from names_of(constant)
