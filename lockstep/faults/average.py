"""Wrong averages of right weights (--ema_decay)."""

import functools

import torch

from lockstep.faults.catalogue import fault
from lockstep.faults.evidence import NO_SENTENCE
from lockstep.faults.planting import Plant, Planting
from lockstep.training.torch_strategy import local

AVERAGES = ("--ema_decay", "0.9")
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
    evidence="the weights are right; the average of model.embed_tokens.weight, model.layers.0.self_attn.q_proj.weight, model.layers.0.self_attn.q_proj.bias and 23 more moved -0.1 of the way to the weights, as with a decay of 1.1; the decay is 0.9",
)
def average_moves_away(run: Planting) -> Plant:
    """The sign of the step is wrong: the average moves away from the weights."""
    yield
    average = run.handles.weight_average()
    run.patch(average, "decay", 2 - average.decay)


@average_fault(
    seen_in="MultimediaTechLab/YOLO 97",
    evidence="the weights are right; the average of model.embed_tokens.weight, model.layers.0.self_attn.q_proj.weight, model.layers.0.self_attn.q_proj.bias and 23 more did not move; the decay is 0.9",
)
def average_never_updated(run: Planting) -> Plant:
    """Nobody calls the update of the average, so it stays at the initial weights."""
    yield
    run.patch(run.handles.weight_average(), "update", lambda: None)


@average_fault(seen_in="BangLiu/QANet-PyTorch 4", evidence=NO_SENTENCE)
def average_of_earlier_weights(run: Planting) -> Plant:
    """The average is created before the model gets its initial weights, so it begins with those of another seed."""
    yield
    generator = torch.Generator().manual_seed(run.config.weights_seed + 1)
    for average in run.handles.weight_average().averages.values():
        if average.ndim >= 2:
            shard = local(average)
            shard.copy_(0.02 * torch.randn(shard.shape, generator=generator))


@average_fault(
    seen_in="huggingface/diffusers 1864",
    evidence="the weights are right; the average of model.embed_tokens.weight, model.layers.0.self_attn.q_proj.weight, model.layers.0.self_attn.q_proj.bias and 23 more moved 0.9 of the way to the weights, as with a decay of 0.1; the decay is 0.9",
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
    evidence=NO_SENTENCE,
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
        kept = {name: one.detach().clone() for name, one in average.averages.items() if one.ndim >= 2}
        update()
        with torch.no_grad():
            for name, old in kept.items():
                average.averages[name].copy_(old)

    run.patch(average, "update", lost)
