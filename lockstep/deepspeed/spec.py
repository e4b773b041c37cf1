"""DeepSpeed AutoTP + ZeRO, as it is known before DeepSpeed is imported."""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lockstep.config import ORANGE, Config, Cut, Spec
from lockstep.deepspeed import zero
from lockstep.training.cuts import CONTIGUOUS


@dataclass(frozen=True)
class DeepSpeed(Spec):
    name: str = "deepspeed"
    label: str = "DeepSpeed AutoTP"
    color: str = ORANGE
    axes: tuple[str, ...] = ("dp", "cp", "tp")
    factory: str = "autotp_strategy:AutoTPStrategy"
    handles: str = "lockstep.deepspeed.handles:AutoTPHandles"
    program: str = "train_deepspeed.py"
    options: type = zero.Options
    cuts: Mapping[str, Cut] = field(default_factory=lambda: {"cp": CONTIGUOUS}, hash=False)
    float32_biases_under_autocast: bool = True
    ranks_share_gpus: bool = False
    also_called: Mapping[str, str] = field(default_factory=lambda: {"cp_size": "sp_size"}, hash=False)
    file_option: str = "deepspeed_config"
    library: str = "deepspeed"

    def require(self, config: Config, architecture: dict) -> None:
        from lockstep.deepspeed import build

        build.require(config, architecture)

    def sharding(self, config: Config) -> dict[str, Any]:
        return zero.expected(config)

    def defaults(self, parsed: argparse.Namespace) -> dict[str, Any]:
        from lockstep.deepspeed import configuration

        return configuration.defaults(parsed)

    def told(self, config: Config, architecture: dict) -> str:
        from lockstep.deepspeed import configuration

        return configuration.text(config, architecture)

    def preload(self) -> None:
        from lockstep.deepspeed import build

        build.preload()
