"""Rules for a first wrong tensor in the loss or in the backward pass. The forward pass is right."""

import itertools
import math
from collections.abc import Iterator

import torch

from lockstep.diagnosis import evidence, recompute
from lockstep.diagnosis.case import LEFT, Case, describe
from lockstep.inputs.samples import IGNORED
from lockstep.verdict.result import Cause

# Several explanations may fit. One is taken only if every other leaves more than this times its error: less may be chance.
NEARER = 1.05


def reported_loss(case: Case) -> Cause | None:
    """All that the step computes is right; only the reported loss is wrong."""
    if not case.first.startswith("loss of"):
        return None
    losses = case.losses()
    reported = [loss for loss, _, _ in losses]
    if len(set(reported)) == 1 and len(reported) > 1:
        return Cause("reported loss", "every tensor is right, but all DP ranks report the same loss")
    # In autocast the noise of the gradients hides another loss function. Only a known number shows that what is wrong is the report.
    factors = {loss / reference for loss, reference, _ in losses if reference}
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
    """Return by how much the loss of each DP rank is above the reference's."""
    return [loss - reference for loss, reference, _ in case.losses()]


def partition_function(case: Case) -> Cause | None:
    """The sum of exponentials is tp times too large, as both the loss and the gradient of the logits show."""
    tp = case.mesh.tp
    gaps = _gaps(case)
    tolerated = max(1e-3, *(loss.tolerated for loss in case.result.losses if loss.step == case.step))
    if (
        case.first != case.names.logits_gradient
        or tp == 1
        or not all(abs(gap - math.log(tp)) <= tolerated for gap in gaps)
    ):
        return None
    logits, labels = case.own(case.names.logits), case.own("batch/labels").long()
    has_label = (labels != IGNORED)[..., None]
    value = logits.softmax(-1) / tp
    value.scatter_add_(-1, labels[..., None].clamp(min=0), torch.full_like(logits[..., :1], -1.0))
    value *= has_label / has_label.sum()
    if not case.explains(case.first, value):
        return None
    return Cause(
        "loss on vocabulary shards",
        f"the loss is off by {gaps[0]:.4f} = log(tp), and the gradient of the logits is that of a sum of "
        "exponentials that is tp times too large",
    )


def counted_otherwise(case: Case) -> Cause | None:
    """The sum of losses is divided by wrong numbers of labels.

    Each group of ranks or micro batches divides by the number of its own labels, or all divide by one wrong number.
    """
    if case.first != case.names.logits_gradient or not case.has("batch/labels"):
        return None
    has_label = case.own("batch/labels") != IGNORED
    if bool(has_label.all()):
        return None
    total, what = int(has_label.sum()), "the gradient of the logits is"
    weights_by_sentence = {
        f"{what} {total / divisor:.4g} times what it should be: the sum is divided by {divisor}, which is {words}, not by the {total} labels": torch.tensor(
            total / divisor, dtype=torch.float64
        )
        for divisor, words in (
            (has_label.numel(), "the number of all tokens"),
            (total + len(has_label), "one more for each sequence"),
        )
    }
    for words, group in _groups(case, has_label):
        counts = group.flatten().bincount(has_label.flatten().double())
        shown = ", ".join(f"{count:.0f}" for count in counts.tolist())
        sentence = f"{what} that of a mean over {words} of means over their own labels ({shown}), not of the mean over all {total} labels"
        weights_by_sentence[sentence] = total / (len(counts) * counts.clamp(min=1))[group][..., None]
    reference, own = case.reference(case.first), case.own(case.first)
    candidates = sorted(
        (float((own - weights * reference).norm()), sentence)
        for sentence, weights in weights_by_sentence.items()
        if case.explains(case.first, weights * reference)
    )
    if not candidates or len(candidates) > 1 and candidates[1][0] <= NEARER * candidates[0][0]:
        return None
    return Cause("label count", candidates[0][1])


def _groups(case: Case, labels: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the ways to group positions by DP rank, micro batch and cp rank: each group may have counted its own labels.

    A way is (the groups in words, the number of the group of every position). `labels` has the batch's shape.
    """
    row = torch.arange(len(labels))[:, None].expand(labels.shape)
    rows_of_rank = len(labels) // case.mesh.num_sample_shares
    indices = {
        "DP ranks": row // rows_of_rank,
        "micro batches": row % rows_of_rank // (rows_of_rank // case.micro_batches),
        "cp ranks": torch.zeros_like(row),
    }
    for rank, pieces in enumerate(case.pieces("cp")):
        for start, length in pieces:
            indices["cp ranks"][:, start : start + length] = rank
    sizes = {name: int(index.max()) + 1 for name, index in indices.items()}
    names = [name for name, size in sizes.items() if size > 1]
    for chosen in (subset for size in range(1, 4) for subset in itertools.combinations(names, size)):
        group = torch.zeros_like(row)
        for name in chosen:
            group = group * sizes[name] + indices[name]
        yield " and ".join(f"{sizes[name]} {name}" for name in chosen), group


def labels_of_a_shard(case: Case) -> Cause | None:
    """The gradient of the logits is wrong exactly for the tokens whose labels lie in some shards of the vocabulary."""
    if case.first != case.names.logits_gradient or "tp" not in case.sharded(case.first):
        return None
    own, reference = case.own(case.first), case.reference(case.first)
    labels = case.own("batch/labels").long().flatten()
    error = (own - reference).flatten(0, -2).norm(dim=1)
    is_wrong = error > LEFT * float(error.max())
    shard_size = -(-own.shape[-1] // case.mesh.tp)
    shards = labels // shard_size  # as torch.chunk cuts
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
    dp, micro = case.mesh.num_sample_shares, case.micro_batches
    own, reference = (
        tensor.chunk(dp * micro) for tensor in (case.own(case.first), case.reference(case.first))
    )
    factors = torch.tensor(
        [evidence.multiple_of(a, b) for a, b in zip(own, reference, strict=True)], dtype=torch.float64
    )
    if not case.explains(
        case.first, torch.cat([factor * b for factor, b in zip(factors, reference, strict=True)])
    ):
        return None
    return cause_of_weights(case, factors.view(dp, micro), "the gradient of the logits")


def cause_of_weights(case: Case, weights: torch.Tensor, what: str) -> Cause | None:
    """Return the cause of wrong weights of micro batches; None if they do not show one.

    `weights` (dp, micro batches) are those with which each DP rank's micro batches count in `what`; 1 is right.
    """
    by_dp, by_micro = weights.mean(dim=1), weights.mean(dim=0)
    if not _are_equal(by_dp):
        return None  # unequal DP ranks do not show a cause
    if not _are_equal(by_micro):
        # Products of 16 bits leave the third digit unknown.
        decimals = 3 if case.options["precision"] == "fp32" else 2
        shown = ", ".join(f"{value:.3g}" for value in (by_micro.round(decimals=decimals) + 0.0).tolist())
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


def is_a_factor(case: Case, factor: float) -> bool:
    """Whether a factor that was measured on the gradients is one.

    In noise, the gradients of another loss, such as one with label smoothing, may look like a multiple. So in autocast the factor
    must be a known number, and in any precision the reported loss must agree.
    """
    is_known = case.options["precision"] == "fp32" or bool(case.names_of(factor))
    return is_known and case.loss_is_scaled(factor)


def _are_equal(values: torch.Tensor) -> bool:
    """Whether all values are the same factor, as exactly as factors are measured."""
    return float((values - values.mean()).abs().max()) <= evidence.SAME_FACTOR * max(
        1.0, float(values.abs().max())
    )


def input_gradient(case: Case) -> Cause | None:
    """The gradient of the input of column-parallel layers lacks the sum over tp, or has it tp times."""
    name = case.first.removeprefix("backward/")
    shares, what = recompute.backward_shares(case, name), f"the gradient of {describe(name)}"
    if not shares or case.mesh.tp == 1:
        return None
    whole = {module: torch.stack(terms).sum(0) for module, terms in shares.items()}
    groups = [group for size in range(len(shares), 0, -1) for group in itertools.combinations(shares, size)]
    own, candidates = case.own(case.first), []
    for rank, group in itertools.product(range(case.mesh.tp), groups):
        value = torch.stack(
            [shares[module][rank] if module in group else whole[module] for module in shares]
        ).sum(0)
        if case.explains(case.first, value):
            candidates.append((float((own - value).norm()), rank, group))
    # In autocast, several values may explain it within the noise. The nearest one counts if the others are farther by more than chance.
    if len(candidates) > 1 and sorted(candidates)[1][0] <= NEARER * min(candidates)[0]:
        return None
    if candidates:
        _, rank, group = min(candidates)
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
