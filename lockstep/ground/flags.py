"""A flag is one field of a dataclass: its type and default, and in its metadata all else that is known about it.

The parser, the schema of what a run records, and what two runs must agree in follow from the fields. Nothing here
imports torch.
"""

import argparse
import functools
import math
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, field, fields
from pathlib import Path
from typing import Any, Literal, NoReturn

from lockstep.ground.errors import UserError

# What two runs that are compared must agree in: for their losses and their tensors, or for their tensors alone.
Same = Literal["losses", "tensors"]


def flag(
    default: Any = MISSING,
    help: str = "",
    *,
    low: float | None = None,
    above: float | None = None,
    high: float | None = None,
    choices: Sequence[object] | None = None,
    parse: Callable[[str], object] | None = None,
    also: str | None = None,
    metavar: str | None = None,
    const: object = None,
    recorded: bool = True,
    recorded_as: object = None,
    same: Same | None = None,
) -> Any:
    """A field of a dataclass of flags.

    low, above, high: the range of a number: at least `low`, more than `above`, at most `high`.
    choices: the values that are allowed; those of a `Literal` are known.
    parse: makes the value of the text on a command line, where its type does not say how.
    also: another name.
    const: the value of the flag alone, without one on the command line.
    recorded: whether a run records it; `recorded_as` is the type of what it records, if that is another.
    same: which comparisons refuse two runs that differ in it.
    """
    metadata = {name: value for name, value in locals().items() if name != "default"}
    return field(default=default, metadata=metadata, kw_only=default is MISSING)


def add_flag(parser: argparse.ArgumentParser, of: type, each: Field, also: str | None = None) -> None:
    """Give a parser the flag that a field of the dataclass `of` describes, under its own name and `also`."""
    metadata = each.metadata
    names = [f"--{name}" for name in (each.name, also, metadata["also"]) if name]
    default = None if each.default is MISSING else each.default
    kind = _kind_of(of, each.name)
    if is_switch(of, each):
        parser.add_argument(*names, dest=each.name, action="store_true", help=metadata["help"])
        return
    options: dict[str, Any] = {"metavar": metadata["metavar"]} if metadata["metavar"] else {}
    if metadata["const"] is not None:
        options |= {"nargs": "?", "const": metadata["const"]}
    choices = choices_of(of, each)
    if choices:
        options["choices"] = choices
    parse = metadata["parse"] or (
        number(kind, metadata["low"], metadata["above"], metadata["high"])
        if kind in (int, float)
        else _WORDS.get(kind, str)
    )
    parser.add_argument(*names, dest=each.name, type=parse, default=default, help=metadata["help"], **options)


def is_switch(of: type, each: Field) -> bool:
    """Whether a flag takes no value: it is on where it is given."""
    return _kind_of(of, each.name) is bool and each.default is False


def choices_of(of: type, each: Field) -> tuple[object, ...] | None:
    """The values that a flag can have, if they are listed."""
    if each.metadata["choices"] is not None:
        return tuple(each.metadata["choices"])
    kind = _kind_of(of, each.name)
    return typing.get_args(kind) if typing.get_origin(kind) is Literal else None


def recorded(of: type) -> list[Field]:
    """The fields of a dataclass of flags that a run records."""
    return [option for option in fields(of) if option.metadata.get("recorded")]


def must_agree(of: type, level: Same) -> list[str]:
    """The names of the flags in which two runs must agree, for a comparison of their losses or of their tensors."""
    levels = ("losses",) if level == "losses" else ("losses", "tensors")
    return [option.name for option in fields(of) if option.metadata.get("same") in levels]


# The types of a dataclass's fields, kept because a parser asks for each of its fields
_hints = functools.cache(typing.get_type_hints)


def _kind_of(of: type, name: str) -> Any:
    """The type of a field, without the None that it may be."""
    hint = _hints(of)[name]
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        kinds = [kind for kind in typing.get_args(hint) if kind is not type(None)]
        return kinds[0] if len(kinds) == 1 else hint
    return hint


def number(
    kind: type[int] | type[float], low: float | None, above: float | None = None, high: float | None = None
) -> Callable[[str], float]:
    """A parser of numbers in a range. It raises ArgumentTypeError, which argparse expects."""

    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            what = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"{text!r} is not {what}") from None
        is_inside = (
            (low is None or value >= low)
            and (above is None or value > above)
            and (high is None or value <= high)
        )
        if not math.isfinite(value) or not is_inside:
            bounds = {"at least": low, "above": above, "at most": high}
            allowed = " and ".join(f"{word} {bound}" for word, bound in bounds.items() if bound is not None)
            raise argparse.ArgumentTypeError(f"{text} is out of range; it must be {allowed or 'finite'}")
        return value

    return parse


def true_or_false(text: str) -> bool:
    if text not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return text == "true"


_WORDS: dict[Any, Callable[[str], object]] = {bool: true_or_false, Path: Path}


class Parser(argparse.ArgumentParser):
    """Raises UserError where argparse would end the process."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see {self.prog} --help")


class Help(argparse.ArgumentDefaultsHelpFormatter):
    """Adds the default to a flag's help, unless the help says it in words."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if "(default: " in (action.help or "") else super()._get_help_string(action)
