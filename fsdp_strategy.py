"""FSDP2 + DTensor: a tensor-parallel plan over the tp axis, then `fully_shard` over the dp axis."""

import logging

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from lockstep.mesh import build_device_mesh, share
from lockstep.model import causal_lm_loss
from lockstep.observe import observed_max_grad_norm, torch_contract
from lockstep.optim import build_optimizer, held_tensors, parameter_groups, total_norm
from lockstep.vocab_parallel_loss import vocab_parallel_cross_entropy

# full_tensor() gathers over tp, then over dp, and is told each time that one collective would be faster.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)

# The plan. x is replicated over tp between blocks; a colwise weight holds some output rows on each rank, the
# rowwise weight behind it holds the matching input columns, and its partial products are summed.
#   y = sum_r f(x A_r) B_r        (Megatron-LM, arXiv 1909.08053, section 3)
TP_PLAN = {
    # vocabulary ids 0..V/tp-1 on tp rank 0, and so on; ids of other ranks look up zero, then a sum
    "model.embed_tokens": ("rowwise", RowwiseParallel(input_layouts=Replicate())),
    # enter the block once: the gradients of q, k and v are summed locally, then all-reduced over tp together
    "model.layers.*.self_attn": (
        "input",
        PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": Replicate()},
            desired_input_kwarg_layouts={"hidden_states": Replicate()},
        ),
    ),
    "model.layers.*.self_attn.q_proj": ("colwise", ColwiseParallel()),  # whole heads, with their bias
    "model.layers.*.self_attn.k_proj": ("colwise", ColwiseParallel()),  # whole KV heads, with their bias
    "model.layers.*.self_attn.v_proj": ("colwise", ColwiseParallel()),
    # Qwen3: one norm for all heads. Its weight is whole on every rank, which knows only its own heads' share of the
    # gradient: the shares are summed over tp.
    "model.layers.*.self_attn.q_norm": ("replicated_with_grad_allreduce", SequenceParallel(sequence_dim=2, use_local_output=True)),
    "model.layers.*.self_attn.k_norm": ("replicated_with_grad_allreduce", SequenceParallel(sequence_dim=2, use_local_output=True)),
    "model.layers.*.self_attn.o_proj": ("rowwise", RowwiseParallel()),  # no bias in Qwen2: nothing added twice
    "model.layers.*.mlp": (
        "input",
        PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate()),
    ),
    "model.layers.*.mlp.gate_proj": ("colwise", ColwiseParallel()),
    "model.layers.*.mlp.up_proj": ("colwise", ColwiseParallel()),
    "model.layers.*.mlp.down_proj": ("rowwise", RowwiseParallel()),
    # the same rows as the embedding, so the tie survives; logits stay sharded and the loss is computed on shards
    "lm_head": ("colwise", ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)),
}


def check_plan(model: torch.nn.Module) -> None:
    """Hold TP_PLAN against the plan that comes with the model (`base_model_tp_plan`).

    Raises ValueError naming the first module that the two shard differently or that ours leaves whole.
    """
    for pattern, style in model.config.base_model_tp_plan.items():
        ours = TP_PLAN.get(f"model.{pattern}", ("nothing", None))[0]
        if ours != style:
            raise ValueError(f"TP_PLAN has {ours!r} for model.{pattern}, the model's own plan has {style!r}")
    planned = {pattern for pattern, (style, _) in TP_PLAN.items() if style != "input"}
    for name, module in model.named_modules():
        if isinstance(module, (torch.nn.Linear, torch.nn.Embedding)):
            if _pattern(name) not in planned:
                raise ValueError(f"TP_PLAN says nothing about {_pattern(name)}: every linear layer and embedding needs a row")


def _pattern(name: str) -> str:
    """model.layers.3.mlp -> model.layers.*.mlp"""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


class FSDPStrategy:
    """See `lockstep.training.Strategy` for the contract."""

    def __init__(self, model: torch.nn.Module, config, mesh, device: torch.device):
        self.config, self.device = config, device
        self.device_mesh = device_mesh = build_device_mesh(mesh, device.type)
        self.model = model.to(device=device, dtype=config.parameter_dtype)
        if mesh.tp_size > 1:
            self._shard_over_tp(device_mesh["tp"])
        # Shards are gathered once per step: kept between forward and backward, as ZeRO-1 keeps whole parameters.
        # At dp 1 this gathers nothing and still makes every strategy run the same code.
        for layer in self.model.model.layers:
            fully_shard(layer, mesh=device_mesh["dp"], reshard_after_forward=False)
        fully_shard(self.model, mesh=device_mesh["dp"], reshard_after_forward=False)
        self.parameters = list(self.model.parameters())
        self.optimizer = build_optimizer(
            [
                group
                for mesh_parameters in self._by_mesh(self.parameters)  # a fused step cannot mix device meshes
                for group in parameter_groups(mesh_parameters, config.weight_decay)
            ],
            optimizer=config.optimizer,
            learning_rate=config.learning_rate,
        )

    def _shard_over_tp(self, tp_mesh) -> None:
        check_plan(self.model)
        tied = self.model.lm_head.weight is self.model.model.embed_tokens.weight
        here = {_pattern(name) for name, _ in self.model.named_modules()}
        styles = {pattern: style for pattern, (_, style) in TP_PLAN.items() if pattern in here}
        parallelize_module(self.model, tp_mesh, styles, src_data_rank=None)  # all ranks hold equal weights already
        head = self.model.lm_head
        if tied:  # parallelize_module makes a new Parameter of each; make them one again
            head.weight = self.model.model.embed_tokens.weight
        first_id, _ = share(head.out_features, tp_mesh.get_local_rank(), tp_mesh.size())
        group = tp_mesh.get_group()

        def loss_on_shards(logits, labels, vocab_size, shift_labels, **_):
            local_logits = logits.to_local(grad_placements=logits.placements)
            return vocab_parallel_cross_entropy(local_logits, shift_labels, first_id, group)

        self.model.loss_function = loss_on_shards

    @staticmethod
    def _by_mesh(parameters) -> list[list[DTensor]]:
        """Parameters grouped by mesh and placements: (dp, tp) for those in the plan, (dp,) for the norms."""
        groups: dict = {}
        for parameter in parameters:
            groups.setdefault((parameter.device_mesh, _sharded_axes(parameter)), []).append(parameter)
        return list(groups.values())

    def geometry(self) -> tuple[int, int, int, int]:
        dp, tp = self.device_mesh["dp"], self.device_mesh["tp"]
        return dp.get_local_rank(), dp.size(), tp.get_local_rank(), tp.size()

    def forward_backward(self, micro_batches: list[tuple]) -> torch.Tensor:
        self.num_micro_batches, self.num_tokens = len(micro_batches), micro_batches[0][1].numel()
        self.optimizer.zero_grad()
        losses = []
        for index, (input_ids, labels) in enumerate(micro_batches):
            self.model.set_requires_gradient_sync(index == len(micro_batches) - 1)
            with self.config.autocast(self.device):
                loss = causal_lm_loss(self.model, input_ids, labels)
            (loss / len(micro_batches)).backward()
            losses.append(loss.detach())
        return torch.stack(losses).mean()

    def _grad_norm(self) -> torch.Tensor:
        """The norm of the whole gradient: squares of the local shards, summed over every axis that shards them."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for group in self._by_mesh(self.parameters):
            square = total_norm([p.grad.to_local() for p in group]) ** 2
            for axis in _sharded_axes(group[0]):
                dist.all_reduce(square, group=group[0].device_mesh.get_group(axis))
            total += square
        return total.sqrt()

    def update(self) -> float:
        grad_norm = self._grad_norm()
        if self.config.max_grad_norm > 0:
            for group in self._by_mesh(self.parameters):
                torch.nn.utils.clip_grads_with_norm_(group, self.config.max_grad_norm, grad_norm)
        self.optimizer.step()
        self.grad_norm = float(grad_norm)
        return self.grad_norm

    def full_parameters(self):
        for name, parameter in self.model.named_parameters():
            yield name, parameter.detach().full_tensor().cpu()

    def held(self, kind: str):
        for name, tensor in held_tensors(self.model, self.optimizer, kind):
            yield name, tensor.to_local(), tuple(tensor.shape), _start(tensor)

    def effective_contract(self) -> dict:
        return {
            **torch_contract(self.model, self.optimizer),
            "max_grad_norm": observed_max_grad_norm(
                self.config.max_grad_norm, self.grad_norm, float(self._grad_norm())
            ),
            "gradient_accumulation_steps": self.num_micro_batches,
            "loss_is_mean_over": [self.num_tokens, self.num_micro_batches, self.geometry()[1]],
            "reduction_dtype": sorted({str(self._reduction_dtype(p)) for p in self.parameters}),
        }

    def _reduction_dtype(self, parameter: DTensor) -> torch.dtype:
        """What fully_shard was told of the dtype in which gradients travel; by default their own."""
        return self.model._get_fsdp_state()._mp_policy.reduce_dtype or parameter.grad.dtype


def _sharded_axes(tensor: DTensor) -> tuple[int, ...]:
    """The mesh axes over which a tensor is cut, not copied."""
    return tuple(axis for axis, placement in enumerate(tensor.placements) if not placement.is_replicate())


def _start(tensor: DTensor) -> tuple[int, ...]:
    """Where this rank's shard begins in the full tensor: tp cut it first, then dp cut what tp had left."""
    start, shape = [0] * tensor.ndim, list(tensor.shape)
    mesh = tensor.device_mesh
    for axis in reversed(_sharded_axes(tensor)):
        dim = tensor.placements[axis].dim
        first, shape[dim] = share(shape[dim], mesh.get_local_rank(axis), mesh.size(axis))
        start[dim] += first
    if shape != list(tensor.to_local().shape):
        raise ValueError(f"a shard of {tuple(tensor.shape)} is {tuple(tensor.to_local().shape)}, expected {tuple(shape)}")
    return tuple(start)
