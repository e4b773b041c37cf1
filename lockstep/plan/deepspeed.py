"""DeepSpeed AutoTP + ZeRO, as it is known before DeepSpeed is imported."""

import argparse
import importlib.util
import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lockstep.ground import origin
from lockstep.ground.errors import UserError
from lockstep.ground.files import require_writable_folder
from lockstep.inputs import modules, shapes
from lockstep.plan import deepspeed_file, zero
from lockstep.plan.config import ORANGE, Config, Cut, Spec
from lockstep.plan.cuts import CONTIGUOUS


@dataclass(frozen=True)
class DeepSpeed(Spec):
    name: str = "deepspeed"
    label: str = "DeepSpeed AutoTP"
    color: str = ORANGE
    axes: tuple[str, ...] = ("dp", "cp", "tp")
    factory: str = "autotp_strategy:AutoTPStrategy"
    handles: str = "lockstep.faults.deepspeed_handles:AutoTPHandles"
    program: str = "train_deepspeed.py"
    options: type = zero.Options
    cuts: Mapping[str, Cut] = field(default_factory=lambda: {"cp": CONTIGUOUS}, hash=False)
    float32_biases_under_autocast: bool = True
    ranks_share_gpus: bool = False
    also_called: Mapping[str, str] = field(default_factory=lambda: {"cp_size": "sp_size"}, hash=False)
    file_option: str = "deepspeed_config"
    library: str = "deepspeed"
    # What DeepSpeed imports when it makes an engine. Muon alone, with torch's compiler, takes two seconds of a core.
    preloads: tuple[str, ...] = (
        "deepspeed.module_inject.auto_ep_layer",
        "deepspeed.runtime.zero.muon.muon_optimizer",
        "torch.utils.cpp_extension",
    )

    def require(self, config: Config, architecture: dict) -> None:
        if importlib.util.find_spec("deepspeed") is None:
            raise UserError(
                "train_deepspeed.py needs the package deepspeed, which is not installed; install requirements.txt"
            )
        zero.require(config)
        require_ulysses(config, architecture)
        if shapes.describe(architecture).frozen:
            raise UserError(
                f"--model_name {config.model_name}: it has frozen parameters, whose places in ZeRO's flat pieces are not read here; choose another "
                "strategy"
            )
        if config.has_own_optimizer:
            raise UserError(
                f"--optimizer {config.optimizer}: DeepSpeed steps flat pieces of many tensors, and adamw and sgd alone are known to take them; choose one"
            )
        told, untested = (
            deepspeed_file.resolved(config, shapes.width(architecture)),
            origin.difference("deepspeed"),
        )
        file = zero.of(config).deepspeed_config
        # The tested version is known to read what the flags ask for. To ask DeepSpeed takes seconds, for its import.
        if file is not None:
            deepspeed_file.require_readable(told, config.device, str(file.path), "correct it")
        elif untested:
            deepspeed_file.require_readable(told, config.device, untested, "install requirements.txt")
        path = zero.of(config).nvme_path
        if path is not None:
            _require_libaio()
            require_writable_folder(path, "--nvme_path", keep=not config.dry_run)

    def sharding(self, config: Config) -> dict[str, Any]:
        return zero.expected(config)

    def defaults(self, parsed: argparse.Namespace) -> dict[str, Any]:
        return deepspeed_file.defaults(parsed)

    def told(self, config: Config, architecture: dict) -> str:
        return deepspeed_file.text(config, architecture)


def require_ulysses(config: Config, architecture: dict) -> None:
    """Raise UserError for a model, or other options, with which DeepSpeed's sequence parallelism would not compute the same."""
    size = config.cp_size
    if size == 1:
        return
    if config.samples.further:
        raise UserError(
            f"--sp_size {size} --padding {config.padding} --documents {config.documents}: DeepSpeed's Ulysses gives attention no mask; leave them out"
        )
    if config.tp_size > 1:
        raise UserError(
            f"--sp_size {size} --tp_size {config.tp_size}: DeepSpeed has one or the other; add --tp_size 1"
        )
    if architecture["model_type"] not in modules.LIKE_LLAMA:
        raise UserError(
            f"--sp_size {size}: DeepSpeed's Ulysses needs a model that is built like Llama, and {config.model_name} is not; choose another model"
        )
    heads, kv_heads = architecture["num_attention_heads"], architecture["num_key_value_heads"]
    if heads % size or (kv_heads % size and size % kv_heads):
        raise UserError(
            f"--sp_size {size}: the {heads} heads and {kv_heads} key-value heads of {config.model_name} cannot be shared out; choose another size"
        )
    window = architecture.get("sliding_window")
    if window and window < config.seq_length:
        raise UserError(
            f"--sp_size {size}: {config.model_name} attends within a sliding window of {window}, which DeepSpeed's Ulysses ignores; "
            f"leave it out, or lower --seq_length to {window}"
        )


def _require_libaio() -> None:
    """Raise UserError unless a program can be linked with libaio, with which DeepSpeed reads and writes the disk."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    program = "#include <libaio.h>\nint main() { io_context_t context = 0; return io_setup(1, &context); }\n"
    command = [compiler or "c++", "-x", "c++", "-", "-o", os.devnull, "-laio"]
    try:
        is_linked = subprocess.run(command, input=program, text=True, capture_output=True).returncode == 0
    except OSError:
        is_linked = False
    if not is_linked:
        raise UserError(
            "offload to nvme needs libaio with its headers and a C++ compiler; install the package libaio-dev (Debian, Ubuntu) or libaio-devel "
            "(Fedora, RHEL), and g++"
        )
