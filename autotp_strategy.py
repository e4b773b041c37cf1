"""DeepSpeed AutoTP + ZeRO: tensor parallelism by configuration; optimizer state, gradients and weights sharded over dp by stage.

Only this file and three of lockstep/ import deepspeed at run time: training/deepspeed_build.py, training/ulysses.py and
plan/deepspeed_file.py.
"""

import contextlib
import os
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pydantic
import torch
import torch.distributed as dist

from lockstep.ground import origin
from lockstep.ground.blocks import CalledModules, Held
from lockstep.ground.errors import LIBRARY_REFUSES, UserError, first_line
from lockstep.inputs import modules
from lockstep.inputs.model import causal_lm_loss
from lockstep.plan import deepspeed_file, zero
from lockstep.plan.config import Config
from lockstep.plan.deepspeed import DeepSpeed
from lockstep.plan.mesh import Geometry, Mesh, share
from lockstep.training import ulysses
from lockstep.training.deepspeed_build import build_async_io, collectives, use_torch_collectives
from lockstep.training.observe import (
    model_contract,
    optimizer_contract,
)
from lockstep.training.optim import (
    build_optimizer,
    gradient_of,
    parameter_groups,
    total_norm,
)
from lockstep.training.strategy import MicroBatch, count_labels

if TYPE_CHECKING:
    from transformers import PreTrainedModel

if not torch.cuda.is_available():
    # Otherwise DeepSpeed looks for a GPU, and says so.
    os.environ["DS_ACCELERATOR"] = "cpu"


class Stage0:
    """Finds the live objects of an engine without ZeRO, in which torch's own optimizer steps the parameters."""

    def __init__(self, engine: Any):
        self.engine = engine

    def torch_optimizer(self) -> torch.optim.Optimizer:
        return self.engine.optimizer

    def members(self) -> list[list[torch.nn.Parameter]]:
        """The model's parameters by group of the optimizer."""
        return [group["params"] for group in self.torch_optimizer().param_groups]

    def sums_over_cp(self) -> bool:
        """Whether the engine sums gradients over the ranks of a sequence. It averages them over dp in any case."""
        return True

    def num_stepped(self) -> int:
        """How many elements this rank's optimizer steps."""
        return sum(p.numel() for group in self.torch_optimizer().param_groups for p in group["params"])

    def step(self, max_grad_norm: float) -> float:
        """Clip and step; returns the gradient norm before clipping.

        DeepSpeed's own clipping takes torch's float32 norm, which is inexact on a CPU (docs/findings.md). So it is done here.
        """
        norm = self._norm()
        if max_grad_norm > 0:
            torch.nn.utils.clip_grads_with_norm_(self.engine.module.parameters(), max_grad_norm, norm)
        self.clipped = float(self._norm())
        self.engine.step()
        return float(norm)

    def clipped_norm(self) -> float | None:
        return self.clipped

    def _norm(self) -> torch.Tensor:
        from deepspeed.runtime.utils import is_model_parallel_parameter

        mpu = self.engine.mpu
        # Without tensor parallelism, this rank holds all gradients.
        if self.engine.autotp_size() == 1:
            return total_norm(map(gradient_of, self.engine.module.parameters()))
        parameters = [
            parameter
            for parameter in self.engine.module.parameters()
            if is_model_parallel_parameter(parameter) or mpu.get_model_parallel_rank() == 0
        ]
        square = total_norm(map(gradient_of, parameters)).square()
        dist.all_reduce(square, group=mpu.get_model_parallel_group())
        return square.sqrt()

    def max_grad_norm(self, configured: float) -> float:
        """The norm that gradients are clipped to, as the live object that clips says. Here that is this class."""
        return configured

    def parameter(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """This tp rank's shard of a parameter, whole over dp."""
        return parameter.detach()

    def gradient(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        assert parameter.grad is not None
        return parameter.grad

    def moment(self, parameter: torch.nn.Parameter, kind: str) -> torch.Tensor:
        return self.torch_optimizer().state[parameter][kind]


class Stage1And2(Stage0):
    """DeepSpeed's optimizer holds a flat float32 shard of each group. Pieces of it are linked to the parameters."""

    def __init__(self, engine: Any):
        super().__init__(engine)
        if engine.zero_round_robin_gradients():
            self._link_in_round_robin_order()

    def _link_in_round_robin_order(self) -> None:
        """Link every parameter to its own piece. DeepSpeed links it to another parameter's (docs/findings.md)."""
        from deepspeed.utils import link_hp_params

        optimizer, rank = self.engine.optimizer, dist.get_rank(self.engine.data_parallel_group)
        for number, group in enumerate(optimizer.bit16_groups):
            pairs = zip(
                optimizer.round_robin_bit16_groups[number],
                optimizer.round_robin_bit16_offsets[number],
                strict=True,
            )
            offsets = {id(parameter): offset for parameter, offset in pairs}
            size = optimizer.partition_size[number]
            link_hp_params(
                lp_param_list=group,
                flat_hp_partition=optimizer.single_partition_of_fp32_groups[number],
                gradient_dict=optimizer.averaged_gradients,
                offload_gradient_dict=optimizer.offload_gradient_dict,
                use_offload=optimizer.cpu_offload,
                param_group_index=number,
                partition_start=rank * size,
                partition_size=size,
                dp_group=self.engine.data_parallel_group,
                param_offsets=[offsets[id(parameter)] for parameter in group],
            )

    def torch_optimizer(self) -> torch.optim.Optimizer:
        return self.engine.optimizer.optimizer

    def members(self) -> list[list[torch.nn.Parameter]]:
        return self.engine.optimizer.bit16_groups

    def step(self, max_grad_norm: float) -> float:
        # This clips, too.
        self.engine.step()
        norm = float(self.engine.get_global_grad_norm())
        # DeepSpeed returns -1 for a norm that is not finite.
        return norm if norm >= 0 else float("nan")

    def clipped_norm(self) -> float | None:
        return None

    def max_grad_norm(self, configured: float) -> float:
        return self.engine.optimizer.clip_grad

    def gradient(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        from deepspeed.utils import safe_get_full_grad

        return safe_get_full_grad(parameter)

    def moment(self, parameter: torch.nn.Parameter, kind: str) -> torch.Tensor:
        from deepspeed.utils import safe_get_full_optimizer_state

        # DeepSpeed links the moments too early, when only its first group has stepped (docs/findings.md).
        self.engine.optimizer._hp_optimizer_states_linked = False
        self.engine.optimizer._lazy_init_hp_params_optimizer_state()
        return safe_get_full_optimizer_state(parameter, kind)


class Stage3(Stage1And2):
    """A parameter holds nothing between its uses; it is gathered from the shards of the dp ranks."""

    def members(self) -> list[list[torch.nn.Parameter]]:
        """The model's parameters by group. Stage 3 steps a group in sub-groups of at most `sub_group_size` elements."""
        optimizer = self.engine.optimizer
        groups: list[list[torch.nn.Parameter]] = [[] for _ in self.torch_optimizer().param_groups]
        for number, sub_group in enumerate(optimizer.fp16_groups):
            groups[optimizer.sub_group_to_group_id[number]] += sub_group
        return groups

    def sums_over_cp(self) -> bool:
        # reduce_scatter averages over all ranks (docs/findings.md).
        return not self.engine.optimizer.reduce_scatter

    def num_stepped(self) -> int:
        # Not counted in the tensors: what is on NVMe has no elements meanwhile.
        return sum(self.engine.optimizer.fp16_partitioned_groups_flat_numel)

    def parameter(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        import deepspeed

        with deepspeed.zero.GatheredParameters([parameter]):
            return parameter.detach().clone()

    def moment(self, parameter: torch.nn.Parameter, kind: str) -> torch.Tensor:
        from deepspeed.utils import safe_get_full_optimizer_state

        return safe_get_full_optimizer_state(parameter, kind)


@contextlib.contextmanager
def _refusals_named(file: zero.UserFile | None) -> Iterator[None]:
    """Raise as UserError, in one line, what DeepSpeed refuses of a user's file, or what another version of it refuses."""
    from deepspeed.runtime.config import DeepSpeedConfigError

    try:
        yield
    except (AssertionError, ValueError, NotImplementedError, DeepSpeedConfigError) as error:
        version = origin.difference(DeepSpeed.library)
        if file is None and not version:
            raise
        reason = first_line(error)
        # The first line of pydantic's error names no field.
        if isinstance(error, pydantic.ValidationError):
            first = error.errors()[0]
            reason = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        if file is None:
            raise UserError(f"{version}; {LIBRARY_REFUSES}: {reason}; install requirements.txt") from error
        raise UserError(f"{file.path}: {LIBRARY_REFUSES}: {reason}; correct it") from error


STAGES = (Stage0, Stage1And2, Stage1And2, Stage3)


class AutoTPStrategy:
    """See `lockstep.training.strategy.Strategy` for what each method has to do."""

    def __init__(self, model: "PreTrainedModel", config: Config, mesh: Mesh, device: torch.device):
        if device.type == "cpu":
            # Otherwise DeepSpeed takes the GPU of a machine that has one.
            os.environ["DS_ACCELERATOR"] = "cpu"
        import deepspeed

        # DeepSpeed calls it.
        warnings.filterwarnings("ignore", "`torch.distributed.all_gather_into_tensor` is deprecated")
        self.config = config
        self.full_shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        if device.type == "cpu":
            use_torch_collectives()
        if zero.of(config).nvme_path is not None:
            build_async_io()
        deepspeed.init_distributed(dist_backend=dist.get_backend())
        ulysses.forget()
        self.sequence = ulysses.Ulysses(model, config) if mesh.cp > 1 else None
        modules.to_dtype(model, config.parameter_dtype)
        model.to(device)  # type: ignore[arg-type] # a decorator of transformers loses self
        with _refusals_named(zero.of(config).deepspeed_config):
            self.engine, self.optimizer, _, _ = deepspeed.initialize(
                model=model,
                model_parameters=parameter_groups(model.parameters(), config.weight_decay),
                optimizer=lambda groups: build_optimizer(
                    groups, optimizer=config.optimizer, learning_rate=config.learning_rate
                ),
                config=deepspeed_file.resolved(
                    config, self.full_shapes[modules.names_in(model).embedding_weight][-1]
                ),
                mpu=self.sequence.mpu if self.sequence else None,
            )
        self.model = self.engine.module
        self.max_grad_norm = config.max_grad_norm
        # By the live stage, which the contract compares with the options
        self.stage = STAGES[self.engine.zero_optimization_stage()](self.engine)

    def geometry(self) -> Geometry:
        if self.sequence is not None:
            return self.sequence.geometry()
        return Geometry.of_groups({"dp": self.engine.data_parallel_group, "tp": self.tp_group()})

    def tp_group(self) -> dist.ProcessGroup | None:
        """The tensor-parallel process group; None if AutoTP is off."""
        return self.engine.mpu.get_tensor_model_parallel_group() if self.engine.autotp_size() > 1 else None

    @property
    def loss_shares(self) -> int:
        return self.geometry().mesh.num_loss_shares // self._divisor

    def forward_backward(self, micro_batches: list[MicroBatch]) -> torch.Tensor:
        self.num_micro_batches, self.num_tokens = len(micro_batches), micro_batches[0][1].numel()
        losses = []
        self.num_labels = count_labels(self.config.samples, micro_batches, self.geometry().mesh)
        for index, (input_ids, labels, *further) in enumerate(micro_batches):
            self.further = self.config.samples.named(further)
            self.engine.set_gradient_accumulation_boundary(index == len(micro_batches) - 1)
            loss = self.loss(input_ids, labels)
            # The engine divides by gradient_accumulation_steps.
            self.engine.backward(loss / self._divisor)
            losses.append(loss.detach())
        mean = torch.stack(losses).mean()
        return mean if self.sequence is None else self.sequence.mean(mean)

    def loss(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """This rank's mean loss over one micro batch, each (B, S); shape (). As in TorchStrategy."""
        inputs = dict(self.further)
        if self.sequence is not None:
            input_ids, labels, inputs["position_ids"] = self.sequence.cut(input_ids, labels)
        loss = causal_lm_loss(self.engine, input_ids, labels, num_labels=self.num_labels, **inputs)
        if self.num_labels is None:
            return loss
        return loss * self.num_micro_batches * self.geometry().mesh.num_loss_shares

    @property
    def _divisor(self) -> int:
        """What a rank divides its loss by, because the engine sums what should be averaged."""
        return self.sequence.size if self.sequence is not None and self.stage.sums_over_cp() else 1

    def update(self) -> float:
        return self.stage.step(self.max_grad_norm)

    def clipped_norm(self) -> float | None:
        return self.stage.clipped_norm()

    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self.model.named_parameters():
            yield name, self._gather_over_tp(name, self.stage.parameter(parameter)).cpu()

    def state_kinds(self) -> list[str]:
        return [] if self.config.optimizer == "sgd" else ["exp_avg", "exp_avg_sq"]

    def held(self, kind: str) -> Held:
        """As in the protocol. A shard is whole over dp, as DeepSpeed's safe_get_full_* return it, and cut over tp."""
        if kind not in ("parameter", "gradient", *self.state_kinds()):
            return
        geometry = self.geometry()
        tp_rank, tp_size = geometry.coordinates.tp, geometry.mesh.tp
        for name, parameter in self.model.named_parameters():
            if kind == "parameter":
                shard = self.stage.parameter(parameter)
            elif kind == "gradient":
                shard = self.stage.gradient(parameter)
            else:
                shard = self.stage.moment(parameter, kind)
            full = tuple(self.full_shapes[name])
            cut = self._cut_dims(name, shard)
            yield (
                name,
                shard,
                full,
                tuple(share(size, tp_rank, tp_size)[0] if dim in cut else 0 for dim, size in enumerate(full)),
            )

    def _cut_dims(self, name: str, shard: torch.Tensor) -> list[int]:
        """The dims in which a tensor-parallel shard is smaller than the full tensor: one, or none."""
        full_shape = self.full_shapes[name]
        return [
            dim
            for dim, (part, whole) in enumerate(zip(shard.shape, full_shape, strict=True))
            if part != whole
        ]

    def _gather_over_tp(self, name: str, shard: torch.Tensor) -> torch.Tensor:
        """Join the shards of a tensor along the one dim in which a shard is smaller than the whole."""
        dims = self._cut_dims(name, shard)
        if not dims:
            return shard
        (dim,) = dims
        group = self.tp_group()
        shards = []
        # Shards of an odd dim differ in size: broadcast, not all_gather.
        for rank in range(dist.get_world_size(group)):
            shape = list(shard.shape)
            _, shape[dim] = share(self.full_shapes[name][dim], rank, dist.get_world_size(group))
            rank_shard = shard.contiguous() if rank == dist.get_rank(group) else shard.new_empty(shape)
            dist.broadcast(rank_shard, group=group, group_src=rank)
            shards.append(rank_shard)
        return torch.cat(shards, dim=dim)

    def called(self) -> CalledModules:
        return [(self.model, {name: name for name in self.config.samples.inputs})]

    def effective_contract(self) -> dict[str, Any]:
        optimizer = self.stage.torch_optimizer()
        dtypes = {
            str(getattr(p, "comm_dtype", self.engine.communication_data_type))
            for p in self.model.parameters()
        }
        return {
            **model_contract(self.model),
            **optimizer_contract(self.model, optimizer, self.config.optimizer, self.stage.members()),
            "max_grad_norm": self.stage.max_grad_norm(self.max_grad_norm),
            "gradient_accumulation_steps": self.engine.gradient_accumulation_steps(),
            "loss_is_mean_over": [self.num_tokens, self.num_micro_batches, self.geometry().mesh.dp]
            if self.num_labels is None
            else [int(self.num_labels)],
            **({"also_called_with": list(self.further)} if self.config.samples.further else {}),
            "reduction_dtype": sorted(dtypes),
            "sharding": zero.observed(self.engine, self.stage.num_stepped(), collectives()),
            **(self.sequence.observed() if self.sequence else {}),
        }
