"""FSDP2 + DTensor: flags that only train_fsdp.py has, which change speed or memory, and what a run with them must be."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lockstep.ground.errors import UserError
from lockstep.ground.flags import flag, number, true_or_false
from lockstep.plan import ddp
from lockstep.plan.config import BLUE, Config, Cut, Spec
from lockstep.plan.cuts import BALANCED, LAYERS, SCHEDULES

SYNCS = ddp.SYNCS | {"scatter": ("shards", "all")}


def _true_false_or_number(text: str) -> float:
    return true_or_false(text) if text in ("true", "false") else number(int, 2)(text)


@dataclass(frozen=True)
class Options:
    reshard_after_forward: bool | int = flag(
        False,
        "what is left of the gathered weights between forward and backward: false all of them, true this rank's shard, "
        "N a shard among N neighbours (default: false)",
        low=2,
        parse=_true_false_or_number,
        metavar="{true,false,N}",
    )
    dp_replicate: int = flag(
        1, "replicas along dp; each is sharded over dp_size / N ranks (HSDP)", low=1, metavar="N"
    )
    cpu_offload: bool = flag(
        False, "keep shards, gradients and optimizer state on the CPU (on a CPU: they are there already)"
    )
    prefetch: int = flag(
        0,
        "layers whose weights are gathered ahead, in forward and backward; 0: as torch does by itself",
        low=0,
        metavar="N",
    )
    gradient_sync: str = flag(
        "last",
        "micro batches whose gradients are averaged over dp; scatter: all within a replica, the last between replicas, too",
        choices=tuple(SYNCS),
    )
    sequence_parallel: bool = flag(
        False, "cut norms and residuals along the sequence over tp (Megatron-LM's sequence parallelism)"
    )
    pp_schedule: str = flag(
        "1f1b",
        "order in which the ranks of a pipeline work on their micro batches, as torch.distributed.pipelining has it",
        choices=tuple(SCHEDULES),
    )
    pp_microbatches: int = flag(
        0,
        "micro batches that a pipeline cuts each batch of --batch_size into; 0: one per sequence",
        low=0,
        metavar="N",
    )
    wrap: str = flag(
        "layer",
        "what is gathered and reduced together: each layer, or the whole model, as also where it has no list of layers",
        choices=("layer", "model"),
    )


def of(config: Config) -> Options:
    return Options(**config.own)


@dataclass(frozen=True)
class FSDP(Spec):
    name: str = "fsdp"
    label: str = "FSDP+DTensor"
    color: str = BLUE
    axes: tuple[str, ...] = ("pp", "dp", "cp", "tp")
    factory: str = "fsdp_strategy:FSDPStrategy"
    handles: str = "lockstep.faults.torch_handles:FSDPHandles"
    program: str = "train_fsdp.py"
    options: type = Options
    cuts: Mapping[str, Cut] = field(default_factory=lambda: {"cp": BALANCED, "pp": LAYERS}, hash=False)
    # gloo ends ranks that share a GPU with a segmentation fault: torch 2.11 on an H200
    ranks_share_gpus: bool = False

    def require(self, config: Config, architecture: dict) -> None:
        own = of(config)
        if config.pp_size == 1 and own.pp_microbatches:
            raise UserError(
                f"--pp_microbatches {own.pp_microbatches}: there is no pipeline; add --pp_size 2, or leave it out"
            )
        if config.dp_size % own.dp_replicate:
            raise UserError(
                f"--dp_replicate {own.dp_replicate} does not divide --dp_size {config.dp_size}; choose a divisor"
            )
        shards, neighbours = config.dp_size // own.dp_replicate, own.reshard_after_forward
        if not isinstance(neighbours, bool):
            if neighbours >= shards or shards % neighbours:
                raise UserError(
                    f"--reshard_after_forward {neighbours}: must divide the {shards} shards along dp and be less; choose another number, or true"
                )
            if config.tp_size > 1:
                raise UserError(
                    f"--reshard_after_forward {neighbours} --tp_size {config.tp_size}: FSDP cannot do so with tensor parallelism; choose true or false"
                )
        if own.sequence_parallel and config.tp_size == 1:
            raise UserError(
                "--sequence_parallel: it cuts the sequence over tp, which has one rank; add --tp_size 2, or leave it out"
            )
        if own.sequence_parallel and config.seq_length % (config.cp_size * config.tp_size):
            raise UserError(
                f"--sequence_parallel --seq_length {config.seq_length}: cannot be cut into {config.cp_size * config.tp_size} equal parts; "
                f"choose a multiple of {config.cp_size * config.tp_size}"
            )
        if own.sequence_parallel and config.attn_impl != "sdpa":
            raise UserError(
                f"--sequence_parallel --attn_impl {config.attn_impl}: transformers makes its mask for the positions of one rank; leave --attn_impl out"
            )
        if (
            own.sequence_parallel
            and (architecture.get("sliding_window") or config.seq_length) < config.seq_length
        ):
            raise UserError(
                f"--sequence_parallel: {config.model_name} attends within a sliding window of {architecture['sliding_window']}, and transformers "
                f"makes its mask for the positions of one rank; leave it out, or lower --seq_length"
            )
        if config.tp_size > 1 and config.activation_checkpointing and config.compile != "off":
            raise UserError(
                f"--tp_size {config.tp_size} --activation_checkpointing --compile: torch cannot trace a layer that is checkpointed and whose weights "
                "are cut; leave one of them out"
            )
        if own.prefetch and own.wrap == "model":
            raise UserError(
                f"--prefetch {own.prefetch} --wrap model: there is nothing to gather ahead; leave one out"
            )
        if own.gradient_sync == "scatter" and own.dp_replicate == 1:
            raise UserError(
                "--gradient_sync scatter: there is one replica; choose every, or add --dp_replicate"
            )

    def sharding(self, config: Config) -> dict[str, Any]:
        own = of(config)
        return {
            "replicas": [own.dp_replicate],
            "shards": [config.dp_size * config.cp_size // own.dp_replicate],
            "reshard_after_forward": [own.reshard_after_forward],
            "offloaded": [own.cpu_offload],
            "prefetch": own.prefetch,
            "positions_in_norms": [config.seq_length // config.cp_size // config.tp_size]
            if own.sequence_parallel
            else [],
            "gradients_of_micro_batches": ddp.synced(config, SYNCS[own.gradient_sync]),
            "wrap": own.wrap,
        }
