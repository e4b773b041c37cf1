"""How much memory each rank of a run takes, moment by moment, by arithmetic on the shapes. Nothing is built.

A moment is a time in the run; its parts are the bytes that one rank holds then. What a strategy keeps is said in the file
that PLANS names for it. The largest rank is meant: where shares differ, the first is the largest.

Left out: what the allocator wastes between tensors, the CUDA context (about half a GiB), buffers of NCCL and gloo, libraries
and Python itself, tensors of a few KiB, and captured steps.
"""

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from extras.memory import activations
from lockstep.ground.errors import UserError
from lockstep.inputs import modules
from lockstep.inputs.shapes import describe, parameter_shapes, width
from lockstep.plan import strategies

if TYPE_CHECKING:
    from lockstep.plan.config import Config

PARTS = ("parameters", "gradients", "optimizer", "activations", "temporary")
START, LOSS, END_OF_BACKWARD, UPDATE = "start", "loss", "end of backward", "update"
Shapes = dict[str, tuple[int, ...]]
BFLOAT16, FLOAT32, FLOAT64 = 2, 4, 8  # bytes
LEFT_OUT = (
    "left out: waste of the allocator, the CUDA context, buffers of NCCL and gloo, Python and its libraries"
)


@dataclass(frozen=True)
class Moment:
    """The bytes of each part that a rank holds on its device at one time.

    `temporary` is what operations and buffers add. At `LOSS` the activations are all there, and the temporary tensors are
    the loss's.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    temporary: int = 0

    @property
    def total(self) -> int:
        return sum(getattr(self, part) for part in PARTS)


@dataclass(frozen=True)
class Plan:
    """What one rank holds. On CPUs the device is the main memory, and nothing is beside it."""

    moments: dict[str, Moment]  # in the order of a step
    built: int  # bytes of main memory while the model is built, which every rank does in float32
    host: dict[str, int] = field(default_factory=dict)  # part -> bytes in main memory beside a GPU
    nvme: dict[str, int] = field(default_factory=dict)  # part -> bytes on the disk

    @property
    def peak(self) -> tuple[str, int]:
        """The moment with the most bytes on the device, and its bytes."""
        name = max(self.moments, key=lambda name: self.moments[name].total)
        return name, self.moments[name].total


@dataclass(frozen=True)
class Rank:
    """What every plan starts from: the tensors of one tp rank, whole over dp, and its activations."""

    config: "Config"
    hidden_size: int
    names: modules.Names
    shapes: Shapes
    activations: activations.Activations
    model: Shapes  # the whole model's, before tp cuts it
    tied: bool
    architecture: dict = field(repr=False)

    @property
    def built(self) -> int:
        """Bytes while the model is built in float32. Until head and embedding are tied, each has weights of its own."""
        twin = math.prod(self.model[self.names.embedding_weight]) if self.tied else 0
        return (elements(self.model) + twin) * FLOAT32

    @property
    def whole(self) -> int:
        """Bytes of the whole model on the device: every strategy puts it there, and in its dtype, before it cuts it."""
        if self.config.device == "cpu" and self.width != FLOAT32:  # cast tensor by tensor
            return elements(self.model) * FLOAT32 + largest(self.model) * self.width
        return elements(self.model) * self.width

    @property
    def width(self) -> int:
        """Bytes of an element of a parameter, of its gradient and of each of its moments."""
        return 2 if self.config.precision == "bf16" else FLOAT32

    @property
    def moments(self) -> int:
        """Tensors of optimizer state for each parameter."""
        return 2 if self.config.optimizer == "adamw" else 0

    @property
    def elements(self) -> int:
        return elements(self.shapes)

    def norm(self, numel: int) -> int:
        """Bytes of the copy in float64 that torch makes on a CPU to take the norm of a gradient (the largest)."""
        return FLOAT64 * numel if self.config.device == "cpu" else 0

    def step(self, numel: int) -> int:
        """Bytes that stepping the largest parameter takes: weight decay of an SGD that is not fused copies its gradient."""
        return numel * self.width if self.config.optimizer == "sgd" and self.config.weight_decay else 0

    @property
    def of_embedding(self) -> int:
        """Bytes of the embedding's gradient, which comes last."""
        return math.prod(self.shapes[self.names.embedding_weight]) * self.width

    def at_loss(
        self, parameters: int, gradients: int, optimizer: int, *, before: int = 0, after: int = 0
    ) -> Moment:
        """The moment with the most activations and logits.

        A buffer of `before` bytes is there only until backward, one of `after` bytes from the first gradient of a layer on.
        """
        measured = self.activations
        peak = max(measured.forward + before, measured.head, measured.top + after)
        return Moment(parameters, gradients, optimizer, measured.saved, peak - measured.saved)

    def at_end(self, parameters: int, gradients: int, optimizer: int, buffers: int = 0) -> Moment:
        """The moment of backward of the first layer and of the embedding.

        The embedding's gradient is among the temporary tensors, not in `gradients`.
        """
        peak = max(self.activations.bottom, self.activations.tail)
        return Moment(parameters, gradients, optimizer, 0, peak + buffers)


def elements(shapes: Shapes) -> int:
    return sum(map(math.prod, shapes.values()))


def most(*moments: Moment) -> Moment:
    """The moment with the most bytes."""
    return max(moments, key=lambda moment: moment.total)


PLANS = {  # strategy -> from a Rank to its Plan
    "ddp": "extras.memory.replicated:plan",
    "deepspeed": "extras.memory.zero:plan",
    "fsdp": "extras.memory.sharded:plan",
}


def largest(shapes: Shapes) -> int:
    """Elements of the largest tensor."""
    return max(map(math.prod, shapes.values()))


def of(config: "Config", architecture: dict) -> Plan:
    """The plan of a run. Raises UserError if what it keeps is not known."""
    if config.spec.name not in PLANS:
        raise UserError(
            f"what {config.spec.label} keeps in memory is not known; choose from {', '.join(PLANS)}"
        )
    unknown = {
        "--pp_size": config.pp_size > 1,
        "--cp_size": config.cp_size > 1,
        "--activation_checkpointing": config.activation_checkpointing,
        "--compile": config.compile != "off",
        f"--optimizer {config.optimizer}": config.has_own_optimizer,
    }
    for flag, given in unknown.items():
        if given:
            raise UserError(f"what a rank holds with {flag} is not known; leave it out of the plan")
    rank = Rank(
        config,
        width(architecture),
        describe(architecture).names,
        parameter_shapes(activations.local_architecture(architecture, config.tp_size)),
        activations.of(config, architecture),
        parameter_shapes(architecture),
        architecture.get("tie_word_embeddings", False),
        architecture,
    )
    return _with_average(strategies.load(PLANS[config.spec.name])(rank), rank)


def _with_average(plan: Plan, rank: Rank) -> Plan:
    """The plan with a float32 average of the parameters that the rank keeps, if --ema_decay asks for one."""
    if rank.config.ema_decay == 1:
        return plan
    average = plan.moments[UPDATE].parameters // rank.width * FLOAT32
    moments = {
        name: moment if name == START else replace(moment, optimizer=moment.optimizer + average)
        for name, moment in plan.moments.items()
    }
    return replace(plan, moments=moments)


def size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def lines(config: "Config", found: Plan) -> list[str]:
    """The plan as a table for people."""
    device = "GPU" if config.device == "cuda" else "main"
    totals = {name: moment.total for name, moment in found.moments.items() if name != START}
    name = max(totals, key=lambda name: totals[name])
    head = ["", *found.moments]
    rows = [[part, *(size(getattr(moment, part)) for moment in found.moments.values())] for part in PARTS]
    rows.append(["sum", *(size(moment.total) for moment in found.moments.values())])
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    shown = [
        "  " + "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])])
        for row in [head, *rows]
    ]
    beside = [f"{size(found.built)} of main memory while each rank builds the whole model in float32"]
    for place, kept in (("main memory", found.host), ("the disk", found.nvme)):
        beside += [f"{size(count)} of {place}: {part}" for part, count in kept.items() if count]
    return [
        f"{device} memory of a rank, predicted: {size(totals[name])} in a step ({name}), {size(found.moments[START].total)} at the start",
        *shown,
        *(f"  {line}" for line in beside),
        f"  {LEFT_OUT}",
    ]
