"""Rules for a first wrong gradient of a parameter. The forward and backward tensors that it is computed from are right."""

import math

import torch

from lockstep.diagnosis import evidence, recompute
from lockstep.diagnosis.case import Case
from lockstep.diagnosis.exchanged import tensors_exchanged
from lockstep.diagnosis.forward import rounded
from lockstep.diagnosis.odd import numbered
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
    known, dp = some_known(case), case.mesh.num_sample_shares
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
    replicas = case.mesh.num_sample_shares // size

    def means(contributions: torch.Tensor) -> torch.Tensor:
        return replicas * contributions.unflatten(0, (replicas, -1)).sum(1)

    for contributions in known:
        numbers, left = recompute.nearest_terms(contributions, means)
        if not case.leaves_little(f"gradient/{contributions.parameter}", left):
            return None
        shown.append(f"{contributions.parameter}: {who} {' or '.join(map(str, numbers))}'s")
    quotient = "dp" if size == 1 else f"dp / {size}"
    return Cause(
        "dp reduction missing",
        f"each part of these gradients is {replicas} = {quotient} times one {who}'s contribution, without the others', "
        f"as recomputed ({'; '.join(shown)})",
    )


def uneven_samples(case: Case) -> Cause | None:
    """Every wrong gradient is right except for the weights of the micro batches in it.

    The cause is another if some are reduced over a part of the ranks. If fewer than half of the gradients are wrong, the weights must be
    unequal: one factor may be anything.
    """
    if case.wrong("backward"):
        return None
    solutions = _solved(case, some_known(case))
    in_part = _reduced_in_part(case, solutions)
    if in_part is not None:
        return in_part
    are_few = len(_wrong(case)) < len(case.judged("gradient")) / 2
    weights = _one_solution(solutions)
    if weights is None or are_few and evidence.are_one_factor(weights[0]):
        return None
    what = f"the gradient of {listed(_wrong(case))}" if are_few else "every gradient"
    return cause_of_weights(case, weights[0], what)


def _reduced_in_part(case: Case, solutions: list[torch.Tensor]) -> Cause | None:
    """Some micro batches count from all DP ranks, and the others from some ranks alone, all with one weight."""
    ways = set()
    for weights in solutions:
        whole = (weights[0] - 1).abs().amax(0) <= evidence.SAME_FACTOR
        in_part = weights[0][:, ~whole]
        counts = in_part.abs().amin(1) > evidence.SAME_FACTOR if in_part.numel() else torch.zeros(0).bool()
        if whole.all() or not whole.any() or not 0 < int(counts.sum()) < len(counts):
            return None
        if (
            not evidence.are_one_factor(in_part[counts])
            or float(in_part[~counts].abs().max()) > evidence.SAME_FACTOR
        ):
            return None
        ways.add((tuple(whole.tolist()), int(counts.sum()), round(float(in_part[counts].mean()), 2)))
    if len(ways) != 1:
        return None
    are_whole, ranks, times = ways.pop()
    parts, rest = (
        [number for number, each in enumerate(are_whole) if each is kind] for kind in (False, True)
    )
    return Cause(
        "dp reduction missing",
        f"each gradient has {numbered('micro batch', rest)} from all DP ranks, but {numbered('micro batch', parts)} "
        f"from {ranks} of the {case.mesh.num_sample_shares} only, with a weight of {times:g}",
    )


def of_two_steps(case: Case) -> Cause | None:
    """Micro batches of the step before are in every wrong gradient, too, with the same weights on all DP ranks."""
    if case.step == 1 or case.wrong("backward"):
        return None
    weights = _one_solution(_solved(case, some_known(case), case.at_step(case.step - 1)))
    if weights is None or not _are_equal_within(weights.transpose(1, 2).flatten(0, 1)):
        return None
    if float(weights[1].abs().max()) <= evidence.SAME_FACTOR:
        return None  # nothing of the step before
    if float(torch.stack([weights[0], weights[1] - 1]).abs().max()) <= evidence.SAME_FACTOR:
        return Cause(
            "stale gradients", f"{listed(_wrong(case))}: the gradient of the step before, as recomputed"
        )
    own, before = (
        ", ".join(f"{value + 0.0:.3g}" for value in row) for row in weights.mean(1).round(decimals=3).tolist()
    )
    return Cause(
        "accumulation",
        f"in the gradient of {listed(_wrong(case))} the micro batches have the weights {own} (1 is right), and those of the step before {before} (0 is right)",
    )


def _solved(
    case: Case, known: list[recompute.Contributions], before: Case | None = None
) -> list[torch.Tensor]:
    """Return the weights (steps, dp, micro batches) of each of these gradients; [] unless the weights explain each of them."""
    solutions = []
    for one in known:
        steps = [one] if before is None else [one, recompute.Contributions(before, one.parameter)]
        solved = recompute.sample_weights(*steps) if steps[-1].known else None
        if solved is None or not case.leaves_little(f"gradient/{one.parameter}", solved[1]):
            return []
        solutions.append(solved[0])
    return solutions


def _one_solution(solutions: list[torch.Tensor]) -> torch.Tensor | None:
    """Return the weights of the first gradient if all have the same."""
    if not solutions:
        return None
    groups = torch.stack(solutions, -1).flatten(0, -2)
    return solutions[0] if _are_equal_within(groups) else None


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
        others = case.unjudged_replicas(row.name for row in wrong)
        return Cause(name, f"the gradient of {listed(_wrong(case))} is {times} it should be{others}")
    return None


def some_known(case: Case, by_cp_rank: bool = False) -> list[recompute.Contributions]:
    """Return the contributions to the first, the middle and the last of the wrong gradients whose contributions are known."""
    parameters = case.dump.layout.parameters
    few = [name for name in _wrong(case) if math.prod(parameters[name]) <= MANY]
    known = [one for one in (recompute.Contributions(case, name, by_cp_rank) for name in few) if one.known]
    return [known[index] for index in sorted({0, len(known) // 2, len(known) - 1})] if known else []


def cause_of_weights(case: Case, weights: torch.Tensor, what: str) -> Cause | None:
    """Return the cause of wrong weights of micro batches; None if they do not show one.

    `weights` (dp, micro batches) are those with which each DP rank's micro batches count in `what`; 1 is right.
    """
    by_dp, by_micro, largest = weights.mean(dim=1), weights.mean(dim=0), float(weights.abs().max())
    if not evidence.are_one_factor(by_dp):
        if not _are_equal_within(weights):
            return None
        shown = _in_digits(by_dp, largest, 3)
        return Cause("rank weights", f"in {what} the DP ranks have different weights ({shown}; 1 is right)")
    if not _are_equal_within(weights.T):
        return None
    if not evidence.are_one_factor(by_micro):
        # Products of 16 bits leave the third digit unknown.
        shown = _in_digits(by_micro, largest, 3 if case.options["precision"] == "fp32" else 2)
        return Cause(
            "accumulation",
            f"in {what} the micro batches have different weights ({shown}; 1 is right), the same on all DP ranks",
        )
    factor = float(weights.mean())
    names = case.names_of(factor)
    if not factor > 0 or abs(factor - 1) <= evidence.SAME_FACTOR or not is_a_factor(case, factor):
        return None
    cause = "accumulation" if names and all("accumulation" in name for name in names) else "gradient scale"
    return Cause(cause, f"{what} is {case.in_words(factor)} times what it should be, evenly for all samples")


def _are_equal_within(groups: torch.Tensor) -> bool:
    """Whether the weights of each group are the same. `groups` are the rows.

    Weights are measured in the gradient that they make, so those beside larger ones are as inexact as these, but not beyond 1.
    """
    least = min(1.0, float(groups.abs().max()))
    return all(evidence.are_one_factor(group, least) for group in groups)


def _in_digits(weights: torch.Tensor, largest: float, digits: int) -> str:
    """Return weights with so many digits after the first one of the `largest`, or after the point if that is 1 or more."""
    decimals = digits - min(0, math.floor(math.log10(largest)))
    return ", ".join(f"{value:.3g}" for value in (weights.round(decimals=decimals) + 0.0).tolist())


def is_a_factor(case: Case, factor: float) -> bool:
    """Whether a factor that was measured on the gradients is one.

    In noise, the gradients of another loss, such as one with label smoothing, may look like a multiple. So in autocast the factor
    must be a known number, and in any precision the reported loss must agree.
    """
    is_known = case.options["precision"] == "fp32" or bool(case.names_of(factor))
    return is_known and case.loss_is_scaled(factor)


GRADIENT_RULES = (
    stale,
    rounded,
    broken_tie,
    own_heads_only,
    one_rank_only,
    uneven_samples,
    of_two_steps,
    one_factor,
    tensors_exchanged,
)
