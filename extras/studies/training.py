"""Train the runs of a study that are not finished. A run that fails costs no other."""

import dataclasses
import itertools
import time
from collections.abc import Callable
from pathlib import Path

from extras.studies.study import Planned
from lockstep.dumps import history
from lockstep.ground import progress
from lockstep.ground.errors import UserError
from lockstep.plan.config import BASELINE
from lockstep.running import jobs

WEIGHTS = "initial_weights.safetensors"


def finished(run: Planned, *, noise: bool = False) -> bool:
    """Whether a run of exactly this configuration has finished before."""
    config = dataclasses.replace(run.config, noise_control=True) if noise else run.config
    try:
        record = history.read(config.history_path)
    except UserError:  # there is none, or it was cut off
        return False
    # Only the control is asked to save the initial weights, which are those of all runs.
    asked, recorded = (
        {**flags, "save_init_weights": False} for flags in (config.recorded(), record.run["config"])
    )
    captured = config.capture_dir is None or (config.capture_folder / "manifest.json").exists()
    return record.ended == "finished" and recorded == asked and captured


def train(
    planned: list[Planned], folder: Path, *, apart: bool, note: Callable[[str], None]
) -> dict[str, str]:
    """Train what is not finished, the control and its control run first; returns why runs failed, by name.

    Runs of one mesh share a start of the ranks, unless they are to run `apart`: the peak memory of a process is that of all
    it has done. Raises jobs.JobFailed if the control fails: nothing can then be compared.
    """
    control, *others = planned
    weights = ["--init_weights_path", str(folder / WEIGHTS)]
    left = [run for run in others if not finished(run) or (run.is_base and not finished(run, noise=True))]
    total, begin = len(left) + 1, time.monotonic()  # the control among them
    has_control = (folder / WEIGHTS).exists() and finished(control) and finished(control, noise=True)
    if not has_control:
        note(f"run 1 of {total}: the control, and the control run")
        first = [*control.arguments, *weights, "--save_init_weights", "--overwrite", "--control"]
        jobs.start_all_groups(
            [(control.config.num_workers, [_job(control, first)])], folder / "logs" / BASELINE, shown=True
        )
    arguments = {
        run.name: [*run.arguments, *weights, *(["--control"] if run.is_base else [])] for run in left
    }
    return _train(left, arguments, folder, apart=apart, note=note, done=1, begin=begin)


def train_alike(planned: list[Planned], folder: Path, note: Callable[[str], None]) -> dict[str, str]:
    """Train the unfinished runs; returns why runs failed, by name.

    No run has to come first: each makes its own initial weights.
    """
    left = [run for run in planned if not finished(run)]
    arguments = {run.name: [*run.arguments] for run in left}
    return _train(left, arguments, folder, apart=False, note=note, done=0, begin=time.monotonic())


def _train(
    left: list[Planned],
    arguments: dict[str, list[str]],
    folder: Path,
    *,
    apart: bool,
    note: Callable[[str], None],
    done: int,
    begin: float,
) -> dict[str, str]:
    """Train runs, mesh by mesh; `done` runs have been trained since `begin`."""
    failed: dict[str, str] = {}
    total = len(left) + done
    by_mesh = sorted(left, key=lambda run: tuple(run.config.mesh.sizes.values()))
    groups = (
        [[run] for run in left]
        if apart
        else [
            list(runs)
            for _, runs in itertools.groupby(by_mesh, key=lambda run: tuple(run.config.mesh.sizes.values()))
        ]
    )
    for number, group in enumerate(groups):
        waiting = group
        while waiting:
            run_seconds = (time.monotonic() - begin) / max(done, 1)
            names = ", ".join(run.name for run in waiting)
            time_left = f"; about {progress.duration(run_seconds * (total - done))} left" if done else ""
            note(f"run {done + 1} of {total}: {names}{time_left}")
            work = folder / "logs" / f"{number}-{waiting[0].name}"
            todo = [_job(run, arguments[run.name]) for run in waiting]
            seconds, status = jobs.start_groups([(waiting[0].config.num_workers, todo)], work, shown=True)
            done += len(seconds)
            waiting = waiting[len(seconds) :]
            if waiting and status:
                failed[waiting[0].name] = jobs.why(work, status)
                done, waiting = done + 1, waiting[1:]
    return failed


def _job(run: Planned, arguments: list[str]) -> dict:
    fault = run.fault and f"{Path(__file__).with_name('slow.py')}:{run.fault}"
    return {"strategy": run.strategy, "arguments": arguments, "fault": fault}


def reference(planned: list[Planned], folder: Path) -> None:
    """The float64 reference of the control's steps, and the replays of all captured runs."""
    control = planned[0]
    arguments = [*control.arguments, "--init_weights_path", str(folder / WEIGHTS)]
    job = {"strategy": jobs.REFERENCE, "arguments": arguments}
    jobs.start_all_groups([(None, [job])], folder / "logs" / "reference")
