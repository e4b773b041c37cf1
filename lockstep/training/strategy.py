"""The Strategy protocol: all that the loop asks of a strategy."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

import torch

from lockstep.config import Config
from lockstep.mesh import Geometry, Mesh

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MicroBatch = tuple[torch.Tensor, torch.Tensor]  # input_ids and labels, each (B, S); labels are shifted by one


class Optimizer(Protocol):
    """What is asked of an optimizer, torch's or one around it."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """torch's: the learning rate is `lr`."""


class Strategy(Protocol):
    """What a strategy must do. All methods are collective: every rank calls them, in the same order."""

    @property
    def model(self) -> "PreTrainedModel":
        """Under Hugging Face names, sharded or not."""

    @property
    def optimizer(self) -> Optimizer:
        """What `update` steps."""

    def geometry(self) -> Geometry:
        """Where this rank sits, read back from the live groups."""

    def forward_backward(self, micro_batches: list[MicroBatch]) -> torch.Tensor:
        """Accumulate the gradient of the mean loss over the micro batches, averaged over dp, in place of the last
        step's. Returns this rank's mean loss, shape ()."""

    def update(self) -> float:
        """Clip, step the optimizer; returns the norm of the whole model's gradient before clipping."""

    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, whole CPU tensor), un-sharded over tp and dp, one at a time; tied tensors once."""

    def held(self, kind: str) -> Iterator[tuple[str, torch.Tensor, tuple[int, ...], tuple[int, ...]]]:
        """(name, this rank's part, shape of the full tensor, where the part begins in it) of every parameter.

        `kind` is "gradient" (between `forward_backward` and `update`), or "parameter", "exp_avg" or "exp_avg_sq".
        """

    def effective_contract(self) -> dict[str, Any]:
        """What it really runs with, read from live objects after a first step (see lockstep/training/observe.py)."""


MakeStrategy = Callable[["PreTrainedModel", Config, Mesh, torch.device], Strategy]
