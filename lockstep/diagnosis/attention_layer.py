"""The tensors of an attention layer in a run, and its output from them, in float64, as models like Llama compute it:

softmax(scale (turn q) (turn k)^T, where a query sees a key) v
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from lockstep.diagnosis.case import Case
from lockstep.diagnosis.odd import wrong_elements
from lockstep.diagnosis.ways import right_tensors

SCORES = 1 << 25  # elements of scores, at most, that are computed at once: 256 MiB
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


def of_wrong_samples(case: Case, layer: str) -> Attention | None:
    """Return the tensors of a layer, if they are captured and right."""
    samples = _samples(case)
    rotary = f"forward/{case.names.base}.rotary_emb"
    of_heads, angles = projections(case, layer, samples), right_tensors(case, [rotary, f"{rotary}.1"])
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


def right_ways(case: Case, found: Attention) -> Iterator[Attention]:
    """Yield attention without a window, and with the model's. Some layers may have it."""
    yield found
    window = window_of(case)
    if window:
        yield found.but(causal=found.causal & (found.before < window))


def window_of(case: Case) -> int:
    return case.dump.run["architecture"].get("sliding_window") or 0


def names_of(case: Case, layer: str) -> list[str]:
    """Return the names of what attention is given as queries, keys and values: the norm of each head comes after the projection."""
    names = []
    for part in "qkv":
        normed = f"forward/{layer}.{part}_norm"
        names.append(normed if case.has(normed) else f"forward/{layer}.{part}_proj")
    return names


def projections(case: Case, layer: str, samples: torch.Tensor) -> list[torch.Tensor]:
    """Return queries, keys and values of a layer, (samples, heads, positions, head size); [] unless they are captured and right."""
    return [
        (tensor if tensor.ndim == 4 else tensor.unflatten(-1, (-1, case.head_size)))[samples].transpose(1, 2)
        for tensor in right_tensors(case, names_of(case, layer))
    ]


def _samples(case: Case) -> torch.Tensor:
    """Return the samples that are computed again: those that are wrong, or the first of them if their scores are too many."""
    own, right = case.own(case.first), case.right(case.first)
    wrong = wrong_elements(case, own, right).flatten(1).any(1).nonzero()[:, 0]
    scores = own.shape[1] ** 2 * own.shape[-1] // case.head_size
    return wrong[: SCORES // scores]
