"""Gradient norms of the wrong things, and clipping that is not the same everywhere."""

import importlib
from unittest import mock

import torch
import torch.distributed as dist

from lockstep.faults import around, fault

CLASS = "grad norm, clipping"
CLIPS = ("--max_grad_norm", "0.5")  # below the norm of the first gradients, so that there is something to clip


@fault(seen_in="pytorch/pytorch 170862", bug_class=CLASS, cause="clipping", first="gradient norm", arguments=CLIPS)
def norm_of_the_local_shard(run):
    """The norm that is clipped by is not summed over the tensor-parallel ranks."""
    strategy = yield
    if run.autotp:
        strategy.optimizer._model_parallel_all_reduce = lambda tensor, op: None
    else:
        real, axes = strategy._grad_norm, run.strategy_module._sharded_axes

        def summed_over_dp_only():
            with mock.patch.object(run.strategy_module, "_sharded_axes", lambda tensor: tuple(axis for axis in axes(tensor) if axis == 0)):
                return real()

        strategy._grad_norm = summed_over_dp_only


@fault(seen_in="NVIDIA-NeMo/RL 3788", bug_class=CLASS, cause="clipping", first="gradient norm", arguments=CLIPS)
def replicated_parameters_counted_tp_times(run):
    """The squares of the norms' gradients, which every tp rank has, are summed over tp."""
    strategy = yield
    if run.autotp:
        module = importlib.import_module("deepspeed.runtime.zero.stage_1_and_2")
        run.patch(module, "is_model_parallel_parameter", lambda parameter: True)
    else:
        real = strategy._grad_norm
        copied = [parameter for parameter in strategy.parameters if parameter.device_mesh.ndim == 1]

        def copies_summed_over_tp():
            with mock.patch.object(strategy, "parameters", copied):
                once = real()
            return (real() ** 2 + (run.config.tp_size - 1) * once**2).sqrt()

        strategy._grad_norm = copies_summed_over_tp


@fault(seen_in="deepspeedai/DeepSpeed 8068", bug_class=CLASS, cause="clipping",
       first="exp_avg/model.embed_tokens.weight", arguments=CLIPS)  # fmt: skip
def one_side_does_not_clip(run):
    """This strategy does not clip, the others do; a library's default is enough for that."""
    strategy = yield
    if run.autotp:
        strategy.optimizer.clip_grad = 0.0
    else:
        run.patch(torch.nn.utils, "clip_grads_with_norm_", lambda *arguments: None)


@fault(seen_in="deepspeedai/DeepSpeed 1801", bug_class=CLASS, cause="clipping",
       first="exp_avg/model.embed_tokens.weight", arguments=CLIPS)  # fmt: skip
def every_tp_rank_clips_by_its_own_norm(run):
    """Each tp rank clips by the norm of what it holds, so the norms' weights, equal everywhere, drift apart."""
    strategy = yield
    own = {}

    def measure(_step):
        square = sum((gradient.double().square().sum() for _, gradient in run.gradients(strategy)), torch.zeros((), dtype=torch.float64))
        dist.all_reduce(square, group=strategy.optimizer.dp_process_group if run.autotp else strategy.device_mesh["dp"].get_group())
        own["norm"] = square.sqrt().float()

    around(strategy, "update", before=measure)
    if run.autotp:
        clip = strategy.optimizer.unscale_and_clip_grads
        strategy.optimizer.unscale_and_clip_grads = lambda gradients, total_norm: clip(gradients, own["norm"])
    else:
        clip = torch.nn.utils.clip_grads_with_norm_
        by_own = lambda parameters, max_norm, total_norm: clip(parameters, max_norm, own["norm"])  # noqa: E731
        run.patch(torch.nn.utils, "clip_grads_with_norm_", by_own)
