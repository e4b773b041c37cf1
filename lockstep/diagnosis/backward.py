"""Rules for a first wrong gradient of an output. The forward pass is right."""

import itertools

import torch

from lockstep.diagnosis import forward, recompute, ways
from lockstep.diagnosis.case import Case, describe
from lockstep.diagnosis.odd import numbered, places_of, samples_and_positions, wrong_elements
from lockstep.ground.words import and_more
from lockstep.verdict.result import Cause


def input_gradient(case: Case) -> Cause | None:
    """The gradient of the input of column-parallel layers lacks the sum over tp, or has it tp times."""
    name = case.first.removeprefix("backward/")
    shares, what = recompute.backward_shares(case, name), f"the gradient of {describe(name)}"
    if not shares or case.mesh.tp == 1:
        return None
    whole = {module: torch.stack(terms).sum(0) for module, terms in shares.items()}
    groups = [group for size in range(len(shares), 0, -1) for group in itertools.combinations(shares, size)]
    values = (
        (
            (rank, group),
            torch.stack(
                [shares[module][rank] if module in group else whole[module] for module in shares]
            ).sum(0),
        )
        for rank, group in itertools.product(range(case.mesh.tp), groups)
    )
    lost = ways.nearest_that_explains(case, values)
    if lost is not None:
        rank, group = lost
        sentence = (
            f"{what} has only tp rank {rank}'s share of the part that comes back through {', '.join(group)}"
        )
        return forward.one_share_alone(case, sentence)
    only_tp = case.names_of(case.mesh.tp) == ["tp"]  # else the factor does not say what is repeated
    if only_tp and case.explains(case.first, case.mesh.tp * torch.stack(list(whole.values())).sum(0)):
        return Cause(
            "tp reduction repeated", f"{what}, a sum over tp, is {case.mesh.tp} = tp times what it should be"
        )
    return None


def branch_lost(case: Case) -> Cause | None:
    """The gradient of the input of linear layers has nothing of what comes back through some of them."""
    whole = {
        module: torch.stack(terms).sum(0)
        for module, terms in recompute.backward_shares(case, case.path).items()
    }
    for number in {1, len(whole) - 1} if len(whole) > 1 else ():
        for missing in itertools.combinations(whole, number):
            value = torch.stack([term for module, term in whole.items() if module not in missing]).sum(0)
            if case.explains(case.first, value):
                return Cause(
                    "gradient lost",
                    f"the gradient of {describe(case.path)} has nothing of what comes back through {', '.join(missing)}, as recomputed",
                )
    return None


def _are_micro_batches(case: Case, is_zero: torch.Tensor) -> bool:
    """Whether the samples that are zero are whole micro batches, of a pipeline's schedule if there is one."""
    parts = case.dump.micro_batches_of_schedule
    by_micro_batch = is_zero.unflatten(
        0, (case.mesh.num_sample_shares * case.micro_batches * parts, -1)
    ).flatten(1)
    return bool((by_micro_batch.all(1) == by_micro_batch.any(1)).all())


def lost(case: Case) -> Cause | None:
    """No gradient arrives at an output: it is zero in all wrong tokens."""
    own, right = case.own(case.first), case.right(case.first)
    if any(dim == own.ndim - 1 for _, dim in samples_and_positions(case)):
        return None  # the last dim is not that of features
    is_zero = (own == 0).all(-1) & right.any(-1)
    wrong = wrong_elements(case, own, right).any(-1)
    if not bool(wrong.any()) or bool((wrong & ~is_zero).any()):
        return None
    where = [
        numbered(word, places)
        for word, dim in samples_and_positions(case)
        if len(places := places_of(is_zero, dim)) < is_zero.shape[dim]
    ]
    is_logits = case.first == case.names.logits_gradient
    if is_logits and len(where) == 1 and where[0].startswith("sample") and _are_micro_batches(case, is_zero):
        return Cause("accumulation", f"the loss of {where[0]} has no gradient: that of the logits is zero")
    if is_logits and where:
        return None  # tokens without a weight
    at = f" at {and_more(where)}" if where else ""
    return Cause("gradient lost", f"no gradient arrives at {describe(case.path)}{at}: it is zero there")


BACKWARD_RULES = (input_gradient, branch_lost, lost)
