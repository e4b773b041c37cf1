"""Sequence parallelism over tp: gradients and sums that only one rank's positions have."""

import functools

from lockstep.faults.catalogue import fault
from lockstep.faults.planting import Plant, Planting
from lockstep.mesh import Mesh

CLASS = "sequence parallelism"
FLAGS = ("--sequence_parallel",)
sp_fault = functools.partial(
    fault,
    bug_class=CLASS,
    axes=("tp",),
    needs=("drop_norm_gradient_sum", "cut_without_sum"),
    mesh=Mesh(tp=2),
    flags=FLAGS,
    precisions=("fp32",),
)


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
    run.scale_backward((yield), lambda _call: run.config.tp_size)
