"""Context parallelism: positions, keys and losses that belong to other ranks."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from lockstep.faults.catalogue import NO_SENTENCE, fault
from lockstep.faults.planting import Plant, Planting
from lockstep.plan.mesh import Mesh

cp_fault = functools.partial(
    fault,
    bug_class="context parallelism",
    cause="context parallelism",
    axes=("cp",),
    needs=("context",),
    mesh=Mesh(cp=2),
)
ATTENDED = "forward/model.layers.0.self_attn.o_proj.input"


def _change_cut(run: Planting, change: Callable[..., tuple[torch.Tensor, ...]]) -> Plant:
    """Give each rank change(all input ids, its own, its labels, its positions) in the place of the last three."""
    yield
    context = run.handles.context()
    real = context.cut
    run.patch(context, "cut", lambda ids, labels: change(ids, *real(ids, labels)))


@cp_fault(
    seen_in="NVIDIA-NeMo/Automodel 3508",
    evidence="model.layers.0.self_attn: the mask counts the positions of each cp rank from 0, as recomputed",
    first=ATTENDED,
)
def causal_mask_local_to_the_rank(run: Planting) -> Plant:
    """A rank attends to as many keys as if its own positions were the first ones."""
    yield
    context = run.handles.context()
    real, piece_length = context.mask, context.pieces[0][1]

    def local(start: int, length: int, window: int | None, device: torch.device) -> torch.Tensor:
        local_start = 0 if start == context.pieces[0][0] else piece_length
        allowed = torch.zeros(length, start + length, dtype=torch.bool, device=device)
        allowed[:, : local_start + length] = real(local_start, length, window, device)
        return allowed

    run.patch(context, "mask", local)


@cp_fault(
    seen_in="NVIDIA/Megatron-LM 4977",
    evidence="in model.rotary_emb's output, positions 16 to 47 have the values of positions 0 to 31, positions 48 to 63 have the values of positions 16 to 31; all else is right",
    first="forward/model.rotary_emb",
)
def rotary_positions_local_to_the_rank(run: Planting) -> Plant:
    """The rotary angles of every rank begin at position 0."""
    return _change_cut(
        run,
        lambda _, own_ids, labels, positions: (
            own_ids,
            labels,
            torch.arange(positions.shape[1], device=positions.device)[None],
        ),
    )


@cp_fault(seen_in="THUDM/slime 1871", evidence=NO_SENTENCE, first=ATTENDED)
def keys_in_the_order_of_ranks(run: Planting) -> Plant:
    """Keys and values are joined rank by rank, though each rank has an early and a late piece."""
    yield
    context = run.handles.context()
    real = context.whole

    def by_rank(local: torch.Tensor) -> torch.Tensor:
        pieces = real(local).chunk(2 * context.size, -2)
        order = [number for rank in range(context.size) for number in (rank, 2 * context.size - 1 - rank)]
        return torch.cat([pieces[number] for number in order], -2)

    run.patch(context, "whole", by_rank)


@cp_fault(
    seen_in="NVIDIA-NeMo/Megatron-Bridge 4784",
    cause="cp reduction missing",
    evidence="model.layers.1.self_attn: in the backward pass, what queries of other cp ranks send back is lost, as recomputed",
    first="backward/model.layers.1.self_attn.v_proj",
)
def key_gradients_not_summed(run: Planting) -> Plant:
    """The gradients of keys and values are what the rank's own queries give; those of other ranks are lost."""
    from lockstep.training import context_parallel

    def own(wide: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        return wide.chunk(dist.get_world_size(group))[dist.get_rank(group)].contiguous()

    run.patch(context_parallel, "reduce_scatter", own)
    yield


@cp_fault(
    seen_in="NVIDIA/Megatron-LM 906",
    cause="gradient scale",
    evidence="the gradient of the logits is 2 = cp times what it should be, evenly for all samples",
    first="backward/lm_head",
)
def loss_summed_over_cp(run: Planting) -> Plant:
    """The gradients of the ranks' losses are summed over cp and never divided."""
    yield
    run.scale_backward(lambda _call: run.config.cp_size)


@cp_fault(
    seen_in="deepspeedai/DeepSpeed 4530",
    cause="gradient scale",
    evidence="the gradient of the logits is 0.5 = 1/cp times what it should be, evenly for all samples",
    first="backward/lm_head",
)
def loss_divided_by_cp_twice(run: Planting) -> Plant:
    """A rank's mean loss is divided by cp, and so is the sum of the gradients."""
    yield
    run.scale_backward(lambda _call: 1 / run.config.cp_size)


@cp_fault(
    seen_in="PrimeIntellect-ai/prime-rl 1960",
    cause="token weights",
    evidence="in the gradient of the logits, 32 tokens count 0 times, 64 tokens count 1 times, 32 tokens count 2 times (1 is right)",
    first="backward/lm_head",
)
def ranks_averaged_whatever_their_tokens(run: Planting) -> Plant:
    """The loss is a mean over ranks. The first rank's has 16 labels less, and so its other tokens count more."""
    strategy = yield
    real = strategy.model.loss_function

    def without_some(logits: torch.Tensor, labels: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        fewer = options.pop("shift_labels").clone()
        fewer[:, :16] = -100
        return real(logits, labels, *rest, shift_labels=fewer, **options)

    if run.handles.context().rank == 0:
        strategy.model.loss_function = run.recorded("the model's loss_function", without_some)


@cp_fault(
    seen_in="huggingface/transformers 36607",
    cause="data",
    evidence="the input ids are right, the labels are not",
    first="batch/labels",
)
def labels_shifted_after_the_cut(run: Planting) -> Plant:
    """Each piece's labels are shifted within the piece: its last token is to predict itself."""

    def shifted(_: object, own: torch.Tensor, labels: torch.Tensor, positions: torch.Tensor) -> Any:
        pieces = zip(own.chunk(2, 1), labels.chunk(2, 1), strict=True)
        labels = torch.cat([torch.cat([next_ids[:, :-1], ids[:, -1:]], 1) for ids, next_ids in pieces], 1)
        return own, labels, positions

    return _change_cut(run, shifted)


@cp_fault(
    seen_in="THUDM/slime 1366",
    cause="cp reduction missing",
    evidence="each part of these gradients is 2 = cp times what one cp rank's positions contribute, without the others', as recomputed (...)",
    first="gradient/model.norm.weight",
    needs=("context", "skip_dp_reduction"),
)
def gradients_not_reduced_over_cp(run: Planting) -> Plant:
    """Every rank keeps the gradient of its own positions."""
    yield
    run.handles.skip_dp_reduction()


@cp_fault(
    seen_in="modelscope/ms-swift 10071",
    cause="data",
    evidence="the samples are right, and some of their positions are those of others",
    first="batch/input_ids",
)
def a_rank_has_the_positions_of_another(run: Planting) -> Plant:
    """The last rank is given the input ids of the first, with its own labels."""

    def first_ids(all_ids: torch.Tensor, own: torch.Tensor, *rest: torch.Tensor) -> Any:
        context = run.handles.context()
        if context.rank == context.size - 1:
            length = own.shape[1] // 2
            own = torch.cat([all_ids[:, :length], all_ids[:, -length:]], 1)
        return own, *rest

    return _change_cut(run, first_ids)
