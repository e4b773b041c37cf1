"""DeepSpeed's configuration: what the flags ask for, and a user's own file (--deepspeed_config) held against it.

In the file, "auto" takes the flag's value, as with Hugging Face's Trainer. ZeRO's stage and offload may be set in the file alone. Every
other value that a flag sets must be the flag's. What no flag sets goes to DeepSpeed as it stands.
"""

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from lockstep.config import BETAS, EPS, Config
from lockstep.deepspeed import options as flags
from lockstep.deepspeed import zero
from lockstep.errors import LIBRARY_REFUSES, UserError, printable
from lockstep.inputs import shapes

AUTO = "auto"
# flag -> where the file may set it; the command line may repeat it
OF_THE_FILE = {
    "zero_stage": ("zero_optimization", "stage"),
    "offload_optimizer": ("zero_optimization", "offload_optimizer", "device"),
    "offload_param": ("zero_optimization", "offload_param", "device"),
}
# place in the file -> the flag that an error names
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
# The strategy has a default, and computes the same with another value.
OWN_CHOICE = {("tensor_parallel", "vocab_parallel_lm_head")}
BF16_WITHOUT_MASTER = ("bf16_master_weights_and_grads", "bf16_optimizer_states")
REFUSED = {  # place, and all below it -> why
    (
        "scheduler",
    ): "Lockstep sets the learning rate; leave the section out, and give --lr_schedule and --warmup_steps",
    ("zero_optimization", "cpu_offload"): "write offload_optimizer with a device in its place",
    ("zero_optimization", "cpu_offload_param"): "write offload_param with a device in its place",
    ("amp",): "Lockstep has --precision fp32, autocast and bf16; leave the section out",
    (
        "zero_optimization",
        "aio",
    ): "DeepSpeed knows the section at the top level of the file alone; move it there",
}
# DeepSpeed reads these, and no others, at the top level; it ignores what it does not know
TOP_LEVEL = frozenset((
    "activation_checkpointing", "aio", "amp", "autotuning", "bf16", "checkpoint", "comms_logger", "communication_data_type",
    "compile", "csv_monitor", "data_types", "dataloader_drop_last", "disable_allgather", "disable_python_gc", "dump_state",
    "flops_profiler", "fp16",
    "gradient_accumulation_steps", "gradient_allreduce_op", "gradient_clipping", "gradient_predivide_factor", "log_level",
    "managed_gradient_accumulation", "memory_breakdown", "optimizer", "prescale_gradients", "scheduler",
    "seq_parallel_communication_data_type", "steps_per_print", "tensor_parallel", "tensorboard", "timers", "torch_autocast",
    "train_batch_size", "train_micro_batch_size_per_gpu", "wall_clock_breakdown", "wandb", "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer", "zero_optimization",
))  # fmt: skip
# It ignores the name of a preset that it does not have, too (docs/findings.md).
PRESETS = frozenset(("bloom", "chatglm", "deepseek_v2", "llama", "mixtral", "phi3", "qwen2"))
# The files under studies/deepspeed: each is a stage and where things are kept; the flags fill in the rest.
SHIPPED = {
    "zero1": {"stage": 1},
    "zero2": {"stage": 2},
    "zero3": {"stage": 3},
    "zero_offload": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "zero_infinity": {
        "stage": 3,
        "offload_optimizer": {"device": "nvme", "nvme_path": AUTO},
        "offload_param": {"device": "nvme", "nvme_path": AUTO},
    },
}


def of_flags(config: Config) -> dict[str, Any]:
    """What the flags alone ask for. Each value that differs from DeepSpeed's default has its reason."""
    own = flags.of(config)
    bf16 = config.precision == "bf16"
    return {
        "train_micro_batch_size_per_gpu": config.batch_size,
        "gradient_accumulation_steps": config.gradient_accumulation_steps,
        "zero_optimization": zero.section(config),
        "zero_allow_untested_optimizer": True,  # torch's SGD is not on DeepSpeed's list
        "zero_force_ds_cpu_optimizer": False,  # all strategies step torch's optimizer, offloaded or not
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
            "lower_precision_safe_modules": [],  # the default reduces the gradients of nn.Linear in bfloat16
        },
        "bf16": {  # no float32 master copy: "bf16" means the same as in DDP and FSDP
            "enabled": bf16,
            **dict.fromkeys(BF16_WITHOUT_MASTER, bf16),
        },
        # "true": embedding and head are sharded over the vocabulary and the loss computed on the shards, as in FSDP
        "tensor_parallel": {
            "autotp_size": config.tp_size,
            "vocab_parallel_lm_head": config.tp_size > 1,
        },
    }


def resolved(config: Config, hidden_size: int) -> dict[str, Any]:
    """What DeepSpeed is given: the flags', and what else a user's file has. Raises UserError if the two contradict each other."""
    return without_defaults(_with_the_file(config, hidden_size))


def without_defaults(told: dict[str, Any]) -> dict[str, Any]:
    """The same without keys that are false, as by default, and that earlier versions of DeepSpeed refuse."""
    off = {("tensor_parallel", "vocab_parallel_lm_head"), *(("bf16", key) for key in BF16_WITHOUT_MASTER)}
    return {
        section: {
            key: value for key, value in content.items() if value is not False or (section, key) not in off
        }
        if isinstance(content, dict)
        else content
        for section, content in told.items()
    }


def _with_the_file(config: Config, hidden_size: int) -> dict[str, Any]:
    own = flags.of(config)
    ours = of_flags(config)
    if own.deepspeed_config is None:
        return ours
    file, found = own.deepspeed_config.path, own.deepspeed_config.content
    for section, value in found.items():
        if section not in TOP_LEVEL:
            raise UserError(f"{file}: {section} is no key of DeepSpeed's, which would ignore it; correct it")
        if isinstance(ours.get(section), dict) and not isinstance(value, dict):
            raise UserError(f"{file}: {section} is {json.dumps(value)}, it must be an object; correct it")
    bf16 = found.get("bf16", {})
    if (
        config.precision == "bf16"
        and bf16.get("enabled") is True
        and None in map(bf16.get, BF16_WITHOUT_MASTER)
    ):
        raise UserError(
            f"{file}: bf16.enabled alone keeps float32 master weights, and --precision bf16 keeps none; "
            f'write "{AUTO}", or set {" and ".join(BF16_WITHOUT_MASTER)} too'
        )
    known = {**_leaves(ours), **_leaves(_derived(config))}
    sizes = _leaves(_bucket_sizes(hidden_size))
    for place, value in _leaves(found).items():
        name = ".".join(place)
        if any(
            other[: len(place)] == place or place[: len(other)] == other for other in known if other != place
        ):
            if value == {}:
                continue
            raise UserError(
                f"{file}: {name} is {json.dumps(value)}, which DeepSpeed cannot read there; correct it"
            )
        for refused, why in REFUSED.items():
            if place[: len(refused)] == refused:
                raise UserError(f"{file}: {'.'.join(refused)}: {why}")
        if place == ("tensor_parallel", "preset_model") and str(value).lower() not in PRESETS:
            raise UserError(
                f"{file}: {name} {json.dumps(value)} is no preset of DeepSpeed's, which would ignore it; choose from {', '.join(sorted(PRESETS))}"
            )
        if place in OWN_CHOICE and isinstance(value, bool):
            _set(ours, place, value)
        elif place in known:
            if value != AUTO and not _same(name, value, known[place]):
                flag = FLAGS.get(name)
                remedy = f'change one of the two, or write "{AUTO}"' if flag else "leave it out"
                asked = f"{flag or 'Lockstep'} {'ask' if flag and ' and ' in flag else 'asks'} for {json.dumps(known[place])}"
                raise UserError(f"{file}: {name} is {json.dumps(value)}, but {asked}; {remedy}")
        elif value == AUTO and place in sizes:
            _set(ours, place, sizes[place])
        elif value == AUTO:
            raise UserError(f'{file}: {name} is "{AUTO}", and no flag gives it a value; write one')
        elif place[0] != "optimizer":
            _set(ours, place, value)
        else:
            raise UserError(f"{file}: {name}: Lockstep gives DeepSpeed its own optimizer; leave it out")
    return ours


def shipped(name: str, config: Config) -> str:
    """The text of studies/deepspeed/NAME.json: everything that a flag sets is "auto", so it works with any number of ranks.

    `config` is any of this strategy.
    """
    told = of_flags(config)
    for place in _leaves(told):
        if place[0] != "zero_optimization" and (".".join(place) in FLAGS or place in OWN_CHOICE):
            _set(told, place, AUTO)
    content = {"train_batch_size": AUTO, **told, "zero_optimization": SHIPPED[name]}
    return json.dumps(content, indent=2) + "\n"


def _derived(config: Config) -> dict[str, Any]:
    """What a file may say that follows from the flags and is not given to DeepSpeed a second time."""
    own = flags.of(config)
    adamw = {"betas": list(BETAS), "eps": EPS} if config.optimizer == "adamw" else {}
    return {
        "train_batch_size": config.batch_size * config.gradient_accumulation_steps * config.dp_size,
        "gradient_clipping": config.max_grad_norm,
        "fp16": {"enabled": False},
        "managed_gradient_accumulation": True,  # otherwise step() reduces the gradients, too late to read them before
        "data_types": {"grad_accum_dtype": "bf16" if config.precision == "bf16" else "fp32"},
        "zero_optimization": {
            "compute_grad_norm": True,  # histories have the norm
            "legacy_stage1": False,  # DeepSpeed has it no more
            "offload_optimizer": {"device": own.offload_optimizer},
            "offload_param": {"device": own.offload_param},
        },
        "optimizer": {
            "type": "AdamW" if config.optimizer == "adamw" else "SGD",
            "params": {"lr": config.learning_rate, "weight_decay": config.weight_decay, **adamw},
        },
    }


def _bucket_sizes(hidden_size: int) -> dict[str, Any]:
    """What "auto" means for sizes that depend on the model, as in transformers.integrations.deepspeed."""
    square = hidden_size * hidden_size
    return {
        "zero_optimization": {
            "reduce_bucket_size": square,
            "stage3_prefetch_bucket_size": int(0.9 * square),
            "stage3_param_persistence_threshold": 10 * hidden_size,
        }
    }


def _same(name: str, value: Any, known: Any) -> bool:
    if name.endswith("nvme_path") and isinstance(value, str):
        return Path(value).expanduser().absolute() == Path(known)
    return value == known and isinstance(value, bool) == isinstance(known, bool)


def defaults(options: argparse.Namespace) -> dict[str, Any]:
    """The defaults that the file gives to flags: ZeRO's stage and offload."""
    if options.deepspeed_config is None:
        return {}
    file = options.deepspeed_config.path
    leaves = _leaves(options.deepspeed_config.content)
    given = {flag: leaves[place] for flag, place in OF_THE_FILE.items() if leaves.get(place, AUTO) != AUTO}
    if given.get("zero_stage", 1) not in range(4) or type(given.get("zero_stage", 1)) is not int:
        raise UserError(f"{file}: zero_optimization.stage must be 0, 1, 2 or 3")
    for flag in ("offload_optimizer", "offload_param"):
        if given.get(flag, "none") not in ("none", "cpu", "nvme"):
            raise UserError(f"{file}: zero_optimization.{flag}.device must be none, cpu or nvme")
        place = leaves.get(("zero_optimization", flag, "nvme_path"), AUTO)
        if given.get(flag) == "nvme" and place != AUTO:
            given["nvme_path"] = Path(str(place))
    return given


def text(config: Config, architecture: dict) -> str:
    """What DeepSpeed is given, as JSON. It is written beside the history. Raises UserError for what DeepSpeed would refuse in a user's file."""
    told, own = resolved(config, shapes.width(architecture)), flags.of(config)
    if own.deepspeed_config is not None:
        _require_readable(own.deepspeed_config.path, told, config)
    return json.dumps(told, indent=2) + "\n"


def _classes() -> dict[tuple[str, ...], Any]:
    """Place of a section -> DeepSpeed's class of it, a pydantic model."""
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.compile.config import CompileConfig
    from deepspeed.monitor.config import CSVConfig, TensorBoardConfig, WandbConfig
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.utils.config import DeepSpeedThroughputTimerConfig

    return {
        ("bf16",): DeepSpeedBF16Config,
        ("comms_logger",): CommsLoggerConfig,
        ("compile",): CompileConfig,
        ("csv_monitor",): CSVConfig,
        ("fp16",): DeepSpeedFP16Config,
        ("tensor_parallel",): TPTrainingConfig,
        ("tensorboard",): TensorBoardConfig,
        ("timers", "throughput"): DeepSpeedThroughputTimerConfig,
        ("wandb",): WandbConfig,
        ("zero_optimization",): DeepSpeedZeroConfig,
    }


def _require_readable(file: Path, told: dict[str, Any], config: Config) -> None:
    """Raise UserError for the first unknown key or impossible value of the sections in `_classes`. Imports DeepSpeed."""
    if config.device == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"  # or DeepSpeed looks for a GPU, and says so
    for place, model in _classes().items():
        section: Any = told
        for key in place:
            section = section.get(key, {}) if isinstance(section, dict) else {}
        try:
            model.model_validate(section)
        except ValidationError as error:
            first = error.errors()[0]
            name = ".".join(map(str, (*place, *first["loc"])))
            if first["type"] == "extra_forbidden":
                raise UserError(f"{file}: {name} is no key of DeepSpeed's; correct it") from error
            said = printable(f"{json.dumps(first['input'])}: {first['msg']}", 300)
            raise UserError(f"{file}: {LIBRARY_REFUSES}: {name} is {said}; correct it") from error


def _leaves(content: dict[str, Any], above: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    """Every value that is not an object, by its place."""
    return dict(_each_leaf(content, above))


def _each_leaf(content: dict[str, Any], above: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in content.items():
        if isinstance(value, dict) and value:
            yield from _each_leaf(value, (*above, key))
        else:
            yield (*above, key), value


def _set(content: dict[str, Any], place: tuple[str, ...], value: object) -> None:
    *above, last = place
    for key in above:
        content = content.setdefault(key, {})
    content[last] = value
