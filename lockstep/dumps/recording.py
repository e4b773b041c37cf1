"""Read what lockstep/dumps/recorder.py wrote: micro batches, and tensors made whole from the shards of all ranks."""

import functools
import itertools
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from lockstep.dumps import pieces, tree
from lockstep.dumps.module_hooks import module_of
from lockstep.dumps.recorder import FORMAT
from lockstep.ground.errors import UserError, first_line, printable
from lockstep.ground.files import read_json
from lockstep.ground.schemas import Count, MayBreakDown, Name, Strict, Whole, validate

REMEDY = "record again"
IGNORED = (-100, -1)  # labels that count for no token
LABELS = ("label", "target")  # in the names of what a model is called with
LOG_PROBS = "log_probs"  # what a model of TRL returns in the place of logits
Plain = bool | int | MayBreakDown | str | None


class Origin(Strict):
    """How the run was made (lockstep/ground/origin.py); empty in an older recording."""

    command: str = ""
    script: str = ""  # as it was typed
    device: str = ""  # of rank 0
    seed: str = ""  # torch's, of rank 0
    tf32: list[Name] = []  # what a GPU computes of float32 in TF32
    date: str = ""
    versions: dict[Name, Name] = {}


class MicroBatch(Strict):
    tensors: list[Name]
    plain: dict[Name, Plain]
    # The places of what the model was called with, in lists, tuples and dicts of this structure: torch's pytree
    inputs: list[Name]
    structure: str
    left_out: list[Name]
    autocast: Name | None
    param_dtype: Name | None = None  # which FSDP2 computes in
    reduce_dtype: Name | None = None  # and reduces gradients in
    used: bool
    asked: bool = False  # by torch.autograd.grad alone
    reached: bool = False  # by a backward pass
    # In the loss of another model, whose optimizer stepped then; or for the gradient of the batch alone
    elsewhere: bool = False
    differentiated: bool = False  # in turn
    together: bool = False  # with the one before: no gradient had arrived there yet
    scalars: dict[Name, MayBreakDown]
    scale: MayBreakDown = 1.0  # of a GradScaler, in what arrived
    loss: MayBreakDown | None = None
    evaluated: list[str]  # modules in evaluation mode
    drawn: bool = False  # random numbers from torch's generator, in the forward pass
    generators: dict[
        Name, Any
    ] = {}  # their states before it: Python's and numpy's, if the model drew from them
    compiled: bool = False  # perhaps by code that torch.compile made
    attributes: dict[Name, Any] = {}  # as MODULE:NAME, that are not what they were when the recording began
    channels_last: list[Name] = []  # of the tensors, by their order in memory


class Clip(Strict):
    max_norm: MayBreakDown
    norm: MayBreakDown
    factor: MayBreakDown  # by which gradients are multiplied
    by_value: bool = False  # each element, to at most max_norm
    later: bool = False  # after the gradients were recorded
    too_late: bool = False  # after the update
    after: Whole | None = None  # so many micro batches; None: all of them
    parameters: list[Name] | None = None  # those with a gradient; None: all of the model's
    beside: MayBreakDown = 0.0  # the norm of the gradients of others, which are none of the model's

    def has(self, name: str) -> bool:
        return self.parameters is None or name in self._names

    @functools.cached_property
    def _names(self) -> frozenset[str]:
        return frozenset(self.parameters or ())


class Optimizer(Strict):
    kind: Annotated[Name, Field(alias="class")]
    groups: list[dict[str, Any]]
    number: Whole = 0  # in the order of a step
    attributes: dict[str, Any] = {}
    state: dict[Name, dict[str, Any]] = {}  # by parameter
    strangers: Whole
    replicas: list[
        list[int]
    ] = []  # of strangers that may be held by all ranks, hashes of (weights, gradient)
    again: bool = False  # it has stepped before, with the same gradient
    compiled: bool = False  # its step, by torch.compile

    @property
    def is_of_deepspeed(self) -> bool:
        return self.kind.startswith("deepspeed.")


class Place(Strict):
    full: list[Whole] | None = None
    start: list[Whole] | None = None
    shape: list[Whole] | None = None


class Step(Strict):
    """One rank's file of one step."""

    format: int
    world_size: Count
    rank: Whole
    step: Count
    torch: Name
    data_parallel: list[Whole]
    groups: list[list[Whole]] = []  # of ranks that communicate
    frozen: list[Name]  # parameters that require no gradient
    attributes: dict[Name, Any] = {}  # as MODULE:NAME, as they were when the recording began
    micro_batches: list[MicroBatch]
    clips: list[Clip]
    optimizers: list[Optimizer]
    channels_last: list[Name] = []  # parameters
    hooked_parameters: list[Name] = []  # by register_hook
    hooked: list[Name] = []  # modules that return what a hook of the loop's made of their output
    reduced: Whole = 0  # elements that the loop itself gave to collectives that reduce
    of_others: Whole = 0  # tensors that the optimizers of other models hold
    skipped: Whole = 0  # windows of micro batches before this step, clipped and then set to zero
    places: dict[Name, list[Place]]
    unchanged: list[Name]  # weights that are what the step before ended with, and written there
    changed: list[Name]  # weights and state that are not

    def clipped(self, name: str) -> float:
        """What clipping multiplied the recorded gradient of a parameter with."""
        return math.prod(one.factor for one in self.clips if one.has(name) and not one.later)

    @property
    def clipped_early(self) -> int | None:
        """After how many micro batches a gradient was clipped that was not complete."""
        micro = len(self.micro_batches)
        return next((one.after for one in self.clips if one.after is not None and one.after < micro), None)

    @property
    def of_model(self) -> set[str]:
        """The parameters of this rank's model."""
        return {name for name in self.places if name.startswith("weight/")}

    @property
    def held(self) -> list[str]:
        """The model's parameters that optimizers hold; one comes as often as it is held."""
        return [
            name
            for optimizer in self.optimizers
            for group in optimizer.groups
            for name in group["params"]
            if name
        ]


class RunStep(Strict):
    """What is kept of every step of a rank (lockstep/dumps/whole_run.py)."""

    samples: list[list[int]]
    rates: list[MayBreakDown]
    scheduled: dict[Name, Whole]
    data_sets: list[Whole]
    shuffled: bool
    replicas: list[Count]
    evaluated: Whole  # calls in evaluation mode that were trained on


class RunSteps(Strict):
    steps: list[RunStep]


@dataclass
class Called:
    """One micro batch, and the ranks that were called with it."""

    number: int  # in its step, from 0
    ranks: list[int]
    about: MicroBatch
    tensors: dict[str, torch.Tensor]
    losses: dict[int, float] = field(default_factory=dict)  # by rank
    # The gradients, other than zero, that arrived from the loop at tensors that the model returned; its scalars' are in `about`
    arrived: dict[str, torch.Tensor] = field(default_factory=dict)
    piece: "Piece | None" = None  # of samples that are cut
    random: torch.Tensor | None = None  # the state of torch's generator before it, if the model drew from it
    of_tensors: bool = (
        False  # whether a gradient, perhaps of zeros, arrived at tensors that the model returned
    )
    instead: dict[str, Any] = field(default_factory=dict)  # of what the model was called with, for a trial

    @property
    def is_zero(self) -> bool:
        """Whether zeros alone arrived at what the model returned, or a piece has no label."""
        if self.piece is not None and self.piece.labels == 0:
            return True
        known = self.about.loss is None or self.of_tensors
        return known and not self.arrived and not any(self.about.scalars.values())

    @property
    def twice(self) -> "Called":
        """The same, with twice the gradients that arrived."""
        scalars = {name: 2 * one for name, one in self.about.scalars.items()}
        arrived = {name: 2 * one for name, one in self.arrived.items()}
        return replace(self, about=self.about.model_copy(update={"scalars": scalars}), arrived=arrived)

    @property
    def first(self) -> "Called":
        """The first piece of its samples."""
        return self if self.piece is None else self.piece.all[0]

    @property
    def has_own_loss(self) -> bool:
        """Whether the loop makes a loss of its own, with the model's own in it or without it."""
        return self.about.loss is None or bool(self.arrived)

    def has_same(self, tensors: dict[str, torch.Tensor], about: MicroBatch) -> bool:
        """Whether another micro batch is the same, bit for bit."""
        return (
            self.tensors.keys() == tensors.keys()
            and self.about.plain == about.plain
            and all(torch.equal(self.tensors[name], tensors[name]) for name in tensors)
        )


@dataclass
class Piece:
    """A micro batch is called again with all pieces, and with the labels of its own alone: what others have in their places counts for no token."""

    pieces: pieces.Pieces
    number: int
    all: list[Called]  # in their order; this one, too
    own: dict[str, torch.Tensor]  # what its ranks were called with
    labels: int | None  # that it has; None if none are known

    def cut(self, whole: torch.Tensor, shape: torch.Size | None = None) -> torch.Tensor:
        """What this piece has of a tensor."""
        return self.pieces.cut(whole, self.number, shape)


def _put_together(found: list[Called], groups: list[list[int]]) -> None:
    """Micro batches that are pieces of the same samples, as their positions say, get the tensors of all. Their ranks communicate."""
    for number, group in itertools.product(sorted({one.number for one in found}), sorted(groups, key=len)):
        of_ranks = {rank: one for one in found if one.number == number for rank in one.ranks}
        members = list({id(of_ranks[rank]): of_ranks[rank] for rank in group if rank in of_ranks}.values())
        positions = [pieces.positions_of(one.tensors) for one in members]
        known = [one for one in positions if one is not None]
        if len(known) < max(len(members), 2) or any(one.piece for one in members):
            continue
        cut = pieces.find(known)
        if cut is not None:
            own = [one.tensors for one in members]
            shared = [name for name in own[0] if all(name in one for one in own)]
            whole = {name: cut.joined([one[name] for one in own]) for name in shared}
            for place, one in enumerate(members):
                one.tensors = own[place] | {name: of for name, of in whole.items() if of is not None}
                one.piece = Piece(cut, place, members, own[place], _mask_labels(one, cut, place))


def _require_whole(called: Called) -> None:
    """Raise UserError for a piece, as its positions say, whose others were not found."""
    positions = None if called.piece else pieces.positions_of(called.tensors)
    if positions is None or int(positions.min()) <= 1:  # 1 is that of padding
        return
    if float((positions.diff(dim=1) == 1).double().mean()) > 0.5:  # not of some tokens, such as masked ones
        raise UserError(
            f"positions of micro batch {called.number} of rank {called.ranks[0]} begin at {int(positions.min())}, and no process group has those before: "
            "a piece of samples is judged with the others, whose ranks are a group"
        )


def _mask_labels(called: Called, cut: pieces.Pieces, place: int) -> int | None:
    """Leaves the labels of one piece; returns how many, None if none are known."""
    number = None
    for name, tensor in called.tensors.items():
        known = any(word in name.lower() for word in LABELS) and not tensor.is_floating_point()
        if known and tensor.shape[-1:] == (cut.length,):
            ignored = next((one for one in IGNORED if bool((tensor == one).any())), IGNORED[0])
            own = cut.places[place]
            called.tensors[name] = torch.full_like(tensor, ignored).index_copy_(-1, own, tensor[..., own])
            number = (number or 0) + int((called.tensors[name] != ignored).sum())
    return number


class Recording:
    """A folder that a run was recorded into. Raises UserError for one that is none, or not whole."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._opened: dict[Path, Any] = {}
        self._holders: dict[int, dict[str, list[int]]] = {}
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
        return tree.build(self.tree, self._load(self.folder / "model.safetensors"))

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
        if key.partition("#")[0] in self.steps[step - 1][rank].unchanged:
            return self._tensor(rank, step - 1, key.replace("weight/", "updated/", 1))
        try:
            return self._file(rank, step).get_tensor(key)
        except SafetensorError as error:
            raise UserError(
                f"{self._path(rank, step)}: {printable(key)}: {first_line(error)}; {REMEDY}"
            ) from error

    def part(self, rank: int, step: int, name: str) -> torch.Tensor | None:
        """The first block that a rank has of a tensor; None if it has none."""
        return self._tensor(rank, step, f"{name}#0") if name in self.steps[step - 1][rank].places else None

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

    def _arrived(self, step: int, called: Called) -> dict[str, torch.Tensor]:
        first = f"backward/{called.number}/returned."
        places = self.steps[step - 1][called.ranks[0]].places
        names = [name for name in places if name.startswith(first)]
        # Those that have a part of it may be called with other samples, which is then said.
        of_all = self.parted(step, called)
        found = {
            name.removeprefix(first): self.whole(step, name, None if of_all else called.ranks)[0]
            for name in names
        }
        return {name: one for name, one in found.items() if one.any()}

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
        odd: list[int] = []
        full: list[int] = []
        for rank, about in self.steps[step - 1].items():
            places = about.places.get(name)
            if places is None or (ranks is not None and rank not in ranks):
                continue
            full = places[0].full or []
            for number, place in enumerate(places[1:]):
                key = (tuple(place.start or ()), tuple(place.shape or ()))
                block = self._tensor(rank, step, f"{name}#{number}")
                same = replicas.setdefault(key, [])
                if same and not torch.equal(same[0], block):
                    odd.append(rank)
                if mean or not same:
                    same.append(block)
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
        for (start, shape), block in blocks:
            result[tuple(slice(first, first + size) for first, size in zip(start, shape, strict=True))] = (
                block
            )
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
                    same = Called(number, [], micro, tensors, random=random)
                    found.append(same)
                same.ranks.append(rank)
                if micro.loss is not None:
                    same.losses[rank] = micro.loss
        for called in found:
            called.arrived = self._arrived(step, called)
            of_returned = f"backward/{called.number}/returned."
            places = self.steps[step - 1][called.ranks[0]].places
            called.of_tensors = any(name.startswith(of_returned) for name in places)
        again = next((one for one in found if one.about.differentiated), None)
        if again is not None:
            raise UserError(
                f"{self._path(again.ranks[0], step)}: the gradient at what the model returned for micro batch {again.number} is differentiated again "
                "(create_graph=True), as by a gradient penalty; record a run without it, or let the model return the penalty"
            )
        _put_together(found, [group for about in self.steps[step - 1].values() for group in about.groups])
        for called in found:
            _require_whole(called)
        if not any(one.about.used for one in found):
            raise UserError(
                f"{self._path(0, step)}: no gradient arrived at what the model returned: it returns no tensors, or is not trained on them; "
                "let it return them in a tuple, a list, a dict or the fields of an object"
            )
        return found
