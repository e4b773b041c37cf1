"""Distributed data parallelism: flags that only train_ddp.py has, which change speed or memory, and what a run with them must be."""

from dataclasses import dataclass
from typing import Any

from lockstep.ground.errors import UserError
from lockstep.ground.flags import flag
from lockstep.plan.config import BASELINE, Config, Spec

# --gradient_sync -> what happens to the gradients of a micro batch, and of the last one
SYNCS = {"last": ("none", "all"), "every": ("all", "all")}
TORCHS_BUCKET = 25  # MiB, torch's default


@dataclass(frozen=True)
class Options:
    static_graph: bool = flag(False, "tell DDP that the graph never changes")
    find_unused_parameters: bool = flag(False, "let DDP look for unused parameters in every step")
    gradient_as_bucket_view: bool = flag(
        True, "keep the gradients in DDP's buckets (default: true)", metavar="{true,false}"
    )
    bucket_cap_mb: float = flag(
        TORCHS_BUCKET,
        "size of a bucket of gradients in MiB, from the second step on; at 25 the first bucket has 1",
        low=2.0**-20,  # one byte
        high=2.0**20,
        metavar="MIB",
    )
    compress_gradients: str = flag(
        "none",
        "bf16: gradients are rounded to bfloat16 and summed in it; not comparable with other runs",
        choices=("none", "bf16"),
    )
    gradient_sync: str = flag(
        "last", "micro batches whose gradients are averaged over dp", choices=tuple(SYNCS)
    )


def of(config: Config) -> Options:
    return Options(**config.own)


def synced(config: Config, sync: tuple[str, str]) -> list[str]:
    """What happens to the gradients of each micro batch of a step. `sync` is (of all but the last, of the last)."""
    early, last = sync
    return [early] * (config.gradient_accumulation_steps - 1) + [last]


@dataclass(frozen=True)
class DDP(Spec):
    name: str = BASELINE
    label: str = "DDP"
    axes: tuple[str, ...] = ("dp",)
    factory: str = "ddp_strategy:DDPStrategy"
    handles: str = "lockstep.faults.torch_handles:DDPHandles"
    program: str = "train_ddp.py"
    options: type = Options
    whole_replicas: bool = True

    def require(self, config: Config, architecture: dict) -> None:
        own = of(config)
        if own.static_graph and own.gradient_sync == "last" and config.gradient_accumulation_steps > 1:
            raise UserError(
                f"--static_graph --gradient_accumulation_steps {config.gradient_accumulation_steps}: torch's static graph fails with micro "
                "batches that are not averaged (docs/findings.md); add --gradient_sync every"
            )

    def contract(self, config: Config) -> dict[str, Any]:
        return {"reduction_dtype": ["torch.bfloat16"]} if of(config).compress_gradients == "bf16" else {}

    def sharding(self, config: Config) -> dict[str, Any]:
        own = of(config)
        return {
            "replicas": config.dp_size,
            "static_graph": own.static_graph,
            "find_unused_parameters": own.find_unused_parameters,
            "gradient_as_bucket_view": own.gradient_as_bucket_view,
            "bucket_bytes": int(own.bucket_cap_mb * 2**20),
            "gradients_of_micro_batches": synced(config, SYNCS[own.gradient_sync]),
        }
