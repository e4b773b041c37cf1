"""Record every step, to the end of the run: which samples, which learning rates, how often the schedule was stepped.

    RUN/rank_R/run_N.json      {"steps": [{...}, ...]}, at most 256 steps in each file

A step has:

    samples            for each micro batch, the hashes of its samples
    ends               for each micro batch, by tensor: further hashes of its samples (lockstep/recorder/hashes.py), if
                       samples without a mask are of several lengths
    uneven             whether tensors have other numbers of rows, such as nodes and edges: a row may be no sample
    rates              the learning rates
    optimizers         the numbers of the optimizers that stepped
    scheduled          {by whom a schedule was stepped: how often}
    data_sets          the sizes of the data sets
    shuffled           whether a DistributedSampler was to shuffle the samples
    replicas           among how many replicas DistributedSamplers divide the samples
    given              the ranks whose samples they give
    loaded             for each of the first batches of loaders, a hash of what it has for each sample
    orders             the epochs that shuffling DistributedSamplers are told
    sources            for each micro batch, the number of the sampler that it is of
    with_replacement   whether a RandomSampler draws with replacement
    cut                how often a loader begins anew after this step before it has given all samples
    evaluated          how many calls in evaluation mode were trained on

Hashes are made on the model's device, and fetched for many steps at once.
"""

import contextlib
import functools
import json
import sys
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._pytree import tree_leaves
from torch.utils.data import RandomSampler, WeightedRandomSampler
from torch.utils.data.dataloader import _BaseDataLoaderIter
from torch.utils.data.distributed import DistributedSampler

from lockstep.ground.files import write_text
from lockstep.recorder.hashes import hashes, hashes_of_ends
from lockstep.recorder.patches import Undo, replace, see_calls

STEPS_AT_ONCE = 256
# How deep objects in a batch are nested that are looked at, and how many attributes they have at most
DEEPEST, MOST = 3, 100
# How many batches of loaders are hashed as they are fetched
BATCHES = 8
# Samples of tensors with at most so many dims may be sequences, which are padded
DIMS_OF_SEQUENCES = 3

# Of each tensor of a micro batch: hashes of its samples without what may be padding
Ends = list[dict[str, torch.Tensor]]


class Loaders:
    """Watches the loaders and samplers that the loop goes over.

    `lockstep.record` with a script begins before the model's first call: its batch has been fetched by then.
    """

    def __init__(self) -> None:
        # Sampler -> its number
        self.samplers = weakref.WeakKeyDictionary[DistributedSampler, int]()
        # The sampler that the last batch is of
        self.source: Any = None
        # The loader that the last batch is of, as the id of what chooses its samples
        self.loader = 0
        # Loaders that are not at their end, and those whose batches are trained on
        self.unfinished, self.trained = set[int](), set[int]()
        # Batches, and calls of the model, so far
        self.fetched = self.calls = 0
        self.begin()
        self.removing = [
            see_calls(torch.utils.data.DataLoader, "__iter__", self._see_data),
            see_calls(DistributedSampler, "__iter__", self._see_order),
            self._see_batches(),
        ]

    def begin(self) -> None:
        """Begin a step."""
        self.data_sets, self.replicas, self.shuffled = set[int](), set[int](), False
        # The first batches, by hashes of what they have for each sample
        self.loaded: list[dict[str, Any]] = []
        # The ranks whose samples DistributedSamplers give
        self.given = set[int]()
        self.with_replacement, self.cut = False, 0
        self.orders: list[dict[str, int]] = []
        # For each call of the model in this step, the number of the DistributedSampler; -1 if its batch is of none
        self.sources: list[int] = []

    def _see_data(self, loader: Any) -> None:
        """Note that a loader begins to give batches, and the size of its data set."""
        loader_id = id(loader._index_sampler)
        self.cut += loader_id in self.trained and (loader_id in self.unfinished or _drops_samples(loader))
        self.unfinished.discard(loader_id)
        # An iterable data set has no length.
        with contextlib.suppress(TypeError):
            self.data_sets.add(len(loader.dataset))

    def _see_order(self, sampler: DistributedSampler) -> None:
        """Note that a DistributedSampler begins to give samples."""
        if sampler.shuffle:
            self.shuffled = True
            number = self.samplers.setdefault(sampler, len(self.samplers))
            order = {"sampler": number, "epoch": sampler.epoch, "samples": sampler.num_samples}
            self.orders.append({**order, "calls": len(self.sources)})
        self.replicas.add(sampler.num_replicas)
        self.given.add(sampler.rank)

    def _see_batches(self) -> Undo:
        """Watch every batch that a loader gives. Return a function that ends this."""
        real = _BaseDataLoaderIter.__next__

        @functools.wraps(real)
        def following(iterator: Any) -> Any:
            self.loader = id(iterator._index_sampler)
            self.unfinished.discard(self.loader)
            # It raises StopIteration after the last batch.
            batch = real(iterator)
            self.unfinished.add(self.loader)
            # A batch may be anything.
            with contextlib.suppress(Exception):
                self._see_batch(batch)
            self.source = getattr(iterator._index_sampler, "sampler", None)
            return batch

        return replace(_BaseDataLoaderIter, "__next__", following)

    def _see_batch(self, batch: Any) -> None:
        """Hash the samples of a batch, if it is one of the first.

        The loop may change them before it calls the model, as by adding noise.
        """
        self.fetched += 1
        leaves = _dense_tensors(batch) if self.fetched <= BATCHES else []
        tensors = [x for x in leaves if x.numel() and x.device.type == "cpu" and not x.is_quantized]
        if tensors:
            of_samples = [tensor for tensor in tensors if len(tensor) == len(tensors[0])]
            rows = torch.stack([hashes(tensor) for tensor in of_samples]).sum(0).tolist()
            self.loaded.append({"rows": rows, "calls": self.calls})

    def see_call(self) -> None:
        """Note that the model is called with what was fetched last."""
        is_random = isinstance(self.source, (RandomSampler, WeightedRandomSampler))
        self.with_replacement |= is_random and self.source.replacement
        is_distributed = isinstance(self.source, DistributedSampler)
        self.sources.append(self.samplers.get(self.source, -1) if is_distributed else -1)
        # The model may be called next with what is of no loader.
        self.source = None
        self.calls += 1
        self.trained.add(self.loader)

    def close(self) -> None:
        for remove in self.removing:
            remove()


class WholeRun:
    """Watches one rank's run. `see_call` must be called before every training call of the model. `close` writes what is left.

    `folder` is called when a file is written: by then the rank is known. `of_others` says whether an optimizer is of another model.
    """

    def __init__(
        self,
        folder: Callable[[], Path],
        of_others: Callable[[torch.optim.Optimizer], bool],
        loaders: Loaders | None,
    ):
        self.folder, self.files, self.of_others = folder, 0, of_others
        self.lines: list[dict[str, Any]] = []
        self.stepped, self.updating, self.calls_in_update = False, False, 0
        # Whether the model is trained in evaluation mode from the first step on
        self.in_evaluation = False
        # The shapes of the samples of the run
        self.shapes = set[tuple[torch.Size, ...]]()
        # Optimizer -> its number
        self.numbers = weakref.WeakKeyDictionary[torch.optim.Optimizer, int]()
        # The learning rates of the update that runs
        self.coming: list[float] = []
        self._begin()
        self.removing: list[Callable[[], None]] = [
            register_optimizer_step_pre_hook(self._before_update).remove,
            register_optimizer_step_post_hook(self._after_update).remove,
        ]
        self.see_schedules(_schedules())
        self.loaders = loaders or Loaders()
        if loaders is None:
            self.removing.append(self.loaders.close)

    def _begin(self) -> None:
        """Begin a step."""
        # For each micro batch, the hashes of its samples, and those of samples that may be padded
        self.samples: list[tuple[torch.Tensor, Ends]] = []
        self.uneven = False
        # Those of the micro batches before a step of another model's optimizer
        self.elsewhere: list[tuple[torch.Tensor, Ends]] = []
        self.rates: list[float] = []
        # The numbers of the optimizers that step
        self.optimizers: set[int] = set()
        # For each schedule, by whom it was stepped each time. A library may step what the loop steps, too.
        self.scheduled: dict[int, list[str]] = {}
        self.evaluated, self.called = 0, False

    def see_evaluation(self, output: torch.Tensor | None) -> None:
        """Watch `output`, which the model returned in evaluation mode. A gradient that arrives there trains the model."""
        if output is not None and output.requires_grad:
            output.register_hook(self._train_in_evaluation)

    def _train_in_evaluation(self, _gradient: torch.Tensor) -> None:
        self.evaluated += 1

    def see_call(self, given: dict[str, Any]) -> None:
        """Hash the samples that the model is called with. `given` are the arguments by name."""
        # In a closure, which L-BFGS calls many times
        if self.updating:
            self.calls_in_update += 1
            if self.calls_in_update > 1:
                return
        if self.stepped:
            self._end_step()
            self.rates = self.coming if self.updating else []
        self.called, self.elsewhere = True, []
        self.loaders.see_call()
        tensors = _dense_tensors(given)
        if tensors:
            mask = given.get("attention_mask")
            # An element of a tensor of one dim may be a sample, or a part of one, such as a token of packed texts.
            rows = [tensor for tensor in tensors if tensor.ndim > 1]
            self.uneven |= len({len(tensor) for tensor in rows} - {1}) > 1
            of_samples = [
                tensor for tensor in rows if len(tensor) == len(rows[0]) and tensor.device == rows[0].device
            ]
            # Several tensors may be needed to tell samples apart, such as the kinds of atoms and where they are.
            hashed = [hashes(tensor, mask) * (2 * place + 1) for place, tensor in enumerate(of_samples)]
            whole = (
                torch.stack(hashed).sum(0)
                if hashed
                else hashes(
                    torch.cat([tensor.flatten().double().to(tensors[0].device) for tensor in tensors])[None]
                )
            )
            self.samples.append((whole, self._ends(of_samples, mask)))

    def _ends(self, of_samples: list[torch.Tensor], mask: torch.Tensor | None) -> Ends:
        """Return further hashes of samples that may be padded, if no mask says what is padding; else [].

        Samples that were of one length in many steps are not looked at any longer.
        """
        if self.files > 1 and len(self.shapes) < 2:
            return []
        if any(
            x.ndim > DIMS_OF_SEQUENCES or (mask is not None and mask.shape == x.shape) for x in of_samples
        ):
            return []
        tensors = [tensor for tensor in of_samples if tensor.numel()]
        self.shapes.add(tuple(tensor.shape[1:] for tensor in tensors))
        return [hashes_of_ends(tensor) for tensor in tensors]

    def _end_step(self) -> None:
        self.lines.append(
            {
                "samples": self.samples,
                "uneven": self.uneven,
                "rates": self.rates,
                "optimizers": sorted(self.optimizers),
                "scheduled": {
                    " and ".join(dict.fromkeys(callers)): len(callers)
                    for callers in sorted(self.scheduled.values(), key=len)
                },
                "data_sets": sorted(self.loaders.data_sets),
                "shuffled": self.loaders.shuffled,
                "replicas": sorted(self.loaders.replicas),
                "given": sorted(self.loaders.given),
                "loaded": self.loaders.loaded,
                "orders": self.loaders.orders,
                "sources": self.loaders.sources,
                "with_replacement": self.loaders.with_replacement,
                "cut": self.loaders.cut,
                "evaluated": self.evaluated,
            }
        )
        self.stepped = False
        self._begin()
        self.loaders.begin()
        if len(self.lines) == STEPS_AT_ONCE:
            self.write()

    def _before_update(self, optimizer: torch.optim.Optimizer, _arguments: tuple, _options: dict) -> None:
        if self.of_others(optimizer):
            # After the model's own optimizer has stepped, the samples are those of a step that is over.
            if not self.stepped:
                self.elsewhere, self.samples = [*self.elsewhere, *self.samples], []
            return
        self.elsewhere, self.samples = [], [*self.elsewhere, *self.samples]
        self.coming = _rates(optimizer)
        self.optimizers.add(self.numbers.setdefault(optimizer, len(self.numbers)))
        # ZeRO steps the groups one by one.
        self.rates = self.rates or self.coming
        self.updating, self.calls_in_update = True, 0

    def see_overflow(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that a GradScaler skipped a step. It counts as a step of the run, with its samples."""
        if not self.of_others(optimizer):
            self.rates = _rates(optimizer)
            self.stepped = self.called

    def _after_update(self, optimizer: torch.optim.Optimizer, _arguments: tuple, _options: dict) -> None:
        if self.of_others(optimizer):
            return
        if self.evaluated and not self.called and not self.lines:
            self.in_evaluation, self.evaluated = True, 0
        # Some libraries step once before the first call, so that the optimizer allocates its memory.
        self.updating, self.stepped = False, self.called

    def see_schedules(self, classes: list[type]) -> None:
        """Watch schedules of a library, too."""
        self.removing += [see_calls(kind, "step", self._see_schedule) for kind in classes]

    def _see_schedule(self, schedule: object, *_: object) -> None:
        caller = sys._getframe(2).f_globals.get("__name__", "").partition(".")[0]
        # torch steps a schedule once when it is made.
        if caller != "torch":
            self.scheduled.setdefault(id(schedule), []).append(caller)

    def write(self) -> None:
        if not self.lines:
            return
        for line in self.lines:
            of_micro_batches = line["samples"]
            line["samples"] = [samples.tolist() for samples, _ in of_micro_batches]
            # The first file has few steps, whose samples may be of one length by chance.
            if len(self.shapes) > 1 or self.files == 0:
                line["ends"] = [
                    [{name: found.tolist() for name, found in of_tensor.items()} for of_tensor in ends]
                    for _, ends in of_micro_batches
                    if ends
                ]
        self.files += 1
        path = self.folder() / f"run_{self.files}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps({"steps": self.lines}))
        self.lines = []

    def close(self) -> None:
        for remove in self.removing:
            remove()
        if self.stepped:
            self._end_step()
        self.write()


def _drops_samples(loader: Any) -> bool:
    """Whether a loader leaves out the samples that fill no batch at the end of an epoch, which other epochs have."""
    batches = loader.batch_sampler
    drops = any(getattr(owner, "drop_last", False) for owner in (loader, batches, loader.sampler))
    size = getattr(batches, "batch_size", None) or loader.batch_size or 1
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    try:
        return drops and len(loader.dataset) % (size * ranks) != 0
    # An iterable data set has no length.
    except TypeError:
        return False


def _rates(optimizer: torch.optim.Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups if group.get("lr") is not None]


def _dense_tensors(value: Any) -> list[torch.Tensor]:
    """Return the strided tensors with at least one dim in a value.

    Those of its objects, such as a batch of graphs, are looked for if it has no tensor with a row for each sample.
    """
    leaves = tree_leaves(value)
    tensors = [leaf for leaf in leaves if _is_dense(leaf)]
    if not any(tensor.ndim > 1 for tensor in tensors):
        for leaf in leaves:
            tensors += _dense_attributes(leaf)
    return tensors


def _dense_attributes(owner: Any, depth: int = 0) -> list[torch.Tensor]:
    """Return the strided tensors among the attributes of an object, of dicts that these are, and of objects that these are."""
    if (
        isinstance(owner, (str, int, float, torch.Tensor, torch.nn.Module, type, types.ModuleType))
        or depth == DEEPEST
    ):
        return []
    try:
        attributes = owner if isinstance(owner, dict) else vars(owner)
    except TypeError:
        return []
    found: list[torch.Tensor] = []
    for attribute in attributes.values() if len(attributes) <= MOST else ():
        found += [attribute] if _is_dense(attribute) else _dense_attributes(attribute, depth + 1)
    return found


def _is_dense(one: Any) -> bool:
    """Whether a value is a strided tensor with at least one dim."""
    is_strided = isinstance(one, torch.Tensor) and one.layout is torch.strided and not one.is_nested
    return is_strided and one.ndim > 0


def _schedules() -> list[type]:
    """Return torch's classes of schedules with a `step` of their own, such as those that step others in turn."""
    values = vars(torch.optim.lr_scheduler).values()
    base = torch.optim.lr_scheduler.LRScheduler
    return [v for v in values if isinstance(v, type) and issubclass(v, base) and "step" in vars(v)]
