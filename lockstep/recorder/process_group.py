"""The process group of a judge: one of one process in the place of those of a run of one process, and none of several."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

number = 0  # of the last group that was made: what a script was given of an earlier one is of no use


class NoGroup:
    """In the place of a process group, and of what a script makes of one: a judge has none of several processes."""

    def _refuse(self, *_: Any) -> Any:
        raise RuntimeError("the judge has no process group")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # which Python and torch look for in any object
            raise AttributeError(name)
        return self._refuse()

    __getitem__ = __iter__ = __call__ = _refuse


def is_group(value: Any) -> bool:
    return dist.is_available() and isinstance(value, dist.ProcessGroup)


def group() -> Any:
    """In the place of a recorded process group."""
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else NoGroup()


@contextlib.contextmanager
def of_one(*, needed: bool) -> Iterator[None]:
    """A process group of this process alone, in which a collective changes nothing, where the recorded model may ask for one."""
    if not needed or not dist.is_available() or dist.is_initialized():
        yield
        return
    global number
    number += 1
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
