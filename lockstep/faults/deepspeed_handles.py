"""Handles of DeepSpeed AutoTP + ZeRO (autotp_strategy.py)."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from lockstep.faults.planting import Handles
from lockstep.inputs import modules
from lockstep.plan import deepspeed_file


class AutoTPHandles(Handles):
    """For `autotp_strategy.AutoTPStrategy`. lockstep/faults/torch_handles.py says what each breaks."""

    def gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self.strategy.model.named_parameters():
            # None if this rank's shard of the optimizer state has no part of the parameter
            if parameter._hp_mapping is not None:
                yield name, parameter._hp_mapping.get_lp_grad_fragment(parameter._index_in_param_group)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self.strategy.model.named_parameters():
            yield name, parameter.data
            if parameter._hp_mapping is not None:
                yield name, parameter._hp_mapping.get_hp_fragment().detach()

    def torch_optimizer(self) -> torch.optim.Optimizer:
        return self.strategy.optimizer.optimizer

    def group(self, axis: str) -> dist.ProcessGroup:
        return {"dp": self.strategy.engine.data_parallel_group, "tp": self.strategy.tp_group()}[axis]

    def skip_dp_reduction(self) -> None:
        self.run.patch(
            self.strategy.optimizer, "average_tensor", lambda tensor, communication_data_type: None
        )

    def divide_gradients_by(self, divisor: int) -> None:
        if divisor == 1:
            self.run.patch(self.strategy.optimizer, "gradient_average", False)
        else:  # DeepSpeed divides by dp_size / sequence_parallel_size
            size = self.run.config.dp_size / divisor
            self.run.patch(self.strategy.optimizer, "sequence_parallel_size", size)

    def reduce_before_the_last_micro_batch(self) -> None:
        engine, optimizer = self.strategy.engine, self.strategy.optimizer
        kept: dict[str, torch.Tensor] = {}

        def note(_call: int) -> None:
            if engine.is_gradient_accumulation_boundary():
                kept.update({name: p.grad.clone() for name, p in self.strategy.model.named_parameters()})

        def take_back(_call: int) -> None:
            for name, parameter in self.strategy.model.named_parameters():
                if name in kept:
                    parameter.grad.copy_(kept.pop(name))

        self.run.around(engine, "backward", before=note)
        self.run.around(optimizer, "reduce_gradients", before=take_back)

    def reduce_in_bfloat16(self) -> None:
        real = deepspeed_file.resolved
        self.run.patch(deepspeed_file, "resolved", lambda *a: {**real(*a), "communication_data_type": "bf16"})

    def drop_sum_over_tp(self, module: str) -> None:
        # The layer has no group to reduce over. In a column-parallel layer, what is not summed is the gradient of its input:
        # the next handle.
        self.run.patch(self.strategy.model.get_submodule(module), "mp_group", None)

    drop_input_gradient_sum_of = drop_sum_over_tp

    def drop_embedding_sum(self) -> None:
        self.drop_sum_over_tp(modules.names_in(self.strategy.model).embedding)

    def drop_input_gradient_sum(self, module: str, *layers: str) -> None:
        for layer in layers:
            self.drop_input_gradient_sum_of(f"{module}.{layer}")

    def drop_head_norm_gradient_sum(self) -> None:
        from deepspeed.module_inject.auto_tp import AutoTP

        self.run.patch(AutoTP, "register_replicated_grad_hooks", lambda self, model: None)

    def norm_not_summed_over_tp(self) -> None:
        self.run.patch(self.strategy.optimizer, "_model_parallel_all_reduce", lambda tensor, op: None)

    def count_replicas_in_norm(self) -> None:
        from deepspeed.runtime.zero import stage_1_and_2

        self.run.patch(stage_1_and_2, "is_model_parallel_parameter", lambda parameter: True)

    def do_not_clip(self) -> None:
        self.run.patch(self.strategy.optimizer, "clip_grad", 0.0)

    def clip_by(self, norm: Callable[[], torch.Tensor]) -> None:
        clip = self.strategy.optimizer.unscale_and_clip_grads
        self.run.patch(
            self.strategy.optimizer,
            "unscale_and_clip_grads",
            lambda gradients, total_norm: clip(gradients, norm()),
        )

    def sum_partition_function_again(self) -> None:
        from deepspeed.sequence import cross_entropy

        self.run.reduce_again(cross_entropy, calls_per_loss=3, which=1)

    def shift_vocabulary_offset(self) -> None:
        from deepspeed.sequence.cross_entropy import _VocabParallelCrossEntropy

        real = _VocabParallelCrossEntropy.apply

        def shifted(
            logits: torch.Tensor, target: torch.Tensor, group: object, start: int, end: int, *more: Any
        ) -> torch.Tensor:
            return real(logits, target, group, start - (start > 0), end - (start > 0), *more)

        self.run.patch(_VocabParallelCrossEntropy, "apply", shifted)

    def detach_head_from_embedding(self) -> None:
        from deepspeed.module_inject.layers import ColumnParallel

        head = self.strategy.model.get_submodule(modules.names_in(self.strategy.model).head)
        self.run.patch(
            head,
            "forward",
            lambda x: torch.matmul(
                ColumnParallel.apply(head.mp_group, x), head.weight.detach().transpose(-1, -2)
            ),
        )
