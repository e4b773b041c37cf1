"""Handles by which a planted bug changes a strategy: one method for each thing that a bug breaks.

A strategy's row in the registry names its class of handles. A strategy has the handles that its class overrides. Faults that need others
are not planted there: a fault says what it needs, never in which strategy.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from lockstep.faults.patches import PatchedRun
from lockstep.training.context_parallel import ContextParallel
from lockstep.training.optim import WeightAverage
from lockstep.training.pipeline import Pipeline


class Handles:
    """The handles of one strategy in one run. `strategy` exists once it is built; `run` is the fault's argument."""

    strategy: Any

    def __init__(self, run: PatchedRun):
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
        """(name, live tensor) of this rank's shards of the averaged gradient, between backward and update."""
        raise NotImplementedError

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, live tensor) of the weights that this rank holds, working copies and master copies."""
        raise NotImplementedError

    def torch_optimizer(self) -> torch.optim.Optimizer:
        """The torch optimizer that keeps the moments."""
        raise NotImplementedError

    def weight_average(self) -> WeightAverage:
        """The average of the weights that --ema_decay asks for. Call it once the strategy is built."""
        raise NotImplementedError

    def group(self, axis: str) -> dist.ProcessGroup:
        """The process group along a mesh axis."""
        raise NotImplementedError

    def context(self) -> ContextParallel:
        """This rank's positions, and how it attends to those of others. Call it once the strategy is built."""
        raise NotImplementedError

    def pipeline(self) -> Pipeline:
        """This rank's stages. Call it once the strategy is built."""
        raise NotImplementedError

    # --- gradients over dp ---

    def skip_dp_reduction(self) -> None:
        """No gradient is reduced over dp."""
        raise NotImplementedError

    def skip_dp_reduction_of(self, module: str) -> None:
        """The gradients of one module are not reduced over dp."""
        raise NotImplementedError

    def divide_gradients_by(self, divisor: int) -> None:
        """The gradients, summed over dp, are divided by `divisor` instead of dp."""
        raise NotImplementedError

    def reduce_before_the_last_micro_batch(self) -> None:
        """The reduction over dp happens one micro batch too early."""
        raise NotImplementedError

    def reduce_in_bfloat16(self) -> None:
        """Gradients are reduced over dp in bfloat16. Call it before the strategy is built."""
        raise NotImplementedError

    # --- reductions over tp ---

    def drop_sum_over_tp(self, module: str) -> None:
        """The output of a row-parallel layer is not summed: it stays this rank's partial product."""
        raise NotImplementedError

    def drop_embedding_sum(self) -> None:
        """Embeddings are not summed over tp: an id that another rank holds has an embedding of zeros."""
        raise NotImplementedError

    def drop_input_gradient_sum(self, module: str, *layers: str) -> None:
        """The gradient of the input that the column-parallel `layers` of a module share is not summed over tp."""
        raise NotImplementedError

    def drop_input_gradient_sum_of(self, layer: str) -> None:
        """One column-parallel layer does not sum the gradient of its input over tp."""
        raise NotImplementedError

    def drop_head_norm_gradient_sum(self) -> None:
        """The gradients of the norms on the heads stay this rank's share. Call it before the strategy is built."""
        raise NotImplementedError

    def drop_norm_gradient_sum(self) -> None:
        """With sequence parallelism: norms between blocks have the gradient of this rank's positions. Call it before the strategy is built."""
        raise NotImplementedError

    def cut_without_sum(self, module: str) -> None:
        """With sequence parallelism: of a row-parallel layer's output this rank keeps its positions of its own partial product."""
        raise NotImplementedError

    # --- norm and clipping ---

    def norm_not_summed_over_tp(self) -> None:
        """The gradient norm is that of this tp rank's shards."""
        raise NotImplementedError

    def count_replicas_in_norm(self) -> None:
        """Parameters that every tp rank holds whole count tp times in the gradient norm."""
        raise NotImplementedError

    def do_not_clip(self) -> None:
        raise NotImplementedError

    def clip_by(self, norm: Callable[[], torch.Tensor]) -> None:
        """Clip by `norm` instead of the norm that is reported."""
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
        """A marker: the strategy itself does not check that tp peers have the same batch."""
        raise NotImplementedError
