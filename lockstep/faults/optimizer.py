"""Wrong updates from right gradients: norms and clipping, the optimizer, averages of weights (--ema_decay)."""

import functools

import torch
import torch.distributed as dist

from lockstep.faults.catalogue import WEIGHTS_IN_FP32, fault
from lockstep.faults.planting import Plant, Planting
from lockstep.training.optim import total_norm
from lockstep.training.torch_strategy import local

update_fault = functools.partial(fault, bug_class="precision, optimizer")


@update_fault(
    seen_in="verl-project/verl 5070",
    cause="weight decay",
    evidence="configured differently: weight_decay of model.layers.0.input_layernorm.weight and 10 more is 0.01, not 0.0",
    first="parameter/model.layers.0.input_layernorm.weight",
    precisions=WEIGHTS_IN_FP32,
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


AVERAGES = ("--ema_decay", "0.9")


def averages(what: str) -> tuple[str, str]:
    """Return the evidence that names all averages. With weights in bfloat16, those of norms stay as they are."""
    names = "model.embed_tokens.weight, model.layers.0.self_attn.q_proj.weight, model.layers.0.self_attn.q_proj.bias"
    in_fp32, in_bf16 = (
        f"the weights are right; the average of {names} and {more} more {what}" for more in (23, 18)
    )
    return in_fp32, in_bf16


average_fault = functools.partial(
    fault,
    bug_class="precision, optimizer",
    cause="weight average",
    first="average/model.embed_tokens.weight",
    arguments=AVERAGES,
    needs=("weight_average",),
)


@average_fault(
    seen_in="ostris/ai-toolkit 1034",
    evidence=averages("moved -0.1 of the way to the weights, as with a decay of 1.1; the decay is 0.9"),
)
def average_moves_away(run: Planting) -> Plant:
    """The sign of the step is wrong: the average moves away from the weights."""
    yield
    average = run.handles.weight_average()
    run.patch(average, "decay", 2 - average.decay)


@average_fault(
    seen_in="MultimediaTechLab/YOLO 97",
    evidence=averages("did not move; the decay is 0.9"),
)
def average_never_updated(run: Planting) -> Plant:
    """Nobody calls the update of the average, so it stays at the initial weights."""
    yield
    run.patch(run.handles.weight_average(), "update", lambda: None)


@average_fault(
    seen_in="BangLiu/QANet-PyTorch 4",
    evidence="the average of ... is wrong in step 1 alone, and later steps move it as they should: it began with other weights, or was overwritten once",
)
def average_of_earlier_weights(run: Planting) -> Plant:
    """The average is created before the model gets its initial weights, so it begins with those of another seed."""
    yield
    generator = torch.Generator().manual_seed(run.inputs.start.seed + 1)
    for average in run.handles.weight_average().averages.values():
        if average.ndim >= 2:
            shard = local(average)
            shard.copy_(0.02 * torch.randn(shard.shape, generator=generator))


@average_fault(
    seen_in="huggingface/diffusers 1864",
    evidence=averages("moved 0.9 of the way to the weights, as with a decay of 0.1; the decay is 0.9"),
    step=2,
)
def average_changes_its_decay(run: Planting) -> Plant:
    """A warm-up of the decay is written into the decay itself, so the next step starts from the warmed-up one."""
    yield
    average = run.handles.weight_average()

    def warm_up(_step: int) -> None:
        average.decay = 1 - average.decay

    run.around(average, "update", after=warm_up)


@average_fault(
    seen_in="SWivid/F5-TTS 631",
    evidence="the weights are right; before it moved to them, the average of ... moved 1 time to the weights from before the update",
    step=2,
    arguments=(*AVERAGES, "--gradient_accumulation_steps", "2"),
)
def average_updated_by_every_micro_batch(run: Planting) -> Plant:
    """The average is updated after every micro batch, and not after every step."""
    strategy = yield
    average = run.handles.weight_average()
    micro_batches = run.config.gradient_accumulation_steps

    def early(_step: int) -> None:
        for _ in range(micro_batches - 1):
            average.update()

    run.around(strategy, "forward_backward", after=early)


@average_fault(
    seen_in="pytorch/pytorch 117742",
    evidence="the weights are right; the average of model.embed_tokens.weight, model.layers.0.self_attn.q_proj.weight, model.layers.0.self_attn.k_proj.weight and 12 more did not move; the decay is 0.9",
)
def average_of_shards_is_lost(run: Planting) -> Plant:
    """What is written into sharded averages does not last: only whole tensors keep their update."""
    yield
    average = run.handles.weight_average()
    update = average.update

    def lost() -> None:
        kept = {name: value.detach().clone() for name, value in average.averages.items() if value.ndim >= 2}
        update()
        with torch.no_grad():
            for name, old in kept.items():
                average.averages[name].copy_(old)

    run.patch(average, "update", lost)
