"""The schemas of what a rank writes of a recorded run beside the tensors: of each step, and of every step to its end."""

import functools
import math
from typing import Annotated, Any

from pydantic import Field

from lockstep.ground.schemas import Count, MayBreakDown, Name, Strict, Whole

FORMAT = 7
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


class SeenLoss(Strict):
    """A call of a loss function that the loop made (lockstep/recorder/losses.py), and a gradient arrived at."""

    function: Name
    number: Whole  # elements that it is of
    weight: MayBreakDown  # of each, in what the backward pass began at
    roundoff: float
    is_whole: bool  # whether the backward pass began at this loss, or a multiple of it
    samples: Whole = 0  # that these elements are of
    one_target: bool  # whether all elements have one side of 0.5, such as the 1 of a discriminator
    is_soft: bool = False  # whether its targets are probabilities, as in a distillation
    made_at: int = 0  # a hash of the lines that led to the call
    odd: str = ""  # what the function is given that is hardly meant


class MicroBatch(Strict):
    tensors: list[Name]
    plain: dict[Name, Plain]
    # The places of what the model was called with, in lists, tuples and dicts of this structure: torch's pytree
    inputs: list[Name]
    structure: str
    left_out: list[Name]
    autocast: Name | None
    dropouts: int = 0  # calls that left elements out which a CPU would not
    param_dtype: Name | None = None  # which FSDP2 computes in
    reduce_dtype: Name | None = None  # and reduces gradients in
    casts_inputs: bool = False  # to the former dtype, what the model is called with
    used: bool
    # A module whose output the loss uses though the model does not return it; "": a tensor that is no module's output
    around: str | None = None
    asked: bool = False  # by torch.autograd.grad alone
    reached: bool = False  # by a backward pass
    # Whether all gradients were set to zero after it, before the optimizers stepped
    zeroed: bool = False
    # In the loss of another model, whose optimizer stepped then; or for the gradient of the batch alone
    elsewhere: bool = False
    differentiated: bool = False  # in turn
    together: bool = False  # with the one before: no gradient had arrived there yet
    scalars: dict[Name, MayBreakDown]
    scale: MayBreakDown = 1.0  # of a GradScaler, in what arrived
    losses: list[SeenLoss] = []
    loss: MayBreakDown | None = None
    loss_dtype: Name | None = None  # which FSDP2 may have cast it to
    evaluated: list[str]  # modules in evaluation mode
    drawn: bool = False  # random numbers from torch's generator, in the forward pass
    generators: dict[
        Name, Any
    ] = {}  # their states before it: Python's and numpy's, if the model drew from them
    compiled: bool = False  # perhaps by code that torch.compile made
    # As MODULE:NAME, that are not what they were when the recording began
    attributes: dict[Name, Any] = {}
    # Of the dims of tensors in memory, that are not the usual ones
    orders: dict[Name, list[Whole]] = {}


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
    idle: bool = False  # nothing that it holds has a gradient

    @property
    def held(self) -> list[str]:
        """The model's parameters."""
        return [name for group in self.groups for name in group["params"] if name]

    @property
    def is_of_deepspeed(self) -> bool:
        return self.kind.startswith("deepspeed.")


class Place(Strict):
    full: list[Whole] | None = None
    start: list[Whole] | None = None
    shape: list[Whole] | None = None

    @property
    def within(self) -> tuple[slice, ...]:
        """A block's place in the whole tensor."""
        return tuple(
            slice(first, first + size) for first, size in zip(self.start or (), self.shape or (), strict=True)
        )


class Step(Strict):
    """One rank's file of one step."""

    format: int
    world_size: Count
    rank: Whole
    launched: Count = 1  # processes, by the launcher
    step: Count
    torch: Name
    data_parallel: list[Whole]
    groups: list[list[Whole]] = []  # of ranks that communicate
    frozen: list[Name]  # parameters that require no gradient
    attributes: dict[Name, Any] = {}  # as MODULE:NAME, as they were when the recording began
    micro_batches: list[MicroBatch]
    clips: list[Clip]
    optimizers: list[Optimizer]
    # Of the dims of parameters in memory, that are not the usual ones
    orders: dict[Name, list[Whole]] = {}
    hooked_parameters: list[Name] = []  # by register_hook
    hooked: list[Name] = []  # modules that return what a hook of the loop's made of their output
    reduced: Whole = 0  # elements that the loop itself gave to collectives that reduce
    of_others: Whole = 0  # tensors that the optimizers of other models hold
    # hashes of (weights, gradient) of those that all ranks may hold
    other_replicas: list[list[int]] = []
    skipped: Whole = 0  # windows of micro batches before this step, clipped and then set to zero
    overflowed: Whole = 0  # those that a GradScaler skipped, as gradients were not finite
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
    def stepping(self) -> list[Optimizer]:
        """The optimizers, without one whose parameters others have stepped before, so that none has a gradient any more."""
        busy = {name for one in self.optimizers if not one.idle for name in one.held}
        return [one for one in self.optimizers if not (one.idle and one.held and busy.issuperset(one.held))]

    @property
    def held(self) -> list[str]:
        """The model's parameters that optimizers hold; one comes as often as it is held."""
        return [name for optimizer in self.stepping for name in optimizer.held]


class Order(Strict):
    """A DistributedSampler that shuffles begins to give an order."""

    sampler: Whole  # its number
    epoch: int  # that it was told
    samples: Whole  # that it gives a rank
    calls: Whole  # of the model in the step, before


class Loaded(Strict):
    """A batch of a loader."""

    rows: list[int]  # hashes of what it has for each sample
    calls: Whole  # of the model, before it was fetched


class RunStep(Strict):
    """What is kept of every step of a rank (lockstep/recorder/whole_run.py)."""

    samples: list[list[int]]
    rates: list[MayBreakDown]
    optimizers: list[Whole] = []  # their numbers
    scheduled: dict[Name, Whole]
    data_sets: list[Whole]
    shuffled: bool
    replicas: list[Count]
    loaded: list[Loaded] = []  # the first ones
    given: list[Whole] = []  # the ranks whose samples DistributedSamplers give
    orders: list[Order] = []
    sources: list[int] = []  # of each micro batch, the sampler that it is of; -1: another
    with_replacement: bool = False  # by a RandomSampler
    cut: Whole = 0  # how often a loader begins anew after it that was not at its end
    evaluated: Whole  # calls in evaluation mode that were trained on


class RunSteps(Strict):
    steps: list[RunStep]
