"""Judge what changes between the update of one step and the next step: weights, and what optimizers keep."""

from collections.abc import Iterable, Iterator

import torch

from lockstep.ground.words import and_more
from lockstep.recorder.recording import Recording
from lockstep.verdict.rows import StepVerdict, Wrong

# A weight that moved by at most so many machine epsilons of its norm moved by rounding errors alone.
ROUNDED = 4
# Norms that are to be equal may differ by so many machine epsilons, and so may elements that follow from them.
SAME_NORM = 2


def judge(recording: Recording, verdict: StepVerdict) -> None:
    """Judge whether the step begins with what the one before ended with, bit for bit: the weights, and what the optimizer keeps.

    Adds sentences to the verdict.
    """
    step = verdict.step
    when = f"between the update of step {step - 1} and step {step}"
    # Ranks that do not hold a parameter are given it later.
    holders = recording.holders(step - 1) if step > 1 else {}
    changed = sorted(
        {
            name
            for rank, record in recording.steps[step - 1].items()
            for name in record.changed
            if rank in holders.get(name.removeprefix("weight/"), [rank])
        }
    )
    weights, attributes, state = (
        [name.removeprefix(kind) for name in changed if name.startswith(kind)]
        for kind in ("weight/", "attribute/", "state/")
    )
    waiting = recording.waiting(step)
    state = [name for name in state if name.partition("/")[2] not in waiting]
    # If some parameters wait, the attributes are those of other optimizers.
    if not waiting:
        state += [name.rpartition("/")[0] for name in attributes]
    shapes = {name: parameter.shape for name, parameter in recording.parameters.items()}
    trained = set(recording.names(step, "gradient"))
    # Of each weight that may be an average: by which shares of the way to trained weights it may have moved
    shares: dict[str, list[tuple[float, float]]] = {}
    rounded: list[str] = []

    def alike(shape: torch.Size) -> Iterator[torch.Tensor]:
        """Return the trained weights of this shape."""
        names = (name for name, other in shapes.items() if name in trained and other == shape)
        return (recording.whole(step, f"weight/{name}")[0] for name in names)

    for name in list(weights):
        before, after = (
            recording.whole(number, f"{kind}/{name}")[0]
            for number, kind in ((step - 1, "updated"), (step, "weight"))
        )
        least, most = after.min(), after.max()
        if _is_pruned(recording.whole(step - 1, f"weight/{name}")[0], before, after):
            weights.remove(name)
            number = int(((after == 0) & (before != 0)).sum())
            verdict.notes.append(f"{number} elements of {name} were set to 0 {when}, as by pruning")
        elif (least < most or after.numel() == 1) and torch.equal(before.clamp(least, most), after):
            weights.remove(name)
            bounds = ", ".join(f"{bound:.5g}" for bound in sorted({float(least), float(most)}))
            verdict.notes.append(f"{name} was clamped to [{bounds}] {when}")
        elif _is_rounding(before, after):
            weights.remove(name)
            rounded.append(name)
        elif name not in trained and (spans := _shares_moved(before, after, alike(after.shape))):
            shares[name] = spans
        elif _is_normalised(before, after):
            weights.remove(name)
            verdict.notes.append(f"{name} was normalised {when}: its rows or columns have one norm")
    if rounded:
        verdict.notes.append(f"{and_more(rounded)} changed by rounding errors alone {when}")
    low, high = _common_share(list(shares.values()))
    # These are averages, such as a teacher's weights. Their first moves may be no more than rounding errors.
    if shares and low <= high and not 0 < low <= high == 1:
        weights = [name for name in weights if name not in shares]
        verdict.notes.append(
            f"{and_more(list(shares))} moved by {low:.2g} to {high:.2g} of the way to trained weights {when}, as averages do"
        )
    earlier = recording.steps[step - 2].values() if step > 1 else ()
    stepped = [optimizer for record in earlier for optimizer in record.optimizers if optimizer.stepped_by]
    moved = {name for optimizer in stepped for name in optimizer.held}.intersection(weights)
    if moved:
        inner = stepped[0].kind.partition(":")[2]
        verdict.leave(
            f"what {stepped[0].stepped_by} does to the weights after the step of {inner} is not judged"
        )
        weights = [name for name in weights if name not in moved]
    if weights:
        verdict.wrong.append(Wrong(f"{and_more(weights)} changed {when}"))
    if state:
        verdict.wrong.append(
            f"what the optimizer keeps changed between step {step - 1} and step {step}: {and_more(state)}"
        )


def _is_rounding(before: torch.Tensor, after: torch.Tensor) -> bool:
    """Whether a weight moved by rounding errors alone, as where it was taken elsewhere and back, such as to its average for an evaluation.

    Rounding errors are taken to be those of float32 at most: in 16 bits, they may be larger than an update.
    """
    eps = min(torch.finfo(before.dtype).eps, torch.finfo(torch.float32).eps)
    before = before.double()
    return bool((after.double() - before).norm() <= ROUNDED * eps * before.norm())


def _is_pruned(begun: torch.Tensor, before: torch.Tensor, after: torch.Tensor) -> bool:
    """Whether elements were set to 0 after an update, and nothing else. `begun` is the weight that the step began with.

    Whole rows that were 0 then, too, do not count as pruned: the update of a shard may have been undone as well.
    """
    zeroed = after == 0
    if zeroed.all() or not torch.equal(before.masked_fill(zeroed, 0), after):
        return False
    masks = [zeroed.movedim(dim, 0).flatten(1) for dim in range(zeroed.ndim if zeroed.ndim > 1 else 0)]
    is_scattered = masks and all(bool((mask.any(1) & ~mask.all(1)).any()) for mask in masks)
    return bool((begun[zeroed & (before != 0)] != 0).any() or is_scattered)


def _is_normalised(before: torch.Tensor, after: torch.Tensor) -> bool:
    """Whether each row, or each column, kept its direction, and all have one norm, as prototypes that a loop normalises."""
    tolerated = SAME_NORM * torch.finfo(after.dtype).eps
    before, after = before.double(), after.double()
    for dim in range(after.ndim) if after.ndim > 1 else ():
        norms = after.norm(dim=dim, keepdim=True)
        rescaled = before / before.norm(dim=dim, keepdim=True) * norms.mean()
        is_one_norm = norms.numel() > 1 and bool(((norms / norms.mean() - 1).abs() <= tolerated).all())
        if is_one_norm and bool(((rescaled - after).abs() <= tolerated * after.abs()).all()):
            return True
    return False


def _shares_moved(
    before: torch.Tensor, after: torch.Tensor, others: Iterable[torch.Tensor]
) -> list[tuple[float, float]]:
    """Return by which share of the way to each of `others` a weight may have moved: (at least, at most).

    Those that it did not move towards are left out. A weight that is where it was, but for rounding errors, may have moved by any share.
    """
    rounding = 4 * torch.finfo(after.dtype).eps
    before, moved = before.double(), after.double() - before.double()
    if bool((moved.abs() <= rounding * before.abs()).all()):
        return [(0.0, 1.0)]
    spans = []
    for other in others:
        way = other.double() - before
        errors = rounding * (before.abs() + way.abs())
        square = float(way.square().sum())
        if not square:
            continue
        # The rounding errors of all elements may have one sign: those of a norm's weights, all of them 1, are the same.
        share, error = float((way * moved).sum()) / square, float((way.abs() * errors).sum()) / square
        if bool(((share * way - moved).abs() <= errors + error * way.abs()).all()):
            spans.append((max(share - error, 0.0), min(share + error, 1.0)))
    return spans


def _common_share(shares: list[list[tuple[float, float]]]) -> tuple[float, float]:
    """Return the share of the way that all weights may have moved, each to one of the weights like it: (at least, at most).

    (1, 0) if there is none.
    """
    for start in sorted({low for spans in shares for low, _ in spans}, reverse=True):
        ends = [max((high for low, high in spans if low <= start <= high), default=-1.0) for spans in shares]
        if min(ends) >= start:
            return start, min(ends)
    return 1.0, 0.0
