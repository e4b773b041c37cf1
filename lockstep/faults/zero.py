"""Planted bugs of ZeRO: what goes wrong when optimizer state, gradients and weights are sharded over dp.

They change DeepSpeed's own objects (`engine.optimizer`), and its flags choose the stage.
"""

import functools
from typing import Any

import torch

from lockstep.faults.catalogue import fault
from lockstep.faults.planting import Plant, Planting
from lockstep.plan.deepspeed import DeepSpeed
from lockstep.plan.mesh import Mesh

zero_fault = functools.partial(fault, only=DeepSpeed.name, mesh=Mesh(dp=2))
update_fault = functools.partial(zero_fault, bug_class="precision, optimizer")
SMALL_BUCKETS = ("--deepspeed_config", '{"zero_optimization": {"stage": 2, "reduce_bucket_size": 20000}}')
SMALL_GROUPS = ("--deepspeed_config", '{"zero_optimization": {"stage": 3, "sub_group_size": 50000}}')
STAGE_2, STAGE_3 = ("--zero_stage", "2"), ("--zero_stage", "3")
OFFLOAD = ("--zero_stage", "2", "--offload_optimizer", "cpu")


@zero_fault(
    seen_in="deepspeedai/DeepSpeed 4879",
    bug_class="DP reduction missing",
    cause="dp reduction missing",
    evidence="each part of these gradients is 2 = dp times one DP rank's contribution, without the others', as recomputed (...)",
    first="gradient/model.norm.weight",
    flags=SMALL_BUCKETS,
)
def first_bucket_not_reduced(run: Planting) -> Plant:
    """The first bucket of every backward pass is not averaged over the ranks; the others are."""
    strategy = yield
    optimizer = strategy.engine.optimizer
    reduce, calls = optimizer.average_tensor, []

    def without_the_first(tensor: torch.Tensor, communication_data_type: torch.dtype) -> None:
        calls.append(1)
        if len(calls) > 1:
            reduce(tensor, communication_data_type)

    run.patch(optimizer, "average_tensor", without_the_first)
    run.around(strategy.engine, "backward", before=lambda _: calls.clear())


@zero_fault(
    seen_in="allenai/open-instruct 1498",
    bug_class="accumulation, normalisation",
    cause="accumulation",
    evidence="in every gradient the micro batches have different weights (0, 0, 1; 1 is right), the same on all DP ranks",
    first="gradient/model.norm.weight",
    arguments=("--gradient_accumulation_steps", "3"),
    flags=STAGE_2,
)
def last_micro_batch_alone(run: Planting) -> Plant:
    """The sharded gradient is overwritten by every micro batch, so only the last one counts."""
    strategy = yield
    optimizer = strategy.engine.optimizer
    run.around(strategy.engine, "backward", before=lambda _: optimizer.all_grad_tensors.clear())


@update_fault(
    seen_in="deepspeedai/DeepSpeed 966",
    cause="update left out",
    evidence="the moments are right; unchanged bit for bit: model.embed_tokens.weight in # of 131072 elements, ...; all else is right",
    first="parameter/model.embed_tokens.weight",
)
def updated_weights_not_gathered(run: Planting) -> Plant:
    """Every rank updates its own share of the weights and never receives those of the others."""
    yield
    from deepspeed.runtime.zero import stage_1_and_2 as module

    run.patch(module, "all_gather_dp_groups", lambda *_, **__: None)


@zero_fault(
    seen_in="deepspeedai/DeepSpeed 1021",
    bug_class="grad norm, clipping",
    cause="clipping",
    evidence="the norm is # times that of the gradients: it is the norm of dp rank 0's shards alone",
    first="gradient norm",
    arguments=("--max_grad_norm", "0.5"),
    flags=STAGE_2,
)
def norm_of_the_own_share(run: Planting) -> Plant:
    """The gradient norm by which a rank clips is that of its own share: the squares are not summed over dp."""
    strategy = yield
    optimizer = strategy.engine.optimizer

    def of_share(gradients: list[torch.Tensor], params: object, norm_type: int = 2) -> torch.Tensor:
        return torch.stack([gradient.double().norm() for gradient in gradients]).norm().float()

    run.patch(optimizer, "get_grad_norm_direct", of_share)


@update_fault(
    seen_in="deepspeedai/DeepSpeed 848",
    cause="weights",
    evidence="the moments are right; before the step, elements of ... had the values 1 place after them, as weights that are cut elsewhere have",
    first="parameter/model.embed_tokens.weight",
)
def share_one_element_off(run: Planting) -> Plant:
    """The second rank's float32 weights are cut one element too late, as if a parameter before them were padded."""
    strategy = yield
    if strategy.geometry().coordinates.dp == 1:
        shard = strategy.engine.optimizer.single_partition_of_fp32_groups[0]
        with torch.no_grad():
            shard.copy_(shard.roll(-1))


@update_fault(
    seen_in="deepspeedai/DeepSpeed 3097",
    cause="stale gradients",
    evidence="the moments of model.embed_tokens.weight, ... and 23 more have the gradient of the step before",
    step=2,
    first="exp_avg/model.embed_tokens.weight",
    flags=OFFLOAD,
    # DeepSpeed offloads bfloat16 moments with its own optimizer alone
    precisions=("fp32", "autocast"),
)
def offloaded_gradients_of_the_step_before(run: Planting) -> Plant:
    """The optimizer on the CPU steps before the copy of the gradients has ended, with those of the step before."""
    strategy = yield
    inner = strategy.engine.optimizer.optimizer
    kept: dict[int, torch.Tensor] = {}

    def swap(_step: int) -> None:
        for group in inner.param_groups:
            for shard in group["params"]:
                gradient = shard.grad.clone()
                if id(shard) in kept:
                    shard.grad.copy_(kept[id(shard)])
                kept[id(shard)] = gradient

    run.around(inner, "step", before=swap)


@update_fault(
    seen_in="huggingface/transformers 24860",
    cause="update left out",
    evidence="the moments are right; unchanged bit for bit: model.embed_tokens.weight, model.layers.0.self_attn.q_proj.weight, model.layers.0.self_attn.q_proj.bias and 23 more; all else is right",
    first="parameter/model.embed_tokens.weight",
    precisions=("fp32",),  # under autocast the two are one tensor
    flags=STAGE_3,
)
def updated_shares_not_copied_back(run: Planting) -> Plant:
    """Stage 3 updates its float32 shares of the weights and does not copy them into the shares that forward gathers."""
    strategy = yield
    run.patch(
        strategy.engine.optimizer,
        "_reassign_or_swap_out_partitioned_parameters",
        lambda sub_group_id: None,
    )


@update_fault(
    seen_in="deepspeedai/DeepSpeed 1823",
    cause="update left out",
    evidence="moments and weights are unchanged bit for bit: model.embed_tokens.weight; the optimizer did not step them",
    step=2,
    first="exp_avg/model.embed_tokens.weight",
    flags=SMALL_GROUPS,
)
def first_sub_group_stepped_once(run: Planting) -> Plant:
    """Stage 3 steps the weights in parts. From the second step on, the first part is left out."""
    strategy = yield
    optimizer = strategy.engine.optimizer
    step: Any = optimizer._optimizer_step
    seen: set[int] = set()

    def without_the_first(sub_group_id: int) -> None:
        if sub_group_id or sub_group_id not in seen:
            step(sub_group_id)
        seen.add(sub_group_id)

    run.patch(optimizer, "_optimizer_step", without_the_first)


# Ulysses: two ranks share each sequence.
ulysses_fault = functools.partial(
    zero_fault,
    axes=("cp",),
    mesh=Mesh(cp=2),
    bug_class="context parallelism",
    cause="context parallelism",
)


@ulysses_fault(
    seen_in="hamishivi/tmax 9",
    cause="gradient scale",
    evidence="every gradient is 0.5 = 1/cp times what it should be, evenly for all samples",
    first="gradient/model.norm.weight",
)
def averaged_over_sp_twice(run: Planting) -> Plant:
    """Each rank divides its loss by the number of ranks of a sequence, and the engine averages over them, too: a factor sp."""
    strategy = yield
    run.patch(strategy.engine.optimizer, "sequence_parallel_size", 1)


@ulysses_fault(
    seen_in="deepspeedai/DeepSpeed 5248",
    cause="gradient scale",
    evidence="the gradient of the logits is 2 = cp times what it should be, evenly for all samples",
    first="backward/lm_head",
)
def loss_not_divided_by_sp(run: Planting) -> Plant:
    """The engine sums over the ranks of a sequence, and nobody divides: a factor sp the other way."""
    yield
    run.scale_backward(lambda _call: run.config.cp_size)


@ulysses_fault(
    seen_in="deepspeedai/Megatron-DeepSpeed 392",
    evidence="in model.rotary_emb's output, positions 32 to 63 have the values of positions 0 to 31; all else is right",
    first="forward/model.rotary_emb",
)
def rotary_positions_of_the_first_rank(run: Planting) -> Plant:
    """The rotary angles of every rank begin at position 0."""
    strategy = yield
    real = strategy.sequence.cut

    def local(*batch: torch.Tensor) -> tuple[torch.Tensor, ...]:
        input_ids, labels, positions = real(*batch)
        return input_ids, labels, positions - positions.min()

    run.patch(strategy.sequence, "cut", local)


@ulysses_fault(
    seen_in="deepspeedai/DeepSpeed 8491",
    cause="gradient lost",
    evidence="no gradient arrives at ...v_proj's output: it is zero there",
    first="backward/model.layers.1.self_attn.v_proj",
)
def exchange_without_a_gradient(run: Planting) -> Plant:
    """The all-to-all before attention moves the numbers and sends no gradient back. DeepSpeed's did so in compiled layers."""
    strategy = yield
    attention = strategy.sequence.attention
    real = attention._combine_local_sequences
    run.patch(
        attention,
        "_combine_local_sequences",
        lambda *parts: tuple(whole.detach() + 0 * whole for whole in real(*parts)),
    )


@ulysses_fault(
    seen_in="vllm-project/vllm-omni 5716",
    evidence="in ...o_proj's input, heads 0 to 1 have the values of heads 2 to 3, heads 2 to 3 have the values of heads 0 to 1; all else is right",
    first="forward/model.layers.0.self_attn.o_proj.input",
)
def heads_in_another_order(run: Planting) -> Plant:
    """After attention, the heads of the ranks are joined in another order than they were shared out in."""
    strategy = yield
    attention = strategy.sequence.attention
    real = attention._partition_global_sequence

    def swapped(context: torch.Tensor) -> torch.Tensor:
        whole = real(context)
        return whole.roll(whole.shape[-1] // attention.world_size, -1)

    run.patch(attention, "_partition_global_sequence", swapped)
