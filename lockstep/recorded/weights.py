"""What the gradient of a recorded step is a mean over, by what factor it is off, and what it was clipped by."""

import dataclasses
from collections.abc import Callable

import torch

from lockstep.ground.errors import UserError
from lockstep.ground.words import and_more
from lockstep.recorded import clips
from lockstep.recorded.causes import Causes
from lockstep.recorded.model import dtype_of
from lockstep.recorder.called import Called, shares_of
from lockstep.recorder.recorded_step import Step
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

# Machine epsilons that the weight of a micro batch may be off by in 16 bits: its loss is divided and scaled there, and gradients are clipped
SCALARS = 2
SOME = 0.1  # of the gradients, that are right by no accident
TOO_MUCH = 0.1  # of a typical gradient that a factor leaves, so that it is not what is wrong
SAMPLE_MEAN = "sample-mean"
MOST = 0.5  # of a weight, that may be tolerated: beyond, a term that is missing would not be seen


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
        # The micro batches of a rank in a step that has another number of them; 0: all have as many
        self.elsewhere = elsewhere
        self.beside = beside  # the norms of recorded gradients that are not judged
        # The norm that the gradients of several steps have; 0 if they have others
        self.norm_of_steps = norm_of_steps
        self.shares = shares_of(micro)
        # What is wrong with the norm of clipping: after what may have caused it
        self.of_norm: list[str] = []
        self.unexplained = False  # whether no weights give the gradients
        # The factor by which the loop clipped by itself, as far as norms say it; 1 if it did not
        self.by_hand = 1.0
        # Of the micro batches, and of their losses
        self.tokens, self.divisors = list[int](), torch.ones(0)
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
        causes = Causes(verdict, self.ranks, self.micro, self.exact, tokens, self.elsewhere)
        self.known = [one.weights * divisors for one in candidates]
        measured = of_losses / divisors
        named = normalisation.nearest(measured, tokens, candidates)
        named = verdict.named = self._of_samples(measured, named) or named
        known = named.weighting.weights * divisors
        clipped = self.made_of(torch.cat([known, of_terms / named.factor]))
        self.of_norm = clips.judge(verdict, self.ranks[0], clipped, self.beside, causes)
        verdict.factor = named.factor
        if not self.ranks[0].clips and verdict.factor < 1 - verdict.tolerated_weights:
            bound = self.norm_of_steps()
            if bound:
                self.by_hand, verdict.factor = named.factor, 1.0
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
                verdict.wrong.append(causes.of_gradient(named.weighting, known, f" of {and_more(others)}"))
            verdict.factor = 1.0
            return of_some
        self._judge_terms(fitted.weights, deviations, named.factor, causes)
        if not is_mean:
            said = f"a weighted sum of the micro batches' gradients leaves {fitted.typical:.2g} of a typical gradient"
            self.unexplained = not fitted.typical <= verdict.tolerated_weights
            if not self.unexplained:
                said = self.counts(fitted.weights)
            nearest = f"{named.factor:.4g} x {named.weighting.label}"
            verdict.wrong.append(Wrong(f"{said}, as in no known mean (nearest: {nearest})"))
            return fitted.weights
        if right:
            self.nominal = self._nominal(of_losses, known, self.by_hand)
        if not right:
            verdict.wrong.append(causes.of_gradient(named.weighting, known))
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
        if self.nominal is None or self.by_hand != 1:
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

    def _judge_terms(
        self, weights: torch.Tensor, deviations: torch.Tensor, factor: float, causes: Causes
    ) -> None:
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
                counts = f"counts {total:.4g}" if abs(total) > tolerated[name] else "is not trained on"
                self.verdict.notes.append(f"{name}, which the model's loss leaves out, {counts}")
                continue
            allowed = tolerated[name] / abs(inside) + self.verdict.tolerated_weights
            if allowed > MOST:
                self.verdict.notes.append(f"in this precision nothing says how often {name} counts")
            elif not abs(total / inside - 1) <= allowed:
                times = total / inside
                why = causes.why(times)
                said = f"{name}, a term of the loss, counts {times:.5g} times as often as the rest"
                dead = f"{name}, a term of the loss, does not count"
                self.verdict.wrong.append(
                    dead if abs(times) <= allowed else Wrong(said, why + causes.in_loss(times, why))
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


def _of_elements(weighting: Weighting) -> Weighting:
    return dataclasses.replace(weighting, label=weighting.label.replace("token", "element"))
