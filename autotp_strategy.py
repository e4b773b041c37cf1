"""DeepSpeed AutoTP + ZeRO-1: tensor parallelism by configuration, optimizer state sharded over dp.

Only this file and lockstep/deepspeed/build.py import deepspeed.
"""

import os
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from lockstep.config import Config
from lockstep.deepspeed.build import build_extension
from lockstep.inputs.model import causal_lm_loss
from lockstep.mesh import Geometry, Mesh, share
from lockstep.training.observe import decay_by_name, model_contract, optimizer_contract
from lockstep.training.optim import build_optimizer, keeps, parameter_groups
from lockstep.training.strategy import MicroBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def deepspeed_config(config: Config, mesh: Mesh) -> dict[str, Any]:
    """DeepSpeed's whole configuration. Each value that differs from DeepSpeed's default has its reason."""
    return {
        "train_micro_batch_size_per_gpu": config.batch_size,
        "gradient_accumulation_steps": config.gradient_accumulation_steps,
        "zero_optimization": {"stage": int(os.environ.get("STAGE","1"))},
        "zero_allow_untested_optimizer": True,  # torch's SGD is not on DeepSpeed's list
        "gradient_clipping": config.max_grad_norm,  # the default is 1.0, not off
        "communication_data_type": "bf16" if config.precision == "bf16" else "fp32",
        "torch_autocast": {
            "enabled": config.precision == "autocast",
            "dtype": "bfloat16",
            "lower_precision_safe_modules": [],  # the default reduces the gradients of nn.Linear in bfloat16
        },
        "bf16": {  # no float32 master copy: "bf16" means the same as in DDP and FSDP
            "enabled": config.precision == "bf16",
            "bf16_master_weights_and_grads": config.precision == "bf16",
            "bf16_optimizer_states": config.precision == "bf16",
        },
        # "true": embedding and head are sharded over the vocabulary and the loss computed on the shards, as in FSDP
        "tensor_parallel": {"autotp_size": mesh.tp, "vocab_parallel_lm_head": mesh.tp > 1},
    }


class AutoTPStrategy:
    """See `lockstep.training.strategy.Strategy` for what each method has to do."""

    def __init__(self, model: "PreTrainedModel", config: Config, mesh: Mesh, device: torch.device):
        if device.type == "cpu":
            os.environ["DS_ACCELERATOR"] = "cpu"  # or DeepSpeed takes the GPU of a machine that has one
        import deepspeed

        warnings.filterwarnings(
            "ignore", "`torch.distributed.all_gather_into_tensor` is deprecated"
        )  # by DeepSpeed
        self.full_shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        if device.type == "cpu":
            build_extension()
        deepspeed.init_distributed(dist_backend=dist.get_backend())
        model.to(device=device, dtype=config.parameter_dtype)  # type: ignore[call-arg] # a decorator of transformers loses self
        self.engine, self.optimizer, _, _ = deepspeed.initialize(
            model=model,
            model_parameters=parameter_groups(model.parameters(), config.weight_decay),
            optimizer=lambda groups: build_optimizer(
                groups, optimizer=config.optimizer, learning_rate=config.learning_rate
            ),
            config=deepspeed_config(config, mesh),
        )
        self.model = self.engine.module

    def geometry(self) -> Geometry:
        return Geometry.of_groups({"dp": self.engine.data_parallel_group, "tp": self.tp_group()})

    def tp_group(self) -> dist.ProcessGroup | None:
        """The tensor-parallel process group; None if AutoTP is off."""
        return self.engine.mpu.get_tensor_model_parallel_group() if self.engine.autotp_size() > 1 else None

    def forward_backward(self, micro_batches: list[MicroBatch]) -> torch.Tensor:
        self.num_micro_batches, self.num_tokens = len(micro_batches), micro_batches[0][1].numel()
        losses = []
        for index, (input_ids, labels) in enumerate(micro_batches):
            self.engine.set_gradient_accumulation_boundary(index == len(micro_batches) - 1)
            loss = self.loss(input_ids, labels)
            self.engine.backward(loss)  # divides by gradient_accumulation_steps
            losses.append(loss.detach())
        return torch.stack(losses).mean()

    def loss(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """This rank's mean loss over one micro batch, each (B, S); shape ()."""
        return causal_lm_loss(self.engine, input_ids, labels)

    def update(self) -> float:
        self.engine.step()
        grad_norm = float(self.engine.get_global_grad_norm())
        return (
            grad_norm if grad_norm >= 0 else float("nan")
        )  # DeepSpeed's sign for a norm that is not finite is -1

    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self.model.named_parameters():
            yield name, self._gather_over_tp(name, self._whole_over_dp(parameter)).cpu()

    def held(self, kind: str) -> Iterator[tuple[str, torch.Tensor, tuple[int, ...], tuple[int, ...]]]:
        """As in the protocol. A shard is whole over dp, as DeepSpeed's safe_get_full_* return it, and cut over tp."""
        from deepspeed.utils import safe_get_full_grad, safe_get_full_optimizer_state

        if not keeps(self.optimizer.optimizer, kind):
            return
        if kind in ("exp_avg", "exp_avg_sq"):
            self._link_moments()
        geometry = self.geometry()
        tp_rank, tp_size = geometry.coordinates.tp, geometry.mesh.tp
        for name, parameter in self.model.named_parameters():
            if kind == "parameter":
                shard = self._whole_over_dp(parameter)
            elif kind == "gradient":
                shard = safe_get_full_grad(parameter)
            else:
                shard = safe_get_full_optimizer_state(parameter, kind)
            full = tuple(self.full_shapes[name])
            cut = self._cut_dims(name, shard)
            yield (
                name,
                shard,
                full,
                tuple(share(size, tp_rank, tp_size)[0] if dim in cut else 0 for dim, size in enumerate(full)),
            )

    def _whole_over_dp(self, parameter):
        if not hasattr(parameter, "ds_id"):
            return parameter.detach()
        import deepspeed
        with deepspeed.zero.GatheredParameters([parameter]):
            return parameter.detach().clone()

    def _link_moments(self) -> None:
        """Link the moments to the parameters. DeepSpeed does so too early, when only its first group has stepped (docs/findings.md)."""
        if not hasattr(self.optimizer, "_hp_optimizer_states_linked"):
            return
        self.optimizer._hp_optimizer_states_linked = False
        self.optimizer._lazy_init_hp_params_optimizer_state()

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
        parts = []
        for rank in range(
            dist.get_world_size(group)
        ):  # shards of an odd dim differ in size: broadcast, not all_gather
            shape = list(shard.shape)
            _, shape[dim] = share(self.full_shapes[name][dim], rank, dist.get_world_size(group))
            part = shard.contiguous() if rank == dist.get_rank(group) else shard.new_empty(shape)
            dist.broadcast(part, group=group, group_src=rank)
            parts.append(part)
        return torch.cat(parts, dim=dim)

    def effective_contract(self) -> dict[str, Any]:
        groups = zip(getattr(self.optimizer, "bit16_groups", None) or self.optimizer.fp16_groups, self.optimizer.param_groups, strict=True)
        dtypes = {
            str(getattr(p, "comm_dtype", self.engine.communication_data_type))
            for p in self.model.parameters()
        }
        return {
            **model_contract(self.model),
            **optimizer_contract(self.optimizer.optimizer),
            "weight_decay": decay_by_name(
                self.model, [(members, group["weight_decay"]) for members, group in groups]
            ),
            "max_grad_norm": self.optimizer.clip_grad,
            "gradient_accumulation_steps": self.engine.gradient_accumulation_steps(),
            "loss_is_mean_over": [self.num_tokens, self.num_micro_batches, self.geometry().mesh.dp],
            "reduction_dtype": sorted(dtypes),
        }
