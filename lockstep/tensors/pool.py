"""The work of a comparison on all cores."""

import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import Any, TypeVar

import torch

from lockstep.errors import TrainingFailure

SMALL = 1 << 26  # elements that are compared before a process pool has started

Item = TypeVar("Item")
Made = TypeVar("Made")


def on_all_cores(work: Callable[[Item], Made], items: list[Item], sizes: list[int]) -> list[Made]:
    """[work(item)], the largest first so that no core is left with a big one.

    In processes: threads would wait for each other's turns with the interpreter. Small work is done here and now,
    before a process would have started.
    """
    if sum(sizes) < SMALL:
        return [work(item) for item in items]
    order = sorted(range(len(items)), key=lambda index: -sizes[index])
    try:
        with ProcessPoolExecutor(os.cpu_count(), get_context("spawn"), _begin, (work,)) as pool:
            results = dict(zip(order, pool.map(_call, [items[index] for index in order]), strict=True))
    except BrokenProcessPool as error:
        raise TrainingFailure(
            "comparison: a process was killed, perhaps because memory ran out; compare fewer dumps at once"
        ) from error
    return [results[index] for index in range(len(items))]


_work: Callable[[Any], Any]  # what a process of the pool does with every item


def _begin(work: Callable[[Any], Any]) -> None:
    global _work
    _work = work
    torch.set_num_threads(1)


def _call(item: Any) -> Any:
    return _work(item)
