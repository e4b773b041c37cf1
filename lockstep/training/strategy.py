"""The Strategy protocol: everything that the loop asks of a strategy."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from lockstep.dumps.capture import Captured
from lockstep.ground.errors import UserError
from lockstep.inputs.samples import IGNORED, Samples
from lockstep.plan import strategies
from lockstep.plan.config import Config, Spec
from lockstep.plan.mesh import Geometry, Mesh

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# input_ids and labels, each (B, S); labels are shifted by one. Then the further inputs that `Samples.further` names, mostly none.
MicroBatch = tuple[torch.Tensor, ...]


class Optimizer(Protocol):
    """What the loop needs of an optimizer, torch's own or a wrapper."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """As in torch; the learning rate is `lr`."""


class Strategy(Captured, Protocol):
    """What a strategy must do, beside what `Captured` lists. All methods are collective: every rank calls them, in the same order."""

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer that `update` steps."""

    def geometry(self) -> Geometry:
        """The mesh and this rank's coordinates, read back from the live groups."""

    def forward_backward(self, micro_batches: list[MicroBatch]) -> torch.Tensor:
        """Replace the last step's gradient by that of the mean loss over the micro batches, averaged over dp and cp.

        Returns the mean loss of this rank's samples, over all their positions, on every stage; shape ().

        If some positions have no label (-100), the mean is over all labels of the global batch: a rank returns the sum over its samples,
        times dp, divided by their number, so that the mean over ranks is the loss.
        """

    def update(self) -> float:
        """Clip and step the optimizer. Returns the norm of the whole model's gradient before clipping."""

    def clipped_norm(self) -> float | None:
        """The norm that the gradients had in the last update, after clipping; None if they are gone."""

    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, whole CPU tensor) of every parameter, gathered over all axes, one at a time; tied tensors once."""

    def effective_contract(self) -> dict[str, Any]:
        """What the run really runs with, read back from live objects after the first step (lockstep/training/observe.py)."""


def require_strategy(spec: Spec, further: tuple[str, ...] = ()) -> None:
    """Raise UserError unless a user's strategy is a class with all methods of the protocol, and takes the `further` inputs."""
    strategy_class = strategies.load(spec.factory)
    forward_backward = getattr(strategy_class, "forward_backward", None)
    members = {**vars(Strategy), **vars(Captured)}
    methods = [name for name, member in members.items() if not name.startswith("_") and callable(member)]
    missing = [name for name in methods if not hasattr(strategy_class, name)]
    if not isinstance(strategy_class, type) or missing:
        problem = f"has no {', '.join(missing)}" if isinstance(strategy_class, type) else "is no class"
        raise UserError(
            f"{spec.factory} {problem}; derive it from TorchStrategy, or write what docs/your-own-strategy.md lists"
        )
    is_own = forward_backward.__module__ != "lockstep.training.torch_strategy"
    # It may call that of TorchStrategy, and reduce gradients afterwards.
    calls_other = "forward_backward" in getattr(getattr(forward_backward, "__code__", None), "co_names", ())
    if further and is_own and not calls_other:
        raise UserError(
            f"{spec.factory} has a forward_backward of its own that does not call TorchStrategy's, for micro batches of ids and labels alone, and these have "
            f"{further[0]}, too; leave --padding and --documents out"
        )


def count_labels(samples: Samples, micro_batches: list[MicroBatch], mesh: Mesh) -> torch.Tensor | None:
    """Return the number of labels of the global batch, which each micro batch divides its sum of losses by; int64, shape (). Collective.

    None if every position has a label, so that a mean will do.
    """
    if not samples.counted:
        return None
    total = torch.stack([(labels != IGNORED).sum() for _, labels, *_ in micro_batches]).sum()
    dist.all_reduce(total)
    # Ranks with the same samples have counted the same labels.
    return total // (mesh.world_size // mesh.num_sample_shares)


MakeStrategy = Callable[["PreTrainedModel", Config, Mesh, torch.device], Strategy]


def factory_of(spec: Spec) -> MakeStrategy:
    """The strategy's class. Raises UserError for a user's file that cannot be imported or has no such class."""
    return strategies.load(spec.factory)
