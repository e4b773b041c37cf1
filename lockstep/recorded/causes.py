"""What a factor on the gradient, or on a term of the loss, may be: a number of the run, and where it came in."""

import math

import torch

from lockstep.recorder.called import IGNORED, Called, shares_of
from lockstep.recorder.recorded_step import Step
from lockstep.verdict import normalisation
from lockstep.verdict.computed import Computed
from lockstep.verdict.normalisation import Weighting
from lockstep.verdict.rows import StepVerdict, Wrong

# Where a factor came in
BEGUN = "; it is there when the backward pass begins"
LATER = (
    "; the backward pass begins with the right one, so it comes in later, as in the reduction of gradients"
)


class Causes:
    """Of the factors of a step. `tokens` are those of the micro batches."""

    def __init__(
        self,
        verdict: StepVerdict,
        ranks: dict[int, Step],
        micro: list[Called],
        exact: list[Computed],
        tokens: list[int],
        elsewhere: int,
    ):
        self.verdict, self.ranks, self.micro, self.exact, self.tokens = verdict, ranks, micro, exact, tokens
        self.shares = shares_of(micro)
        # The micro batches of a rank in a step that has another number of them; 0: all have as many
        self.elsewhere = elsewhere

    def of_gradient(self, weighting: Weighting, known: torch.Tensor, of: str = "") -> str:
        factor = self.verdict.factor
        why, seen = self.why(factor), ""
        if not why and factor < 1 and not self.ranks[0].clips:
            seen = "; no clipping by a norm was seen"
        entered = self._entered(known)
        if self.is_scale(factor):
            entered = "; it was not taken off, as scaler.step(optimizer) does"
        if entered == BEGUN:
            entered += self._stepped_too_often(factor) + self.in_loss(factor, why)
        said = f"the gradient{of} is {factor:.7g} times that of {weighting.label}{seen}"
        return Wrong(said, why + entered) if why else Wrong(said + entered)

    def in_loss(self, factor: float, why: str) -> str:
        """That a small whole number may be none of the run's, to be read after what else it is."""
        written = normalisation.may_be_written(factor, self.verdict.tolerated_weights)
        return "; it may also be a number in the loss" * (written and bool(why))

    def is_scale(self, times: float) -> bool:
        """Whether it is the scale of a GradScaler."""
        scale = self.micro[0].about.scale
        return scale != 1 and math.isclose(times, scale, rel_tol=self.verdict.tolerated_weights)

    def _stepped_too_often(self, factor: float) -> str:
        """What else a factor may be, to be read after it: that the steps of a loop have fewer micro batches than it divides by is not seen."""
        times = round(1 / factor) if factor > 0 else 0
        alone = len(self.ranks[0].micro_batches) == 1
        if times < 2 or not alone or abs(times * factor - 1) > self.verdict.tolerated_weights:
            return ""
        return f"; a loss that is divided by {times} micro batches has it, too, where the optimizer steps after each"

    def _entered(self, known: torch.Tensor) -> str:
        """Where the factor came in, to be read after it. `known` are the weights that the losses should have."""
        if self.verdict.pieces > 1:  # their gradients may be summed or averaged later
            return ""
        arrived = [
            one.arrived / called.about.scale for called, one in zip(self.micro, self.exact, strict=True)
        ]
        begun = torch.tensor(arrived, dtype=torch.float64) / self.verdict.shares
        for factor, where in ((self.verdict.factor, BEGUN), (1.0, LATER)):
            if float((begun - factor * known).norm()) <= self.verdict.tolerated_weights * float(begun.norm()):
                return where
        return ""

    def why(self, factor: float) -> str:
        """What a factor may be, to be read after it."""
        world = self.ranks[0].world_size
        labels = sum(
            int(torch.isin(called.tensors[one.mean.labels], torch.tensor(IGNORED), invert=True).sum())
            for called, one in zip(self.micro, self.exact, strict=True)
            if one.mean.labels
        )
        targets = [one.mean.targets for one in self.exact if one.mean.targets is not None]
        in_rows = [one for one in targets if one.ndim > 1]
        inside, positions = (
            sum(map(torch.numel, ones)) for ones in ((one[..., 1:] for one in in_rows), in_rows)
        )
        of_rows = self.verdict.tokens + positions - inside
        counting = sum(
            one.ranks == self.micro[0].ranks for one in self.micro
        )  # micro batches of a rank at which a gradient arrived
        of_shares = [
            sum(number for number, own in zip(self.tokens, self.shares, strict=True) if own == share)
            for share in dict.fromkeys(self.shares)
        ]
        unequal = len(of_shares) if self.verdict.tokens and min(of_shares) < max(of_shares) else 0
        latest = max(one.number for one in self.micro)
        last = sum(
            number for number, one in zip(self.tokens, self.micro, strict=True) if one.number == latest
        )
        classes = {at.shape[-1] for one in self.micro for at in one.arrived.values() if at.ndim > 1}
        in_masks = (one for called in self.micro for name, one in called.tensors.items() if "mask" in name)
        of_mask = sum(int(one.count_nonzero()) for one in in_masks)
        tolerated = max(self.verdict.tolerated_weights, 1e-6)
        windows = [len(one.micro_batches) for one in self.ranks.values()]
        uneven = min(windows) < max(windows)
        several = self.verdict.micro_batches if self.verdict.shares > 1 and max(windows) > 1 else 0
        numbers = {
            "the world size": float(world),
            "the number of data-parallel ranks": float(self.verdict.shares),
            "the micro batches of a rank": float(len(self.ranks[0].micro_batches)),
            "those that count": float(counting if counting != len(self.ranks[0].micro_batches) else 0),
            "the ranks that see the same samples": world / self.verdict.shares,
            "the tokens of the global batch": float(self.verdict.tokens),
            "the positions of the global batch": float(positions),
            "the positions of the global batch without the last of each row": float(
                inside if inside != self.verdict.tokens else 0
            ),
            "the labels of the global batch before they are shifted": float(
                labels if labels != self.verdict.tokens else 0
            ),
            "the tokens of the global batch and one more for each row": float(
                of_rows if of_rows not in (positions, labels, of_mask) else 0
            ),
            "the tokens of the first rank x the ranks": float(of_shares[0] * unequal),
            "the tokens of the rank with the most x the ranks": float(max(of_shares) * unequal),
            "the tokens of the mask": float(of_mask),
            "the micro batches of all ranks": float(sum(windows) if uneven else several),
            "those of the rank with the most x the ranks": float(uneven * max(windows) * len(windows)),
            "the tokens of the last micro batches": float(last if last < self.verdict.tokens else 0),
            "the classes": float(next((one for one in classes if abs(factor * one - 1) <= tolerated), 0)),
            "the micro batches of another step": float(self.elsewhere),
            "the scale of the GradScaler": self.micro[0].about.scale,
        }
        names = normalisation.explanations(factor, numbers, tolerated)
        return f", which is {' or '.join(names)}" if names else ""
