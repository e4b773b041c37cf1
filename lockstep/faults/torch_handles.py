"""Handles of strategies in plain torch: DDP and FSDP2 modules, plain tensors and DTensors.

What a handle breaks is said where it is first defined. Handles of other libraries' strategies have the same names.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.parallel import DistributedDataParallel

from lockstep.faults.planting import Handles
from lockstep.inputs import modules
from lockstep.recorder.wrapped import fsdp_groups
from lockstep.training import torch_strategy
from lockstep.training.context_parallel import ContextParallel
from lockstep.training.optim import WeightAverage, gradient_of
from lockstep.training.pipeline import Pipeline
from lockstep.training.torch_strategy import local

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle
    from transformers import PreTrainedModel


class OwnChunk(DefaultReduceScatter):
    """A reduce-scatter that keeps this rank's own chunk: nothing crosses the dp axis."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: object,
        async_op: bool = False,
    ) -> Any:
        self.reduce(output_tensor, input_tensor, group)

    def reduce(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup
    ) -> None:
        output_tensor.copy_(input_tensor.chunk(dist.get_world_size(group))[dist.get_rank(group)])


class TorchHandles(Handles):
    """For every `lockstep.training.torch_strategy.TorchStrategy`."""

    def gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, live tensor) of this rank's shards of the averaged gradient, between backward and update."""
        for name, parameter in self.strategy.model.named_parameters():
            yield name, local(gradient_of(parameter))

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, live tensor) of the weights that this rank holds, working copies and master copies."""
        for name, parameter in self.strategy.model.named_parameters():
            yield name, local(parameter.detach())

    def torch_optimizer(self) -> torch.optim.Optimizer:
        """The torch optimizer that keeps the moments."""
        return self.strategy.optimizer

    def weight_average(self) -> WeightAverage:
        """The average of the weights that --ema_decay asks for. Call it once the strategy is built."""
        return self.strategy.average

    def group(self, axis: str) -> dist.ProcessGroup:
        """The process group along a mesh axis."""
        return self.strategy.device_mesh.get_group(axis)

    def context(self) -> ContextParallel:
        """This rank's positions, and how it attends to those of others. Call it once the strategy is built."""
        return self.strategy.context

    def pipeline(self) -> Pipeline:
        """This rank's stages. Call it once the strategy is built."""
        return self.strategy.pipeline

    def norm_not_summed_over_tp(self) -> None:
        """The gradient norm is that of this tp rank's shards."""
        real = torch_strategy.sharded_axes

        def without_tp(tensor: DTensor) -> tuple[int, ...]:
            names = tensor.device_mesh.mesh_dim_names or ()
            return tuple(axis for axis in real(tensor) if names[axis] != "tp")

        self.run.patch_during(self.strategy, "grad_norm", torch_strategy, "sharded_axes", without_tp)

    def count_replicas_in_norm(self) -> None:
        """Parameters that every tp rank holds whole count tp times in the gradient norm."""
        counted = self.strategy.in_norm  # groups of one layout, whose squares are added up
        replicated = [group for group in counted if not _is_cut_over(group[0], "tp")]
        self.run.patch(self.strategy, "in_norm", counted + (self.run.config.tp_size - 1) * replicated)

    def do_not_clip(self) -> None:
        """Nothing is clipped, whatever --max_grad_norm says."""
        self.run.patch(torch.nn.utils, "clip_grads_with_norm_", lambda *arguments: None)

    def clip_by(self, norm: Callable[[], torch.Tensor]) -> None:
        """Clip by `norm` instead of the norm that is reported."""
        real = torch.nn.utils.clip_grads_with_norm_
        self.run.patch(
            torch.nn.utils,
            "clip_grads_with_norm_",
            lambda parameters, bound, _: real(parameters, bound, norm()),
        )

    def detach_head_from_embedding(self) -> None:
        """The tied head's gradient does not reach the embedding."""
        head = self.strategy.model.get_submodule(modules.names_in(self.strategy.model).head)
        self.run.patch(head, "forward", lambda x: torch.nn.functional.linear(x, head.weight.detach()))

    def batches_are_not_checked(self) -> None:
        """A marker: the strategy itself does not check that tp peers have the same batch."""


def _is_cut_over(parameter: torch.Tensor, axis: str) -> bool:
    """Whether the ranks along an axis hold different shards of a parameter."""
    if not isinstance(parameter, DTensor):
        return False
    names = parameter.device_mesh.mesh_dim_names or ()
    return axis in (names[number] for number in torch_strategy.sharded_axes(parameter))


class DDPHandles(TorchHandles):
    """For a model wrapped in DistributedDataParallel."""

    def skip_dp_reduction(self) -> None:
        """No gradient is reduced over dp."""
        self._reduce_by(self.strategy.wrapped, lambda buffer, group: buffer)

    def divide_gradients_by(self, divisor: int) -> None:
        """The gradients, summed over dp, are divided by `divisor` instead of dp."""

        def divided(buffer: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
            dist.all_reduce(buffer, group=group)
            return buffer.div_(divisor)

        self._reduce_by(self.strategy.wrapped, divided)

    def reduce_in_bfloat16(self) -> None:
        """Gradients are reduced over dp in bfloat16. Call it before the strategy is built."""
        real = DistributedDataParallel.__init__

        def rounded(buffer: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
            in_bfloat16 = buffer.bfloat16()
            dist.all_reduce(in_bfloat16, group=group)
            return buffer.copy_(in_bfloat16).div_(dist.get_world_size(group))

        def with_hook(module: DistributedDataParallel, *arguments: Any, **options: Any) -> None:
            real(module, *arguments, **options)
            self._reduce_by(module, rounded)

        self.run.patch(DistributedDataParallel, "__init__", with_hook)

    def _reduce_by(
        self,
        module: DistributedDataParallel,
        change: Callable[[torch.Tensor, dist.ProcessGroup], torch.Tensor],
    ) -> None:
        """Let change(bucket of gradients, dp group) take the place of DDP's all-reduce and division."""
        recorded = self.run.recorded("DDP's all-reduce", change)

        def hook(_state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
            done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            done.set_result(recorded(bucket.buffer(), module.process_group))
            return done

        module.register_comm_hook(None, hook)


class FSDPHandles(TorchHandles):
    """For fsdp_strategy.py: `fully_shard` over dp, `parallelize_module` over tp."""

    def _fsdp_modules(self) -> list[FSDPModule]:
        return [module for module in self.strategy.model.modules() if isinstance(module, FSDPModule)]

    def _module(self, name: str) -> torch.nn.Module:
        return self.strategy.model.get_submodule(name)

    def skip_dp_reduction(self) -> None:
        for module in self._fsdp_modules():
            self._keep_own_chunk(module)

    def skip_dp_reduction_of(self, module: str) -> None:
        """The gradients of one module are not reduced over dp."""
        layer = self._module(module)
        assert isinstance(layer, FSDPModule), f"{module} is none of the layers that fully_shard has had"
        self._keep_own_chunk(layer)

    def _keep_own_chunk(self, module: FSDPModule) -> None:
        reduce_scatter = OwnChunk()
        self.run.patch(reduce_scatter, "reduce", reduce_scatter.reduce)
        module.set_custom_reduce_scatter(reduce_scatter)

    def divide_gradients_by(self, divisor: int) -> None:
        for module in self._fsdp_modules():
            module.set_gradient_divide_factor(float(divisor))
            module.set_force_sum_reduction_for_comms(True)  # gloo cannot multiply while it reduces

    def reduce_before_the_last_micro_batch(self) -> None:
        """The reduction over dp happens one micro batch too early."""
        steps = self.run.config.gradient_accumulation_steps
        real, calls = self.strategy.model.set_requires_gradient_sync, itertools.count()
        self.run.patch(
            self.strategy.model,
            "set_requires_gradient_sync",
            lambda _: real(next(calls) % steps == steps - 2),
        )
        # The gradient of the last micro batch must not count in the next step either
        self.run.around(self.strategy, "update", after=lambda _step: self._drop_unreduced())

    def _drop_unreduced(self) -> None:
        for group in fsdp_groups(self.strategy.model):
            for parameter in group.fsdp_params:
                parameter.unsharded_accumulated_grad = None

    def reduce_in_bfloat16(self) -> None:
        module = self.run.defining("fully_shard")
        shard, policy = module.fully_shard, MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)

        def in_bfloat16(module: torch.nn.Module, **options: Any) -> FSDPModule:
            return shard(module, **{**options, "mp_policy": policy})

        self.run.patch(module, "fully_shard", in_bfloat16)

    def drop_sum_over_tp(self, module: str) -> None:
        """The output of a row-parallel layer is not summed: it stays this rank's partial product."""
        self._change_output(module, lambda output: output.to_local())

    def _change_output(self, name: str, change: Callable[[Any], torch.Tensor]) -> None:
        """Let a module give change(output), in place of the hooks that it has."""
        self._module(name)._forward_hooks.clear()
        self.run.change_output(name, change)

    def drop_embedding_sum(self) -> None:
        """Embeddings are not summed over tp: an id that another rank holds has an embedding of zeros."""
        from torch.distributed.tensor.placement_types import _MaskPartial

        def masked_only(
            partial: _MaskPartial, tensor: torch.Tensor, mesh: DeviceMesh, mesh_dim: int
        ) -> torch.Tensor:
            partial.mask_buffer.apply_mask(tensor)
            partial.mask_buffer.release_mask()
            return tensor

        self.run.patch(_MaskPartial, "_reduce_value", masked_only)

    def drop_input_gradient_sum(self, module: str, *layers: str) -> None:
        """The gradient of the input that the column-parallel `layers` of a module share is not summed over tp."""
        mesh = self.strategy.device_mesh["tp"]
        block = self._module(module)
        enter = self.run.recorded(f"the input of {module}", lambda x: _EnterUnreduced.apply(x, mesh))
        block._forward_pre_hooks.clear()
        block.register_forward_pre_hook(lambda _module, inputs: (enter(inputs[0]),))

    def drop_head_norm_gradient_sum(self) -> None:
        """The gradients of the norms on the heads stay this rank's share. Call it before the strategy is built."""
        module = self.run.defining("tp_plan")
        real = module.tp_plan

        def without_head_norms(model: "PreTrainedModel", **options: bool) -> dict[str, "ParallelStyle"]:
            return {
                pattern: style
                for pattern, style in real(model, **options).items()
                if not pattern.endswith(("q_norm", "k_norm"))
            }

        self.run.patch(module, "tp_plan", without_head_norms)

    def drop_norm_gradient_sum(self) -> None:
        """With sequence parallelism: norms between blocks have the gradient of this rank's positions.

        Call it before the strategy is built.
        """
        module = self.run.defining("norms_between_blocks")
        self.run.patch(module, "norms_between_blocks", lambda model: [])

    def cut_without_sum(self, module: str) -> None:
        """With sequence parallelism: a row-parallel layer's output is not summed.

        This rank keeps its positions of its own partial product.
        """
        mesh = self.strategy.device_mesh["tp"]
        self._change_output(
            module, lambda output: output.to_local().chunk(mesh.size(), 1)[mesh.get_local_rank()]
        )

    def sum_partition_function_again(self) -> None:
        """The sum of exponentials over the vocabulary shards is reduced over tp twice."""
        from lockstep.training import vocab_parallel_loss

        self.run.reduce_again(vocab_parallel_loss, calls_per_loss=2, which=1, row=0)

    def shift_vocabulary_offset(self) -> None:
        """The first id of the later vocabulary shards is one too low."""
        module = self.run.defining("vocab_parallel_cross_entropy")
        loss = module.vocab_parallel_cross_entropy
        self.run.patch(
            module,
            "vocab_parallel_cross_entropy",
            lambda logits, labels, first_id, *rest: loss(logits, labels, first_id - (first_id > 0), *rest),
        )


class _EnterUnreduced(torch.autograd.Function):
    """A replicated DTensor of x; in backward, this rank's own share of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mesh: DeviceMesh) -> DTensor:
        return DTensor.from_local(x, mesh, [Replicate()], run_check=False)

    @staticmethod
    def backward(ctx: Any, gradient: DTensor) -> tuple[torch.Tensor, None]:
        return gradient.to_local(), None
