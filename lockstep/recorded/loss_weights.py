"""What the gradient of a recorded step is a mean over, by what factor it is off, and what it was clipped by."""

import dataclasses
import math
from collections.abc import Callable

import torch

from lockstep.ground.errors import UserError
from lockstep.ground.words import and_more
from lockstep.recorded import clips
from lockstep.recorded.causes import Causes
from lockstep.recorded.model import dtype_of
from lockstep.recorded.other_stages import OtherStages
from lockstep.recorded.ranks import Ranks
from lockstep.recorder.micro_batch import data_parallel_shares
from lockstep.verdict import normalisation
from lockstep.verdict.computed import Computed
from lockstep.verdict.judgement import FLOOR, MULTIPLE, UNIT
from lockstep.verdict.normalisation import (
    LABELS,
    MICRO_MEAN,
    PIECE_MEAN,
    RANK_MEAN,
    SUM,
    Fit,
    Named,
    Sum,
    Weighting,
)
from lockstep.verdict.rows import Wrong

# In 16 bits, the weight of a micro batch may be off by this many machine epsilons: its loss is divided and scaled
# there, and gradients are clipped.
SCALARS = 2
SOME = 0.1  # of the gradients: that many are right by no accident
# If a factor leaves more than this share of a typical gradient, the factor is not what is wrong.
TOO_MUCH = 0.1
SAMPLE_MEAN = "sample-mean"
# The largest share of a term's weight that is tolerated. With more, a term that is missing would not be seen.
MOST = 0.5


class LossWeights:
    """Finds the weight of each micro batch's loss in a step's gradient, and says what is wrong with these weights.

    `made_of` gives the gradient, clipped as the run did, for weights of the micro batches' losses, then of their
    further terms.
    """

    def __init__(
        self,
        rank_checks: Ranks,
        reference_results: list[Computed],
        made_of: Callable[[torch.Tensor], Sum],
        elsewhere: int,
        norm_of_steps: Callable[[], float],
        beside: dict[str, float],
        others: OtherStages | None = None,
    ):
        self.rank_checks, self.reference_results, self.made_of = rank_checks, reference_results, made_of
        self.verdict, self.ranks, self.micro = rank_checks.verdict, rank_checks.ranks, rank_checks.micro
        # The micro batches of a rank in a step that has another number of them; 0 if all steps have as many
        self.elsewhere = elsewhere
        self.beside = beside  # the norms of recorded gradients that are not judged
        self.others = others
        # In a stage of a pipeline but the last: the weights that the micro batches have in the last stage
        self.of_last_stage: torch.Tensor | None = None
        # The norm that the gradients of several steps have; 0 if they have different ones
        self.norm_of_steps = norm_of_steps
        self.shares = data_parallel_shares(self.micro)
        # What is wrong with the norm of clipping. It is said after what may have caused it.
        self.norm_problems: list[str] = []
        self.unexplained = False  # whether no weights give the gradients
        # The factor by which the loop clipped by itself, as far as norms show it; 1 if it did not
        self.by_hand = 1.0
        # Of each micro batch: its tokens, and what its loss divides the sum over them by
        self.tokens, self.divisors = list[int](), torch.ones(0)
        self.known: list[torch.Tensor] = []  # weights of the losses in each known mean
        # The exact weights that the losses should have; None if they are not near them
        self.nominal: torch.Tensor | None = None

    def judge(self, fitted: Fit, again: Fit, expect: str | None, finest: torch.Tensor) -> torch.Tensor:
        """Judge what the gradient is a mean over, and the factor before it.

        `fitted` has the weights that were measured in the run's gradients, `again` those in the yardstick's. `expect`
        is the mean that was meant, None if any known one will do. `finest` are the weights measured in the gradients that are rounded least.
        Returns the weights of the losses that the
        gradients are then held against: those of the mean, or as they were measured.
        """
        verdict = self.verdict
        loss_weights, term_weights = fitted.weights[: len(self.micro)], fitted.weights[len(self.micro) :]
        deviations = again.weights - fitted.weights
        deviation = float(deviations[: len(self.micro)].norm() / loss_weights.norm())
        uncertain = max(result.mean.uncertain for result in self.reference_results)
        roundoffs = FLOOR * UNIT["fp32"] * max(1.0, fitted.largest_term)
        verdict.tolerated_weights = MULTIPLE * max(deviation, again.typical) + roundoffs + uncertain
        if self.others is not None and self.others.weights is not None:
            keys = [(called.ranks[0], called.number) for called in self.micro]
            known = torch.tensor(
                [self.others.weights.get(key, math.nan) for key in keys], dtype=torch.float64
            )
            self.of_last_stage = torch.where(known.isnan(), loss_weights, known)
        tokens, divisors, candidates = self._weightings(expect)
        self.tokens, self.divisors = tokens, divisors
        causes = Causes(self.rank_checks, self.reference_results, tokens, self.elsewhere)
        measured = loss_weights / divisors
        if expect is None and self._is_sum(measured):
            label = "the sum over all tokens of the global batch"
            candidates = [Weighting(SUM, label, torch.ones_like(divisors))]
        self.known = [candidate.weights * divisors for candidate in candidates]
        named = normalisation.nearest(measured, tokens, candidates)
        named = verdict.named = self._of_samples(measured, named) or named
        known = named.weighting.weights * divisors
        reference = self.made_of(torch.cat([known, term_weights / named.factor]))
        elsewhere = self.others.norm if self.others else 0.0
        self.norm_problems = clips.judge(verdict, self.ranks[0], reference, self.beside, elsewhere, causes)
        verdict.factor = named.factor
        if not self.ranks[0].clips and verdict.factor < 1 - verdict.tolerated_weights:
            norm = self.norm_of_steps()
            if norm:
                self.by_hand, verdict.factor = named.factor, 1.0
                verdict.clipped = f", clipped by the loop itself to a norm of {norm:.5g}"
        is_right = abs(verdict.factor - 1) <= verdict.tolerated_weights
        # A single micro batch has a factor whatever the gradient is.
        is_mean = named.off <= verdict.tolerated_weights and (is_right or fitted.typical <= TOO_MUCH)
        # Weights that give every gradient say more than a known mean of some gradients, such as those that one term
        # alone trains.
        is_explained = bool(fitted.rest) and max(fitted.rest.values()) <= verdict.tolerated_weights
        of_some = None if is_explained or (is_right and is_mean) else self._mean_of_some(candidates)
        if of_some is not None:
            others = self._near_enough(fitted.rest)
            if is_mean and others:
                verdict.wrong.append(causes.of_gradient(named.weighting, known, f" of {and_more(others)}"))
            verdict.factor = 1.0
            return of_some
        self._judge_terms(fitted.weights, deviations, named.factor, causes)
        if not is_mean:
            message = f"a weighted sum of the micro batches' gradients leaves {fitted.typical:.2g} of a typical gradient"
            self.unexplained = not fitted.typical <= verdict.tolerated_weights
            if not self.unexplained:
                message = self.counts(fitted.weights)
            nearest = f"{named.factor:.4g} x {named.weighting.label}"
            verdict.wrong.append(Wrong(f"{message}, which is no known mean (nearest: {nearest})"))
            return fitted.weights
        if is_right:
            self.nominal = self._nominal(loss_weights, known, self.by_hand)
        if not is_right:
            verdict.wrong.append(causes.of_gradient(named.weighting, known))
        elif named.weighting.name == PIECE_MEAN:
            verdict.wrong.append(
                "the gradient is that of the mean of the means of the pieces that samples are cut into: a token counts less in a piece with more of them"
            )
        elif (
            expect is not None
            and expect not in (named.weighting.name, *named.weighting.others)
            and (len(candidates) > 1 or named.weighting is not candidates[0])
        ):
            verdict.wrong.append(f"the gradient is that of {named.weighting.label}, not of {LABELS[expect]}")
        if named.weighting is not candidates[0]:
            ratios = candidates[0].weights / named.weighting.weights
            unit = "an element" if "element" in candidates[0].label else "a token"
            if float(ratios.max() / ratios.min() - 1) > verdict.tolerated_weights:
                verdict.difference = f"; in {candidates[0].label}, {unit} would count {float(ratios.min()):.3g} to {float(ratios.max()):.3g} times as much"
        if self.nominal is None or self.by_hand != 1:
            return torch.cat([known * named.factor, term_weights])
        # Gradients that all but cancel, or whose errors are not independent, may take a measured weight away from what it
        # is.
        off = SCALARS * max((torch.finfo(dtype_of(name)).eps for name in verdict.lowered), default=0.0)
        finest = finest[: len(self.micro)]
        factor = float((finest * self.nominal).sum() / self.nominal.square().sum())
        return torch.cat([self.nominal * min(max(factor, 1 - off), 1 + off), term_weights])

    def _of_samples(self, measured: torch.Tensor, named: Named) -> Named | None:
        """Return the mean over the samples, if the measured weights are that; None if not.

        A loop's own cross-entropy may be summed over the tokens of each sample.
        """
        if (
            abs(named.factor - 1) <= self.verdict.tolerated_weights
            or self.reference_results[0].loss is not None
        ):
            return None
        samples = [result.mean.samples for result in self.reference_results]
        if not all(samples) or self.verdict.pieces > 1:
            return None
        label = "the mean over all samples of the sums over their tokens"
        weighting = Weighting(SAMPLE_MEAN, label, torch.full_like(measured, 1 / sum(samples)))
        nearest = normalisation.nearest(measured, self.tokens, [weighting])
        is_right = max(abs(nearest.factor - 1), nearest.off) <= self.verdict.tolerated_weights
        return nearest if is_right else None

    def _mean_of_some(self, candidates: list[Weighting]) -> torch.Tensor | None:
        """Return the weights of the losses in a known mean that some gradients are of; None if there is no such mean.

        What is wrong is then wrong with the other gradients alone.
        """
        zeros = torch.zeros(sum(len(result.terms) for result in self.reference_results), dtype=torch.float64)
        for candidate in candidates:
            known = candidate.weights * self.divisors
            rest = self.made_of(torch.cat([known, zeros])).rest()
            if len(self._near_enough(rest)) > SOME * len(rest):
                self.verdict.named = Named(candidate, 1.0, 0.0)
                self.nominal = self._nominal(known, known, 1.0)
                return torch.cat([known, zeros])
        return None

    def _near_enough(self, rest: dict[str, float]) -> list[str]:
        """Return the names of gradients of which rounding errors alone are left. `rest` is what is left of each."""
        return [name for name, left in rest.items() if 0 < left <= self.verdict.tolerated_weights]

    def _nominal(self, actual: torch.Tensor, known: torch.Tensor, by_hand: float) -> torch.Tensor | None:
        """Return the exact weights that the losses should have; None if they are not known.

        `actual` are the losses' weights in the run, `known` those in the mean that they are nearest to.
        """
        if not any(result.mean.uncertain for result in self.reference_results):
            return known * by_hand
        # What follows from the gradients at the logits is averaged over the ranks, or summed.
        weights = [1 / self.verdict.shares / self.verdict.pieces, 1 / self.verdict.shares, 1.0]
        if self.others is not None:
            weights.insert(0, 1 / len(self.micro))
        means = [torch.full_like(actual, weight) for weight in weights]
        for mean in means if self.of_last_stage is None else [self.of_last_stage]:
            if float((actual / by_hand / mean - 1).abs().max()) <= self.verdict.tolerated_weights:
                return mean * by_hand
        return None

    def counts(self, weights: torch.Tensor) -> str:
        """Return in words how much each micro batch counts, by rank, where its loss has this weight."""
        measured = (weights[: len(self.micro)] / self.divisors).tolist()
        counts = [weight * tokens for weight, tokens in zip(measured, self.tokens, strict=True)]
        least = self.verdict.tolerated_weights * max(map(abs, counts))
        shown = {
            rank: ", ".join(
                f"{0.0 if abs(count) <= least else count:.4g}"
                for count, share in zip(counts, self.shares, strict=True)
                if share == rank
            )
            for rank in sorted(set(self.shares))
        }
        return "the micro batches count " + "; ".join(f"{text} (rank {rank})" for rank, text in shown.items())

    def _judge_terms(
        self, weights: torch.Tensor, deviations: torch.Tensor, factor: float, causes: Causes
    ) -> None:
        """Judge whether each further term of the loss counts as often as the loss itself.

        It must count like the mean of the micro batches' terms.
        """
        loss_weights, term_weights = weights[: len(self.micro)], iter(weights[len(self.micro) :].tolist())
        errors = iter(deviations[len(self.micro) :].abs().tolist())
        totals: dict[str, float] = {}
        tolerated: dict[str, float] = {}
        for weight, result in zip(loss_weights.tolist(), self.reference_results, strict=True):
            for name, term in result.terms.items():
                count = (weight * term.coefficient + next(term_weights)) * term.number / factor
                totals[name] = totals.get(name, 0.0) + count
                tolerated[name] = tolerated.get(name, 0.0) + MULTIPLE * next(errors) * term.number / factor
        for name, total in totals.items():
            coefficient = next(
                result.terms[name].coefficient for result in self.reference_results if name in result.terms
            )
            if coefficient == 0:
                verb = f"counts {total:.4g}" if abs(total) > tolerated[name] else "is not trained on"
                self.verdict.notes.append(f"{name}, which the model's loss leaves out, {verb}")
                continue
            allowed = tolerated[name] / abs(coefficient) + self.verdict.tolerated_weights
            if allowed > MOST:
                self.verdict.notes.append(f"in this precision nothing says how often {name} counts")
            elif not abs(total / coefficient - 1) <= allowed:
                times = total / coefficient
                why = causes.why(times)
                message = f"{name}, a term of the loss, counts {times:.5g} times as often as the rest"
                absent = f"{name}, a term of the loss, does not count"
                self.verdict.wrong.append(
                    absent if abs(times) <= allowed else Wrong(message, why + causes.in_loss(times, why))
                )

    def _weightings(self, expect: str | None) -> tuple[list[int], torch.Tensor, list[Weighting]]:
        """Return what is known of the micro batches' losses.

        That is (tokens of each micro batch, what each loss divides the sum over its tokens by, the known weightings of
        these sums).
        """
        if self.of_last_stage is not None:
            label = "what follows from the gradients of the next stage, weighed as in the last stage"
            ones = torch.ones(len(self.micro), dtype=torch.float64)
            return [1] * len(self.micro), ones, [Weighting(RANK_MEAN, label, self.of_last_stage)]
        tokens = [result.mean.tokens for result in self.reference_results]
        has_own_loss = any(result.loss is None for result in self.reference_results)
        (function, *others) = {result.mean.function for result in self.reference_results}
        if has_own_loss and all(tokens) and function and not others and self._counts_once(function, tokens):
            self.verdict.notes.append(
                f"the loop makes its own loss by {function}; how much it counts is judged, its targets are not"
            )
            self.verdict.leave("the targets of the loss are not judged")
            return (
                tokens,
                self._divisors(),
                [_of_elements(weighting) for weighting in self._known(tokens)],
            )
        if has_own_loss and all(tokens) and not function and not others:
            smoothing = (
                f" with label smoothing {self.reference_results[0].mean.smoothing:.2g}"
                if self.reference_results[0].mean.smoothing
                else ""
            )
            self.verdict.notes.append(
                f"the loop makes its own loss: by its gradient at the logits, a cross-entropy{smoothing}, whose labels were not seen"
            )
            self.verdict.leave("which labels the loss has was not seen")
        elif has_own_loss:
            self.verdict.notes.append(
                "the loop makes its own loss: the gradient is judged from the recorded one at what the model returns on, the loss is not"
            )
            self.verdict.leave("the loss itself is not judged")
            ones = torch.ones(len(self.micro), dtype=torch.float64)
            # The recorded gradients have every divisor of the run but that of averaging over ranks.
            label = "what follows from the gradients at the logits, averaged over the ranks"
            means = [Weighting(RANK_MEAN, label, ones / self.verdict.shares)]
            # torch's pipelines divide by the micro batches, unless they are told not to.
            if self.others is not None:
                means.append(Weighting(RANK_MEAN, f"{label} and the micro batches", ones / len(self.micro)))
            if self.verdict.pieces > 1:  # averaged over ranks with pieces of the same samples, too
                means.append(Weighting(RANK_MEAN, label, ones / self.verdict.shares / self.verdict.pieces))
            return [1] * len(self.micro), ones, means
        if not all(tokens):
            if expect not in (None, MICRO_MEAN):
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
        return tokens, self._divisors(), self._known(tokens)

    def _known(self, tokens: list[int]) -> list[Weighting]:
        return normalisation.known(tokens, self.shares, [called.number for called in self.micro])

    def _is_sum(self, measured: torch.Tensor) -> bool:
        """Whether the model returns sums over tokens, and each token counts once in the gradient: so it is where one process trains on them."""
        are_sums = all(called.record.loss is not None for called in self.micro) and bool(
            (self.divisors == 1).all()
        )
        is_once = float((measured - 1).abs().max()) <= self.verdict.tolerated_weights
        return are_sums and is_once and self.verdict.tokens > len(self.micro)

    def _divisors(self) -> torch.Tensor:
        return torch.tensor([result.mean.divisor for result in self.reference_results], dtype=torch.float64)

    def _counts_once(self, function: str, tokens: list[int]) -> bool:
        """Whether a loss function that the loop calls is to count once, as a mean; else a note says how often it does.

        A number that the loop multiplies it with may be meant, but not one of the run's own, unless that may be another
        number: half of a square, the square of a temperature, the elements of a sample. Losses that are made in several
        places, such as a discriminator's, are added up.
        """
        counts = 1 / self._divisors() / self.verdict.shares
        named = normalisation.nearest(counts, tokens, self._known(tokens))
        factor, tolerated = (
            named.factor,
            1e-4 + max(result.mean.uncertain for result in self.reference_results),
        )
        if max(abs(factor - 1), named.off) <= tolerated:
            return True
        calls = [micro_batch.record.losses[0] for micro_batch in self.micro]
        sizes = {self.ranks[0].world_size, self.verdict.shares, len(self.ranks[0].micro_batches)} - {1}
        is_of_run = any(abs(factor * times - 1) <= tolerated for size in sizes for times in (size, 1 / size))
        meant = [0.5] * (function == "mse_loss") + [call.number / (call.samples or 1) for call in calls]
        has_reason = any(call.is_soft for call in calls) or any(
            abs(factor / n - 1) <= tolerated for n in meant
        )
        are_added = all(call.one_target for call in calls) or len({call.made_at for call in calls}) > 1
        if is_of_run and named.off <= tolerated and not has_reason and not are_added:
            return True
        label = _of_elements(named.weighting).label
        self.verdict.notes.append(
            f"the gradient is {factor:.5g} times that of {label} of {function}, the loop's own loss; that may be meant"
        )
        return False


def _of_elements(weighting: Weighting) -> Weighting:
    """Return the same weighting, whose label speaks of elements in the place of tokens."""
    return dataclasses.replace(weighting, label=weighting.label.replace("token", "element"))
