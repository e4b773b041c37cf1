"""The configuration: one frozen dataclass, and the only argument parser.

Nothing here imports torch, transformers or ray, so that a wrong command line is answered within seconds.
"""

import argparse
import contextlib
import math
import os
import re
from collections.abc import Callable, Collection
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, get_args

from lockstep import files, strategies
from lockstep.errors import UserError
from lockstep.inputs import architectures, texts, user_file
from lockstep.mesh import Mesh
from lockstep.resources import (
    device_elsewhere,
    require_one_process_or_ranks,
    resolve_device,
    resolve_mesh,
)
from lockstep.training import compiled, history, rates

if TYPE_CHECKING:
    import torch

Precision = Literal["fp32", "autocast", "mixed", "bf16"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
PARAM_DTYPES: dict[Precision, str] = {  # of the weights that a forward pass computes with
    "fp32": "float32",
    "autocast": "float32",
    "mixed": "bfloat16",
    "bf16": "bfloat16",
}
BETAS, EPS = (0.9, 0.999), 1e-8  # of AdamW, torch's defaults
PATHS = (
    "init_weights_path",
    "loss_output_dir",
    "storage_path",
    "capture_dir",
    "data_cache_dir",
)
# Flags that name places, or do not change what a run computes. They are not recorded.
PLACES = (
    *PATHS,
    "overwrite",
    "experiment_name",
    "dry_run",
    "control",  # it asks for another run
    "count_collectives",  # what it counts is recorded
    "group_norms",  # likewise
)
EPILOG = (
    "Environment: RAY_ADDRESS is the Ray cluster to join, as HOST:PORT (`ray start --head` prints it) or auto (unset: a Ray instance is "
    "started). RAY_AUTH_MODE is token or disabled (unset: a token is sent if the cluster asks for one). A built-in name takes precedence "
    "over a folder of that name."
)


@dataclass(frozen=True)
class Config:
    """What a run does. The defaults, which stand only here, suit a laptop.

    Fields without a default are resolved when a command line is parsed, from the strategy, the launcher and the machine.
    """

    strategy: str
    model_name: str = "tiny-qwen2"
    num_layers: int | None = None
    num_workers: int = field(kw_only=True)
    tp_size: int = field(kw_only=True)
    dp_size: int = field(kw_only=True)
    cp_size: int = 1
    pp_size: int = 1
    batch_size: int = 8
    seq_length: int = 128
    num_epochs: int = 1
    debug_steps: int = 100
    learning_rate: float = 1e-3
    lr_schedule: rates.Schedule = "constant"
    warmup_steps: int = 0
    schedule_steps: int = 0
    optimizer: str = "adamw"
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    ema_decay: float = 1.0
    gradient_accumulation_steps: int = 1
    activation_checkpointing: bool = False
    compile: compiled.Backend = "off"
    precision: Precision = "fp32"
    attn_impl: str = "sdpa"
    seed: int = 0
    init_seed: int | None = None
    dataset_name: str = texts.BUILT_IN_CORPUS
    data_cache_dir: Path = field(default_factory=files.cache_folder)
    init_weights_path: Path | None = None
    save_init_weights: bool = False
    pretrained: bool = False
    overwrite: bool = False
    control: bool = False
    noise_control: bool = False
    count_collectives: bool = False
    group_norms: bool = False
    held_out: int = 0
    own: dict[str, Any] = field(
        default_factory=dict
    )  # flags that only this strategy has, by name (its row's `options`)
    run_name: str | None = None
    loss_output_dir: Path = Path("runs/loss_curves")
    storage_path: Path = Path("runs/ray")
    experiment_name: str | None = None
    log_interval: int = 10
    capture_dir: Path | None = None
    capture_steps: int = 2
    device: str = "auto"
    backend: str = "auto"
    dry_run: bool = False

    @property
    def mesh(self) -> Mesh:
        return Mesh.of_options(vars(self))

    @property
    def row(self) -> strategies.Row:
        return strategies.recorded(self.strategy)

    @property
    def name(self) -> str:
        """The run's name in file names."""
        return self.run_name or self.row.name

    @property
    def capture_folder(self) -> Path:
        if self.capture_dir is None:
            raise ValueError("this run captures nothing")
        return self.capture_dir / self.name

    @property
    def has_own_optimizer(self) -> bool:
        """Whether --optimizer is not one of the built-in ones."""
        return self.optimizer not in OPTIMIZERS

    @property
    def label(self) -> str:
        return self.row.label_of(self.mesh, vars(self)) + (", control" if self.noise_control else "")

    @property
    def history_path(self) -> Path:
        return history.path_of(self.loss_output_dir, history.CONTROL if self.noise_control else self.name)

    @property
    def told_path(self) -> Path:
        """What the strategy's library was told, if it has a configuration of its own."""
        return self.history_path.with_name(f"told_{self.name}.json")

    @property
    def written_weights(self) -> Path | None:
        """The file that the initial weights are written to; None if they are not. Raises UserError if none is named."""
        if self.save_init_weights and self.init_weights_path is None:
            raise UserError("--save_init_weights needs --init_weights_path, the file to write")
        return self.init_weights_path if self.save_init_weights else None

    @property
    def weights_seed(self) -> int:
        """The seed of random initial weights."""
        return self.seed if self.init_seed is None else self.init_seed

    @property
    def parameter_dtype(self) -> "torch.dtype":
        import torch

        return torch.bfloat16 if self.precision == "bf16" else torch.float32

    def autocast(self, device: "torch.device") -> contextlib.AbstractContextManager[object]:
        """The context of a forward pass: bfloat16 autocast, or a null context."""
        import torch

        if self.precision != "autocast":
            return contextlib.nullcontext()
        return torch.autocast(device.type, dtype=torch.bfloat16)

    def of_control(self) -> "Config":
        """The control run of this run. It starts from the same weights, perturbed by one ulp; if this run saves weights, from those."""
        run = replace(self, save_init_weights=False, pretrained=False) if self.save_init_weights else self
        return replace(run, control=False, noise_control=True, capture_dir=None)

    def as_dict(self) -> dict[str, Any]:
        """The configuration as a run records it: the strategy by name, not by the path of a file."""
        content = {**asdict(self), "strategy": self.row.name}
        content["own"] = {
            key: getattr(value, "recorded", value)  # of what a flag read from a file
            for key, value in self.own.items()
            if not isinstance(value, Path)
        }
        return {key: str(value) if isinstance(value, Path) else value for key, value in content.items()}


def _number(
    kind: type[int] | type[float], low: float, *, open_low: bool = False, high: float = math.inf
) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not {'a whole number' if kind is int else 'a number'}"
            ) from None
        if not math.isfinite(value) or value < low or value > high or (open_low and value == low):
            least = f"{'above' if open_low else 'at least'} {low}"
            raise argparse.ArgumentTypeError(
                f"{text} is out of range; it must be {least}"
                + (f" and at most {high}" if high < math.inf else "")
            )
        return value

    return parse


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see {self.prog} --help")


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Adds the default to a flag's help, unless the help says it in words."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if "(default: " in (action.help or "") else super()._get_help_string(action)


OPTIMIZERS = (
    "adamw",
    "sgd",
)  # built in; any other --optimizer is a class of torch.optim or a function in a user's file
ALSO = {"model_name": "model"}  # other names of flags, in all strategies


def build_parser(strategy: str) -> argparse.ArgumentParser:
    """The parser of every strategy's script: one set of flags, one meaning."""
    row = strategies.row_of(strategy)
    parser = Parser(
        prog=row.program,
        allow_abbrev=False,
        formatter_class=_Help,
        epilog=EPILOG,
    )
    defaults = {one.name: None if one.default is MISSING else one.default for one in fields(Config)}
    positive, whole = _number(int, 1), _number(int, 0)
    amount, rate = _number(float, 0), _number(float, 0, open_low=True)

    def add(name: str, kind: Callable[[str], object], text: str, **options: Any) -> None:
        names = [f"--{each}" for each in (name, row.also_called.get(name), ALSO.get(name)) if each]
        parser.add_argument(*names, dest=name, type=kind, default=defaults[name], help=text, **options)

    built_in = ", ".join(architectures.BUILT_IN)
    add(
        "model_name",
        str,
        f"built-in model ({built_in}), folder or hub id of a causal language model of transformers, or path/to/file.py:FUNCTION that returns a module of your own",
    )
    add(
        "num_layers",
        lambda text: None if text == "all" else positive(text),
        "number of layers to keep, or all (default: all)",
    )
    add("num_workers", positive, "number of ranks (default: the product of the sizes of all axes)")
    add(
        "tp_size",
        positive,
        "tensor-parallel size (default: 2, or 1 for a strategy without tensor parallelism)",
    )
    add(
        "dp_size",
        positive,
        "data-parallel size (default: what --num_workers leaves to it, or 2 without --num_workers)",
    )
    add("cp_size", positive, "context-parallel size: ranks that share the positions of each sequence")
    add("pp_size", positive, "pipeline-parallel size: ranks that share the layers")
    add("batch_size", positive, "sequences per DP rank and micro batch")
    add("seq_length", positive, "tokens per sequence")
    add("num_epochs", positive, "passes over the corpus; used if --debug_steps is 0")
    add(
        "debug_steps",
        whole,
        "steps to train; the corpus is repeated if it is too short (0: train --num_epochs instead)",
    )
    add("learning_rate", rate, "learning rate, after the warm-up")
    add(
        "lr_schedule",
        str,
        "learning rate after the warm-up: constant, or falling to 0 along half a cosine until the last step",
        choices=rates.SCHEDULES,
    )
    add("warmup_steps", whole, "first steps in which the learning rate rises in equal parts")
    add(
        "schedule_steps", whole, "steps of the whole schedule, if the run stops earlier (0: those of the run)"
    )
    add(
        "optimizer",
        str,
        "adamw (fused), sgd (without momentum, not fused), a class of torch.optim with its defaults, or path/to/file.py:FUNCTION",
    )
    add("weight_decay", amount, "weight decay of matrices; norms and biases have none")
    add("max_grad_norm", amount, "clip the norm of the whole model's gradient to this (0: do not clip)")
    add(
        "ema_decay",
        _number(float, 0, open_low=True, high=1),
        "keep an exponential moving average of the weights, in float32: after each step, this times the average plus the rest times the weights "
        "(1: no average)",
    )
    add("gradient_accumulation_steps", positive, "micro batches per step; the gradient is their mean")
    parser.add_argument(
        "--activation_checkpointing",
        action="store_true",
        help="keep only the inputs of layers, and compute the layers again in the backward pass",
    )
    add(
        "compile",
        str,
        "torch.compile the forward pass of every layer with this backend; aot_eager needs no C++ compiler",
        choices=compiled.BACKENDS,
        nargs="?",
        const="inductor",
    )
    parser.add_argument(
        "--precision",
        choices=PRECISIONS,
        default=argparse.SUPPRESS,
        help="autocast: fp32 weights and state, bf16 compute by torch.autocast; mixed: the same with all weights cast to bf16 for computing, and "
        f"gradients reduced in fp32; bf16: everything in bf16 (default: {defaults['precision']})",
    )
    parser.add_argument("--autocast", action="store_true", help="the same as --precision autocast")
    parser.add_argument(
        "--param_dtype",
        choices=("float32", "bfloat16"),
        help="dtype that weights are cast to for computing; bfloat16 is the same as --precision mixed (default: the precision's)",
    )
    for option in row.own_options():
        parser.add_argument(f"--{option.name}", default=option.default, **option.metadata)
    add("attn_impl", str, "attention implementation of transformers", choices=("eager", "sdpa"))
    seed = _number(int, 0, high=2**32 - 1)
    add("seed", seed, "seed of the initial weights and of the order of the data")
    add("init_seed", seed, "seed of the initial weights, if they are to have another (default: --seed)")
    add(
        "dataset_name",
        str,
        "builtin, a .txt file, a folder of them, or a Hugging Face data set id[:config]",
    )
    add(
        "data_cache_dir",
        Path,
        "folder for the tokens of long texts (default: lockstep/ in $XDG_CACHE_HOME or ~/.cache)",
    )
    add(
        "init_weights_path",
        Path,
        "file of initial weights to start from: .safetensors, .safetensors.index.json or .pt (default: random weights)",
    )
    parser.add_argument(
        "--save_init_weights",
        action="store_true",
        help="write the initial weights to --init_weights_path first (train_ddp.py only)",
    )
    parser.add_argument(
        "--pretrained",
        action="store_true",
        help="start from the weights of --model_name, not from random ones",
    )
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="replace initial weights and captured steps of an earlier run",
    )
    parser.add_argument(
        "--control",
        action="store_true",
        help="train the control run (--noise_control) after this one, with the same workers (train_ddp.py only)",
    )
    parser.add_argument(
        "--count_collectives",
        action="store_true",
        help="count the collective operations of the last step, with torch's profiler, and record them in the history",
    )
    parser.add_argument(
        "--group_norms",
        action="store_true",
        help="record at every step the gradient norm of each layer, of the embedding and of the rest",
    )
    add(
        "held_out",
        whole,
        "sequences at the end of the corpus that are not trained on; the loss and next-token accuracy of the final weights on them are recorded",
    )
    parser.add_argument(
        "--noise_control",
        action="store_true",
        help="make the control run: start from weights perturbed by one ulp of the compute dtype and write loss_control.json. "
        "It shows how far rounding errors alone can move the loss (train_ddp.py only)",
    )
    add(
        "run_name",
        str,
        "name of the run in file names, so that runs of one strategy can share a folder (default: the strategy's name)",
    )
    add("loss_output_dir", Path, f"folder for loss_{row.name}.json")
    add("storage_path", Path, "folder for Ray Train's records of the run")
    add(
        "experiment_name",
        str,
        "new name for the run under --storage_path (default: strategy and time)",
    )
    add("log_interval", positive, "number of steps between printed losses")
    add(
        "capture_dir",
        Path,
        "folder for the full tensors of the first steps (default: none are written)",
    )
    add("capture_steps", positive, "number of steps to capture")
    add("device", str, "auto: GPUs if there is one per worker, else CPUs", choices=("auto", "cpu", "cuda"))
    add("backend", str, "auto: nccl on GPUs, gloo on CPUs", choices=("auto", "gloo", "nccl"))
    parser.add_argument(
        "--dry_run", action="store_true", help="print configuration, mesh and contract; train nothing"
    )
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # the deepspeed launcher passes it
    return parser


def parse_config(strategy: str, argv: list[str] | None = None, *, elsewhere: bool = False) -> Config:
    """Parse and check a command line. Raises UserError, before anything is started, for what cannot work.

    A run `elsewhere` is not held against this machine's cores and GPUs; auto is then a GPU for each worker.
    """
    parser, row = build_parser(strategy), strategies.row_of(strategy)
    parsed = parser.parse_args(argv)
    if row.defaults:
        parser.set_defaults(**strategies.load(row.defaults)(parsed))
        parsed = parser.parse_args(argv)
    options = vars(parsed)
    options.pop("local_rank")
    options["precision"] = _precision(
        options.get("precision"), options.pop("autocast"), options.pop("param_dtype")
    )
    if options["run_name"] is not None:
        _require_run_name(options["run_name"])
    if options["noise_control"] and (not row.is_baseline or options["save_init_weights"]):
        raise UserError(
            "--noise_control: works only in train_ddp.py, and without --save_init_weights; leave it out"
        )
    if options["control"] and (not row.is_baseline or options["noise_control"]):
        raise UserError("--control: only train_ddp.py trains the control run, after its own; leave it out")
    if options["pretrained"] and options["init_weights_path"] and not options["save_init_weights"]:
        raise UserError(
            "--pretrained and --init_weights_path both give the initial weights; leave one out, or add --save_init_weights"
        )
    options["own"] = {option.name: _placed(options.pop(option.name)) for option in row.own_options()}
    require_one_process_or_ranks()
    options.update(resolve_mesh(row, options))
    options.update(device_elsewhere(options) if elsewhere else resolve_device(row, options))
    options["data_cache_dir"] = options["data_cache_dir"] or files.cache_folder()
    for name in PATHS:
        options[name] = _placed(options[name])
    named = user_file.is_named(options["model_name"])
    options["model_name"] = (
        user_file.absolute(options["model_name"])
        if named
        else _absolute(options["model_name"], architectures.BUILT_IN)
    )
    if user_file.is_named(options["optimizer"]):
        options["optimizer"] = user_file.absolute(options["optimizer"])
    options["dataset_name"] = _absolute(options["dataset_name"], (texts.BUILT_IN_CORPUS,))
    return Config(strategy=row.place, **options)


def _precision(given: Precision | None, autocast: bool, param_dtype: str | None) -> Precision:
    """The precision that three flags name together. Raises UserError if two of them contradict each other."""
    if autocast and given not in (None, "autocast"):
        raise UserError(f"--autocast contradicts --precision {given}; give one of them")
    meant: Precision = given or (
        "autocast" if autocast else "mixed" if param_dtype == "bfloat16" else Config.precision
    )
    if param_dtype and PARAM_DTYPES[meant] != param_dtype:
        raise UserError(
            f"--param_dtype {param_dtype} contradicts {'--autocast' if autocast else f'--precision {meant}'}; leave it out"
        )
    return meant


def _require_run_name(name: str) -> None:
    taken = (history.CONTROL, "reference")
    if (
        not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}", name)
        or name in taken
        or name.startswith("replay_")
    ):
        raise UserError(
            f"--run_name {name}: must be letters, digits, _, . and -, and not {', '.join(taken)} or replay_...; choose another name"
        )


def _placed(value: Any) -> Any:
    """A path made absolute, because workers run in other folders; anything else as it is."""
    return value.expanduser().absolute() if isinstance(value, Path) else value


def _absolute(name: str, built_in: Collection[str]) -> str:
    """The absolute path of an existing file or folder; any other name, or a built-in one, unchanged."""
    path = Path(os.path.expanduser(name))
    try:
        return str(path.absolute()) if name and name not in built_in and path.exists() else name
    except (OSError, ValueError):  # not a possible file name
        return name
