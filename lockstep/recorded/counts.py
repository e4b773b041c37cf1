"""How much each micro batch counts in gradients that are of no known mean: in the worst one, in a rank's shards, on a rank that has others."""

from collections.abc import Iterable

import torch

from lockstep.recorded.ranks import Ranks
from lockstep.recorded.weights import Weighed
from lockstep.verdict import normalisation
from lockstep.verdict.judgement import Judgement
from lockstep.verdict.lazy import Lazy
from lockstep.verdict.normalisation import Fit, Gradients

# Times as many elements as micro batches: those of a gradient whose weights are looked for
ENOUGH = 4
SHOWN = 2  # shards of different ranks, of which it is said how much the micro batches count


class Counts:
    """`columns` are the gradients of the micro batches' losses in float64, `clipped` what each of `gradients` was multiplied with since."""

    def __init__(
        self,
        of_ranks: Ranks,
        gradients: Gradients,
        clipped: dict[str, float],
        columns: list[Gradients],
        weighed: Weighed,
    ):
        self.of_ranks, self.gradients, self.clipped = of_ranks, gradients, clipped
        self.columns, self.weighed = columns, weighed
        self.micro, self.tolerated = of_ranks.micro, of_ranks.verdict.tolerated_weights

    def in_worst(self, rows: list[Judgement], nominal: torch.Tensor) -> str:
        """In the gradient that is farthest off, to be read after it. `nominal` is what they count in those that are right."""
        worst = max(rows, key=lambda row: row.multiple)
        if not worst.too_far:
            return ""
        name = worst.name.removeprefix("gradient/")
        own = {name: self.gradients[name]}
        found = normalisation.fit(own, self.columns, self.clipped)
        if not found.typical <= self.tolerated:
            return self.in_shards(row.name.removeprefix("gradient/") for row in rows if row.too_far)
        counts = found.weights[: len(self.micro)] / nominal
        if not self._are_enough(own) or float(counts.max() - counts.min()) <= self.tolerated:
            return ""
        return f"; in this gradient, {self.weighed.counts(found.weights)}"

    def in_shards(self, names: Iterable[str]) -> str:
        """In each rank's shards of some gradients, to be read after these; "" if it is as much in all, or not known."""
        names = list(names)
        ranks_of: dict[str, list[int]] = {}
        unreduced = True  # whether only those count that the rank was called with
        for rank in self.of_ranks.ranks:
            found = self._fit_of_rank(rank, names)
            if found is None or not found.typical <= self.tolerated:
                return ""
            ranks_of.setdefault(self.weighed.counts(found.weights), []).append(rank)
            weights = found.weights[: len(self.micro)].abs()
            not_own = [rank not in one.ranks for one in self.micro]
            unreduced &= float(weights[not_own].sum()) <= self.tolerated * float(weights.sum())
        if len(ranks_of) == 1:
            return ""
        if unreduced:
            return "; each rank's shards are of its own samples alone: they were not reduced"
        said = [
            f"in the shards of rank {' and '.join(map(str, ranks))}, {counts}"
            for counts, ranks in ranks_of.items()
        ]
        others = "; those of further ranks are of others" if len(said) > SHOWN else ""
        return f"; {'; '.join(said[:SHOWN])}{others}"

    def on_odd_rank(self, of_first: torch.Tensor) -> None:
        """In gradients that were not reduced, where another rank than the first has its own. `of_first` is what they weigh on the first."""
        odd, number = self.of_ranks.odd, len(self.micro)
        found = self._fit_of_rank(odd, [one for one in self.of_ranks.verdict.differ if one in self.gradients])
        if found is None or not found.typical <= self.tolerated:
            return
        least = self.tolerated * float(of_first[:number].norm())
        if float(found.weights[:number].norm()) <= least and found.squares:
            return  # they are those of further terms alone
        self.of_ranks.say_of_unreduced(f"; on rank {odd}, {self.weighed.counts(found.weights)}")

    def _fit_of_rank(self, rank: int, names: Iterable[str]) -> Fit | None:
        """What a rank's own gradients, or its shards of them, are made of; None if they have too few elements to say."""
        about, step = self.of_ranks.ranks[rank], self.of_ranks.verdict.step
        parts = ((name, self.of_ranks.recording.part(rank, step, f"gradient/{name}")) for name in names)
        own = {name: part for name, part in parts if part is not None}
        if not self._are_enough(own):
            return None

        def here(column: Gradients) -> Gradients:
            shard = {name: about.places[f"gradient/{name}"][1].within for name in own if name in column}
            return Lazy(shard, lambda name: column[name][shard[name]])

        clipped = {name: about.clipped(name) for name in own}
        return normalisation.fit(own, list(map(here, self.columns)), clipped)

    def _are_enough(self, gradients: Gradients) -> bool:
        return sum(one.numel() for one in gradients.values()) >= ENOUGH * len(self.columns)
