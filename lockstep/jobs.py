"""Many runs in one start of the workers: starting takes ten seconds, a tiny run one.

    python -m lockstep.jobs JOBS.json                                                       one process
    python -m torch.distributed.run --standalone --nproc_per_node 4 -m lockstep.jobs JOBS.json

A job is {"strategy", "arguments", "fault"}: a training script with its flags, and the name of a fault to plant or null;
"reference" stands for lockstep.reference with the flags of train_ddp.py; with "replays", a list of folders, it replays
those dumps too. `start` does the starting.
"""

if __name__ == "__main__":
    from lockstep import startup

    startup.begin()  # first: from now on Ctrl-C and a missing package are one line each

import importlib
import json
import os
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Literal

from lockstep import processes, startup
from lockstep.errors import TrainingFailure, UserError, first_line, run_program
from lockstep.files import read_json
from lockstep.schemas import Name, Strict, validate

NAME = "lockstep.jobs"


class Job(Strict):
    """One entry of JOBS.json."""

    strategy: Literal["ddp", "deepspeed", "fsdp", "reference"]
    arguments: list[str]
    fault: Name | None = None
    replays: list[str] = []


class Jobs(Strict):
    """JOBS.json, which is the list alone."""

    jobs: list[Job]


def start(num_ranks: int | None, jobs: list[dict], folder: Path, *, patience: float = 1800) -> list[float]:
    """Run the jobs in so many ranks, or, without a number, in one process outside any launcher.

    Returns the seconds of each finished job; there are fewer than jobs when one failed, or was not finished within
    `patience` seconds. FOLDER/log.txt has what the ranks said.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path, done = folder / "jobs.json", folder / "done.txt"
    path.write_text(json.dumps(jobs), encoding="utf-8")
    done.write_text("")
    launcher = processes.ranks(num_ranks) if num_ranks else [sys.executable]
    environment = {**processes.environment(), "OMP_NUM_THREADS": "1"}
    with open(folder / "log.txt", "w", encoding="utf-8") as log, startup.cleaning_up():
        process = processes.start(
            [*launcher, "-m", NAME, str(path)], env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
        try:
            while process.poll() is None and time.time() - done.stat().st_mtime < patience:
                time.sleep(0.1)
        finally:
            processes.end(process)
    return [float(line) for line in done.read_text().splitlines()]


def start_all(num_ranks: int | None, jobs: list[dict], folder: Path) -> None:
    """Like `start`; raises TrainingFailure with the line that says why, if a job failed."""
    finished = len(start(num_ranks, jobs, folder))
    if finished < len(jobs):
        which = f"job {finished + 1} of {len(jobs)}, {jobs[finished]['strategy']}"
        raise TrainingFailure(f"{which}, failed: {why(folder)}; all it said is in {folder / 'log.txt'}")


def why(folder: Path) -> str:
    """One line on why the first unfinished job of a folder failed."""
    text, _ = processes.failure(NAME, 1, (folder / "log.txt").read_text(encoding="utf-8", errors="replace"))
    return text


def run(job: Job) -> None:
    """One job, in this process as one rank of the process group that is there."""
    import torch

    from lockstep import config as config_module
    from lockstep import faults, reference, training

    strategy = job.strategy
    config = config_module.parse_config("ddp" if strategy == "reference" else strategy, job.arguments)
    inputs = config_module.load_inputs(config)
    if strategy == "reference":
        reference.run(config, inputs, also=[Path(folder) for folder in job.replays])
        return
    make_strategy = importlib.import_module(f"train_{strategy}").make_strategy
    with faults.planted(job.fault, config, inputs, make_strategy) as make:
        training.run(config, inputs, make, torch.device("cpu"))


def read(path: Path) -> list[Job]:
    """The jobs of a file. Raises UserError for one that does not hold jobs, or names an unknown fault."""
    from lockstep.faults import CATALOGUE

    jobs = validate(Jobs, {"jobs": read_json(path)}, path, "see lockstep/jobs.py").jobs
    unknown = next((job.fault for job in jobs if job.fault is not None and job.fault not in CATALOGUE), None)
    if unknown:
        raise UserError(f"{path}: there is no fault {unknown}; see run_faults.py --list")
    return jobs


def main() -> int:
    if len(sys.argv) != 2:
        raise UserError("give one file of jobs")
    path = Path(sys.argv[1])
    jobs = read(path)
    import torch
    import torch.distributed as dist

    from lockstep.collective import init_alone
    from lockstep.config import launched_in_place

    torch.set_num_threads(1)
    dist.init_process_group("gloo") if launched_in_place() else init_alone()
    for job in jobs:
        begin = time.perf_counter()
        try:
            run(job)
        except (UserError, TrainingFailure):
            raise
        except Exception as error:
            traceback.print_exc()
            raise TrainingFailure(f"rank {dist.get_rank()} failed: {type(error).__name__}: {first_line(error)}") from error
        dist.barrier()
        if dist.get_rank() == 0:
            with open(path.with_name("done.txt"), "a") as file:
                file.write(f"{time.perf_counter() - begin:.2f}\n")
    return 0


if __name__ == "__main__":
    status = run_program(NAME, main)
    sys.stdout.flush()
    os._exit(status)  # the groups of many strategies are not worth taking down one by one
