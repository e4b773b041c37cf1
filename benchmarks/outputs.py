"""--output of the benchmarks: looked at before the minutes of work, and nobody else's file is replaced."""

import argparse
from collections.abc import Callable
from pathlib import Path

from lockstep.ground.errors import UserError
from lockstep.ground.files import FIGURE, require_ours, require_writable_file


def output(begins: str, **beside: str) -> Callable[[str], Path]:
    """For argparse: the path of a result that `begins` so.

    `beside` it go a page, `md="# Its title"`, or a figure, `png=""`.
    """
    marks = {None: begins.encode(), **{f".{suffix}": mark.encode() for suffix, mark in beside.items()}}

    def checked(text: str) -> Path:
        for suffix, mark in marks.items():
            path = Path(text).with_suffix(suffix) if suffix else Path(text)
            try:
                require_writable_file(path, "")
                require_ours(path, "", FIGURE if suffix == ".png" else mark, anywhere=suffix == ".png")
            except UserError as error:  # argparse names the option
                raise argparse.ArgumentTypeError(str(error).lstrip(": ")) from error
        return Path(text)

    return checked
