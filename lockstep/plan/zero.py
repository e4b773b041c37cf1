"""ZeRO stages and offload: the flags, what can be combined, and what a live engine must then be."""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.ground.errors import UserError, first_line
from lockstep.ground.files import parse_json, read_json
from lockstep.ground.flags import flag
from lockstep.plan.config import Config

# The class of the engine's optimizer by stage; at stage 0 it is torch's own.
CLASSES = ("", "DeepSpeedZeroOptimizer", "DeepSpeedZeroOptimizer", "DeepSpeedZeroOptimizer_Stage3")


WHERE = ("none", "cpu", "nvme")
OFFLOADED = ("offload_optimizer", "offload_param")


@dataclass(frozen=True)
class UserFile:
    """A user's configuration of DeepSpeed. It is read where the run is started: other machines need not have the file."""

    path: Path
    content: dict[str, Any]

    @classmethod
    def read(cls, text: str) -> "UserFile":
        """A file, or JSON itself. Raises ArgumentTypeError, which argparse expects, unless it is a JSON object."""
        try:
            if text.startswith("{"):
                return cls(Path("--deepspeed_config"), parse_json(text))
            content = read_json(Path(text).expanduser())
        except (UserError, ValueError) as error:
            raise argparse.ArgumentTypeError(first_line(error)) from error
        if not isinstance(content, dict):
            raise argparse.ArgumentTypeError(
                f"{text}: must be a JSON object, as DeepSpeed's configurations are"
            )
        return cls(Path(text), content)

    @property
    def recorded(self) -> dict[str, Any]:
        return self.content


@dataclass(frozen=True)
class Options:
    """The flags that only train_deepspeed.py has."""

    zero_stage: int = flag(
        1,
        "what is sharded over dp: 0 nothing, 1 optimizer state, 2 and gradients, 3 and weights",
        choices=range(4),
    )
    offload_optimizer: str = flag(
        "none", "where the optimizer state is kept (from stage 1 on)", choices=WHERE
    )
    offload_param: str = flag("none", "where the weights are kept (stage 3)", choices=WHERE)
    nvme_path: Path | None = flag(None, "folder for what is kept on nvme", recorded=False)
    deepspeed_config: UserFile | None = flag(
        None,
        "DeepSpeed's JSON, a file or the text itself: \"auto\" takes the flag's value, any other value must agree with the flags",
        parse=UserFile.read,
        recorded_as=dict[str, Any] | None,
    )


def of(config: Config) -> Options:
    return Options(**config.own)


def require(config: Config) -> None:
    """Raise UserError for a combination that DeepSpeed does not have or would silently change."""
    own = of(config)
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
    nvme = [name for name in OFFLOADED if getattr(own, name) == "nvme"]
    if nvme and stage < 3:
        raise UserError(f"--{nvme[0]} nvme: ZeRO-Infinity needs stage 3; add --zero_stage 3")
    if nvme and own.nvme_path is None:
        raise UserError(f"--{nvme[0]} nvme needs --nvme_path, a folder on the disk to use")
    if own.nvme_path is not None and not nvme:
        raise UserError(
            f"--nvme_path {own.nvme_path}: nothing is offloaded to nvme; add --offload_optimizer nvme, or leave it out"
        )


def expected(config: Config) -> dict[str, Any]:
    """What `observed` must find in the engine of such a run."""
    own = of(config)
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
    num_elements = sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in parameters)
    offloaded = getattr(optimizer, "offload_optimizer", False) or getattr(optimizer, "cpu_offload", False)
    weights, swaps = getattr(optimizer, "offload_param", False), getattr(optimizer, "swap_optimizer", False)
    weights_swap = getattr(optimizer, "params_in_nvme_and_cpu", False)
    return {
        "optimizer": type(optimizer).__name__,
        "optimizer_shards": round(num_elements / stepped),
        "gradients_sharded": all(sharded) or bool(getattr(optimizer, "partition_gradients", False)),
        "weights_sharded": all(sharded),
        "offload_optimizer": ("nvme" if swaps else "cpu") if offloaded else "none",
        "offload_param": ("nvme" if weights_swap else "cpu") if weights else "none",
        "collectives": collectives,
    }
