"""Communication outside the training itself: Python objects, and reasons to stop."""

import contextlib
from collections.abc import Iterator
from typing import TypeVar

import torch.distributed as dist

from lockstep.ground.errors import TrainingFailure, UserError

Said = TypeVar("Said")


def gather_objects(mine: Said, group: dist.ProcessGroup | None = None) -> list[Said]:
    """The object of every rank of a group, or of all, in rank order. Collective."""
    gathered = [mine] * dist.get_world_size(group)
    dist.all_gather_object(gathered, mine, group=group)
    return gathered


def stop_together(problem: str) -> None:
    """Raise the first rank's problem as TrainingFailure on every rank; return if no rank has one (""). Collective."""
    first = next((text for text in gather_objects(problem) if text), "")
    if first:
        raise TrainingFailure(first)


@contextlib.contextmanager
def stopping_together() -> Iterator[None]:
    """For work that a rank does without the others: a UserError of one rank is raised as TrainingFailure on every rank.

    Collective at its end.
    """
    problem = ""
    try:
        yield
    except UserError as error:
        problem = str(error)
    stop_together(problem)


def init_alone() -> None:
    """Make a process group of one rank, for programs outside any launcher."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
