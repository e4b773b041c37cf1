"""The checks of a configuration before its run: the model, the weights, the corpus, the folders, memory.

They run where a run is started, before its workers, and need no GPU and no cluster.
"""

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from lockstep.dumps import history
from lockstep.ground import files, hang, origin, user_file
from lockstep.ground.errors import UserError
from lockstep.inputs import architectures, data, shapes, texts, tokenizer
from lockstep.plan import command_line, compiled, cuts, rates, strategies
from lockstep.plan.config import Config
from lockstep.plan.resources import launched_in_place, require_memory, workers_here

# A trace of torch's profiler begins with this.
TRACE = b' {\n    "schemaVersion"'


def notes(config: Config) -> list[str]:
    """What a user should know of a run before it starts, a line each."""
    return [*shadowed(config), *emulated(config), *untested(config)]


def untested(config: Config) -> list[str]:
    """One line if a library has another version than the one that Lockstep is tested with."""
    libraries = ["torch", "transformers", *([config.spec.library] if config.spec.library else [])]
    differences = [difference for library in libraries if (difference := origin.difference(library))]
    return [f"{'; '.join(differences)}: what follows may depend on it"] if differences else []


def shadowed(config: Config) -> list[str]:
    """One line for each built-in name that is also a name in the current folder: the built-in one is used."""
    options = (
        ("model_name", config.model_name, architectures.BUILT_IN),
        ("dataset_name", config.dataset_name, (texts.BUILT_IN_CORPUS,)),
    )
    return [
        f"--{option} {name}: the built-in one is used; write ./{name} for the one in this folder"
        for option, name, built_in in options
        if name in built_in and Path(name).exists()
    ]


def emulated(config: Config) -> list[str]:
    """One line if this processor has to emulate the run's precision."""
    if config.precision == "fp32" or config.device != "cpu" or origin.has_bfloat16():
        return []
    return [
        f"--precision {config.precision}: this processor has no bfloat16 instructions and emulates them, several times slower than fp32"
    ]


def load_inputs(config: Config) -> data.Inputs:
    """Check everything that the configuration names, and load the corpus. Raises UserError.

    Called where the run is started, so that usage errors are found there. Ray's workers get the result.
    """
    if user_file.is_named(config.spec.factory):
        from lockstep.training.strategy import require_strategy  # imports torch

        require_strategy(config.spec, config.samples.further)
    architecture, source = architectures.resolve(config.model_name, config.num_layers)
    problem = architectures.tensor_parallel_problem(architecture, config.tp_size)
    if problem and config.spec.name in strategies.SPECS:
        raise UserError(problem)
    cuts.require(config, architecture)
    _require_samples(config, architecture)
    shapes.require_trainable(architecture, f"--model_name {config.model_name}")
    if config.has_own_optimizer:
        from lockstep.training import optim  # imports torch

        optim.require_known(config.optimizer)
    num_positions = architecture.get("max_position_embeddings") or config.seq_length
    if config.seq_length > num_positions:
        raise UserError(
            f"--seq_length {config.seq_length}: {config.model_name} has positions for {num_positions} tokens; lower it"
        )
    windows_per_step = config.dp_size * config.batch_size * config.gradient_accumulation_steps
    name = config.model_name
    tokenizer_name = architectures.HUB_IDS.get(name, name) if config.pretrained else name
    assert config.data_cache_dir is not None, "parse_config fills it in"
    corpus = data.load_corpus(
        config.dataset_name,
        # A model with the hub's weights needs the hub's tokenizer.
        tokenizer.build_tokenizer(tokenizer_name, architecture),
        seq_length=config.seq_length,
        windows_per_step=windows_per_step,
        cache_folder=config.data_cache_dir,
        held_out=config.held_out,
    )
    batches = data.Batches(
        corpus,
        config.seed,
        config.dp_size,
        config.batch_size,
        config.gradient_accumulation_steps,
        config.held_out,
        config.samples,
    )
    num_steps = config.debug_steps or config.num_epochs * batches.steps_per_epoch
    rates.require(vars(config), num_steps)
    _require_profiled(config, num_steps)
    return data.Inputs(architecture, source, batches, num_steps, config.start)


def checked(strategy: str, arguments: list[str]) -> tuple[Config, data.Inputs]:
    """The configuration and inputs of a run that is started later. Raises UserError if it cannot be started. Leaves no folder behind."""
    config = command_line.parse_config(strategy, [*arguments, "--dry_run"])
    inputs = load_inputs(config)
    check_environment(config, inputs.architecture)
    return config, inputs


def runs(config: Config) -> list[Config]:
    """The runs that are trained with one start of the workers."""
    return [config, config.of_control()] if config.control else [config]


def _require_samples(config: Config, architecture: dict) -> None:
    """Raise UserError for samples that a model cannot be given."""
    further = config.samples.further
    if len(further) > 1:
        raise UserError(
            f"--padding {config.padding} --documents apart: given a mask, transformers does not look where positions begin again, and documents "
            "see each other; leave one of them out"
        )
    if further and user_file.is_named(architecture["model_type"]):
        raise UserError(
            f"--padding {config.padding} --documents {config.documents} --model {config.model_name}: a module of your own is called with ids and "
            "labels alone; leave them out"
        )


def _require_profiled(config: Config, num_steps: int) -> None:
    last = config.profiled.stop - 1
    if config.profile and last > num_steps:
        raise UserError(
            f"--profile {config.profile}: steps {config.profiled.start} to {last} would be profiled, and the run has {num_steps}; profile fewer, or train longer"
        )
    if config.profile and config.count_collectives:
        raise UserError("--profile and --count_collectives use the same profiler; leave one out")


def _require_packages(trackers: Sequence[str]) -> None:
    for name in trackers:
        if importlib.util.find_spec(name) is None:
            raise UserError(
                f"--report_to {name}: this Python has no package {name}; pip install -r requirements-{name}.txt, or leave it out"
            )


def check_environment(config: Config, architecture: dict) -> None:
    """Check the weights file, the folders and the tools that a run needs, where it is started. Raises UserError.

    A dry run leaves no folder behind, nor does one that is refused.
    """
    hang.patience()
    _require_packages(config.report_to)
    config.spec.require(config, architecture)
    compiled.require(config.compile)
    # The files of an older run are replaced.
    for run in runs(config):
        files.require_ours(run.history_path, "--loss_output_dir", history.BEGINS)
        files.require_ours(run.told_path, "--loss_output_dir", b"{")
    if config.capture_dir is not None:
        files.require_new_folder(config.capture_folder, "--capture_dir", overwrite=config.overwrite)
    if config.experiment_name is not None and (config.storage_path / config.experiment_name).exists():
        raise UserError(
            f"--experiment_name {config.experiment_name}: already used under {config.storage_path}; choose a new name"
        )
    for rank in range(config.num_workers if config.profile else 0):
        files.require_ours(config.trace_path(rank), "--loss_output_dir", TRACE)
    if config.history_path.is_dir():
        raise UserError(
            f"--loss_output_dir: {config.history_path} is a folder; remove it, or choose another folder"
        )
    output_folders = {"--loss_output_dir": config.loss_output_dir, "--capture_dir": config.capture_dir}
    for option, folder in output_folders.items():
        if folder is not None:
            files.require_writable_folder(folder, option, keep=False)
    if not launched_in_place():  # Ray makes it, and it may stay empty
        files.require_writable_folder(config.storage_path, "--storage_path", keep=False)
    # Last: these two import torch.
    config.start.check(architecture, fewer_layers=config.num_layers is not None)
    workers = workers_here(config.num_workers) if launched_in_place() else config.num_workers
    require_memory(config, architecture, workers)
    for folder in output_folders.values():
        if folder is not None and not config.dry_run:
            folder.mkdir(parents=True, exist_ok=True)
