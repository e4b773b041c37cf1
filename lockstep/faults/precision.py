"""Numbers kept or computed in fewer bits than configured."""

from typing import Any

import torch

from lockstep.faults.catalogue import fault
from lockstep.faults.planting import Plant, Planting

CLASS = "precision, optimizer"
FP32 = ("fp32",)


@fault(
    seen_in="Lightning-AI/lightning-thunder 725",
    bug_class=CLASS,
    cause="precision",
    evidence="configured differently: compute_dtype is ['torch.bfloat16'], not ['torch.float32']",
    first="forward/model.layers.0.self_attn.q_proj",
    precisions=FP32,
)
def autocast_in_one_strategy_only(run: Planting) -> Plant:
    """One strategy computes its products in bfloat16, the other in float32."""
    strategy = yield

    real = strategy.loss

    def under_autocast(*arguments: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return real(*arguments)

    run.patch(strategy, "loss", under_autocast)


@fault(
    seen_in="huggingface/accelerate 2624",
    bug_class=CLASS,
    cause="precision",
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


@fault(
    seen_in="huggingface/accelerate 3979",
    bug_class=CLASS,
    cause="precision",
    evidence="configured differently: reduction_dtype is ['torch.bfloat16'], not ['torch.float32']",
    first="gradient/model.norm.weight",
    precisions=FP32,
    needs=("reduce_in_bfloat16",),
)
def gradients_reduced_in_bfloat16(run: Planting) -> Plant:
    """The gradients travel between the data-parallel ranks in bfloat16 (a library's default)."""
    run.handles.reduce_in_bfloat16()
    yield


@fault(
    seen_in="huggingface/accelerate 3979",
    bug_class=CLASS,
    cause="precision",
    evidence="every element of model.layers.0.input_layernorm's output is a bfloat16 number, in a float32 run",
    first="forward/model.layers.0.input_layernorm",
    precisions=FP32,
    named=True,
)
def norms_in_bfloat16(run: Planting) -> Plant:
    """The upcast to float32 inside the layers' norms has no effect: their output has bfloat16's precision."""
    strategy = yield

    def rounded(_module: torch.nn.Module, _inputs: object, output: torch.Tensor) -> torch.Tensor:
        return output.bfloat16().to(output.dtype)

    for name, module in strategy.model.named_modules():
        if name.endswith("layernorm"):
            module.register_forward_hook(run.recorded(f"the output of {name}", rounded))
