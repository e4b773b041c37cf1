"""Gradients that are not averaged over the data-parallel group, or over the wrong one, or scaled once too often."""

import importlib
import itertools

import torch
import torch.distributed as dist

from lockstep.faults import around, backward_scaled, fault

MISSING, SCALE = "DP reduction missing", "wrong group or scale"


class _OwnChunk:
    """A reduce-scatter that keeps this rank's own chunk: nothing crosses the dp axis."""

    def allocate(self, size, *, dtype, device):
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        output_tensor.copy_(input_tensor.chunk(dist.get_world_size(group))[dist.get_rank(group)])
        return None


def _fsdp_modules(strategy):
    return [module for module in strategy.model.modules() if hasattr(module, "set_custom_reduce_scatter")]


def _divide_by(strategy, factor: float) -> None:
    for module in _fsdp_modules(strategy):
        module.set_gradient_divide_factor(float(factor))
        module.set_force_sum_reduction_for_comms(True)  # gloo cannot multiply while it reduces


@fault(seen_in="pytorch/torchtitan 577", bug_class=MISSING, cause="dp reduction missing", first="gradient/model.norm.weight")
def no_dp_reduction(run):
    """Tensor parallelism is there, data parallelism was forgotten: what a rank updates it learns from its own samples alone."""
    strategy = yield
    if run.autotp:
        strategy.optimizer.average_tensor = lambda tensor, communication_data_type: None
    else:
        for module in _fsdp_modules(strategy):
            module.set_custom_reduce_scatter(_OwnChunk())


@fault(seen_in="pytorch/torchtitan 577", bug_class=MISSING, cause="dp reduction missing", strategies=("fsdp",),
       first="gradient/model.layers.0.mlp.down_proj.weight")  # fmt: skip
def one_layer_without_dp_reduction(run):
    """Of all layers only the first does not average its gradients over the data-parallel ranks."""
    strategy = yield
    strategy.model.model.layers[0].set_custom_reduce_scatter(_OwnChunk())


@fault(seen_in="deepspeedai/DeepSpeed 7985", bug_class=MISSING, cause="accumulation", first="gradient/model.norm.weight",
       arguments=("--gradient_accumulation_steps", "3"))  # fmt: skip
def last_micro_batch_left_out(run):
    """The gradients are reduced before the last micro batch has been added."""
    strategy = yield
    if not run.autotp:
        steps = run.config.gradient_accumulation_steps
        real, calls = strategy.model.set_requires_gradient_sync, itertools.count()
        strategy.model.set_requires_gradient_sync = lambda _: real(next(calls) % steps == steps - 2)
        # what is left is not of the next step either
        around(strategy, "update", after=lambda _step: _drop_unreduced(strategy))
        return
    optimizer, kept = strategy.optimizer, {}
    reduce_gradients, backward = optimizer.reduce_gradients, strategy.engine.backward

    def backward_and_note(loss):
        if strategy.engine.is_gradient_accumulation_boundary():
            kept.update({name: p.grad.clone() for name, p in strategy.model.named_parameters()})
        backward(loss)

    def without_the_last(*arguments, **options):
        for name, parameter in strategy.model.named_parameters():
            if name in kept:
                parameter.grad.copy_(kept.pop(name))
        return reduce_gradients(*arguments, **options)

    strategy.engine.backward, optimizer.reduce_gradients = backward_and_note, without_the_last


def _drop_unreduced(strategy) -> None:
    for module in _fsdp_modules(strategy):
        for group in module._get_fsdp_state()._fsdp_param_groups:
            for parameter in group.fsdp_params:
                parameter.unsharded_accumulated_grad = None


@fault(seen_in="meta-pytorch/torchtune 2420", bug_class=SCALE, cause="gradient scale", first="gradient/model.norm.weight")
def divided_by_world_size(run):
    """The summed gradients are divided by the number of all ranks, not of the data-parallel ones."""
    strategy = yield
    if run.autotp:
        strategy.optimizer.sequence_parallel_size = 1 / run.config.tp_size  # part of DeepSpeed's divisor
    else:
        _divide_by(strategy, dist.get_world_size())


@fault(seen_in="pytorch/torchtitan 2318", bug_class=SCALE, cause="gradient scale", first="backward/lm_head")
def loss_divided_by_dp_as_well(run):
    """The loss is divided by dp although the reduction averages; AdamW hides the factor."""
    return backward_scaled(run, lambda _call: 1 / run.config.dp_size)


@fault(seen_in="huggingface/transformers 39648", bug_class=SCALE, cause="gradient scale", first="backward/lm_head")
def loss_multiplied_by_tp(run):
    """The loss, whole on every rank, is multiplied with the tensor-parallel size before backward."""
    return backward_scaled(run, lambda _call: run.config.tp_size)


@fault(seen_in="pytorch/torchtitan 2318", bug_class=SCALE, cause="gradient scale", first="gradient/model.norm.weight",
       arguments=("--max_grad_norm", "0"))  # fmt: skip
def summed_instead_of_averaged(run):
    """The gradients are summed over dp and never divided; AdamW hides the factor, and nothing is clipped here."""
    strategy = yield
    if run.autotp:
        strategy.optimizer.gradient_average = False
    else:
        _divide_by(strategy, 1)


@fault(seen_in="NVIDIA/Megatron-LM 7452", bug_class=SCALE, cause="loss on vocabulary shards", first="backward/lm_head")
def partition_function_summed_again(run):
    """The sum of exponentials, reduced over tp already, is reduced once more: the loss is off by log(tp)."""
    if run.autotp:
        module = importlib.import_module("deepspeed.sequence.cross_entropy")
        _patch_all_reduce(run, module, calls_per_loss=3, which=1)
    else:
        module = importlib.import_module("lockstep.vocab_parallel_loss")
        _patch_all_reduce(run, module, calls_per_loss=2, which=1, row=0)
    yield


def _patch_all_reduce(run, module, *, calls_per_loss: int, which: int, row: int | None = None) -> None:
    """Let one of a loss function's all-reduces happen twice (of one row of what it reduces)."""
    real, calls = module.dist, itertools.count()

    class Twice:
        def __getattr__(self, name):
            return getattr(real, name)

        def all_reduce(self, tensor, *arguments, **options):
            real.all_reduce(tensor, *arguments, **options)
            if next(calls) % calls_per_loss == which:
                again = tensor if row is None else tensor[row]
                real.all_reduce(again, *arguments, **options)

    run.patch(module, "dist", Twice())
