"""Large tensors in spans of elements, which threads share."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

SPAN = 1 << 20  # elements

Result = TypeVar("Result")


def of_spans(
    compute: Callable[[slice], Result], elements: int, size: int = 1, together: int = 1
) -> list[Result]:
    """Return what `compute` returns for each span of a tensor's elements, in order; of its rows, if these have `size` elements each.

    A tensor without elements has one span. Each but the last has a multiple of `together`. As many threads compute as torch has: numpy lets go of Python's lock where it computes, and so
    does torch. The spans do not depend on the number of threads, so a sum over them has the same bits on every machine.
    """
    step = max(1, SPAN // size // together) * together
    spans = [slice(start, start + step) for start in range(0, max(elements, 1), step)]
    threads = min(torch.get_num_threads(), len(spans))
    if threads == 1:
        return [compute(span) for span in spans]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(compute, spans))
