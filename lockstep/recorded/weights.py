"""What the gradient of a recorded step is a mean over, by what factor it is off, and what it was clipped by."""

import copy
import dataclasses
import math
from collections.abc import Callable

import torch

from lockstep.ground.errors import UserError
from lockstep.ground.words import and_more
from lockstep.recorded.model import dtype_of
from lockstep.recorder.called import IGNORED, Called
from lockstep.recorder.recorded_step import Clip, Step
from lockstep.verdict import normalisation
from lockstep.verdict.computed import Computed
from lockstep.verdict.judgement import FLOOR, MULTIPLE, UNIT
from lockstep.verdict.normalisation import (
    LABELS,
    MICRO_MEAN,
    PIECE_MEAN,
    RANK_MEAN,
    TOKEN_MEAN,
    Fit,
    Named,
    Sum,
    Weighting,
)
from lockstep.verdict.rows import StepVerdict, Wrong
from lockstep.verdict.scalars import float32_norm_error

# Machine epsilons that the weight of a micro batch may be off by in 16 bits: its loss is divided and scaled there, and gradients are clipped
SCALARS = 2
SOME = 0.1  # of the gradients, that are right by no accident
TOO_MUCH = 0.1  # of a typical gradient that a factor leaves, so that it is not what is wrong
# Where a factor came in
BEGUN = "; it is there when the backward pass begins"
LATER = (
    "; the backward pass begins with the right one, so it comes in later, as in the reduction of gradients"
)
SAMPLE_MEAN = "sample-mean"
MOST = 0.5  # of a weight, that may be tolerated: beyond, a term that is missing would not be seen


def shares_of(micro: list[Called]) -> list[int]:
    """The data-parallel share of each micro batch, by the first rank that was called with it, or with another piece of it."""
    return [called.first.ranks[0] for called in micro]


class Weighed:
    """`made_of` gives the gradient, clipped as the run did, for weights of the micro batches' losses, then of their further terms."""

    def __init__(
        self,
        verdict: StepVerdict,
        ranks: dict[int, Step],
        micro: list[Called],
        exact: list[Computed],
        made_of: Callable[[torch.Tensor], Sum],
        elsewhere: int,
        norm_of_steps: Callable[[], float],
        beside: dict[str, float],
    ):
        self.verdict, self.ranks, self.micro, self.exact, self.made_of = verdict, ranks, micro, exact, made_of
        self.elsewhere = elsewhere  # the micro batches of a rank in a step that has another number of them; 0: all have as many
        self.beside = beside  # the norms of recorded gradients that are not judged
        self.norm_of_steps = (
            norm_of_steps  # the norm that the gradients of several steps have; 0 if they have others
        )
        self.shares = shares_of(micro)
        self.of_norm: list[str] = []  # what is wrong with the norm of clipping: after what may have caused it
        self.unexplained = False  # whether no weights give the gradients
        self.tokens, self.divisors = list[int](), torch.ones(0)  # of the micro batches, and of their losses
        self.known: list[torch.Tensor] = []  # weights of the losses in each known mean
        # Weights of the losses, exactly as they should be; None if they are not near that
        self.nominal: torch.Tensor | None = None

    def judge(self, fitted: Fit, again: Fit, expect: str | None) -> torch.Tensor:
        """What the gradient is a mean over, and the factor before it.

        Returns the weights of the losses that its tensors are then held against: those of the mean, or as they were measured.
        """
        verdict = self.verdict
        of_losses, of_terms = fitted.weights[: len(self.micro)], fitted.weights[len(self.micro) :]
        deviations = again.weights - fitted.weights
        deviation = float(deviations[: len(self.micro)].norm() / of_losses.norm())
        uncertain = max(one.mean.uncertain for one in self.exact)
        roundoffs = FLOOR * UNIT["fp32"] * max(1.0, fitted.largest_term)
        verdict.tolerated_weights = MULTIPLE * max(deviation, again.typical) + roundoffs + uncertain
        tokens, divisors, candidates = self._weightings(expect)
        self.tokens, self.divisors = tokens, divisors
        self.known = [one.weights * divisors for one in candidates]
        measured = of_losses / divisors
        named = normalisation.nearest(measured, tokens, candidates)
        named = verdict.named = self._of_samples(measured, named) or named
        known = named.weighting.weights * divisors
        self._judge_clips(torch.cat([known, of_terms / named.factor]))
        by_hand = 1.0
        verdict.factor = named.factor
        if not self.ranks[0].clips and verdict.factor < 1 - verdict.tolerated_weights:
            bound = self.norm_of_steps()
            if bound:
                by_hand, verdict.factor = named.factor, 1.0
                verdict.clipped = f", clipped by the loop itself to a norm of {bound:.5g}"
        right = abs(verdict.factor - 1) <= verdict.tolerated_weights
        # A single micro batch has a factor whatever the gradient is.
        is_mean = named.off <= verdict.tolerated_weights and (right or fitted.typical <= TOO_MUCH)
        # Weights that give every gradient say more than that some are of a known mean, such as those that one term alone trains
        explained = bool(fitted.rest) and max(fitted.rest.values()) <= verdict.tolerated_weights
        of_some = None if explained or (right and is_mean) else self._mean_of_some(candidates)
        if of_some is not None:
            others = self._near(fitted.rest)
            if is_mean and others:
                verdict.wrong.append(self._of_factor(named.weighting, known, f" of {and_more(others)}"))
            verdict.factor = 1.0
            return of_some
        self._judge_terms(fitted.weights, deviations, named.factor)
        if not is_mean:
            said = f"a weighted sum of the micro batches' gradients leaves {fitted.typical:.2g} of a typical gradient"
            self.unexplained = not fitted.typical <= verdict.tolerated_weights
            if not self.unexplained:
                said = self.counts(fitted.weights)
            nearest = f"{named.factor:.4g} x {named.weighting.label}"
            verdict.wrong.append(Wrong(f"{said}, as in no known mean (nearest: {nearest})"))
            return fitted.weights
        if right:
            self.nominal = self._nominal(of_losses, known, by_hand)
        if not right:
            verdict.wrong.append(self._of_factor(named.weighting, known))
        elif named.weighting.name == PIECE_MEAN:
            verdict.wrong.append(
                "the gradient is that of the mean of the means of the pieces that samples are cut into: a token counts less in a piece with more of them"
            )
        elif expect not in (None, named.weighting.name) and (
            len(candidates) > 1 or named.weighting is not candidates[0]
        ):
            verdict.wrong.append(f"the gradient is that of {named.weighting.label}, not of {LABELS[expect]}")
        if named.weighting is not candidates[0]:
            counts = candidates[0].weights / named.weighting.weights
            one = "an element" if "element" in candidates[0].label else "a token"
            verdict.difference = f"; in {candidates[0].label}, {one} would count {float(counts.min()):.3g} to {float(counts.max()):.3g} times as much"
        if self.nominal is None or by_hand != 1:
            return torch.cat([known * named.factor, of_terms])
        # Gradients that all but cancel, or whose errors are not independent, may take a measured weight away from what it is.
        off = SCALARS * max((torch.finfo(dtype_of(one)).eps for one in verdict.lowered), default=0.0)
        factor = float((of_losses * self.nominal).sum() / self.nominal.square().sum())
        return torch.cat([self.nominal * min(max(factor, 1 - off), 1 + off), of_terms])

    def _of_samples(self, measured: torch.Tensor, named: Named) -> Named | None:
        """A loop's own cross-entropy may be summed over the tokens of each sample: then it is a mean over the samples. None if it is not."""
        targets = [one.mean.targets for one in self.exact]
        if abs(named.factor - 1) <= self.verdict.tolerated_weights or self.exact[0].loss is not None:
            return None
        samples = sum(0 if one is None else len(one) for one in targets)
        if any(one is None or one.ndim < 2 for one in targets) or self.verdict.pieces > 1:
            return None
        label = "the mean over all samples of the sums over their tokens"
        weighting = Weighting(SAMPLE_MEAN, label, torch.full_like(measured, 1 / samples))
        found = normalisation.nearest(measured, self.tokens, [weighting])
        right = max(abs(found.factor - 1), found.off) <= self.verdict.tolerated_weights
        return found if right else None

    def _mean_of_some(self, candidates: list[Weighting]) -> torch.Tensor | None:
        """The weights of the losses in a known mean that some gradients are of: what is wrong is then wrong with the others alone."""
        terms = torch.zeros(sum(len(one.terms) for one in self.exact), dtype=torch.float64)
        for candidate in candidates:
            known = candidate.weights * self.divisors
            rest = self.made_of(torch.cat([known, terms])).rest()
            if len(self._near(rest)) > SOME * len(rest):
                self.verdict.named = Named(candidate, 1.0, 0.0)
                self.nominal = self._nominal(known, known, 1.0)
                return torch.cat([known, terms])
        return None

    def _near(self, rest: dict[str, float]) -> list[str]:
        """The gradients of which rounding errors are left."""
        return [name for name, one in rest.items() if 0 < one <= self.verdict.tolerated_weights]

    def _nominal(self, of_losses: torch.Tensor, known: torch.Tensor, by_hand: float) -> torch.Tensor | None:
        """The weights of the losses as they should be, exactly; None if that is not known."""
        if not any(one.mean.uncertain for one in self.exact):
            return known * by_hand
        # What follows from the gradients at the logits is averaged over the ranks, or summed.
        for share in (1 / self.verdict.shares / self.verdict.pieces, 1 / self.verdict.shares, 1.0):
            if float((of_losses / by_hand / share - 1).abs().max()) <= self.verdict.tolerated_weights:
                return torch.full_like(of_losses, share * by_hand)
        return None

    def counts(self, weights: torch.Tensor) -> str:
        """How much each micro batch counts, by rank, where its loss has this weight."""
        measured = (weights[: len(self.micro)] / self.divisors).tolist()
        counts = [one * count for one, count in zip(measured, self.tokens, strict=True)]
        least = self.verdict.tolerated_weights * max(map(abs, counts))
        shown = {
            share: ", ".join(
                f"{0.0 if abs(count) <= least else count:.4g}"
                for count, own in zip(counts, self.shares, strict=True)
                if own == share
            )
            for share in sorted(set(self.shares))
        }
        return "the micro batches count " + "; ".join(f"{one} (rank {share})" for share, one in shown.items())

    def _judge_terms(self, weights: torch.Tensor, deviations: torch.Tensor, factor: float) -> None:
        """A further term of the loss counts like the mean of the micro batches', as often as the loss itself."""
        of_losses, beside = weights[: len(self.micro)], iter(weights[len(self.micro) :].tolist())
        off = iter(deviations[len(self.micro) :].abs().tolist())
        counted: dict[str, float] = {}
        tolerated: dict[str, float] = {}
        for weight, one in zip(of_losses.tolist(), self.exact, strict=True):
            for name, term in one.terms.items():
                share = (weight * term.coefficient + next(beside)) * term.number / factor
                counted[name] = counted.get(name, 0.0) + share
                tolerated[name] = tolerated.get(name, 0.0) + MULTIPLE * next(off) * term.number / factor
        for name, total in counted.items():
            inside = self.exact[0].terms[name].coefficient
            if inside == 0:
                if abs(total) > tolerated[name]:
                    self.verdict.notes.append(
                        f"{name}, which the model's loss leaves out, counts {total:.4g}"
                    )
                continue
            allowed = tolerated[name] / abs(inside) + self.verdict.tolerated_weights
            if allowed > MOST:
                self.verdict.notes.append(f"in this precision nothing says how often {name} counts")
            elif not abs(total / inside - 1) <= allowed:
                times = total / inside
                why = self._why(times)
                said = f"{name}, a term of the loss, counts {times:.5g} times as often as the rest"
                dead = f"{name}, a term of the loss, does not count"
                self.verdict.wrong.append(
                    dead if abs(times) <= allowed else Wrong(said, why + self._in_loss(times, why))
                )

    def _weightings(self, expect: str | None) -> tuple[list[int], torch.Tensor, list[Weighting]]:
        """(tokens of the micro batches, what their losses divide the sums over these by, the weightings of these sums that are known)."""
        tokens = [one.mean.tokens for one in self.exact]
        of_its_own = any(one.loss is None for one in self.exact)
        (function, *others) = {one.mean.function for one in self.exact}
        if of_its_own and all(tokens) and function and not others and self._is_weighed(function, tokens):
            self.verdict.notes.append(
                f"the loop makes its own loss by {function}; how much it counts is judged, its targets are not"
            )
            self.verdict.unseen = "the targets of the loss are not judged"
            return (
                tokens,
                self._divisors(),
                [_of_elements(one) for one in normalisation.known(tokens, self.shares)],
            )
        if of_its_own and all(tokens) and not function and not others:
            smoothing = (
                f" with label smoothing {self.exact[0].mean.smoothing:.2g}"
                if self.exact[0].mean.smoothing
                else ""
            )
            self.verdict.notes.append(
                f"the loop makes its own loss: by its gradient at the logits, a cross-entropy{smoothing}, whose labels were not seen"
            )
            self.verdict.unseen = "which labels the loss has was not seen"
        elif of_its_own:
            self.verdict.notes.append(
                "the model's own loss is not what was trained: the gradient is judged from the recorded one at the logits on, the loss is not"
            )
            self.verdict.unseen = "the loss itself is not judged"
            ones = torch.ones(len(self.micro), dtype=torch.float64)
            # The recorded gradients have every divisor of the run but that of averaging over ranks.
            label = "what follows from the gradients at the logits, averaged over the ranks"
            means = [Weighting(RANK_MEAN, label, ones / self.verdict.shares)]
            if self.verdict.pieces > 1:  # those with pieces of the same samples, too
                means.append(Weighting(RANK_MEAN, label, ones / self.verdict.shares / self.verdict.pieces))
            return [1] * len(self.micro), ones, means
        if not all(tokens):
            if expect == TOKEN_MEAN:
                raise UserError(
                    f"--expect {expect}: the loss that the model returns is no mean of a cross-entropy over labels among its inputs, so its tokens are not known"
                )
            self.verdict.notes.append(
                "the tokens of the loss are not known, so nothing says whether each counts alike"
            )
            ones = torch.ones(len(self.micro), dtype=torch.float64)
            label = "the mean of the micro batches' losses"
            mean = Weighting(MICRO_MEAN, label, ones / self.verdict.micro_batches / self.verdict.pieces)
            return [1] * len(self.micro), ones, [mean]
        self.verdict.tokens = sum(tokens)
        numbers = [one.number for one in self.micro] if self.verdict.pieces > 1 else None
        return tokens, self._divisors(), normalisation.known(tokens, self.shares, numbers)

    def _divisors(self) -> torch.Tensor:
        return torch.tensor([one.mean.divisor for one in self.exact], dtype=torch.float64)

    def _is_weighed(self, function: str, tokens: list[int]) -> bool:
        """Whether a loss function that the loop calls is to count once, as a mean; else a note says how often it does.

        A number that the loop multiplies it with may be meant, but not one of the run's own, unless that may be another number: half of a square,
        the square of a temperature, the elements of a sample. Losses that are made in several places, such as a discriminator's, are added up.
        """
        counts = 1 / self._divisors() / self.verdict.shares
        named = normalisation.nearest(counts, tokens, normalisation.known(tokens, self.shares))
        factor, tolerated = named.factor, 1e-4 + max(one.mean.uncertain for one in self.exact)
        if max(abs(factor - 1), named.off) <= tolerated:
            return True
        seen = [one.about.losses[0] for one in self.micro]
        sizes = {self.ranks[0].world_size, self.verdict.shares, len(self.ranks[0].micro_batches)} - {1}
        of_run = any(abs(factor * times - 1) <= tolerated for one in sizes for times in (one, 1 / one))
        meant = [0.5] * (function == "mse_loss") + [one.number / (one.samples or 1) for one in seen]
        other = any(one.is_soft for one in seen) or any(abs(factor / one - 1) <= tolerated for one in meant)
        apart = all(one.one_target for one in seen) or len({one.made_at for one in seen}) > 1
        if of_run and named.off <= tolerated and not other and not apart:
            return True
        label = _of_elements(named.weighting).label
        self.verdict.notes.append(
            f"the gradient is {factor:.5g} times that of {label} of {function}, the loop's own loss; that may be meant"
        )
        return False

    def _of_factor(self, weighting: Weighting, known: torch.Tensor, of: str = "") -> str:
        factor = self.verdict.factor
        why, seen = self._why(factor), ""
        if not why and factor < 1 and not self.ranks[0].clips:
            seen = "; no clipping by a norm was seen"
        entered = self._entered(known)
        if self._is_scale(factor):
            entered = "; it was not taken off, as scaler.step(optimizer) does"
        if entered == BEGUN:
            entered += self._stepped_too_often(factor) + self._in_loss(factor, why)
        said = f"the gradient{of} is {factor:.7g} times that of {weighting.label}{seen}"
        return Wrong(said, why + entered) if why else Wrong(said + entered)

    def _in_loss(self, factor: float, why: str) -> str:
        """That a small whole number may be none of the run's, to be read after what else it is."""
        written = normalisation.may_be_written(factor, self.verdict.tolerated_weights)
        return "; it may also be a number in the loss" * (written and bool(why))

    def _is_scale(self, times: float) -> bool:
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

    def _why(self, factor: float) -> str:
        """What a factor may be, to be read after it."""
        world = self.ranks[0].world_size
        labels = sum(
            int(torch.isin(called.tensors[one.mean.labels], torch.tensor(IGNORED), invert=True).sum())
            for called, one in zip(self.micro, self.exact, strict=True)
            if one.mean.labels
        )
        targets = [one.mean.targets for one in self.exact if one.mean.targets is not None]
        inside = sum(one[..., 1:].numel() for one in targets)
        positions = sum(one.numel() for one in targets)
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
        numbers = {
            "the world size": float(world),
            "the number of data-parallel ranks": float(self.verdict.shares),
            "the micro batches of a rank": float(len(self.ranks[0].micro_batches)),
            "those that count": float(counting if counting != len(self.ranks[0].micro_batches) else 0),
            "the ranks that see the same samples": world / self.verdict.shares,
            "the tokens of the global batch": float(self.verdict.tokens),
            "the positions of the global batch": float(positions),
            "its positions but the last of each row": float(inside if inside != self.verdict.tokens else 0),
            "its labels before they are shifted": float(labels if labels != self.verdict.tokens else 0),
            "its tokens and one of each row": float(
                of_rows if of_rows not in (positions, labels, of_mask) else 0
            ),
            "the tokens of the first rank x the ranks": float(of_shares[0] * unequal),
            "the tokens of the rank with the most x the ranks": float(max(of_shares) * unequal),
            "the tokens of the mask": float(of_mask),
            "the micro batches of all ranks": float(uneven * sum(windows)),
            "those of the rank with the most x the ranks": float(uneven * max(windows) * len(windows)),
            "the tokens of the last micro batches": float(last if last < self.verdict.tokens else 0),
            "the classes": float(next((one for one in classes if abs(factor * one - 1) <= tolerated), 0)),
            "the micro batches of another step": float(self.elsewhere),
            "the scale of the GradScaler": self.micro[0].about.scale,
        }
        names = normalisation.explanations(factor, numbers, tolerated)
        return f", which is {' or '.join(names)}" if names else ""

    def _judge_clips(self, weights: torch.Tensor) -> None:
        """Each norm that the run clipped by, against that of the reference's gradients. `weights` are those of the gradient before."""
        clips = [one for one in self.ranks[0].clips if not one.by_value]
        if not clips:
            return
        whole = self.made_of(weights)
        sizes = {name: _Size(tensor) for name, tensor in whole.items() if tensor.numel()}
        until_then = dict.fromkeys([*whole, *self.beside], 1.0)
        for number, clip in enumerate(clips):
            own = [name for name in until_then if clip.has(name)]
            scale = {name: until_then[name] / self.ranks[0].clipped(name) for name in own}
            self._judge_clip(
                "gradient norm" if len(clips) == 1 else f"gradient norm {number}",
                clip,
                [sizes[name].times(scale[name]) for name in own if name in sizes],
                math.hypot(
                    clip.beside, *(self.beside[name] * scale[name] for name in own if name in self.beside)
                ),
            )
            until_then |= {name: until_then[name] * clip.factor for name in own}
        short = [one for one in clips if one.factor < 1]
        if len(short) == 1:
            self.verdict.clipped = f", clipped from a norm of {short[0].norm:.5g} to {short[0].max_norm:.5g}"
        elif short:
            self.verdict.clipped = f", clipped in {len(short)} of {len(clips)} parts by the norm of each"

    def _judge_clip(self, label: str, clip: Clip, sizes: list["_Size"], beside: float) -> None:
        """Libraries sum the norm in float32."""
        if not sizes:
            return
        others = torch.tensor(beside, dtype=torch.float64)
        right = float(torch.stack([*(one.norm for one in sizes), others]).norm())
        summed = float(torch.stack([*(one.in_float32 for one in sizes), others.float()]).norm())
        in_float32 = float32_norm_error(right, summed, max(one.numel for one in sizes))
        largest = max(one.largest for one in sizes)
        tolerated = in_float32 / right + self.verdict.tolerated_weights
        if abs(clip.norm - largest) <= tolerated * largest:
            right = largest  # clipped by the largest element
        if self.verdict.number(label, clip.norm, right, tolerated * right).too_far:
            times = clip.norm / right
            said = f"the gradient was clipped by a norm of {clip.norm:.7g}, {times:.5g} times that of the reference's gradient, {right:.7g}"
            why = "; it was clipped before scaler.unscale_(optimizer)" * self._is_scale(times)
            self.of_norm.append(Wrong(said, why))


def _of_elements(weighting: Weighting) -> Weighting:
    return dataclasses.replace(weighting, label=weighting.label.replace("token", "element"))


class _Size:
    """Of a tensor: its norm, also in float32, its largest element and its number of elements."""

    def __init__(self, tensor: torch.Tensor):
        self.norm, self.in_float32 = tensor.norm(), tensor.float().norm()
        self.largest, self.numel = float(tensor.abs().max()), tensor.numel()

    def times(self, factor: float) -> "_Size":
        scaled = copy.copy(self)
        scaled.norm, scaled.in_float32 = self.norm * factor, self.in_float32 * factor
        scaled.largest = self.largest * abs(factor)
        return scaled
