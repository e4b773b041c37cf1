"""What a planted bug may take hold of in a strategy: one method for each thing that a bug breaks.

A strategy's row in the registry names its handles. What a class of handles does not override its strategy does not have, and
faults that need it are not planted there: a fault says what it needs, never in which strategy.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from lockstep.faults.planting import Planting


class Handles:
    """The handles of one strategy in one run. `strategy` is there once it is built; `run` is what the fault is planted in."""

    strategy: Any

    def __init__(self, run: Planting):
        self.run = run

    @classmethod
    def offered(cls) -> frozenset[str]:
        """The names of the handles that this class has."""
        names = {
            name for name in vars(Handles) if not name.startswith("_") and name not in ("offered", "strategy")
        }
        return frozenset(name for name in names if getattr(cls, name) is not getattr(Handles, name))

    # --- what every strategy holds ---

    def gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, live tensor) of the parts of the averaged gradient that this rank holds, between backward and update."""
        raise NotImplementedError

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, live tensor) of the weights that this rank holds; working copies and master copies."""
        raise NotImplementedError

    def torch_optimizer(self) -> torch.optim.Optimizer:
        """The torch optimizer that keeps the moments."""
        raise NotImplementedError

    def group(self, axis: str) -> dist.ProcessGroup:
        """The process group along a mesh axis."""
        raise NotImplementedError

    # --- gradients over dp ---

    def skip_dp_reduction(self) -> None:
        """No gradient crosses the dp axis."""
        raise NotImplementedError

    def skip_dp_reduction_of(self, module: str) -> None:
        """The gradients of one module do not cross the dp axis."""
        raise NotImplementedError

    def divide_gradients_by(self, divisor: int) -> None:
        """The gradients, summed over dp, are divided by this instead of dp."""
        raise NotImplementedError

    def reduce_before_the_last_micro_batch(self) -> None:
        """The reduction over dp happens one micro batch too early."""
        raise NotImplementedError

    def reduce_in_bfloat16(self) -> None:
        """Gradients travel over dp in bfloat16. Before the strategy is built."""
        raise NotImplementedError

    # --- reductions over tp ---

    def drop_sum_over_tp(self, module: str) -> None:
        """The output of a row-parallel layer stays this rank's partial product."""
        raise NotImplementedError

    def drop_embedding_sum(self) -> None:
        """An id that another tp rank holds has an embedding of zeros."""
        raise NotImplementedError

    def drop_input_gradient_sum(self, module: str, *layers: str) -> None:
        """The gradient of the input that the column-parallel `layers` of a module share is not summed over tp."""
        raise NotImplementedError

    def drop_input_gradient_sum_of(self, layer: str) -> None:
        """Of the column-parallel layers of a module one does not sum the gradient of its input over tp."""
        raise NotImplementedError

    def drop_head_norm_gradient_sum(self) -> None:
        """The gradients of the norms on the heads stay this rank's share. Before the strategy is built."""
        raise NotImplementedError

    # --- norm and clipping ---

    def norm_not_summed_over_tp(self) -> None:
        """The gradient norm is that of this tp rank's shards."""
        raise NotImplementedError

    def count_replicas_in_norm(self) -> None:
        """What every tp rank holds whole is in the gradient norm tp times."""
        raise NotImplementedError

    def do_not_clip(self) -> None:
        raise NotImplementedError

    def clip_by(self, norm: Callable[[], torch.Tensor]) -> None:
        """Clip by another norm than the one that is reported."""
        raise NotImplementedError

    # --- vocabulary shards ---

    def sum_partition_function_again(self) -> None:
        """The sum of exponentials over the vocabulary shards is reduced over tp twice."""
        raise NotImplementedError

    def shift_vocabulary_offset(self) -> None:
        """The first id of the later vocabulary shards is one too low."""
        raise NotImplementedError

    # --- ties and batches ---

    def detach_head_from_embedding(self) -> None:
        """The tied head's gradient does not reach the embedding."""
        raise NotImplementedError

    def batches_are_not_checked(self) -> None:
        """A marker: the strategy itself does not look at whether tp peers have the same batch."""
        raise NotImplementedError
