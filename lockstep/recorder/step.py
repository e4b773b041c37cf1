"""The step that is being recorded: what is known of it so far, and its files. And how a recording ends."""

import contextlib
import functools
import inspect
import json
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from lockstep.ground import origin
from lockstep.ground.errors import UserError, first_line, say, show_exception
from lockstep.ground.files import write_text
from lockstep.recorder import parallelism, patches, tree, wrapped
from lockstep.recorder.kept import Kept, copied
from lockstep.recorder.module_hooks import ModuleHooks, matches
from lockstep.recorder.plain_shards import PlainShards
from lockstep.recorder.recorded_step import FORMAT
from lockstep.recorder.state import state_of
from lockstep.recorder.whole_run import WholeRun


def harmless(hook: Callable[..., Any]) -> Callable[..., Any]:
    """A hook of a recorder that does not end the training that it watches, but the recording. A usage error ends both."""

    @functools.wraps(hook)
    def call(recorder: "Recorded", *arguments: Any, **options: Any) -> Any:
        if recorder.given_up:
            return None
        try:
            return hook(recorder, *arguments, **options)
        except UserError:
            raise
        except Exception as error:  # noqa: BLE001 - of whatever a model returns, an optimizer holds, a disk has no room for
            show_exception()
            recorder.give_up(f"{type(error).__name__}: {first_line(error)}")
            return None

    return call


# By torchrun and its like; others may set the first
LAUNCHED = {"WORLD_SIZE", "RANK", "LOCAL_RANK"}


class Recorded:
    """Of one rank. `model` is the model itself or one that is wrapped already."""

    whole_run: WholeRun

    def __init__(self, model: torch.nn.Module, folder: Path, steps: int, modules: str):
        self.model, self.folder, self.steps, self.modules = wrapped.inner(model), folder, steps, modules
        parallelism.require_recordable(self.model)
        names = [wrapped.clean(name) for name, _ in self.model.named_modules() if name]
        if modules and names and not any(matches(name, modules) for name in names):
            raise UserError(
                f"--modules {modules!r}: no module of {type(self.model).__name__} has such a name; they are called {names[0]}, {names[-1]} and so on"
            )
        self.tree, self.tensors = tree.describe(self.model)
        self.surroundings: tree.TREE = {}
        self.plain_shards = PlainShards(self.model)
        self.attributes = {name: value for name, (value, _) in state_of(self.model).items()}
        self.signature = inspect.signature(self.model.forward)
        self.step, self.given_up = 1, False
        self.ranks: dict[str, Any] = {}  # of the last step: this rank, and who the others are
        self.compiled, self.model_compiled = False, False
        # Whose optimizers are none of torch's
        self.watches_engine, self.engine_steps = False, False
        self.hooks: ModuleHooks | None = None
        # The number of the function that made the last copy of what the model returns
        self.returned_at = 0
        self.beside: list[Any] = []  # handles of hooks on the loop's own loss
        self.hooked: set[str] = set()  # modules that return what a hook made of their output
        self.last_digests: dict[str, int] = {}  # of what the step before ended with
        self.stepping: torch.optim.Optimizer | None = None
        self.nested = 0
        self.last_hooks: dict[int, Callable[[], None]] = {}  # by optimizer, while it steps
        self.skipped = 0  # windows of micro batches before this step, clipped and then set to zero
        self.overflowed = 0  # those that a GradScaler skipped
        self._begin()
        self.of_others: dict[int, bool] = {}  # optimizers by id: whether they are of another model
        self.removing: list[Callable[[], None]] = [
            patches.see_calls(
                FullyShardedDataParallel,
                "__init__",
                lambda *given: parallelism.require_not_fsdp1(self.model, given),
            )
        ]
        self.always: list[Callable[[], None]] = []  # removed at the end of the run

    @property
    def rank(self) -> int:
        if dist.is_initialized():
            return dist.get_rank()
        return self.ranks.get("rank", int(os.environ.get("RANK", "0")))

    def _see_ranks(self) -> None:
        """A loop may destroy its process group before its last step is written."""
        if dist.is_initialized() or not self.ranks:
            self.ranks = {
                "world_size": dist.get_world_size() if dist.is_initialized() else 1,
                "launched": int(os.environ["WORLD_SIZE"]) if os.environ.keys() >= LAUNCHED else 1,
                "rank": self.rank,
                "data_parallel": parallelism.data_parallel(self.model),
                "groups": parallelism.groups(),
            }

    @property
    def _rank_folder(self) -> Path:
        return self.folder / f"rank_{self.rank}"

    def stop(self) -> None:
        """Write a step that is over, and remove the hooks."""
        if self.optimizers:
            self._write()
        if self.step == 1 and self.removing and not self.given_up:
            others = any(self.of_others.values())
            said = "no optimizer made one, or a GradScaler skipped all of them"
            if self.hooks is None:
                said = "the model was not called for training, as in model(batch); what its other methods compute is not seen"
            if others:
                said = "the optimizers that stepped hold none of the recorded model's parameters"
            said = f"no step was recorded: {said}"
            say(f"lockstep.record: {said} (rank {self.rank})")
        self._remove_hooks()
        for remove in self.always:
            remove()

    def discard(self) -> None:
        """End the recording, and leave out the step that has begun."""
        self.given_up = True
        self._begin()
        with contextlib.suppress(Exception):  # such as a disk that is full
            self.stop()

    def give_up(self, why: str) -> None:
        """The same where something went wrong; the training goes on."""
        self.discard()
        said = f"lockstep.record: the recording ended in step {self.step} on rank {self.rank} ({why}); the training goes on without it"
        say(said)

    def _remove_hooks(self) -> None:
        for remove in self.removing:
            remove()
        self.removing = []

    def _begin(self) -> None:
        self.kept = Kept(self.plain_shards, self.last_digests)
        self.micro: list[dict[str, Any]] = []
        # What the model was called with, by id; not kept alive, as a graph may hang on it
        self.given: dict[int, weakref.ref[torch.Tensor]] = {}
        # hashes of what requires no gradient, before the first micro batch
        self.frozen: dict[str, int] = {}
        self.clips: list[dict[str, Any]] = []
        self.optimizers: list[dict[str, Any]] = []
        self.updating = False
        self.given_up_on = False  # whether a window was clipped, and then set to zero
        self.orders: dict[str, list[int]] = {}  # of the dims of parameters in memory
        self.elsewhere = 0  # tensors that optimizers of other models hold
        self.other_replicas: list[list[int]] = []  # hashes of (weights, gradient) of these
        self.reduced = 0  # elements that were given to collectives that reduce
        self.stepped: set[int] = set()
        self.first_parameters: list[int] = []  # of the optimizers that have stepped
        self.buffers: dict[str, int] = {}
        self.before_zeroing: dict[
            int, list[int]
        ] = {}  # by the first parameter: micro batches at which a gradient had arrived
        # Likewise: those that a backward pass had gone through
        self.zeroed: dict[int, list[int]] = {}
        self.arrived_since = True  # a gradient, after the last step of another model's optimizer

    def _write(self) -> None:
        self._see_ranks()
        for number, about in enumerate(self.micro):
            # A model that returns its loss alone was taken for one that is trained on it.
            seen = any(place.startswith(f"forward/{number}/") for place in self.kept.places)
            about["used"] &= about["reached"] or about["asked"] or not seen
            about["zeroed"] = bool(self.first_parameters) and all(
                number in self.zeroed.get(one, ()) for one in self.first_parameters
            )
        if self.rank == 0 and self.step == 1:
            made = {
                "device": str(next(self.model.parameters()).device),
                "seed": str(torch.initial_seed()),
                "tf32": parallelism.tf32(),
            }
            more = {
                "surroundings": self.surroundings,
                "own_hooks": tree.own_hooks(self.model, self.tree["left_out"]),
            }
            write_model(self.folder, self.tree | more, self.tensors, made)
        self._rank_folder.mkdir(parents=True, exist_ok=True)
        path = self._rank_folder / f"step_{self.step}.safetensors"
        save_file(self.kept.tensors, path.with_suffix(".part"))
        os.replace(path.with_suffix(".part"), path)
        content = {
            "format": FORMAT,
            **self.ranks,
            "step": self.step,
            "torch": torch.__version__,
            "frozen": list(self.frozen),
            "attributes": self.attributes,
            "micro_batches": self.micro,
            "clips": self.clips,
            "optimizers": self.optimizers,
            "reduced": self.reduced,
            "skipped": self.skipped,
            "overflowed": self.overflowed,
            "of_others": self.elsewhere,
            "other_replicas": self.other_replicas,
            "orders": self.orders,
            "hooked": sorted(self.hooked),
            "hooked_parameters": [
                name for name, one in wrapped.named_parameters(self.model).items() if one._backward_hooks
            ],
            "places": self.kept.places,
            "unchanged": self.kept.unchanged,
            # And what is not there any more
            "changed": [*self.kept.changed, *self.last_digests],
        }
        write_text(path.with_suffix(".json"), json.dumps(content))
        self.step += 1
        self.skipped = self.overflowed = 0
        self.last_digests = self.kept.digests
        self._begin()
        if self.step > self.steps:
            self._remove_hooks()
            self.plain_shards.places.clear()  # a hash for each row and column of every parameter
            self.whole_run.write()  # a script may end without a word


def write_model(
    folder: Path, about: tree.TREE, tensors: dict[str, torch.Tensor], made: dict[str, Any]
) -> None:
    """`made` says how, besides what lockstep/ground/origin.py knows."""
    folder.mkdir(parents=True, exist_ok=True)
    whole = {
        name: copied(tensor.full_tensor() if isinstance(tensor, DTensor) else tensor)
        for name, tensor in tensors.items()
    }
    save_file(whole, folder / "model.safetensors")
    content = {"format": FORMAT, "tree": about, "origin": origin.of_run() | made}
    write_text(folder / "model.json", json.dumps(content))
