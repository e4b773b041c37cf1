"""Weights that are not the file's, not the same on all ranks, not tied, or not updated."""

import functools

import torch

from lockstep.faults.catalogue import fault
from lockstep.faults.planting import Plant, Planting

ODD = "tiny-qwen2-odd-vocab"
weights_fault = functools.partial(fault, bug_class="weights", cause="weights", needs=("weights",))


@weights_fault(
    seen_in="NVIDIA-NeMo/Automodel 3822",
    evidence=(
        "model.embed_tokens.weight was off by a relative 7.1e-04 before the step: its update is right, and the updated weight is not",
        "model.embed_tokens.weight was off by a relative 4.7e-04 before the step: its update is right, and the updated weight is not",
    ),
    first="forward/model.embed_tokens",
)
def one_replica_starts_elsewhere(run: Planting) -> Plant:
    """The weights on the second data-parallel rank (under FSDP, its shards) are larger by one in a thousand."""
    strategy = yield
    if strategy.geometry().coordinates.dp == 1:
        run.change_weights("", lambda tensor: tensor.mul_(1.001))


@weights_fault(
    seen_in="huggingface/transformers 17877",
    evidence="model.layers.1.self_attn.q_proj.weight was off by a relative 2.0e+00 before the step: its update is right, and the updated weight is not",
    first="forward/model.layers.1.self_attn.q_proj",
    named=True,
)
def reinitialised_after_loading(run: Planting) -> Plant:
    """One projection is initialised again after the weights were loaded (here it is negated, an equally likely draw)."""
    yield
    run.change_weights("model.layers.1.self_attn.q_proj.weight", torch.Tensor.neg_)


@weights_fault(
    seen_in="NVIDIA-NeMo/Automodel 3822",
    evidence="model.layers.1.input_layernorm.weight was off by a relative 1.0e-03 before the step: its update is right, and the updated weight is not",
    first="forward/model.layers.1.input_layernorm",
    axes=("tp",),
)
def norm_weight_differs_on_one_tp_rank(run: Planting) -> Plant:
    """One replicated norm is larger by one in a thousand on the second tensor-parallel rank."""
    strategy = yield
    if strategy.geometry().coordinates.tp == 1:
        run.change_weights("model.layers.1.input_layernorm.weight", lambda tensor: tensor.mul_(1.001))


@fault(
    seen_in="pytorch/pytorch 176076",
    bug_class="weights",
    cause="tied weights",
    evidence="the gradient of the tied weight has the embedding's contribution only, not the head's",
    first="gradient/model.embed_tokens.weight",
    needs=("detach_head_from_embedding",),
)
def tie_broken(run: Planting) -> Plant:
    """Embedding and head are tied in name only: what the head learns does not reach the embedding."""
    yield
    run.handles.detach_head_from_embedding()


@fault(
    seen_in="pytorch/pytorch 176076",
    bug_class="weights",
    cause="update left out",
    evidence="the moments are right; unchanged bit for bit: model.embed_tokens.weight in the share of tp rank 1 of 2; all else is right",
    model=ODD,
    first="parameter/model.embed_tokens.weight",
    axes=("tp",),
    needs=("weights",),
)
def last_uneven_shard_never_updates(run: Planting) -> Plant:
    """The last vocabulary shard, shorter than the others, keeps its initial weights."""
    strategy = yield
    if strategy.geometry().coordinates.tp == run.config.tp_size - 1:
        run.undo_updates(lambda _step, name: name == "model.embed_tokens.weight")


@fault(
    seen_in="NVIDIA/Megatron-LM 1754",
    bug_class="weights",
    cause="loss on vocabulary shards",
    evidence="the logits are right; their gradient is wrong for all tokens whose label is in the shard of tp rank 1, and for no others",
    model=ODD,
    first="backward/lm_head",
    axes=("tp",),
    needs=("shift_vocabulary_offset",),
)
def vocabulary_offset_of_uneven_shards(run: Planting) -> Plant:
    """The last shard's first id is computed as if all shards were as long as the shortest: labels are off by one there."""
    run.handles.shift_vocabulary_offset()
    yield
