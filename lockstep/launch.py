"""From a command line to a run: under Ray Train, or in place under torchrun and the deepspeed launcher.

The only file that imports ray.
"""

import datetime
import gc
import json
import logging
import os
import re
import signal
import socket
import sys

from lockstep import config as config_module
from lockstep import files, initial_weights
from lockstep.config import Config
from lockstep.errors import TrainingFailure, UserError, first_line

RAY_ENVIRONMENT = {
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # workers stay where the scripts are
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",  # print is print
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",  # the default of 2 s is also how late the end is noticed
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",  # one actor less to start; a preempted run is not resumed here
    "RAY_TRAIN_METRICS_ENABLED": "0",  # there is no dashboard to show them
}
CONNECT_TIMEOUT = 3.0  # seconds
# A Ray instance of our own has one turn. A run takes all of it, so that a script started early trains after the one before
# it, also where there are CPUs or GPUs for both.
TURN = "lockstep_turn"
# What Ray Train starts an actor for, each with 1.5 s of CPU time, and we have no use for: there is no Ray Data here, and an
# instance of our own, which ends with the script, needs no cleaning up. The names are private to Ray; where they are others, these
# actors start again, and nothing else changes.
NO_DATA, NO_CLEANING = "DatasetsCallback", "PlacementGroupCleanerCallback"


def launch(strategy: str, make_strategy) -> int:
    """Run one training script and return its exit status: 0, 1 for a failed run, 2 for a user's mistake."""
    status = _launch(strategy, make_strategy)
    if config_module.launched_in_place():
        # A thread of gloo that still wants the interpreter while it shuts down aborts the process, about once in fifty
        # runs: the launcher would take a finished run for a failed one.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


def _launch(strategy: str, make_strategy) -> int:
    first = os.environ.get("RANK", "0") == "0"
    try:
        config = config_module.parse_config(strategy)
        inputs = config_module.load_inputs(config)
        config_module.check_environment(config, inputs.architecture)
        if config.dry_run:
            print(describe(config, inputs))
            return 0
        if first:
            config.history_path.unlink(missing_ok=True)  # an older run's proves nothing
            if config.capture_dir is not None:
                files.remove_captured(config.capture_folder)  # there are none without --overwrite
            print(banner(config, inputs), flush=True)
        run = _run_in_place if config_module.launched_in_place() else _run_under_ray
        line = run(config, inputs, make_strategy)
        if first:
            print(line)
        return 0
    except (UserError, TrainingFailure) as error:
        if first:  # what every rank finds is said once
            print(f"train_{strategy}.py: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(f"train_{strategy}.py: interrupted; the history holds the steps so far", file=sys.stderr)
        return 130


def banner(config: Config, inputs) -> str:
    gpus = config_module.local_gpus()
    return (
        f"{config.label}: {inputs.architecture_source}, {inputs.architecture['num_hidden_layers']} layers, "
        f"{initial_weights.describe(config)}, {config.precision}, tokenizer {inputs.batches.corpus.tokenizer_name}; "
        f"{config.num_workers} workers on {config.device} over {config.backend} "
        f"({gpus} GPUs, {os.cpu_count()} CPU cores here)"
    )


def describe(config: Config, inputs) -> str:
    """What --dry_run prints: the resolved configuration, the mesh as a grid, the contract."""
    from lockstep.contract import expected_contract

    contract = expected_contract(config, inputs.architecture)
    return "\n".join(
        [
            banner(config, inputs),
            "",
            "configuration",
            *(f"  {key:<28} {value}" for key, value in config.as_dict().items()),
            f"  {'steps':<28} {inputs.num_steps}",
            f"  {'tokens per step':<28} {inputs.batches.windows_per_step * config.seq_length}",
            "",
            f"mesh ({config.mesh.label}): a row shares a batch, a column shares a shard of the weights",
            config.mesh.draw(),
            "",
            "contract (read back from the live objects after the first step; any difference stops the run)",
            *(f"  {key:<28} {json.dumps(value)}" for key, value in contract.items()),
        ]
    )


def _run_in_place(config: Config, inputs, make_strategy) -> str:
    """One rank of torchrun or deepspeed: the process group from the environment, then the loop."""
    import torch
    import torch.distributed as dist

    from lockstep import training

    _set_threads(config, config_module.workers_here(config.num_workers))
    device = torch.device("cpu")
    if config.device == "cuda":  # over gloo, ranks may share a GPU
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group(config.backend)
    try:
        return training.run(config, inputs, make_strategy, device)
    finally:
        gc.collect()  # strategies hold cycles; their process groups must go before the default one
        dist.destroy_process_group()


def _set_threads(config: Config, workers_here: int) -> None:
    """Share this machine's cores among its workers; launchers set one thread, or all of them in each worker."""
    import torch

    if config.device == "cpu":
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers_here))


def _worker(arguments: dict) -> tuple[bool, str]:
    """One Ray Train worker; Ray has set up the process group. Returns whether it went well, and one line.

    A TrainingFailure is every rank's, so it is returned: Ray would print each rank's traceback over it. Anything else
    is raised, or the other ranks would wait for this one.
    """
    from ray import train
    from ray.train.torch import get_device

    from lockstep import training

    config = arguments["config"]
    context = train.get_context()
    _set_threads(config, context.get_local_world_size())
    try:
        return True, training.run(config, arguments["inputs"], arguments["make_strategy"], get_device())
    except TrainingFailure as error:
        return False, str(error)


def _run_under_ray(config: Config, inputs, make_strategy) -> str:
    ray = _import_ray()
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer
    from ray.train.v2.api.exceptions import TrainingFailedError

    name = config.experiment_name or f"{config.strategy}-{datetime.datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}"
    cpu = min(1, (os.cpu_count() or 1) / config.num_workers)
    resources = {"CPU": 1, "GPU": 1} if config.device == "cuda" else {"CPU": cpu}
    _connect(ray)
    needless = {NO_DATA}
    gpus = int(ray.cluster_resources().get("GPU", 0))
    if config.device == "cuda" and gpus < config.num_workers:
        print(f"{config.label}: waiting for {config.num_workers} GPUs, the cluster has {gpus} now", flush=True)
    if TURN in ray.cluster_resources():
        needless.add(NO_CLEANING)
        os.environ["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] = "86400"  # to wait for a turn is no failure
        resources[TURN] = 10_000 // config.num_workers / 10_000  # Ray counts in ten-thousandths
        if ray.available_resources().get(TURN, 0) < resources[TURN]:
            print(f"{config.label}: waiting for the run before it to end", flush=True)

    class Trainer(TorchTrainer):
        def _create_default_callbacks(self) -> list:
            return [callback for callback in super()._create_default_callbacks() if type(callback).__name__ not in needless]

    try:
        trainer = Trainer(
            _worker,
            train_loop_config={"config": config, "inputs": inputs, "make_strategy": make_strategy},
            torch_config=TorchConfig(backend=config.backend),
            scaling_config=ScalingConfig(
                num_workers=config.num_workers, use_gpu=config.device == "cuda", resources_per_worker=resources
            ),
            run_config=RunConfig(
                name=name, storage_path=str(config.storage_path), failure_config=FailureConfig(max_failures=0)
            ),
        )
        went_well, line = trainer.fit().return_value
    except TrainingFailedError as error:
        raise TrainingFailure(_reason(error)) from error
    except SystemExit as error:  # how Ray Train leaves after Ctrl-C
        raise KeyboardInterrupt from error
    finally:
        ray.shutdown()
    if not went_well:
        raise TrainingFailure(line)
    return line


def _reason(error) -> str:
    """One line on why Ray Train gave up: of the failed workers' last lines, one that is no mere lost connection."""
    lines = {
        rank: (str(failure).strip().splitlines() or [type(failure).__name__])[-1]
        for rank, failure in sorted(getattr(error, "worker_failures", {}).items())
    }
    if not lines:
        return f"Ray Train stopped the run: {first_line(error)}"
    rank = min(lines, key=lambda rank: ("closed by peer" in lines[rank], rank))
    return f"worker {rank} failed: {lines[rank]}"


def _import_ray():
    """ray, with the settings that must be in the environment before it is imported."""
    for key, value in RAY_ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    import ray

    return ray


def _connect(ray) -> None:
    """Join the cluster that RAY_ADDRESS names, or start a Ray instance that ends with this process."""
    address = os.environ.get("RAY_ADDRESS") or "local"
    nobody = UserError(
        f"RAY_ADDRESS {address}: no Ray cluster answers there; "
        "start it, set RAY_AUTH_MODE=token if it wants a token, or unset RAY_ADDRESS"
    )
    host_and_port = re.fullmatch(r"(?:ray://)?([^:/]+):(\d+)", address)
    try:
        if host_and_port:  # ray.init would try for minutes
            socket.create_connection((host_and_port[1], int(host_and_port[2])), timeout=CONNECT_TIMEOUT).close()
        ray.init(
            address=address,
            **({"include_dashboard": False, "resources": {TURN: 1}} if address == "local" else {}),
            logging_level=logging.ERROR,
            logging_config=ray.LoggingConfig(log_level="ERROR"),  # without a dashboard Ray warns every second
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise nobody from error


def _hold_local_ray() -> None:
    """Start a local Ray instance, print its address, and keep it until standard input closes."""
    ray = _import_ray()
    _connect(ray)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the script, which closes the input
    print(ray.get_runtime_context().gcs_address, flush=True)
    sys.stdin.read()
    ray.shutdown()


if __name__ == "__main__":
    _hold_local_ray()
