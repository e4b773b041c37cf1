"""Rules for a wrong loss, or a wrong gradient of the logits. The logits are right."""

import itertools
import math
from collections.abc import Iterator

import torch

from lockstep.diagnosis import evidence
from lockstep.diagnosis.backward import lost
from lockstep.diagnosis.case import LEFT, Case
from lockstep.diagnosis.gradients import cause_of_weights
from lockstep.diagnosis.odd import FEW
from lockstep.diagnosis.ways import PRECISION, nearest_that_explains
from lockstep.inputs.samples import IGNORED
from lockstep.verdict.result import Cause

MOST = 1 << 27  # logits, of which some ten copies in float64 are made: 10 GiB
LOSS, SHARDS = "loss function", "loss on vocabulary shards"


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
    tolerated = max([1e-3, *(loss.tolerated for loss in case.result.losses if loss.step == case.step)])
    if (
        not gaps
        or case.first != case.names.logits_gradient
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
        SHARDS,
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
    reference = case.reference(case.first)
    values = ((sentence, weights * reference) for sentence, weights in weights_by_sentence.items())
    found = nearest_that_explains(case, values)
    return None if found is None else Cause("label count", found)


def _groups(case: Case, labels: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the ways to group positions by DP rank, micro batch and cp rank: each group may have counted its own labels.

    A way is (the groups in words, the number of the group of every position). `labels` has the batch's shape.
    """
    row = torch.arange(len(labels))[:, None].expand(labels.shape)
    rows_of_rank = len(labels) // case.mesh.num_sample_shares
    indices = {
        "DP ranks": row // rows_of_rank,
        "micro batches": row % rows_of_rank // (rows_of_rank // case.micro_batches),
        "cp ranks": case.cp_rank_of(labels.shape[1]).expand(labels.shape),
    }
    sizes = {name: int(index.max()) + 1 for name, index in indices.items()}
    names = [name for name, size in sizes.items() if size > 1]
    for chosen in (subset for size in range(1, 4) for subset in itertools.combinations(names, size)):
        group = torch.zeros_like(row)
        for name in chosen:
            group = group * sizes[name] + indices[name]
        yield " and ".join(f"{sizes[name]} {name}" for name in chosen), group


def labels_of_a_shard(case: Case) -> Cause | None:
    """The gradient of the logits is wrong exactly for the tokens whose labels lie in some shards of the vocabulary."""
    if case.first != case.names.logits_gradient:
        return None
    own, reference = case.own(case.first), case.reference(case.first)
    error = (own - reference).norm(dim=-1)
    shards = _shards(case, error > LEFT * float(error.max()))
    if not shards or case.explains(case.first, _weights(own, reference)[..., None] * reference):
        return None  # or the loss of each token is right, and counts otherwise
    return Cause(
        SHARDS,
        f"the logits are right; their gradient is wrong for all tokens whose label is in the shard of {shards}, and for no others",
    )


def _shards(case: Case, is_wrong: torch.Tensor) -> str:
    """Return the tp ranks whose shards of the vocabulary have the labels of all wrong tokens, and of no others; "" if there are none."""
    if "tp" not in case.sharded(case.first):
        return ""
    shard_size = -(-case.own(case.first).shape[-1] // case.mesh.tp)  # as torch.chunk cuts
    shards = case.own("batch/labels").long() // shard_size
    wrong, right = set(shards[is_wrong].tolist()), set(shards[~is_wrong].tolist())
    few = min(int(is_wrong.sum()), int((~is_wrong).sum()))
    if wrong & right or few < 8:
        return ""
    return f"tp rank {', '.join(map(str, sorted(wrong)))}"


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


def weights_of_tokens(case: Case) -> Cause | None:
    """The gradient of the logits is right except for the weights of tokens, of which there are few different ones."""
    if case.first != case.names.logits_gradient:
        return None
    own, right = case.own(case.first), case.right(case.first)
    weights, is_zero = _weights(own, right), right.square().sum(-1) == 0
    if _is_one_factor(case) or not case.explains(case.first, weights[..., None] * right):
        return None
    groups: list[list[float]] = []
    for weight in weights[~is_zero].sort().values.tolist():
        if not groups or weight - groups[-1][-1] > evidence.SAME_FACTOR * max(
            abs(weight), abs(groups[-1][-1])
        ):
            groups.append([])
        groups[-1].append(weight)
    if not 1 < len(groups) <= FEW + 1:
        return None
    means = [sum(group) / len(group) for group in groups]
    shown = [
        f"{len(group)} token{'s' * (len(group) > 1)} count{'s' * (len(group) == 1)} {mean:.4g} times"
        for group, mean in zip(groups, means, strict=True)
    ]
    shards = _shards(case, (weights - 1).abs() > evidence.SAME_FACTOR)
    whose = f"; those whose weight is wrong have their label in the shard of {shards}" * bool(shards)
    return Cause("token weights", f"in the gradient of the logits, {', '.join(shown)} (1 is right){whose}")


def _weights(own: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return how many times the right one the gradient of each token is (least squares); 1 where the right one is zero."""
    square = right.square().sum(-1)
    return torch.where(square > 0, (own * right).sum(-1) / square, 1.0)


def _is_one_factor(case: Case) -> bool:
    """Whether the gradient of the logits is the right one times a factor. That says nothing of tokens or of the loss."""
    own, right = case.own(case.first), case.right(case.first)
    return case.explains(case.first, evidence.multiple_of(own, right) * right)


def another_loss(case: Case) -> Cause | None:
    """The gradient of the logits is that of a cross entropy with label smoothing, a z-loss, a temperature or a cap, or of rounded logits.

    Or each token's sum of exponentials is wrong.
    """
    if case.first != case.names.logits_gradient or not case.has(case.names.logits, "batch/labels"):
        return None
    if math.prod(case.entry["tensors"][case.first]["shape"]) > MOST:
        return None
    logits, labels = case.own(case.names.logits), case.own("batch/labels").long()
    has_label = (labels != IGNORED)[..., None]
    are_finite = all(bool(x.isfinite().all()) for x in (logits, case.own(case.first)))
    if not are_finite or not bool(has_label.any()) or _is_one_factor(case):
        return None
    label = torch.zeros_like(logits).scatter_(-1, labels.clamp(min=0)[..., None], 1.0)
    found = nearest_that_explains(case, _of_other_losses(case, logits, label, has_label))
    if found is None:
        return None
    name, words = found
    return Cause(name, f"the gradient of the logits is that of a cross entropy {words}")


def _of_other_losses(
    case: Case, logits: torch.Tensor, label: torch.Tensor, has_label: torch.Tensor
) -> Iterator[tuple[tuple[str, str], torch.Tensor]]:
    """Yield ((the name of a cause, the loss in words), the gradient of the logits that it gives)."""
    own, right = case.own(case.first), case.right(case.first)

    def mean(of_tokens: torch.Tensor) -> torch.Tensor:
        return of_tokens * has_label / has_label.sum()

    smoothed, squared = (
        mean(label - 1 / logits.shape[-1]),
        mean(logits.logsumexp(-1, keepdim=True) * logits.softmax(-1)),
    )
    smoothing, z_loss = (evidence.multiple_of(own - right, direction) for direction in (smoothed, squared))
    if 0 < smoothing < 1:
        yield (LOSS, f"with label smoothing of {smoothing:.3g}"), right + smoothing * smoothed
    if z_loss > 0:
        yield (LOSS, f"with a z-loss of {z_loss / 2:.3g}"), right + z_loss * squared
    for dtype_name, dtype in evidence.SIXTEEN_BITS.items() if case.options["precision"] == "fp32" else ():
        words = f"of logits that are rounded to {dtype_name}, in a float32 run"
        yield (PRECISION, words), mean(logits.to(dtype).double().softmax(-1) - label)
    inverse = _inverse_temperature(own, logits, label, has_label)
    if inverse > 0:
        words = f"of logits that are divided by a temperature of {1 / inverse:.4g}"
        yield (LOSS, words), inverse * mean((inverse * logits).softmax(-1) - label)
    cap = _cap(own, logits, label, has_label)
    words = f"of logits that are capped, {cap:.4g} tanh(logits / {cap:.4g})"
    yield (LOSS, words), mean(_of_capped(logits, label, cap))
    shares = mean(logits.softmax(-1))
    times = _times(own + mean(label), shares, has_label)
    if times is not None:
        # A rank sums the exponentials of its shard of the vocabulary.
        name = SHARDS if "tp" in case.sharded(case.first) else LOSS
        yield (name, _of_sums(logits, times, has_label)), times * shares - mean(label)


def _times(probabilities: torch.Tensor, right: torch.Tensor, has_label: torch.Tensor) -> torch.Tensor | None:
    """Return how many times the right ones each token's probabilities are; None if they are no multiples that sums of exponentials give."""
    times = (probabilities * right).sum(-1, keepdim=True) / right.square().sum(-1, keepdim=True)
    times = torch.where(has_label, times, 1.0)
    return times if bool((times.isfinite() & (times > 0)).all()) else None


def _of_sums(logits: torch.Tensor, times: torch.Tensor, has_label: torch.Tensor) -> str:
    """Return in words what the sums of exponentials are, if probabilities are `times` the right ones."""
    ratios, largest = 1 / times[has_label], logits.amax(-1, keepdim=True)
    added = (
        (ratios - 1) * (logits - largest).exp().sum(-1, keepdim=True)[has_label] * largest[has_label].exp()
    )
    spread, spread_of_added = (float(x.max() / x.min() - 1) for x in (ratios, added))
    number = round(float(added.median())) if bool(added.isfinite().all()) else 0
    # If both are nearly constant, either may be meant.
    is_number = (
        number > 0 and 0 <= spread_of_added <= evidence.SAME_FACTOR and LEFT * spread > spread_of_added
    )
    if is_number and bool(((added / number - 1).abs() <= evidence.SAME_FACTOR).all()):
        return f"whose sums of exponentials have {number} more entries, of logits 0"
    low, high = float(ratios.min()), float(ratios.max())
    span = evidence.shown(low) if spread <= evidence.SAME_FACTOR**2 else f"{low:.8g} to {high:.8g}"
    return f"whose sums of exponentials are {span} times what they should be"


def _cap(own: torch.Tensor, logits: torch.Tensor, label: torch.Tensor, has_label: torch.Tensor) -> float:
    """Return the cap of the logits that explains the gradient of the first token with a label best."""
    token = int(has_label.flatten().nonzero()[0, 0])
    gradient, z, label = (tensor.flatten(0, -2)[token] for tensor in (own * has_label.sum(), logits, label))

    def left(cap: float) -> float:
        return float((gradient - _of_capped(z, label, cap)).norm())

    step = 2.0
    cap = min((step**power for power in range(-8, 12)), key=left)
    while step > 1 + 1e-12:
        step **= 0.5
        cap = min((cap / step, cap, cap * step), key=left)
    return cap


def _of_capped(logits: torch.Tensor, label: torch.Tensor, cap: float) -> torch.Tensor:
    """Return the gradient of the cross entropy of cap x tanh(logits / cap) of each token."""
    share = torch.tanh(logits / cap)
    return ((cap * share).softmax(-1) - label) * (1 - share.square())


def _inverse_temperature(
    own: torch.Tensor, logits: torch.Tensor, label: torch.Tensor, has_label: torch.Tensor
) -> float:
    """Return 1 / temperature, by the first token with a label; NaN if there is none.

    The logarithms of its gradient at all but the label are the logits over the temperature, and a constant.
    """
    token = int(has_label.flatten().nonzero()[0, 0])
    others = label.flatten(0, -2)[token] == 0
    gradient, z = (tensor.flatten(0, -2)[token][others] for tensor in (own, logits))
    if not bool((gradient > 0).all()):
        return math.nan
    return evidence.multiple_of(gradient.log() - gradient.log().mean(), z - z.mean())


LOSS_RULES = (
    reported_loss,
    partition_function,
    counted_otherwise,
    weights_of_samples,
    labels_of_a_shard,
    lost,
    another_loss,
    weights_of_tokens,
)
