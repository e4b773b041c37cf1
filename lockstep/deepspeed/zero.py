"""ZeRO stages and offload: what can be combined, what DeepSpeed is told, and what a live engine must then be."""

from typing import Any

from lockstep.config import Config
from lockstep.deepspeed import options
from lockstep.errors import UserError

# The class of the engine's optimizer by stage; at stage 0 it is torch's own.
CLASSES = ("", "DeepSpeedZeroOptimizer", "DeepSpeedZeroOptimizer", "DeepSpeedZeroOptimizer_Stage3")


def require(config: Config) -> None:
    """Raise UserError for a combination that DeepSpeed does not have or would silently change."""
    own = options.of(config)
    stage = own.zero_stage
    if config.ema_decay < 1:
        raise UserError(
            f"--ema_decay {config.ema_decay}: DeepSpeed keeps no average of the weights; leave it out, or choose another strategy"
        )
    if config.precision == "mixed":
        raise UserError(
            "--precision mixed: DeepSpeed would also accumulate gradients in bfloat16; choose fp32, autocast or bf16"
        )
    if stage == 0 and config.precision == "bf16":
        raise UserError(
            "--zero_stage 0 --precision bf16: DeepSpeed then keeps float32 copies of the weights; choose a stage from 1 to 3"
        )
    if config.precision == "bf16" and own.offload_optimizer != "none":
        raise UserError(
            f"--precision bf16 --offload_optimizer {own.offload_optimizer}: DeepSpeed offloads bfloat16 moments with its own optimizer alone; choose fp32 or autocast"
        )
    if stage == 0 and own.offload_optimizer != "none":
        raise UserError(
            f"--zero_stage 0 --offload_optimizer {own.offload_optimizer}: there is nothing sharded to offload; choose a stage from 1 to 3"
        )
    if stage < 3 and own.offload_param != "none":
        raise UserError(
            f"--zero_stage {stage} --offload_param {own.offload_param}: weights are offloaded at stage 3 alone; add --zero_stage 3"
        )
    nvme = [name for name in ("offload_optimizer", "offload_param") if getattr(own, name) == "nvme"]
    if nvme and stage < 3:
        raise UserError(f"--{nvme[0]} nvme: ZeRO-Infinity needs stage 3; add --zero_stage 3")
    if nvme and own.nvme_path is None:
        raise UserError(f"--{nvme[0]} nvme needs --nvme_path, a folder on the disk to use")
    if own.nvme_path is not None and not nvme:
        raise UserError(
            f"--nvme_path {own.nvme_path}: nothing is offloaded to nvme; add --offload_optimizer nvme, or leave it out"
        )


def section(config: Config) -> dict[str, Any]:
    """DeepSpeed's "zero_optimization"."""
    own = options.of(config)
    offload = {"offload_optimizer": own.offload_optimizer, "offload_param": own.offload_param}
    devices: dict[str, dict[str, str]] = {
        name: {"device": to} for name, to in offload.items() if to != "none"
    }
    for where in devices.values():
        if where["device"] == "nvme":
            where["nvme_path"] = str(own.nvme_path)
    return {"stage": own.zero_stage, **devices}


def expected(config: Config) -> dict[str, Any]:
    """What `observed` must find in the engine of such a run."""
    own = options.of(config)
    stage = own.zero_stage
    return {
        "optimizer": CLASSES[stage] or ("AdamW" if config.optimizer == "adamw" else "SGD"),
        "optimizer_shards": config.dp_size * config.cp_size if stage else 1,
        "gradients_sharded": stage >= 2,
        "weights_sharded": stage == 3,
        "offload_optimizer": own.offload_optimizer,
        "offload_param": own.offload_param,
        "collectives": config.backend,
    }


def observed(engine: Any, stepped: int, collectives: str) -> dict[str, Any]:
    """What the live engine shards and offloads: `stepped` is the number of elements that this rank's optimizer steps.

    `collectives` is what it communicates with.
    """
    parameters, optimizer = list(engine.module.parameters()), engine.optimizer
    sharded = [hasattr(parameter, "ds_id") for parameter in parameters]
    whole = sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in parameters)
    offloaded = getattr(optimizer, "offload_optimizer", False) or getattr(optimizer, "cpu_offload", False)
    weights, swaps = getattr(optimizer, "offload_param", False), getattr(optimizer, "swap_optimizer", False)
    weights_swap = getattr(optimizer, "params_in_nvme_and_cpu", False)
    return {
        "optimizer": type(optimizer).__name__,
        "optimizer_shards": round(whole / stepped),
        "gradients_sharded": all(sharded) or bool(getattr(optimizer, "partition_gradients", False)),
        "weights_sharded": all(sharded),
        "offload_optimizer": ("nvme" if swaps else "cpu") if offloaded else "none",
        "offload_param": ("nvme" if weights_swap else "cpu") if weights else "none",
        "collectives": collectives,
    }
