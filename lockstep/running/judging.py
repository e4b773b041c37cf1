"""The steps of a recording as tasks: one after the other, in processes of this machine, or in a Ray cluster. All find the same."""

import gc
import itertools
import os
import signal
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import torch

from lockstep.ground import processes, startup, user_file
from lockstep.ground.errors import UserError
from lockstep.plan.resources import free_bytes
from lockstep.recorded import step
from lockstep.recorded.cut_by_code import CutByCode
from lockstep.recorded.other_stages import OtherStages
from lockstep.recorder import process_group, surroundings
from lockstep.recorder.recording import Recording
from lockstep.verdict import gpu_kernels
from lockstep.verdict.rows import StepVerdict


@dataclass(frozen=True)
class Task:
    """What a process must be told to judge a step."""

    folder: Path  # of the recording
    whole: Path | None  # another, whose model is the reference
    step: int
    expect: str | None
    loss: str | None  # FILE.py:NAME
    memory: float | None  # bytes; None, for Ray: half of what is free where it is judged
    others: OtherStages | None

    def judge(self, recording: Recording) -> StepVerdict:
        loss = user_file.load(self.loss, "--loss") if self.loss else None
        verdict = step.judge(recording, self.step, self.expect, loss, self.memory, self.others)
        gc.collect()  # models and their hooks hold each other, and the next step needs the memory
        return verdict

    def judge_elsewhere(self) -> StepVerdict:
        """In a process that has not read the recording."""
        processes.keep_memory()
        recording = Recording(self.folder)
        if self.whole is not None:
            recording = CutByCode(self.folder, Recording(self.whole))
        with (
            gpu_kernels.in_place(recording.origin.device),
            surroundings.restored(),
            process_group.of_one(needed=recording.needs_group),
        ):
            return self.judge(recording)


def judge(
    recording: Recording,
    expect: str | None,
    loss: str | None,
    memory: float | None,
    workers: int,
    *,
    ray: bool,
    others: Sequence[OtherStages | None] = (),
) -> list[StepVerdict]:
    """A verdict for every step. `expect`, `loss` and `memory` are those of a Task; `memory` is that of all `workers` together.
    `others` has an entry for each step of a stage of a pipeline.

    Raises UserError for what cannot be judged.
    """
    if ray and workers > 1:
        raise UserError(
            "--workers says how many processes this machine has; a Ray cluster decides that itself: leave it out with --ray"
        )
    steps = range(1, len(recording.steps) + 1)
    workers = min(workers, len(steps))
    if not ray:
        memory = (free_bytes() / 2 if memory is None else memory) / workers
    folder = recording.folder.absolute()
    whole = recording.model_folder.absolute()
    other = None if whole == folder else whole
    loss = loss and user_file.absolute(loss)
    tasks = [
        Task(folder, other, step, expect, loss, memory, of_step)
        for step, of_step in itertools.zip_longest(steps, others)
    ]
    if ray:
        # The memory that a task may use is half of what is free.
        verdicts = _over_ray(tasks, 2 * step.bytes_to_judge(recording))
    elif workers > 1:
        verdicts = _in_processes(tasks, workers)
    else:
        with process_group.of_one(needed=recording.needs_group):
            verdicts = [task.judge(recording) for task in tasks]
    if all(one.nothing for one in verdicts):
        raise UserError(
            "no gradient other than zero arises in the recorded steps, as where all advantages are zero, or no label counts; record more (--steps)"
        )
    return verdicts


def _in_processes(tasks: list[Task], workers: int) -> list[StepVerdict]:
    # More threads than cores would wait for each other.
    threads = max(1, torch.get_num_threads() // workers)
    with ProcessPoolExecutor(workers, get_context("spawn"), _begin_worker, (threads,)) as pool:
        return list(pool.map(Task.judge_elsewhere, tasks))


def _begin_worker(threads: int) -> None:
    processes.end_with_parent(signal.SIGKILL)
    torch.set_num_threads(threads)


def _over_ray(tasks: list[Task], memory: float) -> list[StepVerdict]:
    """Judge in the cluster that RAY_ADDRESS names, or in a Ray instance of its own.

    Each task is given `memory` bytes of a node, or all that the largest node has.
    """
    from lockstep.running import ray_instance

    ray = ray_instance.import_ray("ray")
    startup.end_helpers.append(ray_instance.end_children)
    ray_instance.connect(ray)
    clean = False
    try:
        # The user's code
        here = {"env_vars": {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}}
        largest = max(node["Resources"].get("memory", 0.0) for node in ray.nodes())
        task = ray.remote(Task.judge_elsewhere).options(runtime_env=here, memory=min(memory, largest))
        verdicts = ray.get([task.remote(one) for one in tasks])
        clean = True
        return verdicts
    except ray.exceptions.RayTaskError as error:
        raise error.cause from error
    finally:
        ray_instance.shutdown(ray, clean=clean)
