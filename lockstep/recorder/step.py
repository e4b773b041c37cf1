"""The step that is being recorded: what is known of it so far, and the files that are written. Also how a recording ends."""

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
from lockstep.recorder import own_hooks, parallelism, patches, tree, wrapped
from lockstep.recorder.contents import divide, leave
from lockstep.recorder.module_hooks import ModuleHooks, matches
from lockstep.recorder.module_state import state_of
from lockstep.recorder.plain_shards import PlainShards
from lockstep.recorder.recorded_step import ERROR, FORMAT
from lockstep.recorder.step_tensors import StepTensors, copied, whole
from lockstep.recorder.whole_run import WholeRun


def harmless(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a hook of a recorder: an error ends the recording, and not the training that it watches. A usage error ends both."""

    @functools.wraps(hook)
    def call(recorder: "StepRecorder", *arguments: Any, **options: Any) -> Any:
        if recorder.given_up:
            return None
        try:
            return hook(recorder, *arguments, **options)
        except UserError:
            raise
        except Exception as error:  # noqa: BLE001 - what a model returns, an optimizer holds or a full disk refuses may raise anything
            show_exception()
            recorder.give_up(f"{type(error).__name__}: {first_line(error)}")
            return None

    return call


# Variables that torchrun and its like set. Other programs may set the first one alone.
LAUNCHED = {"WORLD_SIZE", "RANK", "LOCAL_RANK"}


class StepRecorder:
    """What one rank records. `model` is the model itself or one that is wrapped already."""

    whole_run: WholeRun

    def __init__(self, model: torch.nn.Module, folder: Path, steps: int, modules: str):
        self.model, self.folder, self.steps, self.modules = wrapped.inner(model), folder, steps, modules
        parallelism.require_not_fsdp1(self.model)
        names = [wrapped.clean(name) for name, _ in self.model.named_modules() if name]
        if modules and names and not any(matches(name, modules) for name in names):
            raise UserError(
                f"--modules {modules!r}: no module of {type(self.model).__name__} has such a name; they are called {names[0]}, {names[-1]} and so on"
            )
        self.tree, self.tensors = tree.describe(self.model)
        # The loop may change them in place before they are written.
        self.tensors |= {
            name: copied(tensor)
            for name, tensor in self.tensors.items()
            if name.startswith("attribute/") and not (isinstance(tensor, DTensor) or tensor.is_meta)
        }
        self.surroundings: tree.TREE = {}
        # The method that calls this part of a larger model, which the loop does not call; "" if it is no part
        self.part_of = ""
        self.plain_shards = PlainShards(self.model)
        self.attributes = {name: value for name, (value, _) in state_of(self.model).items()}
        self.signature = inspect.signature(self.model.forward)
        self.step, self.given_up = 1, False
        self.stage: parallelism.Stage | None = None
        # This recorder, or those of all stages that the rank has of a pipeline, which end together. The first one made the others.
        self.of_rank: list[StepRecorder] = [self]
        # Of the last step: this rank, the number of ranks, and their groups
        self.ranks: dict[str, Any] = {}
        # Whether torch.compile compiled the optimizer's step, and the model
        self.compiled, self.model_compiled = False, False
        # Whether a library's engine, whose optimizers are none of torch's, is watched, and whether it steps the model
        self.watches_engine, self.engine_steps = False, False
        self.hooks: ModuleHooks | None = None
        # The sequence number of the function that made the last copy of what the model returns
        self.returned_at = 0
        # Handles of hooks on the loop's own loss
        self.beside: list[Any] = []
        # Modules that return what a hook made of their output
        self.hooked: set[str] = set()
        # Contents that this rank or another writes
        self.known_contents: set[str] = set()
        # Contents of the large weights that the step before ended with, by key
        self.last_contents: dict[str, str] = {}
        # Hashes of what the step before ended with
        self.last_digests: dict[str, int] = {}
        # The optimizer whose step runs, and how deep that step is nested in itself
        self.stepping: torch.optim.Optimizer | None = None
        self.nested = 0
        # By the id of an optimizer: what removes its last hook after its step
        self.last_hooks: dict[int, Callable[[], None]] = {}
        # Windows of micro batches before this step that were clipped and then set to zero
        self.skipped = 0
        # Steps that a GradScaler skipped before this step
        self.overflowed = 0
        self._begin()
        # Optimizers by id: whether they are of another model
        self.of_others: dict[int, bool] = {}
        self.removing: list[Callable[[], None]] = [
            patches.see_calls(
                FullyShardedDataParallel,
                "__init__",
                lambda *given: parallelism.require_not_fsdp1(self.model, *given[1:2]),
            )
        ]
        # Likewise, of a recorder that has ended before the others of its rank
        self.over: list[Callable[[], None]] = []
        self.error = ""  # what ended the run
        # What removes hooks that stay until the end of the run
        self.always: list[Callable[[], None]] = []

    @property
    def rank(self) -> int:
        if dist.is_initialized():
            return dist.get_rank()
        return self.ranks.get("rank", int(os.environ.get("RANK", "0")))

    def _see_ranks(self) -> None:
        """Note this rank and the others. A loop may destroy its process group before its last step is written."""
        if dist.is_initialized() or not self.ranks:
            self.ranks = {
                "world_size": dist.get_world_size() if dist.is_initialized() else 1,
                "launched": int(os.environ["WORLD_SIZE"]) if os.environ.keys() >= LAUNCHED else 1,
                "rank": self.rank,
                "data_parallel": parallelism.data_parallel(self.model),
                "groups": parallelism.groups(),
                "stage": self.stage and self.stage.number,
                "stages": self.stage.stages if self.stage else 1,
            }

    @property
    def _rank_folder(self) -> Path:
        return self.folder / f"rank_{self.rank}"

    @property
    def writes_model(self) -> bool:
        """Whether this rank writes the model: rank 0, or all ranks of a stage, as they do not know each other."""
        return self.rank == 0 or self.stage is not None

    def see_stage(self, stage: parallelism.Stage) -> None:
        """Record into the folder of the pipeline's stage that the model is."""
        self.stage = stage
        self.folder = self.folder / f"stage_{stage.number}"

    def stop(self) -> None:
        """Write a step that is over, and remove the hooks, for all stages of the rank."""
        for recorder in reversed(self.of_rank):
            recorder._stop()

    def _stop(self) -> None:
        if self.optimizers:
            self._write()
        if self.step == 1 and self.removing and not self.given_up:
            has_others = any(self.of_others.values())
            message = "no optimizer made one, or a GradScaler skipped all of them"
            if self.hooks is None:
                message = "the model was not called for training, as in model(batch); what its other methods compute is not seen"
            if has_others:
                message = "the optimizers that stepped hold none of the recorded model's parameters"
            message = f"no step was recorded: {message}"
            say(f"lockstep.record: {message} (rank {self.rank})")
        self._remove_hooks()
        for remove in self.always:
            remove()
        self.always = []
        self._leave()
        # The error is the user's. Another one, as of a full disk, must not take its place.
        with contextlib.suppress(OSError):
            if self.error and self._rank_folder.is_dir():
                write_text(self._rank_folder / ERROR, json.dumps({"error": self.error}))

    def see_error(self, error: Exception) -> None:
        """Note the error that ends the run, in words: the error itself would keep all that its frames hold."""
        for recorder in self.of_rank:
            recorder.error = f"{type(error).__name__}: {first_line(error)}"

    def discard(self) -> None:
        """End the recording, and leave out the step that has begun."""
        for recorder in self.of_rank:
            recorder.given_up = True
            recorder._begin()
        # The disk may be full, for instance.
        with contextlib.suppress(Exception):
            self.stop()

    def give_up(self, why: str) -> None:
        """End the recording because something went wrong, leave out the step that has begun, and say so. The training goes on."""
        self.discard()
        message = f"lockstep.record: the recording ended in step {self.step} on rank {self.rank} ({why}); the training goes on without it"
        say(message)

    def _remove_hooks(self) -> None:
        """Remove the hooks, once all recorders of the rank have ended: functions that they replaced are put back in the reverse order."""
        self.over += self.removing
        self.removing = []
        if any(recorder.removing for recorder in self.of_rank):
            return
        for recorder in reversed(self.of_rank):
            for remove in recorder.over:
                remove()
            recorder.over = []

    def _begin(self) -> None:
        """Begin a step."""
        self.kept = StepTensors(self.plain_shards, self.last_digests, self.last_contents)
        # A dict for each micro batch: the fields of lockstep/recorder/recorded_step.py's MicroBatch
        self.micro: list[dict[str, Any]] = []
        # What the model was called with, by id. It is not kept alive, as a graph may hang on it.
        self.given: dict[int, weakref.ref[torch.Tensor]] = {}
        # Hashes of parameters that require no gradient, before the first micro batch
        self.frozen: dict[str, int] = {}
        self.clips: list[dict[str, Any]] = []
        # A dict for each optimizer that has stepped
        self.optimizers: list[dict[str, Any]] = []
        self.updating = False
        # Whether a window of micro batches was clipped, and then set to zero
        self.given_up_on = False
        # The order that dims of parameters have in memory
        self.orders: dict[str, list[int]] = {}
        # How many tensors optimizers of other models hold, and hashes of (weights, gradient) of these
        self.elsewhere = 0
        self.other_replicas: list[list[int]] = []
        # How many elements were given to collectives that reduce
        self.reduced = 0
        # The ids of the optimizers that have stepped, and those of their first parameters
        self.stepped: set[int] = set()
        self.first_parameters: list[int] = []
        # Hashes of buffers, and of attributes that are tensors, before the last micro batch
        self.buffers: dict[str, int] = {}
        # By the id of an optimizer's first parameter: micro batches for which a gradient had arrived before it set gradients to zero
        self.before_zeroing: dict[int, list[int]] = {}
        # Likewise, micro batches that a backward pass had gone through
        self.zeroed: dict[int, list[int]] = {}
        # Whether a gradient arrived after the last step of another model's optimizer
        self.arrived_since = True

    @property
    def _is_alone(self) -> bool:
        """Whether this process knows no other ranks. There may be some whose script has made no process group."""
        return self.ranks.get("world_size", 1) == 1

    def _leave(self) -> None:
        """Say to the other ranks that this one has written all its steps."""
        if not self._is_alone:
            ranks = self.ranks["world_size"] * len(self.of_rank) // self.ranks["stages"]
            leave(self.folder, self.rank, ranks)

    def _write(self) -> None:
        """Write the files of the step, and begin the next one."""
        self._see_ranks()
        for number, micro_batch in enumerate(self.micro):
            # A model that returns its loss alone was taken for one that is trained on it.
            is_seen = any(place.startswith(f"forward/{number}/") for place in self.kept.places)
            micro_batch["used"] &= micro_batch["reached"] or micro_batch["asked"] or not is_seen
            micro_batch["zeroed"] = bool(self.first_parameters) and all(
                number in self.zeroed.get(parameter, ()) for parameter in self.first_parameters
            )
        if self.writes_model and self.step == 1:
            made = {
                "device": str(next(self.model.parameters()).device),
                "seed": str(torch.initial_seed()),
                "threads": torch.get_num_threads(),
                "tf32": parallelism.tf32(),
            }
            extra = {
                "surroundings": self.surroundings,
                "part_of": self.part_of,
                "own_hooks": own_hooks.own_hooks(self.model, self.tree["left_out"]),
            }
            write_model(self.folder, self.tree | extra, self.tensors, made)
        self._rank_folder.mkdir(parents=True, exist_ok=True)
        path = self._rank_folder / f"step_{self.step}.safetensors"
        run = None if self._is_alone else self.folder
        written, elsewhere = divide(self.kept.tensors, self.known_contents, run, self.rank)
        elsewhere |= self.kept.elsewhere
        tensors = {key: tensor for key, tensor in self.kept.tensors.items() if key not in elsewhere}
        save_file(tensors, path.with_suffix(".part"))
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
                name for name, p in wrapped.named_parameters(self.model).items() if p._backward_hooks
            ],
            "places": self.kept.places,
            "written": written,
            "elsewhere": elsewhere,
            # Also what the step before ended with and this one does not have
            "changed": [*self.kept.changed, *self.last_digests],
        }
        write_text(path.with_suffix(".json"), json.dumps(content))
        self.step += 1
        self.skipped = self.overflowed = 0
        self.last_digests = self.kept.digests
        self.last_contents = {
            key.replace("updated/", "weight/", 1): content
            for key, content in (written | elsewhere).items()
            if key.startswith("updated/")
        }
        self._begin()
        if self.step > self.steps:
            self._leave()
            self._remove_hooks()
            # It is large: it has a hash for each row and column of every parameter.
            self.plain_shards.places.clear()
            # A script may end without a call of `stop`.
            self.whole_run.write()


def write_model(
    folder: Path, about: tree.TREE, tensors: dict[str, torch.Tensor], made: dict[str, Any]
) -> None:
    """Write a model's tree and its tensors into a folder.

    `made` says how the run was made, besides what lockstep/ground/origin.py knows.
    """
    folder.mkdir(parents=True, exist_ok=True)
    whole_tensors = {name: copied(whole(tensor)) for name, tensor in tensors.items()}
    save_file(whole_tensors, folder / "model.safetensors")
    content = {"format": FORMAT, "tree": about, "origin": origin.of_run() | made}
    write_text(folder / "model.json", json.dumps(content))
