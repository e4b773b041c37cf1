"""Rules for outputs and gradients of outputs: values of other samples, positions or heads, other weights of tokens, lost gradients."""

import torch

from lockstep.diagnosis import evidence
from lockstep.diagnosis.case import LEFT, Case, describe
from lockstep.diagnosis.odd import FEW, heads_of, numbered, places_of, wrong_elements
from lockstep.dumps.layout import BATCH, SEQUENCE
from lockstep.ground.words import and_more
from lockstep.verdict.result import Cause

WORDS = {BATCH: "sample", SEQUENCE: "position"}
# What lies along a dim -> (the axis that cuts it, or sends it on in parts; what the cause is where there is this axis)
AXES = {
    "sample": ("pp", "pipeline"),
    "position": ("cp", "context parallelism"),
    "head": ("cp", "context parallelism"),
}


def _module(case: Case) -> str:
    """Return the name of the first wrong tensor without its kind."""
    return case.first.partition("/")[2]


def _dims(case: Case) -> list[tuple[str, int]]:
    """Return (what lies along it, dim) of the samples and of the positions of the first wrong tensor."""
    symbols = case.dump.layout.outputs[_module(case)]
    return [(WORDS[symbol], dim) for dim, symbol in enumerate(symbols) if symbol in WORDS]


def exchanged(case: Case) -> Cause | None:
    """At least half of the wrong samples, positions or heads have the values of others."""
    own, right, dims = case.own(case.first), case.right(case.first), _dims(case)
    heads = heads_of(case, own)
    if heads:
        own, right = (tensor.unflatten(-1, (heads, -1)) for tensor in (own, right))
        dims.append(("head", own.ndim - 2))
    wrong = wrong_elements(case, own, right)
    for word, dim in dims:
        places = places_of(wrong, dim)
        moved = _moved(case, own, right, places, dim)
        if places and len(moved) >= len(places) / 2:
            axis, name = AXES[word]
            spans = _spans(word, moved)
            said = ", ".join(spans[:FEW]) + ", and so on" * (len(spans) > FEW)
            left = len(places) - len(moved)
            rest = (
                f"{left} more {'are' if left > 1 else 'is'} wrong in another way"
                if left
                else "all else is right"
            )
            name = name if case.mesh.size(axis) > 1 else "pieces exchanged"
            return Cause(name, f"in {describe(_module(case))}, {said}; {rest}")
    return None


def _moved(case: Case, own: torch.Tensor, right: torch.Tensor, places: list[int], dim: int) -> dict[int, int]:
    """Return wrong place along a dim -> the place whose values it has, as exactly as a right tensor matches the reference."""
    of_places, right_of_places = (tensor.movedim(dim, 0).flatten(1) for tensor in (own, right))
    nearest = torch.cdist(of_places[places], right_of_places).argmin(1).tolist()
    moved = {}
    for place, source in zip(places, nearest, strict=True):
        left, error = ((of_places[place] - right_of_places[other]).norm() for other in (source, place))
        if float(left) <= min(LEFT * float(error), case.rows[case.first].tolerated):
            moved[place] = source
    return moved


def _spans(word: str, moved: dict[int, int]) -> list[str]:
    """Return which places have the values of which others, such as "positions 4 to 7 have the values of positions 0 to 3"."""
    spans: list[list[int]] = []  # [first place, the place whose values it has, length]
    for place, source in moved.items():
        first, its_source, length = spans[-1] if spans else (place, source, 0)
        if spans and (place, source) == (first + length, its_source + length):
            spans[-1][2] += 1
        else:
            spans.append([place, source, 1])
    return [
        f"{numbered(word, range(place, place + length))} {'has' if length == 1 else 'have'} "
        f"the values of {numbered(word, range(source, source + length))}"
        for place, source, length in spans
    ]


def mask_of_own_positions(case: Case) -> Cause | None:
    """With context parallelism, the causal mask counts the positions of each rank alone: its first one sees the first key only."""
    attention = _module(case).rpartition(".o_proj.input")[0]
    values = f"forward/{attention}.v_proj"
    first_of_ranks = [pieces[0][0] for pieces in case.pieces("cp") if pieces[0][0]]
    if not attention or not first_of_ranks or not case.has(values) or case.is_wrong(values):
        return None
    own, right, values_of_heads = (
        tensor.unflatten(-1, (-1, case.head_size))
        for tensor in (case.own(case.first), case.right(case.first), case.own(values))
    )
    values_of_heads = values_of_heads.repeat_interleave(own.shape[2] // values_of_heads.shape[2], 2)
    for place in first_of_ranks:
        error = float((own - right)[:, place].norm())
        left = float((own[:, place] - values_of_heads[:, 0]).norm())
        if not left <= min(LEFT * error, case.rows[case.first].tolerated):
            return None
    return Cause(
        "context parallelism",
        f"at {numbered('position', first_of_ranks)}, the first of {'a cp rank' if len(first_of_ranks) == 1 else 'their cp ranks'}, "
        "attention is the value at position 0, as recomputed: the mask counts the positions of each rank from 0",
    )


def own_queries_only(case: Case) -> Cause | None:
    """With context parallelism, the gradient is wrong at the positions that queries of other ranks see, and at no others."""
    owner = {
        place: rank
        for rank, pieces in enumerate(case.pieces("cp"))
        for start, length in pieces
        for place in range(start, start + length)
    }
    dims = [dim for word, dim in _dims(case) if word == "position"]
    if not owner or not dims or not case.names.is_on_heads(case.first):
        return None
    own, right = case.own(case.first), case.right(case.first)
    wrong = set(places_of(wrong_elements(case, own, right), dims[0]))
    last = max(owner)
    seen = {place for place in owner if any(owner[later] != owner[place] for later in range(place, last + 1))}
    # Positions of whole ranks would say less: any error of these ranks alone is at these positions.
    of_ranks = {owner[place] for place in wrong}
    if wrong != seen or wrong == {place for place in owner if owner[place] in of_ranks}:
        return None
    return Cause(
        "cp reduction missing",
        f"the gradient of {describe(_module(case))} is wrong at {numbered('position', sorted(wrong))}, which queries of other "
        "cp ranks see, and right at the others: what comes back from these queries is lost",
    )


def lost(case: Case) -> Cause | None:
    """No gradient arrives at an output: it is zero in all wrong tokens."""
    own, right = case.own(case.first), case.right(case.first)
    wrong = wrong_elements(case, own, right)
    tokens = wrong.any(-1)
    if not bool(tokens.any()) or bool(own[tokens].any()):
        return None
    where = [
        numbered(word, places)
        for word, dim in _dims(case)
        if len(places := places_of(tokens, dim)) < tokens.shape[dim]
    ]
    is_logits = case.first == case.names.logits_gradient
    if is_logits and len(where) == 1 and where[0].startswith("sample"):
        return Cause("accumulation", f"the loss of {where[0]} has no gradient: that of the logits is zero")
    if is_logits and where:
        return None  # tokens without a weight
    at = f" at {and_more(where)}" if where else ""
    return Cause("gradient lost", f"no gradient arrives at {describe(_module(case))}{at}: it is zero there")


def weights_of_tokens(case: Case) -> Cause | None:
    """The gradient of the logits is right except for the weights of tokens, of which there are few different ones."""
    if case.first != case.names.logits_gradient:
        return None
    own, right = case.own(case.first), case.right(case.first)
    square = right.square().sum(-1)
    weights = torch.where(square > 0, (own * right).sum(-1) / square, 1.0)
    if not case.explains(case.first, weights[..., None] * right):
        return None
    groups: list[list[float]] = []
    for weight in weights.flatten().sort().values.tolist():
        if not groups or weight - groups[-1][-1] > evidence.SAME_FACTOR * max(1.0, abs(weight)):
            groups.append([])
        groups[-1].append(weight)
    if not 1 < len(groups) <= FEW + 1:
        return None
    means = [sum(group) / len(group) for group in groups]
    shown = [
        f"{len(group)} token{'s' * (len(group) > 1)} {mean:.4g} times"
        for group, mean in zip(groups, means, strict=True)
    ]
    return Cause("token weights", f"in the gradient of the logits, {', '.join(shown)} (1 is right)")


FORWARD_RULES = (mask_of_own_positions, exchanged)
LOSS_RULES = (lost, weights_of_tokens)
BACKWARD_RULES = (exchanged, lost, own_queries_only)
