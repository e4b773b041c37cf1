"""What a pass of the model over one micro batch gives, free or forced through the tensors that a run wrote."""

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import torch

from lockstep.recorder.module_hooks import ModuleHooks
from lockstep.verdict.float64 import Taken
from lockstep.verdict.mean_over import Mean
from lockstep.verdict.normalisation import Gradients


@dataclass
class Term:
    """A further scalar that the model returns, such as a router's balance loss."""

    value: float
    coefficient: float  # in the model's loss; 0 if it does not count there
    gradients: Gradients  # of the term itself
    number: float = 1.0  # what the loss is a sum over, where that is said: so is the term
    beside: float = 0.0  # what arrived at it from beside the model's loss


@dataclass
class Computed:
    """What a micro batch gives."""

    gradients: Gradients  # of its loss
    # None where no labels reach the model: the gradients then follow from the recorded one at the logits
    loss: float | None
    # At the loss, in the run: what the loop multiplied it with; nan where the loop trained on a part of it
    arrived: float
    terms: dict[str, Term]
    # forward/MICRO_BATCH/MODULE and backward/..., in order of execution
    modules: MutableMapping[str, torch.Tensor]
    told: dict[str, Taken]  # by the name of the output that has it
    mean: Mean = field(default_factory=Mean)  # known in a free pass in float64 alone
    # In free passes:
    # Of `modules`, which take the most memory and are dropped
    shapes: dict[str, torch.Size] = field(default_factory=dict)
    logits: torch.Tensor | None = None
    at_logits: torch.Tensor | None = None  # the gradient of the loss there


class Passes:
    """Of passes over micro batches, keeps what modules give and what arrives there; `written` takes the place of the same, each in its shape.

    Gradients still pass. Names begin with forward/ or backward/.
    """

    def __init__(self, model: torch.nn.Module):
        self.modules: MutableMapping[str, torch.Tensor] = {}
        self.written: Mapping[str, torch.Tensor] = {}
        self.hooks = ModuleHooks(model, "*", self.keep, self.instead)

    def keep(self, name: str, tensor: torch.Tensor) -> None:
        self.modules[name] = tensor.detach().clone()

    def instead(self, name: str, tensor: torch.Tensor) -> torch.Tensor | None:
        found = self.written.get(name)
        if found is None or found.shape != tensor.shape or not tensor.is_floating_point():
            return None
        return _like(tensor, found) if name.startswith("backward/") else _Instead.apply(tensor, found)


class _Instead(torch.autograd.Function):
    """A tensor in the place of one that is computed: what arrives there passes on to that one."""

    @staticmethod
    def forward(_context: Any, tensor: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
        """In the yardstick, a lower dtype of the run's is kept: what follows rounds as it did there."""
        lower = found.dtype.itemsize < tensor.dtype.itemsize and tensor.dtype is not torch.float64
        return _like(tensor.to(found.dtype) if lower else tensor, found)

    @staticmethod
    def backward(_context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None

    @staticmethod
    def jvp(_context: Any, tangent: torch.Tensor, _found: None) -> torch.Tensor:
        """Of a model that differentiates forward, such as an energy's."""
        return tangent.clone()


def _like(tensor: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """The same numbers as in `found`, in the other's dtype and order in memory."""
    return torch.empty_like(tensor).copy_(found)
