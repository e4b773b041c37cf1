"""Gradient norms of the wrong things, and clipping that is not the same everywhere."""

import functools

import torch.distributed as dist

from lockstep.faults.catalogue import fault
from lockstep.faults.planting import Plant, Planting
from lockstep.training.optim import total_norm

# Below the norm of the first gradients, so that there is something to clip
CLIPS = ("--max_grad_norm", "0.5")
clipping_fault = functools.partial(fault, bug_class="grad norm, clipping", cause="clipping", arguments=CLIPS)


@clipping_fault(
    seen_in="pytorch/pytorch 170862",
    evidence="the norm is # times that of the gradients: it is the norm of tp rank 0's shards alone",
    first="gradient norm",
    axes=("tp",),
    needs=("norm_not_summed_over_tp",),
)
def norm_of_the_local_shard(run: Planting) -> Plant:
    """The norm that is clipped by is not summed over the tensor-parallel ranks."""
    yield
    run.handles.norm_not_summed_over_tp()


@clipping_fault(
    seen_in="NVIDIA-NeMo/RL 3788",
    evidence="the norm is 1.0001 times that of the gradients, as if the parameters that every tp rank holds were counted tp times",
    first="gradient norm",
    axes=("tp",),
    needs=("count_replicas_in_norm",),
)
def replicated_parameters_counted_tp_times(run: Planting) -> Plant:
    """The squares of the norms' gradients, which every tp rank has, are summed over tp."""
    yield
    run.handles.count_replicas_in_norm()


@clipping_fault(
    seen_in="deepspeedai/DeepSpeed 8068",
    evidence=(
        "configured differently: max_grad_norm is 0.0, not 0.5",
        "the moments are those of gradients that were not clipped: # times too large",
    ),
    first="exp_avg/model.embed_tokens.weight",
    needs=("do_not_clip",),
)
def one_side_does_not_clip(run: Planting) -> Plant:
    """This strategy does not clip, the others do; a library's default is enough for that."""
    yield
    run.handles.do_not_clip()


@clipping_fault(
    seen_in="deepspeedai/DeepSpeed 1801",
    evidence=(
        "the tp ranks' moments are 1.414, 1.414 times what they should be: each clipped by its own norm",
        "configured differently: max_grad_norm is 0.7071, not 0.5",
    ),
    first="exp_avg/model.embed_tokens.weight",
    axes=("tp",),
    needs=("clip_by", "gradients", "group"),
)
def every_tp_rank_clips_by_its_own_norm(run: Planting) -> Plant:
    """Each tp rank clips by the norm of what it holds, so the norms' weights, equal everywhere, drift apart."""
    strategy = yield
    own = {}

    def measure(_step: int) -> None:
        square = total_norm(gradient for _, gradient in run.handles.gradients()).square()
        dist.all_reduce(square, group=run.handles.group("dp"))
        own["norm"] = square.sqrt().float()

    run.around(strategy, "update", before=measure)
    run.handles.clip_by(lambda: own["norm"])
