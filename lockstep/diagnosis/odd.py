"""What is odd about a wrong tensor: its elements, ranks, samples, positions, heads, columns. Facts, not causes."""

import math
from collections.abc import Sequence

import torch

from lockstep.diagnosis import evidence, recompute
from lockstep.diagnosis.case import Case
from lockstep.dumps.layout import BATCH, SEQUENCE
from lockstep.ground.words import and_more
from lockstep.plan.mesh import AXES, Cuts, runs

MANY = 1 << 28  # elements of a tensor of which no copies are made
FEW = 3  # elements that are shown one by one


def oddities(case: Case) -> list[str]:
    """Return sentences about the first wrong tensor; [] if what is wrong is not a tensor."""
    if "/" not in case.first:
        return []
    sentences = _differing_ranks(case)
    if not case.is_wrong(case.first):
        return sentences
    own, reference = case.own(case.first), case.right(case.first)
    if not bool(own.isfinite().all()):
        return [*sentences, f"{int((~own.isfinite()).sum())} of {own.numel()} elements are not finite"]
    if not bool(own.any()):
        return [*sentences, "all elements are zero"]
    return (
        sentences
        + _losses(case)
        + _elements(case, own, reference)
        + _places(case, own, reference)
        + _likeness(case, own, reference)
        + _samples(case)
    )


def _losses(case: Case) -> list[str]:
    """Return the first reported loss that is wrong, in words, if the gradient of the logits is the first wrong tensor."""
    if case.first != case.names.logits_gradient:
        return []
    return [
        f"the reported loss is wrong, too: {loss:.6f}, the reference's is {reference:.6f}"
        for loss, reference, tolerated in case.losses()
        if not abs(loss - reference) <= tolerated
    ][:1]


def _differing_ranks(case: Case) -> list[str]:
    """Return which ranks hold another replica than the one that was written, in words; or else of which other tensors some do."""
    ranks = case.odd_ranks(case.first)
    if not ranks:
        others = [name for step, name, _ in case.found.differing if step == case.step]
        return [f"copies of {and_more(others)} differ between ranks"] if others else []
    shown = ", ".join(
        f"{rank} ("
        + ", ".join(f"{axis} {case.mesh.coordinates(rank).along(axis)}" for axis in case.mesh.axes)
        + ")"
        for rank in ranks
    )
    judged = "wrong" if case.is_wrong(case.first) else "right"
    return [
        f"not the same on all ranks that hold it: different on rank {shown}; on the rank that wrote it, it is {judged}"
    ]


def wrong_elements(case: Case, own: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Return a mask of the elements that are off by more than is tolerated of one element.

    If there are none, it is of those off by more than twice what is tolerated of the norm, spread evenly over the elements.
    """
    row, error = case.rows[case.first], (own - reference).abs()
    mask = error > row.tolerated_largest
    return mask if bool(mask.any()) else error > 2 * row.tolerated / math.sqrt(max(own.numel(), 1))


def _elements(case: Case, own: torch.Tensor, reference: torch.Tensor) -> list[str]:
    """Return how many elements are wrong, in words; few are shown one by one."""
    wrong = wrong_elements(case, own, reference)
    count = int(wrong.sum())
    if 0 < count <= FEW:
        places = [tuple(place) for place in wrong.nonzero().tolist()]
        shown = [
            f"{list(place)} is {float(own[place]):.6g}, not {float(reference[place]):.6g}"
            + _sign(own[place], reference[place])
            for place in places
        ]
        return [f"only {count} of {own.numel()} elements {_are(shown)} wrong: {'; '.join(shown)}"]
    zeros = wrong & (own == 0)
    if count and bool((zeros == wrong).all()):
        return [f"{count} of {own.numel()} elements are wrong, and all of them are zero"]
    return [f"{count} of {own.numel()} elements are wrong"]


def _sign(own: torch.Tensor, reference: torch.Tensor) -> str:
    return ": its sign is flipped" if math.isclose(float(own), -float(reference), rel_tol=1e-3) else ""


def _places(case: Case, own: torch.Tensor, reference: torch.Tensor) -> list[str]:
    """Return where the errors are along each dim, in words, by what the dim means."""
    wrong = wrong_elements(case, own, reference)
    sentences: list[str] = []
    if int(wrong.sum()) <= FEW:
        return []
    kind, _, name = case.first.partition("/")
    computed = kind in ("forward", "backward")
    sentences += case.in_one_share(
        case.first, wrong, [axis for axis in case.mesh.axes if not computed or AXES[axis] is Cuts.WEIGHTS]
    )
    if sentences and not computed:
        return sentences
    if not computed:
        words = ["row", "column"] if own.ndim == 2 else ["element"]
        for dim, word in enumerate(words):
            sentences += _slices(wrong, dim, word)
        return sentences
    for dim, symbol in enumerate(case.dump.layout.outputs[name]):
        if symbol == BATCH:
            by_rank = wrong.unflatten(0, (case.mesh.num_sample_shares, case.micro_batches, -1))
            sentences += _slices(by_rank, 0, "DP rank") + _slices(by_rank, 1, "micro batch")
            if not sentences:
                sentences += _slices(wrong, 0, "sample")
        elif symbol == SEQUENCE:
            sentences += _slices(wrong, dim, "position")
        elif dim == own.ndim - 1:
            heads = heads_of(case, own)
            by_head = wrong.unflatten(-1, (heads, -1)) if heads else wrong
            sentences += (_slices(by_head, dim, "head") if heads else []) or _slices(wrong, dim, "column")
        else:
            sentences += _slices(wrong, dim, "head")
    return sentences


def heads_of(case: Case, own: torch.Tensor) -> int:
    """Return the number of heads in the last dim of a projection or of the attention itself; 0 for anything else."""
    if not case.names.is_on_heads(case.first) or own.ndim != 3:
        return 0
    size = case.head_size
    return own.shape[-1] // size if own.shape[-1] % size == 0 else 0


def _slices(wrong: torch.Tensor, dim: int, word: str) -> list[str]:
    """Return which slices along a dim have errors, in words, if some have none. `wrong` is a mask."""
    places, size = places_of(wrong, dim), wrong.shape[dim]
    if len(places) == size or not places:
        return []
    right = sorted({*range(size)} - {*places})
    total = f"of {size}"
    mostly = 2 * int(wrong.sum()) > wrong.numel() // size * len(places)
    if len(right) <= FEW < len(places):
        return [f"{numbered(word, right)} {total} {_are(right)} right, all others wrong"] if mostly else []
    if len(runs(places)) > FEW:
        return [f"{len(right)} {_plural(word)} {total} are right, scattered"] if len(right) > FEW else []
    return [f"only {numbered(word, places)} {total} {_are(places)} wrong"]


def samples_and_positions(case: Case) -> list[tuple[str, int]]:
    """Return (what lies along it, dim) of the samples and of the positions of the first wrong tensor, an output or its gradient."""
    words = {BATCH: "sample", SEQUENCE: "position"}
    symbols = case.dump.layout.outputs[case.path]
    return [(words[symbol], dim) for dim, symbol in enumerate(symbols) if symbol in words]


def places_of(wrong: torch.Tensor, dim: int) -> list[int]:
    """Return the places along a dim at which something is wrong. `wrong` is a mask."""
    return wrong.movedim(dim, 0).reshape(wrong.shape[dim], -1).any(1).nonzero()[:, 0].tolist()


def numbered(word: str, places: Sequence[int]) -> str:
    """Return sorted numbers of samples, positions, ... in words, such as "positions 0 to 3, 7"."""
    return f"{word if len(places) == 1 else _plural(word)} {_spans(places)}"


def _plural(word: str) -> str:
    return f"{word}es" if word.endswith("ch") else f"{word}s"


def _are(places: list) -> str:
    return "is" if len(places) == 1 else "are"


def _spans(places: Sequence[int]) -> str:
    """Return sorted numbers in words, such as "0 to 3, 7"."""
    return ", ".join(
        str(first) if length == 1 else f"{first} to {first + length - 1}" for first, length in runs(places)
    )


def _likeness(case: Case, own: torch.Tensor, reference: torch.Tensor) -> list[str]:
    """Return whether the tensor is a multiple of the right one (as a whole or by head), reordered, or shifted, in words."""
    factor = case.factor([case.rows[case.first]])
    if factor is not None:
        blurred = "" if case.options["precision"] == "fp32" else ", as far as bfloat16's noise shows"
        if case.first.startswith("parameter/"):  # numbers of ranks have no part in an update
            return [f"its change is {evidence.shown(factor)} times the right one{blurred}"]
        return [f"it is {case.in_words(factor)} times the right one{blurred}"]
    wrong = wrong_elements(case, own, reference)
    times = evidence.multiple_of(own[wrong], reference[wrong])
    if FEW < int(wrong.sum()) < wrong.numel() and _is_multiple(own[wrong], reference[wrong], times):
        return [f"the wrong elements are {evidence.shown(times)} times the right ones"]
    error = own - reference
    constant = float(error.mean())
    if own.numel() > 1 and float((error - constant).abs().max()) <= evidence.SAME_FACTOR * abs(constant):
        return [f"every element is off by {constant:+.4g}"]
    sentences, heads = [], heads_of(case, own)
    if heads:
        part, base = (
            tensor.unflatten(-1, (heads, -1)).movedim(-2, 0).flatten(1) for tensor in (own, reference)
        )
        factors = [evidence.multiple_of(a, b) for a, b in zip(part, base, strict=True)]
        if case.explains(case.first, _scaled(reference, heads, factors)):
            sentences.append(
                f"each head is the reference's, times {', '.join(f'{factor:.4g}' for factor in factors)}"
            )
    return sentences


def _is_multiple(own: torch.Tensor, reference: torch.Tensor, times: float) -> bool:
    """Whether `times` the reference leaves nearly nothing of the error."""
    left, error = (evidence.relative_error(own, base) for base in (times * reference, reference))
    return left <= evidence.SAME_FACTOR * error


def _samples(case: Case) -> list[str]:
    """Return the weights of each DP rank's micro batches in a gradient, in words, if nothing else is wrong with it."""
    kind, _, parameter = case.first.partition("/")
    parts = recompute.Contributions(case, parameter) if kind == "gradient" else None
    solution = recompute.sample_weights(parts) if parts is not None and parts.known else None
    if solution is None or not case.leaves_little(case.first, solution[1]):
        return []
    if evidence.are_one_factor(solution[0][0]):
        return []  # a factor, which is seen without this
    shown = "; ".join(
        f"DP rank {rank}: {', '.join(f'{value:.3g}' for value in row)}"
        for rank, row in enumerate((solution[0][0].round(decimals=3) + 0.0).tolist())
    )
    return [f"it is right except for the weights of the micro batches in it (1 is right): {shown}"]


def _scaled(reference: torch.Tensor, heads: int, factors: list[float]) -> torch.Tensor:
    """Return the tensor with each head multiplied by its factor."""
    return (
        reference.unflatten(-1, (heads, -1)) * torch.tensor(factors, dtype=reference.dtype)[:, None]
    ).flatten(-2)
