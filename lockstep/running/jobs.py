"""Many runs with one start of the workers: that start takes ten seconds, a step of a tiny model a tenth of one.

    python -m lockstep.running.jobs JOBS.json

JOBS.json is what `start_groups` writes: groups, each [number of ranks, jobs], which run one after the other. The jobs of a group share its
ranks (lockstep/running/ranks.py), or one process outside any launcher if the number is null. A job is {"strategy", "arguments"}, a strategy
and its flags, and may have "fault", the name of a fault to plant. The strategy "reference" is lockstep.verdict.reference with the flags of
train_ddp.py. With "replays", a list of folders, it replays these dumps and the baseline's, not all that lie beside its own.
"""

if __name__ == "__main__":
    from lockstep.ground import startup

    startup.begin()  # first: from now on Ctrl-C and a missing package are one line each

import contextlib
import functools
import importlib
import json
import os
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from lockstep.ground import hang, processes, progress, startup, user_file
from lockstep.ground.errors import TrainingFailure, UserError, first_line, run_program
from lockstep.ground.files import read_json
from lockstep.inputs import architectures
from lockstep.plan import command_line, resources, strategies
from lockstep.plan.config import BASELINE, Config, Spec
from lockstep.plan.resources import training_device
from lockstep.running import ranks
from lockstep.training import preflight

NAME = "lockstep.running.jobs"
REFERENCE = "reference"


Job = dict[str, Any]
Group = tuple[int | None, list[Job]]  # the number of ranks, and their jobs


class JobFailed(TrainingFailure):
    """A job has failed, after so many that `finished`; `exit_code` is its rank's."""

    def __init__(self, message: str, status: int, finished: int = 0):
        super().__init__(message)
        self.exit_code = status if status in (1, 2, 3) else 1
        self.finished = finished


def start_groups(
    groups: list[Group],
    folder: Path,
    *,
    patience: float | None = None,
    shown: bool = False,
) -> tuple[list[float], int]:
    """Run the jobs of all groups, one group after the other, until a job fails.

    Returns the seconds of each finished job, and the exit status. If a job failed, or made no progress for `patience` seconds
    (lockstep/ground/hang.py), there are fewer seconds than jobs. FOLDER/log.txt has the output of the ranks. With `shown`, their progress
    is shown.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path, done, log = folder / "jobs.json", folder / "done.txt", folder / "log.txt"
    path.write_text(json.dumps(groups), encoding="utf-8")
    done.write_text("")
    log.write_text("")
    environment = processes.environment()
    if patience is not None:
        environment[hang.VARIABLE] = str(patience)
    # The log is cut while it is written, so whoever writes must append.
    with open(log, "a") as out, open(log, encoding="utf-8", errors="replace") as text, startup.cleaning_up():
        process = processes.start(
            [sys.executable, "-m", NAME, str(path)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
        )
        try:
            while process.poll() is None:
                time.sleep(0.1)
                _show(text, shown)
                if processes.cut(log):
                    text.seek(0, os.SEEK_END)
        finally:
            processes.end(process)
        _show(text, shown)
        progress.screen.leave()
    return [float(line) for line in done.read_text().splitlines()], process.returncode


def _show(said: TextIO, shown: bool) -> None:
    """Show the marked lines among the new ones of a log."""
    for line in said if shown else ():
        progress.screen.take(line)


def start_all_groups(groups: list[Group], folder: Path, *, shown: bool = False) -> None:
    """Like `start_groups`. Raises JobFailed, with the reason, if a job failed."""
    seconds, status = start_groups(groups, folder, shown=shown)
    jobs = [job for _, group in groups for job in group]
    if len(seconds) < len(jobs):
        failed = f"job {len(seconds) + 1} of {len(jobs)}, {jobs[len(seconds)]['strategy']}, failed"
        reason = f"{why(folder, status)}; all it said is in {folder / 'log.txt'}"
        raise JobFailed(f"{failed}: {reason}", status, len(seconds))


def why(folder: Path, status: int = 1) -> str:
    """Why the first unfinished job of a folder failed, in one line."""
    return processes.failure(NAME, status, (folder / "log.txt").read_text(encoding="utf-8", errors="replace"))


def configured(job: Job) -> Config:
    """The configuration of a job, as one of the ranks of this group."""
    strategy = job["strategy"]
    return command_line.parse_config(BASELINE if strategy == REFERENCE else strategy, job["arguments"])


def run(job: Job) -> str:
    """Run one job in this process, as one rank of the process group. Returns a closing sentence."""
    import torch

    from lockstep import faults
    from lockstep.training import loop as training
    from lockstep.training.strategy import factory_of
    from lockstep.verdict import reference

    config = configured(job)
    inputs = preflight.load_inputs(config)
    if job["strategy"] == REFERENCE:
        torch.set_num_threads(os.cpu_count() or 1)
        dumps = [Path(folder) for folder in job["replays"]] if "replays" in job else None
        return reference.run(config, inputs, dumps)
    device = training_device(config)
    with faults.planted(job.get("fault"), config, inputs, factory_of(config.spec)) as make:
        return training.run_with_control(config, inputs, make, device)


def preload(groups: list[Group]) -> None:
    """Import what the ranks need, and find the layouts that they capture, unless they use GPUs: a library may initialise CUDA."""
    jobs = [job for _, group in groups for job in group]
    if (
        any(arg == "cuda" or arg == "--device=cuda" for job in jobs for arg in job["arguments"])
        or resources.local_gpus()
    ):
        return
    from lockstep.dumps.trace import layout_of
    from lockstep.verdict import reference  # noqa: F401 - and the loop

    for strategy in {job["strategy"] for job in jobs} - {REFERENCE}:
        preload_strategy(strategies.spec_of(strategy))
    if not resources.torch_is_for_cpus():
        # A backward pass would start a thread for each GPU, and a process with threads must not be forked
        return
    for job in (group[0] for _, group in groups if group):
        with contextlib.suppress(UserError):  # its ranks say so, as this job's failure
            config = configured(job)
            if config.capture_dir:
                layout_of(architectures.resolve(config.model_name, config.num_layers)[0], config.attn_impl)


def preload_strategy(spec: Spec) -> None:
    """Import what the ranks of a strategy need on CPUs."""
    from lockstep.training.strategy import factory_of

    factory_of(spec)
    for name in spec.preloads:
        with contextlib.suppress(ImportError):  # the ranks say so; not every version has all
            importlib.import_module(name)


@contextlib.contextmanager
def _functions_restored() -> Iterator[None]:
    """Afterwards, torch.nn.functional has its functions again: a library leaves another `linear` there, which rounds otherwise."""
    import torch

    functions = dict(vars(torch.nn.functional))
    try:
        yield
    finally:
        vars(torch.nn.functional).update(functions)


def run_group(jobs: list[Job], done: Path, listener: socket.socket | None) -> int:
    """Run the jobs of a group as one of its ranks. `listener` is None outside any launcher."""
    import torch.distributed as dist

    from lockstep.ground.collective import init_alone

    progress.relay()
    if listener is None:
        init_alone()
    else:
        ranks.join(listener, configured(jobs[0]).backend)
    for job in jobs:
        begin = time.perf_counter()
        try:
            if job["strategy"] != REFERENCE:
                # Before the functions are kept: what a module changes when it is imported, stays.
                preload_strategy(strategies.spec_of(job["strategy"]))
            with _functions_restored():
                line = run(job)
        except (UserError, TrainingFailure):
            raise
        except (Exception, SystemExit) as error:
            traceback.print_exc()
            place = user_file.place_of(error)
            raise TrainingFailure(
                f"rank {dist.get_rank()} failed: {type(error).__name__}: {first_line(error)}{place}"
            ) from error
        dist.barrier()
        if dist.get_rank() == 0:
            progress.screen.note(line)
            with open(done, "a") as file:
                file.write(f"{time.perf_counter() - begin:.2f}\n")
    return 0


def main() -> int:
    path = Path(sys.argv[1])
    groups = read_json(path)
    with startup.importing():
        preload(groups)
    for num_ranks, jobs in groups:
        rank = functools.partial(_rank, num_ranks, jobs, path.with_name("done.txt"))
        status = ranks.fork(num_ranks or 1, rank, NAME)
        if status:
            return status
    return 0


def _rank(number: int | None, jobs: list[Job], done: Path, listener: socket.socket) -> int:
    if number is None:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            del os.environ[name]
    return run_program(NAME, lambda: run_group(jobs, done, listener if number else None))


if __name__ == "__main__":
    startup.end(run_program(NAME, main))
