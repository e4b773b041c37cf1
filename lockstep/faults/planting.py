"""The argument of a planted fault: its run and the strategy's handles."""

from collections.abc import Generator
from typing import Any

from lockstep.faults.handles import Handles
from lockstep.faults.patches import PatchedRun

# A fault: before its `yield` the strategy is not built; `yield` gives it, of whatever class.
Plant = Generator[None, Any, None]


class Planting(PatchedRun):
    """The run that a fault is planted in, and the handles of its strategy."""

    handles: Handles
