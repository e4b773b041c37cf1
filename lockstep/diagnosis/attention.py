"""What else attention computed, if its output is the first wrong tensor: another mask, heads, angles, scale or precision.

Attention is computed again from the run's own queries, keys, values and rotary angles, in float64, as models like Llama do it:

    softmax(scale (turn q) (turn k)^T, where a query sees a key) v

The right way must give what the reference has. Then the wrong way that is nearest to the run is named, if it explains every wrong head
of every wrong sample (ways.py).
"""

import dataclasses
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch

from lockstep.diagnosis import evidence
from lockstep.diagnosis.case import Case
from lockstep.diagnosis.odd import numbered, places_of, wrong_elements
from lockstep.diagnosis.ways import (
    PRECISION,
    Way,
    gives_the_right,
    low_dtypes,
    nearest,
    right_tensors,
    wrong_parts,
)
from lockstep.ground.words import and_more
from lockstep.verdict.result import Cause

MOST_SAMPLES = 16  # of a batch, whose keys and values are tried in each other's places
SCORES = 1 << 25  # elements of scores, at most, that are computed at once: 256 MiB
FURTHER = (1, 2, 4, 8)  # positions
NEWTON_STEPS, STEP = 6, 1e-4  # the step is relative
MASK, CONTEXT, EXCHANGED = "attention mask", "context parallelism", "pieces exchanged"
KEYS_AND_VALUES = ("k_proj", "v_proj", "k_norm")
Turn = Callable[[torch.Tensor], torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Attention:
    """Some samples of the tensors of one layer.

    q, k and v have shape (samples, heads, positions, head size), k and v with fewer heads; cos and sin (1 or samples, 1, positions, head
    size). What a query sees is `causal` (queries, keys), `documents` (samples or 1, 1, queries, keys) and `tokens` (samples or 1, 1, 1, keys).
    """

    layer: str
    samples: torch.Tensor  # their numbers in the batch
    positions: torch.Tensor  # (samples or 1, positions)
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    causal: torch.Tensor
    documents: torch.Tensor
    tokens: torch.Tensor

    def turned(self, x: torch.Tensor) -> torch.Tensor:
        """Turn each pair of elements i and i + head size / 2 by its angle."""
        first, second = x.chunk(2, -1)
        return x * self.cos + torch.cat([-second, first], -1) * self.sin

    def turned_in_neighbours(self, x: torch.Tensor) -> torch.Tensor:
        """Turn each pair of elements 2 i and 2 i + 1 by its angle."""
        cos, sin = (angles.chunk(2, -1)[0].repeat_interleave(2, -1) for angles in (self.cos, self.sin))
        return x * cos + torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2) * sin

    def but(self, **changes: Any) -> "Attention":
        return dataclasses.replace(self, **changes)

    def output(
        self,
        seen: torch.Tensor | None = None,
        turn: Turn | None = None,
        turn_keys: Turn | None = None,
        scale: float | None = None,
        scores_in: Turn = torch.Tensor.double,
        weights_in: Turn = torch.Tensor.double,
    ) -> torch.Tensor:
        """Return the output, (samples, positions, heads, head size). That of a query that sees no key is NaN."""
        turn = turn or self.turned
        q, k = turn(self.q), (turn_keys or turn)(self.k)
        k, v = (tensor.repeat_interleave(q.shape[1] // tensor.shape[1], 1) for tensor in (k, self.v))
        scores = scores_in((self.scale if scale is None else scale) * q @ k.transpose(-1, -2))
        weights = scores.masked_fill(~(self.seen if seen is None else seen), -math.inf).softmax(-1)
        return (weights_in(weights) @ v).transpose(1, 2)

    @property
    def scale(self) -> float:
        return self.q.shape[-1] ** -0.5

    @property
    def before(self) -> torch.Tensor:
        """How many positions before the query the key is: (queries, keys)."""
        place = torch.arange(self.q.shape[2])
        return place[:, None] - place

    @property
    def seen(self) -> torch.Tensor:
        return self.causal & self.documents & self.tokens


def another_way(case: Case) -> Cause | None:
    """The output of attention is what another mask, other heads, angles, another scale or precision gives."""
    layer, is_output, _ = case.path.partition(".o_proj.input")
    if not is_output or not case.names.is_on_heads(case.first):
        return None
    found = _of_wrong_samples(case, layer)
    return _nearest(case, found, lambda output: output) if found else None


def another_way_back(case: Case) -> Cause | None:
    """The gradient of queries, keys or values is what comes back through attention that is computed in another way.

    That is so where attention is computed again, or its gradient has a kernel of its own.
    """
    layer, _, projection = case.path.rpartition(".")
    if not case.names.is_on_heads(case.first) or f"forward/{case.path}" not in _names(case, layer):
        return None
    found = _of_wrong_samples(case, layer)
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
    if is_output and case.names.is_on_heads(case.first) and _of_wrong_samples(case, layer):
        return None  # `another_way` has an answer
    own, right = case.own(case.first), case.reference(case.first)
    positions, is_wrong = case.own("batch/position_ids"), wrong_elements(case, own, right).any(-1)
    document = (positions == 0).cumsum(1)
    is_first_token = (positions == 0) & (document > 1)
    num_hit, is_later = int((is_wrong & is_first_token).sum()), (positions != 0) & (document > 1)
    if bool((is_wrong & (document == 1)).any()) or 2 * num_hit < int(is_first_token.sum()) or not num_hit:
        return None
    if 2 * int((is_wrong & is_later).sum()) < int(is_later.sum()) or not bool(
        own[is_wrong & is_first_token].any()
    ):
        return None  # later tokens of documents would see others, too, and first tokens would see something
    return Cause(
        MASK,
        f"attention is right in the first document of every sample, and wrong at {num_hit} of {int(is_first_token.sum())} first tokens of later "
        "ones, which see themselves alone: the mask of documents is another",
    )


def _samples(case: Case) -> torch.Tensor:
    """Return the samples that are computed again: those that are wrong, or the first of them if their scores are too many."""
    own, right = case.own(case.first), case.right(case.first)
    wrong = wrong_elements(case, own, right).flatten(1).any(1).nonzero()[:, 0]
    scores = own.shape[1] ** 2 * own.shape[-1] // case.head_size
    return wrong[: SCORES // scores]


def _nearest(case: Case, found: Attention, measured: Turn) -> Cause | None:
    """Return the cause for what is `measured` of the output of attention."""
    own, right = (
        tensor[found.samples].unflatten(-1, (-1, case.head_size))
        for tensor in (case.own(case.first), case.right(case.first))
    )
    outputs = ((way, measured(way.output())) for way in _right_ways(case, found))
    right_way, again = next(
        ((way, it) for way, it in outputs if gives_the_right(case, it, right)), (None, right)
    )
    if right_way is None:
        return None
    # By sample, head, and the cp rank that has the positions
    groups = [(dim, torch.arange(own.shape[dim])) for dim in (0, 2)]
    groups.append((1, case.cp_rank_of(own.shape[1])))
    wrong = wrong_parts(wrong_elements(case, own, right), groups)
    ways = _ways(case, right_way, own, right, wrong, measured)
    values = [(name, words, measured(output)) for name, words, output in ways]
    if case.pieces and case.path.endswith(KEYS_AND_VALUES):
        values.append(_from_own_queries(case, right_way, measured))
    way = nearest(case, own, right, again, wrong, values)
    if way is None:
        return None
    name, words = way
    heads = places_of(wrong, 2)
    if len(heads) < wrong.shape[2] and not words.startswith("head"):
        words = f"{numbered('head', heads)} of {wrong.shape[2]}: {words}"
    back = "in the backward pass, " if case.first.startswith("backward/") else ""
    return Cause(name, f"{found.layer}: {back}{words}, as recomputed")


def _of_wrong_samples(case: Case, layer: str) -> Attention | None:
    """Return the tensors of a layer, if they are captured and right."""
    samples = _samples(case)
    rotary = f"forward/{case.names.base}.rotary_emb"
    of_heads, angles = _projections(case, layer, samples), right_tensors(case, [rotary, f"{rotary}.1"])
    if not (of_heads and angles and len(samples)):
        return None
    cos, sin = (tensor[:, None] if len(tensor) == 1 else tensor[samples, None] for tensor in angles)
    place, everything = torch.arange(cos.shape[2]), torch.ones(1, 1, 1, 1, dtype=torch.bool)
    q, k, v = of_heads
    causal = place[:, None] >= place
    found = Attention(layer, samples, place[None], q, k, v, cos, sin, causal, everything, everything)
    if case.has("batch/position_ids"):
        positions = case.own("batch/position_ids")[samples]
        document = (positions == 0).cumsum(1)
        documents = (document[:, :, None] == document[:, None, :])[:, None]
        found = found.but(positions=positions, documents=documents)
    if case.has("batch/attention_mask"):
        found = found.but(tokens=case.own("batch/attention_mask")[samples].bool()[:, None, None, :])
    return found


def _right_ways(case: Case, found: Attention) -> Iterator[Attention]:
    """Yield attention without a window, and with the model's. Some layers may have it."""
    yield found
    window = _window(case)
    if window:
        yield found.but(causal=found.causal & (found.before < window))


def _window(case: Case) -> int:
    return case.dump.run["architecture"].get("sliding_window") or 0


def _names(case: Case, layer: str) -> list[str]:
    """Return the names of what attention is given as queries, keys and values: the norm of each head comes after the projection."""
    names = []
    for part in "qkv":
        normed = f"forward/{layer}.{part}_norm"
        names.append(normed if case.has(normed) else f"forward/{layer}.{part}_proj")
    return names


def _projections(case: Case, layer: str, samples: torch.Tensor) -> list[torch.Tensor]:
    """Return queries, keys and values of a layer, (samples, heads, positions, head size); [] unless they are captured and right."""
    return [
        (tensor if tensor.ndim == 4 else tensor.unflatten(-1, (-1, case.head_size)))[samples].transpose(1, 2)
        for tensor in right_tensors(case, _names(case, layer))
    ]


def _ways(
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
    if _window(case):
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
    is_first = found.positions == 0
    for words, shift in (("late", 1), ("early", -1)):
        document = is_first.roll(shift, 1).cumsum(1)
        yield (
            f"each document begins one position too {words}",
            (document[:, :, None] == document[:, None, :])[:, None],
        )


def _windows(case: Case, found: Attention, wrong: torch.Tensor) -> set[int]:
    """Return windows that the mask may have: queries that see no more keys than it are right, and the others are wrong."""
    window, num_seen = _window(case), found.seen.sum(-1).expand(len(wrong), 1, wrong.shape[1])[:, 0]
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
    everything = torch.arange(len(case.own(case.first)))
    if not 1 < len(everything) <= MOST_SAMPLES:
        return
    whole = case.right(case.first).unflatten(-1, (-1, case.head_size))
    _, k, v = _projections(case, found.layer, everything)
    what = {"kv": "the keys and values of ", "k": "the keys of ", "v": "the values of ", "": ""}
    for parts, words in what.items():
        values = []
        for source in everything.tolist():
            changes = {
                part: tensor[[source]].expand_as(found.k)
                for part, tensor in (("k", k), ("v", v))
                if part in parts
            }
            values.append(found.but(**changes).output() if parts else whole[[source]].expand_as(own))
        left = torch.stack([((value - own).square() * wrong).nansum((1, 2, 3)) for value in values])
        left[found.samples, torch.arange(len(own))] = math.inf
        sources = left.argmin(0)
        value = torch.stack(values)[sources, torch.arange(len(own))]
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
        of_heads = _projections(case, before, found.samples)
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


def _from_own_queries(case: Case, found: Attention, measured: Turn) -> Way:
    """Return the gradient of keys or values without what comes back from the queries of other cp ranks."""
    owner, value = case.cp_rank_of(found.q.shape[2]), torch.zeros(())
    for rank in owner.unique():
        is_own = (owner == rank)[:, None, None]
        value = value + measured(found.output() * is_own) * is_own
    return "cp reduction missing", "what queries of other cp ranks send back is lost", value


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
