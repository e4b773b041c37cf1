"""What is odd about a wrong tensor: its elements, ranks, samples, positions, heads, columns. Facts, not causes."""

import math

import torch

from lockstep.diagnosis import evidence, recompute
from lockstep.diagnosis.case import Case
from lockstep.dumps.layout import BATCH, SEQUENCE
from lockstep.plan.mesh import AXES, Cuts, runs

FEW = 3  # elements that are shown one by one


def oddities(case: Case) -> list[str]:
    """Sentences about the first wrong tensor; [] if what is wrong is not a tensor."""
    if "/" not in case.first:
        return []
    said = _ranks(case)
    if not case.is_wrong(case.first):
        return said
    own, exact = case.own(case.first), case.right(case.first)
    if not bool(own.isfinite().all()):
        return [*said, f"{int((~own.isfinite()).sum())} of {own.numel()} elements are not finite"]
    if not bool(own.any()):
        return [*said, "all elements are zero"]
    return (
        said
        + _losses(case)
        + _elements(case, own, exact)
        + _places(case, own, exact)
        + _likeness(case, own, exact)
        + _samples(case)
    )


def _losses(case: Case) -> list[str]:
    """The losses that are wrong, if they are what is wrong with the gradient of the logits."""
    if case.first != case.names.logits_gradient:
        return []
    return [
        f"the reported loss is wrong, too: {mine:.6f}, the reference's is {right:.6f}"
        for mine, right, tolerated in case.losses()
        if not abs(mine - right) <= tolerated
    ][:1]


def _ranks(case: Case) -> list[str]:
    ranks = case.odd_ranks(case.first)
    if not ranks:
        return []
    where = ", ".join(
        f"{rank} ("
        + ", ".join(f"{axis} {case.mesh.coordinates(rank).along(axis)}" for axis in case.mesh.axes)
        + ")"
        for rank in ranks
    )
    right = "" if case.is_wrong(case.first) else "; on the rank that wrote it, it is right"
    return [f"not the same on all ranks that hold it: different on rank {where}{right}"]


def _wrong_elements(case: Case, own: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """A mask of elements off by more than is tolerated of one element; if there are none, of the norm spread evenly."""
    row, error = case.rows[case.first], (own - exact).abs()
    found = error > row.tolerated_largest
    return found if bool(found.any()) else error > 2 * row.tolerated / math.sqrt(max(own.numel(), 1))


def _elements(case: Case, own: torch.Tensor, exact: torch.Tensor) -> list[str]:
    wrong = _wrong_elements(case, own, exact)
    count = int(wrong.sum())
    if 0 < count <= FEW:
        places = [tuple(place) for place in wrong.nonzero().tolist()]
        shown = [
            f"{list(place)} is {float(own[place]):.6g}, not {float(exact[place]):.6g}"
            + _sign(own[place], exact[place])
            for place in places
        ]
        return [f"only {count} of {own.numel()} elements {_are(shown)} wrong: {'; '.join(shown)}"]
    zeros = wrong & (own == 0)
    if count and bool((zeros == wrong).all()):
        return [f"{count} of {own.numel()} elements are wrong, and all of them are zero"]
    return [f"{count} of {own.numel()} elements are wrong"]


def _sign(own: torch.Tensor, exact: torch.Tensor) -> str:
    return ": its sign is flipped" if math.isclose(float(own), -float(exact), rel_tol=1e-3) else ""


def _places(case: Case, own: torch.Tensor, exact: torch.Tensor) -> list[str]:
    """Where the error is along each dim, by what the dim means."""
    wrong = _wrong_elements(case, own, exact)
    said: list[str] = []
    if int(wrong.sum()) <= FEW:
        return []
    kind, _, name = case.first.partition("/")
    computed = kind in ("forward", "backward")
    said += case.in_one_share(
        case.first, wrong, [axis for axis in case.mesh.axes if not computed or AXES[axis] is Cuts.WEIGHTS]
    )
    if said and not computed:
        return said
    if not computed:
        what = ["row", "column"] if own.ndim == 2 else ["element"]
        for dim, word in enumerate(what):
            said += _along(wrong, dim, word)
        return said
    for dim, symbol in enumerate(case.dump.layout.outputs[name]):
        if symbol == BATCH:
            shares = wrong.unflatten(0, (case.mesh.num_sample_shares, case.micro_batches, -1))
            said += _along(shares, 0, "DP rank") + _along(shares, 1, "micro batch")
            if not said:
                said += _along(wrong, 0, "sample")
        elif symbol == SEQUENCE:
            said += _along(wrong, dim, "position")
        elif dim == own.ndim - 1:
            heads = _heads(case, own)
            split = wrong.unflatten(-1, (heads, -1)) if heads else wrong
            said += (_along(split, dim, "head") if heads else []) or _along(wrong, dim, "column")
        else:
            said += _along(wrong, dim, "head")
    return said


def _heads(case: Case, own: torch.Tensor) -> int:
    """The number of heads in the last dim of a projection or of the attention itself; 0 for anything else."""
    if not case.names.is_on_heads(case.first) or own.ndim != 3:
        return 0
    size = case.head_size
    return own.shape[-1] // size if own.shape[-1] % size == 0 else 0


def _along(wrong: torch.Tensor, dim: int, word: str) -> list[str]:
    """Which slices along a dim have errors, if some have none."""
    hit = wrong.movedim(dim, 0).reshape(wrong.shape[dim], -1).any(1)
    places = hit.nonzero()[:, 0].tolist()
    if len(places) == len(hit) or not places:
        return []
    right = (~hit).nonzero()[:, 0].tolist()
    of = f"of {len(hit)}"
    mostly = 2 * int(wrong.sum()) > wrong.numel() // len(hit) * len(places)
    if len(right) <= FEW < len(places):
        return [f"{_numbered(word, right)} {of} {_are(right)} right, all others wrong"] if mostly else []
    if len(runs(places)) > FEW:
        return [f"{len(right)} {word}s {of} are right, scattered"] if len(right) > FEW else []
    return [f"only {_numbered(word, places)} {of} {_are(places)} wrong"]


def _numbered(word: str, places: list[int]) -> str:
    return f"{word}{'' if len(places) == 1 else 's'} {_spans(places)}"


def _are(places: list) -> str:
    return "is" if len(places) == 1 else "are"


def _spans(places: list[int]) -> str:
    """ "0 to 3, 7": sorted numbers in words."""
    return ", ".join(
        str(first) if length == 1 else f"{first} to {first + length - 1}" for first, length in runs(places)
    )


def _likeness(case: Case, own: torch.Tensor, exact: torch.Tensor) -> list[str]:
    """Whether the tensor is a multiple of the right one (as a whole or by head), reordered, or shifted."""
    factor = case.factor([case.rows[case.first]])
    if factor is not None:
        blurred = "" if case.options["precision"] == "fp32" else ", as far as bfloat16's noise shows"
        if case.first.startswith("parameter/"):  # numbers of ranks have no part in an update
            return [f"its change is {factor:.4g} times the right one{blurred}"]
        return [f"it is {case.in_words(factor)} times the right one{blurred}"]
    wrong = _wrong_elements(case, own, exact)
    times = evidence.multiple_of(own[wrong], exact[wrong])
    if FEW < int(wrong.sum()) < wrong.numel() and _is_multiple(own[wrong], exact[wrong], times):
        return [f"the wrong elements are {times:.4g} times the right ones"]
    error = own - exact
    constant = float(error.mean())
    if own.numel() > 1 and float((error - constant).abs().max()) <= evidence.SAME_FACTOR * abs(constant):
        return [f"every element is off by {constant:+.4g}"]
    said, heads = [], _heads(case, own)
    if heads:
        mine, right = (tensor.unflatten(-1, (heads, -1)).movedim(-2, 0).flatten(1) for tensor in (own, exact))
        factors = [evidence.multiple_of(a, b) for a, b in zip(mine, right, strict=True)]
        if case.explains(case.first, _scaled(exact, heads, factors)):
            said.append(
                f"each head is the reference's, times {', '.join(f'{factor:.4g}' for factor in factors)}"
            )
        else:
            order = _order(mine, right)
            if order and case.explains(
                case.first, exact.unflatten(-1, (heads, -1))[..., order, :].flatten(-2)
            ):
                said.append(f"the heads are in another order: {', '.join(map(str, order))}")
    elif own.ndim == 2 and len(own) <= 1024 and not case.first.startswith(("forward/", "backward/")):
        order = _order(own, exact)
        if order and case.explains(case.first, exact[order]):
            moved = [row for row, place in enumerate(order) if row != place]
            said.append(f"{len(moved)} rows are in other places; the first is row {moved[0]}")
    if own.ndim == 3 and own.shape[1] > 2 and case.first.startswith("forward/"):
        for what, mine, right in (
            ("before", own[:, 1:], exact[:, :-1]),
            ("after", own[:, :-1], exact[:, 1:]),
        ):
            if evidence.relative_error([mine], [right]) <= 1e-4 < evidence.relative_error([own], [exact]):
                said.append(f"each position has the values of the one {what} it")
    return said


def _is_multiple(own: torch.Tensor, exact: torch.Tensor, times: float) -> bool:
    left, off = (evidence.relative_error([own], [one]) for one in (times * exact, exact))
    return left <= evidence.SAME_FACTOR * off


def _samples(case: Case) -> list[str]:
    """The weights of each DP rank's micro batches in a gradient, if nothing else is wrong with it."""
    kind, _, parameter = case.first.partition("/")
    found = recompute.Contributions(case, parameter) if kind == "gradient" else None
    solved = recompute.sample_weights(found) if found is not None and found.known else None
    if solved is None or not case.leaves_little(case.first, solved[1]):
        return []
    if float((solved[0] - solved[0].mean()).abs().max()) <= evidence.SAME_FACTOR:
        return []  # a factor, which is seen without this
    shown = "; ".join(
        f"DP rank {rank}: {', '.join(f'{value:.3g}' for value in row)}"
        for rank, row in enumerate((solved[0].round(decimals=3) + 0.0).tolist())
    )
    return [f"it is right except for the weights of the micro batches in it (1 is right): {shown}"]


def _scaled(exact: torch.Tensor, heads: int, factors: list[float]) -> torch.Tensor:
    return (exact.unflatten(-1, (heads, -1)) * torch.tensor(factors, dtype=exact.dtype)[:, None]).flatten(-2)


def _order(own: torch.Tensor, exact: torch.Tensor) -> list[int]:
    """Which of the right rows each row is nearest to, if that is not the same row for all; [] otherwise."""
    nearest = torch.cdist(own, exact).argmin(1).tolist()
    return nearest if nearest != list(range(len(nearest))) and len(set(nearest)) == len(nearest) else []
