"""FSDP2 + DTensor: a tensor-parallel plan over the tp axis, then `fully_shard` over the dp axis."""

import logging
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from lockstep.mesh import share
from lockstep.training.torch_strategy import TorchStrategy
from lockstep.training.vocab_parallel_loss import vocab_parallel_cross_entropy

if TYPE_CHECKING:
    from transformers import PreTrainedModel

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
    "model.layers.*.self_attn.q_norm": (
        "replicated_with_grad_allreduce",
        SequenceParallel(sequence_dim=2, use_local_output=True),
    ),
    "model.layers.*.self_attn.k_norm": (
        "replicated_with_grad_allreduce",
        SequenceParallel(sequence_dim=2, use_local_output=True),
    ),
    "model.layers.*.self_attn.o_proj": (
        "rowwise",
        RowwiseParallel(),
    ),  # no bias in Qwen2: nothing added twice
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


def check_plan(model: "PreTrainedModel") -> None:
    """Hold TP_PLAN against the plan that comes with the model (`base_model_tp_plan`).

    Raises ValueError naming the first module that the two shard differently or that ours leaves whole.
    """
    if model.config.base_model_tp_plan is None:
        raise ValueError(f"{type(model).__name__} comes with no plan to hold TP_PLAN against")
    for pattern, style in model.config.base_model_tp_plan.items():
        ours = TP_PLAN.get(f"model.{pattern}", ("nothing", None))[0]
        if ours != style:
            raise ValueError(f"TP_PLAN has {ours!r} for model.{pattern}, the model's own plan has {style!r}")
    planned = {pattern for pattern, (style, _) in TP_PLAN.items() if style != "input"}
    for name, module in model.named_modules():
        if isinstance(module, (torch.nn.Linear, torch.nn.Embedding)) and _pattern(name) not in planned:
            raise ValueError(
                f"TP_PLAN says nothing about {_pattern(name)}: every linear layer and embedding needs a row"
            )


def _pattern(name: str) -> str:
    """model.layers.3.mlp -> model.layers.*.mlp"""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


class FSDPStrategy(TorchStrategy):
    """Weights cut over tp, then over dp; `lockstep.training.torch_strategy` has what it shares with other strategies in torch."""

    def parallelize(self, model: "PreTrainedModel", device_mesh: DeviceMesh) -> torch.nn.Module:
        if device_mesh["tp"].size() > 1:
            shard_over_tp(model, device_mesh["tp"])
        # Shards are gathered once per step: kept between forward and backward, as ZeRO-1 keeps whole parameters.
        # At dp 1 this gathers nothing and still makes every strategy run the same code.
        for layer in model.model.layers:
            fully_shard(layer, mesh=device_mesh["dp"], reshard_after_forward=False)
        fully_shard(model, mesh=device_mesh["dp"], reshard_after_forward=False)
        return model


def shard_over_tp(model: "PreTrainedModel", tp_mesh: DeviceMesh) -> None:
    """Cut the model by TP_PLAN, in place; its loss is then computed on shards of the vocabulary."""
    check_plan(model)
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    here = {_pattern(name) for name, _ in model.named_modules()}
    styles = {pattern: style for pattern, (_, style) in TP_PLAN.items() if pattern in here}
    parallelize_module(model, tp_mesh, styles, src_data_rank=None)  # all ranks hold equal weights already
    head = model.lm_head
    if tied:  # parallelize_module makes a new Parameter of each; make them one again
        head.weight = model.model.embed_tokens.weight
    first_id, _ = share(head.out_features, tp_mesh.get_local_rank(), tp_mesh.size())
    group = tp_mesh.get_group()

    def loss_on_shards(
        logits: DTensor, labels: torch.Tensor, vocab_size: int, shift_labels: torch.Tensor, **_: Any
    ) -> torch.Tensor:
        local_logits = logits.to_local(grad_placements=logits.placements)
        return vocab_parallel_cross_entropy(local_logits, shift_labels, first_id, group)

    model.loss_function = loss_on_shards
