"""Reductions over the tensor-parallel group that are missing or done twice.

With sequence parallelism, a missing reduction leaves what one rank's positions give.
"""

import functools
from collections.abc import Callable

import torch
import torch.distributed as dist

from lockstep.faults.catalogue import fault
from lockstep.faults.planting import Plant, Planting
from lockstep.plan.mesh import Mesh

MLP = "model.layers.1.mlp"
missing_fault = functools.partial(
    fault, bug_class="TP reduction missing", cause="tp reduction missing", axes=("tp",)
)
# At tp 4, so that the factor equals no other size of the mesh
doubled_fault = functools.partial(
    fault,
    bug_class="TP reduction doubled",
    cause="tp reduction repeated",
    model="tiny-qwen2-4kv",
    mesh=Mesh(tp=4),
    axes=("tp",),
)
sp_fault = functools.partial(
    fault,
    bug_class="sequence parallelism",
    axes=("tp",),
    needs=("drop_norm_gradient_sum", "cut_without_sum"),
    mesh=Mesh(tp=2),
    flags=("--sequence_parallel",),
)


@missing_fault(
    seen_in="NVIDIA/Megatron-LM 1446",
    evidence="model.layers.1.self_attn.o_proj's output is tp rank 0's share alone, computed again from input and weights",
    first="forward/model.layers.1.self_attn.o_proj",
    needs=("drop_sum_over_tp",),
)
def row_parallel_sum_dropped(run: Planting) -> Plant:
    """Each rank continues with its own partial product of o_proj."""
    yield
    run.handles.drop_sum_over_tp("model.layers.1.self_attn.o_proj")


@missing_fault(
    seen_in="NVIDIA/Megatron-LM 1446",
    evidence="model.embed_tokens's output is tp rank 0's share alone, computed again from input and weights",
    first="forward/model.embed_tokens",
    needs=("drop_embedding_sum",),
)
def embedding_sum_dropped(run: Planting) -> Plant:
    """A token whose id another rank holds has an embedding of zeros."""
    yield
    run.handles.drop_embedding_sum()


@missing_fault(
    seen_in="pytorch/torchtitan 1805",
    evidence="the gradient of model.layers.1.post_attention_layernorm's output has only tp rank 0's share of the part that comes back through model.layers.1.mlp.gate_proj, model.layers.1.mlp.up_proj",
    first="backward/model.layers.1.post_attention_layernorm",
    needs=("drop_input_gradient_sum",),
)
def mlp_input_gradient_not_reduced(run: Planting) -> Plant:
    """Forward is right; the gradient of the MLP's input is this rank's share alone (a to_local without grad_placements)."""
    yield
    run.handles.drop_input_gradient_sum(MLP, "gate_proj", "up_proj")


@missing_fault(
    seen_in="pytorch/torchtitan 1373",
    evidence="the gradient of model.layers.1.post_attention_layernorm's output has only tp rank 0's share of the part that comes back through model.layers.1.mlp.up_proj",
    first="backward/model.layers.1.post_attention_layernorm",
    needs=("drop_input_gradient_sum_of",),
)
def one_projection_gradient_not_reduced(run: Planting) -> Plant:
    """Only one column-parallel layer, an up_proj, does not sum the gradient of its input."""
    yield
    run.handles.drop_input_gradient_sum_of(f"{MLP}.up_proj")


@missing_fault(
    seen_in="bigcode-project/Megatron-LM 35",
    evidence="the gradient of model.layers.1.input_layernorm's output has only tp rank 0's share of the part that comes back through model.layers.1.self_attn.k_proj, model.layers.1.self_attn.v_proj",
    first="backward/model.layers.1.input_layernorm",
    needs=("drop_input_gradient_sum_of",),
)
def kv_input_gradient_not_reduced(run: Planting) -> Plant:
    """The gradients that come back through k and v are not summed over the ranks that share the heads."""
    yield
    for name in ("k_proj", "v_proj"):
        run.handles.drop_input_gradient_sum_of(f"model.layers.1.self_attn.{name}")


@missing_fault(
    seen_in="NVIDIA-NeMo/RL 3716",
    evidence="the gradient of model.layers.1.self_attn.k_norm.weight, model.layers.1.self_attn.q_norm.weight, model.layers.0.self_attn.k_norm.weight and 1 more has one tp rank's heads only, as recomputed",
    model="tiny-qwen3",
    first="gradient/model.layers.1.self_attn.k_norm.weight",
    needs=("drop_head_norm_gradient_sum",),
)
def head_norm_gradients_not_summed(run: Planting) -> Plant:
    """Every rank has the weights of the norms on the heads, and each learns from its own heads only."""
    run.handles.drop_head_norm_gradient_sum()
    yield


@doubled_fault(
    seen_in="huggingface/text-generation-inference 1036",
    evidence="model.layers.1.mlp.down_proj's output, a sum over tp, is 4 = tp times what it should be",
    first="forward/model.layers.1.mlp.down_proj",
    needs=("group",),
)
def row_parallel_sum_done_twice(run: Planting) -> Plant:
    """The output of down_proj, summed over tp already, is summed over tp once more."""
    yield
    group = run.handles.group("tp")

    def sum_again(output: torch.Tensor) -> torch.Tensor:
        total = output.detach().clone()
        dist.all_reduce(total, group=group)
        return output + (total - output.detach())

    run.change_output(f"{MLP}.down_proj", sum_again)


@doubled_fault(
    seen_in="pytorch/torchtitan 2106",
    evidence="the gradient of model.layers.1.self_attn.q_proj.bias is 4 = tp times what it should be",
    first="gradient/model.layers.1.self_attn.q_proj.bias",
    needs=("gradients",),
)
def bias_gradient_times_tp(run: Planting) -> Plant:
    """The gradient of q's bias, whole on its shard already, is multiplied with the tensor-parallel size."""
    yield from _scaled(run, lambda name: name.endswith("layers.1.self_attn.q_proj.bias"), run.config.tp_size)


@doubled_fault(
    seen_in="pytorch/torchtitan 4332",
    evidence="only the gradients of the parameters that every tp rank holds are 4 = tp times what they should be",
    first="gradient/model.norm.weight",
    needs=("gradients",),
)
def norm_gradients_times_tp(run: Planting) -> Plant:
    """The gradients of the norms, equal on all ranks already, are summed over tp."""
    yield from _scaled(run, lambda name: name.endswith("norm.weight"), run.config.tp_size)


@fault(
    seen_in="pytorch/torchtitan 4332",
    bug_class="TP reduction doubled",
    cause="gradient scale",
    evidence="only the gradients of the parameters that every tp rank holds are 0.5 = 1/tp or 1/dp times what they should be",
    first="gradient/model.norm.weight",
    axes=("tp",),
    needs=("gradients",),
)
def norm_gradients_divided_by_tp(run: Planting) -> Plant:
    """The gradients of the norms, equal on all ranks already, are averaged as if each rank had a share: divided by tp."""
    yield from _scaled(run, lambda name: name.endswith("norm.weight"), 1 / run.config.tp_size)


def _scaled(run: Planting, is_scaled: Callable[[str], bool], factor: float) -> Plant:
    """Multiply the gradients of the parameters whose names `is_scaled` accepts, between backward and update."""
    yield

    def scale(_step: int, name: str, gradient: torch.Tensor) -> None:
        if is_scaled(name):
            gradient.mul_(factor)

    run.change_gradients(scale)


@sp_fault(
    seen_in="EleutherAI/gpt-neox 1259",
    cause="tp reduction missing",
    evidence="the gradient of model.norm.weight, model.layers.1.post_attention_layernorm.weight, model.layers.1.input_layernorm.weight and 2 more has one tp rank's positions only, as recomputed",
    first="gradient/model.norm.weight",
)
def sequence_parallel_norms_not_reduced(run: Planting) -> Plant:
    """The gradient of a norm's weight is that of this rank's positions."""
    run.handles.drop_norm_gradient_sum()
    yield


@sp_fault(
    seen_in="pytorch/torchtitan 1805",
    cause="tp reduction missing",
    evidence="model.layers.1.self_attn.o_proj's output is, at each tp rank's positions, that rank's share alone, computed again from input and weights",
    first="forward/model.layers.1.self_attn.o_proj",
)
def positions_cut_without_the_sum(run: Planting) -> Plant:
    """After o_proj each rank takes its positions of its own partial product: a cut where a reduce-scatter should be."""
    yield
    run.handles.cut_without_sum("model.layers.1.self_attn.o_proj")


@sp_fault(
    seen_in="deepspeedai/DeepSpeed 5248",
    cause="gradient scale",
    evidence="the gradient of the logits is 2 = tp times what it should be, evenly for all samples",
    first="backward/lm_head",
)
def loss_multiplied_by_sp(run: Planting) -> Plant:
    """The ranks that share a sequence each count as a data-parallel rank: the gradient is tp times too large."""
    yield
    run.scale_backward(lambda _call: run.config.tp_size)
