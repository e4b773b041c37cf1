"""Sequence parallelism over tp: gradients and sums that only one rank's positions have."""

import functools

from lockstep.faults.catalogue import fault
from lockstep.faults.patches import scale_backward
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
    first="gradient/model.norm.weight",
)
def sequence_parallel_norms_not_reduced(run: Planting) -> Plant:
    """The gradient of a norm's weight is that of this rank's positions."""
    run.handles.drop_norm_gradient_sum()
    yield


@sp_fault(
    seen_in="pytorch/torchtitan 1805",
    cause="tp reduction missing",
    first="forward/model.layers.1.self_attn.o_proj",
)
def positions_cut_without_the_sum(run: Planting) -> Plant:
    """After o_proj each rank takes its positions of its own partial product: a cut where a reduce-scatter should be."""
    yield
    run.handles.cut_without_sum("model.layers.1.self_attn.o_proj")


@sp_fault(seen_in="deepspeedai/DeepSpeed 5248", cause="gradient scale", first="backward/lm_head")
def loss_multiplied_by_sp(run: Planting) -> Plant:
    """The ranks that share a sequence each count as a data-parallel rank: the gradient is tp times too large."""
    scale_backward((yield), lambda _call: run.config.tp_size)
