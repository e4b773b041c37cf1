"""Judge which samples the ranks of a recorded run saw: each once per epoch, none on two ranks, in another order each time."""

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from lockstep.recorder.recorded_step import RunStep
from lockstep.verdict.rows import RunVerdict, Wrong

# A data set may hold this share of its samples twice.
FEW = 0.05
# An epoch has at least this share of a data set. The rest may be dropped at its end.
AN_EPOCH = 0.9
# In so many steps, ranks hardly share a sample at the same places by chance.
OFTEN = 3
# Two epochs begin with the same so many samples by chance once in 10! times.
IN_ORDER = 10

ONE_ORDER = "samples come in the same order in each epoch"


def judge(
    verdict: RunVerdict,
    ranks: list[list[RunStep]],
    *,
    before: int,
    cut: Sequence[tuple[int, ...]],
    with_replacement: bool,
) -> None:
    """Judge which samples the ranks saw.

    `before` is the number of steps of the run that this one continues. `cut` has the ranks of each group that have pieces of
    the same samples. `with_replacement`: samples are drawn with replacement, and may come again at any time.
    """
    for seen in _as_seen(ranks, cut):
        found = RunVerdict(verdict.steps)
        # The first rank of a group that has pieces stands for the group, and has the whole samples.
        others = {rank for group in cut for rank in group[1:]}
        whole = {group[0]: _join_pieces([seen[rank] for rank in group]) for group in cut}
        samples = [whole.get(rank, steps) for rank, steps in enumerate(seen) if rank not in others]
        samples = [_without_shared_batches(steps) for steps in _data_parallel(samples)]
        if before and not with_replacement:
            _judge_resumed(found, samples, before)
        _judge_division(found, samples, len(cut[0]) if cut else 1)
        _judge_given(found, seen, cut)
        _judge_samples(found, samples, with_replacement=with_replacement)
        if not with_replacement:
            _judge_overlap(found, samples)
        _judge_order(found, samples)
        _judge_epochs(found, seen)
        if not found.wrong:
            break
    verdict.samples = found.samples
    verdict.wrong += found.wrong
    verdict.notes += found.notes


def _as_seen(ranks: list[list[RunStep]], cut: Sequence[tuple[int, ...]]) -> Iterator[list[list[RunStep]]]:
    """Yield the steps as they were recorded, and without padding, which may have made several samples of one."""
    yield ranks
    joined = ranks if cut else _without_padding(ranks)
    if joined is not ranks:
        yield joined


def _without_padding(ranks: list[list[RunStep]]) -> list[list[RunStep]]:
    """Return the steps with samples that are one whatever padding they have beside others.

    Padding is among the last elements that are alike. Where a sample is seen without padding, too, it is what
    comes before them. Otherwise one of them belongs to it. If two samples of a micro batch, whose padding ends
    at the same place, are then one, sequences are too alike to be told so. The steps are returned as they are.
    """
    steps = [step for steps in ranks for step in steps]
    if not all(len(step.ends) == len(step.samples) for step in steps):
        return ranks
    of_tensors = [tensor for step in steps for micro in step.ends for tensor in micro]
    seen_whole = {sample for tensor in of_tensors for sample in tensor.whole}
    seen_before_end = {sample for tensor in of_tensors for sample in tensor.before}

    def without_padding(whole: int, before: int, and_first: int) -> int:
        if before in seen_whole:
            return before
        return whole if whole in seen_before_end else and_first

    joined = []
    for of_rank in ranks:
        joined.append(list[RunStep]())
        for step in of_rank:
            samples = []
            for micro in step.ends:
                by_tensor = [map(without_padding, x.whole, x.before, x.and_first) for x in micro]
                samples.append([hash(sample) for sample in zip(*by_tensor, strict=True)])
            if any(len({*found}) < len({*given}) for found, given in zip(samples, step.samples, strict=True)):
                return ranks
            joined[-1].append(step.model_copy(update={"samples": samples}))
    return joined


def _data_parallel(ranks: list[list[RunStep]]) -> list[list[RunStep]]:
    """Return the steps of data-parallel ranks: of ranks that see the same samples throughout, those of the first."""
    first: dict[str, list[RunStep]] = {}
    for steps in ranks:
        first.setdefault(str([step.samples for step in steps]), steps)
    return list(first.values())


def _without_shared_batches(steps: list[RunStep]) -> list[RunStep]:
    """Return the steps without batches that another optimizer had in the step before, such as a generator's.

    The optimizers of such a loop take turns.
    """
    return [
        step.model_copy(update={"samples": [x if x not in before.samples else [] for x in step.samples]})
        if step.optimizers and set(step.optimizers).isdisjoint(before.optimizers)
        else step
        for before, step in zip(steps[:1] + steps, steps, strict=False)
    ]


def samples_by_step(ranks: list[list[RunStep]]) -> list[Counter[int]]:
    """Return what all data-parallel ranks together saw in each step, in no order."""
    steps = zip(*_data_parallel(ranks), strict=False)
    return [Counter(sample for step in row for micro in step.samples for sample in micro) for row in steps]


def _join_pieces(ranks: list[list[RunStep]]) -> list[RunStep]:
    """Return the steps of ranks that have pieces of the same samples, as those of one rank that has the whole."""
    joined = []
    for of_ranks in zip(*ranks, strict=False):
        micro_batches = zip(*(step.samples for step in of_ranks), strict=False)
        samples = [[hash(pieces) for pieces in zip(*micro, strict=False)] for micro in micro_batches]
        joined.append(of_ranks[0].model_copy(update={"samples": samples}))
    return joined


def _judge_division(verdict: RunVerdict, ranks: list[list[RunStep]], pieces: int) -> None:
    """Judge whether a DistributedSampler divides the samples among as many replicas as read different ones.

    Where ranks have `pieces` of samples, each may read its own samples, and all cut those of each in turn.
    """
    if not any(micro for steps in ranks for step in steps for micro in step.samples):
        return
    replicas = {number for steps in ranks for step in steps for number in step.replicas}
    if len(replicas) == 1 and not replicas <= {len(ranks), len(ranks) * pieces}:
        verdict.wrong.append(
            f"a DistributedSampler divides the samples among {max(replicas)}, and {len(ranks)} data-parallel ranks read different ones"
        )


def _judge_resumed(verdict: RunVerdict, ranks: list[list[RunStep]], before: int) -> None:
    """Judge whether a run that continues another begins with samples that the other has had.

    The other one had `before` steps, and left its first epoch before the end: whole batches are left of it.
    """
    earlier = _seen(steps[number] for number in range(before) for steps in ranks)
    later = _seen(steps[before] for steps in ranks if len(steps) > before)
    sizes = {size for steps in ranks for step in steps for size in step.data_sets}
    again = len({*later} & {*earlier})
    # A step of either run
    largest = max(len(later), len(earlier) // before)
    if len(sizes) == 1 and later and len(earlier) + largest <= max(sizes) and again > FEW * len(later):
        verdict.wrong.append(
            f"the run that this one continues ended after {len(earlier)} of {max(sizes)} samples, and {again} of the first {len(later)} here are among them; "
            "skip what it has seen, or, where samples are drawn with replacement, say --with-replacement"
        )


def _judge_given(verdict: RunVerdict, ranks: list[list[RunStep]], cut: Sequence[tuple[int, ...]]) -> None:
    """Judge whether loaders and samplers give different samples to ranks that train on different ones.

    The same samples look different to the model if they are augmented.
    """
    given = [{rank for step in steps for rank in step.given} for steps in ranks]
    for one, other in itertools.combinations(range(len(ranks)), 2):
        have_pieces = any(one in group and other in group for group in cut)
        are_same = all(a.samples == b.samples for a, b in zip(ranks[one], ranks[other], strict=False))
        if have_pieces or are_same:
            continue
        is_divided = any(number > 1 for step in ranks[one] for number in step.replicas)
        if _have_same_rows(ranks[one], ranks[other]):
            verdict.wrong.append(
                f"the loaders give ranks {one} and {other} the same samples, which the model is not called with as they are"
            )
            return
        if len(given[one]) == 1 and given[one] == given[other] and is_divided:
            verdict.wrong.append(
                f"a DistributedSampler gives ranks {one} and {other} the samples of rank {given[one].pop()}"
            )
            return


def _have_same_rows(one: list[RunStep], other: list[RunStep]) -> bool:
    """Whether loaders gave two ranks the same batches, and each called the model with as many samples.

    A loop in which all ranks are given the same batches and each takes a part of them is thus left out.
    """
    by_rank = []
    for steps in (one, other):
        loaded = [batch for step in steps for batch in step.loaded]
        sizes = [len(micro) for step in steps for micro in step.samples]
        whole = [
            batch.rows
            for batch, after in itertools.pairwise(loaded)
            if {*sizes[batch.calls : after.calls]} == {len(batch.rows)}
        ]
        by_rank.append((whole, len(loaded)))
    (used, number), are_same = by_rank[0], by_rank[0] == by_rank[1]
    return are_same and len(used) == number - 1 > 0 and len({row for batch in used for row in batch}) > 1


def _repeats(order: list[int]) -> int:
    """Return how often a known sample is seen again before the last new sample."""
    seen: set[int] = set()
    last_new = 0
    for place, sample in enumerate(order):
        last_new = last_new if sample in seen else place + 1
        seen.add(sample)
    return last_new - len(seen)


def _epochs(number: int, ranks: list[list[RunStep]]) -> list[list[int]]:
    """Return the samples of each epoch, if the loop leaves epochs before their end and goes on with other samples.

    Otherwise, return those of all steps in one list. `number` is the number of steps.
    """
    whole = [_seen(steps[step] for step in range(number) for steps in ranks)]
    left = {step + 1 for step in range(number) if any(steps[step].cut for steps in ranks)} - {number}
    bounds = [0, *sorted(left), number]
    # A loader that is begun anew for each batch gives the first batch each time, or any.
    if not left or any(end - start < 2 for start, end in itertools.pairwise(bounds[:-1])):
        return whole
    epochs = [
        _seen(steps[step] for step in range(start, end) for steps in ranks)
        for start, end in itertools.pairwise(bounds)
    ]
    are_same = any(set(epoch) == set(after) for epoch, after in itertools.pairwise(epochs[:-1]))
    return whole if are_same or epochs[0][:IN_ORDER] == epochs[1][:IN_ORDER] else epochs


def _judge_samples(verdict: RunVerdict, ranks: list[list[RunStep]], *, with_replacement: bool) -> None:
    """Judge whether samples are seen again before all have been seen once.

    Those that fill the last batch of an epoch may be seen again.
    """
    order = _seen(steps[number] for number in range(verdict.steps) for steps in ranks)
    verdict.samples = len(order)
    distinct = set(order)
    if len(distinct) == len(order) or with_replacement:
        return
    epochs = _epochs(verdict.steps, ranks)
    repeats = sum(map(_repeats, epochs))
    per_step = len(order) // max(verdict.steps, 1)
    if repeats > max(per_step, FEW * len(order)):
        verdict.wrong.append(
            f"{repeats} samples were seen again before others were seen for the first time ({len(distinct)} different ones in {len(order)}){_shared_samples(ranks)}; "
            "where they are drawn with replacement, say --with-replacement"
        )
        return
    if any(step.uneven for steps in ranks for step in steps):
        return
    sizes = {size for steps in ranks for step in steps for size in step.data_sets}
    # Fewer repeats may be of samples that the data set holds twice.
    are_many = len(order) - len(distinct) > max(per_step, FEW * len(order))
    if len(sizes) == 1 and len(epochs) == 1 and are_many and len(distinct) + per_step < AN_EPOCH * max(sizes):
        message = (
            f"samples were seen again after {len(distinct)} different ones, of the {max(sizes)} that the data set has; "
            "where they are drawn with replacement, say --with-replacement"
        )
        verdict.wrong.append(Wrong(message))


def _judge_overlap(verdict: RunVerdict, ranks: list[list[RunStep]]) -> None:
    """Judge whether two ranks read windows that overlap.

    In each step, the sample at one and the same place of a rank is that at one and the same place of the other.
    """
    if verdict.steps < OFTEN or verdict.wrong:
        return
    for one, other in itertools.combinations(range(len(ranks)), 2):
        # By (place in a step of `one`, place in a step of `other`): the samples that both had there in each step
        shared: dict[tuple[int, int], set[int]] = {}
        for number in range(verdict.steps):
            if number and not shared:
                break
            mine, others = _seen(ranks[one][number : number + 1]), _seen(ranks[other][number : number + 1])
            place_of = {sample: place for place, sample in enumerate(others)}
            for place, sample in enumerate(mine):
                if sample in place_of:
                    shared.setdefault((place, place_of[sample]), set()).add(sample)
            shared = {places: samples for places, samples in shared.items() if len(samples) == number + 1}
        if shared:
            own_place, other_place = next(iter(shared))
            verdict.wrong.append(
                f"in each step, sample {own_place} of rank {one} is sample {other_place} of rank {other}: what ranks read overlaps"
            )
            return


def _seen(steps: Iterable[RunStep]) -> list[int]:
    """Return the samples of the steps, in order."""
    return [sample for step in steps for micro in step.samples for sample in _once(micro)]


def _once(micro: list[int]) -> Iterable[int]:
    """Return the samples of a call of the model, each once if the call has all of them equally often.

    The model may be called with several views of a batch at once, as for two masks of dropout. A call with
    one sample alone is no batch of views.
    """
    counts = Counter(micro)
    return counts if len(counts) > 1 and len(set(counts.values())) == 1 else micro


def _judge_order(verdict: RunVerdict, ranks: list[list[RunStep]]) -> None:
    """Judge whether all epochs have one order. A DistributedSampler shuffles by the epoch that it is told."""
    if _in_one_order(verdict, ranks) < IN_ORDER:
        return
    if any(step.shuffled for steps in ranks for step in steps):
        verdict.wrong.append(
            f"{ONE_ORDER}, though their sampler shuffles: sampler.set_epoch(epoch) is missing"
        )
    else:
        verdict.notes.append(ONE_ORDER)


def _in_one_order(verdict: RunVerdict, ranks: list[list[RunStep]]) -> int:
    """Return how many samples come again in the order of the first epoch; 0 if they come in another order."""
    repeated = 0
    for steps in ranks:
        order = _seen(steps[: verdict.steps])
        epoch = next((place for place in range(1, len(order)) if order[place] == order[0]), len(order))
        if order[epoch:] != order[: len(order) - epoch]:
            return 0
        repeated += len({*order[epoch:]})
    return repeated


def _judge_epochs(verdict: RunVerdict, ranks: list[list[RunStep]]) -> None:
    """Judge the epochs that samplers are told. Samples may not be known again, such as images that are augmented.

    A few samples may come in one order by chance, unless their sampler begins an epoch twice, however short.
    """
    come_again = _in_one_order(verdict, ranks) > 0
    # `seen`: by sampler, how many of its samples the model was trained on. `last`: the epoch that it was told
    # last, and how many had been seen then.
    seen, last = Counter[int](), dict[int, tuple[int, int]]()
    for step in ranks[0]:
        numbers = [len({*_once(micro)}) for micro in step.samples]
        calls = list(zip(step.sources, numbers, strict=False))
        for order in step.orders:
            in_step = sum(number for source, number in calls[: order.calls] if source == order.sampler)
            now = seen[order.sampler] + in_step
            epoch, then = last.get(order.sampler, (-1, 0))
            least = 1 if come_again else AN_EPOCH * order.samples
            if epoch == order.epoch and now - then >= least and not verdict.wrong:
                verdict.wrong.append(
                    f"a DistributedSampler that shuffles is told epoch {epoch} in two epochs, and gives one order in both: sampler.set_epoch(epoch) is missing"
                )
            last[order.sampler] = order.epoch, now
        for source, number in calls:
            seen[source] += number


def _shared_samples(ranks: list[list[RunStep]]) -> str:
    """Return which ranks share samples before any comes again on a rank itself, as the end of a sentence.

    Returns "" if none do.
    """
    epochs = [_first_epoch(_seen(steps)) for steps in ranks]
    pairs = [
        (one, other)
        for one in range(len(epochs))
        for other in range(one + 1, len(epochs))
        if 2 * len(epochs[one] & epochs[other]) >= max(min(len(epochs[one]), len(epochs[other])), 1)
    ]
    return f"; data-parallel ranks {pairs[0][0]} and {pairs[0][1]} saw the same ones" if pairs else ""


def _first_epoch(samples: Iterable[int]) -> set[int]:
    """Return the samples before the first that comes again."""
    epoch: set[int] = set()
    for sample in samples:
        if sample in epoch:
            break
        epoch.add(sample)
    return epoch
