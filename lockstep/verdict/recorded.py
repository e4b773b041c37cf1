"""Judge a recorded run: the recorded model in float64, by one process, on the micro batches that the run saw.

The gradient of a step is compared with what its micro batches give (lockstep/verdict/normalisation.py), tensor by tensor. The yardstick
of a tensor is one process in the run's own dtype on the same micro batches. The update is compared with the same optimizer's step in
float64 from the gradients that the run had.
"""

import math
from pathlib import Path

import torch

from lockstep.dumps.recording import Recording
from lockstep.ground.errors import UserError
from lockstep.verdict import normalisation, recorded_update
from lockstep.verdict.distance import distance_of
from lockstep.verdict.judgement import FLOOR, MULTIPLE, UNIT
from lockstep.verdict.normalisation import (
    LABELS,
    MICRO_MEAN,
    RANK_MEAN,
    TOKEN_MEAN,
    Fit,
    Gradients,
    Weighting,
)
from lockstep.verdict.recorded_modules import Modules
from lockstep.verdict.recorded_reference import Computed, Reference
from lockstep.verdict.recorded_rows import StepVerdict, judged
from lockstep.verdict.records import float32_norm_error

KINDS = {"weight": "weights", "gradient": "gradients"}


def judge(folder: Path, expect: str | None = None) -> list[StepVerdict]:
    """A verdict for every recorded step. `expect` is the weighting that was meant; None: any known one will do.

    Raises UserError for a folder without a recording, or a model that cannot be computed again.
    """
    recording = Recording(folder)
    return [_Step(recording, step).judge(expect) for step in range(1, len(recording.steps) + 1)]


def _unusable(gradients: Gradients) -> str:
    """Why nothing can be said of what these gradients are made of, in a sentence; "" if it can."""
    sizes = {name: float(tensor.norm()) for name, tensor in gradients.items()}
    broken = next((name for name, size in sizes.items() if not math.isfinite(size)), None)
    if broken is not None:
        return f"the gradient of {broken} is not finite"
    return "" if any(sizes.values()) else "no parameter has a gradient other than zero"


def _require_repeatable(first: Computed, again: Computed) -> None:
    same = all(torch.equal(again.gradients[name], tensor) for name, tensor in first.gradients.items())
    if again.loss != first.loss or not same:
        raise UserError(
            "two passes of the recorded model over one micro batch differ: it draws random numbers, so no reference can follow it; "
            "record a run without them"
        )


class _Step:
    def __init__(self, recording: Recording, step: int):
        self.recording, self.ranks = recording, recording.steps[step - 1]
        self.micro = recording.micro_batches(step)
        # By the first rank that was called with each micro batch
        self.shares = [called.ranks[0] for called in self.micro]
        self.verdict = StepVerdict(step, len(self.micro), len(set(self.shares)))
        self.of_norm: list[str] = []  # what is wrong with the norm of clipping: after what may have caused it

    def judge(self, expect: str | None) -> StepVerdict:
        verdict = self.verdict
        weights, gradients = self._agreed("weight"), self._agreed("gradient")
        self.observed = {name: tensor.double() for name, tensor in gradients.items()}
        self.gradients = gradients
        problem = _unusable(self.observed)
        if problem:
            verdict.wrong.append(problem)
            return verdict
        near, modules_wrong = self._compute(weights)
        self.columns = self._columns(self.exact)
        fitted = normalisation.fit(self.observed, self.columns)
        yardstick = normalisation.sums(self._columns(near), fitted.weights)
        again = normalisation.fit(yardstick, self.columns)
        self._judge_samples()
        self._judge_losses(near)
        if modules_wrong:  # what follows from them says nothing of the loop
            right = normalisation.sums(self.columns, fitted.weights)
        else:
            right = normalisation.sums(self.columns, self._judge_weights(fitted, again, expect))
        self._judge_gradients(right, yardstick)
        verdict.wrong += self.of_norm
        self._judge_missing(weights)
        recorded_update.judge(self.recording, verdict, weights, gradients)
        return verdict

    def _compute(self, weights: dict[str, torch.Tensor]) -> tuple[list[Computed], bool]:
        """(what each micro batch gives in the run's dtype, whether a module is wrong); `self.exact` has the same in float64."""
        exact = Reference(self.recording, weights, exact=True)
        plain = Reference(self.recording, weights, exact=False)
        modules = Modules(self.verdict, self.precision)
        self.exact: list[Computed] = []
        near: list[Computed] = []
        for called in self.micro:
            own = self.recording.of_modules(self.verdict.step, called)
            told = {
                name.split("/", 2)[2]: found[0][1]
                for name, found in own.items()
                if not found[0][1].is_floating_point()
            }
            right, measured = exact.compute(called, told), plain.compute(called, told)
            if self.verdict.step == 1 and not self.exact:
                _require_repeatable(right, exact.compute(called, told))
            modules.add(called, own, right, measured)
            for one, kept in ((right, self.exact), (measured, near)):
                one.modules = {}  # they take the most memory
                kept.append(one)
        self.arrived = modules.arrived
        return near, modules.close()

    @property
    def precision(self) -> str:
        """Of the arithmetic: whether it is float32 throughout."""
        micro = self.micro[0].about
        lowered = {micro.autocast, micro.param_dtype, *(str(one.dtype) for one in self.gradients.values())}
        return "fp32" if lowered <= {None, "torch.float32", "torch.float64"} else "autocast"

    def _judge_missing(self, weights: dict[str, torch.Tensor]) -> None:
        """What has a gradient in the reference has one on every rank that holds it."""
        for name in weights:
            size = max(
                float(one.gradients[name].norm()) if name in one.gradients else 0.0 for one in self.exact
            )
            without = [
                rank
                for rank, about in self.ranks.items()
                if f"weight/{name}" in about.places and f"gradient/{name}" not in about.places
            ]
            if size > 0 and without:
                self.verdict.wrong.append(
                    f"{name} has no gradient on rank {without[0]}, though the loss depends on it"
                )

    def _columns(self, computed: list[Computed]) -> list[Gradients]:
        """The gradients of all micro batches, of the tensors that the run has a gradient of."""
        return [
            {
                name: one.gradients.get(name, torch.zeros_like(tensor))
                for name, tensor in self.observed.items()
            }
            for one in computed
        ]

    def _agreed(self, kind: str) -> dict[str, torch.Tensor]:
        """Whole tensors by name; what replicas disagree in is wrong."""
        found, differ = {}, []
        for name in self.recording.names(self.verdict.step, kind):
            found[name], odd = self.recording.whole(self.verdict.step, f"{kind}/{name}")
            if odd:
                differ.append((name, odd[0]))
        if differ:
            (name, rank), more = differ[0], len(differ) - 1
            cause = "; they were not averaged over these ranks" if kind == "gradient" else ""
            self.verdict.wrong.append(
                f"{KINDS[kind]} differ between ranks that hold the same: {name} on rank {rank}, and {more} more{cause}"
            )
        return found

    def _judge_samples(self) -> None:
        """Ranks that hold whole replicas are data-parallel, so they must see different samples."""
        twice = next((called for called in self.micro if len(called.ranks) > 1), None)
        if twice is None:
            return
        where = (
            f"ranks {', '.join(map(str, twice.ranks))} were called with the same micro batch {twice.number}"
        )
        if any(
            place.shape != places[0].full
            for about in self.ranks.values()
            for name, places in about.places.items()
            if name.startswith("weight/")
            for place in places[1:]
        ):
            self.verdict.notes.append(f"{where}, so they are taken for ranks of a model-parallel group")
        else:
            self.verdict.wrong.append(
                f"{where}, though each holds a whole replica: the samples are not divided among the ranks"
            )

    def _judge_losses(self, near: list[Computed]) -> None:
        """Every loss is a draw of the same rounding errors, and one may be small by chance: the measure is the yardstick's largest."""
        pairs = [
            (one.loss, own.loss)
            for one, own in zip(self.exact, near, strict=True)
            if one.loss is not None and own.loss is not None
        ]
        measure = max((abs(own - right) / abs(right) for right, own in pairs), default=0.0)
        tolerated = MULTIPLE * measure + FLOOR * UNIT["fp32"]
        for called, exact in zip(self.micro, self.exact, strict=True):
            if exact.loss is None:
                continue
            self.verdict.losses = True
            for rank, loss in called.losses.items():
                name = f"loss of micro batch {called.number}, rank {rank}"
                if self.verdict.number(name, loss, exact.loss, tolerated * abs(exact.loss)).too_far:
                    self.verdict.wrong.append(f"{name} is {loss:.9g}, the reference's is {exact.loss:.9g}")

    def _judge_weights(self, fitted: Fit, again: Fit, expect: str | None) -> torch.Tensor:
        """What the gradient is a mean over, and the factor before it.

        Returns the weights of the losses that its tensors are then held against: those of the mean, or as they were measured.
        """
        verdict = self.verdict
        deviation = float((again.weights - fitted.weights).norm() / fitted.weights.norm())
        verdict.tolerated_weights = MULTIPLE * max(deviation, again.typical) + FLOOR * UNIT["fp32"]
        tokens, divisors, candidates = self._weightings(expect)
        measured = fitted.weights / divisors
        named = verdict.named = normalisation.nearest(measured, tokens, candidates)
        known = named.weighting.weights * divisors
        verdict.factor = named.factor / self._clip_factor(known)
        if not named.off <= verdict.tolerated_weights:
            shown = ", ".join(
                f"{float(one) * count:.4g}" for one, count in zip(measured, tokens, strict=True)
            )
            verdict.wrong.append(
                f"the micro batches count {shown}, as in no known mean (nearest: {named.factor:.4g} x {named.weighting.label})"
            )
            return fitted.weights
        if not abs(verdict.factor - 1) <= verdict.tolerated_weights:
            verdict.wrong.append(self._of_factor(named.weighting, sum(tokens)))
        elif expect is not None and named.weighting.name != expect and len(candidates) > 1:
            verdict.wrong.append(f"the gradient is that of {named.weighting.label}, not of {LABELS[expect]}")
        if named.weighting is not candidates[0]:
            counts = candidates[0].weights / named.weighting.weights
            verdict.difference = f"; in {candidates[0].label}, a token would count {float(counts.min()):.3g} to {float(counts.max()):.3g} times as much"
        return known * named.factor

    def _weightings(self, expect: str | None) -> tuple[list[int], torch.Tensor, list[Weighting]]:
        """(tokens of the micro batches, what their losses divide the sums over these by, the weightings of these sums that are known)."""
        tokens = [one.tokens for one in self.exact]
        if any(one.loss is None for one in self.exact):
            self.verdict.notes.append(
                "the model's own loss is not what was trained: the gradient is judged from the recorded one at the logits on, the loss is not"
            )
            ones = torch.ones(len(self.micro), dtype=torch.float64)
            # The recorded gradients have every divisor of the run but that of averaging over ranks.
            mean = Weighting(
                RANK_MEAN,
                "what follows from the gradients at the logits, averaged over the ranks",
                ones / self.verdict.shares,
            )
            return [1] * len(self.micro), ones, [mean]
        if not all(tokens):
            if expect == TOKEN_MEAN:
                raise UserError(
                    f"--expect {expect}: the loss that the model returns is no mean of a cross-entropy over labels among its inputs, so its tokens are not known"
                )
            self.verdict.notes.append(
                "the tokens of the loss are not known, so nothing says whether each counts alike"
            )
            ones = torch.ones(len(self.micro), dtype=torch.float64)
            mean = Weighting(MICRO_MEAN, "the mean of the micro batches' losses", ones / len(self.micro))
            return [1] * len(self.micro), ones, [mean]
        self.verdict.tokens = sum(tokens)
        divisors = torch.tensor([one.divisor for one in self.exact], dtype=torch.float64)
        return tokens, divisors, normalisation.known(tokens, self.shares)

    def _of_factor(self, weighting: Weighting, tokens: int) -> str:
        world = self.ranks[0].world_size
        numbers = {
            "the world size": float(world),
            "the number of data-parallel ranks": float(self.verdict.shares),
            "the micro batches of a rank": float(len(self.ranks[0].micro_batches)),
            "the ranks that see the same samples": world / self.verdict.shares,
            "the tokens of the global batch": float(tokens),
        }
        names = normalisation.explanations(
            self.verdict.factor, numbers, max(self.verdict.tolerated_weights, 1e-6)
        )
        why = f", which is {' or '.join(names)}" if names else ""
        if not names and self.verdict.factor < 1 and not self.ranks[0].clips:
            why = "; no clipping by a norm was seen"
        return f"the gradient is {self.verdict.factor:.7g} times that of {weighting.label}{why}"

    def _clip_factor(self, weights: torch.Tensor) -> float:
        """By how much clipping scaled the recorded gradient, from the norm that the run clipped by; 1 without clipping.

        `weights` are those of the gradient before it. Judges the norm, which libraries sum in float32.
        """
        clips = self.ranks[0].clips
        if not clips:
            return 1.0
        if len(clips) > 1:
            raise UserError(
                f"the gradient of step {self.verdict.step} was clipped {len(clips)} times, and one norm for all of it is what can be judged"
            )
        (clip,) = clips
        each = list(normalisation.sums(self.columns, weights).values())
        right = math.sqrt(sum(float(tensor.square().sum()) for tensor in each))
        summed = float(torch.stack([tensor.float().norm() for tensor in each]).norm())
        in_float32 = float32_norm_error(right, summed, max(tensor.numel() for tensor in each))
        tolerated = in_float32 / right + self.verdict.tolerated_weights
        largest = max(float(tensor.abs().max()) for tensor in each)
        if abs(clip.norm - largest) <= tolerated * largest:
            right = largest  # clipped by the largest element
        if self.verdict.number("gradient norm", clip.norm, right, tolerated * right).too_far:
            self.of_norm.append(
                f"the gradient was clipped by a norm of {clip.norm:.7g}; that of the reference's gradient is {right:.7g}"
            )
        factor = min(1.0, clip.max_norm / (clip.norm + 1e-6))
        if factor < 1:
            self.verdict.clipped = f", clipped from a norm of {clip.norm:.5g} to {clip.max_norm:.5g}"
        return 1.0 if clip.later else factor

    def _judge_gradients(self, right: Gradients, yardstick: Gradients) -> None:
        """Each tensor against the sum of the micro batches' gradients."""
        own, near = (
            {f"gradient/{name}": distance_of(found[name], reference) for name, reference in right.items()}
            for found in (self.observed, yardstick)
        )
        tensors = {f"gradient/{name}": tensor for name, tensor in self.gradients.items()}
        rows = judged(self.verdict.step, own, near, tensors, self.precision)
        self.verdict.rows += rows
        wrong = [row for row in rows if row.too_far]
        if wrong:
            worst = max(wrong, key=lambda row: row.multiple)
            along = abs(worst.distance.scale - 1) > worst.distance.relative / 2
            times = f"; it is {worst.distance.scale:.5g} times the reference's" if along else ""
            self.verdict.wrong.append(
                f"{len(wrong)} of {len(rows)} gradients are too far from the reference, most of all "
                f"{worst.name.removeprefix('gradient/')}: {worst.describe()}{times}"
            )
