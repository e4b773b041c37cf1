"""Wrong updates from right gradients."""

import functools

import torch

from lockstep.faults.catalogue import fault
from lockstep.faults.planting import Plant, Planting

update_fault = functools.partial(fault, bug_class="precision, optimizer")


@update_fault(
    seen_in="verl-project/verl 5070",
    cause="weight decay",
    evidence="configured differently: weight_decay of model.layers.0.input_layernorm.weight and 10 more is 0.01, not 0.0",
    first="parameter/model.layers.0.input_layernorm.weight",
)
def norms_and_biases_decayed(run: Planting) -> Plant:
    """Weight decay acts on norms and biases too, in one strategy only."""
    strategy = yield
    for group in strategy.optimizer.param_groups:
        group["weight_decay"] = run.config.weight_decay


@update_fault(
    seen_in="huggingface/accelerate 2926",
    cause="learning rate",
    evidence="configured differently: learning_rates is [0.000996], not [0.001]",
    step=2,
    first="parameter/model.embed_tokens.weight",
)
def scheduler_steps_once_per_process(run: Planting) -> Plant:
    """A decay of one in a thousand per step is applied once by every process."""
    strategy = yield

    def decay(_step: int) -> None:
        for group in strategy.optimizer.param_groups:
            group["lr"] *= 0.999**run.config.num_workers

    run.around(strategy, "update", after=decay)


@update_fault(
    seen_in="huggingface/accelerate 2926",
    cause="learning rate",
    evidence="configured differently: learning_rates is [0.002], not [0.001]",
    first="parameter/model.embed_tokens.weight",
)
def learning_rate_times_dp(run: Planting) -> Plant:
    """The learning rate is multiplied with the data-parallel size in one strategy only."""
    strategy = yield
    for group in strategy.optimizer.param_groups:
        group["lr"] *= run.config.dp_size


@update_fault(
    seen_in="verl-project/verl 5070",
    cause="betas",
    evidence="configured differently: betas is [0.9, 0.95], not [0.9, 0.999]",
    first="exp_avg_sq/model.embed_tokens.weight",
)
def other_beta(run: Planting) -> Plant:
    """The second moment decays with 0.95 instead of 0.999: another default in another library."""
    strategy = yield
    for group in strategy.optimizer.param_groups:
        group["betas"] = (group["betas"][0], 0.95)


@update_fault(
    seen_in="karpathy/build-nanogpt 30",
    cause="stale gradients",
    evidence="gradient/model.norm.weight, gradient/model.layers.1.mlp.down_proj.weight, gradient/model.layers.1.mlp.up_proj.weight and 23 more: the gradient of the step before is added; it was not zeroed",
    step=2,
    first="gradient/model.norm.weight",
    needs=("gradients",),
)
def gradients_not_zeroed(run: Planting) -> Plant:
    """zero_grad is missing: every step uses the sum of all gradients so far."""
    yield
    so_far: dict[str, torch.Tensor] = {}

    def add(_step: int, name: str, gradient: torch.Tensor) -> None:
        gradient.add_(so_far.get(name, 0))
        so_far[name] = gradient.clone()

    run.change_gradients(add)


@update_fault(
    seen_in="huggingface/accelerate 2624",
    cause="moments lost",
    evidence="exp_avg/model.embed_tokens.weight, exp_avg/model.layers.0.self_attn.q_proj.weight, exp_avg/model.layers.0.self_attn.q_proj.bias and 49 more: they are those of a first step; what they had accumulated is lost",
    step=2,
    first="exp_avg/model.embed_tokens.weight",
    needs=("torch_optimizer",),
)
def moments_lost_between_steps(run: Planting) -> Plant:
    """The moments start from zero at every step, as after a resume that loads the step count alone."""
    strategy = yield
    inner = run.handles.torch_optimizer()

    def forget(_step: int) -> None:
        for state in inner.state.values():
            state["exp_avg"].zero_()
            state["exp_avg_sq"].zero_()

    run.around(strategy, "update", before=forget)
