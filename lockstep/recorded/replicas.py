"""Say why the gradients of ranks that hold the same parameters differ."""

import math
from collections.abc import Iterator

import torch

from lockstep.recorder.micro_batch import JoinedMicroBatch
from lockstep.recorder.recorded_step import StepRecord
from lockstep.recorder.recording import Recording
from lockstep.verdict.rows import StepVerdict

NOT_REDUCED = "were not reduced"
SAME_NORM = 1e-5  # relative: ranks may add up the parts of a norm in another order


class Replicas:
    """The ranks of a recorded step that hold the same parameters. `micro` are the micro batches that count."""

    def __init__(self, recording: Recording, verdict: StepVerdict, micro: list[JoinedMicroBatch]):
        self.recording, self.verdict, self.micro = recording, verdict, micro
        self.ranks = recording.steps[verdict.step - 1]

    def why(self, rank: int, name: str) -> str:
        """Return why the gradients of a rank differ from those of the first other rank that holds the same parameters.

        The text is the end of a sentence. `name` is the first parameter whose gradient differs.
        """
        record, first = self.ranks[rank], self._first_replica(rank, name)
        numbers = len(first.micro_batches), len(record.micro_batches)
        if numbers[0] != numbers[1]:
            return f"; rank {first.rank} stepped after {numbers[0]} micro batches, rank {rank} after {numbers[1]}"
        if self.only_clipped_otherwise(name, rank):
            clips = zip(
                *([clip for clip in r.clips if clip.has(name)] for r in (first, record)), strict=False
            )
            pair = next((pair for pair in clips if pair[0].factor != pair[1].factor), None)
            if pair is None:
                clipped, other_rank = (first.rank, rank) if first.clips else (rank, first.rank)
                return f"; rank {clipped} clipped them, rank {other_rank} did not"
            base, clip = pair
            if is_same_norm(base.norm, clip.norm):
                return f"; they were clipped to different norms, {base.max_norm:.7g} and {clip.max_norm:.7g}"
            return f"; they were clipped by different norms, {base.norm:.7g} and {clip.norm:.7g}"
        same = nonzero = 0
        are_zero = [True, True]
        for _, *shards in self._differing(first.rank, rank):
            x, y = shards
            same += int(((x == y) & (y != 0)).sum())
            nonzero += int(y.count_nonzero())
            are_zero = [zero and not shard.any() for zero, shard in zip(are_zero, shards, strict=True)]
        if 2 * same > nonzero:
            return f"; most elements are the same on ranks {first.rank} and {rank}, so they were changed after they were reduced"
        if are_zero[0] != are_zero[1]:
            return f"; on rank {(first.rank, rank)[are_zero[1]]} they are zero"
        factor = self._common_factor(first.rank, rank)
        if factor is not None:
            return f"; those of rank {rank} are {factor:.6g} times as large, so they were changed after they were reduced"
        have_same_batch = any({first.rank, rank} <= set(micro_batch.ranks) for micro_batch in self.micro)
        have_one_model = self._shares_a_model(first, record)
        if have_one_model and not have_same_batch:
            return f"; ranks {first.rank} and {rank} have parts of one model, and were called with different micro batches"
        cause = (
            ": these have parts of one model, so a sum in the backward pass may be missing" * have_one_model
        )
        return f"; they {NOT_REDUCED} over ranks {first.rank} and {rank}, or not all of them{cause}"

    def _common_factor(self, first: int, rank: int) -> float | None:
        """Return how many times as large the differing gradients of a rank are as those of rank `first`, before clipping.

        Returns None if that is not one factor for all of them.
        """
        factors, elements = list[float](), 0
        for name, x, y in self._differing(first, rank):
            if not (x.any() and y.any()):
                return None
            x = x.double() / self.ranks[first].clipped(name)
            y = y.double() / self.ranks[rank].clipped(name)
            factor = float((x * y).sum() / x.square().sum())
            if not float((y - factor * x).norm()) <= SAME_NORM * float(y.norm()):
                return None
            factors.append(factor)
            elements += x.numel()
        is_same = bool(factors) and max(factors) - min(factors) <= SAME_NORM * abs(factors[0])
        return factors[0] if is_same and elements > 1 else None

    def _differing(self, first: int, rank: int) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """Yield each gradient that differs between these ranks: (parameter, shard of `first`, shard of `rank`), of one shape each."""
        for name in self.verdict.differ:
            x, y = (
                self.recording.part(owner, self.verdict.step, f"gradient/{name}") for owner in (first, rank)
            )
            # Of more than two ranks, others may differ.
            if x is not None and y is not None and x.shape == y.shape and not torch.equal(x, y):
                yield name, x, y

    def _first_replica(self, rank: int, name: str) -> StepRecord:
        """Return the record of the first other rank that holds the same shard of a gradient, or of rank 0."""
        record, key = self.ranks[rank], f"gradient/{name}"
        replicas = (other for other in self.ranks.values() if other.places.get(key) == record.places[key])
        return next(other for other in (*replicas, self.ranks[0]) if other is not record)

    def only_clipped_otherwise(self, name: str, rank: int) -> bool:
        """Whether a rank's gradient differs from that of the first other rank with the same shard by clipping alone."""
        first = self._first_replica(rank, name).rank
        if self.ranks[first].clipped(name) == self.ranks[rank].clipped(name):
            return False
        unclipped = []
        for owner in (first, rank):
            shard = self.recording.part(owner, self.verdict.step, f"gradient/{name}")
            if shard is None:
                return False
            unclipped.append(shard.double() / self.ranks[owner].clipped(name))
        if unclipped[0].shape != unclipped[1].shape:
            return False
        return float((unclipped[0] - unclipped[1]).norm()) <= SAME_NORM * float(unclipped[0].norm())

    @staticmethod
    def _shares_a_model(first: StepRecord, about: StepRecord) -> bool:
        """Whether two ranks have parts of one model: they hold different shards, which FSDP2 did not make."""
        if about.rank in first.data_parallel:
            return False
        place = [step.data_parallel.index(step.rank) if step.data_parallel else 0 for step in (first, about)]
        return place[0] == place[1] and first.shards != about.shards


def is_same_norm(one: float, other: float, noise: float = 0.0) -> bool:
    """Whether two norms are the same, but for the order of their sums. `noise` is their relative rounding error."""
    return math.isclose(one, other, rel_tol=SAME_NORM + noise)
