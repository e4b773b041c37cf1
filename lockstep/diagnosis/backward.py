"""Rules for a first wrong tensor in the loss or in the backward pass; forward is right."""

import itertools
import math
from collections.abc import Iterator

import torch

from lockstep.diagnosis import evidence, recompute
from lockstep.diagnosis.case import LEFT, Case, describe
from lockstep.inputs.samples import IGNORED
from lockstep.verdict.result import Cause

# The norms of rounding errors of two explanations, as a quotient, that are no accident
NEARER = 1.05


def reported_loss(case: Case) -> Cause | None:
    """All that the step computes is right; only the reported loss is wrong."""
    if not case.first.startswith("loss of"):
        return None
    losses = case.losses()
    mine = [loss for loss, _, _ in losses]
    if len(set(mine)) == 1 and len(mine) > 1:
        return Cause("reported loss", "every tensor is right, but all DP ranks report the same loss")
    # In autocast the noise of the gradients hides another loss function. Only a known number shows that what is wrong is the report.
    factors = {mine / right for mine, right, _ in losses if right}
    names = set.intersection(*(set(case.names_of(factor)) for factor in factors)) if factors else set()
    if case.options["precision"] == "fp32":
        return Cause(
            "reported loss",
            f"every tensor is right, but {case.first} is off by {max(_gaps(case), key=abs):.3g}",
        )
    if names:
        words = case.in_words(next(iter(factors)))
        return Cause(
            "reported loss", f"every tensor is right, but {case.first} is {words} times the reference's"
        )
    return None


def _gaps(case: Case) -> list[float]:
    """How far the loss of each DP rank is from the reference's."""
    return [mine - right for mine, right, _ in case.losses()]


def partition_function(case: Case) -> Cause | None:
    """The sum of exponentials is tp times too large, as both the loss and the gradient of the logits show."""
    tp = case.mesh.tp
    gaps = _gaps(case)
    near = max(1e-3, *(loss.tolerated for loss in case.result.losses if loss.step == case.step))
    if (
        case.first != case.names.logits_gradient
        or tp == 1
        or not all(abs(gap - math.log(tp)) <= near for gap in gaps)
    ):
        return None
    logits, labels = case.own(case.names.logits), case.own("batch/labels").long()
    counted = (labels != IGNORED)[..., None]
    value = logits.softmax(-1) / tp
    value.scatter_add_(-1, labels[..., None].clamp(min=0), torch.full_like(logits[..., :1], -1.0))
    value *= counted / counted.sum()
    if not case.explains(case.first, value):
        return None
    return Cause(
        "loss on vocabulary shards",
        f"the loss is off by {gaps[0]:.4f} = log(tp), and the gradient of the logits is that of a sum of "
        "exponentials that is tp times too large",
    )


def counted_otherwise(case: Case) -> Cause | None:
    """The sum of losses is divided by other numbers of labels: each group of ranks or micro batches by its own, or all by another one."""
    if case.first != case.names.logits_gradient or not case.has("batch/labels"):
        return None
    labels = case.own("batch/labels") != IGNORED
    if bool(labels.all()):
        return None
    total, what = int(labels.sum()), "the gradient of the logits is"
    found = {
        f"{what} {total / number:.4g} times what it should be: the sum is divided by {number}, which is {words}, not by the {total} labels": torch.tensor(
            total / number
        )
        for number, words in (
            (labels.numel(), "the number of all tokens"),
            (total + len(labels), "one more for each sequence"),
        )
    }
    for words, group in _groups(case, labels):
        counts = group.flatten().bincount(labels.flatten().double())
        own = ", ".join(f"{count:.0f}" for count in counts.tolist())
        said = f"{what} that of a mean over {words} of means over their own labels ({own}), not of the mean over all {total} labels"
        found[said] = total / (len(counts) * counts.clamp(min=1))[group][..., None]
    exact, mine = case.exact(case.first), case.own(case.first)
    near = sorted(
        (float((mine - weights * exact).norm()), said)
        for said, weights in found.items()
        if case.explains(case.first, weights * exact)
    )
    if not near or len(near) > 1 and near[1][0] <= NEARER * near[0][0]:
        return None
    return Cause("label count", near[0][1])


def _groups(case: Case, labels: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """(words, the number of the group of every position) of groups of ranks and micro batches, each of which may have counted its own labels."""
    row = torch.arange(len(labels))[:, None].expand(labels.shape)
    each = len(labels) // case.mesh.num_sample_shares
    places = {
        "DP ranks": row // each,
        "micro batches": row % each // (each // case.micro_batches),
        "cp ranks": torch.zeros_like(row),
    }
    for rank, pieces in enumerate(case.dump.contract.get("cuts", {}).get("cp", ())):
        for start, length in pieces:
            places["cp ranks"][:, start : start + length] = rank
    sizes = {name: int(place.max()) + 1 for name, place in places.items()}
    names = [name for name, size in sizes.items() if size > 1]
    for chosen in (some for number in range(1, 4) for some in itertools.combinations(names, number)):
        group = torch.zeros_like(row)
        for name in chosen:
            group = group * sizes[name] + places[name]
        yield " and ".join(f"{sizes[name]} {name}" for name in chosen), group


def labels_of_a_shard(case: Case) -> Cause | None:
    """The gradient is wrong only for tokens whose labels lie in some shards of the vocabulary."""
    if case.first != case.names.logits_gradient or "tp" not in case.sharded(case.first):
        return None
    own, exact = case.own(case.first), case.exact(case.first)
    labels = case.own("batch/labels").long().flatten()
    error = (own - exact).flatten(0, -2).norm(dim=1)
    is_wrong = error > LEFT * float(error.max())
    each = -(-own.shape[-1] // case.mesh.tp)
    shards = labels // each  # as torch.chunk cuts
    wrong, right = set(shards[is_wrong].tolist()), set(shards[~is_wrong].tolist())
    few = min(int(is_wrong.sum()), int((~is_wrong).sum()))
    if wrong & right or few < 8:
        return None
    return Cause(
        "loss on vocabulary shards",
        "the logits are right; their gradient is wrong for all tokens whose label is in the shard of tp rank "
        f"{', '.join(map(str, sorted(wrong)))}, and for no others",
    )


def weights_of_samples(case: Case) -> Cause | None:
    """The gradient of the logits is right except for one factor per DP rank and micro batch."""
    if case.first != case.names.logits_gradient:
        return None
    shares, micro = case.mesh.num_sample_shares, case.micro_batches
    own, exact = (tensor.chunk(shares * micro) for tensor in (case.own(case.first), case.exact(case.first)))
    factors = torch.tensor(
        [evidence.multiple_of(a, b) for a, b in zip(own, exact, strict=True)], dtype=torch.float64
    )
    if not case.explains(
        case.first, torch.cat([factor * b for factor, b in zip(factors, exact, strict=True)])
    ):
        return None
    return cause_of_weights(case, factors.view(shares, micro), "the gradient of the logits")


def cause_of_weights(case: Case, weights: torch.Tensor, what: str) -> Cause | None:
    """The cause of `weights` (dp, micro batches), by which each DP rank's micro batches count in something; 1 is right."""
    by_dp, by_micro = weights.mean(dim=1), weights.mean(dim=0)
    if not _even(by_dp):
        return None  # unequal DP ranks do not show a cause
    if not _even(by_micro):
        shown = ", ".join(f"{value:.3g}" for value in (by_micro.round(decimals=3) + 0.0).tolist())
        return Cause(
            "accumulation",
            f"in {what} the micro batches have different weights ({shown}; 1 is right), the same on all DP ranks",
        )
    factor = float(weights.mean())
    close = case.names_of(factor)
    if not factor > 0 or abs(factor - 1) <= evidence.SAME_FACTOR or not is_a_factor(case, factor):
        return None
    name = "accumulation" if close and all("accumulation" in one for one in close) else "gradient scale"
    return Cause(name, f"{what} is {case.in_words(factor)} times what it should be, evenly for all samples")


def is_a_factor(case: Case, factor: float) -> bool:
    """Whether a factor on the gradients is one, and not what noise leaves of another loss, such as label smoothing's.

    In autocast it must be a known number, and in any precision the reported loss must agree.
    """
    known = case.options["precision"] == "fp32" or bool(case.names_of(factor))
    return known and case.loss_is_scaled(factor)


def _even(values: torch.Tensor) -> bool:
    return float((values - values.mean()).abs().max()) <= evidence.SAME_FACTOR * max(
        1.0, float(values.abs().max())
    )


def input_gradient(case: Case) -> Cause | None:
    """The gradient of the input of column-parallel layers lacks the sum over tp, or has it tp times."""
    name = case.first.removeprefix("backward/")
    shares, what = recompute.backward_shares(case, name), f"the gradient of {describe(name)}"
    if not shares or case.mesh.tp == 1:
        return None
    whole = {module: torch.stack(each).sum(0) for module, each in shares.items()}
    groups = [group for size in range(len(shares), 0, -1) for group in itertools.combinations(shares, size)]
    own, found = case.own(case.first), []
    for rank, group in itertools.product(range(case.mesh.tp), groups):
        value = torch.stack(
            [shares[module][rank] if module in group else whole[module] for module in shares]
        ).sum(0)
        if case.explains(case.first, value):
            found.append((float((own - value).norm()), rank, group))
    # In autocast several may explain it within the noise. The nearest counts if it is nearer than any other by more than chance.
    if len(found) > 1 and sorted(found)[1][0] <= NEARER * min(found)[0]:
        return None
    if found:
        _, rank, group = min(found)
        return Cause(
            "tp reduction missing",
            f"{what} has only tp rank {rank}'s share of the part that comes back through {', '.join(group)}",
        )
    only_tp = case.names_of(case.mesh.tp) == ["tp"]  # else the factor does not say what is repeated
    if only_tp and case.explains(case.first, case.mesh.tp * torch.stack(list(whole.values())).sum(0)):
        return Cause(
            "tp reduction repeated", f"{what}, a sum over tp, is {case.mesh.tp} = tp times what it should be"
        )
    return None


LOSS_RULES = (
    reported_loss,
    partition_function,
    counted_otherwise,
    weights_of_samples,
    labels_of_a_shard,
)
BACKWARD_RULES = (input_gradient,)
