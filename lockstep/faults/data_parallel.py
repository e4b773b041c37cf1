"""Gradients that are not averaged over the data-parallel group, or over the wrong one, or scaled once too often."""

import torch.distributed as dist

from lockstep.faults.catalogue import fault
from lockstep.faults.patches import scale_backward
from lockstep.faults.planting import Plant, Planting
from lockstep.mesh import Mesh

MISSING, SCALE = "DP reduction missing", "wrong group or scale"


@fault(
    seen_in="pytorch/torchtitan 577",
    bug_class=MISSING,
    cause="dp reduction missing",
    first="gradient/model.norm.weight",
    needs=("skip_dp_reduction",),
)
def no_dp_reduction(run: Planting) -> Plant:
    """Tensor parallelism was set up and data parallelism forgotten: each rank learns from its own samples alone."""
    yield
    run.handles.skip_dp_reduction()


@fault(
    seen_in="pytorch/torchtitan 577",
    bug_class=MISSING,
    cause="dp reduction missing",
    first="gradient/model.layers.0.mlp.down_proj.weight",
    needs=("skip_dp_reduction_of",),
    named=True,
)
def one_layer_without_dp_reduction(run: Planting) -> Plant:
    """Only the first layer does not average its gradients over the data-parallel ranks."""
    yield
    run.handles.skip_dp_reduction_of("model.layers.0")


@fault(
    seen_in="deepspeedai/DeepSpeed 7985",
    bug_class=MISSING,
    cause="accumulation",
    first="gradient/model.norm.weight",
    arguments=("--gradient_accumulation_steps", "3"),
    needs=("reduce_before_the_last_micro_batch",),
)
def last_micro_batch_left_out(run: Planting) -> Plant:
    """The gradients are reduced before the last micro batch has been added."""
    yield
    run.handles.reduce_before_the_last_micro_batch()


@fault(
    seen_in="meta-pytorch/torchtune 2420",
    bug_class=SCALE,
    cause="gradient scale",
    first="gradient/model.norm.weight",
    axes=("dp", "tp"),
    needs=("divide_gradients_by",),
)
def divided_by_world_size(run: Planting) -> Plant:
    """The summed gradients are divided by the number of all ranks, not of the data-parallel ones."""
    yield
    run.handles.divide_gradients_by(dist.get_world_size())


@fault(seen_in="pytorch/torchtitan 2318", bug_class=SCALE, cause="gradient scale", first="backward/lm_head")
def loss_divided_by_dp_as_well(run: Planting) -> Plant:
    """The loss is divided by dp although the reduction averages; AdamW hides the factor."""
    scale_backward((yield), lambda _call: 1 / run.config.dp_size)


@fault(
    seen_in="huggingface/transformers 39648",
    bug_class=SCALE,
    cause="gradient scale",
    first="backward/lm_head",
    axes=("tp",),
)
def loss_multiplied_by_tp(run: Planting) -> Plant:
    """The loss, whole on every rank, is multiplied with the tensor-parallel size before backward."""
    scale_backward((yield), lambda _call: run.config.tp_size)


@fault(
    seen_in="pytorch/torchtitan 2318",
    bug_class=SCALE,
    cause="gradient scale",
    first="gradient/model.norm.weight",
    arguments=("--max_grad_norm", "0"),
    mesh=Mesh(dp=4),
    needs=("divide_gradients_by",),
)
def summed_instead_of_averaged(run: Planting) -> Plant:
    """The gradients are summed over dp and never divided; AdamW hides the factor, and nothing is clipped here."""
    yield
    run.handles.divide_gradients_by(1)


@fault(
    seen_in="NVIDIA/Megatron-LM 7452",
    bug_class=SCALE,
    cause="loss on vocabulary shards",
    first="backward/lm_head",
    axes=("tp",),
    needs=("sum_partition_function_again",),
)
def partition_function_summed_again(run: Planting) -> Plant:
    """The sum of exponentials, reduced over tp already, is reduced once more: the loss is off by log(tp)."""
    run.handles.sum_partition_function_again()
    yield
