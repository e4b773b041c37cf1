"""Judge a recorded run: the recorded model in float64, by one process, on the micro batches that the run saw.

The gradient of a step is compared with what its micro batches give (lockstep/verdict/normalisation.py), tensor by tensor. The yardstick
of a tensor is one process in the run's own dtype on the same micro batches. The update is compared with the same optimizer's step in
float64 from the gradients that the run had.
"""

import contextlib
import functools
import itertools
import math
import statistics

import torch

from lockstep.dumps.called import LOG_PROBS, Called
from lockstep.dumps.module_hooks import module_of
from lockstep.dumps.recording import Recording
from lockstep.ground.errors import UserError
from lockstep.ground.words import and_more
from lockstep.plan.resources import free_bytes
from lockstep.verdict import (
    draws,
    normalisation,
    recorded_pieces,
    recorded_task,
    recorded_update,
    redrawn,
)
from lockstep.verdict.alone import sentence
from lockstep.verdict.computed import Computed
from lockstep.verdict.judgement import FLOOR, MULTIPLE, UNIT, Judgement
from lockstep.verdict.lazy import Lazy
from lockstep.verdict.normalisation import Gradients, Sum
from lockstep.verdict.own_loss import Loss
from lockstep.verdict.recorded_alone import Alone
from lockstep.verdict.recorded_modules import Modules, Tensors, as_pieces
from lockstep.verdict.recorded_ranks import Ranks
from lockstep.verdict.recorded_reference import Reference
from lockstep.verdict.recorded_rows import StepVerdict, Wrong, described, judged_gradients
from lockstep.verdict.recorded_weights import Weighed, shares_of

# Machine epsilons of a dtype that a gradient may be off by that is rounded to it, and then reduced
ROUNDED = 4
ENOUGH = 4  # times as many elements as micro batches: those of a gradient whose weights are looked for
SAME = 1e-9  # relative: two passes in float64
NOT_LINEAR = (
    "if twice the gradient arrives at what the model returns, gradients of parameters are not twice as large"
)
KEPT = 0.1  # of what is left of a gradient without the one of the step before, that may be left with it


def judge(
    recording: Recording,
    step: int,
    expect: str | None = None,
    loss: Loss | None = None,
    memory: float | None = None,
) -> StepVerdict:
    """The verdict on a recorded step. `expect` is the weighting that was meant; None: any known one will do. `loss` is the loop's own.

    A model whose weights, in float64 and in the run's dtype, take more than a quarter of `memory` (bytes; default: half of what is free) is computed
    unit by unit. Raises UserError for a model that cannot be computed again.
    """
    memory = free_bytes() / 2 if memory is None else memory
    streamed = 4 * _bytes_of_weights(recording) > memory  # with gradients and what is computed in between
    verdict = _Step(recording, step, loss, streamed).judge(expect)
    if redrawn.may_be_chance(verdict):
        with contextlib.suppress(UserError):  # weights at the edge of where the model can be computed
            verdict = _Step(recording, step, loss, streamed, redraws=True).judge(expect)
    return verdict


def _bytes_of_weights(recording: Recording) -> int:
    """In float64 and as the model has them."""
    return sum(one.numel() * (8 + one.itemsize) for one in recording.skeleton.parameters())


def _unusable(gradients: Gradients) -> str:
    """Why nothing can be said of what these gradients are made of, in a sentence; "" if it can."""
    sizes = {name: float(tensor.double().norm()) for name, tensor in gradients.items()}
    broken = next((name for name, size in sizes.items() if not math.isfinite(size)), None)
    if broken is not None:
        return f"the gradient of {broken} is not finite"
    return "" if any(sizes.values()) else "no parameter has a gradient other than zero"


def _not_linear(
    reference: Reference, called: Called, told: dict[str, torch.Tensor], first: Computed
) -> str | None:
    """A parameter whose gradient is not twice as large if twice the gradient arrives; None if all are.

    Raises UserError for a model that draws random numbers. `first` is what the reference gave for the micro batch.
    """

    def other(again: Computed, factor: float) -> str | None:
        pairs = ((name, factor * one, again.gradients[name]) for name, one in first.gradients.items())
        return next(
            (name for name, one, own in pairs if float((own - one).norm()) > SAME * float(one.norm())), None
        )

    # That of the loss itself is divided by what arrived there.
    twice = reference.compute(called.twice, told)
    name = other(twice, 1.0 if first.loss is not None else 2.0)
    if name is None and twice.loss == first.loss:
        return None
    again = reference.compute(called, told)
    if again.loss != first.loss or other(again, 1.0) is not None:
        raise UserError(
            "two passes of the recorded model over one micro batch differ: it draws random numbers that are not those of torch on CPUs, Python's random or numpy.random, "
            "or changes its own weights, so no reference can follow it; record a run in which it does neither"
        )
    return name


def _loss_noise(exact: Computed, near: Computed) -> float:
    """The standard deviation of a loss, relative, whose logits are off as far as the yardstick's are, each independently of the others.

    With the gradient g at the logits, that of a sum of g_i times errors of one size is |g| times this size.
    """
    if exact.loss is None or exact.logits is None or near.logits is None or exact.at_logits is None:
        return 0.0
    errors = near.logits.double() - exact.logits
    return float(exact.at_logits.norm() * errors.norm()) / math.sqrt(errors.numel()) / abs(exact.loss)


class _Step:
    def __init__(
        self, recording: Recording, step: int, loss: Loss | None, streamed: bool, *, redraws: bool = False
    ):
        self.recording, self.ranks, self.loss = recording, recording.steps[step - 1], loss
        self.streamed = streamed  # memory has one unit of the model at a time
        self.redraws = redraws  # the yardstick is the farthest of several draws
        called = recording.micro_batches(step)
        self.unused = [one for one in called if not one.about.used]
        used = [one for one in called if one.about.used]
        pieces = max(1 if one.piece is None else len(one.piece.all) for one in used)
        number = len({id(one.first) for one in used})
        self.verdict = StepVerdict(step, number, len(set(shares_of(used))), pieces)
        wholes = {id(one.first): one.piece.all for one in used if one.piece is not None}
        cut = (of for all in wholes.values() for of in zip(*(one.ranks for one in all), strict=False))
        self.verdict.cut = list(dict.fromkeys(cut))
        # Zeros say nothing of how a micro batch is weighed, such as where all advantages are zero
        self.micro = [one for one in used if not one.is_zero] or used
        self.micro.sort(key=lambda one: (one.first.ranks[0], one.number))  # pieces beside each other
        dtypes = {one.dtype for one in recording.skeleton.parameters()}
        for one in self.micro:
            draws.require_known(one, self.ranks[0].data_parallel, dtypes)
        self.of_ranks = Ranks(recording, self.verdict, self.micro, streamed=streamed)
        self.of_norm: list[str] = []  # what is wrong with the norm of clipping: after what may have caused it
        self.counted = ""  # how much each micro batch counts in the worst gradient, to be read after it
        self.loss_noise = 0.0
        self.alone_in_loss: list[str] = []  # parameters
        self.exact: list[Computed] = []
        self.near: list[Computed] = []

    def judge(self, expect: str | None) -> StepVerdict:
        verdict, ranks = self.verdict, self.of_ranks
        weights, gradients = ranks.agreed("weight"), ranks.agreed("gradient")
        odd = next((name for name, weight in weights.items() if weight.is_complex()), None)
        if odd is not None:
            raise UserError(
                f"{odd} is complex, and what is computed with such parameters cannot be judged yet"
            )
        if self.ranks[0].hooked:
            verdict.notes.append(
                f"a forward hook changes what {and_more(self.ranks[0].hooked)} returns, and the reference has no hooks: "
                "if that is meant, let the module's forward method do it"
            )
        ranks.judge_clips()
        self.gradients = ranks.before_clipping_by_value(gradients)
        verdict.lowered = sorted(self._lowered())
        problem = _unusable(self.gradients)
        copies = sum(one.strangers for one in self.ranks[0].optimizers)
        if problem and copies:
            raise UserError(
                f"{problem}, and the optimizer holds {copies} tensors that are none of the model's: an update of copies of the weights cannot be judged; "
                "record a run whose optimizer holds the model's parameters"
            )
        if problem and all(one.is_zero for one in self.micro):
            verdict.nothing = True
            verdict.leave(
                f"step {verdict.step} is not judged: nothing but zeros arrives at what the model returned"
            )
            return verdict
        if problem:
            verdict.wrong.append(Wrong(problem))
            return verdict
        ranks.judge_unused(self.unused)
        ranks.judge_skipped()
        ranks.judge_modes()
        if (
            ranks.untied(weights)
            or ranks.frozen_apart()
            or ranks.clipped_in_parts(gradients)
            or ranks.parted()
        ):
            return verdict
        nominal, place = self._judge_free(weights, expect)
        missing = self._missing(weights)
        for one in (*self.exact, *self.near):
            one.gradients = {}  # they take the most room
        self._judge_alone(nominal, place)
        verdict.wrong += self.of_norm + missing
        recorded_update.judge(self.recording, verdict, weights, gradients, streamed=self.streamed)
        if self.alone_in_loss:
            verdict.leave(
                f"the gradient of {and_more(self.alone_in_loss)}, which the loop's loss alone depends on, is not judged"
            )
        if self.ranks[0].of_others:
            verdict.leave(
                f"tensors of other models, whose optimizers step, too, are not judged: {self.ranks[0].of_others}"
            )
        return verdict

    def _judge_free(self, weights: Gradients, expect: str | None) -> tuple[torch.Tensor | None, int]:
        """The whole computation, from the batch to the gradients.

        Returns (the weights that the losses of the micro batches should have in the gradient, None if they are not known; how many sentences say
        what is wrong in modules).
        """
        verdict, near = self.verdict, self.near
        modules_wrong = self._compute(weights)
        after_modules = len(verdict.wrong)
        beside = self._leave_loss_out()
        self.clipped = {name: self.ranks[0].clipped(name) for name in self.gradients}
        columns = self._columns(self.exact)
        made_of = functools.partial(Sum, self.gradients, columns, factors=self.clipped)
        fitted = normalisation.fit(self.gradients, columns, self.clipped)
        yardstick = Sum(self.gradients, self._columns(near), fitted.weights, self.clipped)
        self.of_ranks.judge_samples()
        self._judge_losses(near)
        weights_of, nominal = fitted.weights, None
        if not modules_wrong:  # what follows from them says nothing of the loop
            again = normalisation.fit(yardstick, columns, self.clipped, like=fitted)
            numbers = {len(ranks[0].micro_batches) for ranks in self.recording.steps}
            elsewhere = max(numbers - {len(self.ranks[0].micro_batches)}, default=0)
            norm = functools.partial(self.of_ranks.norm_of_steps, self.gradients.keys())
            weighed = Weighed(verdict, self.ranks, self.micro, self.exact, made_of, elsewhere, norm, beside)
            weights_of = weighed.judge(fitted, again, expect)
            if weighed.of_some:
                yardstick = Sum(self.gradients, self._columns(near), weights_of, self.clipped)
            self.of_norm, nominal = weighed.of_norm, weighed.nominal
            terms = fitted.weights[len(self.micro) :]
            means = self._means_of_ranks()
            if any(self._are_right(means, torch.cat([known, terms])) for known in weighed.known if means):
                # No rank is the one to blame
                self.of_ranks.say_of_unreduced(": each rank has its own, and their mean is right")
            elif self.of_ranks.unreduced:
                self._count_on_odd_rank(columns, fitted.weights, weighed)
        right = made_of(weights_of)
        rows = judged_gradients(verdict.step, self.gradients, right, yardstick, self.precision)
        verdict.rows += rows
        self._judge_kept_gradient(rows)
        if nominal is not None:
            self._count_in_worst(rows, columns, weighed, nominal)
        wrong = len(verdict.wrong) > after_modules or any(row.too_far for row in rows)
        if wrong and not modules_wrong:
            self._judge_rounding(after_modules)
        if 2 * sum(row.too_far for row in rows) > len(rows):
            verdict.wrong[after_modules:after_modules] = self.of_ranks.clipped_apart()
        return nominal, after_modules

    def _count_in_worst(
        self, rows: list[Judgement], columns: list[Gradients], weighed: Weighed, nominal: torch.Tensor
    ) -> None:
        """Measures how much each micro batch counts in the gradient that is farthest off, where most are right."""
        worst = max(rows, key=lambda row: row.multiple)
        name = worst.name.removeprefix("gradient/")
        if not worst.too_far or self.gradients[name].numel() < ENOUGH * len(columns):
            return
        alone = normalisation.fit({name: self.gradients[name]}, columns, self.clipped)
        counts = alone.weights[: len(self.micro)] / nominal
        if alone.typical <= self.verdict.tolerated_weights < float(counts.max() - counts.min()):
            self.counted = f"; in this gradient, {weighed.counts(alone.weights)}"

    def _count_on_odd_rank(self, columns: list[Gradients], of_first: torch.Tensor, weighed: Weighed) -> None:
        """Measures how much each micro batch counts in gradients that were not reduced, where another rank than the first has its own."""
        odd, number = self.of_ranks.odd, len(self.micro)
        own = {
            name: part
            for name in self.of_ranks.differ
            if (part := self.recording.part(odd, self.verdict.step, f"gradient/{name}")) is not None
            and part.shape == self.gradients[name].shape
        }
        if sum(one.numel() for one in own.values()) < ENOUGH * len(columns):
            return
        found = normalisation.fit(own, columns, {name: self.ranks[odd].clipped(name) for name in own})
        if not found.typical <= self.verdict.tolerated_weights:
            return
        times = found.weights[:number] / of_first[:number]
        if float((times - times[0]).abs().max()) <= self.verdict.tolerated_weights * float(times[0].abs()):
            why = f"; on rank {odd} they are {float(times[0]):.6g} times as large, so they were changed after they were reduced"
            self.of_ranks.say_of_unreduced(why, instead=True)
        else:
            self.of_ranks.say_of_unreduced(f"; on rank {odd}, {weighed.counts(found.weights)}")

    def _means_of_ranks(self) -> dict[str, torch.Tensor]:
        """Of the gradients that were not reduced, unless they were clipped since."""
        if not self.of_ranks.unreduced or self.ranks[0].clips:
            return {}
        step = self.verdict.step
        return {
            name: self.recording.whole(step, f"gradient/{name}", mean=True)[0]
            for name in self.of_ranks.differ
        }

    def _are_right(self, means: dict[str, torch.Tensor], weights: torch.Tensor) -> bool:
        """Whether these are the gradients for `weights` of the micro batches' losses."""
        right, near = (Sum(means, self._columns(of), weights) for of in (self.exact, self.near))
        rows = judged_gradients(self.verdict.step, means, right, near, self.precision)
        return not any(row.too_far for row in rows)

    def _leave_loss_out(self) -> dict[str, float]:
        """Leave out the parameters that the loop's loss alone depends on, such as the weights of its terms; returns the norms of their gradients."""
        if any(one.loss is not None for one in self.exact):
            return {}
        used = {name for one in self.exact for name in one.gradients}
        every, alone = self.gradients, [name for name in self.gradients if name not in used]
        if not used or not alone:
            return {}
        self.gradients = Lazy((name for name in every if name in used), lambda name: every[name])
        self.alone_in_loss = [name for name in alone if every[name].any()]
        return {name: float(every[name].double().norm()) for name in alone}

    def _recorded(self, called: Called) -> tuple[Tensors, dict[str, torch.Tensor]]:
        """(what modules returned for a micro batch and what arrived there, the choices among it)."""
        own = self.recording.of_modules(self.verdict.step, called)
        told = {
            module_of(name): found[0][1] for name, found in own.items() if not found[0][1].is_floating_point()
        }
        if called.piece is not None:  # the whole is told what all pieces chose
            of_all = [self.recording.of_modules(self.verdict.step, one) for one in called.piece.all]
            for module, choice in told.items():
                name = f"forward/{called.number}/{module}"
                whole = called.piece.pieces.joined_rows([of[name][0][1] for of in of_all])
                told[module] = choice if whole is None else whole
        return own, told

    def _compute(self, weights: Gradients) -> bool:
        """Fills `exact` and `near`: what each micro batch gives, in float64 and in the run's dtype. Returns whether a module is wrong."""
        exact, plain = (
            Reference(
                self.recording,
                self.verdict.step,
                weights,
                self.loss,
                exact=exact,
                streamed=self.streamed,
            )
            for exact in (True, False)
        )
        exact.drawn = plain.drawn
        if exact.kernels:
            self.verdict.notes.append(
                f"the model's attention was computed by {and_more(exact.kernels)}; the reference computes the same in plain torch"
            )
        modules = Modules(self.verdict, self.precision)
        self.alone = Alone(self.verdict, self.precision, exact, plain, len(self.recording.steps))
        for _, same in itertools.groupby(self.micro, key=lambda one: id(one.first)):
            pieces = list(same)
            recorded = [self._recorded(called) for called in pieces]
            for called, (_, told) in zip(pieces, recorded, strict=True):
                for reference, kept in ((plain, self.near), (exact, self.exact)):
                    kept.append(reference.compute(called, told))
                if not self.streamed:  # whose units are computed twice
                    recorded_task.note_buffers(self.verdict, called, exact, plain)
                if self.redraws:
                    redrawn.draw_again(plain, self.near[-1], self.exact[-1], called, told)
                if self.verdict.step == 1 and len(self.exact) == 1:
                    odd = _not_linear(exact, called, told, self.exact[0])
                    if odd and self.exact[0].arrived == 1 and self.exact[0].loss is not None:
                        self.verdict.notes.append(f"{NOT_LINEAR}, such as that of {odd}; here, 1 arrives")
                    elif odd:
                        self.verdict.wrong.append(
                            f"{NOT_LINEAR}, such as that of {odd}: a function's backward method forgets what it is given"
                        )
            rights, near = self.exact[-len(pieces) :], self.near[-len(pieces) :]
            for right, measured in zip(rights, near, strict=True):
                measured.terms = {name: measured.terms[name] for name in right.terms}
            for computed in (rights, near):
                as_pieces(computed, pieces, [own for own, _ in recorded])
            for called, (own, _), right, measured in zip(pieces, recorded, rights, near, strict=True):
                modules.add(called.number, called.ranks, own, right, measured)
                right.arrived *= modules.scales.get((called.number, called.ranks[0]), 1.0)
                self.loss_noise = max(self.loss_noise, _loss_noise(right, measured))
                for one in (right, measured):
                    one.modules, one.logits, one.at_logits = {}, None, None  # they take the most memory
        if self.verdict.step == 1:
            recorded_task.judge(self.verdict, exact, self.micro, self.exact)
        recorded_task.judge_replicas(self.verdict, exact, self.micro)
        before = len(self.verdict.wrong)
        wrong = modules.close()
        first = next((row for row in modules.rows.values() if row.too_far), None)
        if first is not None and first.which_pass == "forward":
            why = self.of_ranks.unlike(
                first.name.removeprefix("forward/"),
                [rank for rank, one in first.ranks.items() if not one <= 1],
            )
            if not why and self.verdict.pieces == 1 and self.verdict.step == 1:
                name = first.name.replace("/", "/0/", 1)
                of_odd = (
                    one for one in self.micro if one.number == 0 and first.ranks.get(one.ranks[0], 0) > 1
                )
                why = recorded_pieces.explain_cache(exact, next(of_odd, self.micro[0]), name)
                why = why or recorded_pieces.explain(exact, self.micro, name)
            self.verdict.wrong[before:before] = why
            if self.of_ranks.unreduced:  # they differ as what they come from does
                self.of_ranks.say_of_unreduced("", instead=True)
                self.verdict.wrong.sort(key=lambda said: said.startswith("gradients differ"))
        return wrong

    def _judge_alone(self, nominal: torch.Tensor | None, after_modules: int) -> None:
        if any(math.isnan(one.arrived) for one in self.exact):
            self.verdict.notes.append(
                "modules are not judged by themselves: what arrived at the loss is not known"
            )
            self._say_gradients()
            return
        for called, right, near in zip(self.micro, self.exact, self.near, strict=True):
            self.alone.add(called, *self._recorded(called), right, near)
        # A piece's loss alone has no gradient there, and a head that TRL replaced rounds otherwise.
        known = self.verdict.pieces == 1 and not any(LOG_PROBS in one.arrived for one in self.micro)
        rows = self.alone.judge(self.gradients, nominal if known else None, self.clipped)
        self.verdict.alone = rows
        self._say_gradients()
        first = next((row for row in rows if row.too_far), None)
        if first is not None:
            place = after_modules if first.kind != "gradient" else len(self.verdict.wrong)
            self.verdict.wrong.insert(place, Wrong(sentence(rows)))

    def _lowered(self) -> set[str]:
        """The dtypes other than float32 and float64 that the step was computed in."""
        micro = self.micro[0].about
        found = {micro.autocast, micro.param_dtype, *(str(one.dtype) for one in self.gradients.values())}
        return {one for one in found if one is not None} - {"torch.float32", "torch.float64"}

    @property
    def precision(self) -> str:
        """Of the arithmetic: whether it is float32 throughout."""
        return "autocast" if self.verdict.lowered else "fp32"

    def _missing(self, weights: Gradients) -> list[str]:
        """What has a gradient in the reference has one on every rank that holds it."""
        found = []
        beside = {*self.ranks[0].frozen, *self.alone_in_loss}
        unused = sorted(weights.keys() - self.gradients.keys() - beside)
        if unused:
            self.verdict.notes.append(
                f"nothing that was trained depends on {and_more(unused)}: without a gradient"
            )
        for name in weights:
            size = max(
                float(one.gradients[name].norm()) if name in one.gradients else 0.0 for one in self.exact
            )
            holders = self.recording.holders(self.verdict.step).get(name, self.ranks)
            without = [
                rank
                for rank, about in self.ranks.items()
                if f"weight/{name}" in about.places
                and f"gradient/{name}" not in about.places
                and (rank in holders or name in about.frozen)
            ]
            if size > 0 and without:
                found.append(f"{name} has no gradient on rank {without[0]}, though the loss depends on it")
            elif without and name in self.recording.names(self.verdict.step, "gradient"):
                found.append(
                    f"{name} has a gradient, of zeros, on some ranks, and none on rank {without[0]}: its optimizer does not step it"
                )
        return found

    def _columns(self, computed: list[Computed]) -> list[Gradients]:
        """The gradients of the losses of all micro batches, then those of their further terms."""
        found = [one.gradients for one in computed]
        return found + [term.gradients for one in computed for term in one.terms.values()]

    def _judge_kept_gradient(self, rows: list[Judgement]) -> None:
        """Whether what is too much in the gradients that are too far is that of the step before."""
        last = self.verdict.step - 1
        wrong = [row.name.removeprefix("gradient/") for row in rows if row.too_far]
        if last == 0 or not wrong or not set(wrong) <= set(self.recording.names(last, "gradient")):
            return
        own = Lazy(wrong, lambda name: self.gradients[name])
        kept = Lazy(wrong, lambda name: self.of_ranks.whole(last, f"gradient/{name}"))
        columns = self._columns(self.exact)
        without, with_it = (
            normalisation.fit(own, some, self.clipped) for some in (columns, [*columns, kept])
        )
        if with_it.typical < KEPT * without.typical:
            alone = normalisation.fit(own, [kept])
            late = alone.typical < KEPT * without.typical
            times = float((alone if late else with_it).weights[-1])
            of_some = f" of {and_more(wrong)}" if len(wrong) < len(rows) else ""
            self.verdict.wrong.insert(
                0,
                f"the gradient{of_some} is {times:.4g} times that of step {last}, and has nothing of its own micro batches: it comes one step late"
                if late
                else f"the gradient{of_some} has {times:.4g} times that of step {last} in it: it was not set to zero",
            )

    def _judge_rounding(self, place: int) -> None:
        """Whether what is wrong with a gradient is that it was rounded to 16 bits after the backward pass."""
        if self.verdict.lowered:
            return
        # The median: a gradient that all but cancels is farther off, and 16 bits have no smaller number for it
        rows = [one for one in self.verdict.rows if one.kind == "gradient" and one.too_far]
        off = statistics.median(one.distance.relative for one in rows) if rows else math.inf
        # Clipping comes after it
        before = Lazy(self.gradients, lambda name: self.gradients[name] / self.clipped[name])
        for dtype in (torch.bfloat16, torch.float16):
            near = off <= ROUNDED * torch.finfo(dtype).eps  # signs, too, are numbers of 16 bits
            if near and all(one.allclose(one.to(dtype).to(one.dtype), 3e-7, 0) for one in before.values()):
                self.verdict.wrong.insert(
                    place,
                    f"all elements of the gradient are numbers of {dtype}, though it is computed in float32: it was rounded after the backward pass, "
                    "as where its reduction is in 16 bits",
                )
                return

    def _judge_losses(self, near: list[Computed]) -> None:
        """Every loss is a draw of the same rounding errors, and one may be small by chance.

        So the measure is the yardstick's largest, and at least what the errors of its logits let expect.
        """
        pairs = [
            (one.loss, own.loss)
            for one, own in zip(self.exact, near, strict=True)
            if one.loss is not None and own.loss is not None
        ]
        measure = max((abs(own - right) / abs(right) for right, own in pairs), default=0.0)
        measure = max(measure, self.loss_noise)
        tolerated = MULTIPLE * measure + FLOOR * UNIT["fp32"]
        for called, exact in zip(self.micro, self.exact, strict=True):
            if exact.loss is None or self.loss is not None:  # what a loop makes itself is not recorded
                continue
            for rank, loss in called.losses.items():
                name = f"loss of micro batch {called.number}, rank {rank}"
                if self.verdict.number(name, loss, exact.loss, tolerated * abs(exact.loss)).too_far:
                    self.verdict.wrong.append(
                        Wrong(f"{name} is {loss:.9g}, the reference's is {exact.loss:.9g}")
                    )

    def _say_gradients(self) -> None:
        """Says which gradients are too far from the sum of the micro batches'."""
        rows = [row for row in self.verdict.rows if row.kind == "gradient"]
        wrong = [row for row in rows if row.too_far]
        if wrong:
            worst = max(wrong, key=lambda row: row.multiple)
            others = [row.name.removeprefix("gradient/") for row in wrong if row is not worst]
            also = f"; also {and_more(others)}" if 0 < len(others) <= 2 else ""
            name = worst.name.removeprefix("gradient/")
            hook = "; register_hook has put a hook on it" * (name in self.ranks[0].hooked_parameters)
            are, first = ("is", "") if len(wrong) == 1 else ("are", "most of all ")
            alone = next((row for row in self.verdict.alone if row.name == worst.name), None)
            said = described(worst, alone)
            self.verdict.wrong.append(
                Wrong(
                    f"{len(wrong)} of {len(rows)} gradients {are} too far from the reference, {first}{name}: {said}{hook}{self.counted}{also}"
                )
            )
