"""How far tensors are from the truth: one pass over the dumps, block by block. numpy and torch only.

    error     |T - T*|_2         every element a little off
    largest   max |T - T*|       one element far off
"""

import math
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from lockstep.config import BETAS, EPS
from lockstep.dump import Dump
from lockstep.optim import decays

BLOCK = 1 << 16  # elements; a float64 block and its companions stay in the cache


@dataclass
class Distance:
    """One tensor of one dump against the truth: absolute errors, and the sizes they are to be seen against."""

    error: float  # infinite, like `largest_error`, if anything is not finite
    largest_error: float
    norm: float  # 2-norm of the true tensor
    largest: float
    own_norm: float  # 2-norm of the dump's tensor
    change: float  # 2-norm of what the tensor should show: itself; of a parameter, its last update

    @property
    def relative(self) -> float:
        return _ratio(self.error, self.norm)

    @property
    def relative_largest(self) -> float:
        return _ratio(self.largest_error, self.largest)


def _ratio(error: float, size: float) -> float:
    if error == 0:
        return 0.0
    return error / size if size > 0 else math.inf


class _Sums:
    """Running 2-norm and maximum of one tensor, in float64; infinite once anything is not finite."""

    def __init__(self):
        self.square, self.largest = 0.0, 0.0

    def add(self, values: torch.Tensor) -> None:
        self.square += float(torch.dot(values, values))
        self.largest = max(self.largest, float(torch.linalg.vector_norm(values, torch.inf)))

    def result(self) -> tuple[float, float]:
        return (math.sqrt(self.square), self.largest) if math.isfinite(self.square) else (math.inf, math.inf)


class _Comparison:
    """Sums of one tensor of one dump and of its truth."""

    def __init__(self):
        self.error, self.true, self.own, self.change = _Sums(), _Sums(), _Sums(), _Sums()

    def add(self, values: torch.Tensor, exact: torch.Tensor, before: torch.Tensor | None = None) -> None:
        self.error.add(values - exact)
        self.true.add(exact)
        self.own.add(values)
        if before is not None:
            self.change.add(exact - before)

    def distance(self, *, of_change: bool = False) -> Distance:
        norm, largest = self.true.result()
        change = self.change.result()[0] if of_change else norm
        return Distance(*self.error.result(), norm, largest, self.own.result()[0], change)


_buffers = threading.local()


def _blocks(sources: list[tuple[Dump, int, str]]):
    """The float64 blocks of several tensors of one size, side by side."""
    if not hasattr(_buffers, "arrays"):
        _buffers.arrays = {}
    readers = [
        dump.blocks(step, name, BLOCK, _buffers.arrays.setdefault(number, np.empty(8 * BLOCK, dtype=np.uint8)))
        for number, (dump, step, name) in enumerate(sources)
    ]
    for blocks in zip(*readers, strict=True):
        yield [block.double() for block in blocks]


@dataclass
class Tensor:
    """One tensor of several dumps: distances from the truth, differences from the first dump, equality of the last two."""

    distances: list[Distance]
    from_first: list[tuple[float, float]]  # (2-norm, maximum) of the difference from the first dump
    last_two_identical: bool  # the same values, bit for bit, whatever their dtypes


def tensor_distances(truths: list[Dump], dumps: list[Dump], step: int, name: str) -> Tensor:
    """One tensor of every dump against its truth (often one truth for all), reading each file once."""
    exact_dumps = list(dict.fromkeys(truths))
    places = [exact_dumps.index(truth) for truth in truths]
    found, apart, same = [_Comparison() for _ in dumps], [_Sums() for _ in dumps], True
    for blocks in _blocks([(source, step, name) for source in [*exact_dumps, *dumps]]):
        exact, values = blocks[: len(exact_dumps)], blocks[len(exact_dumps) :]
        for index, own in enumerate(values):
            found[index].add(own, exact[places[index]])
            if index:
                apart[index].add(own - values[0])
        same = same and torch.equal(values[-1], values[-2 if len(values) > 1 else -1])
    return Tensor([each.distance() for each in found], [each.result() for each in apart], same)


def update_distances(dump: Dump, initial: Dump, step: int, name: str, clip: float) -> dict[str, Distance]:
    """What the optimizer made of this run's own gradient, moments and weights, against the same update in float64.

    `initial` holds the weights before step 1; `clip` is what the gradients were multiplied with. Returns a distance
    for "parameter", and with AdamW for "exp_avg" and "exp_avg_sq" (Loshchilov and Hutter 2019, arXiv 1711.05101):

        m = b1 m + (1 - b1) g    v = b2 v + (1 - b2) g^2    p = p - lr (decay p + (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps))
    """
    options = dump.run["config"]
    adamw, rate = options["optimizer"] == "adamw", options["learning_rate"]
    shape = dump.steps[str(step)]["tensors"][f"parameter/{name}"]["shape"]
    decay = options["weight_decay"] if decays(torch.empty(shape, device="meta")) else 0.0
    kinds = ["exp_avg", "exp_avg_sq", "parameter"] if adamw else ["parameter"]
    before = initial if step == 1 else dump
    sources = [(dump, step, f"gradient/{name}"), (before, step - 1, f"parameter/{name}")]
    sources += [(dump, step, f"{kind}/{name}") for kind in kinds]
    if adamw and step > 1:
        sources += [(dump, step - 1, f"{kind}/{name}") for kind in kinds[:2]]
    found = {kind: _Comparison() for kind in kinds}
    (b1, b2) = BETAS
    for gradient, old, *rest in _blocks(sources):
        gradient = gradient * clip
        if adamw:
            first, second, parameter, *moments = rest
            m, v = moments or (torch.zeros_like(gradient), torch.zeros_like(gradient))
            m = b1 * m + (1 - b1) * gradient
            v = b2 * v + (1 - b2) * gradient.square()
            found["exp_avg"].add(first, m)
            found["exp_avg_sq"].add(second, v)
            direction = m / (1 - b1**step) / ((v / (1 - b2**step)).sqrt() + EPS)
        else:
            (parameter,) = rest
            direction = gradient
        found["parameter"].add(parameter, old - rate * (decay * old + direction), old)
    return {kind: comparison.distance(of_change=kind == "parameter") for kind, comparison in found.items()}


def clip_factor(dump: Dump, step: int) -> float:
    """What clipping multiplied the gradients with, from the norm of the dump's own gradients."""
    bound = dump.run["config"]["max_grad_norm"]
    names = [name for name in dump.steps[str(step)]["tensors"] if name.startswith("gradient/")]
    total = _Sums()
    for name in names:
        for (block,) in _blocks([(dump, step, name)]):
            total.add(block)
    return min(1.0, bound / (total.result()[0] + 1e-6)) if bound > 0 else 1.0


def on_all_cores(work, items: list, size) -> list:
    """[work(item)], the largest first so that no core is left with a big one; torch's own threads are off meanwhile."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # blocks are small: one tensor per core, not one block over all cores
    try:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            order = sorted(range(len(items)), key=lambda index: -size(items[index]))
            results = dict(zip(order, pool.map(lambda index: work(items[index]), order), strict=True))
    finally:
        torch.set_num_threads(threads)
    return [results[index] for index in range(len(items))]
