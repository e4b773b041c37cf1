"""Read what lockstep/recorder/recorder.py wrote: micro batches, and tensors made whole from all ranks' shards."""

import functools
import itertools
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from lockstep.ground import user_file
from lockstep.ground.errors import UserError, first_line, printable
from lockstep.ground.files import read_json
from lockstep.ground.schemas import validate
from lockstep.recorder import building, dropout_masks
from lockstep.recorder.complex_numbers import as_real
from lockstep.recorder.micro_batch import JoinedMicroBatch, are_of_other_samples, join_pieces, require_whole
from lockstep.recorder.module_hooks import module_of
from lockstep.recorder.recorded_step import (
    ERROR,
    FORMAT,
    Origin,
    RunError,
    RunStep,
    RunSteps,
    StepRecord,
)

REMEDY = "record again"
# The folder of a stage of a pipeline
STAGE = re.compile(r"stage_\d+")


def stages_in(folder: Path) -> list["Recording"]:
    """Return the recordings of a pipeline's stages in a folder, in their order; [] if the recorded run has no stages.

    Raises UserError if a stage, or a rank of one, is missing.
    """
    # An earlier run into the same folder may have had stages.
    if (folder / "rank_0").is_dir():
        return []
    if not [*folder.glob("stage_*/rank_*")]:
        return []
    stages: list[Recording] = []
    while not stages or len(stages) < stages[0].steps[0][0].stages:
        path = folder / f"stage_{len(stages)}"
        if not ranks_in(path):
            raise UserError(f"{path}: this stage of the pipeline recorded no step; {REMEDY}")
        stages.append(Recording(path))
    if len({len(stage.steps) for stage in stages}) > 1:
        raise UserError(f"{folder}: the stages of the pipeline recorded different numbers of steps; {REMEDY}")
    ranks = range(stages[0].steps[0][0].launched)
    absent = {*ranks} - {rank for stage in stages for rank in stage.stage_ranks}
    if absent:
        raise UserError(f"{folder}: rank {min(absent)} of {len(ranks)} recorded no step of a stage; {REMEDY}")
    return stages


def ranks_in(stage: Path) -> list[int]:
    """Return the ranks of a pipeline's stage that recorded its first step.

    An earlier run of more ranks into the same folder may have left some, too.
    """
    ranks = {int(path.name[5:]): path / "step_1.json" for path in stage.glob("rank_*")}
    sizes = {
        rank: validate(StepRecord, read_json(path), path, REMEDY).world_size
        for rank, path in ranks.items()
        if path.is_file()
    }
    return sorted(rank for rank in sizes if rank < sizes[min(sizes)])


class Recording:
    """The recording in a folder. Raises UserError if the folder holds none, or an incomplete one.

    `steps[0]` is step 1: rank -> what the rank recorded of it. Methods are given the number of a step, from 1.
    """

    def __init__(self, folder: Path):
        self.folder = self.model_folder = folder
        user_file.run_nothing_of(folder)
        self._open_files: dict[Path, Any] = {}
        # What `holders` returned, by step
        self._holders: dict[int, dict[str, list[int]]] = {}
        # The ranks that `whole` returned, by (step, name, ranks that may hold it)
        self._odd_ranks: dict[tuple[int, str, tuple[int, ...]], list[int]] = {}
        path = folder / "model.json"
        if not path.is_file():
            raise UserError(
                f"{folder} holds no recording (there is no {path.name}): its script may have ended with an error; record a run "
                "whose weights an optimizer of torch updates, or one that is derived from torch.optim.Optimizer"
            )
        content = read_json(path)
        if (
            not isinstance(content, dict)
            or content.get("format") != FORMAT
            or not isinstance(content.get("tree"), dict)
        ):
            raise UserError(f"{path} is no model of this version's recordings; {REMEDY}")
        self.tree = content["tree"]
        self.origin = validate(Origin, content.get("origin", {}), path, REMEDY)
        # Those of a stage of a pipeline, which are numbered from 0 here; [] if the run has no stages
        self.stage_ranks = ranks_in(folder) if STAGE.fullmatch(folder.name) else []
        self.steps: list[dict[int, StepRecord]] = []
        while self._path(0, len(self.steps) + 1).with_suffix(".json").is_file():
            self.steps.append(self._step(len(self.steps) + 1))
        if not self.steps:
            raise UserError(
                f"{folder}: no optimizer's step was recorded; the recorded model must be trained, in training mode, by a torch optimizer"
            )
        # The rank, step and key of each content that was written
        self._writers = {
            content: (rank, step, key)
            for step, records in enumerate(self.steps, 1)
            for rank, record in records.items()
            for key, content in record.written.items()
        }
        first = self.steps[0][0]
        # Whether the run was one process with a process group. The model's code may ask for the group.
        self.needs_group = first.world_size == 1 and bool(first.groups)

    def _step(self, number: int) -> dict[int, StepRecord]:
        """Return what each rank recorded of a step, by rank."""
        records: dict[int, StepRecord] = {}
        world_size = 1
        while len(records) < world_size:
            rank = len(records)
            path = self._path(rank, number).with_suffix(".json")
            if not path.is_file():
                why = (
                    f"{REMEDY}, as many steps as every rank makes (--steps)"
                    if number > 1
                    else f"a rank whose process trains no model, such as a parameter server's, cannot be judged; {REMEDY} with ranks that all train"
                )
                raise UserError(
                    f"{path} is missing: rank {rank} of {world_size} did not record step {number}; {why}"
                )
            record = validate(StepRecord, read_json(path), path, REMEDY)
            records[rank] = record.numbered(self.stage_ranks) if self.stage_ranks else record
            world_size = records[0].world_size
        return records

    def whole_run(self) -> list[list[RunStep]]:
        """Return the steps of the run, for each rank: to its end, or as many as were written when it stopped."""
        steps_of_ranks = []
        for rank in range(self.steps[0][0].world_size):
            steps: list[RunStep] = []
            for number in itertools.count(1):
                path = self._rank_folder(rank) / f"run_{number}.json"
                if not path.is_file():
                    break
                steps += validate(RunSteps, read_json(path), path, REMEDY).steps
            steps_of_ranks.append(steps)
        return steps_of_ranks

    def errors(self) -> list[str]:
        """Return the errors that ended the run, each with its rank, in words."""
        found = []
        for rank in range(self.steps[0][0].world_size):
            path = self._rank_folder(rank) / ERROR
            if path.is_file():
                found.append(f"{validate(RunError, read_json(path), path, REMEDY).error} on rank {rank}")
        return found

    @property
    def names_of_ranks(self) -> str:
        """The ranks of a stage, in words. Sentences number them from 0."""
        numbers = [str(rank) for rank in self.stage_ranks]
        if len(numbers) == 1:
            return f"rank {numbers[0]}, here rank 0"
        return f"ranks {', '.join(numbers)}, here 0 to {len(numbers) - 1}"

    def _rank_folder(self, rank: int) -> Path:
        return self.folder / f"rank_{self.stage_ranks[rank] if self.stage_ranks else rank}"

    def _path(self, rank: int, step: int) -> Path:
        return self._rank_folder(rank) / f"step_{step}.safetensors"

    def build(self) -> torch.nn.Module:
        """Build the recorded model, with its parameters on the meta device."""
        return building.build(self.tree, self._load(self.model_folder / "model.safetensors"))

    @functools.cached_property
    def skeleton(self) -> torch.nn.Module:
        """The recorded model, built once, to be looked at. Its parameters are on the meta device."""
        return self.build()

    @functools.cached_property
    def parameters(self) -> dict[str, torch.Tensor]:
        """The parameters of the recorded model by name, on the meta device. Those that are complex are pairs, as they are recorded."""
        return {name: as_real(parameter) for name, parameter in self.skeleton.named_parameters()}

    def _load(self, path: Path) -> dict[str, torch.Tensor]:
        try:
            return load_file(path)
        except (OSError, SafetensorError) as error:
            raise UserError(f"{path}: {first_line(error)}; {REMEDY}") from error

    def _file(self, rank: int, step: int) -> Any:
        """Return a rank's file of a step, which has its tensors by name. The file stays open."""
        path = self._path(rank, step)
        if path not in self._open_files:
            try:
                self._open_files[path] = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise UserError(f"{path}: {first_line(error)}; {REMEDY}") from error
        return self._open_files[path]

    def _tensor(self, rank: int, step: int, key: str) -> torch.Tensor:
        """Return a block that a rank has of a tensor, NAME#NUMBER, or a tensor that is no block.

        Raises UserError for a block of another shape than the step says.
        """
        tensor = self._stored(rank, step, key)
        name, _, number = key.partition("#")
        if number:
            shape = self.steps[step - 1][rank].places[name].blocks[int(number)].shape
            if list(tensor.shape) != shape:
                path = self._path(rank, step)
                raise UserError(
                    f"{path}: {printable(key)} is {list(tensor.shape)}, and not {shape}; {REMEDY}"
                )
        return tensor

    def _stored(self, rank: int, step: int, key: str) -> torch.Tensor:
        """Return a tensor as a file has it: that of the rank, or of another that had written the same content."""
        content = self.steps[step - 1][rank].elsewhere.get(key)
        if content is not None:
            if content not in self._writers:
                raise UserError(
                    f"{self._path(rank, step)}: {printable(key)} is not here, and no other rank has written it; {REMEDY}"
                )
            rank, step, key = self._writers[content]
        try:
            return self._file(rank, step).get_tensor(key)
        except SafetensorError as error:
            raise UserError(
                f"{self._path(rank, step)}: {printable(key)}: {first_line(error)}; {REMEDY}"
            ) from error

    def _content(self, rank: int, step: int, key: str) -> str | None:
        """Return the content of a block that a rank has of a tensor; None if that is not known, as of a small one."""
        return self.steps[step - 1][rank].contents.get(key)

    def part(self, rank: int, step: int, name: str) -> torch.Tensor | None:
        """Return the first block that a rank has of a tensor; None if it has none."""
        return self._tensor(rank, step, f"{name}#0") if name in self.steps[step - 1][rank].places else None

    def _if_there(self, rank: int, step: int, name: str) -> torch.Tensor | None:
        is_left_out = name in self.steps[step - 1][rank].elsewhere
        is_there = is_left_out or name in self._file(rank, step).keys()  # noqa: SIM118 - of a file
        return self._tensor(rank, step, name) if is_there else None

    def dropped(
        self, step: int, micro_batch: JoinedMicroBatch, call: int, shape: torch.Size
    ) -> torch.Tensor | None:
        """Return which elements the `call`-th call of dropout in the forward pass kept; None if not seen."""
        rank = micro_batch.ranks[0]
        name = f"dropped/{micro_batch.number}/{call}"
        bits = self._if_there(rank, step, name)
        try:
            return None if bits is None else dropout_masks.unpacked(bits, shape)
        except ValueError as error:
            raise UserError(f"{self._path(rank, step)}: {name}: {error}; {REMEDY}") from error

    def buffers(self, step: int, micro_batch: JoinedMicroBatch) -> dict[str, torch.Tensor]:
        """Return the model's buffers before a micro batch, and the tensors among its attributes.

        They are those of the first rank that was called with the micro batch.
        """
        rank = micro_batch.ranks[0]
        places = self.steps[step - 1][rank].places
        # A buffer is recorded for the micro batches before which it has changed.
        recorded_as: dict[str, str] = {}
        for number in range(micro_batch.number + 1):
            prefix = f"buffer/{number}/"
            recorded_as |= {name.removeprefix(prefix): name for name in places if name.startswith(prefix)}
        buffers = {}
        for buffer_name, name in recorded_as.items():
            ranks = [rank] if places[name].is_whole else None
            buffers[buffer_name] = self.whole(step, name, ranks)[0]
        return buffers

    def _arrived(self, step: int, micro_batch: JoinedMicroBatch, first: str) -> dict[str, torch.Tensor]:
        """Return the gradients other than zero that arrived from the loop, whose names begin with `first`."""
        places = self.steps[step - 1][micro_batch.ranks[0]].places
        names = [name for name in places if name.startswith(first)]
        # Ranks that hold the other parts may have been called with other samples. The verdict then says so.
        needs_all_ranks = self.parted(step, micro_batch) or any(
            self._holder_of_rest(step, name, micro_batch.ranks) is not None for name in names
        )
        gradients = {
            name.removeprefix(first): self.whole(step, name, None if needs_all_ranks else micro_batch.ranks)[
                0
            ]
            for name in names
        }
        return {name: gradient for name, gradient in gradients.items() if gradient.any()}

    def _has_other_samples(self, step: int, number: int, first: int, rank: int) -> bool:
        """Whether two ranks with the same weights computed the same for losses of different samples, such as of other nodes of a graph."""
        one, other = self.steps[step - 1][first], self.steps[step - 1][rank]
        if rank not in one.data_parallel and one.shards != other.shards:
            return False

        def parts(owner: int, prefix: str) -> dict[str, torch.Tensor]:
            names = [name for name in one.places if name in other.places and name.startswith(prefix)]
            return {name: self._tensor(owner, step, f"{name}#0") for name in names}

        outputs, other_outputs = (parts(owner, f"forward/{number}/") for owner in (first, rank))
        has_inputs = bool(one.micro_batches[number].tensors)
        # Ranks that each compute a part of the samples by the model's own code have other outputs. What is drawn changes outputs, too,
        # but for the first.
        is_drawn = any(record.micro_batches[number].drawn for record in (one, other))
        names = [*outputs][:1] if is_drawn else [*outputs]
        if has_inputs and not all(torch.equal(outputs[name], other_outputs[name]) for name in names):
            return False
        gradients = (parts(owner, f"backward/{number}/returned.") for owner in (first, rank))
        return are_of_other_samples(*gradients, by_rows=has_inputs)

    def _holder_of_rest(self, step: int, name: str, ranks: list[int]) -> int | None:
        """Return a rank that holds a block of a tensor which these ranks do not hold; None if there is none."""
        starts = {
            rank: {tuple(block.start) for block in record.places[name].blocks}
            for rank, record in self.steps[step - 1].items()
            if name in record.places
        }
        held = set().union(*(starts.get(rank, ()) for rank in ranks))
        return next((rank for rank, of_rank in starts.items() if of_rank - held), None)

    def names(self, step: int, kind: str) -> list[str]:
        """Return the names of what the ranks recorded of a kind, such as "gradient" or "state/exp_avg"."""
        prefix = f"{kind}/"
        names = [
            name
            for record in self.steps[step - 1].values()
            for name in record.places
            if name.startswith(prefix)
        ]
        return list(dict.fromkeys(name.removeprefix(prefix) for name in names))

    def of_modules(
        self, step: int, micro_batch: JoinedMicroBatch
    ) -> dict[str, list[tuple[int, torch.Tensor]]]:
        """Return what modules returned for a micro batch, and the gradients that arrived there.

        They are forward/MICRO_BATCH/MODULE -> [(rank, tensor)], and backward/MICRO_BATCH/MODULE. A tensor
        that every rank has a part of is made whole, and is listed for the first of these ranks only.
        """
        tensors: dict[str, list[tuple[int, torch.Tensor]]] = {}
        prefixes = (f"forward/{micro_batch.number}/", f"backward/{micro_batch.number}/")
        for rank in micro_batch.ranks:
            for name, placed in self.steps[step - 1][rank].places.items():
                if not name.startswith(prefixes):
                    continue
                if placed.is_whole:
                    tensors.setdefault(name, []).append((rank, self._tensor(rank, step, f"{name}#0")))
                elif name not in tensors:
                    tensors[name] = [(rank, self.whole(step, name, micro_batch.ranks)[0])]
        return tensors

    def parted(self, step: int, micro_batch: JoinedMicroBatch) -> tuple[str, int] | None:
        """Return an output that the ranks of a micro batch do not hold all of; None if there is none.

        It is returned as (the module, a rank that was not called with the micro batch and holds the rest).
        """
        prefixes = (f"forward/{micro_batch.number}/", f"backward/{micro_batch.number}/returned.")
        for name, placed in self.steps[step - 1][micro_batch.ranks[0]].places.items():
            if name.startswith(prefixes) and not placed.is_whole:
                other_rank = self._holder_of_rest(step, name, micro_batch.ranks)
                if other_rank is not None:
                    return module_of(name), other_rank
        return None

    def holders(self, step: int) -> dict[str, list[int]]:
        """Return parameters that not every rank's optimizers hold, each with the ranks whose optimizers do.

        There are some where each rank updates its share of the parameters.
        """
        if step not in self._holders:
            records = self.steps[step - 1]
            held: dict[int, set[str]] = {rank: set(record.held) for rank, record in records.items()}
            self._holders[step] = {
                name: [rank for rank, names in held.items() if name in names]
                for name in set().union(*held.values())
                if not all(name in names for names in held.values())
            }
        return self._holders[step]

    def waiting(self, step: int) -> set[str]:
        """Return the parameters of optimizers that step in other steps, such as a discriminator's, not in this one."""
        held = [{name for record in records.values() for name in record.held} for records in self.steps]
        return set().union(*held) - held[step - 1]

    def whole(
        self, step: int, name: str, ranks: list[int] | None = None, *, mean: bool = False
    ) -> tuple[torch.Tensor, list[int]]:
        """Return (a whole tensor, the ranks whose block is not what an earlier rank has in the same place).

        `ranks` are those that may hold the tensor; None for all. By default, a gradient and an updated
        parameter are those of the ranks whose optimizers hold the parameter. With `mean`, each block is the
        mean over its replicas, otherwise the first replica. Raises UserError if the ranks' blocks do not
        cover the tensor.
        """
        kind, _, parameter_name = name.partition("/")
        if ranks is None and kind in ("gradient", "updated"):
            ranks = self.holders(step).get(parameter_name)
        # The replicas of a block, the content of the first one, and its slices in the whole, by its start and shape
        replicas: dict[tuple, list[torch.Tensor]] = {}
        contents: dict[tuple, str | None] = {}
        within: dict[tuple, tuple[slice, ...]] = {}
        # A tensor is asked for again and again, and its replicas are compared once.
        request = step, name, tuple(ranks or ())
        odd_ranks: list[int] = []
        full: list[int] = []
        for rank, record in self.steps[step - 1].items():
            placed = record.places.get(name)
            if placed is None or (ranks is not None and rank not in ranks):
                continue
            full = placed.full
            for number, place in enumerate(placed.blocks):
                key = tuple(place.start), tuple(place.shape)
                if key in replicas and request in self._odd_ranks and not mean:
                    continue
                content = self._content(rank, step, f"{name}#{number}")
                if content and content == contents.get(key) and not mean:
                    continue
                block = self._tensor(rank, step, f"{name}#{number}")
                earlier, within[key] = replicas.setdefault(key, []), place.within
                contents.setdefault(key, content)
                # What is not finite on all ranks alike is no difference between them.
                if (
                    earlier
                    and not earlier[0].equal(block)
                    and not earlier[0].allclose(block, 0, 0, equal_nan=True)
                ):
                    odd_ranks.append(rank)
                if mean or not earlier:
                    earlier.append(block)
        odd_ranks = self._odd_ranks.setdefault(request, odd_ranks)
        blocks = [
            (
                key,
                torch.stack([tensor.double() for tensor in tensors]).mean(0).to(tensors[0].dtype)
                if mean
                else tensors[0],
            )
            for key, tensors in replicas.items()
        ]
        covered = sum(block.numel() for _, block in blocks)
        if not blocks or covered != torch.Size(full).numel():
            raise UserError(f"{self.folder}: {name} of step {step} has {covered} of its elements; {REMEDY}")
        if len(blocks) == 1:
            return blocks[0][1].reshape(full), odd_ranks
        result = torch.empty(full, dtype=blocks[0][1].dtype)
        for key, block in blocks:
            result[within[key]] = block
        return result, odd_ranks

    def batch(self, step: int, rank: int, number: int) -> dict[str, torch.Tensor]:
        """Return the tensors that a rank's model was called with, and those that the loop noted for the call."""
        names = self.steps[step - 1][rank].micro_batches[number].tensors
        return {name: self._tensor(rank, step, f"batch/{number}/{name}") for name in names}

    def micro_batches(self, step: int) -> list[JoinedMicroBatch]:
        """Return the micro batches of a step.

        One that several ranks have, bit for bit and at the same place, counts once.

        Pieces of the same samples get the tensors of all pieces. Raises UserError for what cannot be judged.
        """
        merged: list[JoinedMicroBatch] = []
        for rank, record in self.steps[step - 1].items():
            for number, about in enumerate(record.micro_batches):
                if about.elsewhere:
                    continue
                tensors = self.batch(step, rank, number)
                same = next(
                    (
                        same
                        for same in merged
                        if same.number == number
                        and same.has_inputs(tensors, about)
                        and not self._has_other_samples(step, number, same.ranks[0], rank)
                    ),
                    None,
                )
                if same is None:
                    random = self._tensor(rank, step, f"random/{number}") if about.drawn else None
                    targets = self._if_there(rank, step, f"target/{number}")
                    same = JoinedMicroBatch(
                        number, [], about, tensors, generator_state=random, targets=targets
                    )
                    merged.append(same)
                same.ranks.append(rank)
                if about.loss is not None:
                    same.losses[rank] = about.loss
        for called in merged:
            prefix = f"backward/{called.number}/returned."
            called.output_gradients = self._arrived(step, called, prefix)
            called.direct_gradients = self._arrived(step, called, f"beside/{called.number}/")
            places = self.steps[step - 1][called.ranks[0]].places
            called.has_output_gradients = any(name.startswith(prefix) for name in places)
        differentiated = next((called for called in merged if called.record.differentiated), None)
        if differentiated is not None:
            raise UserError(
                f"{self._path(differentiated.ranks[0], step)}: the gradient at what the model returned for micro batch {differentiated.number} is differentiated again "
                "(create_graph=True), as by a gradient penalty; record a run without it, or let the model return the penalty"
            )
        join_pieces(merged, [group for record in self.steps[step - 1].values() for group in record.groups])
        for called in merged:
            require_whole(called)
        if not any(called.record.used for called in merged):
            raise UserError(
                f"{self._path(0, step)}: no gradient arrived at what the model returned: it returns no tensors, or the loss does not use them; "
                "let it return them in a tuple, a list, a dict or the fields of an object"
            )
        return merged
