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

import torch

from lockstep.diagnosis import evidence
from lockstep.diagnosis.case import Case
from lockstep.diagnosis.odd import numbered, places_of, wrong_elements
from lockstep.diagnosis.ways import PRECISION, Way, gives_the_right, nearest, right_tensors
from lockstep.ground.words import and_more
from lockstep.verdict.result import Cause

SCORES = 1 << 25  # elements of the scores, at most, that are computed again
NEWTON_STEPS, STEP = 6, 1e-4  # the step is relative
MASK, CONTEXT, EXCHANGED = "attention mask", "context parallelism", "pieces exchanged"
Turn = Callable[[torch.Tensor], torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Attention:
    """Tensors of one layer.

    q, k and v have shape (samples, heads, positions, head size), k and v with fewer heads; cos and sin (1 or samples, 1, positions, head
    size). What a query sees is `causal` (queries, keys), `documents` (samples or 1, 1, queries, keys) and `tokens` (samples or 1, 1, 1, keys).
    """

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

    def but(self, **changes: torch.Tensor) -> "Attention":
        return dataclasses.replace(self, **changes)

    def output(
        self,
        seen: torch.Tensor | None = None,
        turn: Turn | None = None,
        turn_keys: Turn | None = None,
        scale: float | None = None,
        scores_in: torch.dtype = torch.float64,
        weights_in: torch.dtype = torch.float64,
    ) -> torch.Tensor:
        """Return the output, (samples, positions, heads, head size). That of a query that sees no key is NaN."""
        turn = turn or self.turned
        q, k = turn(self.q), (turn_keys or turn)(self.k)
        k, v = (tensor.repeat_interleave(q.shape[1] // tensor.shape[1], 1) for tensor in (k, self.v))
        scores = ((self.scale if scale is None else scale) * q @ k.transpose(-1, -2)).to(scores_in).double()
        weights = scores.masked_fill(~(self.seen if seen is None else seen), -math.inf).softmax(-1)
        return (weights.to(weights_in).double() @ v).transpose(1, 2)

    @property
    def scale(self) -> float:
        return self.q.shape[-1] ** -0.5

    @property
    def seen(self) -> torch.Tensor:
        return self.causal & self.documents & self.tokens


def another_way(case: Case) -> Cause | None:
    """The output of attention is what another mask, other heads, angles, another scale or precision gives."""
    layer, is_output, _ = case.path.partition(".o_proj.input")
    found = _right_way(case, layer) if is_output else None
    if found is None:
        return None
    own, right = (
        tensor.unflatten(-1, (-1, case.head_size))
        for tensor in (case.own(case.first), case.right(case.first))
    )
    wrong = wrong_elements(case, own, right).any(-1, keepdim=True).any(1, keepdim=True)  # by sample and head
    if not bool(wrong.any()):
        return None
    way = nearest(case, own, right, wrong, _ways(case, found, layer, wrong))
    if way is None:
        return None
    heads = places_of(wrong, 2)
    which = "" if len(heads) == wrong.shape[2] else f"{numbered('head', heads)} of {wrong.shape[2]}: "
    return Cause(way[0], f"{layer}: {which}{way[1]}, as recomputed")


def _right_way(case: Case, layer: str) -> Attention | None:
    """Return the tensors of a layer, if the right way to compute attention gives the reference's output from them."""
    rotary = f"forward/{case.names.base}.rotary_emb"
    of_heads, angles = _projections(case, layer), right_tensors(case, [rotary, f"{rotary}.1"])
    if not (of_heads and angles and case.names.is_on_heads(case.first)):
        return None
    q, k, v = of_heads
    cos, sin = (tensor[:, None] for tensor in angles)
    length = q.shape[2]
    if q.shape[0] * q.shape[1] * length**2 > SCORES:
        return None
    place, everything = torch.arange(length), torch.ones(1, 1, 1, 1, dtype=torch.bool)
    found = Attention(q, k, v, cos, sin, place[:, None] >= place, everything, everything)
    if case.has("batch/position_ids"):
        document = (case.own("batch/position_ids") == 0).cumsum(1)
        found = found.but(documents=(document[:, :, None] == document[:, None, :])[:, None])
    if case.has("batch/attention_mask"):
        found = found.but(tokens=case.own("batch/attention_mask").bool()[:, None, None, :])
    window = case.dump.run["architecture"].get("sliding_window")
    ways = [found]
    if window:
        ways.append(found.but(causal=found.causal & (place[:, None] - place < window)))
    return next((way for way in ways if gives_the_right(case, way.output().flatten(-2))), None)


def _projections(case: Case, layer: str) -> list[torch.Tensor]:
    """Return queries, keys and values of a layer, (samples, heads, positions, head size); [] unless they are captured and right."""
    names = []
    for part in "qkv":
        normed = f"forward/{layer}.{part}_norm"  # of each head, after the projection
        names.append(normed if case.has(normed) else f"forward/{layer}.{part}_proj")
    return [
        (tensor if tensor.ndim == 4 else tensor.unflatten(-1, (-1, case.head_size))).transpose(1, 2)
        for tensor in right_tensors(case, names)
    ]


def _ways(case: Case, found: Attention, layer: str, wrong: torch.Tensor) -> Iterator[Way]:
    for name, words, seen in _masks(case, found):
        yield name, words, found.output(seen)
    yield from _heads(case, found, wrong)
    yield from _keys(case, found, layer)
    for words, output in _angles(found):
        yield "rotary angles", words, output
    scale = _scale(found, case.own(case.first).unflatten(-1, (-1, case.head_size)), wrong)
    words = f"the scores are multiplied by {scale:.4g}, not by {found.scale:.4g}"
    yield "module settings", words, found.output(scale=scale)
    if case.options["precision"] == "fp32":
        for words, output in _roundings(found):
            yield PRECISION, words, output


def _masks(case: Case, found: Attention) -> Iterator[Way]:
    """Yield ways with what a query sees in the place of the output."""
    place = torch.arange(found.q.shape[2])
    before = place[:, None] - place  # positions from the key to the query
    inside, causal = found.documents & found.tokens, found.causal
    yield MASK, "each position sees the next one", (causal | (before == -1)) & inside
    yield MASK, "no position sees itself", causal & (before != 0) & inside
    yield MASK, "documents see each other", causal & found.tokens
    yield MASK, "padding is seen", causal & found.documents
    yield MASK, "each position sees all later ones", (causal | (before < 0)) & inside
    if not torch.equal(causal, before >= 0):
        yield MASK, "the model's window is left out", (before >= 0) & inside
    own, right = case.own(case.first), case.right(case.first)
    first = places_of(wrong_elements(case, own, right), 1)[0]  # the first position that lacks a key
    yield MASK, f"there is a window of {first} positions", causal & (before < first) & inside
    if case.pieces:
        owner = case.cp_rank_of(len(place))
        are_one = owner[:, None] == owner
        place_in_rank = (are_one & (before > 0)).sum(1)
        words = "the mask counts the positions of each cp rank from 0"
        yield CONTEXT, words, (place <= place_in_rank[:, None]) & inside
        yield CONTEXT, "each cp rank sees its own positions alone", causal & are_one & inside


def _heads(case: Case, found: Attention, wrong: torch.Tensor) -> Iterator[Way]:
    """Heads attend to the keys and values of others, or are laid out otherwise."""
    right, own = found.output(), case.own(case.first).unflatten(-1, (-1, case.head_size))
    by_shared = torch.stack(
        [
            found.but(k=k[:, None], v=v[:, None]).output()
            for k, v in zip(found.k.unbind(1), found.v.unbind(1), strict=True)
        ]
    )
    nearest = ((by_shared - own).square() * wrong).nansum((1, 2, 4)).argmin(0).tolist()  # by head
    by_source: dict[int, list[int]] = {}
    for head in places_of(wrong, 2):
        by_source.setdefault(nearest[head], []).append(head)
    words = [
        f"{numbered('head', heads)} attend{'s' * (len(heads) == 1)} to KV head {source}"
        for source, heads in by_source.items()
    ]
    value = torch.stack([by_shared[source, :, :, head] for head, source in enumerate(nearest)], 2)
    yield EXCHANGED, and_more(words), value
    of_ranks = [heads.transpose(1, 2).reshape(heads.shape) for heads in right.chunk(case.mesh.tp, 2)]
    yield EXCHANGED, "the heads are not transposed back", torch.cat(of_ranks, 2)


def _keys(case: Case, found: Attention, layer: str) -> Iterator[Way]:
    """Queries attend to the keys and values of the layer before, or to those of each cp rank by themselves."""
    before = re.sub(r"\d+", lambda number: str(int(number[0]) - 1), layer)
    old = _projections(case, before)[1:]
    if old:
        old_k, old_v = old
        words = f"keys and values are those of {before}"
        yield EXCHANGED, words, found.but(k=old_k, v=old_v).output()
    if not case.pieces:
        return
    owner = case.cp_rank_of(found.q.shape[2])
    if old:
        value = torch.empty_like(found.q.transpose(1, 2))
        for rank in owner.unique():
            mine = (owner == rank)[:, None]
            mixed = found.but(k=torch.where(mine, found.k, old_k), v=torch.where(mine, found.v, old_v))
            value[:, owner == rank] = mixed.output()[:, owner == rank]
        yield CONTEXT, f"keys and values of other cp ranks are those of {before}", value
    by_rank = torch.stack([found.output(found.seen & (owner == rank)) for rank in owner.unique()])
    yield CONTEXT, "what the keys of each cp rank give is averaged, without its weight", by_rank.nanmean(0)


def _angles(found: Attention) -> Iterator[tuple[str, torch.Tensor]]:
    def as_it_is(x: torch.Tensor) -> torch.Tensor:
        return x

    yield "queries and keys are not turned", found.output(turn=as_it_is)
    yield "queries are not turned", found.output(turn=as_it_is, turn_keys=found.turned)
    yield "keys are not turned", found.output(turn_keys=as_it_is)
    yield "pairs of neighbours are turned, not pairs of halves", found.output(turn=found.turned_in_neighbours)
    yield "queries and keys are turned backwards", found.but(sin=-found.sin).output()
    yield "queries and keys are turned twice", found.output(turn=lambda x: found.turned(found.turned(x)))
    # The angle from the first position to the second
    (cos_0, cos_1), (sin_0, sin_1) = (x[:1, :, :2].unbind(2) for x in (found.cos, found.sin))
    cos, sin = cos_1 * cos_0 + sin_1 * sin_0, sin_1 * cos_0 - cos_1 * sin_0
    for words, turn in (("more", 1), ("less", -1)):
        further = found.but(
            cos=found.cos * cos - turn * found.sin * sin, sin=found.sin * cos + turn * found.cos * sin
        )
        words = f"queries are turned by one position {words} than keys"
        yield words, found.output(turn=further.turned, turn_keys=found.turned)


def _scale(found: Attention, own: torch.Tensor, wrong: torch.Tensor) -> float:
    """Return the factor of the scores that fits best (Gauss-Newton, from the nearest of some powers of 2 times the right one)."""

    def output(scale: float) -> torch.Tensor:
        return (found.output(scale=scale) * wrong).nan_to_num()

    own = own * wrong
    scale = min(
        (found.scale * 2**power for power in range(-3, 4)),
        key=lambda scale: float((own - output(scale)).norm()),
    )
    for _ in range(NEWTON_STEPS):
        value = output(scale)
        slope = (output(scale * (1 + STEP)) - value) / (scale * STEP)
        scale += evidence.multiple_of(own - value, slope)
    return scale


def _roundings(found: Attention) -> Iterator[tuple[str, torch.Tensor]]:
    for dtype in (torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        yield f"the softmax is computed in {name}", found.output(scores_in=dtype, weights_in=dtype)
        yield f"the scores are rounded to {name}", found.output(scores_in=dtype)
        yield f"the weights of values are rounded to {name}", found.output(weights_in=dtype)

        def turned(x: torch.Tensor, dtype: torch.dtype = dtype) -> torch.Tensor:
            return found.turned(x).to(dtype).double()

        words = f"queries, keys and values are rounded to {name}"
        yield words, found.but(v=found.v.to(dtype).double()).output(turn=turned)
