"""The results of a pass over one micro batch: free, or forced, with a run's tensors in the places of the computed ones."""

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import torch

from lockstep.recorder.complex_numbers import as_real, is_inexact, like
from lockstep.recorder.module_hooks import ModuleHooks
from lockstep.verdict.float64 import Taken
from lockstep.verdict.mean_over import Mean
from lockstep.verdict.normalisation import Gradients


@dataclass
class Term:
    """A further scalar that the model returns, such as a router's balance loss."""

    value: float
    coefficient: float  # its factor in the model's loss; 0 if it does not count there
    gradients: Gradients  # of the term itself
    # How many elements the loss is a sum over, where its function says so. The term is a sum over as many.
    number: float = 1.0
    # The gradient that arrived at the term in the run, but not by way of the model's loss
    beside: float = 0.0


@dataclass
class Computed:
    """The results of one micro batch."""

    gradients: Gradients  # of its loss
    # None where no labels reach the model: the gradients then follow from the recorded gradient at the logits
    loss: float | None
    # The gradient that arrived at the loss in the run: the factor that the loop multiplied it with; NaN where the loop trained
    # on a part of the loss
    arrived: float
    terms: dict[str, Term]
    # forward/MICRO_BATCH/MODULE and backward/..., in order of execution
    modules: MutableMapping[str, torch.Tensor]
    told: dict[str, Taken]  # choices that the model was told, by the output that has them
    # What the loss is a mean over: known only in a free pass in float64
    mean: Mean = field(default_factory=Mean)
    # The following fields are those of free passes.
    # The shapes of `modules`, which take the most memory and are dropped
    shapes: dict[str, torch.Size] = field(default_factory=dict)
    logits: torch.Tensor | None = None
    at_logits: float = 0.0  # 2-norm of the gradient of the loss there, in float64


class Passes:
    """Keeps the outputs of modules, and the gradients that arrive there, in passes over micro batches.

    A tensor of `written` takes the place of the computed one that has its name and shape. Gradients still pass through it. Names
    begin with forward/ or backward/.
    """

    def __init__(self, model: torch.nn.Module):
        self.modules: MutableMapping[str, torch.Tensor] = {}
        self.written: Mapping[str, torch.Tensor] = {}
        self.hooks = ModuleHooks(model, "*", self.keep, self.instead)

    def keep(self, name: str, tensor: torch.Tensor) -> None:
        self.modules[name] = as_real(tensor.detach().clone())

    def instead(self, name: str, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the tensor that takes the place of the computed one; None if there is none."""
        written = self.written.get(name)
        written = None if written is None else like(written, tensor)
        if written is None or written.shape != tensor.shape or not is_inexact(tensor):
            return None
        return _like(tensor, written) if name.startswith("backward/") else _Replace.apply(tensor, written)


class _Replace(torch.autograd.Function):
    """Puts a tensor in the place of a computed one. The gradient that arrives at it passes on to the computed one."""

    @staticmethod
    def forward(_context: Any, tensor: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
        """Return `found`. The yardstick keeps its dtype if that is lower, so that what follows rounds as in the run."""
        is_exact = tensor.dtype in (torch.float64, torch.complex128)
        is_lower = found.dtype.itemsize < tensor.dtype.itemsize and not is_exact
        return _like(tensor.to(found.dtype) if is_lower else tensor, found)

    @staticmethod
    def backward(_context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None

    @staticmethod
    def jvp(_context: Any, tangent: torch.Tensor, _found: None) -> torch.Tensor:
        """Return the tangent. A model may use forward-mode differentiation, such as one of an energy."""
        return tangent.clone()


def _like(tensor: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Return the values of `source` in the dtype and memory format of `tensor`."""
    return torch.empty_like(tensor).copy_(source)
