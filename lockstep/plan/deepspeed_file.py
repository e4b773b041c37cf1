"""DeepSpeed's configuration: what the flags ask for, and a user's own file (--deepspeed_config) held against it.

In the file, "auto" takes the flag's value, as with Hugging Face's Trainer. ZeRO's stage and offload may be set in the file alone. Every
other value that a flag sets must be the flag's. What no flag sets goes to DeepSpeed as it stands, which must know it.
"""

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from lockstep.ground.errors import LIBRARY_REFUSES, UserError, printable
from lockstep.inputs import shapes
from lockstep.plan import zero
from lockstep.plan.config import BETAS, EPS, Config

AUTO = "auto"
# Place in the file -> the flag that an error names
FLAGS = {
    "train_batch_size": "--batch_size, --gradient_accumulation_steps and --dp_size",
    "train_micro_batch_size_per_gpu": "--batch_size",
    "gradient_accumulation_steps": "--gradient_accumulation_steps",
    "gradient_clipping": "--max_grad_norm",
    "zero_optimization.stage": "--zero_stage",
    "zero_optimization.offload_optimizer.device": "--offload_optimizer",
    "zero_optimization.offload_param.device": "--offload_param",
    "zero_optimization.offload_optimizer.nvme_path": "--nvme_path",
    "zero_optimization.offload_param.nvme_path": "--nvme_path",
    "bf16.enabled": "--precision",
    "bf16.bf16_master_weights_and_grads": "--precision",
    "bf16.bf16_optimizer_states": "--precision",
    "torch_autocast.enabled": "--precision",
    "communication_data_type": "--precision",
    "seq_parallel_communication_data_type": "--precision",
    "data_types.grad_accum_dtype": "--precision",
    "tensor_parallel.autotp_size": "--tp_size",
    "optimizer.type": "--optimizer",
    "optimizer.params.lr": "--learning_rate",
    "optimizer.params.weight_decay": "--weight_decay",
}
# The strategy has a default for this place, and computes the same with another value.
OWN_CHOICE = "tensor_parallel.vocab_parallel_lm_head"
BF16_WITHOUT_MASTER = ("bf16_master_weights_and_grads", "bf16_optimizer_states")
# Place in the file -> why it is refused
REFUSED = {
    "scheduler": "Lockstep sets the learning rate; leave the section out, and give --lr_schedule and --warmup_steps",
    "amp": "Lockstep has --precision fp32, autocast and bf16; leave the section out",
    "zero_optimization.cpu_offload": "write offload_optimizer with a device in its place",
    "zero_optimization.cpu_offload_param": "write offload_param with a device in its place",
}
# Keys at the top level that DeepSpeed reads and no flag sets. DeepSpeed ignores keys that it does not know.
FURTHER = frozenset((
    "activation_checkpointing", "aio", "autotuning", "checkpoint", "comms_logger", "compile", "csv_monitor", "dataloader_drop_last",
    "disable_allgather", "disable_python_gc", "dump_state", "flops_profiler", "gradient_allreduce_op", "gradient_predivide_factor",
    "log_level", "memory_breakdown", "prescale_gradients", "seq_parallel_communication_data_type", "steps_per_print", "tensorboard",
    "timers", "wall_clock_breakdown", "wandb",
))  # fmt: skip


def of_flags(config: Config) -> dict[str, Any]:
    """The configuration that the flags alone ask for. Where a value differs from DeepSpeed's default, a comment says why."""
    own = zero.of(config)
    bf16 = config.precision == "bf16"
    return {
        "train_micro_batch_size_per_gpu": config.batch_size,
        "gradient_accumulation_steps": config.gradient_accumulation_steps,
        "zero_optimization": of_zero(own),
        "zero_allow_untested_optimizer": True,  # torch's SGD is not on DeepSpeed's list
        # All strategies step torch's optimizer, offloaded or not
        "zero_force_ds_cpu_optimizer": False,
        # the default is 1.0, not off; without ZeRO the strategy clips (autotp_strategy.py)
        "gradient_clipping": config.max_grad_norm if own.zero_stage else 0.0,
        "communication_data_type": "bf16" if bf16 else "fp32",
        # what an engine with sequence parallelism takes instead
        **(
            {"seq_parallel_communication_data_type": "bf16" if bf16 else "fp32"} if config.cp_size > 1 else {}
        ),
        "torch_autocast": {
            "enabled": config.precision == "autocast",
            "dtype": "bfloat16",
            # The default reduces the gradients of nn.Linear in bfloat16
            "lower_precision_safe_modules": [],
        },
        # no float32 master copy: "bf16" means the same as in DDP and FSDP. Earlier versions know "enabled" alone
        "bf16": {"enabled": bf16, **(dict.fromkeys(BF16_WITHOUT_MASTER, True) if bf16 else {})},
        # embedding and head are sharded over the vocabulary and the loss computed on the shards, as in FSDP
        "tensor_parallel": {
            "autotp_size": config.tp_size,
            **({"vocab_parallel_lm_head": True} if config.tp_size > 1 else {}),
        },
    }


def of_zero(own: zero.Options) -> dict[str, Any]:
    """DeepSpeed's "zero_optimization"."""
    section: dict[str, Any] = {"stage": own.zero_stage}
    for name in zero.OFFLOADED:
        device = getattr(own, name)
        if device != "none":
            section[name] = {"device": device}
        if device == "nvme":
            section[name]["nvme_path"] = str(own.nvme_path)
    return section


def _known(config: Config) -> dict[str, Any]:
    """The values that a file must have, in the places that it has: what the flags ask for, and what follows from that.

    DeepSpeed is not told the latter a second time.
    """
    told = of_flags(config)
    bf16, section = config.precision == "bf16", told["zero_optimization"]
    adamw = {"betas": list(BETAS), "eps": EPS} if config.optimizer == "adamw" else {}
    return {
        **told,
        "train_batch_size": config.batch_size * config.gradient_accumulation_steps * config.dp_size,
        "gradient_clipping": config.max_grad_norm,
        "fp16": {"enabled": False},
        # Otherwise step() reduces the gradients, which is too late to read them before the update
        "managed_gradient_accumulation": True,
        "data_types": {"grad_accum_dtype": told["communication_data_type"]},
        "bf16": {"enabled": bf16, **dict.fromkeys(BF16_WITHOUT_MASTER, bf16)},
        "tensor_parallel": {"autotp_size": config.tp_size, "vocab_parallel_lm_head": config.tp_size > 1},
        "zero_optimization": {
            "stage": section["stage"],
            "compute_grad_norm": True,  # histories have the norm
            "legacy_stage1": False,  # DeepSpeed no longer has it
            "offload_optimizer": section.get("offload_optimizer", {"device": "none"}),
            "offload_param": section.get("offload_param", {"device": "none"}),
        },
        "optimizer": {
            "type": "AdamW" if config.optimizer == "adamw" else "SGD",
            "params": {"lr": config.learning_rate, "weight_decay": config.weight_decay, **adamw},
        },
    }


def resolved(config: Config, hidden_size: int) -> dict[str, Any]:
    """What DeepSpeed is given: what the flags ask for, and what else a user's file has. Raises UserError if the two contradict."""
    told, file = of_flags(config), zero.of(config).deepspeed_config
    if file is None:
        return told
    square = hidden_size * hidden_size
    # What "auto" means for sizes that depend on the model, as in transformers.integrations.deepspeed
    sizes = {
        "zero_optimization.reduce_bucket_size": square,
        "zero_optimization.stage3_prefetch_bucket_size": int(0.9 * square),
        "zero_optimization.stage3_param_persistence_threshold": 10 * hidden_size,
    }
    problem = next(_fill(told, file.content, _known(config), sizes), "")
    bf16 = file.content.get("bf16", {})
    if not problem and bf16.get("enabled") is True and not bf16.keys() >= set(BF16_WITHOUT_MASTER):
        problem = (
            "bf16.enabled alone keeps float32 master weights, and --precision bf16 keeps none; "
            f'write "{AUTO}", or set {" and ".join(BF16_WITHOUT_MASTER)} too'
        )
    if problem:
        raise UserError(f"{file.path}: {problem}")
    return told


def _fill(
    told: dict[str, Any], found: dict[str, Any], known: dict[str, Any], sizes: dict[str, int], above: str = ""
) -> Iterator[str]:
    """Add to a section what a file has in it and no flag sets. Yield what is wrong with the file, a message each.

    `told`, `found` and `known` are the same section of what DeepSpeed is given, of the file, and of what the file must agree with
    (`_known`). `sizes` are what "auto" means, by place. `above` is the place of the section, with a dot at its end.
    """
    for key, value in found.items():
        name, required = above + key, known.get(key)
        shown = f"{name} is {json.dumps(value)}"
        if name in REFUSED:
            yield f"{name}: {REFUSED[name]}"
        elif not above and key not in {*known, *FURTHER}:
            yield f"{name} is no key of DeepSpeed's, which would ignore it; correct it"
        elif isinstance(required, dict) and not isinstance(value, dict):
            yield f"{shown}, it must be an object; correct it"
        elif isinstance(value, dict) and (required is None or isinstance(required, dict)):
            section = told.setdefault(key, {})
            yield from _fill(section, value, required or {}, sizes, f"{name}.")
            if not section:
                del told[key]
        elif value == AUTO and name in sizes:
            told[key] = sizes[name]
        elif name == OWN_CHOICE and isinstance(value, bool):
            told[key] = value
        elif required is not None:
            if key == "nvme_path" and value != AUTO:
                value = str(Path(str(value)).expanduser().absolute())
            # As in JSON, true is not 1.
            if value != AUTO and (value != required or isinstance(value, bool) != isinstance(required, bool)):
                set_by = FLAGS.get(name, "in every run")
                yield f'{shown}, and must be {json.dumps(required)} ({set_by}); write "{AUTO}", or make the two agree'
        elif value == AUTO:
            yield f"{shown}, and no flag gives it a value; write one"
        elif above.startswith("optimizer."):
            yield f"{name}: Lockstep gives DeepSpeed its own optimizer; leave it out"
        else:
            told[key] = value


def defaults(options: argparse.Namespace) -> dict[str, Any]:
    """The defaults that the file gives to flags: ZeRO's stage and offload."""
    file = options.deepspeed_config
    if file is None:
        return {}
    given: dict[str, Any] = {}
    for flag, place, choices in (
        ("zero_stage", "zero_optimization.stage", range(4)),
        ("offload_optimizer", "zero_optimization.offload_optimizer.device", zero.WHERE),
        ("offload_param", "zero_optimization.offload_param.device", zero.WHERE),
    ):
        value = _at(file.content, place, AUTO)
        if value == AUTO:
            continue
        # 2.0 and true are equal to numbers of the range, too
        if value not in choices or type(value) is not type(choices[0]):
            raise UserError(f"{file.path}: {place} must be one of {', '.join(map(str, choices))}; correct it")
        given[flag] = value
        path = _at(file.content, f"zero_optimization.{flag}.nvme_path", AUTO)
        if value == "nvme" and path != AUTO:
            given["nvme_path"] = Path(str(path))
    return given


def _at(content: Any, place: str, default: Any) -> Any:
    """The value in a place of a configuration, such as "timers.throughput"; `default` if there is none."""
    for key in place.split("."):
        content = content.get(key, default) if isinstance(content, dict) else default
    return content


def text(config: Config, architecture: dict) -> str:
    """What DeepSpeed is given, as JSON. It is written beside the history."""
    return json.dumps(resolved(config, shapes.width(architecture)), indent=2) + "\n"


def _classes() -> dict[str, Any]:
    """Place of a section -> DeepSpeed's class of it, a pydantic model."""
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.compile.config import CompileConfig
    from deepspeed.monitor.config import CSVConfig, TensorBoardConfig, WandbConfig
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.utils.config import DeepSpeedThroughputTimerConfig

    return {
        "bf16": DeepSpeedBF16Config,
        "comms_logger": CommsLoggerConfig,
        "compile": CompileConfig,
        "csv_monitor": CSVConfig,
        "fp16": DeepSpeedFP16Config,
        "tensor_parallel": TPTrainingConfig,
        "tensorboard": TensorBoardConfig,
        "timers.throughput": DeepSpeedThroughputTimerConfig,
        "wandb": WandbConfig,
        "zero_optimization": DeepSpeedZeroConfig,
    }


def require_readable(told: dict[str, Any], device: str, where: str, remedy: str) -> None:
    """Raise UserError for the first unknown key or impossible value of the sections in `_classes`, or for an unknown preset.

    `where` and `remedy` are for the error. Imports DeepSpeed.
    """
    if device == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"  # otherwise DeepSpeed looks for a GPU, and says so
    for place, section_class in _classes().items():
        try:
            section_class.model_validate(_at(told, place, {}))
        except ValidationError as error:
            first = error.errors()[0]
            name = ".".join(map(str, (place, *first["loc"])))
            reason = printable(f"{json.dumps(first['input'])}: {first['msg']}", 300)
            problem = f"{LIBRARY_REFUSES}: {name} is {reason}"
            if first["type"] == "extra_forbidden":
                problem = f"{name} is no key of DeepSpeed's"
            raise UserError(f"{where}: {problem}; {remedy}") from error
    preset = told["tensor_parallel"].get("preset_model")
    if preset is not None:
        from deepspeed.module_inject.autotp_config import AutoTPPresets

        # DeepSpeed ignores an unknown preset without a word (docs/findings.md)
        if AutoTPPresets.get_preset(preset) is None:
            problem = f"tensor_parallel.preset_model {json.dumps(preset)} is no preset of DeepSpeed's"
            raise UserError(f"{where}: {problem}; {remedy}")
