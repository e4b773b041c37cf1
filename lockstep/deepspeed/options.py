"""The flags that only train_deepspeed.py has. lockstep/config.py makes them from this class."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lockstep.config import Config

WHERE = ("none", "cpu", "nvme")


@dataclass(frozen=True)
class Options:
    zero_stage: int = field(
        default=1,
        metadata={
            "help": "what is sharded over dp: 0 nothing, 1 optimizer state, 2 and gradients, 3 and weights",
            "type": int,
            "choices": range(4),
        },
    )
    offload_optimizer: str = field(
        default="none",
        metadata={"help": "where the optimizer state is kept (from stage 1 on)", "choices": WHERE},
    )
    offload_param: str = field(
        default="none", metadata={"help": "where the weights are kept (stage 3)", "choices": WHERE}
    )
    nvme_path: Path | None = field(
        default=None, metadata={"help": "folder for what is kept on nvme", "type": Path}
    )
    deepspeed_config: Path | None = field(
        default=None,
        metadata={
            "help": "DeepSpeed's JSON: \"auto\" takes the flag's value, any other value must agree with the flags",
            "type": Path,
        },
    )


def of(config: "Config") -> Options:
    return Options(**config.own)
