"""Many runs in one start of the workers: starting takes ten seconds, a tiny run one.

    python -m lockstep.jobs JOBS.json                                                       one process
    python -m torch.distributed.run --standalone --nproc_per_node 4 -m lockstep.jobs JOBS.json

A job is {"strategy", "arguments", "fault"}: a training script with its flags, and the name of a fault to plant or null;
"reference" stands for lockstep.reference with the flags of train_ddp.py; with "replays", a list of folders, it replays
those dumps too. `start` does the starting.
"""

if __name__ == "__main__":
    from lockstep import startup  # noqa: F401 - first: from now on Ctrl-C and a missing package are one line each

import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from lockstep.errors import TrainingFailure

ROOT = Path(__file__).parents[1]


def start(num_ranks: int | None, jobs: list[dict], folder: Path, *, patience: float = 1800) -> list[float]:
    """Run the jobs in so many ranks, or, without a number, in one process outside any launcher.

    Returns the seconds of each finished job; there are fewer than jobs when one failed, or was not finished within
    `patience` seconds. FOLDER/log.txt has what the ranks said.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path, done = folder / "jobs.json", folder / "done.txt"
    path.write_text(json.dumps(jobs))
    done.write_text("")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(num_ranks)] if num_ranks else []
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with open(folder / "log.txt", "w") as log:
        command = [sys.executable, *launcher, "-m", "lockstep.jobs", str(path)]
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
        try:
            while process.poll() is None and time.time() - done.stat().st_mtime < patience:
                time.sleep(0.1)
        finally:
            process.terminate()  # torchrun then ends its workers
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
    return [float(line) for line in done.read_text().splitlines()]


def start_all(num_ranks: int | None, jobs: list[dict], folder: Path) -> None:
    """Like `start`; raises TrainingFailure with the end of the log if a job failed."""
    finished = len(start(num_ranks, jobs, folder))
    if finished < len(jobs):
        log = (folder / "log.txt").read_text(errors="replace")
        raise TrainingFailure(f"job {finished + 1} of {len(jobs)} failed, {jobs[finished]}:\n{log[-6000:]}")


def run(job: dict) -> None:
    """One job, in this process as one rank of the process group that is there."""
    import torch

    from lockstep import config as config_module
    from lockstep import faults, reference, training

    strategy = job["strategy"]
    config = config_module.parse_config("ddp" if strategy == "reference" else strategy, job["arguments"])
    inputs = config_module.load_inputs(config)
    if strategy == "reference":
        reference.run(config, inputs, also=[Path(folder) for folder in job.get("replays", ())])
        return
    make_strategy = importlib.import_module(f"train_{strategy}").make_strategy
    with faults.planted(job.get("fault"), config, inputs, make_strategy) as make:
        training.run(config, inputs, make, torch.device("cpu"))


def main() -> None:
    import torch
    import torch.distributed as dist

    from lockstep.collective import init_alone
    from lockstep.config import launched_in_place

    path = Path(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo") if launched_in_place() else init_alone()
    for job in json.loads(path.read_text()):
        begin = time.perf_counter()
        run(job)
        dist.barrier()
        if dist.get_rank() == 0:
            with open(path.with_name("done.txt"), "a") as file:
                file.write(f"{time.perf_counter() - begin:.2f}\n")
    os._exit(0)  # the groups of many strategies are not worth taking down one by one


if __name__ == "__main__":
    main()
