"""Weights that are not the file's, not the same on all ranks, not tied, or not updated."""

from collections.abc import Callable

import torch

from lockstep.faults.catalogue import fault
from lockstep.faults.planting import Plant, Planting
from lockstep.training.strategy import Strategy

CLASS = "weights"
ODD = "tiny-qwen2-odd-vocab"


def _at_start(run: Planting, strategy: Strategy, change: Callable[[str, torch.Tensor], object]) -> None:
    """Call change(name, tensor) for the live weights right before the first step, after all checks of them."""

    def action(step: int) -> None:
        if step == 1:
            with torch.no_grad():
                for name, tensor in run.handles.weights():
                    change(name, tensor)

    run.around(strategy, "forward_backward", before=action)


@fault(
    seen_in="NVIDIA-NeMo/Automodel 3822",
    bug_class=CLASS,
    cause="weights",
    evidence=(
        "model.embed_tokens.weight was off by a relative 7.1e-04 before the step: its update is right, and the updated weight is not",
        "model.embed_tokens.weight was off by a relative 4.7e-04 before the step: its update is right, and the updated weight is not",
    ),
    first="forward/model.embed_tokens",
    needs=("weights",),
)
def one_replica_starts_elsewhere(run: Planting) -> Plant:
    """The weights on the second data-parallel rank (under FSDP, its shards) are larger by one in a thousand."""
    strategy = yield
    if strategy.geometry().coordinates.dp == 1:
        _at_start(run, strategy, lambda name, tensor: tensor.mul_(1.001))


@fault(
    seen_in="huggingface/transformers 17877",
    bug_class=CLASS,
    cause="weights",
    evidence="model.layers.1.self_attn.q_proj.weight was off by a relative 2.0e+00 before the step: its update is right, and the updated weight is not",
    first="forward/model.layers.1.self_attn.q_proj",
    needs=("weights",),
    named=True,
)
def reinitialised_after_loading(run: Planting) -> Plant:
    """One projection is initialised again after the weights were loaded (here it is negated, an equally likely draw)."""
    strategy = yield

    def change(name: str, tensor: torch.Tensor) -> None:
        if name == "model.layers.1.self_attn.q_proj.weight":
            tensor.neg_()

    _at_start(run, strategy, change)


@fault(
    seen_in="NVIDIA-NeMo/Automodel 3822",
    bug_class=CLASS,
    cause="weights",
    evidence="model.layers.1.input_layernorm.weight was off by a relative 1.0e-03 before the step: its update is right, and the updated weight is not",
    first="forward/model.layers.1.input_layernorm",
    axes=("tp",),
    needs=("weights",),
)
def norm_weight_differs_on_one_tp_rank(run: Planting) -> Plant:
    """One replicated norm is larger by one in a thousand on the second tensor-parallel rank."""
    strategy = yield

    def change(name: str, tensor: torch.Tensor) -> None:
        if name == "model.layers.1.input_layernorm.weight":
            tensor.mul_(1.001)

    if strategy.geometry().coordinates.tp == 1:
        _at_start(run, strategy, change)


@fault(
    seen_in="pytorch/pytorch 176076",
    bug_class=CLASS,
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
    bug_class=CLASS,
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
    if strategy.geometry().coordinates.tp != run.config.tp_size - 1:
        return
    kept: list[torch.Tensor] = []

    def keep(_step: int) -> None:
        kept[:] = [
            tensor.clone() for name, tensor in run.handles.weights() if name == "model.embed_tokens.weight"
        ]

    def put_back(_step: int) -> None:
        live = [tensor for name, tensor in run.handles.weights() if name == "model.embed_tokens.weight"]
        with torch.no_grad():
            for tensor, old in zip(live, kept, strict=True):
                tensor.copy_(old)

    run.around(strategy, "update", before=keep, after=put_back)


@fault(
    seen_in="NVIDIA/Megatron-LM 1754",
    bug_class=CLASS,
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
