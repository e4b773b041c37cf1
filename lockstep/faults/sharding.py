"""Planted bugs of FSDP's options: replicas of shards, and weights that are gathered ahead.

They change torch's own objects.
"""

import functools
from typing import Any

import torch

from lockstep.faults.catalogue import WEIGHTS_IN_FP32, fault
from lockstep.faults.optimizer import CLIPS
from lockstep.faults.planting import Plant, Planting
from lockstep.plan.fsdp import FSDP
from lockstep.plan.mesh import Mesh
from lockstep.training import torch_strategy

REPLICAS = ("--dp_replicate", "2")
fsdp_fault = functools.partial(fault, only=FSDP.name, mesh=Mesh(dp=2))
hsdp_fault = functools.partial(fsdp_fault, mesh=Mesh(dp=4), flags=REPLICAS)


def _all_reduce_replicas_by(run: Planting, all_reduce: Any) -> None:
    """Replace the all_reduce of FSDP's reductions, which they call over replicas only."""
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives

    run.patch_dist(_fsdp_collectives, "all_reduce", all_reduce)


@fsdp_fault(
    seen_in="verl-project/verl 7493",
    bug_class="DP reduction missing",
    cause="dp reduction missing",
    evidence="each part of these gradients is 2 = dp times one DP rank's contribution, without the others', as recomputed (...)",
    first="gradient/model.norm.weight",
    flags=REPLICAS,
)
def replicas_of_one_shard_not_reduced(run: Planting) -> Plant:
    """Weights are sharded over one rank, and nobody averages the gradients of the replicas."""
    yield
    _all_reduce_replicas_by(run, lambda *_, **__: None)


@hsdp_fault(
    seen_in="verl-project/verl 7493",
    bug_class="DP reduction missing",
    cause="dp reduction missing",
    evidence="each part of these gradients is 2 = dp / 2 times one replica's contribution, without the others', as recomputed (...)",
    first="gradient/model.norm.weight",
)
def replicas_not_reduced(run: Planting) -> Plant:
    """Gradients are averaged within each replica, and not over the replicas."""
    yield
    _all_reduce_replicas_by(run, lambda *_, **__: None)


@hsdp_fault(
    seen_in="pytorch/pytorch 125484",
    bug_class="DP reduction missing",
    cause="dp reduction missing",
    evidence="each gradient has micro batch 2 from all DP ranks, but micro batches 0 to 1 from 2 of the 4 only, with a weight of 2",
    first="gradient/model.norm.weight",
    arguments=("--gradient_accumulation_steps", "3"),
    flags=(*REPLICAS, "--gradient_sync", "scatter"),
)
def only_the_last_micro_batch_over_replicas(run: Planting) -> Plant:
    """What earlier micro batches left on a replica is added after the all-reduce over replicas, not before."""
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param_group

    yield
    real, reduce = _fsdp_collectives.dist.all_reduce, _fsdp_param_group.foreach_reduce
    earlier: dict[str, torch.Tensor | None] = {}

    def noting(*arguments: Any) -> Any:
        earlier["sum"] = arguments[12]  # partial_reduce_output
        return reduce(*arguments)

    def all_reduce(tensor: torch.Tensor, **options: Any) -> None:
        kept = earlier["sum"]
        if kept is not None:
            tensor -= kept
        real(tensor, **options)
        if kept is not None:
            tensor += kept

    run.patch(_fsdp_param_group, "foreach_reduce", noting)
    _all_reduce_replicas_by(run, all_reduce)


@hsdp_fault(
    seen_in="ByteDance-Seed/VeOmni 862",
    bug_class="grad norm, clipping",
    cause="clipping",
    evidence="the norm is 1.414 times that of the gradients, and the moments show that it was used to clip them",
    first="gradient norm",
    arguments=CLIPS,
)
def norm_summed_over_replicas(run: Planting) -> Plant:
    """The squares of the gradient norm are summed over all data-parallel ranks, so that every replica counts."""
    strategy = yield

    def every_axis(tensor: Any) -> tuple[int, ...]:
        return tuple(range(tensor.device_mesh.ndim))

    run.patch_during(strategy, "grad_norm", torch_strategy, "sharded_axes", every_axis)


@hsdp_fault(
    seen_in="allenai/OLMo-core 319",
    bug_class="weights",
    cause="weights",
    evidence="ranks [2, 3] hold another model.embed_tokens.weight than other ranks, with equal gradient and moments: it differed before the step",
    first="forward/model.embed_tokens",
    needs=("weights",),
    precisions=WEIGHTS_IN_FP32,
)
def replicas_start_apart(run: Planting) -> Plant:
    """Nothing is broadcast between replicas: the second one starts from other weights (here larger by one in a thousand)."""
    strategy = yield
    if strategy.geometry().coordinates.dp >= 2:
        run.change_weights("", lambda tensor: tensor.mul_(1.001))


@fsdp_fault(
    seen_in="pytorch/pytorch 137348",
    bug_class="weights",
    cause="weights",
    evidence="...input_layernorm's output is computed with ...input_layernorm.weight as it was before step 1, or is not multiplied with its weight..., as recomputed",
    step=2,
    first="forward/model.layers.1.input_layernorm",
    flags=("--prefetch", "1", "--reshard_after_forward", "true"),
    precisions=WEIGHTS_IN_FP32,  # the first tensor that it breaks is a norm
)
def weights_gathered_before_the_update(run: Planting) -> Plant:
    """A layer's weights are gathered ahead at the end of backward, before the update; the next forward takes them as they are."""
    strategy = yield

    def gather(_step: int) -> None:
        for group in strategy.model.get_submodule("model.layers.1")._get_fsdp_state()._fsdp_param_groups:
            group.unshard(async_op=True)

    run.around(strategy, "update", before=gather)


@fsdp_fault(
    seen_in="pytorch/pytorch 187073",
    bug_class="TP reduction missing",
    cause="gradient lost",
    evidence="no gradient arrives at model.embed_tokens's output: it is zero there",
    first="backward/model.embed_tokens",
    axes=("tp",),
    mesh=Mesh(tp=2),
    flags=("--compile", "aot_eager"),
)
def compiled_layer_drops_the_embedding_gradient(run: Planting) -> Plant:
    """torch's own: a compiled layer is given the output of a collective that is still on its way, and sends it no gradient."""
    run.patch(run.defining("Waited").Waited, "apply", lambda output: output)
    yield
