"""Gradients that are not averaged over the data-parallel group, or over the wrong one, or scaled once too often.

Also micro batches with wrong weights.
"""

import functools

import torch.distributed as dist

from lockstep.faults.catalogue import fault
from lockstep.faults.planting import Plant, Planting
from lockstep.plan.mesh import Mesh

THREE = ("--gradient_accumulation_steps", "3")
missing_fault = functools.partial(fault, bug_class="DP reduction missing", cause="dp reduction missing")
scale_fault = functools.partial(fault, bug_class="wrong group or scale", cause="gradient scale")
accumulation_fault = functools.partial(
    fault,
    bug_class="accumulation, normalisation",
    cause="accumulation",
    first="backward/lm_head",
    arguments=THREE,
)


@missing_fault(
    seen_in="pytorch/torchtitan 577",
    evidence="each part of these gradients is 2 = dp times one DP rank's contribution, without the others', as recomputed (...)",
    first="gradient/model.norm.weight",
    needs=("skip_dp_reduction",),
)
def no_dp_reduction(run: Planting) -> Plant:
    """Tensor parallelism was set up and data parallelism forgotten: each rank learns from its own samples alone."""
    yield
    run.handles.skip_dp_reduction()


@missing_fault(
    seen_in="pytorch/torchtitan 577",
    evidence="each part of these gradients is 2 = dp times one DP rank's contribution, without the others', as recomputed (model.layers.0...; model.layers.0...; model.layers.0...)",
    first="gradient/model.layers.0.mlp.down_proj.weight",
    needs=("skip_dp_reduction_of",),
    named=True,
)
def one_layer_without_dp_reduction(run: Planting) -> Plant:
    """Only the first layer does not average its gradients over the data-parallel ranks."""
    yield
    run.handles.skip_dp_reduction_of("model.layers.0")


@missing_fault(
    seen_in="deepspeedai/DeepSpeed 7985",
    cause="accumulation",
    evidence="in every gradient the micro batches have different weights (1, 1, 0; 1 is right), the same on all DP ranks",
    first="gradient/model.norm.weight",
    arguments=THREE,
    needs=("reduce_before_the_last_micro_batch",),
)
def last_micro_batch_left_out(run: Planting) -> Plant:
    """The gradients are reduced before the last micro batch has been added."""
    yield
    run.handles.reduce_before_the_last_micro_batch()


@scale_fault(
    seen_in="meta-pytorch/torchtune 2420",
    evidence="every gradient is 0.5 = 1/tp or 1/dp times what it should be, evenly for all samples",
    first="gradient/model.norm.weight",
    axes=("dp", "tp"),
    needs=("divide_gradients_by",),
)
def divided_by_world_size(run: Planting) -> Plant:
    """The summed gradients are divided by the number of all ranks, not of the data-parallel ones."""
    yield
    run.handles.divide_gradients_by(dist.get_world_size())


@scale_fault(
    seen_in="pytorch/torchtitan 2318",
    evidence="the gradient of the logits is 0.5 = 1/tp or 1/dp times what it should be, evenly for all samples",
    first="backward/lm_head",
)
def loss_divided_by_dp_as_well(run: Planting) -> Plant:
    """The loss is divided by dp although the reduction averages; AdamW hides the factor."""
    yield
    run.scale_backward(lambda _call: 1 / run.config.dp_size)


@scale_fault(
    seen_in="huggingface/transformers 39648",
    evidence="the gradient of the logits is 2 = tp or dp times what it should be, evenly for all samples",
    first="backward/lm_head",
    axes=("tp",),
)
def loss_multiplied_by_tp(run: Planting) -> Plant:
    """The loss, whole on every rank, is multiplied with the tensor-parallel size before backward."""
    yield
    run.scale_backward(lambda _call: run.config.tp_size)


@scale_fault(
    seen_in="pytorch/torchtitan 2318",
    evidence=(
        "every gradient is 4 = dp times what it should be, evenly for all samples",
        "all gradients are 4 = dp times what they should be",  # in bfloat16
    ),
    first="gradient/model.norm.weight",
    arguments=("--max_grad_norm", "0"),
    mesh=Mesh(dp=4),
    needs=("divide_gradients_by",),
)
def summed_instead_of_averaged(run: Planting) -> Plant:
    """The gradients are summed over dp and never divided; AdamW hides the factor, and nothing is clipped here."""
    yield
    run.handles.divide_gradients_by(1)


@scale_fault(
    seen_in="NVIDIA/Megatron-LM 7452",
    cause="loss on vocabulary shards",
    evidence="the loss is off by 0.6931 = log(tp), and the gradient of the logits is that of a sum of exponentials that is tp times too large",
    first="backward/lm_head",
    axes=("tp",),
    needs=("sum_partition_function_again",),
)
def partition_function_summed_again(run: Planting) -> Plant:
    """The sum of exponentials, reduced over tp already, is reduced once more: the loss is off by log(tp)."""
    run.handles.sum_partition_function_again()
    yield


@accumulation_fault(
    seen_in="huggingface/accelerate 3533",
    evidence="the gradient of the logits is 0.3333 = 1/accumulation steps times what it should be, evenly for all samples",
)
def divided_by_the_steps_twice(run: Planting) -> Plant:
    """The loop and the library both divide the loss of a micro batch by the accumulation steps."""
    yield
    run.scale_backward(lambda _call: 1 / run.config.gradient_accumulation_steps)


@accumulation_fault(
    seen_in="huggingface/accelerate 3533",
    evidence="the gradient of the logits is 3 = accumulation steps times what it should be, evenly for all samples",
)
def not_divided_by_the_steps(run: Planting) -> Plant:
    """The gradients of the micro batches are summed and never divided."""
    yield
    run.scale_backward(lambda _call: run.config.gradient_accumulation_steps)


@accumulation_fault(
    seen_in="huggingface/transformers 34191",
    evidence="in the gradient of the logits the micro batches have different weights (0.5, 1, 1.5; 1 is right), the same on all DP ranks",
)
def micro_batches_weighted_unequally(run: Planting) -> Plant:
    """Each micro batch is weighted by a token count that is not its own: 1/2, 1 and 3/2 times what it should."""
    yield
    run.scale_backward(lambda call: (call % 3 + 1) / 2)
