"""Wrong inputs, and wrong reported losses.

Weights are not the file's, not the same on all ranks, or not tied. Samples are exchanged after all checks of the batches.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from lockstep.faults.catalogue import WEIGHTS_IN_FP32, fault
from lockstep.faults.planting import Plant, Planting
from lockstep.inputs.data import Batches
from lockstep.training.strategy import MicroBatch

data_fault = functools.partial(fault, bug_class="data", cause="data", first="batch/input_ids")


def feed(run: Planting, change: Callable[[list[MicroBatch], int], list[MicroBatch]]) -> Plant:
    """Train on change(micro batches, step from 0) instead of the loop's micro batches."""
    strategy = yield
    real, steps = strategy.forward_backward, itertools.count()
    run.patch(strategy, "forward_backward", lambda micro_batches: real(change(micro_batches, next(steps))))


def _batch(batches: Batches, step: int, share: int) -> list[MicroBatch]:
    return batches.micro_batches(step, share, torch.device("cpu"))


@data_fault(seen_in="ray-project/ray 64315", evidence="DP rank 1 was given the samples of DP rank 0")
def dp_ranks_replay_one_batch(run: Planting) -> Plant:
    """Every data-parallel rank trains on the first one's samples."""
    return feed(run, lambda _, step: _batch(run.inputs.batches, step, 0))


@data_fault(
    seen_in="deepspeedai/DeepSpeed 7199",
    evidence="tensor-parallel peers were given different batches: ranks [1, 3] differ",
    axes=("tp",),
    needs=("batches_are_not_checked",),
)
def tp_peers_read_different_samples(run: Planting) -> Plant:
    """The samples are chosen by the rank in the world, so tensor-parallel peers do not share theirs.

    (Not planted where the strategy checks the batches itself.)
    """
    return feed(run, lambda _, step: _batch(run.inputs.batches, step, dist.get_rank() % run.config.dp_size))


@data_fault(seen_in="verl-project/verl 4697", evidence="the samples are not those of this step", axes=("tp",))
def sampler_counts_all_ranks(run: Planting) -> Plant:
    """The sampler takes the world size for the data-parallel size and skips the shares in between."""
    too_wide = dataclasses.replace(run.inputs.batches, dp_size=run.config.num_workers)

    def change(_: list[MicroBatch], step: int) -> list[MicroBatch]:
        return _batch(too_wide, step, run.config.mesh.sample_share(dist.get_rank()) * run.config.tp_size)

    return feed(run, change)


@data_fault(seen_in="ray-project/ray 64315", evidence="the right samples in another order")
def samples_in_another_order(run: Planting) -> Plant:
    """One data-parallel rank has its samples in another order: the same loss, and other tensors."""

    def change(micro_batches: list[MicroBatch], _step: int) -> list[MicroBatch]:
        affected = run.config.mesh.sample_share(dist.get_rank()) == 1
        return [(ids.flip(0), labels.flip(0)) for ids, labels in micro_batches] if affected else micro_batches

    return feed(run, change)


@data_fault(
    seen_in="huggingface/transformers 34191",
    evidence="the input ids are right, the labels are not",
    first="batch/labels",
)
def labels_shifted_twice(run: Planting) -> Plant:
    """The labels, shifted by one already, are shifted again: the model learns to skip a token."""

    return feed(run, lambda micro_batches, _: [(ids, labels.roll(-1, 1)) for ids, labels in micro_batches])


@data_fault(
    seen_in="ray-project/ray 31409",
    cause="reported loss",
    evidence="every tensor is right, but all DP ranks report the same loss",
    first="loss of DP rank 1",
)
def only_the_first_rank_reports(run: Planting) -> Plant:
    """Every rank reports the first rank's loss; training is right."""
    from lockstep.training import loop

    gather = dist.all_gather_single

    def first_for_all(everyone: torch.Tensor, row: torch.Tensor, **options: Any) -> Any:
        dist.broadcast(row[:1], src=0)
        return gather(everyone, row, **options)

    run.patch_dist(loop, "all_gather_single", first_for_all)
    yield


ODD = "tiny-qwen2-odd-vocab"
weights_fault = functools.partial(fault, bug_class="weights", cause="weights", needs=("weights",))


@weights_fault(
    seen_in="NVIDIA-NeMo/Automodel 3822",
    evidence=(
        "the module computed with another model.embed_tokens.weight: it is off by a relative 7.1e-04 after the step, and its moments are right; # more weights are off or differ between ranks; only in the share of dp rank 1 of 2",
        "the module computed with another model.embed_tokens.weight: it is off by a relative 4.7e-04 after the step, and its moments are right; # more weights are off or differ between ranks",
    ),
    first="forward/model.embed_tokens",
    precisions=WEIGHTS_IN_FP32,
)
def one_replica_starts_elsewhere(run: Planting) -> Plant:
    """The weights on the second data-parallel rank (under FSDP, its shards) are larger by one in a thousand."""
    strategy = yield
    if strategy.geometry().coordinates.dp == 1:
        run.change_weights("", lambda tensor: tensor.mul_(1.001))


@weights_fault(
    seen_in="huggingface/transformers 17877",
    evidence="the module computed with another model.layers.1.self_attn.q_proj.weight: it is off by a relative 2.0e+00 after the step, and its moments are right",
    first="forward/model.layers.1.self_attn.q_proj",
    named=True,
)
def reinitialised_after_loading(run: Planting) -> Plant:
    """One projection is initialised again after the weights were loaded (here it is negated, an equally likely draw)."""
    yield
    run.change_weights("model.layers.1.self_attn.q_proj.weight", torch.Tensor.neg_)


@weights_fault(
    seen_in="NVIDIA-NeMo/Automodel 3822",
    evidence="the module computed with another model.layers.1.input_layernorm.weight: it is off by a relative 1.0e-03 after the step, and its moments are right; ranks 0 and 2 have another, which was not judged",
    first="forward/model.layers.1.input_layernorm",
    axes=("tp",),
    precisions=WEIGHTS_IN_FP32,
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
