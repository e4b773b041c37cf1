"""The distances of a step: of what the model computed from the reference, and of every update from the same update in float64."""

import functools
import math
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import Any, TypeVar

import torch

from lockstep.dumps.dump import Dump, Dumps, number_of_elements
from lockstep.ground.errors import TrainingFailure
from lockstep.verdict.distance import (
    BLOCK,
    Distance,
    Measured,
    average_distance,
    clip_factors,
    frozen_distance,
    own_update_distances,
    tensor_distances,
    update_distances,
)
from lockstep.verdict.scalars import Norm

FITTED = 12  # parameters whose updates choose the factor of clipping
SMALL = 1 << 26  # number of elements that are compared in less time than a process pool takes to start
Found = dict[str, Distance]  # by tensor


def measured(names: list[str], references: Dumps, dumps: Dumps, step: int) -> dict[str, Measured]:
    """Measure each of these tensors of a step in the dumps that have it, in their order, against their references."""
    shapes = next(iter(references.values())).expected(step)
    work = functools.partial(tensor_distances, references, dumps, step)
    return dict(
        zip(names, on_all_cores(work, names, [math.prod(shapes[name]) for name in names]), strict=True)
    )


def updates(
    initial: Dump, references: Dumps, dumps: Dumps, step: int, norms: dict[str, Norm]
) -> Iterator[tuple[str, Found]]:
    """Yield (run, distances) for every parameter that a step may have changed: of the parameter, and of what the optimizer keeps of it.

    `initial` holds the weights before step 1. Of a run that is not in `norms`, because its gradients are not all there, only frozen
    parameters are measured.
    """
    items = [
        (run, name)
        for run in norms
        for name in dumps[run].layout.model.trained
        if has_update(dumps[run], step, name)
    ]
    sizes = [
        number_of_elements(dumps[run].steps[step]["tensors"][f"parameter/{name}"]) for run, name in items
    ]
    work = functools.partial(_update, initial, references, dumps, step, norms)
    for (run, name), by_kind in zip(items, on_all_cores(work, items, sizes), strict=True):
        yield run, {f"{kind}/{name}": distance for kind, distance in by_kind.items()}
    for run, dump in dumps.items():
        for name in dump.layout.model.frozen:
            if dump.has(step, f"parameter/{name}"):
                yield run, {f"parameter/{name}": frozen_distance(dump, initial, step, name)}


def _update(
    initial: Dump,
    references: Dumps,
    dumps: Dumps,
    step: int,
    norms: dict[str, Norm],
    item: tuple[str, str],
) -> Found:
    """Return the distances of one parameter by kind, such as "parameter" or "exp_avg". `item` is (run, parameter)."""
    run, name = item
    dump = dumps[run]
    if dump.has_own_optimizer:
        distances = own_update_distances(dump, references[run], initial, step, name)
    else:
        distances = update_distances(dump, initial, step, norms[run].clip, name)
    if "average" in dump.layout.kinds(dump.run["config"]):
        distances["average"] = average_distance(dump, initial, step, name)
    return distances


def has_update(dump: Dump, step: int, name: str) -> bool:
    """Whether a dump has all tensors that the update of a parameter reads and writes."""
    expected = dump.expected(step)
    tensor_names = (f"{kind}/{name}" for kind in dump.layout.kinds(dump.run["config"])[1:])
    updated = [tensor_name for tensor_name in tensor_names if tensor_name in expected]
    return dump.has(step, f"gradient/{name}", *updated) and (step == 1 or dump.has(step - 1, *updated))


def fitting_clip(dump: Dump, initial: Dump, norm: Norm) -> float:
    """Return the clipping factor that fits the run's own updates best: those of some parameters, since others may be wrong.

    Candidates are the factors that libraries use, by the norm that the run recorded and by the exact norm of its gradients.
    """
    options = dump.run["config"]
    factors = list(dict.fromkeys([*clip_factors(options, norm.used), *clip_factors(options, norm.held)]))
    complete = [name for name in dump.layout.model.trained if has_update(dump, norm.step, name)]
    if len(factors) == 1 or not complete or dump.has_own_optimizer:
        return factors[0]
    complete.sort(key=lambda name: math.prod(dump.layout.parameters[name]))

    def error(factor: float) -> float:
        found = (
            next(iter(update_distances(dump, initial, norm.step, factor, name).values()))
            for name in complete[:: max(1, len(complete) // FITTED)]
        )
        relative = sorted(one.error / one.change for one in found if one.change)
        return relative[len(relative) // 4] if relative else 0.0

    errors = [error(factor) for factor in factors]
    # If updates are wrong whatever the factor, another one than torch's is nearer by chance.
    return factors[errors.index(min(errors))] if min(errors) < 0.9 * errors[0] else factors[0]


def verify(items: list[tuple[Dump, int, str]]) -> list[float]:
    """Verify the checksums of tensors that are not compared, because a damaged dump gets no verdict.

    `items` are (dump, step, tensor). Returns the sum of squares of each tensor.
    """
    sizes = [number_of_elements(dump.steps[step]["tensors"][name]) for dump, step, name in items]
    return on_all_cores(_verify_one, items, sizes)


def _verify_one(item: tuple[Dump, int, str]) -> float:
    dump, step, name = item
    return sum(float(block.double().square().sum()) for block in dump.blocks(step, name, BLOCK))


Item = TypeVar("Item")
Made = TypeVar("Made")


def on_all_cores(work: Callable[[Item], Made], items: list[Item], sizes: list[int]) -> list[Made]:
    """Return work(item) for each item, in their order. `sizes` are the items' numbers of elements.

    The largest items are begun first, so that no core is left with a large one at the end. Work is done in processes, because threads
    would wait for each other's turns with the interpreter. Small work is done in this process, before another one would have started.
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
