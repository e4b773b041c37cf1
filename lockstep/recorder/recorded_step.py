"""The schemas of what a rank writes beside the tensors: of each recorded step, and of every step of the run."""

import functools
import math
from typing import Annotated, Any

from pydantic import Field, model_validator

from lockstep.ground.schemas import Count, MayBreakDown, Name, Strict, Threads, Whole

FORMAT = 13
ERROR = "error.json"  # the file that says which error ended a rank's run
Plain = bool | int | MayBreakDown | str | None


class Origin(Strict):
    """How the run was made (lockstep/ground/origin.py); empty in an older recording."""

    command: str = ""
    script: str = ""  # as it was typed
    device: str = ""  # of rank 0
    seed: str = ""  # torch's, of rank 0
    threads: Threads = 0  # of rank 0, in torch's kernels on a CPU
    tf32: list[Name] = []  # the float32 operations that a GPU computes in TF32
    date: str = ""
    versions: dict[Name, Name] = {}


class SeenLoss(Strict):
    """A call of a loss function by the loop, at which a gradient arrived (lockstep/recorder/losses.py)."""

    function: Name
    number: Whole  # of elements that it is a mean or a sum of; 0 if they do not count alike
    weight: MayBreakDown  # of each element, in what the backward pass began at
    roundoff: float  # unit roundoff of the gradient's dtype
    is_whole: bool  # whether the backward pass began at this loss, or a multiple of it
    samples: Whole = 0  # that these elements are of
    one_target: bool  # whether all targets are on one side of 0.5, such as the 1 of a discriminator
    is_soft: bool = False  # whether its targets are probabilities, as in a distillation
    made_at: int = 0  # a hash of the lines that led to the call
    odd: str = ""  # what the function is given that is hardly meant, to be read after its name


class Policy(Strict):
    """FSDP2's dtypes of a module. None: left as it is."""

    param: Name | None  # of its weights in both passes
    reduce: Name | None  # of their gradients while they are reduced; None: as `param`
    input: Name | None  # arguments are cast to it
    output: Name | None  # results are cast to it


class MicroBatchRecord(Strict):
    """A training call of the model: what it was called with, and what arrived at what it returned."""

    tensors: list[Name]  # by name: what the model was called with, and what the loop noted for the call
    plain: dict[Name, Any]  # likewise, values that are no tensors, as `Describing.value` describes them
    # The names of what the model was called with: the leaves of torch's pytree `structure`
    inputs: list[Name]
    structure: str  # how lists, tuples and dicts are nested
    left_out: list[Name]  # what is not recorded, and why
    autocast: Name | None  # the dtype
    dropouts: int = 0  # calls of dropout that left elements out which a CPU would not
    param_dtype: Name | None = None  # of the weights in both passes, as DeepSpeed has them
    policies: dict[str, Policy] = {}  # module, "" the model itself -> what FSDP2 does with it
    used: bool  # whether a gradient arrived at what the model returned
    # The module whose output the loss uses, though the model does not return it; "": a tensor of no module
    around: str | None = None
    asked: bool = False  # whether torch.autograd.grad alone asked for the gradient that arrived
    reached: bool = False  # by a backward pass
    # Whether all gradients were set to zero after it, before the optimizers stepped
    zeroed: bool = False
    # Whether it is in the loss of another model, whose optimizer stepped then, or its gradient is for the batch
    elsewhere: bool = False
    default_dtype: Name = "torch.float32"  # of torch
    differentiated: bool = False  # whether the gradient that arrived was differentiated in turn
    # Whether the model was called before a gradient had arrived for the micro batch before this one
    together: bool = False
    scalars: dict[Name, MayBreakDown]  # the gradients that arrived at scalars
    scale: MayBreakDown = 1.0  # of a GradScaler, in what arrived
    losses: list[SeenLoss] = []
    loss: MayBreakDown | None = None  # the model's own
    loss_dtype: Name | None = None  # which FSDP2 may have cast it to
    evaluated: list[str]  # modules in evaluation mode
    drawn: bool = False  # whether the forward pass drew random numbers from torch's generator
    # The states of Python's and numpy's generators before it, if the model drew from them
    generators: dict[Name, Any] = {}
    compiled: bool = False  # whether code that torch.compile made may have drawn the random numbers
    # The attributes, as MODULE:NAME, that are not what they were when the recording began
    attributes: dict[Name, Any] = {}
    # The order of a tensor's dims in memory, if it is not the usual one
    orders: dict[Name, list[Whole]] = {}

    @property
    def param_dtypes(self) -> set[str]:
        """The dtypes that FSDP2 or DeepSpeed gives weights in both passes, if other than their own."""
        return {name for name in (self.param_dtype, *(one.param for one in self.policies.values())) if name}


class Clip(Strict):
    """A call that clipped gradients."""

    max_norm: MayBreakDown
    norm: MayBreakDown
    factor: MayBreakDown  # by which gradients are multiplied
    by_value: bool = False  # whether each element was clipped to at most max_norm
    later: bool = False  # whether it came after the gradients were recorded
    too_late: bool = False  # whether it came after the update
    after: Whole | None = None  # how many micro batches; None: all of them
    parameters: list[Name] | None = None  # those with a gradient; None: all of the model's
    without_gradient: list[Name] = []  # those that had none, as where their loss is another, later one
    beside: MayBreakDown = 0.0  # the norm of the gradients of parameters that are none of the model's

    def has(self, name: str) -> bool:
        """Whether it clipped the gradient of this parameter."""
        return self.parameters is None or name in self._names

    @functools.cached_property
    def _names(self) -> frozenset[str]:
        return frozenset(self.parameters or ())


class Optimizer(Strict):
    """An optimizer that stepped, as it was before its step."""

    kind: Annotated[Name, Field(alias="class")]
    groups: list[
        dict[str, Any]
    ]  # the settings, and the names of the parameters: null for one that is not the model's
    number: Whole = 0  # in the order of a step
    attributes: dict[str, Any] = {}
    state: dict[Name, dict[str, Any]] = {}  # by parameter
    strangers: Whole  # how many tensors it holds that are none of the model's
    # Of strangers that all ranks may hold: hashes of (weights, gradient)
    replicas: list[list[int]] = []
    again: bool = False  # whether it has stepped before with the same gradient
    compiled: bool = False  # whether torch.compile compiled its step
    idle: bool = False  # whether nothing that it holds has a gradient
    stepped_by: str = ""  # the class of another optimizer whose step called its step

    @property
    def held(self) -> list[str]:
        """The model's parameters that it holds."""
        return [name for group in self.groups for name in group["params"] if name]

    @property
    def is_of_deepspeed(self) -> bool:
        return self.kind.startswith("deepspeed.")


class Block(Strict):
    """A block of a tensor: where it begins in the whole, and its shape."""

    start: list[Whole]
    shape: list[Whole]

    @property
    def within(self) -> tuple[slice, ...]:
        """Where a block lies in the whole tensor."""
        return tuple(slice(start, start + size) for start, size in zip(self.start, self.shape, strict=True))


class Placed(Strict):
    """The blocks that a rank has of a tensor, whose shape as a whole is `full`."""

    full: list[Whole]
    blocks: list[Block]

    @model_validator(mode="after")
    def _of_one_shape(self) -> "Placed":
        if any(not len(block.start) == len(block.shape) == len(self.full) for block in self.blocks):
            raise ValueError("a block has other dims than the whole")
        return self

    @property
    def is_whole(self) -> bool:
        """Whether the rank has the whole tensor, as one block."""
        return [block.shape for block in self.blocks] == [self.full]


class StepRecord(Strict):
    """What one rank recorded of one step."""

    format: int
    world_size: Count
    rank: Whole
    launched: Count = 1  # processes that the launcher started
    stage: Whole | None = None  # the number of the pipeline's stage that the model is
    stages: Count = 1
    step: Count
    torch: Name
    data_parallel: list[Whole]  # the ranks that FSDP2 divides the samples among
    groups: list[list[Whole]] = []  # of ranks that communicate
    frozen: list[Name]  # parameters that require no gradient
    attributes: dict[Name, Any] = {}  # as MODULE:NAME, as they were when the recording began
    micro_batches: list[MicroBatchRecord]
    clips: list[Clip]
    optimizers: list[Optimizer]
    # The order of a parameter's dims in memory, if it is not the usual one
    orders: dict[Name, list[Whole]] = {}
    hooked_parameters: list[Name] = []  # those with a hook on their gradient, by register_hook
    hooked: list[Name] = []  # modules that return what a hook of the loop's made of their output
    reduced: Whole = 0  # elements that the loop itself gave to collectives that reduce
    of_others: Whole = 0  # tensors that the optimizers of other models hold
    # Of those that all ranks may hold: hashes of (weights, gradient)
    other_replicas: list[list[int]] = []
    skipped: Whole = 0  # windows of micro batches before this step, clipped and then set to zero
    overflowed: Whole = 0  # steps that a GradScaler skipped before, as gradients were not finite
    places: dict[Name, Placed]
    # Of large tensors that this rank wrote: the content (lockstep/recorder/contents.py)
    written: dict[Name, Name]
    # Of those that it left out, since it has written the content already, or another rank does
    elsewhere: dict[Name, Name]
    changed: list[Name]  # weights and state that are not what the step before ended with

    @functools.cached_property
    def contents(self) -> dict[str, str]:
        """The contents of this rank's large tensors, wherever they are written."""
        return self.written | self.elsewhere

    @property
    def has_loss(self) -> bool:
        """Whether the loss is made of what the model returns: all models have it but the stages of a pipeline before the last."""
        return self.stage is None or self.stage == self.stages - 1

    def clipped(self, name: str) -> float:
        """Return the factor that clipping multiplied the recorded gradient of a parameter with."""
        return math.prod(clip.factor for clip in self.clips if clip.has(name) and not clip.later)

    @property
    def clipped_early(self) -> int | None:
        """After how many micro batches a gradient was clipped that was not complete; None if none was."""
        last = len(self.micro_batches)
        return next((clip.after for clip in self.clips if clip.after is not None and clip.after < last), None)

    def numbered(self, ranks: list[int]) -> "StepRecord":
        """Return the record with the ranks of a stage numbered from 0; `ranks` are all of its ranks."""

        def renumbered(group: list[int]) -> list[int]:
            return [ranks.index(rank) for rank in group if rank in ranks]

        return self.model_copy(
            update={
                "world_size": len(ranks),
                # So many the run has in all
                "launched": self.world_size,
                "rank": ranks.index(self.rank),
                "data_parallel": renumbered(self.data_parallel),
                "groups": [renumbered(group) for group in self.groups],
            }
        )

    @property
    def shards(self) -> str:
        """Where the rank's shards of the weights lie, as a text to be compared."""
        return str([(name, places) for name, places in self.places.items() if name.startswith("weight/")])

    @property
    def shapes(self) -> dict[str, list[int]]:
        """The shapes of the parameters of this rank's model, each of the whole tensor, by name."""
        of_weights = (pair for pair in self.places.items() if pair[0].startswith("weight/"))
        return {name.removeprefix("weight/"): placed.full for name, placed in of_weights}

    @property
    def stepping(self) -> list[Optimizer]:
        """The optimizers that step.

        One is left out if others have stepped its parameters before, so that none has a gradient.
        """
        stepped = {name for optimizer in self.optimizers if not optimizer.idle for name in optimizer.held}
        return [
            optimizer
            for optimizer in self.optimizers
            if not (optimizer.idle and optimizer.held and stepped.issuperset(optimizer.held))
        ]

    @property
    def held(self) -> list[str]:
        """The model's parameters that optimizers hold; each comes as often as it is held."""
        return [name for optimizer in self.stepping for name in optimizer.held]


class Order(Strict):
    """An order of samples that a shuffling DistributedSampler begins to give."""

    sampler: Whole  # its number
    epoch: int  # that it was told
    samples: Whole  # that it gives a rank
    calls: Whole  # of the model in the step, before


class Loaded(Strict):
    """A batch that a loader fetched."""

    rows: list[int]  # hashes of what it has for each sample
    calls: Whole  # of the model, before it was fetched


class Ends(Strict):
    """Three hashes of each sample of a tensor, whose last elements that are alike may be padding."""

    whole: list[int]
    before: list[int]  # of what comes before these elements
    and_first: list[int]  # of that and the first of them


class RunStep(Strict):
    """What is kept of every step of a rank (lockstep/recorder/whole_run.py)."""

    samples: list[list[int]]  # of each micro batch, a hash for each sample
    # Of each micro batch whose samples may be padded and have no mask, by tensor
    ends: list[list[Ends]] = []
    # Whether tensors have other numbers of rows, such as nodes and edges: a row may be no sample
    uneven: bool = False
    rates: list[MayBreakDown]  # the learning rates
    optimizers: list[Whole] = []  # the numbers of those that step
    scheduled: dict[Name, Whole]  # by whom a schedule was stepped, and how often
    data_sets: list[Whole]  # their sizes
    shuffled: bool  # whether a DistributedSampler was to shuffle the samples
    replicas: list[Count]  # among how many DistributedSamplers divide the samples
    loaded: list[Loaded] = []  # the first batches of the run
    given: list[Whole] = []  # the ranks whose samples DistributedSamplers give
    orders: list[Order] = []
    sources: list[int] = []  # of each micro batch, the number of the sampler that it is of; -1: another
    with_replacement: bool = False  # whether a RandomSampler draws so
    cut: Whole = 0  # how often a loader begins anew after this step that was not at its end
    evaluated: Whole  # calls in evaluation mode that were trained on


class RunError(Strict):
    """The error that ended a rank's run."""

    error: str


class RunSteps(Strict):
    steps: list[RunStep]
