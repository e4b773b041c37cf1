"""Judge a whole recorded run: which samples its ranks saw, and its learning rates."""

from collections import Counter
from collections.abc import Sequence

from lockstep.ground.errors import UserError
from lockstep.recorded import samples
from lockstep.recorder.recorded_step import RunStep
from lockstep.recorder.recording import Recording
from lockstep.verdict.rows import RunVerdict


def judge(
    recordings: list[Recording],
    *,
    with_replacement: bool,
    cut: Sequence[tuple[int, ...]] = (),
    views: bool = False,
    shared_inputs: bool = False,
    recorded: int = 0,
) -> RunVerdict:
    """Return the verdict on the whole run.

    `recordings` are those of one training, in order. `with_replacement`: samples are drawn with replacement,
    and may come again at any time. `cut` has the ranks of each group that have pieces of the same samples.
    `views`: the model is called several times with one batch, for as many views of it. `shared_inputs`: it is called
    with the same for losses of different samples, which are not seen. `recorded` is how many steps, from the first on,
    are judged one by one.

    Raises UserError if the recordings have different numbers of ranks.
    """
    runs = [recording.whole_run() for recording in recordings]
    if len({len(run) for run in runs}) > 1:
        raise UserError("the recordings have different numbers of ranks; judge each by itself")
    ranks = [[step for run in runs for step in run[rank]] for rank in range(len(runs[0]))]
    if views:
        ranks = [[_without_views(step) for step in steps] for steps in ranks]
    with_replacement |= any(step.with_replacement for steps in ranks for step in steps)
    verdict = RunVerdict(min(len(steps) for steps in ranks))
    if not shared_inputs:
        before = sum(min(map(len, run)) for run in runs[:-1])
        samples.judge(verdict, ranks, before=before, cut=cut, with_replacement=with_replacement)
    verdict.ended = next((error for recording in recordings for error in recording.errors()), "")
    if not verdict.steps:
        verdict.notes.append("the program was killed before the last step that it was to record: not judged")
    _judge_micro_batches(verdict, ranks[0], recorded)
    _judge_mode(verdict, ranks[0])
    _judge_rates(verdict, ranks[0], len(ranks))
    _judge_ranks_rates(verdict, ranks)
    return verdict


def _without_views(step: RunStep) -> RunStep:
    """Return the step without the samples of each call that are those of the call before."""
    calls = zip([[]] + step.samples, step.samples, strict=False)
    return step.model_copy(update={"samples": [[] if own == before else own for before, own in calls]})


def _judge_micro_batches(verdict: RunVerdict, steps: list[RunStep], recorded: int) -> None:
    """Note the first step with another number of micro batches, unless it is among the first `recorded`.

    Those are judged one by one.
    """
    numbers = [len(step.samples) for step in steps]
    usual = Counter(numbers).most_common(1)[0][0] if numbers else 0
    odd = next((step for step, number in enumerate(numbers, 1) if number != usual), None)
    if odd is not None and odd > recorded:
        verdict.notes.append(
            f"step {odd} has {numbers[odd - 1]} micro batches, others {usual}: record up to it (--steps {odd}) to see how they count"
        )


def _judge_mode(verdict: RunVerdict, steps: list[RunStep]) -> None:
    """Judge whether a loop that evaluates turns training mode on again."""
    after = next((number for number, step in enumerate(steps, 1) if step.evaluated), None)
    if after is not None and after < len(steps):
        verdict.notes.append(f"a pass in evaluation mode goes backward after step {after}")
    elif after is not None:
        verdict.wrong.append(
            f"after step {after} the model is trained in evaluation mode: model.train() is missing"
        )


def _judge_rates(verdict: RunVerdict, steps: list[RunStep], world: int) -> None:
    """Judge how often the schedule is stepped, and whether the learning rate is 0 at the end.

    `world` is the number of ranks.
    """
    # How many steps there are of each (by whom the schedule was stepped, how often)
    stepped = Counter((by, times) for step in steps for by, times in step.scheduled.items())
    rates = [max(step.rates, default=0.0) for step in steps]
    # If the rate was never another, no update changes a weight, which the steps say.
    zeros = next((number for number, rate in enumerate(reversed(rates)) if rate != 0), 0)
    several = [(by, times) for (by, times), count in stepped.items() if times > 1 and 2 * count > len(steps)]
    numbers = [len(step.samples) for step in steps]
    each_time = [by for by, _ in stepped if numbers == [step.scheduled.get(by, 0) for step in steps]]
    message = ""
    if each_time and not several and max(numbers) > 1 and each_time[0] != "accelerate":
        verdict.wrong.append(
            f"the schedule of the learning rate is stepped at each micro batch, {min(numbers)} to {max(numbers)} times in a step"
        )
    if several:
        by, times = several[0]
        known = {"the number of processes": world, "the number of micro batches": len(steps[0].samples)}
        names = [name for name, number in known.items() if number == times]
        meaning = f", {' or '.join(names)}" if names else ""
        message = f"the schedule of the learning rate is stepped {times} times in a step{meaning}{f', by {by}' if ' and ' in by else ''}"
        # Accelerate does so by design, for a schedule that counts the batches of one process.
        if by == "accelerate":
            verdict.notes.append(f"{message}, by Accelerate: it must have been made for as many steps")
        else:
            verdict.wrong.append(message)
    if zeros > 1:
        verdict.wrong.append(
            f"the learning rate is 0 in the last {zeros} of {len(steps)} steps{f'; {message}' if message else ''}"
        )


def _judge_ranks_rates(verdict: RunVerdict, ranks: list[list[RunStep]]) -> None:
    """Judge whether all ranks have the same learning rates.

    Each rank has all groups of parameters, though with ZeRO only its shards of them.
    """
    for number, (first, *others) in enumerate(zip(*ranks, strict=False), 1):
        for rank, step in enumerate(others, 1):
            pairs = zip(step.rates, first.rates, strict=True) if len(step.rates) == len(first.rates) else ()
            rates = next((pair for pair in pairs if pair[0] != pair[1]), None)
            if rates is not None:
                verdict.wrong.append(
                    f"step {number}: the learning rate is {rates[0]:.6g} on rank {rank} and {rates[1]:.6g} on rank 0"
                )
                return
