"""Capture: write what a run computes in its first steps, as full tensors, while it trains.

For every captured step, in one file (lockstep/dumps/dump.py):

    forward/MODULE           the output of every module (MODULE.1 for the second tensor of a tuple)
    forward/MODULE.input     its input, unless that is the output of another module (lockstep/dumps/layout.py)
    backward/...             the gradient of the loss with respect to each of these
    gradient/PARAMETER       before clipping
    exp_avg/PARAMETER  exp_avg_sq/PARAMETER  parameter/PARAMETER      after the update
    batch/input_ids  batch/labels          what the model was really called with

The loss is the mean over the global batch, so the gradients that a rank computes for its own tokens are divided by
`Captured.loss_shares`. Rows (dim 0) are the global batch: DP rank by DP rank, micro batch by micro batch. Hooks exist only during
captured steps.

Each part of a tensor is written by one of the ranks that hold it, and hashed by all of them. An output is written while it is
computed, by the rank that is first along the axes that do not cut it (lockstep/dumps/placement.py). Tensors of parameters are
written by the ranks in turns, parameter by parameter. lockstep/dumps/step_file.py does the writing. Each stage of a pipeline writes
a file of its own; these are then joined.
"""

import contextlib
import functools
import os
import sys
from collections import Counter
from collections.abc import Callable, Container, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from lockstep.dumps import manifest, step_file
from lockstep.dumps.layout import BATCH, SEQUENCE, State, state_of
from lockstep.dumps.placement import Placement
from lockstep.dumps.trace import layout_of, named_outputs, watched
from lockstep.ground.blocks import CalledModules, Held, Runs, blocks
from lockstep.ground.collective import gather_objects, stop_together
from lockstep.ground.errors import first_line
from lockstep.ground.files import remove_captured, why_not_written
from lockstep.inputs.model import being_recomputed
from lockstep.inputs.samples import Samples
from lockstep.plan import compiled
from lockstep.plan.config import OPTIMIZERS, sequences_per_step
from lockstep.plan.cuts import Pieces
from lockstep.plan.mesh import AXES, Coordinates, Cuts, Mesh

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MOST_KINDS = 8  # kinds of tensors of a parameter that a file has room for
Given = ParamSpec("Given")
Returned = TypeVar("Returned")


class Captured(Protocol):
    """What a capture needs of a strategy: a part of lockstep/training/strategy.py. All methods are collective."""

    @property
    def model(self) -> "PreTrainedModel":
        """The model, sharded or not, under Hugging Face names."""

    @property
    def loss_shares(self) -> int:
        """Divide the gradients of a rank's activations by this to get those of the mean loss of the global batch."""

    def held(self, kind: str) -> Held:
        """Yield (name, block, shape of the full tensor, start of the block in it) of every block of this rank's shards of parameters.

        `kind` is "gradient" (between `forward_backward` and `update`), "parameter", one of `state_kinds` or, with --ema_decay,
        "average".
        """

    def state_kinds(self) -> list[str]:
        """Return the names of the tensors that the optimizer keeps of parameters, once it has stepped.

        `held` yields them, too.
        """

    def called(self) -> CalledModules:
        """Return the modules that are called with the batch, and where among their arguments `input_ids` and `labels` are.

        A place is the name of an argument or its number.
        """


class Capture:
    """One rank's capture. `begin`, `gradients` and `end` are collective, once per captured step.

    `about` is what the run records of itself. The ranks of `mesh` write into `folder`. `positions` are those of each sequence that this
    rank computes.

    Raises TrainingFailure on every rank if a part has no place in its full tensor, a tensor was only partly written, or the disk is
    full.
    """

    # Of the step that is being captured
    writer: step_file.StepWriter
    path: Path

    def __init__(self, about: dict[str, Any], mesh: Mesh, folder: Path, positions: Pieces):
        self.options, self.mesh, self.folder, self.rank = about["config"], mesh, folder, dist.get_rank()
        self.here = mesh.coordinates(self.rank)
        self.rows, self.seq_length = sequences_per_step(self.options), self.options["seq_length"]
        self.placement = Placement(mesh, self.here, self.rows, self.seq_length, positions)
        self.inputs = Samples.of_options(self.options).inputs
        self.steps: Container[int] = range(1, self.options["capture_steps"] + 1)
        layout = layout_of(
            about["architecture"], self.options["attn_impl"], positions="position_ids" in self.inputs
        )
        state = state_of(self.options["optimizer"], layout.model.trained)
        self.layout = layout.model_copy(update={"state": state})
        self.kinds = self.layout.kinds(self.options)
        self.own_optimizer = self.options["optimizer"] not in OPTIMIZERS
        num_kinds = MOST_KINDS if self.own_optimizer else len(self.kinds)
        self.num_tensors = (
            2 * len(self.layout.outputs) + num_kinds * len(self.layout.parameters) + len(self.inputs)
        )
        self.manifest: dict[str, Any] = {"run": about, "layout": self.layout.model_dump(), "steps": {}}
        self.writers: dict[str, bool] = {}
        self.cut = set[
            str
        ]()  # parameters of which this rank has a shard, and others of its stage have the rest
        self.unfinished: list[Path] = []

    def begin(self, strategy: Captured, step: int, fed: Sequence[tuple[torch.Tensor, ...]] = ()) -> None:
        """Open the file of a step and register the hooks. Call this before the step's first forward pass.

        `fed` are the micro batches that the strategy is given. They are recorded if the model is not called with them: a loss of the
        user's own may call parts of the model, or keep the labels for itself.
        """
        self._open(strategy, step)
        self.fed = fed
        called = strategy.called()
        self.called_with = set[str]().union(*(places for _, places in called))
        self.handles = [
            module.register_forward_pre_hook(_untraced(self._see_batch, places), with_kwargs=True)
            for module, places in called
        ]
        names = self.layout.names
        by_name = {
            name: module
            for name, module in watched(strategy.model, names.base)
            if not compiled.is_hidden(names, self.options["compile"], name)
        }
        for name in self.layout.inputs.keys() & by_name.keys():
            self.handles.append(
                by_name[name].register_forward_pre_hook(
                    _untraced(self._see_inputs, name), prepend=True, with_kwargs=True
                )
            )
        for name, module in by_name.items():
            self.handles.append(module.register_forward_hook(_untraced(self._see_outputs, name)))
        # Of each call that has begun of the model or of a part that a loss may call, whether it computes gradients. Nothing is written of one
        # that does not. These hooks come first and last.
        self.calls: list[bool] = []
        parts = {module for module, _ in called}
        parts |= {module for name, module in strategy.model.named_modules() if name == names.base}
        for module in parts:
            self.handles += [
                module.register_forward_pre_hook(_untraced(self._begin_call), prepend=True),
                module.register_forward_hook(_untraced(self._end_call), always_call=True),
            ]

    def _open(self, strategy: Captured, step: int) -> None:
        """Open the file of a step on every rank. Collective."""
        self.strategy, self.step, self.problem = strategy, step, ""
        self.loss_shares = strategy.loss_shares  # the gradients of activations are divided by it
        self.no_room: OSError | None = None
        self.seen: Counter[str] = Counter()  # tensor -> the rows of this rank so far
        self.gradients_seen: set[tuple[str, int]] = set()
        self.final = step_file.step_path(self.folder, step)
        self.unfinished = [
            self.final.with_name(f"{self.final.name}.part{stage or ''}") for stage in range(self.mesh.pp)
        ]
        self.path = self.unfinished[self.here.pp]
        if self.rank == self.mesh.rank(Coordinates(pp=self.here.pp)):
            self._try(step_file.StepWriter.create, self.path)
        stop_together(self.problem)
        writer = self._try(step_file.StepWriter, self.path, self.num_tensors)
        stop_together(self.problem)
        assert writer is not None, "where there is none there is a problem"
        self.writer = writer
        if not self.writers:
            self.writers = self._parameter_writers()

    def gradients(self) -> None:
        """Write every parameter's gradient. Call this between the backward pass and the update."""
        for handle in self.handles:
            handle.remove()
        for number, name in enumerate(self.inputs):
            # A stage of a pipeline is called with one of the inputs
            if name in self.called_with and not self.seen[f"batch/{name}"]:
                for micro_batch in self.fed:
                    self._write_batch(name, self._own_positions(micro_batch[number]))
        self._write_held("gradient")

    def only_parameters(self, strategy: Captured) -> None:
        """Write the parameters alone, as step 0."""
        self._open(strategy, 0)
        self._write_held("parameter")
        self._close({})

    def end(self, record: dict, *, updated: bool = True) -> None:
        """Write optimizer state and parameters, finish the file, and name the step in the manifest.

        Call this after the update.
        """
        if updated and self.own_optimizer and not self.layout.state:
            self._see_state()
        for kind in self.kinds[1:] if updated else ():
            self._write_held(kind)
        self._close({key: record[key] for key in manifest.Trained.model_fields if key in record})

    def _see_state(self) -> None:
        """Put into the layout what an optimizer of the user's own keeps of parameters. Collective, after its first step."""
        own_state = {
            kind: {name: full for name, _, full, _ in self.strategy.held(kind)}
            for kind in self.strategy.state_kinds()
        }
        state: State = {}
        for rank_state in gather_objects(own_state):
            for kind, shapes in rank_state.items():
                state.setdefault(kind, {}).update(shapes)
        self.layout = self.layout.model_copy(update={"state": state})
        self.kinds = self.layout.kinds(self.options)
        self.manifest["layout"] = self.layout.model_dump()

    def state_contract(self, contract: dict) -> None:
        """Record the effective contract. Called once, by one rank, after a first step."""
        self.manifest["contract"] = contract
        manifest.write(self.folder, self.manifest)

    def abandon(self) -> None:
        """Remove the file of an unfinished step, after a failure.

        It is of no use and takes room, and no older dump is read beside it.
        """
        if self.rank == 0 and self.unfinished:
            with contextlib.suppress(OSError):
                for path in self.unfinished:
                    path.unlink(missing_ok=True)
                self.folder.rmdir()  # if no step was finished

    def _close(self, entry: dict) -> None:
        """Close the file on every rank and finish it on rank 0. `entry` is what the manifest says of the step. Collective."""
        self._try(self.writer.close)
        if self.no_room:  # the size of the whole file is known now
            reason = why_not_written(self.no_room, self.path, self.writer.size)
            self.problem = f"cannot write {self.path} (capture of step {self.step}, rank {self.rank}): {reason}; free space or choose another --capture_dir"
        parts = {name: slot.parts for name, slot in self.writer.slots.items()}
        slots = {name: (slot.shape, slot.dtype, slot.offset) for name, slot in self.writer.slots.items()}
        by_rank = gather_objects((parts, slots))
        stop_together(self.problem)
        if self.rank == 0:
            self._try(self._finish, by_rank, entry)
        stop_together(self.problem)

    def _try(
        self, call: Callable[Given, Returned], *arguments: Given.args, **options: Given.kwargs
    ) -> Returned | None:
        """Call a function and keep its error for `stop_together`, because the other ranks wait in a collective."""
        try:
            return call(*arguments, **options)
        except Exception as error:  # noqa: BLE001 - it is raised on every rank, by stop_together
            if not self.problem:
                self.problem = (
                    f"capture of step {self.step}, rank {self.rank}: {first_line(error)} ({self.path})"
                )
                self.no_room = error if isinstance(error, OSError) else None
            return None

    def _begin_call(self, _module: torch.nn.Module, _arguments: tuple) -> None:
        self.calls.append(torch.is_grad_enabled())

    def _end_call(self, _module: torch.nn.Module, _arguments: tuple, _output: object) -> None:
        self.calls.pop()

    @property
    def _is_left_out(self) -> bool:
        """Whether nothing is written of what is computed now.

        Within a call that computes gradients, reentrant checkpointing computes layers without them.
        """
        return being_recomputed() or (bool(self.calls) and not self.calls[0])

    def _see_batch(
        self,
        places: dict[str, str | int],
        _module: torch.nn.Module,
        arguments: tuple,
        options: dict[str, Any],
    ) -> None:
        """Write the parts of the batch that a module is called with. A hook."""
        if self._is_left_out:
            return
        for name, place in places.items():
            if isinstance(place, int):
                self._write_batch(name, arguments[place])
            elif place in options:
                self._write_batch(name, options[place])
            elif (
                name == "input_ids" and arguments
            ):  # the first argument of every causal language model of transformers
                self._write_batch(name, arguments[0])

    def _write_batch(self, name: str, local: torch.Tensor) -> None:
        if local.ndim > 2:
            return  # a mask made of what was fed, which is written instead
        row = self._next_row(f"batch/{name}", local)
        self._try(self._write_placed, f"batch/{name}", local, (BATCH, SEQUENCE), row)

    def _own_positions(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's positions of a tensor of a micro batch (B, S)."""
        return torch.cat(
            [whole[:, start : start + length] for start, length in self.placement.positions], dim=1
        )

    def _next_row(self, name: str, local: torch.Tensor) -> int:
        """Return the row at which a micro batch begins among the samples of this rank, which come one after the other."""
        row = self.seen[name]
        self.seen[name] += local.shape[0]
        return row

    def _see_inputs(
        self, module: str, _module: torch.nn.Module, arguments: tuple, options: dict[str, Any]
    ) -> None:
        by_place = {**{str(place): value for place, value in enumerate(arguments)}, **options}
        for place, name in self.layout.inputs[module].items():
            if isinstance(by_place.get(place), torch.Tensor):
                self._see(name, by_place[place])

    def _see_outputs(self, module: str, _module: torch.nn.Module, _arguments: object, output: object) -> None:
        for name, tensor in named_outputs(module, output):
            self._see(name, tensor)

    def _see(self, name: str, tensor: torch.Tensor) -> None:
        """Write an output or input of a module now, and its gradient when it is computed."""
        if self._is_left_out:
            return
        if name not in self.layout.outputs:
            if self.layout.is_further(name) or name in self.layout.unknown:
                return  # such as the probabilities that eager attention returns beside its output
            self.problem = (
                self.problem
                or f"capture of step {self.step}, rank {self.rank}: {name} was computed, but the model has no such module"
            )
            return
        local, symbols = self._with_sequence(name, _local(tensor)), self.layout.outputs[name]
        row = self._next_row(name, local)
        if row > 0 and symbols[0] != BATCH:
            return  # the same for every micro batch
        self._try(self._write_placed, f"forward/{name}", local, symbols, row)
        if tensor.requires_grad and name in self.layout.backward:
            # Its slot is made here, in the order of the forward pass, which is the same on all ranks
            self._try(self._place, f"backward/{name}", local, symbols)
            tensor.register_hook(functools.partial(self._see_gradient, name, row))

    def _with_sequence(self, name: str, local: torch.Tensor) -> torch.Tensor:
        """Return the tensor with dims of its own for batch and sequence, if its first dim is all tokens of a micro batch."""
        if name not in self.layout.flat:
            return local
        return local.unflatten(0, (self.fed[0][0].shape[0], -1))

    def _see_gradient(self, name: str, row: int, gradient: torch.Tensor) -> None:
        if (name, row) in self.gradients_seen:
            # A zero-bubble schedule computes the gradients of weights later, from this gradient again
            return
        self.gradients_seen.add((name, row))
        local = self._with_sequence(name, _local(gradient)) / self.loss_shares
        self._try(self._write_placed, f"backward/{name}", local, self.layout.outputs[name], row)

    def _write_placed(self, name: str, local: torch.Tensor, symbols: tuple, row: int) -> None:
        runs, is_writer = self._place(name, local, symbols)
        if symbols[0] == BATCH:
            [(first, rows)] = runs[0]
            runs[0] = [(first + row, rows)]
        for start, block in blocks(local, runs):
            self.writer.write(name, start, block, is_writer=is_writer)

    def _place(self, name: str, local: torch.Tensor, symbols: tuple) -> tuple[list[Runs], bool]:
        """Make the tensor's slot. Returns where this rank's first micro batch lies in it, and whether this rank writes."""
        full, runs, is_writer = self.placement.of(name, local, symbols)
        self.writer.slot(name, full, local.dtype)
        return runs, is_writer

    def _write_held(self, kind: str) -> None:
        for name, local, full, start in self.strategy.held(kind):
            self._try(self._write_one_held, f"{kind}/{name}", name, local, full, start)

    def _write_one_held(self, key: str, name: str, local: torch.Tensor, full: tuple, start: tuple) -> None:
        self.writer.slot(key, full, local.dtype)
        # An optimizer of the user's own may keep whole state of a parameter that is cut.
        is_whole = name in self.cut and tuple(local.shape) == tuple(full)
        is_first = self.here == Coordinates(pp=self.here.pp)
        self.writer.write(key, start, local, is_writer=is_first if is_whole else self.writers[name])

    def _parameter_writers(self) -> dict[str, bool]:
        """Return parameter -> whether this rank writes its shard. Ranks that hold the same shard take turns. Collective."""
        own_places: dict[str, list] = {}
        wholes = set()
        for name, local, full, start in self.strategy.held("parameter"):
            own_places.setdefault(name, []).append((start, tuple(local.shape)))
            if tuple(local.shape) == tuple(full):
                wholes.add(name)
        by_rank = gather_objects((self.here.pp, own_places))
        of_stage = {rank: places for rank, (stage, places) in enumerate(by_rank) if stage == self.here.pp}
        writes = {}
        for number, name in enumerate(own_places):
            holders = [rank for rank, places in of_stage.items() if places[name] == own_places[name]]
            writes[name] = holders[number % len(holders)] == self.rank
            if len(holders) < len(of_stage) and name not in wholes:  # else one rank has all of it
                self.cut.add(name)
        return writes

    def _finish(self, by_rank: list, entry: dict) -> None:
        """Check that the parts cover the tensors, write the header, and name the step in the manifest. On rank 0.

        `by_rank` has the parts and the slots of every rank.
        """
        tensors, replicas = {}, {}
        first_ranks = [self.mesh.rank(Coordinates(pp=stage)) for stage in range(self.mesh.pp)]
        for rank, (_, slots) in enumerate(by_rank):
            first = first_ranks[self.mesh.coordinates(rank).pp]
            if slots != by_rank[first][1]:
                raise ValueError(_unlike(first, by_rank[first][1], rank, slots))
        for stage, path in enumerate(self.unfinished[1:], 1):
            self.writer.append(path, by_rank[first_ranks[stage]][1])
        for name in self.layout.of_step(self.kinds, self.rows, self.seq_length, self.inputs[2:]):
            if not any(rank_parts.get(name) for rank_parts, _ in by_rank):
                continue  # not computed in this step
            slot = self.writer.slots[name]
            parts = [rank_parts.get(name, []) for rank_parts, _ in by_rank]
            self._count_one_stage(parts)
            checksum, odd_ranks = step_file.merge(name, parts, slot.shape, slot.dtype.itemsize)
            tensors[name] = {
                "dtype": step_file.DTYPES[slot.dtype],
                "shape": list(slot.shape),
                "sharded": self._sharded(parts),
                "checksum": checksum,
            }
            if odd_ranks:
                replicas[name] = odd_ranks
        self.writer.write_header(self.path)
        if not self.manifest["steps"]:  # this is the first whole step: now an older dump can go
            remove_captured(self.folder, but=self.path)
        os.replace(self.path, self.final)
        self.manifest["steps"][str(self.step)] = {**entry, "tensors": tensors, "replicas_differ": replicas}
        manifest.write(self.folder, self.manifest)

    def _count_one_stage(self, parts: list[list[step_file.Part]]) -> None:
        """Count only the first stage's parts of a tensor that several stages have written, each into its own file."""
        stages = [self.mesh.coordinates(rank).pp for rank in range(len(parts))]
        owner = min(stage for stage, rank_parts in zip(stages, parts, strict=True) if rank_parts)
        for stage, rank_parts in zip(stages, parts, strict=True):
            for part in rank_parts if stage != owner else ():
                part.checksum = None

    def _sharded(self, parts: list[list[step_file.Part]]) -> dict[str, int]:
        """Return mesh axis -> the dim that it cuts, from the places of the ranks' parts."""
        dims: dict[str, int] = {}
        first = next(rank for rank, rank_parts in enumerate(parts) if rank_parts)
        for axis in self.mesh.axes:
            if AXES[axis] is Cuts.LAYERS:  # it cuts no tensor
                continue
            here, there = parts[first][0].start, parts[self.mesh.neighbour(first, axis)][0].start
            dims.update((axis, dim) for dim, (a, b) in enumerate(zip(here, there, strict=True)) if a != b)
        return dims


def _unlike(first: int, ours: dict[str, tuple], rank: int, theirs: dict[str, tuple]) -> str:
    """Return how the tensors of two ranks differ, in words. `ours` of rank `first` and `theirs` have (shape, dtype, offset) of each."""
    for name in {**ours, **theirs}:
        if name not in ours or name not in theirs:
            lacks, has = (rank, first) if name in ours else (first, rank)
            return f"rank {lacks} has no {name}, and rank {has} has: each rank names all tensors, those that it has no part of with an empty block"
        (shape, dtype, _), (other_shape, other_dtype, _) = ours[name], theirs[name]
        if (shape, dtype) != (other_shape, other_dtype):
            return f"{name} is {list(shape)} {dtype} on rank {first}, and {list(other_shape)} {other_dtype} on rank {rank}"
    here, there = next(pair for pair in zip(ours, theirs, strict=True) if pair[0] != pair[1])
    return f"rank {rank} has {there} where rank {first} has {here}: both must compute the same, in one order, and call the model with the same inputs"


def _untraced(see: Callable[..., Any], *arguments: Any) -> Callable[..., Any]:
    """Return a hook that calls `see` with these arguments first. A graph of a strategy that compiles by itself ends at it."""
    hook = functools.partial(see, *arguments)
    # To import dynamo takes seconds
    return torch.compiler.disable(hook) if "torch._dynamo" in sys.modules else hook


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a DTensor; of any other tensor, the tensor itself."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
