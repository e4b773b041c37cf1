"""FSDP2 + DTensor: a tensor-parallel plan over the tp axis, then `fully_shard` over the dp axis."""

import logging
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from lockstep.inputs import modules
from lockstep.mesh import share
from lockstep.training.torch_strategy import TorchStrategy
from lockstep.training.vocab_parallel_loss import vocab_parallel_cross_entropy

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# full_tensor() gathers over tp, then over dp, and torch warns each time that one collective would be faster.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)

# How each style of a model's own plan is implemented here. x is replicated over tp between blocks. Each rank holds some output rows of a
# colwise weight and the matching input columns of the rowwise weight after it, whose partial products are summed.
#   y = sum_r f(x A_r) B_r        (Megatron-LM, arXiv 1909.08053, section 3)
STYLES: dict[str, ParallelStyle] = {
    "colwise": ColwiseParallel(),  # whole heads, whole KV heads, columns of the MLP; with their bias
    "rowwise": RowwiseParallel(),
    # One norm for all heads. Its weight is whole on every rank, which knows only its own heads' share of the gradient:
    # the shares are summed over tp. Dim 2 of (batch, sequence, heads, head_dim) is the one that is cut.
    "replicated_with_grad_allreduce": SequenceParallel(sequence_dim=2, use_local_output=True),
}
# Rows that the plan of a model lacks, or has differently.
OWN_ROWS: dict[str, ParallelStyle] = {
    # No family's plan cuts it. Ids 0..V/tp-1 are on tp rank 0, and so on; ids of other ranks look up zero, then a sum.
    modules.LLAMA.embedding: RowwiseParallel(input_layouts=Replicate()),
    # Not in the base model's plan. The head is cut like the embedding, so that they stay tied. Logits stay sharded and the loss is
    # computed on the shards; transformers' plan of the head ("colwise_gather_output") would gather them.
    modules.HEAD: ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    # Enter a block once: the gradients of q, k and v (of gate and up) are summed locally, then all-reduced over tp together.
    # Without these rows each layer would all-reduce its own.
    f"{modules.LLAMA.layers}.*.{modules.LLAMA.attention}": PrepareModuleInput(
        input_kwarg_layouts={"hidden_states": Replicate()},
        desired_input_kwarg_layouts={"hidden_states": Replicate()},
    ),
    f"{modules.LLAMA.layers}.*.{modules.LLAMA.mlp}": PrepareModuleInput(
        input_layouts=Replicate(), desired_input_layouts=Replicate()
    ),
}


def tp_plan(model: "PreTrainedModel") -> dict[str, ParallelStyle]:
    """Module (with * for the number of its layer) -> how it is cut over tp: the model's own `base_model_tp_plan` and OWN_ROWS.

    Raises ValueError naming the first row with an unknown style, or the first module that needs a row and has none.
    """
    if model.config.base_model_tp_plan is None:
        raise ValueError(f"{type(model).__name__} comes with no tensor-parallel plan")
    plan = dict(OWN_ROWS)
    for pattern, style in model.config.base_model_tp_plan.items():
        name = f"{modules.LLAMA.base}.{pattern}"
        if style not in STYLES:
            raise ValueError(
                f"the model's own plan has {style!r} for {name}, which is not known here; known: {', '.join(STYLES)} "
                "(fsdp_strategy.STYLES)"
            )
        if name in OWN_ROWS:
            raise ValueError(
                f"the model's own plan has a row for {name} ({style!r}), and so has fsdp_strategy.OWN_ROWS; keep one of them"
            )
        plan[name] = STYLES[style]
    _require_fits(model, plan)
    return plan


def _require_fits(model: torch.nn.Module, plan: dict[str, ParallelStyle]) -> None:
    """Raise ValueError unless rows and modules match: every row has a module; every linear layer, embedding and weight inside a
    block has a row; norms on heads have the size of a head."""
    here = {_pattern(name): module for name, module in model.named_modules()}
    stray = next((pattern for pattern in plan if pattern not in here), None)
    if stray:
        raise ValueError(f"the tensor-parallel plan has a row for {stray}, and the model has no such module")
    for pattern, module in here.items():
        cut = isinstance(module, (torch.nn.Linear, torch.nn.Embedding)) or pattern.rpartition(".")[0] in plan
        if cut and pattern not in plan and any(True for _ in module.parameters(recurse=False)):
            raise ValueError(
                f"the tensor-parallel plan says nothing about {pattern}: every linear layer and embedding, and whatever has "
                "weights inside attention and MLP, needs a row"
            )
        if plan.get(pattern) is STYLES["replicated_with_grad_allreduce"]:
            heads = here[pattern.rpartition(".")[0]].head_dim
            if tuple(module.weight.shape) != (heads,):
                raise ValueError(
                    f"{pattern} has weights of shape {tuple(module.weight.shape)}, and only a norm on heads of {heads} may "
                    "have its gradient summed over tp"
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
        mixed = self.config.precision == "mixed"
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if mixed else MixedPrecisionPolicy()
        for module in (*model.get_submodule(modules.names_in(model).layers).children(), model):
            fully_shard(module, mesh=device_mesh["dp"], reshard_after_forward=False, mp_policy=policy)
        return model


def shard_over_tp(model: "PreTrainedModel", tp_mesh: DeviceMesh) -> None:
    """Cut the model by its `tp_plan`, in place. Its loss is then computed on vocabulary shards."""
    tied = modules.is_tied(model)
    plan = tp_plan(model)
    parallelize_module(model, tp_mesh, plan, src_data_rank=None)  # all ranks hold equal weights already
    if tied:  # parallelize_module makes a new Parameter of each; make them one again
        model.get_submodule(modules.HEAD).weight = model.get_submodule(modules.LLAMA.embedding).weight
    first_id, _ = share(
        model.get_parameter(modules.HEAD_WEIGHT).shape[0], tp_mesh.get_local_rank(), tp_mesh.size()
    )
    group = tp_mesh.get_group()

    def loss_on_shards(
        logits: DTensor, labels: torch.Tensor, vocab_size: int, shift_labels: torch.Tensor, **_: Any
    ) -> torch.Tensor:
        local_logits = logits.to_local(grad_placements=logits.placements)
        return vocab_parallel_cross_entropy(local_logits, shift_labels, first_id, group)

    model.loss_function = loss_on_shards
