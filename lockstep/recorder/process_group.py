"""The process group of a judge: one of a single process if the run had a single process, otherwise none."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

# The number of the last group that was made. What a script got from an earlier group is of no use any more.
number = 0


class NoGroup:
    """Stands for a process group of several processes, and for what a script makes of one: a judge has none."""

    def _refuse(self, *_: Any) -> Any:
        raise RuntimeError("the judge has no process group")

    def __getattr__(self, name: str) -> Any:
        # Python and torch look for such names in any object.
        if name.startswith("__"):
            raise AttributeError(name)
        return self._refuse()

    __getitem__ = __iter__ = __call__ = _refuse


def is_group(value: Any) -> bool:
    return isinstance(value, dist.ProcessGroup)


def group() -> Any:
    """Return what stands for a recorded process group."""
    return dist.group.WORLD if dist.is_initialized() else NoGroup()


@contextlib.contextmanager
def of_one(*, needed: bool) -> Iterator[None]:
    """Make a process group of this process alone, if the recorded model may ask for one.

    A collective in it changes nothing.
    """
    if not needed or dist.is_initialized():
        yield
        return
    global number
    number += 1
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
