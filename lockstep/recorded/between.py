"""What changes between the update of one step and the next step: weights, and what optimizers keep."""

from collections.abc import Iterable, Iterator

import torch

from lockstep.ground.words import and_more
from lockstep.recorder.recording import Recording
from lockstep.verdict.rows import StepVerdict, Wrong

ROUNDED = 4  # machine epsilons of a weight's norm
# Machine epsilons that norms may be apart that are to be one, and elements that follow from them
SAME_NORM = 2


def judge(recording: Recording, verdict: StepVerdict) -> None:
    """What a step ends with, weights and what the optimizer keeps, is what the next one begins with, bit for bit."""
    step = verdict.step
    when = f"between the update of step {step - 1} and step {step}"
    elsewhere = (
        recording.holders(step - 1) if step > 1 else {}
    )  # ranks that do not hold a parameter are given it later
    changed = sorted(
        {
            name
            for rank, one in recording.steps[step - 1].items()
            for name in one.changed
            if rank in elsewhere.get(name.removeprefix("weight/"), [rank])
        }
    )
    weights, of_all, state = (
        [name.removeprefix(kind) for name in changed if name.startswith(kind)]
        for kind in ("weight/", "attribute/", "state/")
    )
    waiting = recording.waiting(step)
    state = [name for name in state if name.partition("/")[2] not in waiting]
    if not waiting:  # else the attributes are those of other optimizers
        state += [name.rpartition("/")[0] for name in of_all]
    shapes = {name: one.shape for name, one in recording.skeleton.named_parameters()}
    trained = set(recording.names(step, "gradient"))
    shares: dict[str, list[tuple[float, float]]] = {}
    rounded: list[str] = []

    def alike(shape: torch.Size) -> Iterator[torch.Tensor]:
        """The trained weights of this shape."""
        names = (one for one, own in shapes.items() if one in trained and own == shape)
        return (recording.whole(step, f"weight/{one}")[0] for one in names)

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
            bounds = " and ".join(f"{one:.5g}" for one in sorted({float(least), float(most)}))
            verdict.notes.append(f"{name} was clamped by {bounds} {when}")
        elif _is_rounding(before, after):
            weights.remove(name)
            rounded.append(name)
        elif name not in trained and (near := _averaged(before, after, alike(after.shape))):
            shares[name] = near
        elif _is_normalised(before, after):
            weights.remove(name)
            verdict.notes.append(f"{name} was normalised {when}: its rows or columns have one norm")
    if rounded:
        verdict.notes.append(f"{and_more(rounded)} changed by rounding errors alone {when}")
    low, high = _common(list(shares.values()))
    # Such as a teacher's; its first moves may be no more than rounding errors
    if shares and low <= high and not 0 < low <= high == 1:
        weights = [name for name in weights if name not in shares]
        verdict.notes.append(
            f"{and_more(list(shares))} moved by {low:.2g} to {high:.2g} of the way to trained weights {when}, as averages do"
        )
    if weights:
        verdict.wrong.append(Wrong(f"{and_more(weights)} changed {when}"))
    if state:
        verdict.wrong.append(
            f"what the optimizer keeps changed between step {step - 1} and step {step}: {and_more(state)}"
        )


def _is_rounding(before: torch.Tensor, after: torch.Tensor) -> bool:
    """Whether a weight was taken elsewhere and back, as to its average for an evaluation. 16 bits round by more than an update may be."""
    eps = min(torch.finfo(before.dtype).eps, torch.finfo(torch.float32).eps)
    before = before.double()
    return bool((after.double() - before).norm() <= ROUNDED * eps * before.norm())


def _is_pruned(begun: torch.Tensor, before: torch.Tensor, after: torch.Tensor) -> bool:
    """Whether elements were set to 0 after an update, and nothing else. `begun` is what the step began with.

    Whole rows that were 0 then, too, are said to have changed: as well, the update of a shard may have been undone.
    """
    gone = after == 0
    if gone.all() or not torch.equal(before.masked_fill(gone, 0), after):
        return False
    rows = [gone.movedim(dim, 0).flatten(1) for dim in range(gone.ndim if gone.ndim > 1 else 0)]
    scattered = rows and all(bool((one.any(1) & ~one.all(1)).any()) for one in rows)
    return bool((begun[gone & (before != 0)] != 0).any() or scattered)


def _is_normalised(before: torch.Tensor, after: torch.Tensor) -> bool:
    """Whether each row, or each column, has its direction still, and all have one norm, as prototypes that a loop normalises."""
    rounded = SAME_NORM * torch.finfo(after.dtype).eps
    before, after = before.double(), after.double()
    for dim in range(after.ndim) if after.ndim > 1 else ():
        norms = after.norm(dim=dim, keepdim=True)
        again = before / before.norm(dim=dim, keepdim=True) * norms.mean()
        same = norms.numel() > 1 and bool(((norms / norms.mean() - 1).abs() <= rounded).all())
        if same and bool(((again - after).abs() <= rounded * after.abs()).all()):
            return True
    return False


def _averaged(
    before: torch.Tensor, after: torch.Tensor, others: Iterable[torch.Tensor]
) -> list[tuple[float, float]]:
    """Which part of the way to each of `others` a weight may have moved: at least, at most. Any part, if it is where it was but for rounding errors."""
    rounded = 4 * torch.finfo(after.dtype).eps
    before, moved = before.double(), after.double() - before.double()
    if bool((moved.abs() <= rounded * before.abs()).all()):
        return [(0.0, 1.0)]
    found = []
    for other in others:
        way = other.double() - before
        off = rounded * (before.abs() + way.abs())
        square = float(way.square().sum())
        if not square:
            continue
        # Rounding errors of all elements may have one sign: those of a norm's weights, all of them 1, are the same.
        share, unsure = float((way * moved).sum()) / square, float((way.abs() * off).sum()) / square
        if bool(((share * way - moved).abs() <= off + unsure * way.abs()).all()):
            found.append((max(share - unsure, 0.0), min(share + unsure, 1.0)))
    return found


def _common(shares: list[list[tuple[float, float]]]) -> tuple[float, float]:
    """The part of the way that all weights may have moved, each to one of the weights like it: at least, at most. (1, 0) if there is none."""
    for start in sorted({low for each in shares for low, _ in each}, reverse=True):
        ends = [max((high for low, high in each if low <= start <= high), default=-1.0) for each in shares]
        if min(ends) >= start:
            return start, min(ends)
    return 1.0, 0.0
