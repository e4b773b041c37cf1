"""The functions that led to a call, and what their first arguments are, such as the object whose method one is."""

import sys
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any


def callers(are_looked_into: Callable[[CodeType], bool]) -> Iterator[tuple[CodeType, Any]]:
    """Yield (code, first argument) of each caller, the nearest first. The argument is None for code that is not looked into.

    Looking into a frame keeps what its variables hold now, such as a batch or a loss with its graph. So few frames should be looked into.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        code = frame.f_code
        is_seen = bool(code.co_argcount) and are_looked_into(code)
        yield code, frame.f_locals.get(code.co_varnames[0]) if is_seen else None
