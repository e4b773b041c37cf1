"""The tensors that a captured step of a model must hold, in order of execution.

Captured are

    MODULE          the output of a module (MODULE.1 for the second tensor of a tuple)
    MODULE.input    the input of a module, if it depends on the weights and is not captured already, such as the output of the
                    attention itself, which enters its output layer

and the gradient of the loss with respect to each of them. lockstep/dumps/trace.py finds them in the model itself. A dump holds the layout
of its model, so no model is built to read it.
"""

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from lockstep.ground import schemas
from lockstep.ground.schemas import Name, Shape, Size, Strict, Whole
from lockstep.inputs.modules import Names
from lockstep.inputs.shapes import Description

if TYPE_CHECKING:
    import torch

BATCH, SEQUENCE = "batch", "sequence"
State = dict[str, dict[str, tuple[int, ...]]]  # what an optimizer keeps: kind -> parameter -> shape


def state_of(optimizer: str, parameters: dict[str, tuple[int, ...]]) -> State:
    """Return what a built-in optimizer keeps: AdamW two moments of every parameter, SGD nothing.

    For any other optimizer it is empty, and a run records the state after its first step.
    """
    return {"exp_avg": parameters, "exp_avg_sq": parameters} if optimizer == "adamw" else {}


class Choice(Strict):
    """A discrete choice that the model makes, such as a router's of experts, by `torch.topk`."""

    call: Whole  # the number of the call of `torch.topk` in a forward pass, from 0
    width: Whole  # the number of scores that it chooses from
    scores: str  # the captured tensor that the scores are computed from; "" if there is none
    # How many are chosen where the captured tensor has their logits; 0: it has the indices
    number: Whole

    def of(self, captured: "torch.Tensor") -> "torch.Tensor":
        """Return the indices that were chosen."""
        return captured.topk(self.number, dim=-1).indices if self.number else captured


Symbols = Annotated[
    tuple[Size | Literal["batch", "sequence"], ...], Field(strict=False, max_length=8)
]  # shape


class Layout(Strict):
    """The tensors of one model, as a manifest has them.

    Shapes are those of full tensors. "batch" and "sequence" stand for these sizes.
    """

    model: Description
    outputs: dict[Name, Symbols]  # captured outputs and inputs, in order of execution
    backward: schemas.Names  # those of them that have a gradient, in order of the backward pass
    # module -> place among its arguments, a number or a name -> name of a captured input
    inputs: dict[Name, dict[Name, Name]]
    # name -> the captured tensors that it is directly computed from
    sources: dict[Name, schemas.Names]
    # Outputs whose first dim is batch x sequence: they are captured with two dims in its place
    flat: schemas.Names
    # name of the captured indices, or of the logits that they follow from -> choice
    choices: dict[Name, Choice]
    # Outputs that are not captured, such as those with a dim that follows neither the batch nor the sequence
    unknown: schemas.Names
    state: dict[Name, dict[Name, Shape]]
    # Modules whose output does not depend on the weights, such as a rotary table
    tables: schemas.Names

    @property
    def names(self) -> Names:
        return self.model.names

    @property
    def parameters(self) -> dict[str, tuple[int, ...]]:
        return self.model.parameters

    def kinds(self, config: dict) -> tuple[str, ...]:
        """Return the kinds of tensors that a run with this configuration has of parameters in each step, in order.

        An average is among them only if it was asked for.
        """
        average = ("average",) if config["ema_decay"] < 1 else ()
        return ("gradient", *self.state, "parameter", *average)

    def of_step(
        self, kinds: tuple[str, ...], rows: int, seq_length: int, further: tuple[str, ...] = ()
    ) -> dict[str, tuple[int, ...]]:
        """Return name -> shape (rows of the global batch, ...) of all tensors of a step, in order of execution.

        `kinds` are the kinds of tensors of parameters that the step has. A step with "gradient" also has a batch, with these `further`
        inputs, a forward and a backward pass. The order: batch; forward; backward, each output gradient followed by the gradients of its
        module's own parameters; update.
        """
        tensors: dict[str, tuple[int, ...]] = {}
        if "gradient" in kinds:
            sizes = {BATCH: rows, SEQUENCE: seq_length}
            tensors = {f"batch/{name}": (rows, seq_length) for name in ("input_ids", "labels", *further)}
            shapes = {
                name: tuple(sizes[size] if isinstance(size, str) else size for size in shape)
                for name, shape in self.outputs.items()
            }
            tensors |= {f"forward/{name}": shape for name, shape in shapes.items()}
            gradients = {f"gradient/{name}": shape for name, shape in self.model.trained.items()}
            of_module: dict[str, dict[str, tuple[int, ...]]] = {}
            for name, shape in gradients.items():
                module = name.removeprefix("gradient/").rpartition(".")[0]
                of_module.setdefault(module, {})[name] = shape
            for name in self.backward:
                tensors[f"backward/{name}"] = shapes[name]
                tensors |= of_module.get(name, {})
            tensors |= gradients  # adds those of modules without a captured gradient
        for name, shape in self.parameters.items():
            for kind in kinds:
                if kind in self.state:
                    if name in self.state[kind]:
                        tensors[f"{kind}/{name}"] = self.state[kind][name]
                elif kind != "gradient":
                    tensors[f"{kind}/{name}"] = shape
        return tensors

    def is_further(self, name: str) -> bool:
        """Whether a name, such as MODULE.1, is that of an output of a module beside its first."""
        module, _, number = name.rpartition(".")
        return number.isdigit() and module in self.outputs and not module.endswith(".input")
