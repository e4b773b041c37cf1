"""Numbers kept or computed in fewer bits than configured."""

import functools
from typing import Any

import torch

from lockstep.faults.catalogue import fault
from lockstep.faults.planting import Plant, Planting

precision_fault = functools.partial(
    fault, bug_class="precision, optimizer", cause="precision", precisions=("fp32",)
)


@precision_fault(
    seen_in="Lightning-AI/lightning-thunder 725",
    evidence="configured differently: compute_dtype is ['torch.bfloat16'], not ['torch.float32']",
    first="forward/model.layers.0.self_attn.q_proj",
)
def autocast_in_one_strategy_only(run: Planting) -> Plant:
    """One strategy computes its products in bfloat16, the other in float32."""
    strategy = yield

    real = strategy.loss

    def under_autocast(*arguments: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return real(*arguments)

    run.patch(strategy, "loss", under_autocast)


@precision_fault(
    seen_in="huggingface/accelerate 2624",
    precisions=("fp32", "autocast"),
    evidence="every element of 26 parameters is a bfloat16 number",
    first="parameter/model.embed_tokens.weight",
    needs=("weights",),
)
def master_weights_in_bfloat16(run: Planting) -> Plant:
    """The weights are rounded to bfloat16 after every update, so small updates are lost."""
    strategy = yield

    def round_all(_step: int) -> None:
        with torch.no_grad():
            for _, tensor in run.handles.weights():
                tensor.copy_(tensor.bfloat16())

    run.around(strategy, "update", after=round_all)


@precision_fault(
    seen_in="huggingface/accelerate 3979",
    evidence="configured differently: reduction_dtype is ['torch.bfloat16'], not ['torch.float32']",
    first="gradient/model.norm.weight",
    needs=("reduce_in_bfloat16",),
)
def gradients_reduced_in_bfloat16(run: Planting) -> Plant:
    """The gradients travel between the data-parallel ranks in bfloat16 (a library's default)."""
    run.handles.reduce_in_bfloat16()
    yield


@precision_fault(
    seen_in="huggingface/accelerate 3979",
    evidence="every element of model.layers.0.input_layernorm's output is a bfloat16 number, in a float32 run",
    first="forward/model.layers.0.input_layernorm",
    named=True,
)
def norms_in_bfloat16(run: Planting) -> Plant:
    """The upcast to float32 inside the layers' norms has no effect: their output has bfloat16's precision."""
    strategy = yield

    def rounded(output: torch.Tensor) -> torch.Tensor:
        return output.bfloat16().to(output.dtype)

    for name, _ in strategy.model.named_modules():
        if name.endswith("layernorm"):
            run.change_output(name, rounded)
