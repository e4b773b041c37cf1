"""Read what lockstep/recorder/recorder.py wrote: micro batches, and tensors made whole from the shards of all ranks."""

import functools
import itertools
import math
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from lockstep.ground import user_file
from lockstep.ground.errors import UserError, first_line, printable
from lockstep.ground.files import read_json
from lockstep.ground.schemas import validate
from lockstep.recorder import building, dropped
from lockstep.recorder.called import Called, put_together, require_whole
from lockstep.recorder.module_hooks import module_of
from lockstep.recorder.recorded_step import FORMAT, Origin, RunStep, RunSteps, Step

REMEDY = "record again"


def _require_places(step: Step, path: Path) -> None:
    """Raises UserError for a tensor of which it is not said what shape the whole has, or where a block lies in it."""
    for name, places in step.places.items():
        whole, blocks = (places[0].full if places else None), places[1:]
        known = whole is not None and all(
            one.start is not None and one.shape is not None and len(one.start) == len(one.shape) == len(whole)
            for one in blocks
        )
        if not known:
            raise UserError(f"{path}: it does not say where {printable(name)} lies; {REMEDY}")


class Recording:
    """A folder that a run was recorded into. Raises UserError for one that is none, or not whole."""

    def __init__(self, folder: Path):
        self.folder = self.model_folder = folder
        user_file.run_nothing_of(folder)
        self._opened: dict[Path, Any] = {}
        self._holders: dict[int, dict[str, list[int]]] = {}
        self._odd: dict[tuple[int, str, tuple[int, ...]], list[int]] = {}
        path = folder / "model.json"
        if not path.is_file():
            raise UserError(
                f"{folder} holds no recording (there is no {path.name}); record a run into it first, "
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
        self.steps: list[dict[int, Step]] = []
        while (folder / f"rank_0/step_{len(self.steps) + 1}.json").is_file():
            self.steps.append(self._step(len(self.steps) + 1))
        if not self.steps:
            raise UserError(
                f"{folder}: no optimizer's step was recorded; the recorded model must be trained, in training mode, by a torch optimizer"
            )

    def _step(self, number: int) -> dict[int, Step]:
        """The step as all ranks recorded it, by rank."""
        found: dict[int, Step] = {}
        world = 1
        while len(found) < world:
            rank = len(found)
            path = self._path(rank, number).with_suffix(".json")
            if not path.is_file():
                raise UserError(
                    f"{path} is missing: rank {rank} of {world} did not record step {number}; {REMEDY}, as many steps as every rank makes (--steps)"
                )
            found[rank] = validate(Step, read_json(path), path, REMEDY)
            _require_places(found[rank], path)
            world = found[0].world_size
        return found

    def whole_run(self) -> list[list[RunStep]]:
        """The steps of the run, of each rank: to its end, or as many as were written before it was stopped."""
        found = []
        for rank in range(self.steps[0][0].world_size):
            steps: list[RunStep] = []
            for number in itertools.count(1):
                path = self.folder / f"rank_{rank}" / f"run_{number}.json"
                if not path.is_file():
                    break
                steps += validate(RunSteps, read_json(path), path, REMEDY).steps
            found.append(steps)
        return found

    def _path(self, rank: int, step: int) -> Path:
        return self.folder / f"rank_{rank}" / f"step_{step}.safetensors"

    def build(self) -> torch.nn.Module:
        """The recorded model, with its parameters on the meta device."""
        return building.build(self.tree, self._load(self.model_folder / "model.safetensors"))

    @property
    def needs_group(self) -> bool:
        """Whether the model is of a run of one process that had a process group, which its code may ask for."""
        first = self.steps[0][0]
        return first.world_size == 1 and bool(first.groups)

    @functools.cached_property
    def skeleton(self) -> torch.nn.Module:
        """The same, built once, to be looked at."""
        return self.build()

    def _load(self, path: Path) -> dict[str, torch.Tensor]:
        try:
            return load_file(path)
        except (OSError, SafetensorError) as error:
            raise UserError(f"{path}: {first_line(error)}; {REMEDY}") from error

    def _file(self, rank: int, step: int) -> Any:
        """A rank's tensors of a step, by name. The file stays open."""
        path = self._path(rank, step)
        if path not in self._opened:
            try:
                self._opened[path] = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise UserError(f"{path}: {first_line(error)}; {REMEDY}") from error
        return self._opened[path]

    def _tensor(self, rank: int, step: int, key: str) -> torch.Tensor:
        """A block that a rank has of a tensor, NAME#NUMBER, or a tensor that is no block."""
        found = self._stored(rank, step, key)
        name, _, number = key.partition("#")
        if number:
            shape = self.steps[step - 1][rank].places[name][int(number) + 1].shape
            if list(found.shape) != shape:
                path = self._path(rank, step)
                raise UserError(f"{path}: {printable(key)} is {list(found.shape)}, and not {shape}; {REMEDY}")
        return found

    def _stored(self, rank: int, step: int, key: str) -> torch.Tensor:
        if key.partition("#")[0] in self.steps[step - 1][rank].unchanged:
            return self._stored(rank, step - 1, key.replace("weight/", "updated/", 1))
        try:
            return self._file(rank, step).get_tensor(key)
        except SafetensorError as error:
            raise UserError(
                f"{self._path(rank, step)}: {printable(key)}: {first_line(error)}; {REMEDY}"
            ) from error

    def part(self, rank: int, step: int, name: str) -> torch.Tensor | None:
        """The first block that a rank has of a tensor; None if it has none."""
        return self._tensor(rank, step, f"{name}#0") if name in self.steps[step - 1][rank].places else None

    def dropped(self, step: int, called: Called, call: int, shape: torch.Size) -> torch.Tensor | None:
        """Which elements the `call`-th call of dropout kept in the forward pass; None if that was not seen."""
        rank = called.ranks[0]
        name = f"dropped/{called.number}/{call}"
        if name not in self._file(rank, step).keys():  # noqa: SIM118 - of a file
            return None
        try:
            return dropped.unpacked(self._tensor(rank, step, name), shape)
        except ValueError as error:
            raise UserError(f"{self._path(rank, step)}: {name}: {error}; {REMEDY}") from error

    def buffers(self, step: int, called: Called) -> dict[str, torch.Tensor]:
        """Those of the model before a micro batch, and the tensors of its attributes, as the first rank that was called with it has them."""
        rank = called.ranks[0]
        places = self.steps[step - 1][rank].places
        last: dict[str, str] = {}
        for number in range(called.number + 1):
            first = f"buffer/{number}/"
            last |= {name.removeprefix(first): name for name in places if name.startswith(first)}
        found = {}
        for own, name in last.items():
            whole, *parts = places[name]
            here = [rank] if [one.shape for one in parts] == [whole.full] else None
            found[own] = self.whole(step, name, here)[0]
        return found

    def _arrived(self, step: int, called: Called, first: str) -> dict[str, torch.Tensor]:
        """What arrived from the loop, of the tensors whose names begin so."""
        places = self.steps[step - 1][called.ranks[0]].places
        names = [name for name in places if name.startswith(first)]
        # Those that have a part of it may be called with other samples, which is then said.
        of_all = self.parted(step, called) or not all(
            self._have_all_of(step, name, called.ranks) for name in names
        )
        found = {
            name.removeprefix(first): self.whole(step, name, None if of_all else called.ranks)[0]
            for name in names
        }
        return {name: one for name, one in found.items() if one.any()}

    def _have_all_of(self, step: int, name: str, ranks: list[int]) -> bool:
        places = [self.steps[step - 1][rank].places.get(name, []) for rank in ranks]
        blocks = {tuple(one.start or ()): math.prod(one.shape or ()) for own in places for one in own[1:]}
        return sum(blocks.values()) == math.prod(places[0][0].full or ())

    def names(self, step: int, kind: str) -> list[str]:
        """What the ranks recorded of a kind, such as "gradient" or "state/exp_avg"."""
        first = f"{kind}/"
        of_ranks = [
            name for one in self.steps[step - 1].values() for name in one.places if name.startswith(first)
        ]
        return list(dict.fromkeys(name.removeprefix(first) for name in of_ranks))

    def of_modules(self, step: int, called: Called) -> dict[str, list[tuple[int, torch.Tensor]]]:
        """What modules returned for a micro batch, and what arrived there: forward/MICRO_BATCH/MODULE -> (rank, tensor).

        A tensor that every rank has a part of is made whole, and is the first one's.
        """
        found: dict[str, list[tuple[int, torch.Tensor]]] = {}
        prefixes = (f"forward/{called.number}/", f"backward/{called.number}/")
        for rank in called.ranks:
            for name, places in self.steps[step - 1][rank].places.items():
                if not name.startswith(prefixes):
                    continue
                if [place.shape for place in places[1:]] == [places[0].full]:
                    found.setdefault(name, []).append((rank, self._tensor(rank, step, f"{name}#0")))
                elif name not in found:
                    found[name] = [(rank, self.whole(step, name, called.ranks)[0])]
        return found

    def parted(self, step: int, called: Called) -> tuple[str, int] | None:
        """(an output of a module that the ranks that were called with a micro batch do not have all of, another rank that has the rest)."""
        ranks = self.steps[step - 1]
        first = (f"forward/{called.number}/", f"backward/{called.number}/returned.")
        for name, (whole, *parts) in ranks[called.ranks[0]].places.items():
            if not name.startswith(first) or [one.shape for one in parts] == [whole.full]:
                continue
            starts = {
                rank: {tuple(one.start or ()) for one in about.places.get(name, [])[1:]}
                for rank, about in ranks.items()
            }
            here = set.union(*(starts[rank] for rank in called.ranks))
            other = next((rank for rank, of_rank in starts.items() if of_rank - here), None)
            if other is not None:
                return module_of(name), other
        return None

    def holders(self, step: int) -> dict[str, list[int]]:
        """Of the parameters that not every rank's optimizers hold, such as where each updates its share of them: the ranks whose do."""
        if step not in self._holders:
            ranks = self.steps[step - 1]
            held: dict[int, set[str]] = {rank: set(one.held) for rank, one in ranks.items()}
            self._holders[step] = {
                name: [rank for rank, names in held.items() if name in names]
                for name in set().union(*held.values())
                if not all(name in names for names in held.values())
            }
        return self._holders[step]

    def waiting(self, step: int) -> set[str]:
        """Parameters of optimizers that step in other recorded steps, and not in this one, such as a discriminator's."""
        held = [{name for about in ranks.values() for name in about.held} for ranks in self.steps]
        return set().union(*held) - held[step - 1]

    def whole(
        self, step: int, name: str, ranks: list[int] | None = None, *, mean: bool = False
    ) -> tuple[torch.Tensor, list[int]]:
        """(a tensor made whole, the ranks whose shard is not what an earlier rank has in its place); `ranks` are those that may hold it.

        A gradient and an updated parameter are those of the ranks whose optimizers hold it. `mean`: over the replicas.
        Raises UserError if the ranks' shards do not cover it.
        """
        kind, _, own = name.partition("/")
        if ranks is None and kind in ("gradient", "updated"):
            ranks = self.holders(step).get(own)
        replicas: dict[tuple, list[torch.Tensor]] = {}
        within: dict[tuple, tuple[slice, ...]] = {}
        # A tensor is asked for again and again, and its replicas are compared once
        among = step, name, tuple(ranks or ())
        odd: list[int] = []
        full: list[int] = []
        for rank, about in self.steps[step - 1].items():
            places = about.places.get(name)
            if places is None or (ranks is not None and rank not in ranks):
                continue
            full = places[0].full or []
            for number, place in enumerate(places[1:]):
                key = (tuple(place.start or ()), tuple(place.shape or ()))
                if key in replicas and among in self._odd and not mean:
                    continue
                block = self._tensor(rank, step, f"{name}#{number}")
                same, within[key] = replicas.setdefault(key, []), place.within
                if same and not torch.equal(same[0], block):
                    odd.append(rank)
                if mean or not same:
                    same.append(block)
        odd = self._odd.setdefault(among, odd)
        blocks = [
            (
                key,
                torch.stack([one.double() for one in found]).mean(0).to(found[0].dtype) if mean else found[0],
            )
            for key, found in replicas.items()
        ]
        covered = sum(block.numel() for _, block in blocks)
        if not blocks or covered != torch.Size(full).numel():
            raise UserError(f"{self.folder}: {name} of step {step} has {covered} of its elements; {REMEDY}")
        if len(blocks) == 1:
            return blocks[0][1].reshape(full), odd
        result = torch.empty(full, dtype=blocks[0][1].dtype)
        for key, block in blocks:
            result[within[key]] = block
        return result, odd

    def batch(self, step: int, rank: int, number: int) -> dict[str, torch.Tensor]:
        """What a rank's model was called with in a micro batch, and what the loop noted for it."""
        names = self.steps[step - 1][rank].micro_batches[number].tensors
        return {name: self._tensor(rank, step, f"batch/{number}/{name}") for name in names}

    def micro_batches(self, step: int) -> list[Called]:
        """The micro batches of a step. Those that several ranks were called with, bit for bit and in the same place, are one."""
        found: list[Called] = []
        for rank, about in self.steps[step - 1].items():
            for number, micro in enumerate(about.micro_batches):
                if micro.elsewhere:
                    continue
                tensors = self.batch(step, rank, number)
                same = next(
                    (one for one in found if one.number == number and one.has_same(tensors, micro)), None
                )
                if same is None:
                    random = self._tensor(rank, step, f"random/{number}") if micro.drawn else None
                    name = f"target/{number}"
                    known = name in self._file(rank, step).keys()  # noqa: SIM118 - of a file
                    targets = self._tensor(rank, step, name) if known else None
                    same = Called(number, [], micro, tensors, random=random, targets=targets)
                    found.append(same)
                same.ranks.append(rank)
                if micro.loss is not None:
                    same.losses[rank] = micro.loss
        for called in found:
            of_returned = f"backward/{called.number}/returned."
            called.arrived = self._arrived(step, called, of_returned)
            called.beside = self._arrived(step, called, f"beside/{called.number}/")
            places = self.steps[step - 1][called.ranks[0]].places
            called.of_tensors = any(name.startswith(of_returned) for name in places)
        again = next((one for one in found if one.about.differentiated), None)
        if again is not None:
            raise UserError(
                f"{self._path(again.ranks[0], step)}: the gradient at what the model returned for micro batch {again.number} is differentiated again "
                "(create_graph=True), as by a gradient penalty; record a run without it, or let the model return the penalty"
            )
        put_together(found, [group for about in self.steps[step - 1].values() for group in about.groups])
        for called in found:
            require_whole(called)
        if not any(one.about.used for one in found):
            raise UserError(
                f"{self._path(0, step)}: no gradient arrived at what the model returned: it returns no tensors, or is not trained on them; "
                "let it return them in a tuple, a list, a dict or the fields of an object"
            )
        return found
