"""What else attention computed, if its output is the first wrong tensor: another mask, heads, angles, scale or precision.

Attention is computed again from the run's own queries, keys, values and rotary angles (attention_layer.py). The right way must give what
the reference has. Then the wrong way (attention_ways.py) that is nearest to the run is named, if it explains every wrong head of every
wrong sample (ways.py).
"""

import itertools
from collections.abc import Iterable

import torch

from lockstep.diagnosis.attention_layer import Attention, Turn, names_of, of_wrong_samples, right_ways
from lockstep.diagnosis.attention_ways import MASK, from_own_queries, wrong_ways
from lockstep.diagnosis.case import Case
from lockstep.diagnosis.odd import numbered, places_of, wrong_elements
from lockstep.diagnosis.ways import Way, gives_the_right, nearest, right_tensors, wrong_parts
from lockstep.verdict.result import Cause

KEYS_AND_VALUES = ("k_proj", "v_proj", "k_norm")


def another_way(case: Case) -> Cause | None:
    """The output of attention is what another mask, other heads, angles, another scale or precision gives."""
    layer, is_output, _ = case.path.partition(".o_proj.input")
    if not is_output or not case.names.is_on_heads(case.first):
        return None
    found = of_wrong_samples(case, layer)
    return _nearest(case, found, lambda output: output) if found else None


def another_way_back(case: Case) -> Cause | None:
    """The gradient of queries, keys or values is what comes back through attention that is computed in another way.

    That is so where attention is computed again, or its gradient has a kernel of its own.
    """
    layer, _, projection = case.path.rpartition(".")
    if not case.names.is_on_heads(case.first) or f"forward/{case.path}" not in names_of(case, layer):
        return None
    found = of_wrong_samples(case, layer)
    arrived = right_tensors(case, [f"backward/{layer}.o_proj.input"])
    if found is None or not arrived:
        return None
    part = projection[0]  # q, k or v
    leaf, arrived_here = getattr(found, part).requires_grad_(), arrived[0][found.samples]

    def gradient(output: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(output.flatten(-2), leaf, arrived_here)[0].transpose(1, 2)

    return _nearest(case, found.but(**{part: leaf}), gradient)


def documents_together(case: Case) -> Cause | None:
    """Attention is wrong only in later documents, and there also at first tokens, which should see only themselves.

    For models whose attention is not computed again here.
    """
    layer, is_output, _ = case.path.partition(".o_proj.input")
    if not case.first.endswith(".input") or not case.has("batch/position_ids"):
        return None
    if is_output and case.names.is_on_heads(case.first):
        found = of_wrong_samples(case, layer)
        if found and _again(case, found, lambda output: output):
            return None  # `another_way` knows what documents that see each other give
    own, right = case.own(case.first), case.reference(case.first)
    positions, is_wrong = case.own("batch/position_ids"), wrong_elements(case, own, right).any(-1)
    document = (positions == 0).cumsum(1)
    is_first_token = (positions == 0) & (document > 1)
    is_later, is_hit = (positions != 0) & (document > 1), is_wrong & is_first_token
    num_hit = int(is_hit.sum())
    if bool((is_wrong & (document == 1)).any()) or 2 * num_hit < int(is_first_token.sum()) or not num_hit:
        return None
    # Later tokens of a document would see others, too, and first tokens would see something.
    if 2 * int((is_wrong & is_later).sum()) < int(is_later.sum()) or not bool(own[is_hit].any()):
        return None
    return Cause(
        MASK,
        f"attention is right in the first document of every sample, and wrong at {num_hit} of {int(is_first_token.sum())} first tokens of later "
        "ones, which see themselves alone: the mask of documents is another",
    )


def _again(case: Case, found: Attention, measured: Turn) -> tuple[Attention, torch.Tensor] | None:
    """Return the way that gives what the reference has, and what it gives; None if the model computes attention otherwise."""
    right = case.right(case.first)[found.samples].unflatten(-1, (-1, case.head_size))
    outputs = ((way, measured(way.output())) for way in right_ways(case, found))
    return next(((way, output) for way, output in outputs if gives_the_right(case, output, right)), None)


def _nearest(case: Case, found: Attention, measured: Turn) -> Cause | None:
    """Return the cause for what is `measured` of the output of attention."""
    own, right = (
        tensor[found.samples].unflatten(-1, (-1, case.head_size))
        for tensor in (case.own(case.first), case.right(case.first))
    )
    recomputed = _again(case, found, measured)
    if recomputed is None:
        return None
    right_way, again = recomputed
    # By sample, head, and the cp rank that has the positions
    groups = [(dim, torch.arange(own.shape[dim])) for dim in (0, 2)]
    groups.append((1, case.cp_rank_of(own.shape[1])))
    wrong = wrong_parts(wrong_elements(case, own, right), groups)
    ways = wrong_ways(case, right_way, own, right, wrong, measured)
    values: Iterable[Way] = ((name, words, measured(output)) for name, words, output in ways)
    if case.pieces and case.path.endswith(KEYS_AND_VALUES):
        values = itertools.chain(values, [from_own_queries(case, right_way, measured)])
    way = nearest(case, own, right, again, wrong, values)
    if way is None:
        return None
    name, words = way
    heads = places_of(wrong, 2)
    if len(heads) < wrong.shape[2] and not words.startswith("head"):
        words = f"{numbered('head', heads)} of {wrong.shape[2]}: {words}"
    back = "in the backward pass, " if case.first.startswith("backward/") else ""
    return Cause(name, f"{found.layer}: {back}{words}, as recomputed")
