"""Rules for values that are right and in another place."""

from collections.abc import Iterator

import torch

from lockstep.diagnosis import evidence
from lockstep.diagnosis.case import LEFT, Case, describe
from lockstep.diagnosis.odd import (
    FEW,
    MANY,
    heads_of,
    numbered,
    places_of,
    samples_and_positions,
    wrong_elements,
)
from lockstep.ground.words import listed
from lockstep.verdict.judgement import Judgement
from lockstep.verdict.result import Cause

FEATURES = 16  # of a place, at least
NEARLY = 2  # times the least distance: as near, in view of rounding errors
SAME = 1e-9  # relative difference of elements of the reference that are the same
DISTANCES = 1 << 26  # between rows of the embedding, at most
ROWS = 1024  # of a matrix, at most, that are held against each other


def outputs_exchanged(case: Case) -> Cause | None:
    """At least half of the wrong samples, positions or heads have the values of others."""
    own = case.own(case.first)
    if own.numel() > MANY:
        return None
    right, dims = case.right(case.first), samples_and_positions(case)
    heads = heads_of(case, own)
    if heads:
        own, right = (tensor.unflatten(-1, (heads, -1)) for tensor in (own, right))
        dims.append(("head", own.ndim - 2))
    wrong = wrong_elements(case, own, right)
    for word, dim in dims:
        places = places_of(wrong, dim)
        if not places or own.numel() < FEATURES * own.shape[dim]:
            continue  # so few numbers are like others by chance
        moved = _moved(case, own, right, places, dim)
        spans = _spans(word, moved)
        if word == "position" and len(moved) > len(set(moved.values())) and 2 * len(spans) > len(moved):
            continue  # where attention is nearly a mean, positions have nearly the same values
        if len(moved) >= len(places) / 2:
            said = ", ".join(spans[:FEW]) + ", and so on" * (len(spans) > FEW)
            left = len(places) - len(moved)
            rest = (
                f"{left} more {'are' if left > 1 else 'is'} wrong in another way"
                if left
                else "all else is right"
            )
            what = "the gradient of " * (case.first.startswith("backward/")) + describe(case.path)
            return Cause(_of_axis(case, word) or "pieces exchanged", f"in {what}, {said}; {rest}")
    return None


def _of_axis(case: Case, word: str) -> str:
    """Return the cause if an axis of the mesh sends samples, positions or heads on just before the first wrong output; "" if none does."""
    names, outputs = case.names, [row.path for row in case.rows.values() if row.kind == "forward"]
    if not case.first.startswith("forward/") or case.path not in outputs:
        return ""
    if word == "sample":
        # A stage hands them on to the first module of the next one.
        before = outputs[max(0, outputs.index(case.path) - 1)]
        layer = names.layer_of(case.path)
        is_handed_on = names.layer_of(before) < layer and layer in _first_layers(case)
        return "pipeline" * is_handed_on
    # Each rank has its own positions from the batch on. Attention brings them together. Tensor parallelism moves positions and heads as well.
    is_of_cp = case.mesh.cp > 1 and case.mesh.tp == 1
    begins = word == "position" and all(
        names.layer_of(name) < 0 for name in outputs[: outputs.index(case.path)]
    )
    return "context parallelism" * (is_of_cp and (begins or case.path.endswith(".o_proj.input")))


def _first_layers(case: Case) -> set[int]:
    """Return the numbers of the layers that stages of a pipeline begin with."""
    stages = case.dump.contract.get("cuts", {}).get("pp", {}).get("units", [])
    return {units[0] for of_rank in stages for units in of_rank if units and isinstance(units[0], int)}


def _moved(case: Case, own: torch.Tensor, right: torch.Tensor, places: list[int], dim: int) -> dict[int, int]:
    """Return wrong place along a dim -> the place whose values it has, as exactly as a right tensor matches the reference."""
    of_places, right_of_places = (tensor.movedim(dim, 0).flatten(1) for tensor in (own, right))
    distances = torch.cdist(of_places[places], right_of_places, compute_mode="donot_use_mm_for_euclid_dist")
    moved = {}
    for place, row in zip(places, distances, strict=True):
        left, source = (number.item() for number in row.min(0))
        error = float(row[place])
        # Heads that share keys and values may be as near as rounding errors: then it is none of them in particular.
        others = [other for other in (row <= NEARLY * left).nonzero()[:, 0].tolist() if other != source]
        if any(not right_of_places[other].allclose(right_of_places[source], SAME, 0) for other in others):
            continue
        is_zero = float(right_of_places[source].norm()) <= LEFT * error
        if not is_zero and left <= min(LEFT * error, case.rows[case.first].tolerated):
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


def other_rows(case: Case) -> Cause | None:
    """The embedding looks up the rows of other ids, wherever these ids are in wrong samples."""
    if case.path != case.names.embedding or not case.has("batch/input_ids"):
        return None
    own, right = case.own(case.first), case.right(case.first)
    weight = case.before(case.names.embedding_weight)
    ids, is_wrong = case.own("batch/input_ids").long(), wrong_elements(case, own, right).any(-1)
    wrong_ids, of_token = ids[is_wrong].unique(return_inverse=True)
    if len(wrong_ids) * len(weight) > DISTANCES:
        return None
    in_wrong_samples = torch.isin(ids, wrong_ids) & is_wrong.any(1, keepdim=True)
    # Each id once: the tokens may as well be those of other positions.
    if len(wrong_ids) == len(of_token) or bool((in_wrong_samples & ~is_wrong).any()):
        return None
    found = torch.empty(len(wrong_ids), own.shape[-1], dtype=own.dtype)
    found[of_token] = own[is_wrong]
    sources = torch.cdist(found, weight).argmin(1)
    value = right.clone()
    value[is_wrong] = weight[sources[of_token]]
    if not case.explains(case.first, value):
        return None
    shifts = (sources - wrong_ids).unique().tolist()
    first, source = int(wrong_ids[0]), int(sources[0])
    if len(shifts) == 1:
        which = (
            f"{len(wrong_ids)} ids from {first} to {int(wrong_ids[-1])}"
            if len(wrong_ids) > 1
            else f"id {first}"
        )
        where = f"{abs(shifts[0])} {'after' if shifts[0] > 0 else 'before'} the right one"
        return Cause("pieces exchanged", f"the embedding of {which} is the row {where}, as recomputed")
    sentence = f"the embeddings of {len(wrong_ids)} ids are those of others: id {first} has that of {source}"
    return Cause("pieces exchanged", f"{sentence}, as recomputed")


def tensors_exchanged(case: Case) -> Cause | None:
    """Each wrong gradient, moment or parameter has its parts or rows in another order, is transposed, or is that of another parameter."""
    shown = []
    for row in case.wrong(case.first.partition("/")[0]):
        words = next(_ways(case, row), "")
        if not words:
            return None
        shown.append(f"{row.path} {words}")
    return Cause("pieces exchanged", f"right, but in another place: {listed(shown)}") if shown else None


def _ways(case: Case, row: Judgement) -> Iterator[str]:
    """Yield in what other place a wrong tensor is right, in words."""
    own, right = case.own(row.name), case.right(row.name)
    if own.ndim and len(own):
        for size in {case.mesh.size(axis) for axis in case.mesh.axes}:
            if len(own) % size == 0:
                order = _order(case, row, own.reshape(size, -1), right.reshape(size, -1))
                if order:
                    yield f"has the parts {', '.join(map(str, order))} of {size}"
        if own.ndim == 2 and len(own) <= ROWS:
            order = _order(case, row, own, right)
            moved = [place for place, source in enumerate(order) if place != source]
            if order:
                yield f"has {len(moved)} rows in other places, the first of them row {moved[0]}"
        if own.ndim == 2 and own.shape[0] == own.shape[1] and case.explains(row.name, right.T):
            yield "is transposed"
    kind, shapes = row.kind, case.dump.layout.parameters
    for other in shapes:
        has_shape = other != row.path and shapes[other] == shapes[row.path]
        # Numbers that are nearly zero are like any others.
        is_judged = has_shape and f"{kind}/{other}" in case.rows and case.rows[f"{kind}/{other}"].judged
        if (
            is_judged
            and float(own.norm()) > row.tolerated
            and case.explains(row.name, case.right(f"{kind}/{other}"))
        ):
            yield f"is that of {other}"


def _order(case: Case, row: Judgement, parts: torch.Tensor, right_parts: torch.Tensor) -> list[int]:
    """Return the order in which a tensor has the right parts; [] if that does not explain it."""
    order = evidence.order_of_rows(parts, right_parts)
    value = right_parts[order].reshape(case.own(row.name).shape) if order else None
    return order if value is not None and case.explains(row.name, value) else []
