"""Rules for a first wrong gradient of a parameter. The forward and backward tensors that it is computed from are right."""

import math

from lockstep.diagnosis import evidence, recompute
from lockstep.diagnosis.backward import cause_of_weights, is_a_factor
from lockstep.diagnosis.case import Case
from lockstep.diagnosis.forward import rounded
from lockstep.dumps.layout import SEQUENCE
from lockstep.ground.words import listed
from lockstep.verdict.result import Cause

# Elements. Contributions to larger gradients are not recomputed, so no copies are made of these.
MANY = 1 << 24


def _wrong(case: Case) -> list[str]:
    """Return the parameters whose gradients are wrong."""
    return [row.path for row in case.wrong("gradient")]


def stale(case: Case) -> Cause | None:
    """Every wrong gradient is that of the step before, or has it added."""
    names = [row.name for row in case.wrong("gradient")]
    if case.step == 1 or not names:
        return None
    last = case.step - 1
    if all(case.explains(name, case.reference(name) + case.own(name, last)) for name in names):
        return Cause(
            "stale gradients",
            f"{listed(names)}: the gradient of the step before is added; it was not zeroed",
        )
    if all(case.explains(name, case.own(name, last)) for name in names):
        return Cause("stale gradients", f"{listed(names)}: the gradient of the step before")
    return None


def broken_tie(case: Case) -> Cause | None:
    """The gradient of the tied weight lacks the contribution of the head, or of the embedding."""
    tied = case.weight_of(case.names.head)
    needed = (case.names.logits_gradient, f"forward/{case.source(case.names.head)}")
    if _wrong(case) != [tied] or tied == case.names.head_weight or not case.has(*needed):
        return None
    gradient, x = (case.own(name).flatten(0, -2) for name in needed)
    name, head = f"gradient/{tied}", gradient.T @ x
    for value, has, lacks in (
        (case.reference(name) - head, "embedding", "head"),
        (head, "head", "embedding"),
    ):
        if case.explains(name, value):
            sentence = f"the gradient of the tied weight has the {has}'s contribution only, not the {lacks}'s"
            return Cause("tied weights", sentence)
    return None


def own_heads_only(case: Case) -> Cause | None:
    """The gradient of a norm on heads, whose weight every tp rank holds, comes from one rank's heads only."""
    parts = {name: recompute.norm_gradient_shares(case, name) for name in _wrong(case)}
    if not parts or not all(parts.values()):
        return None
    for name, shares in parts.items():  # any rank may have written it: they take turns
        if not any(case.explains(f"gradient/{name}", share) for share in shares):
            return None
    cut = {case.cut_of_output(name.removesuffix(".weight"), "tp") for name in parts}
    what = "positions" if cut == {SEQUENCE} else "heads"
    return Cause(
        "tp reduction missing",
        f"the gradient of {listed(list(parts))} has one tp rank's {what} only, as recomputed",
    )


def one_rank_only(case: Case) -> Cause | None:
    """Each part of the gradients comes from one DP rank's samples alone, or from one replica's, as if there were no others."""
    known, dp = _some_known(case), case.mesh.num_sample_shares
    if not known or case.wrong("backward"):
        return None
    for size in (size for size in range(1, dp) if dp % size == 0):
        cause = _one_replica_only(case, known, size)
        if cause:
            return cause
    return None


def _one_replica_only(case: Case, known: list[recompute.Contributions], size: int) -> Cause | None:
    """Each part comes from the samples of one replica alone: of `size` neighbouring DP ranks.

    A replica of size 1 is a DP rank.
    """
    who, shown = "DP rank" if size == 1 else "replica", []
    for contributions in known:
        counts, left = recompute.samples_of_one_replica(contributions, size)
        if not case.leaves_little(f"gradient/{contributions.parameter}", left):
            return None
        numbers = [number for number, count in enumerate(counts) if count]
        shown.append(f"{contributions.parameter}: {who} {' or '.join(map(str, numbers))}'s")
    times, quotient = case.mesh.num_sample_shares // size, "dp" if size == 1 else f"dp / {size}"
    return Cause(
        "dp reduction missing",
        f"each part of these gradients is {times} = {quotient} times one {who}'s contribution, without the others', "
        f"as recomputed ({'; '.join(shown)})",
    )


def uneven_samples(case: Case) -> Cause | None:
    """Every wrong gradient is right except for the weights of the micro batches in it.

    If fewer than half of the gradients are wrong, the weights must be unequal: one factor may be anything.
    """
    if case.wrong("backward"):
        return None
    are_few = len(_wrong(case)) < len(case.judged("gradient")) / 2
    known = _some_known(case)
    weights = []
    for contributions in known:
        solved = recompute.sample_weights(contributions)
        if solved is None or not case.leaves_little(f"gradient/{contributions.parameter}", solved[1]):
            return None
        weights.append(solved[0])
    if not weights or not all(
        float((other - weights[0]).abs().max()) <= evidence.SAME_FACTOR for other in weights
    ):
        return None
    if are_few and evidence.are_one_factor(weights[0]):
        return None
    what = f"the gradient of {listed(_wrong(case))}" if are_few else "every gradient"
    return cause_of_weights(case, weights[0], what)


def one_factor(case: Case) -> Cause | None:
    """All wrong gradients are the right ones times one factor.

    If all gradients are wrong, the factor is the cause. If some are, a factor that may be tp or something else says little, unless
    they are exactly those of the parameters that every tp rank holds.
    """
    wrong = case.wrong("gradient")
    factor = case.factor(wrong)
    if factor is None or factor <= 0:
        return None
    names, times = case.names_of(factor), f"{case.in_words(factor)} times what"
    name = "tp reduction repeated" if names == ["tp"] else "gradient scale"
    judged = case.judged("gradient")
    if not is_a_factor(case, factor):
        return None
    if len(wrong) == len(judged):
        return Cause("gradient scale", f"all gradients are {times} they should be")
    replicated = [row.name for row in judged if case.is_replicated(row.name)]
    if replicated and {row.name for row in wrong} == set(replicated):
        held = "the parameters that every tp rank holds"
        return Cause(name, f"only the gradients of {held} are {times} they should be")
    if "tp" not in names or names == ["tp"]:
        return Cause(name, f"the gradient of {listed(_wrong(case))} is {times} it should be")
    return None


def _some_known(case: Case) -> list[recompute.Contributions]:
    """Return the contributions to the first, the middle and the last of the wrong gradients whose contributions are known."""
    parameters = case.dump.layout.parameters
    few = [name for name in _wrong(case) if math.prod(parameters[name]) <= MANY]
    known = [one for one in (recompute.Contributions(case, name) for name in few) if one.known]
    return [known[index] for index in sorted({0, len(known) // 2, len(known) - 1})] if known else []


GRADIENT_RULES = (stale, rounded, broken_tie, own_heads_only, one_rank_only, uneven_samples, one_factor)
