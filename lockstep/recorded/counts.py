"""Measure how much each micro batch counts in gradients that are of no known mean.

It is measured in the worst gradient, in each rank's shards, and on a rank whose gradients differ from those of the first.
"""

from collections.abc import Iterable

import torch

from lockstep.recorded.loss_weights import LossWeights
from lockstep.recorded.ranks import Ranks
from lockstep.verdict import normalisation
from lockstep.verdict.judgement import Judgement
from lockstep.verdict.lazy import Lazy
from lockstep.verdict.normalisation import Fit, Gradients

# Weights are measured only in gradients that have so many times as many elements as there are micro batches.
ENOUGH = 4
# How much the micro batches count is said of the shards of so many ranks, or groups of ranks, at most.
SHOWN = 2


class Counts:
    """Says how much micro batches count.

    `gradients` are those that were recorded, and `clipped` the factors that clipping multiplied them by. `columns` are the gradients of the
    micro batches' losses in float64.
    """

    def __init__(
        self,
        rank_checks: Ranks,
        gradients: Gradients,
        clipped: dict[str, float],
        columns: list[Gradients],
        weighed: LossWeights,
    ):
        self.rank_checks, self.gradients, self.clipped = rank_checks, gradients, clipped
        self.columns, self.weighed = columns, weighed
        self.micro, self.tolerated = rank_checks.micro, rank_checks.verdict.tolerated_weights

    def in_worst(self, rows: list[Judgement], nominal: torch.Tensor) -> str:
        """Return how much micro batches count in the gradient that is farthest off, to be read after it; "" if that says nothing.

        `nominal` are the weights of their losses in gradients that are right.
        """
        worst = max(rows, key=lambda row: row.multiple)
        if not worst.too_far:
            return ""
        name = worst.path
        gradient = {name: self.gradients[name]}
        fitted = normalisation.fit(gradient, self.columns, self.clipped)
        if not fitted.typical <= self.tolerated:
            return self.in_shards(row.path for row in rows if row.too_far)
        counts = fitted.weights[: len(self.micro)] / nominal
        if not self._are_enough(gradient) or float(counts.max() - counts.min()) <= self.tolerated:
            return ""
        return f"; in this gradient, {self.weighed.counts(fitted.weights)}"

    def in_shards(self, names: Iterable[str]) -> str:
        """Return how much micro batches count in each rank's shards of some gradients, to be read after these.

        Returns "" if they count as much in all shards, or if it is not known.
        """
        names = list(names)
        # The ranks whose shards have the same counts, by these in words
        ranks_of: dict[str, list[int]] = {}
        # Whether in the shards of each rank only those micro batches count that it was called with
        are_unreduced = True
        for rank in self.rank_checks.ranks:
            fitted = self._fit_of_rank(rank, names)
            if fitted is None or not fitted.typical <= self.tolerated:
                return ""
            ranks_of.setdefault(self.weighed.counts(fitted.weights), []).append(rank)
            weights = fitted.weights[: len(self.micro)].abs()
            are_others = [rank not in micro_batch.ranks for micro_batch in self.micro]
            are_unreduced &= float(weights[are_others].sum()) <= self.tolerated * float(weights.sum())
        if len(ranks_of) == 1:
            return ""
        if are_unreduced:
            return "; each rank's shards are of its own samples alone: they were not reduced"
        sentences = [
            f"in the shards of rank {' and '.join(map(str, ranks))}, {counts}"
            for counts, ranks in ranks_of.items()
        ]
        more = "; in those of further ranks, they count otherwise" if len(sentences) > SHOWN else ""
        return f"; {'; '.join(sentences[:SHOWN])}{more}"

    def on_odd_rank(self, of_first: torch.Tensor) -> None:
        """Say how much micro batches count in the gradients of a rank that has others than the first, as they were not reduced.

        `of_first` are the weights of their losses on the first rank.
        """
        rank, number = self.rank_checks.odd, len(self.micro)
        fitted = self._fit_of_rank(
            rank, [name for name in self.rank_checks.verdict.differ if name in self.gradients]
        )
        if fitted is None or not fitted.typical <= self.tolerated:
            return
        least = self.tolerated * float(of_first[:number].norm())
        # These gradients are those of further terms alone.
        if float(fitted.weights[:number].norm()) <= least and fitted.squares:
            return
        self.rank_checks.say_of_unreduced(f"; on rank {rank}, {self.weighed.counts(fitted.weights)}")

    def _fit_of_rank(self, rank: int, names: Iterable[str]) -> Fit | None:
        """Return the weights of the columns in a rank's own gradients, or its shards of them; None if they have too few elements to say."""
        record, step = self.rank_checks.ranks[rank], self.rank_checks.verdict.step
        found = ((name, self.rank_checks.recording.part(rank, step, f"gradient/{name}")) for name in names)
        shards = {name: shard for name, shard in found if shard is not None}
        if not self._are_enough(shards):
            return None

        def here(column: Gradients) -> Gradients:
            """Return the rank's shards of a column."""
            within = {
                name: record.places[f"gradient/{name}"].blocks[0].within for name in shards if name in column
            }
            return Lazy(within, lambda name: column[name][within[name]])

        clipped = {name: record.clipped(name) for name in shards}
        return normalisation.fit(shards, list(map(here, self.columns)), clipped)

    def _are_enough(self, gradients: Gradients) -> bool:
        return sum(tensor.numel() for tensor in gradients.values()) >= ENOUGH * len(self.columns)
