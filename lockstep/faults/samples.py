"""Samples in which some tokens have no label, are padding, or belong to another document.

The faults are means of means, wrong counts and wrong masks.
"""

import functools
import itertools
from collections.abc import Callable

import torch
import torch.distributed as dist

from lockstep.faults.catalogue import fault
from lockstep.faults.data import feed
from lockstep.faults.planting import Plant, Planting
from lockstep.inputs.samples import IGNORED
from lockstep.plan import cuts
from lockstep.plan.mesh import Mesh
from lockstep.training.strategy import MicroBatch

COMPLETION = ("--labels", "completion", "--gradient_accumulation_steps", "2")
MEAN = "the gradient of the logits is that of a mean over {} of means over their own labels (...), not of the mean over all # labels"
COUNT = "the gradient of the logits is # times what it should be: the sum is divided by #, which is {}, not by the # labels"
count_fault = functools.partial(
    fault,
    bug_class="accumulation, normalisation",
    cause="label count",
    first="backward/lm_head",
    arguments=COMPLETION,
)


# This DP rank, the place of this micro batch, and the positions that this rank has
Where = tuple[int, int, list[int]]


def _divide_by(run: Planting, number: Callable[[torch.Tensor, Where], int]) -> Plant:
    """Divide the sum of each micro batch's losses by number(labels, where) instead of by all labels of the step.

    `labels` (dp, micro batches, B, S) is True where there is one.
    """
    strategy = yield
    real, calls, batches = strategy.loss, itertools.count(), run.inputs.batches
    here = run.config.mesh.coordinates(dist.get_rank())
    pieces = cuts.positions(run.config, here.cp)
    positions = [start + offset for start, length in pieces for offset in range(length)]

    def loss(*arguments: torch.Tensor) -> torch.Tensor:
        step, index = divmod(next(calls), batches.num_micro_batches)
        by_rank = [batches.micro_batches(step, rank, "cpu") for rank in range(batches.dp_size)]
        labels = torch.stack([torch.stack([micro[1] for micro in rank]) for rank in by_rank]) != IGNORED
        return real(*arguments) * (int(labels.sum()) / number(labels, (here.dp, index, positions)))

    run.patch(strategy, "loss", loss)


@count_fault(seen_in="huggingface/transformers 34242", evidence=MEAN.format("2 DP ranks"))
def mean_of_the_means_of_ranks(run: Planting) -> Plant:
    """Every rank divides by its own labels, and the gradients are averaged over ranks."""
    return _divide_by(run, lambda labels, where: len(labels) * int(labels[where[0]].sum()))


@count_fault(seen_in="ml-explore/mlx-lm 1413", evidence=MEAN.format("2 micro batches"))
def mean_of_the_means_of_micro_batches(run: Planting) -> Plant:
    """Every micro batch is divided by its own labels, on all ranks, and then by the number of micro batches."""
    return _divide_by(run, lambda labels, where: labels.shape[1] * int(labels[:, where[1]].sum()))


@count_fault(
    seen_in="vllm-project/speculators 942",
    evidence=MEAN.format("2 DP ranks and 2 micro batches"),
)
def mean_of_all_means(run: Planting) -> Plant:
    """What a model's own loss gives: every micro batch of every rank is divided by its own labels."""
    return _divide_by(
        run, lambda labels, where: labels.shape[0] * labels.shape[1] * int(labels[where[0], where[1]].sum())
    )


@count_fault(
    seen_in="PrimeIntellect-ai/prime-rl 1960",
    evidence=MEAN.format("2 cp ranks"),
    axes=("cp",),
    mesh=Mesh(cp=2),
)
def mean_of_the_means_of_cp_ranks(run: Planting) -> Plant:
    """Every rank divides by the labels at its own positions."""
    return _divide_by(run, lambda labels, where: run.config.cp_size * int(labels[..., where[2]].sum()))


@count_fault(seen_in="OpenNMT/OpenNMT-py 2209", evidence=COUNT.format("the number of all tokens"))
def tokens_counted_for_labels(run: Planting) -> Plant:
    """The tokens are counted before the prompts lose their labels."""
    return _divide_by(run, lambda labels, _: labels.numel())


@count_fault(
    seen_in="huggingface/transformers 46204",
    evidence=COUNT.format("one more for each sequence"),
)
def labels_counted_before_the_shift(run: Planting) -> Plant:
    """The labels are counted before they are shifted, when the first token of each sequence still counts."""
    return _divide_by(run, lambda labels, _: int(labels.sum()) + labels[..., 0].numel())


@fault(
    seen_in="huggingface/transformers 46634",
    bug_class="data",
    cause="attention mask",
    evidence="model.layers.0.self_attn: documents see each other, as recomputed",
    first="forward/model.layers.0.self_attn.o_proj.input",
    arguments=("--documents", "apart"),
)
def documents_see_each_other(run: Planting) -> Plant:
    """Positions begin again, and the mask does not know it."""
    from transformers import masking_utils

    run.patch(masking_utils, "find_packed_sequence_indices", lambda _positions: None)
    yield


@fault(
    seen_in="huggingface/nanoVLM 201",
    bug_class="data",
    cause="data",
    evidence="the positions of documents do not begin again",
    first="batch/position_ids",
    arguments=("--documents", "apart"),
)
def positions_go_on(run: Planting) -> Plant:
    """The positions of a sample count through its documents, which then also see each other."""

    def through(micro: MicroBatch) -> MicroBatch:
        return (*micro[:2], torch.arange(micro[2].shape[1], device=micro[2].device).expand_as(micro[2]))

    return feed(run, lambda micro_batches, _: [through(micro) for micro in micro_batches])


@fault(
    seen_in="NVIDIA-NeMo/Automodel 3704",
    bug_class="data",
    cause="data",
    evidence="the attention mask at each position is that of the position before it",
    first="batch/attention_mask",
    arguments=("--padding", "left"),
)
def mask_one_position_off(run: Planting) -> Plant:
    """The mask is shifted with the labels: the first token of each sample is taken for padding."""

    def late(micro: MicroBatch) -> MicroBatch:
        return (*micro[:2], torch.cat([micro[2][:, :1], micro[2][:, :-1]], 1))

    return feed(run, lambda micro_batches, _: [late(micro) for micro in micro_batches])
