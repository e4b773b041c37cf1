"""What a recording has of every step, to the end of the run: which samples, which learning rates, how often the schedule was stepped.

    RUN/rank_R/run_N.json      {"steps": [{"samples": [[hash, ...] of each micro batch], "rates": [...], "optimizers": [numbers], "scheduled": {by whom: times},
                               "data_sets": [sizes], "shuffled": whether a DistributedSampler was to shuffle them, "replicas": among how many it divides them, "given": and which rank's it gives,
                               "loaded": of the first batches of loaders, a hash of what each has for a sample,
                               "orders": the epochs that it is told, "sources": which sampler each micro batch is of, "with_replacement": whether a RandomSampler draws so,
                               "cut": how often a loader then begins anew before it was at its end,
                               "evaluated": calls in evaluation mode that were trained on}, ...]}, at most 256 steps in each

Hashes are made on the model's device, and fetched for many steps at once.
"""

import contextlib
import functools
import json
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._pytree import tree_leaves
from torch.utils.data import RandomSampler
from torch.utils.data.dataloader import _BaseDataLoaderIter
from torch.utils.data.distributed import DistributedSampler

from lockstep.ground.files import write_text
from lockstep.recorder.hashes import hashes
from lockstep.recorder.patches import Undo, replace, see_calls

STEPS_AT_ONCE = 256
BATCHES = 8  # of loaders, that are hashed as they are fetched


class Loaders:
    """What the loop goes over. Whoever waits for the model's first call begins before it: its batch is fetched by then."""

    def __init__(self) -> None:
        self.samplers = weakref.WeakKeyDictionary[DistributedSampler, int]()  # their numbers
        self.source: Any = None  # the sampler that the last batch is of
        self.loader = 0  # the one that the last batch is of: the id of what chooses its samples
        # Loaders that are not at their end, and those whose batches are trained on
        self.unfinished, self.trained = set[int](), set[int]()
        self.fetched = self.calls = 0  # batches, and calls of the model, so far
        self.begin()
        self.removing = [
            see_calls(torch.utils.data.DataLoader, "__iter__", self._see_data),
            see_calls(DistributedSampler, "__iter__", self._see_order),
            self._see_batches(),
        ]

    def begin(self) -> None:
        self.data_sets, self.replicas, self.shuffled = set[int](), set[int](), False
        # The first batches, by hashes of what they have for each sample
        self.loaded: list[dict[str, Any]] = []
        self.given = set[int]()  # the ranks whose samples DistributedSamplers give
        self.with_replacement, self.cut = False, 0
        self.orders: list[dict[str, int]] = []
        self.sources: list[
            int
        ] = []  # of each call of the model in this step: a sampler's number, -1 for another

    def _see_data(self, loader: Any) -> None:
        begun = id(loader._index_sampler)
        self.cut += begun in self.unfinished & self.trained
        self.unfinished.discard(begun)
        with contextlib.suppress(TypeError):  # an iterable data set has no length
            self.data_sets.add(len(loader.dataset))

    def _see_order(self, sampler: DistributedSampler) -> None:
        if sampler.shuffle:
            self.shuffled = True
            number = self.samplers.setdefault(sampler, len(self.samplers))
            about = {"sampler": number, "epoch": sampler.epoch, "samples": sampler.num_samples}
            self.orders.append({**about, "calls": len(self.sources)})
        self.replicas.add(sampler.num_replicas)
        self.given.add(sampler.rank)

    def _see_batches(self) -> Undo:
        real = _BaseDataLoaderIter.__next__

        @functools.wraps(real)
        def following(iterator: Any) -> Any:
            self.loader = id(iterator._index_sampler)
            self.unfinished.discard(self.loader)
            batch = real(iterator)  # unless it was the last
            self.unfinished.add(self.loader)
            self._see_batch(batch)
            self.source = getattr(iterator._index_sampler, "sampler", None)
            return batch

        return replace(_BaseDataLoaderIter, "__next__", following)

    def _see_batch(self, batch: Any) -> None:
        """Of a few batches: they are hashed where they are, and a loop may do what it likes with them, such as add noise."""
        self.fetched += 1
        found = [one for one in tree_leaves(batch) if _is_dense(one)] if self.fetched <= BATCHES else []
        rows = [one for one in found if one.numel() and one.device.type == "cpu" and not one.is_quantized]
        if rows:
            alike = [one for one in rows if len(one) == len(rows[0])]
            hashed = torch.stack([hashes(one) for one in alike]).sum(0).tolist()
            self.loaded.append({"rows": hashed, "calls": self.calls})

    def see_call(self) -> None:
        """The model is called with what was fetched last."""
        self.with_replacement |= isinstance(self.source, RandomSampler) and self.source.replacement
        known = isinstance(self.source, DistributedSampler)
        self.sources.append(self.samplers.get(self.source, -1) if known else -1)
        self.source = None  # what it is called with next may be of no loader
        self.calls += 1
        self.trained.add(self.loader)

    def close(self) -> None:
        for remove in self.removing:
            remove()


class WholeRun:
    """Watches one rank's run; `see_call` is told of every training call of the model. `close` writes what is left.

    `folder` is asked for when it is written to: by then the rank is known. `of_others` says whether an optimizer is of another model.
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
        # Whether the model is trained in this mode from the first step on
        self.in_evaluation = False
        self.numbers = weakref.WeakKeyDictionary[torch.optim.Optimizer, int]()
        self.coming: list[float] = []  # the rates of the update that runs
        self._begin()
        self.removing: list[Callable[[], None]] = [
            register_optimizer_step_pre_hook(self._before_update).remove,
            register_optimizer_step_post_hook(self._after_update).remove,
            *(see_calls(kind, "step", self._see_schedule) for kind in _schedules()),
        ]
        self.loaders = loaders or Loaders()
        if loaders is None:
            self.removing.append(self.loaders.close)

    def _begin(self) -> None:
        self.samples: list[torch.Tensor] = []
        self.elsewhere: list[torch.Tensor] = []  # before a step of another model's optimizer
        self.rates: list[float] = []
        self.optimizers: set[int] = set()  # numbers of those that step
        self.scheduled: dict[
            int, list[str]
        ] = {}  # by whom, each time; a library may step what the loop steps, too
        self.evaluated, self.called = 0, False

    def see_evaluation(self, output: torch.Tensor | None) -> None:
        """`output` is what the model returned in evaluation mode; a gradient that arrives there trains it."""
        if output is not None and output.requires_grad:
            output.register_hook(self._train_in_evaluation)

    def _train_in_evaluation(self, _gradient: torch.Tensor) -> None:
        self.evaluated += 1

    def see_call(self, given: dict[str, Any]) -> None:
        if self.updating:  # in a closure, which L-BFGS calls many times
            self.calls_in_update += 1
            if self.calls_in_update > 1:
                return
        if self.stepped:
            self._end_step()
            self.rates = self.coming if self.updating else []
        self.called, self.elsewhere = True, []
        self.loaders.see_call()
        tensors = [one for one in tree_leaves(given) if _is_dense(one)]
        if tensors:
            mask = given.get("attention_mask")
            # A place of tensors of one dim may be that of a sample, or of a part of one, such as a token of packed texts.
            of_rows = [one for one in tensors if one.ndim > 1]
            of_samples = [
                one for one in of_rows if len(one) == len(of_rows[0]) and one.device == of_rows[0].device
            ]
            # Several may be needed to tell samples apart, such as the kinds of atoms and where they are.
            hashed = [hashes(one, mask) * (2 * place + 1) for place, one in enumerate(of_samples)]
            self.samples.append(
                torch.stack(hashed).sum(0)
                if hashed
                else hashes(torch.cat([one.flatten().double() for one in tensors])[None])
            )

    def _end_step(self) -> None:
        self.lines.append(
            {
                "samples": self.samples,
                "rates": self.rates,
                "optimizers": sorted(self.optimizers),
                "scheduled": {
                    " and ".join(dict.fromkeys(by)): len(by)
                    for by in sorted(self.scheduled.values(), key=len)
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
            if not self.stepped:  # else the samples are those of a step that is over
                self.elsewhere, self.samples = [*self.elsewhere, *self.samples], []
            return
        self.elsewhere, self.samples = [], [*self.elsewhere, *self.samples]
        self.coming = [float(group["lr"]) for group in optimizer.param_groups if group.get("lr") is not None]
        self.optimizers.add(self.numbers.setdefault(optimizer, len(self.numbers)))
        self.rates = self.rates or self.coming  # ZeRO steps the groups one by one
        self.updating, self.calls_in_update = True, 0

    def see_overflow(self, optimizer: torch.optim.Optimizer) -> None:
        """A step that a GradScaler skips is one of the run, with its samples."""
        if not self.of_others(optimizer):
            self.rates = [
                float(group["lr"]) for group in optimizer.param_groups if group.get("lr") is not None
            ]
            self.stepped = self.called

    def _after_update(self, optimizer: torch.optim.Optimizer, _arguments: tuple, _options: dict) -> None:
        if self.of_others(optimizer):
            return
        if self.evaluated and not self.called and not self.lines:
            self.in_evaluation, self.evaluated = True, 0
        # Some libraries step once before the first call, so that the optimizer has its memory.
        self.updating, self.stepped = False, self.called

    def _see_schedule(self, schedule: object, *_: object) -> None:
        caller = sys._getframe(2).f_globals.get("__name__", "").partition(".")[0]
        if caller != "torch":  # which steps a schedule once when it is made
            self.scheduled.setdefault(id(schedule), []).append(caller)

    def write(self) -> None:
        if not self.lines:
            return
        for line in self.lines:
            line["samples"] = [one.tolist() for one in line["samples"]]
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


def _is_dense(one: Any) -> bool:
    return isinstance(one, torch.Tensor) and one.layout is torch.strided and one.ndim > 0


def _schedules() -> list[type]:
    """Classes with a step of their own, such as those that step others in turn."""
    found = vars(torch.optim.lr_scheduler).values()
    base = torch.optim.lr_scheduler.LRScheduler
    return [one for one in found if isinstance(one, type) and issubclass(one, base) and "step" in vars(one)]
