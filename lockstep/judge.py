"""Judge a recorded run: does it compute what one process would compute on the same micro batches?

    python -m lockstep.judge runs/mine

Writes report.md, report.json and report.html into the folder. Exit status: 0 PASS; 1 FAIL; 2 a usage error, or what
cannot be judged; 3 an internal error.
"""

if __name__ == "__main__":
    import os

    from lockstep.ground import startup

    # First, so that Ctrl-C and a missing package give one line each
    startup.begin(startup.JUDGING)
    # Let torch ask for large pages. A third of the judge's time went into page faults of small ones.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

import argparse
import functools
from pathlib import Path

from lockstep.ground import processes
from lockstep.ground.errors import CannotComputeError, UserError, run_program
from lockstep.ground.flags import Parser, number
from lockstep.page import recording as page
from lockstep.recorded import against as recorded_against
from lockstep.recorded import report as recorded_report
from lockstep.recorded import whole_run as recorded_run
from lockstep.recorded.cut_by_code import CutByCode, is_cut
from lockstep.recorded.other_stages import (
    Weights,
    handed_on,
    judge_whole_run,
    other_stages,
    shared_parameters,
)
from lockstep.recorder import surroundings
from lockstep.recorder.recording import Recording, stages_in
from lockstep.running import judging
from lockstep.verdict import gpu_kernels
from lockstep.verdict.normalisation import LABELS
from lockstep.verdict.rows import StepVerdict


def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="python -m lockstep.judge", description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("folder", type=Path, help="what lockstep.record wrote")
    parser.add_argument(
        "--expect",
        choices=list(LABELS),
        help="what the loss was meant to be a mean over; any other is then a FAIL (default: any of them is a PASS, and is named)",
    )
    parser.add_argument(
        "--loss",
        metavar="FILE.py:NAME",
        help="the loop's own loss, a function of what the model returned and of a dict of the recorded tensors",
    )
    parser.add_argument(
        "--memory",
        type=number(float, 0),
        metavar="GB",
        help="if the weights take more than a quarter of it, the model is computed layer by layer, each twice (default: half of what is free)",
    )
    parser.add_argument(
        "--workers",
        type=number(int, 1),
        default=1,
        metavar="N",
        help="judge so many steps at a time, each in a process that has its part of the memory (default: %(default)s)",
    )
    parser.add_argument(
        "--ray",
        action="store_true",
        help="judge every step in a task of the Ray cluster that RAY_ADDRESS names, whose nodes all see the folder; without it in a Ray instance of its own",
    )
    parser.add_argument(
        "--after",
        type=Path,
        metavar="FOLDER",
        help="a recording of the run that this one continues: samples that it has seen must not come again before all others",
    )
    parser.add_argument(
        "--against",
        type=Path,
        metavar="FOLDER",
        help="a recording of the same training, such as by one process: weights, samples and settings must be the same, and the first gradient; if one process cannot compute this run's model, that one's is the reference",
    )
    parser.add_argument(
        "--with-replacement",
        action="store_true",
        help="samples are drawn with replacement: one may come again at any time",
    )

    def body() -> int:
        options = parser.parse_args(argv)
        with surroundings.restored():
            stages = stages_in(options.folder)
            if stages:
                return _judge_pipeline(stages, options)
            recording = Recording(options.folder)
            with gpu_kernels.in_place(recording.origin.device):
                return _judge(recording, options)

    return run_program("lockstep.judge", body)


def _judge(recording: Recording, options: argparse.Namespace) -> int:
    """Judge a recording and write the reports. Return the exit status."""
    earlier = [Recording(options.after)] if options.after else []
    against = Recording(options.against) if options.against else None
    recording, verdicts = _judge_steps(recording, against, options)
    run_verdict = recorded_run.judge(
        [*earlier, recording],
        with_replacement=options.with_replacement,
        cut=verdicts[0].cut,
        views=any(verdict.views for verdict in verdicts),
        shared_inputs=any(verdict.shared_inputs for verdict in verdicts),
        recorded=0 if earlier else len(verdicts),
    )
    if isinstance(recording, CutByCode):
        run_verdict.notes.append(
            f"the reference is the model of {options.against}, as one process cannot compute this run's own"
        )
    if against is not None:
        recorded_against.judge(run_verdict, recording, against, verdicts)
    page.write(recording, verdicts, run_verdict)
    return recorded_report.show(verdicts, run_verdict, options.folder)


def _judge_pipeline(stages: list[Recording], options: argparse.Namespace) -> int:
    """Judge each stage of a pipeline, the last one first: it shows how the micro batches are weighed. Return the exit status."""
    if options.against or options.after:
        raise UserError(
            "--against and --after: the recorded run is a pipeline, whose stages are judged by themselves; leave them out"
        )
    weights: list[Weights] = [None] * len(stages[0].steps)
    shared = shared_parameters(stages)
    found: dict[int, str] = {}
    for index in reversed(range(len(stages))):
        print(f"stage {index} of {len(stages)}, on {stages[index].names_of_ranks}:")
        with gpu_kernels.in_place(stages[index].origin.device):
            verdicts, found[index] = _judge_stage(stages, index, shared, weights, options)
        if index == len(stages) - 1:
            weights = [verdict.weights for verdict in verdicts]
    failed = [index for index in sorted(found) if found[index].startswith("FAIL")]
    if failed:
        print(found[failed[0]].replace("FAIL: ", f"FAIL: stage {failed[0]}: ", 1))
        return 1
    parts = dict.fromkeys(part for text in found.values() for part in text.removeprefix("PASS: ").split("; "))
    print("; ".join([f"PASS: {len(stages)} stages", *parts]))
    return 0


def _judge_stage(
    stages: list[Recording],
    index: int,
    shared: list[dict[int, str]],
    weights: list[Weights],
    options: argparse.Namespace,
) -> tuple[list[StepVerdict], str]:
    """Judge a stage, and print its report but for the verdict. Return the verdicts on its steps, and that on all.

    `shared` are parameters of several stages, `weights` those of the micro batches in the last stage, by step.
    """
    stage, is_last = stages[index], index == len(stages) - 1
    verdicts = judging.judge(
        stage,
        options.expect if is_last else None,
        options.loss if is_last else None,
        _bytes(options),
        options.workers,
        ray=options.ray,
        others=[
            other_stages(stages, index, shared, of_step, step) for step, of_step in enumerate(weights, 1)
        ],
    )
    if index:
        for verdict in verdicts:
            verdict.wrong[:0] = handed_on(stages[index - 1], stage, verdict.step)
    run_verdict = recorded_run.judge(
        [stage],
        with_replacement=options.with_replacement,
        views=any(verdict.views for verdict in verdicts),
        # Only the first stage is called with samples.
        shared_inputs=index > 0 or any(verdict.shared_inputs for verdict in verdicts),
        recorded=len(verdicts),
    )
    if index:
        judge_whole_run(run_verdict, stages[index - 1], stage)
    page.write(stage, verdicts, run_verdict)
    return verdicts, recorded_report.write(verdicts, run_verdict, stage.folder)


def _bytes(options: argparse.Namespace) -> float | None:
    """Return the memory that the judge may use."""
    return None if options.memory is None else options.memory * 1e9


def _judge_steps(
    recording: Recording, against: Recording | None, options: argparse.Namespace
) -> tuple[Recording, list[StepVerdict]]:
    """Return the recording and the verdicts on its steps.

    If one process cannot compute the recording's own model, the model of `against` is the reference. The
    recording that is returned is then a CutByCode.
    """
    judge_steps = functools.partial(
        judging.judge,
        expect=options.expect,
        loss=options.loss,
        memory=_bytes(options),
        workers=options.workers,
        ray=options.ray,
    )
    if against is None or not is_cut(recording, against):
        try:
            return recording, judge_steps(recording)
        except CannotComputeError:
            if against is None:
                raise
    recording = CutByCode(recording.folder, against)
    try:
        return recording, judge_steps(recording)
    except CannotComputeError as error:
        raise UserError(
            f"--against {against.folder}: one process cannot compute its model either: {error}"
        ) from error


if __name__ == "__main__":
    # This saves a quarter of the judge's time.
    processes.keep_memory()
    startup.end(main())
