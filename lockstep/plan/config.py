"""What a run does: its flags, each a field, and what is known about its strategy. Nothing here imports torch."""

import argparse
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

from lockstep.ground import flags, user_file
from lockstep.ground.flags import flag, number
from lockstep.inputs import architectures, texts
from lockstep.inputs.initial_weights import Start
from lockstep.inputs.samples import Samples
from lockstep.plan import compiled, rates
from lockstep.plan.mesh import Mesh

if TYPE_CHECKING:
    import torch

Precision = Literal["fp32", "autocast", "mixed", "bf16"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
# The precisions in which tensors have a tolerance
JUDGED: tuple[Precision, ...] = ("fp32", "autocast", "bf16")
PARAM_DTYPES: dict[Precision, str] = {  # of the weights that a forward pass computes with
    "fp32": "float32",
    "autocast": "float32",
    "mixed": "bfloat16",
    "bf16": "bfloat16",
}
# Built in; any other --optimizer is a class of torch.optim or a function in a user's file
OPTIMIZERS = ("adamw", "sgd")
BETAS, EPS = (0.9, 0.999), 1e-8  # of AdamW, torch's defaults
# The name of the run that shows how far rounding errors alone can move the loss
CONTROL = "control"
# Names that no other run may have, and how those of replays begin
TAKEN_NAMES = (CONTROL, "reference")
REPLAY = "replay_"


def is_taken(name: str) -> bool:
    """Whether only Lockstep itself may give a run this name."""
    return name in TAKEN_NAMES or name.startswith(REPLAY)


BASELINE = "ddp"  # what the others are held against; it writes the initial weights
# The colours of figures are those of Okabe and Ito, which colour-blind people tell apart. Vermilion shows a tolerance, or what was missed.
BLUE, ORANGE, VERMILION = "#0072B2", "#E69F00", "#D55E00"
TORCH_HANDLES = "lockstep.faults.torch_handles:TorchHandles"
TRACKERS = ("tensorboard", "wandb", "mlflow")  # --report_to, each the name of a package
# Flag of all strategies that a single one of the compared runs may have -> the value that means off
PER_RUN = {"activation_checkpointing": False, "compile": "off"}


def history_file(folder: Path, run: str) -> Path:
    """The path of the history of a run; the control run's is CONTROL."""
    return folder / f"loss_{run}.json"


def sequences_per_step(options: Mapping[str, Any]) -> int:
    """The number of sequences in the global batch, from a configuration, live or recorded."""
    return options["dp_size"] * options["batch_size"] * options["gradient_accumulation_steps"]


def tokens_per_step(options: Mapping[str, Any]) -> int:
    return sequences_per_step(options) * options["seq_length"]


class Cut(Protocol):
    """How an axis divides what is inside of a sample or of the model, such as positions or layers."""

    def require(self, config: "Config", architecture: dict) -> None:
        """Raise UserError for a run that the axis cannot divide."""

    def expected(self, config: "Config", architecture: dict) -> Any:
        """What the contract must say of the axis; the strategy reads the same back from its live objects."""


@dataclass(frozen=True)
class NoOptions:
    """The flags of a strategy that has none of its own."""


@dataclass(frozen=True)
class Spec:
    """What is known about a strategy before torch is imported. No other file compares a strategy's name.

    A strategy derives its own class and overrides what differs. Two fields are text, so that nothing slow is imported: `factory`, the
    strategy itself, and `handles`, what planted faults take hold of; each "module:NAME" or "/path/to/file.py:NAME".
    """

    name: str = ""  # on the command line, in file names
    label: str = ""  # to people
    color: str = "black"  # in figures
    axes: tuple[str, ...] = ("dp", "tp")  # the mesh axes that it can use
    factory: str = ""  # empty for a recorded strategy whose file is gone
    handles: str = TORCH_HANDLES
    program: str = "python -m lockstep.train"  # what starts it
    # A dataclass of `lockstep.ground.flags.flag`: flags beyond those that all strategies have
    options: type = NoOptions
    # mesh axis -> how it divides the work
    cuts: Mapping[str, Cut] = field(default_factory=dict, hash=False)
    whole_replicas: bool = False  # every rank holds all weights, gradients and moments
    # Under autocast with tensor parallelism, a float32 bias is added to a bfloat16 product, and the sum is not rounded again. This is
    # by design and no reason to refuse a comparison (docs/findings.md).
    float32_biases_under_autocast: bool = False
    ranks_share_gpus: bool = True  # over gloo, several ranks may use one GPU
    # Flag of all strategies -> what its library calls it, which is accepted as a flag, too
    also_called: Mapping[str, str] = field(default_factory=dict, hash=False)
    # The option that takes its library's own configuration, a file or JSON itself
    file_option: str = ""
    # The package beside torch that it runs on; histories and dumps record its version
    library: str = ""
    # Modules that a process imports before it forks ranks for CPUs
    preloads: tuple[str, ...] = ()

    def require(self, config: "Config", architecture: dict) -> None:
        """Raise UserError for options that the strategy cannot honour, alone or together, or if something that it needs is missing."""

    def sharding(self, config: "Config") -> dict[str, Any]:
        """What must be sharded, and how gradients are reduced, as the contract says it; empty if the strategy does not read that back."""
        return {}

    def contract(self, config: "Config") -> dict[str, Any]:
        """The entries of the contract that its options make differ from those of all strategies."""
        return {}

    def defaults(self, parsed: argparse.Namespace) -> dict[str, Any]:
        """The defaults that a file among the parsed flags gives to others."""
        return {}

    def told(self, config: "Config", architecture: dict) -> str:
        """What its library is told, as text for people; empty if it has no configuration of its own."""
        return ""

    @property
    def is_baseline(self) -> bool:
        return self.name == BASELINE

    @property
    def place(self) -> str:
        """Its name on a command line, valid in any folder."""
        return self.factory if user_file.is_named(self.factory) else self.name

    def label_of(self, mesh: Mesh, config: Mapping[str, Any]) -> str:
        """What a run is called in reports: the strategy, its mesh, and those of its options that are not at their defaults.

        `config` is a configuration as a run has it, or as it records it. Paths are left out, because they are not recorded.
        """
        options = config["own"]
        defaults = {option.name: option.default for option in fields(self.options)}
        changed = {name: value for name, value in options.items() if value != defaults.get(name)}
        changed |= {name: config[name] for name, off in PER_RUN.items() if config[name] != off}
        shown = [
            f"{name}={str(value).lower()}"
            if isinstance(value, (int, float, str)) and value is not True
            else name
            for name, value in changed.items()
            if not isinstance(value, Path)
        ]
        return f"{self.label} ({', '.join([mesh.label, *shown])})"

    def largest(self, mesh: Mesh) -> Mesh:
        """The given mesh without the axes that the strategy cannot use."""
        return Mesh(**{axis: size for axis, size in mesh.sizes.items() if axis in self.axes})


def _layers(text: str) -> float | None:
    return None if text == "all" else number(int, 1)(text)


def _trackers(text: str) -> tuple[str, ...]:
    names = () if text == "none" else tuple(text.split(","))
    unknown = next((name for name in names if name not in TRACKERS), None)
    if unknown is not None:
        raise argparse.ArgumentTypeError(
            f"there is no tracker {unknown!r}; choose from {', '.join(TRACKERS)}"
        )
    return tuple(dict.fromkeys(names))


@dataclass(frozen=True)
class Config:
    """What a run does. The defaults, which stand only here, suit a laptop.

    Fields without a default are resolved when a command line is parsed, from the strategy, the launcher and the machine.
    """

    spec: Spec
    model_name: str = flag(
        "tiny-qwen2",
        f"built-in model ({', '.join(architectures.BUILT_IN)}), folder or hub id of a causal language model of transformers, or "
        "path/to/file.py:FUNCTION that returns a module of your own",
        also="model",
    )
    num_layers: int | None = flag(
        None, "number of layers to keep, or all (default: all)", low=1, parse=_layers
    )
    num_workers: int = flag(help="number of ranks (default: the product of the sizes of all axes)", low=1)
    tp_size: int = flag(
        help="tensor-parallel size (default: 2, or 1 for a strategy without tensor parallelism)", low=1
    )
    dp_size: int = flag(
        help="data-parallel size (default: what --num_workers leaves to it, or 2 without --num_workers)",
        low=1,
    )
    cp_size: int = flag(1, "context-parallel size: ranks that share the positions of each sequence", low=1)
    pp_size: int = flag(1, "pipeline-parallel size: ranks that share the layers", low=1)
    batch_size: int = flag(8, "sequences per DP rank and micro batch", low=1)
    seq_length: int = flag(128, "tokens per sequence", low=1, same="losses")
    labels: Literal["all", "completion"] = flag(
        "all",
        "tokens that are predicted; completion: those after a prompt of drawn length, up to three quarters of each sequence. The loss is "
        "the mean over all labels of the global batch",
        same="losses",
    )
    padding: Literal["none", "left", "right"] = flag(
        "none",
        "side on which samples of drawn length, from a quarter of each sequence on, are padded; the model is given an attention mask",
        same="losses",
    )
    documents: Literal["joined", "apart"] = flag(
        "joined",
        "apart: each sequence holds several documents of drawn length, whose positions begin at 0, and which do not see each other",
        same="losses",
    )
    num_epochs: int = flag(1, "passes over the corpus; used if --debug_steps is 0", low=1)
    debug_steps: int = flag(
        100,
        "steps to train; the corpus is repeated if it is too short (0: train --num_epochs instead)",
        low=0,
    )
    learning_rate: float = flag(1e-3, "learning rate, after the warm-up", above=0, same="losses")
    lr_schedule: rates.Schedule = flag(
        "constant",
        "learning rate after the warm-up: constant, or falling to 0 along half a cosine until the last step",
        same="losses",
    )
    warmup_steps: int = flag(
        0, "first steps in which the learning rate rises in equal parts", low=0, same="losses"
    )
    schedule_steps: int = flag(
        0, "steps of the whole schedule, if the run stops earlier (0: those of the run)", low=0, same="losses"
    )
    optimizer: str = flag(
        "adamw",
        "adamw (fused), sgd (without momentum, not fused), a class of torch.optim with its defaults, or path/to/file.py:FUNCTION",
        same="losses",
    )
    weight_decay: float = flag(
        0.01, "weight decay of matrices; norms and biases have none", low=0, same="losses"
    )
    max_grad_norm: float = flag(
        1.0, "clip the norm of the whole model's gradient to this (0: do not clip)", low=0, same="losses"
    )
    ema_decay: float = flag(
        1.0,
        "keep an exponential moving average of the weights, in float32: after each step, this times the average plus the rest times the "
        "weights (1: no average)",
        above=0,
        high=1,
        same="tensors",
    )
    gradient_accumulation_steps: int = flag(
        1, "micro batches per step; the gradient is their mean", low=1, same="losses"
    )
    activation_checkpointing: bool = flag(
        False, "keep only the inputs of layers, and compute the layers again in the backward pass"
    )
    compile: compiled.Backend = flag(
        "off",
        "torch.compile the forward pass of every layer with this backend; aot_eager needs no C++ compiler",
        const="inductor",
    )
    precision: Precision = flag(
        "fp32",
        "autocast: fp32 weights and state, bf16 compute by torch.autocast; mixed: the same with all weights cast to bf16 for computing, "
        "and gradients reduced in fp32; bf16: everything in bf16 (default: fp32)",
        same="losses",
    )
    # Flags that only this strategy has, by name: those of its Options, such as lockstep/plan/ddp.py's.
    own: dict[str, Any] = field(default_factory=dict)
    attn_impl: Literal["eager", "sdpa"] = flag(
        "sdpa", "attention implementation of transformers", same="tensors"
    )
    seed: int = flag(
        0, "seed of the initial weights and of the order of the data", low=0, high=2**32 - 1, same="tensors"
    )
    init_seed: int | None = flag(
        None,
        "seed of the initial weights, if they are to have another (default: --seed)",
        low=0,
        high=2**32 - 1,
    )
    dataset_name: str = flag(
        texts.BUILT_IN_CORPUS,
        "builtin, a .txt file, a folder of them, or a Hugging Face data set id[:config]",
    )
    data_cache_dir: Path | None = flag(
        None,
        "folder for the tokens of long texts (default: lockstep/ in $XDG_CACHE_HOME or ~/.cache)",
        recorded=False,
    )
    init_weights_path: Path | None = flag(
        None,
        "file of initial weights to start from: .safetensors, .safetensors.index.json or .pt (default: random weights)",
        recorded=False,
    )
    save_init_weights: bool = flag(
        False, "write the initial weights to --init_weights_path first (train_ddp.py only)"
    )
    pretrained: bool = flag(False, "start from the weights of --model_name, not from random ones")
    overwrite: bool = flag(
        False, "replace initial weights and captured steps of an earlier run", recorded=False
    )
    control: bool = flag(
        False,
        "train the control run (--noise_control) after this one, with the same workers (train_ddp.py only)",
        recorded=False,
    )
    count_collectives: bool = flag(
        False,
        "count the collective operations of the last step, with torch's profiler, and record them in the history",
        recorded=False,
    )
    profile: int = flag(
        0,
        "profile so many steps, after the first and the captured ones: a trace of each rank in --loss_output_dir, and a line that says "
        "where a step's time goes (0: none)",
        low=0,
        recorded=False,
    )
    group_norms: bool = flag(
        False,
        "record at every step the gradient norm of each layer, of the embedding and of the rest",
        recorded=False,
    )
    held_out: int = flag(
        0,
        "sequences at the end of the corpus that are not trained on; the loss and next-token accuracy of the final weights on them are "
        "recorded",
        low=0,
    )
    noise_control: bool = flag(
        False,
        "make the control run: start from weights perturbed by one ulp of the compute dtype and write loss_control.json. "
        "It shows how far rounding errors alone can move the loss (train_ddp.py only)",
    )
    run_name: str | None = flag(
        None,
        "name of the run in file names, so that runs of one strategy can share a folder (default: the strategy's name)",
    )
    loss_output_dir: Path = flag(Path("runs/loss_curves"), "folder for loss_STRATEGY.json", recorded=False)
    storage_path: Path = flag(Path("runs/ray"), "folder for Ray Train's records of the run", recorded=False)
    experiment_name: str | None = flag(
        None, "new name for the run under --storage_path (default: strategy and time)", recorded=False
    )
    log_interval: int = flag(10, "number of steps between printed losses, if not on a terminal", low=1)
    report_to: tuple[str, ...] = flag(
        (),
        f"comma-separated trackers that the steps and the verdict are reported to: {', '.join(TRACKERS)} (default: none)",
        parse=_trackers,
        recorded=False,
    )
    quiet: bool = flag(False, "show no progress: warnings, errors and the last line alone", recorded=False)
    capture_dir: Path | None = flag(
        None, "folder for the full tensors of the first steps (default: none are written)", recorded=False
    )
    capture_steps: int = flag(2, "number of steps to capture", low=1)
    device: Literal["auto", "cpu", "cuda"] = flag("auto", "auto: GPUs if there is one per worker, else CPUs")
    backend: Literal["auto", "gloo", "nccl"] = flag("auto", "auto: nccl on GPUs, gloo on CPUs")
    dry_run: bool = flag(False, "print configuration, mesh and contract; train nothing", recorded=False)

    @property
    def mesh(self) -> Mesh:
        return Mesh.of_options(vars(self))

    @property
    def name(self) -> str:
        """The run's name in file names."""
        return self.run_name or self.spec.name

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
        return self.spec.label_of(self.mesh, vars(self)) + (", control" if self.noise_control else "")

    @property
    def history_path(self) -> Path:
        return history_file(self.loss_output_dir, CONTROL if self.noise_control else self.name)

    @property
    def profiled(self) -> range:
        """The steps that are profiled, from 1."""
        first = 1 + max(1, self.capture_steps if self.capture_dir else 0)
        return range(first, first + self.profile)

    def trace_path(self, rank: int) -> Path:
        return self.loss_output_dir / f"trace_{self.name}_rank{rank}.json"

    @property
    def told_path(self) -> Path:
        """What the strategy's library was told, if it has a configuration of its own."""
        return self.history_path.with_name(f"told_{self.name}.json")

    @property
    def start(self) -> Start:
        """The initial weights."""
        return Start(
            self.model_name,
            self.pretrained,
            self.init_weights_path,
            self.save_init_weights,
            self.overwrite,
            self.seed if self.init_seed is None else self.init_seed,
            ("float32" if self.precision == "fp32" else "bfloat16") if self.noise_control else None,
        )

    @property
    def samples(self) -> Samples:
        return Samples.of_options(vars(self))

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
        """The control run of this run. It starts from the same weights, perturbed by one ulp; if this run saves them, from that file."""
        run = replace(self, save_init_weights=False, pretrained=False) if self.save_init_weights else self
        return replace(run, control=False, noise_control=True, capture_dir=None, profile=0)

    def recorded(self) -> dict[str, Any]:
        """What a run records of its configuration: all but flags that name places, or do not change what is computed."""
        content = self.as_dict()
        return {
            name: content[name]
            for name in ("strategy", "own", *(option.name for option in flags.recorded(Config)))
        }

    def as_dict(self) -> dict[str, Any]:
        """The configuration as text and numbers: the strategy by name, and of a file that a flag has read, its content."""
        content = {"strategy": self.spec.name, **vars(self)}
        del content["spec"]
        content["own"] = {
            option.name: getattr(self.own[option.name], "recorded", self.own[option.name])
            for option in flags.recorded(self.spec.options)
        }
        return {key: str(value) if isinstance(value, Path) else value for key, value in content.items()}
