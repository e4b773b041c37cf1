"""What a factor on the gradient, or on a term of the loss, may be: a number of the run, and where it came in."""

import math

import torch

from lockstep.recorded.ranks import Ranks
from lockstep.recorder.micro_batch import IGNORED, data_parallel_shares
from lockstep.verdict import normalisation
from lockstep.verdict.computed import Computed
from lockstep.verdict.normalisation import Weighting
from lockstep.verdict.rows import Wrong

# Where a factor came in
BEGUN = "; it is there when the backward pass begins"
LATER = "; the backward pass begins without it, so it comes in later, as in the reduction of gradients"


class Causes:
    """The causes of a step's factors. `tokens` has the number of tokens of each micro batch."""

    def __init__(
        self,
        rank_checks: Ranks,
        reference_results: list[Computed],
        tokens: list[int],
        elsewhere: int,
    ):
        self.verdict, self.ranks, self.micro = rank_checks.verdict, rank_checks.ranks, rank_checks.micro
        self.reference_results, self.tokens = reference_results, tokens
        self.shares = data_parallel_shares(self.micro)
        # The micro batches of a rank in a step that has another number of them; 0: all have as many
        self.elsewhere = elsewhere

    def of_gradient(self, weighting: Weighting, known: torch.Tensor, of: str = "") -> str:
        """Return that the gradient is a multiple of that of `weighting`, what the factor may be, and where it came in.

        `known` are the weights that the losses of the micro batches should have. `of` says of which parameters, if not of all.
        """
        factor = self.verdict.factor
        why, unseen = self.why(factor), ""
        if not why and factor < 1 and not self.ranks[0].clips:
            unseen = "; no clipping by a norm was seen"
        origin = self._origin(known)
        if self.is_scale(factor):
            origin = "; it was not taken off, as scaler.step(optimizer) does"
        if origin == BEGUN:
            origin += self._stepped_too_often(factor) + self.in_loss(factor, why)
        message = f"the gradient{of} is {factor:.7g} times that of {weighting.label}{unseen}"
        return Wrong(message, why + origin) if why else Wrong(message + origin)

    def in_loss(self, factor: float, why: str) -> str:
        """Return that a small whole number may also be a number in the loss, to be read after `why`.

        Returns "" for any other factor, and if `why`, which says what number of the run it is, is empty.
        """
        may_be_written = normalisation.may_be_written(factor, self.verdict.tolerated_weights)
        return "; it may also be a number in the loss" * (may_be_written and bool(why))

    def is_scale(self, times: float) -> bool:
        """Whether a factor is the scale of a GradScaler."""
        scale = self.micro[0].record.scale
        return scale != 1 and math.isclose(times, scale, rel_tol=self.verdict.tolerated_weights)

    def _stepped_too_often(self, factor: float) -> str:
        """Return what else a factor may be, to be read after it; "" if it is no such factor.

        A loop may divide by more micro batches than its steps have, which the recording does not show.
        """
        times = round(1 / factor) if factor > 0 else 0
        is_single = len(self.ranks[0].micro_batches) == 1
        if times < 2 or not is_single or abs(times * factor - 1) > self.verdict.tolerated_weights:
            return ""
        return f"; a loss that is divided by {times} micro batches has it, too, where the optimizer steps after each"

    def _origin(self, known: torch.Tensor) -> str:
        """Return where the factor came in, to be read after it; "" if that is not known.

        `known` are the weights that the losses should have.
        """
        # The gradients of pieces may be summed or averaged later.
        if self.verdict.pieces > 1:
            return ""
        arrived = [
            computed.arrived / called.record.scale
            for called, computed in zip(self.micro, self.reference_results, strict=True)
        ]
        begun = torch.tensor(arrived, dtype=torch.float64) / self.verdict.shares
        for factor, origin in ((self.verdict.factor, BEGUN), (1.0, LATER)):
            if float((begun - factor * known).norm()) <= self.verdict.tolerated_weights * float(begun.norm()):
                return origin
        return ""

    def why(self, factor: float) -> str:
        """Return what a factor may be, to be read after it; "" if it is no number of the run."""
        world = self.ranks[0].world_size
        labels = sum(
            int(torch.isin(called.tensors[computed.mean.labels], torch.tensor(IGNORED), invert=True).sum())
            for called, computed in zip(self.micro, self.reference_results, strict=True)
            if computed.mean.labels
        )
        targets = [
            computed.mean.targets for computed in self.reference_results if computed.mean.targets is not None
        ]
        rows = [tensor for tensor in targets if tensor.ndim > 1]
        inside, positions = (
            sum(map(torch.numel, tensors)) for tensors in ((tensor[..., 1:] for tensor in rows), rows)
        )
        tokens_and_rows = self.verdict.tokens + positions - inside
        # The micro batches of a rank at which a gradient arrived
        counting = sum(called.ranks == self.micro[0].ranks for called in self.micro)
        # The tokens of each data-parallel rank
        tokens = [
            sum(number for number, other in zip(self.tokens, self.shares, strict=True) if other == share)
            for share in dict.fromkeys(self.shares)
        ]
        # How many data-parallel ranks there are, if they have different numbers of tokens
        unequal = len(tokens) if self.verdict.tokens and min(tokens) < max(tokens) else 0
        latest = max(called.number for called in self.micro)
        last = sum(
            number for number, called in zip(self.tokens, self.micro, strict=True) if called.number == latest
        )
        classes = {
            gradient.shape[-1]
            for called in self.micro
            for gradient in called.output_gradients.values()
            if gradient.ndim > 1
        }
        masks = (tensor for called in self.micro for name, tensor in called.tensors.items() if "mask" in name)
        tokens_of_mask = sum(int(mask.count_nonzero()) for mask in masks)
        tolerated = max(self.verdict.tolerated_weights, 1e-6)
        # How many micro batches each rank has
        windows = [len(record.micro_batches) for record in self.ranks.values()]
        is_uneven = min(windows) < max(windows)
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
                tokens_and_rows if tokens_and_rows not in (positions, labels, tokens_of_mask) else 0
            ),
            "the tokens of the first rank x the ranks": float(tokens[0] * unequal),
            "the tokens of the rank with the most x the ranks": float(max(tokens) * unequal),
            "the tokens of the mask": float(tokens_of_mask),
            "the micro batches of all ranks": float(sum(windows) if is_uneven else several),
            "those of the rank with the most x the ranks": float(is_uneven * max(windows) * len(windows)),
            "the tokens of the last micro batches": float(last if last < self.verdict.tokens else 0),
            "the classes": float(next((n for n in classes if abs(factor * n - 1) <= tolerated), 0)),
            "the micro batches of another step": float(self.elsewhere),
            "the scale of the GradScaler": self.micro[0].record.scale,
        }
        names = normalisation.explanations(factor, numbers, tolerated)
        return f", which is {' or '.join(names)}" if names else ""
