"""Pipelines: what passes between stages, and what the stages have to do together."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch

from lockstep.faults.catalogue import WEIGHTS_IN_FP32, fault
from lockstep.faults.planting import Plant, Planting
from lockstep.plan.mesh import Mesh
from lockstep.training.torch_strategy import local

pp_fault = functools.partial(fault, bug_class="pipeline", axes=("pp",), needs=("pipeline",), mesh=Mesh(pp=2))


@pp_fault(
    seen_in="NVIDIA-NeMo/Speech 6958",
    cause="tied weights",
    evidence="the gradient of the tied weight has the embedding's contribution only, not the head's",
    first="gradient/model.embed_tokens.weight",
)
def tied_gradients_not_summed_over_stages(run: Planting) -> Plant:
    """The embedding has the gradient of the first stage, the head that of the last."""
    yield
    pipeline = run.handles.pipeline()
    run.patch(pipeline, "sum_tied", lambda: None)


@pp_fault(
    seen_in="PaddlePaddle/PaddleNLP 7772",
    cause="weights",
    evidence="ranks [1] hold another model.embed_tokens.weight than other ranks, with equal gradient and moments: it differed before the step",
    first="forward/lm_head",
    precisions=WEIGHTS_IN_FP32,
)
def tied_ends_start_apart(run: Planting) -> Plant:
    """The head's replica of the tied weights on the last stage is larger by one in a thousand."""
    yield
    if run.handles.pipeline().replica is not None:
        run.change_weights("lm_head.weight", lambda tensor: tensor.mul_(1.001))


@pp_fault(
    seen_in="pytorch/torchtitan 596",
    cause="clipping",
    evidence="the norm is # times that of the gradients: it is the norm of pp rank 0's layers alone",
    first="gradient norm",
    arguments=("--max_grad_norm", "0.5"),
)
def norm_of_one_stage(run: Planting) -> Plant:
    """Every stage clips by the norm of its own layers."""
    strategy = yield
    run.patch_during(strategy, "grad_norm", strategy, "pipeline", None)


@pp_fault(
    seen_in="pytorch/torchtitan 1733",
    cause="accumulation",
    evidence="in every gradient the micro batches have different weights (0.5, 1; 1 is right), the same on all DP ranks",
    first="gradient/model.norm.weight",
    arguments=("--gradient_accumulation_steps", "2"),
    flags=("--gradient_sync", "every"),
)
def all_gradients_scaled_at_every_step(run: Planting) -> Plant:
    """After each batch the schedule divides all gradients by its micro batches, those of earlier batches again."""
    strategy = yield
    pipeline = run.handles.pipeline()

    def scale_again(call: int) -> None:
        if call % 2 == 0:  # the second batch of a step
            for parameter in strategy.parameters:
                parameter.grad /= pipeline.micro

    run.around(pipeline, "step", before=scale_again)


@pp_fault(
    seen_in="pytorch/PiPPy 1052",
    cause="pipeline",
    evidence="in model.layers.#.input_layernorm's output, sample 1 has the values of sample 0; all else is right",
    first="forward/model.layers.1.input_layernorm",
)
def a_stage_reads_the_micro_batch_before(run: Planting) -> Plant:
    """The second stage works on what it was sent for the micro batch before."""
    yield
    pipeline = run.handles.pipeline()
    if pipeline.rank:
        stage = pipeline.stages[0]
        real = stage.forward
        kept: list[torch.Tensor] = []

        def late(x: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
            kept.append(x)
            return real(kept[-2:][0], *rest, **options)

        run.patch(stage, "forward", late)


@pp_fault(
    seen_in="NVIDIA/Megatron-LM 1304",
    cause="not computed",
    evidence="forward/model.layers.1.input_layernorm and 31 more tensors: the run has another model, or does not run all of it",
    first="forward/model.layers.1.input_layernorm",
)
def a_layer_left_out(run: Planting) -> Plant:
    """The split over stages leaves a layer out."""
    yield
    pipeline = run.handles.pipeline()
    if pipeline.rank:
        stage = pipeline.stages[0]
        real = stage.forward
        run.patch(stage, "numbers", [])

        def without_layers(x: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
            unused = sum(local(weight).sum() for layer in stage.layers for weight in layer.parameters())
            return real(x + 0 * unused, *rest, **options)

        run.patch(stage, "forward", without_layers)


@pp_fault(
    seen_in="huggingface/transformers 24381",
    cause="weights",
    evidence="the module computed with another model.layers.1.input_layernorm.weight: it is off by a relative 2.0e+00 after the step, and its moments are right; 8 more weights are off or differ between ranks",
    first="forward/model.layers.1.input_layernorm",
)
def a_stage_has_another_layers_weights(run: Planting) -> Plant:
    """The second stage was loaded with the weights of layer 0 for its layer 1 (here: its projections are negated)."""
    yield
    run.change_weights("model.layers.1.", torch.Tensor.neg_)


@pp_fault(
    seen_in="deepspeedai/DeepSpeed 5729",
    cause="data",
    evidence="the input ids are right, the labels are not",
    first="batch/labels",
)
def labels_of_the_micro_batch_before(run: Planting) -> Plant:
    """The last stage computes the loss of each micro batch with the labels of the one before."""
    yield
    pipeline = run.handles.pipeline()
    real = pipeline.step
    run.patch(pipeline, "step", lambda ids, labels, **further: real(ids, labels.roll(1, 0), **further))


@pp_fault(
    seen_in="deepspeedai/DeepSpeed 7985",
    cause="accumulation",
    evidence="the loss of sample 1 has no gradient: that of the logits is zero",
    first="backward/lm_head",
)
def last_micro_batch_dropped(run: Planting) -> Plant:
    """The loss of the last micro batch does not reach the gradients."""
    yield
    pipeline = run.handles.pipeline()
    for stage in pipeline.stages:
        if stage.head is not None:
            run.patch(stage, "forward", _without_every(pipeline.micro, stage.forward))


def _without_every(number: int, real: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return the function with every `number`-th result detached."""
    calls = itertools.count(1)

    def detached(*arguments: Any, **options: Any) -> torch.Tensor:
        loss = real(*arguments, **options)
        return loss.detach() + 0 * loss if next(calls) % number == 0 else loss

    return detached
