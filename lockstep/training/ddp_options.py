"""The flags that only train_ddp.py has: they change speed or memory. Nothing here imports torch."""

import argparse
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lockstep.errors import UserError

if TYPE_CHECKING:
    from lockstep.config import Config

# --gradient_sync -> what happens to the gradients of a micro batch, and of the last one
SYNCS = {"last": ("none", "all"), "every": ("all", "all")}
TORCHS_BUCKET = 25  # MiB


def true_or_false(text: str) -> bool:
    if text not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return text == "true"


def size_in_mib(text: str) -> float:
    """A number above 0. DDP counts a bucket in whole bytes."""
    try:
        size = float(text)
    except ValueError:
        size = 0.0
    if not 1 / 2**20 <= size <= 2**20:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of MiB from one byte to 1048576")
    return size


@dataclass(frozen=True)
class Options:
    static_graph: bool = field(
        default=False,
        metadata={"help": "tell DDP that the graph never changes", "action": "store_true"},
    )
    find_unused_parameters: bool = field(
        default=False,
        metadata={"help": "let DDP look for unused parameters in every step", "action": "store_true"},
    )
    gradient_as_bucket_view: bool = field(
        default=True,
        metadata={
            "help": "keep the gradients in DDP's buckets (default: true)",
            "type": true_or_false,
            "metavar": "{true,false}",
        },
    )
    bucket_cap_mb: float = field(
        default=TORCHS_BUCKET,
        metadata={
            "help": "size of a bucket of gradients in MiB, from the second step on; at 25 the first bucket has 1",
            "type": size_in_mib,
            "metavar": "MIB",
        },
    )
    compress_gradients: str = field(
        default="none",
        metadata={
            "help": "bf16: gradients are rounded to bfloat16 and summed in it; not comparable with other runs",
            "choices": ("none", "bf16"),
        },
    )
    gradient_sync: str = field(
        default="last",
        metadata={"help": "micro batches whose gradients are averaged over dp", "choices": tuple(SYNCS)},
    )


def of(config: "Config") -> Options:
    return Options(**config.own)


def require(config: "Config", architecture: dict) -> None:
    """Raise UserError for options that DDP cannot honour together."""
    own = of(config)
    if own.static_graph and own.gradient_sync == "last" and config.gradient_accumulation_steps > 1:
        raise UserError(
            f"--static_graph --gradient_accumulation_steps {config.gradient_accumulation_steps}: torch's static graph fails with micro "
            "batches that are not averaged (docs/findings.md); add --gradient_sync every"
        )


def synced(config: "Config") -> list[str]:
    """What happens to the gradients of each micro batch of a step."""
    early, last = SYNCS[of(config).gradient_sync]
    return [early] * (config.gradient_accumulation_steps - 1) + [last]


def contract(config: "Config") -> dict[str, Any]:
    """The entries of the contract in which these options differ from what all strategies do."""
    return {"reduction_dtype": ["torch.bfloat16"]} if of(config).compress_gradients == "bf16" else {}


def expected(config: "Config") -> dict[str, Any]:
    """What `DDPStrategy.sharding` must find in the live module."""
    own = of(config)
    return {
        "replicas": config.dp_size,
        "static_graph": own.static_graph,
        "find_unused_parameters": own.find_unused_parameters,
        "gradient_as_bucket_view": own.gradient_as_bucket_view,
        "bucket_bytes": int(own.bucket_cap_mb * 2**20),
        "gradients_of_micro_batches": synced(config),
    }
