"""The wrong ways in which attention may be computed, and what each gives from the tensors of a layer."""

import math
import re
from collections.abc import Iterator

import torch

from lockstep.diagnosis import evidence
from lockstep.diagnosis.attention_layer import Attention, Turn, projections, window_of
from lockstep.diagnosis.case import Case
from lockstep.diagnosis.odd import numbered, places_of, wrong_elements
from lockstep.diagnosis.ways import PRECISION, Way, low_dtypes
from lockstep.ground.words import and_more

# Samples of a batch whose keys and values are tried in each other's places, and elements of the outputs that this gives
MOST_SAMPLES, MOST_ELEMENTS = 16, 1 << 26
FURTHER = (1, 2, 4, 8)  # positions
NEWTON_STEPS, STEP = 6, 1e-4  # the step is relative
MASK, CONTEXT, EXCHANGED = "attention mask", "context parallelism", "pieces exchanged"


def wrong_ways(
    case: Case,
    found: Attention,
    own: torch.Tensor,
    right: torch.Tensor,
    wrong: torch.Tensor,
    measured: Turn,
) -> Iterator[Way]:
    for name, words, seen in _masks(case, found, wrong_elements(case, own, right)):
        yield name, words, found.output(seen)
    if case.first.startswith("forward/"):
        yield from _heads(case, found, own, wrong)
        yield from _of_other_samples(case, found, own, wrong)
        yield from _keys(case, found)
    for words, output in _angles(found):
        yield "rotary angles", words, output
    scale = _scale(found, own, wrong, measured)
    digits = 8 if math.isclose(scale, found.scale, rel_tol=1e-3) else 4
    words = f"the scores are multiplied by {scale:.{digits}g}, not by {found.scale:.{digits}g}"
    yield "module settings", words, found.output(scale=scale)
    if case.options["precision"] == "fp32":
        for words, output in _in_low_precision(found):
            yield PRECISION, words, output


def from_own_queries(case: Case, found: Attention, measured: Turn) -> Way:
    """Return the gradient of keys or values without what comes back from the queries of other cp ranks."""
    owner, value = case.cp_rank_of(found.q.shape[2]), torch.zeros(())
    for rank in owner.unique():
        is_own = (owner == rank)[:, None, None]
        value = value + measured(found.output() * is_own) * is_own
    return "cp reduction missing", "what queries of other cp ranks send back is lost", value


def _masks(case: Case, found: Attention, wrong: torch.Tensor) -> Iterator[Way]:
    """Yield ways with what a query sees in the place of the output."""
    before, inside, causal = found.before, found.documents & found.tokens, found.causal
    for further in FURTHER:
        words = f"each position sees the next {'one' if further == 1 else further}"
        yield MASK, words, (causal | ((before < 0) & (before >= -further))) & inside
    yield MASK, "no position sees itself", causal & (before != 0) & inside
    yield MASK, "documents see each other", causal & found.tokens
    for words, moved in _moved_documents(case, found):
        yield MASK, words, causal & moved & found.tokens
    yield MASK, "padding is seen", causal & found.documents
    yield MASK, "each position sees all later ones", (causal | (before < 0)) & inside
    for window in sorted(_windows(case, found, wrong)):
        yield MASK, f"there is a window of {window} positions", (before >= 0) & (before < window) & inside
    if window_of(case):
        yield MASK, "the model's window is left out", (before >= 0) & inside
    if case.pieces:
        place = torch.arange(len(before))
        owner = case.cp_rank_of(len(place))
        are_one = owner[:, None] == owner
        place_in_rank = (are_one & (before > 0)).sum(1)
        words = "the mask counts the positions of each cp rank from 0"
        yield CONTEXT, words, (place <= place_in_rank[:, None]) & inside
        yield CONTEXT, "each cp rank sees its own positions alone", causal & are_one & inside


def _moved_documents(case: Case, found: Attention) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what queries see if each document begins at another place."""
    if not case.has("batch/position_ids"):
        return
    begins = (found.positions == 0) & (torch.arange(found.positions.shape[1]) > 0)
    for words, shift in (("late", 1), ("early", -1)):
        moved = begins.roll(shift, 1)
        moved[:, -1 if shift < 0 else 0] = False  # what went over the end
        document = moved.cumsum(1)
        yield (
            f"each later document begins one position too {words}",
            (document[:, :, None] == document[:, None, :])[:, None],
        )


def _windows(case: Case, found: Attention, wrong: torch.Tensor) -> set[int]:
    """Return windows that the mask may have: queries that see no more keys than it are right, and the others are wrong."""
    window, num_seen = window_of(case), found.seen.sum(-1).expand(len(wrong), 1, wrong.shape[1])[:, 0]
    fewest = int(num_seen[wrong.any((2, 3))].min()) - 1
    # In 16 bits, the first wrong ones are hidden by rounding errors.
    nearby = {fewest, 1 << max(fewest, 1).bit_length() - 1}
    return {one for one in (*nearby, window - 1, window + 1, window // 2, 2 * window) if one > 0} - {window}


def _heads(case: Case, found: Attention, own: torch.Tensor, wrong: torch.Tensor) -> Iterator[Way]:
    """Heads attend to the keys and values of others, or to one of both, or are laid out otherwise."""
    for parts, words in (("kv", "KV head"), ("k", "the keys of KV head"), ("v", "the values of KV head")):
        value, sources = torch.empty_like(own), torch.zeros(own.shape[2], dtype=torch.long)
        least = torch.full(own.shape[2:3], math.inf, dtype=own.dtype)  # by head
        for source in range(found.k.shape[1]):
            output = found.but(**{part: getattr(found, part)[:, [source]] for part in parts}).output()
            left = ((output - own).square() * wrong).nansum((0, 1, 3))
            is_nearer = left < least
            value[:, :, is_nearer] = output[:, :, is_nearer]
            least, sources[is_nearer] = torch.where(is_nearer, left, least), source
        by_source: dict[int, list[int]] = {}
        for head in places_of(wrong, 2):
            by_source.setdefault(int(sources[head]), []).append(head)
        sentences = [
            f"{numbered('head', heads)} attend{'s' * (len(heads) == 1)} to {words} {source}"
            for source, heads in by_source.items()
        ]
        yield EXCHANGED, and_more(sentences), value
    of_ranks = [heads.transpose(1, 2).reshape(heads.shape) for heads in found.output().chunk(case.mesh.tp, 2)]
    yield EXCHANGED, "the output is laid out by heads, not by positions", torch.cat(of_ranks, 2)


def _of_other_samples(case: Case, found: Attention, own: torch.Tensor, wrong: torch.Tensor) -> Iterator[Way]:
    """Samples attend to the keys and values of others, or to one of both. That they have the output of others is a rival."""
    samples = torch.arange(len(case.own(case.first)))
    if not 1 < len(samples) <= MOST_SAMPLES or len(samples) * own.numel() > MOST_ELEMENTS:
        return
    whole = case.right(case.first).unflatten(-1, (-1, case.head_size))
    _, k, v = projections(case, found.layer, samples)
    of_parts = {"kv": "the keys and values of ", "k": "the keys of ", "v": "the values of ", "": ""}
    for parts, words in of_parts.items():
        value, sources = torch.empty_like(own), torch.zeros(len(own), dtype=torch.long)
        least = torch.full(own.shape[:1], math.inf, dtype=own.dtype)  # by sample
        for source in samples.tolist():
            keys, values = (
                tensor[[source]].expand_as(its) if part in parts else its
                for part, tensor, its in (("k", k, found.k), ("v", v, found.v))
            )
            output = found.but(k=keys, v=values).output() if parts else whole[[source]].expand_as(own)
            left = ((output - own).square() * wrong).nansum((1, 2, 3))
            is_nearer = (left < least) & (found.samples != source)
            value[is_nearer] = output[is_nearer]
            least, sources[is_nearer] = torch.where(is_nearer, left, least), source
        pairs = zip(found.samples.tolist(), sources.tolist(), strict=True)
        sentences = [f"sample {sample} attends to {words}sample {source}" for sample, source in pairs]
        yield EXCHANGED if parts else "", and_more(sentences), value


def _keys(case: Case, found: Attention) -> Iterator[Way]:
    """Queries attend to the keys and values of the layer before, of neighbouring positions, or of each cp rank by themselves."""
    for words, shift in (("before", 1), ("after", -1)):
        output = found.but(v=found.v.roll(shift, 2)).output()
        yield EXCHANGED, f"each value is that of the position {words}", output
    before = re.sub(r"\d+", lambda number: str(int(number[0]) - 1), found.layer)
    old = found
    if case.names.layer_of(f"{found.layer}.") > 0:
        of_heads = projections(case, before, found.samples)
        if of_heads:
            old = found.but(k=of_heads[1], v=of_heads[2])
            yield EXCHANGED, f"keys and values are those of {before}", old.output()
    if not case.pieces:
        return
    owner = case.cp_rank_of(found.q.shape[2])
    if old is not found:
        value = torch.empty_like(found.q.transpose(1, 2))
        for rank in owner.unique():
            mine = (owner == rank)[:, None]
            mixed = found.but(k=torch.where(mine, found.k, old.k), v=torch.where(mine, found.v, old.v))
            value[:, owner == rank] = mixed.output()[:, owner == rank]
        yield CONTEXT, f"keys and values of other cp ranks are those of {before}", value
    by_rank = torch.stack([found.output(found.seen & (owner == rank)) for rank in owner.unique()])
    words = "the outputs from the keys of each cp rank are averaged, without the weights of their softmaxes"
    yield CONTEXT, words, by_rank.nanmean(0)


def _angles(found: Attention) -> Iterator[tuple[str, torch.Tensor]]:
    def as_it_is(x: torch.Tensor) -> torch.Tensor:
        return x

    yield "queries and keys are not rotated", found.output(turn=as_it_is)
    yield "queries are not rotated", found.output(turn=as_it_is, turn_keys=found.turned)
    yield "keys are not rotated", found.output(turn_keys=as_it_is)
    words = "neighbouring elements are rotated as pairs, where the model has pairs of halves"
    yield words, found.output(turn=found.turned_in_neighbours)
    yield "queries and keys are rotated backwards", found.but(sin=-found.sin).output()
    yield "queries and keys are rotated twice", found.output(turn=lambda x: found.turned(found.turned(x)))
    step = _one_position(found)
    if step is None:
        return
    cos, sin = step
    for words, sign in (("more", 1), ("less", -1)):
        further = found
        for number in ("one position", "two positions"):
            further = further.but(
                cos=further.cos * cos - sign * further.sin * sin,
                sin=further.sin * cos + sign * further.cos * sin,
            )
            sentence = f"queries are rotated by {number} {words} than keys"
            yield sentence, found.output(turn=further.turned, turn_keys=found.turned)


def _one_position(found: Attention) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return cosine and sine of the angles of one position, from two neighbours of the first sample; None if none are one position apart."""
    places = (found.positions[0].diff() == 1).nonzero()[:, 0].tolist()
    if not places:
        return None
    (cos_0, cos_1), (sin_0, sin_1) = (
        x[:1, :, places[0] :][:, :, :2].unbind(2) for x in (found.cos, found.sin)
    )
    return cos_1 * cos_0 + sin_1 * sin_0, sin_1 * cos_0 - cos_1 * sin_0


def _scale(found: Attention, own: torch.Tensor, wrong: torch.Tensor, measured: Turn) -> float:
    """Return the factor of the scores that fits best (Gauss-Newton, from the nearest of some powers of 2 times the right one)."""

    def output(scale: float) -> torch.Tensor:
        return (measured(found.output(scale=scale)) * wrong).nan_to_num()

    own = own * wrong
    scale = min(
        (found.scale * 2**power for power in range(-3, 4)),
        key=lambda scale: float((own - output(scale)).norm()),
    )
    for _ in range(NEWTON_STEPS):
        value = output(scale)
        slope = (output(scale * (1 + STEP)) - value) / (scale * STEP)
        scale += evidence.multiple_of(own - value, slope)
    left, left_of_zero = (float((own - output(one)).norm()) for one in (scale, 0.0))
    return 0.0 if left_of_zero <= evidence.NEARER * left else scale


def _in_low_precision(found: Attention) -> Iterator[tuple[str, torch.Tensor]]:
    operands = [x.detach() for x in (found.turned(found.q), found.turned(found.k), found.v)]
    for name, low in low_dtypes(*operands).items():

        def turned(x: torch.Tensor, low: Turn = low) -> torch.Tensor:
            return low(found.turned(x))

        low_values = found.but(v=low(found.v))
        yield f"queries, keys and values are rounded to {name}", low_values.output(turn=turned)
        yield f"queries and keys are rounded to {name}", found.output(turn=turned)
        yield f"keys and values are rounded to {name}", low_values.output(turn_keys=turned)
        yield f"queries are rounded to {name}", found.output(turn=turned, turn_keys=found.turned)
        yield f"keys are rounded to {name}", found.output(turn_keys=turned)
        yield f"values are rounded to {name}", low_values.output()
        yield f"both products are computed in {name}", low_values.output(turn=turned, weights_in=low)
        if name == "TF32":
            continue  # only products are computed in it
        name = name.partition(" or ")[0]
        yield f"the softmax is computed in {name}", found.output(scores_in=low, weights_in=low)
        yield f"the scores are rounded to {name}", found.output(scores_in=low)
        yield f"the weights of values are rounded to {name}", found.output(weights_in=low)
