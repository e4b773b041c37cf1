"""What is judged of a whole recorded run: which samples its ranks saw, and its learning rates."""

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from lockstep.ground.errors import UserError
from lockstep.recorder.recorded_step import RunStep
from lockstep.recorder.recording import Recording
from lockstep.verdict.rows import Wrong

FEW = 0.05  # of the samples, that a data set may hold twice
AN_EPOCH = 0.9  # of a data set; the rest may be dropped at its end
OFTEN = 3  # steps, in which ranks share a sample at the same places: by chance hardly ever
IN_ORDER = 10  # samples: two epochs begin with the same ones by chance once in 10! times

ONE_ORDER = "samples come in the same order in each epoch"
NO_EPOCH = f"{ONE_ORDER}, though their sampler shuffles: sampler.set_epoch(epoch) is missing"


@dataclass
class RunVerdict:
    steps: int
    samples: int = 0  # seen by all data-parallel ranks together
    wrong: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def judge(
    recordings: list[Recording],
    *,
    with_replacement: bool,
    cut: Sequence[tuple[int, ...]] = (),
    views: bool = False,
    recorded: int = 0,
) -> RunVerdict:
    """`recordings` are those of one training, in order. `with_replacement`: samples are drawn so, and may come again at any time.

    `cut` are the ranks that have pieces of the same samples; `views`: the model is called several times with one batch, for as many views
    of it; `recorded` is how many steps, from the first on, are judged one by one.

    Raises UserError if their ranks are not the same.
    """
    runs = [recording.whole_run() for recording in recordings]
    if len({len(run) for run in runs}) > 1:
        raise UserError("the recordings have different numbers of ranks; judge each by itself")
    ranks = [[step for run in runs for step in run[rank]] for rank in range(len(runs[0]))]
    if views:
        ranks = [[_without_views(step) for step in steps] for steps in ranks]
    with_replacement |= any(step.with_replacement for steps in ranks for step in steps)
    verdict = RunVerdict(min(len(steps) for steps in ranks))
    if not verdict.steps:
        verdict.notes.append("the program was killed before the last step that it was to record: not judged")
    others = {rank for one in cut for rank in one[1:]}
    whole = {one[0]: _of_pieces([ranks[rank] for rank in one]) for one in cut}
    samples = [whole.get(rank, steps) for rank, steps in enumerate(ranks) if rank not in others]
    samples = [_in_turns(steps) for steps in _data_parallel(samples)]
    _judge_division(verdict, samples, len(cut[0]) if cut else 1)
    _judge_shares(verdict, ranks, cut)
    _judge_samples(verdict, samples, with_replacement=with_replacement)
    if not with_replacement:
        _judge_overlap(verdict, samples)
    _judge_order(verdict, samples)
    _judge_epochs(verdict, ranks[0])
    _judge_short_epochs(verdict, ranks)
    _judge_micro_batches(verdict, ranks[0], recorded)
    _judge_mode(verdict, ranks[0])
    _judge_rates(verdict, ranks[0], len(ranks))
    _judge_ranks_rates(verdict, ranks)
    return verdict


def _data_parallel(ranks: list[list[RunStep]]) -> list[list[RunStep]]:
    """Of ranks that see the same samples throughout, the first."""
    seen: dict[str, list[RunStep]] = {}
    for steps in ranks:
        seen.setdefault(str([step.samples for step in steps]), steps)
    return list(seen.values())


def _in_turns(steps: list[RunStep]) -> list[RunStep]:
    """Without the batches of a step that one optimizer makes which the step before had, which another one made, such as a generator's."""
    return [
        one.model_copy(update={"samples": [own if own not in before.samples else [] for own in one.samples]})
        if one.optimizers and set(one.optimizers).isdisjoint(before.optimizers)
        else one
        for before, one in zip(steps[:1] + steps, steps, strict=False)
    ]


def _without_views(step: RunStep) -> RunStep:
    """Without the samples of a call that are those of the call before."""
    calls = zip([[]] + step.samples, step.samples, strict=False)
    return step.model_copy(update={"samples": [[] if own == before else own for before, own in calls]})


def samples_by_step(ranks: list[list[RunStep]]) -> list[Counter[int]]:
    """What all data-parallel ranks together saw in each step, in no order."""
    steps = zip(*_data_parallel(ranks), strict=False)
    return [Counter(sample for one in step for micro in one.samples for sample in micro) for step in steps]


def _of_pieces(ranks: list[list[RunStep]]) -> list[RunStep]:
    """The steps of ranks that have pieces of the same samples, as of one that has the whole."""
    found = []
    for same in zip(*ranks, strict=False):
        micro = zip(*(step.samples for step in same), strict=False)
        samples = [[hash(pieces) for pieces in zip(*one, strict=False)] for one in micro]
        found.append(same[0].model_copy(update={"samples": samples}))
    return found


def _judge_division(verdict: RunVerdict, ranks: list[list[RunStep]], pieces: int) -> None:
    """A DistributedSampler divides the samples among as many replicas as read different ones.

    Where ranks have `pieces` of samples, each may read its own, and all cut those of each in turn.
    """
    found = {number for steps in ranks for step in steps for number in step.replicas}
    if len(found) == 1 and not found <= {len(ranks), len(ranks) * pieces}:
        verdict.wrong.append(
            f"a DistributedSampler divides the samples among {max(found)}, and {len(ranks)} data-parallel ranks read different ones"
        )


def _judge_shares(verdict: RunVerdict, ranks: list[list[RunStep]], cut: Sequence[tuple[int, ...]]) -> None:
    """Ranks that train on different samples are given those of different ranks. Augmented, the same ones look different."""
    given = [{rank for step in steps for rank in step.given} for steps in ranks]
    for one, other in itertools.combinations(range(len(ranks)), 2):
        together = any(one in pieces and other in pieces for pieces in cut)
        same = all(own.samples == of.samples for own, of in zip(ranks[one], ranks[other], strict=False))
        if together or same:
            continue
        divided = any(number > 1 for step in ranks[one] for number in step.replicas)
        if _have_same_rows(ranks[one], ranks[other]):
            verdict.wrong.append(
                f"the loaders give ranks {one} and {other} the same samples, which the model is not called with as they are"
            )
            return
        if len(given[one]) == 1 and given[one] == given[other] and divided:
            verdict.wrong.append(
                f"a DistributedSampler gives ranks {one} and {other} the samples of rank {given[one].pop()}"
            )
            return


def _have_same_rows(one: list[RunStep], other: list[RunStep]) -> bool:
    """Whether loaders gave two ranks the same, and each called the model with as many samples: none takes a part of a batch that all are given."""
    found = []
    for steps in (one, other):
        loaded = [batch for step in steps for batch in step.loaded]
        sizes = [len(micro) for step in steps for micro in step.samples]
        used = [
            batch.rows
            for batch, after in itertools.pairwise(loaded)
            if {*sizes[batch.calls : after.calls]} == {len(batch.rows)}
        ]
        found.append((used, len(loaded)))
    (rows, number), same = found[0], found[0] == found[1]
    return same and len(rows) == number - 1 > 0 and len({row for batch in rows for row in batch}) > 1


def _again(order: list[int]) -> int:
    """How many sights of known samples come before the last one that is new."""
    seen: set[int] = set()
    last_new = 0
    for place, sample in enumerate(order):
        last_new = last_new if sample in seen else place + 1
        seen.add(sample)
    return last_new - len(seen)


def _epochs(number: int, ranks: list[list[RunStep]]) -> list[list[int]]:
    """The samples of each epoch that the loop leaves before its end, as other samples are to come; of all steps, if it leaves none."""
    whole = [_seen(steps[step] for step in range(number) for steps in ranks)]
    left = {step + 1 for step in range(number) if any(steps[step].cut for steps in ranks)} - {number}
    places = [0, *sorted(left), number]
    # A loader that is begun anew for each batch gives the first one, or any.
    if not left or any(other - one < 2 for one, other in itertools.pairwise(places[:-1])):
        return whole
    epochs = [
        _seen(steps[step] for step in range(one, other) for steps in ranks)
        for one, other in itertools.pairwise(places)
    ]
    alike = any(set(one) == set(other) for one, other in itertools.pairwise(epochs[:-1]))
    return whole if alike or epochs[0][:IN_ORDER] == epochs[1][:IN_ORDER] else epochs


def _judge_samples(verdict: RunVerdict, ranks: list[list[RunStep]], *, with_replacement: bool) -> None:
    """No sample is seen again before all have been seen once, but for those that fill the last batch of an epoch."""
    order = _seen(steps[number] for number in range(verdict.steps) for steps in ranks)
    verdict.samples = len(order)
    first = set(order)
    if len(first) == len(order) or with_replacement:
        return
    epochs = _epochs(verdict.steps, ranks)
    again = sum(map(_again, epochs))
    in_a_step = len(order) // max(verdict.steps, 1)
    if again > max(in_a_step, FEW * len(order)):
        verdict.wrong.append(
            f"{again} samples were seen again before others were seen for the first time ({len(first)} different ones in {len(order)}){_who(ranks)}; "
            "where they are drawn with replacement, say --with-replacement"
        )
        return
    sizes = {size for steps in ranks for step in steps for size in step.data_sets}
    often = len(order) - len(first) > max(in_a_step, FEW * len(order))  # else some are in it twice
    if len(sizes) == 1 and len(epochs) == 1 and often and len(first) + in_a_step < AN_EPOCH * max(sizes):
        said = (
            f"samples were seen again after {len(first)} different ones, of the {max(sizes)} that the data set has; "
            "where they are drawn with replacement, say --with-replacement"
        )
        verdict.wrong.append(Wrong(said))


def _judge_overlap(verdict: RunVerdict, ranks: list[list[RunStep]]) -> None:
    """Windows of ranks that overlap: in each step, one rank has a sample at the same place that another has."""
    if verdict.steps < OFTEN or verdict.wrong:
        return
    for one, other in itertools.combinations(range(len(ranks)), 2):
        at: dict[tuple[int, int], set[int]] = {}  # places in a step -> the samples that were there
        for number in range(verdict.steps):
            if number and not at:
                break
            mine, others = _seen(ranks[one][number : number + 1]), _seen(ranks[other][number : number + 1])
            place_of = {sample: place for place, sample in enumerate(others)}
            for place, sample in enumerate(mine):
                if sample in place_of:
                    at.setdefault((place, place_of[sample]), set()).add(sample)
            at = {places: found for places, found in at.items() if len(found) == number + 1}
        if at:
            mine_at, other_at = next(iter(at))
            verdict.wrong.append(
                f"in each step, sample {mine_at} of rank {one} is sample {other_at} of rank {other}: what ranks read overlaps"
            )
            return


def _seen(steps: Iterable[RunStep]) -> list[int]:
    """The samples of a rank, in order."""
    return [sample for step in steps for micro in step.samples for sample in _once(micro)]


def _once(micro: list[int]) -> Iterable[int]:
    """The model may be called with each sample of a batch several times, as for two masks of dropout. One alone is no batch of views."""
    times = Counter(micro)
    return times if len(times) > 1 and len(set(times.values())) == 1 else micro


def _judge_order(verdict: RunVerdict, ranks: list[list[RunStep]]) -> None:
    """Epochs in one order: a DistributedSampler shuffles by the epoch that it is told."""
    if _in_one_order(verdict, ranks) < IN_ORDER:
        return
    if any(step.shuffled for steps in ranks for step in steps):
        verdict.wrong.append(NO_EPOCH)
    else:
        verdict.notes.append(ONE_ORDER)


def _in_one_order(verdict: RunVerdict, ranks: list[list[RunStep]]) -> int:
    """How many samples come again in the order of the first epoch; 0 if they come in another."""
    again = 0
    for steps in ranks:
        order = _seen(steps[: verdict.steps])
        epoch = next((place for place in range(1, len(order)) if order[place] == order[0]), len(order))
        if order[epoch:] != order[: len(order) - epoch]:
            return 0
        again += len({*order[epoch:]})
    return again


def _judge_short_epochs(verdict: RunVerdict, ranks: list[list[RunStep]]) -> None:
    """A few samples may be in one order by chance, unless their sampler begins one epoch twice."""
    if not verdict.wrong and _is_told_again(ranks[0]) and _in_one_order(verdict, ranks):
        verdict.wrong.append(NO_EPOCH)


def _is_told_again(steps: list[RunStep]) -> bool:
    """Whether a DistributedSampler whose samples the model is trained on begins one epoch twice, with calls of the model in between."""
    trained = {source for step in steps for source in step.sources}
    begun, calls = set[tuple[int, int, int]](), 0
    for step in steps:
        begun |= {
            (one.sampler, one.epoch, calls + one.calls) for one in step.orders if one.sampler in trained
        }
        calls += len(step.sources)
    times = Counter((sampler, epoch) for sampler, epoch, _ in begun)
    return any(number > 1 for number in times.values())


def _judge_epochs(verdict: RunVerdict, steps: list[RunStep]) -> None:
    """What a sampler is told, where samples are not known again, such as images that are augmented."""
    # By sampler: samples that the model was trained on; and the epoch that it was told last, and how many had been seen then
    seen, last = Counter[int](), dict[int, tuple[int, int]]()
    for step in steps:
        numbers = [len({*_once(micro)}) for micro in step.samples]
        of_calls = list(zip(step.sources, numbers, strict=False))
        for order in step.orders:
            own = sum(number for source, number in of_calls[: order.calls] if source == order.sampler)
            before = seen[order.sampler] + own
            told, since = last.get(order.sampler, (-1, 0))
            if told == order.epoch and before - since >= AN_EPOCH * order.samples and not verdict.wrong:
                verdict.wrong.append(
                    f"a DistributedSampler that shuffles is told epoch {told} in two epochs, and gives one order in both: sampler.set_epoch(epoch) is missing"
                )
            last[order.sampler] = order.epoch, before
        for source, number in of_calls:
            seen[source] += number


def _who(ranks: list[list[RunStep]]) -> str:
    """Whether ranks share samples before any comes again on a rank itself, to be read after the number."""
    sets = [_first_epoch(_seen(steps)) for steps in ranks]
    shared = [
        (one, other)
        for one in range(len(sets))
        for other in range(one + 1, len(sets))
        if 2 * len(sets[one] & sets[other]) >= min(len(sets[one]), len(sets[other]))
    ]
    return f"; data-parallel ranks {shared[0][0]} and {shared[0][1]} saw the same ones" if shared else ""


def _first_epoch(samples: Iterable[int]) -> set[int]:
    found: set[int] = set()
    for sample in samples:
        if sample in found:
            break
        found.add(sample)
    return found


def _judge_micro_batches(verdict: RunVerdict, steps: list[RunStep], recorded: int) -> None:
    """`recorded` are the steps that are judged one by one."""
    numbers = [len(step.samples) for step in steps]
    usual = Counter(numbers).most_common(1)[0][0] if numbers else 0
    odd = next((place for place, number in enumerate(numbers, 1) if number != usual), None)
    if odd is not None and odd > recorded:
        verdict.notes.append(
            f"step {odd} has {numbers[odd - 1]} micro batches, others {usual}: record up to it (--steps {odd}) to see how they count"
        )


def _judge_mode(verdict: RunVerdict, steps: list[RunStep]) -> None:
    """A loop that evaluates must turn training mode on again."""
    after = next((number for number, step in enumerate(steps, 1) if step.evaluated), None)
    if after is not None and after < len(steps):
        verdict.notes.append(f"a pass in evaluation mode goes backward after step {after}")
    elif after is not None:
        verdict.wrong.append(
            f"after step {after} the model is trained in evaluation mode: model.train() is missing"
        )


def _judge_rates(verdict: RunVerdict, steps: list[RunStep], world: int) -> None:
    stepped = Counter((by, times) for step in steps for by, times in step.scheduled.items())
    rates = [max(step.rates, default=0.0) for step in steps]
    zeros = next((number for number, rate in enumerate(reversed(rates)) if rate != 0), 0)
    several = [(by, times) for (by, times), count in stepped.items() if times > 1 and 2 * count > len(steps)]
    how = ""
    if several:
        by, times = several[0]
        known = {"the number of processes": world, "the number of micro batches": len(steps[0].samples)}
        names = [name for name, number in known.items() if number == times]
        of_world = f", {' or '.join(names)}" if names else ""
        how = f"the schedule of the learning rate is stepped {times} times in a step{of_world}{f', by {by}' if ' and ' in by else ''}"
        if by == "accelerate":  # by design, for a schedule that counts the batches of one process
            verdict.notes.append(f"{how}, by Accelerate: it must have been made for as many steps")
        else:
            verdict.wrong.append(how)
    if zeros > 1:
        verdict.wrong.append(
            f"the learning rate is 0 in the last {zeros} of {len(steps)} steps{f'; {how}' if how else ''}"
        )


def _judge_ranks_rates(verdict: RunVerdict, ranks: list[list[RunStep]]) -> None:
    """Each rank has all groups of parameters, though with ZeRO only its share of their elements."""
    for number, (first, *others) in enumerate(zip(*ranks, strict=False), 1):
        for rank, step in enumerate(others, 1):
            groups = zip(step.rates, first.rates, strict=True) if len(step.rates) == len(first.rates) else ()
            other = next((pair for pair in groups if pair[0] != pair[1]), None)
            if other is not None:
                verdict.wrong.append(
                    f"step {number}: the learning rate is {other[0]:.6g} on rank {rank} and {other[1]:.6g} on rank 0"
                )
                return
