"""Judge a recorded run: the recorded model in float64, by one process, on the micro batches that the run saw.

The gradient of a step is compared with what its micro batches give (lockstep/verdict/normalisation.py), tensor by tensor. The yardstick
of a tensor is one process in the run's own dtype on the same micro batches. The update is compared with the same optimizer's step in
float64 from the gradients that the run had.
"""

import contextlib
import functools
import math
import statistics

import torch

from lockstep.ground.errors import UserError
from lockstep.ground.words import and_more
from lockstep.plan.resources import free_bytes
from lockstep.recorded import redrawn, update
from lockstep.recorded.counts import Counts
from lockstep.recorded.free import Free, columns_of
from lockstep.recorded.model import tf32_of
from lockstep.recorded.own_loss import Loss
from lockstep.recorded.ranks import Ranks
from lockstep.recorded.weights import Weighed
from lockstep.recorder.called import LOG_PROBS, shares_of
from lockstep.recorder.recording import Recording
from lockstep.verdict import draws, normalisation
from lockstep.verdict.alone import following, sentence
from lockstep.verdict.gpu_arithmetic import arithmetic_of
from lockstep.verdict.judgement import Judgement, zeros_of
from lockstep.verdict.lazy import Lazy
from lockstep.verdict.normalisation import Gradients, Sum
from lockstep.verdict.rows import StepVerdict, Wrong, described

# Machine epsilons of a dtype that a gradient may be off by that is rounded to it, and then reduced
ROUNDED = 4
# Of what is left of a gradient without the one of the step before, that may be left with it
KEPT = 0.1


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
    # With gradients and what is computed in between
    streamed = 4 * _bytes_of_weights(recording) > memory
    verdict = _Step(recording, step, loss, streamed).judge(expect)
    if redrawn.may_be_chance(verdict):
        # weights at the edge of where the model can be computed
        with contextlib.suppress(UserError):
            verdict = _Step(recording, step, loss, streamed, redraws=True).judge(expect)
    return verdict


def _bytes_of_weights(recording: Recording) -> int:
    """In float64 and as the model has them."""
    return sum(one.numel() * (8 + one.itemsize) for one in recording.skeleton.parameters())


def _unusable(gradients: Gradients) -> str:
    """Why nothing can be said of what these gradients are made of, in a sentence; "" if it can."""
    broken = next((name for name, tensor in gradients.items() if not tensor.isfinite().all()), None)
    if broken is not None:
        return f"the gradient of {broken} is not finite"
    return "" if any(map(torch.any, gradients.values())) else "no parameter has a gradient other than zero"


def _taken_off(gradients: Gradients) -> str:
    """Why none is left of gradients that follow from what arrived at what the model returned, to be read after that; "" if some are."""
    if any(map(torch.any, gradients.values())):
        return ""
    if gradients:
        return ": they were set to zero between the backward pass and the optimizer's step"
    return ": they were set to None before the optimizer's step, or FSDP2 has not reduced them, as set_requires_gradient_sync(False) says"


class _Step:
    def __init__(
        self, recording: Recording, step: int, loss: Loss | None, streamed: bool, *, redraws: bool = False
    ):
        self.recording, self.ranks, self.loss = recording, recording.steps[step - 1], loss
        self.streamed = streamed  # memory has one unit of the model at a time
        self.redraws = redraws  # the yardstick is the farthest of several draws
        called = recording.micro_batches(step)
        self.thrown_away = [one for one in called if one.about.zeroed] if self._throws_away() else []
        called = [one for one in called if not (self.thrown_away and one.about.zeroed)]
        self.unused = [one for one in called if not one.about.used]
        used = [one for one in called if one.about.used]
        pieces = max(1 if one.piece is None else len(one.piece.all) for one in used)
        number = len({id(one.first) for one in used})
        self.verdict = StepVerdict(
            step, micro_batches=number, shares=len(set(shares_of(used))), pieces=pieces
        )
        wholes = {id(one.first): one.piece.all for one in used if one.piece is not None}
        cut = (of for all in wholes.values() for of in zip(*(one.ranks for one in all), strict=False))
        self.verdict.cut = list(dict.fromkeys(cut))
        # Zeros say nothing of how a micro batch is weighed, as where all advantages are zero, or no label counts
        self.micro = [one for one in used if not one.is_zero] or used
        # pieces beside each other
        self.micro.sort(key=lambda one: (one.first.ranks[0], one.number))
        self.of_ranks = Ranks(recording, self.verdict, self.micro, streamed=streamed)
        # What is wrong with the norm of clipping: after what may have caused it
        self.of_norm: list[str] = []
        # How much each micro batch counts in the worst gradient, to be read after it
        self.counted = ""
        self.by_hand = False  # whether the loop clipped by itself
        self.alone_in_loss: list[str] = []  # parameters

    def _throws_away(self) -> bool:
        """Whether gradients that are set to zero before the step are of passes beside it. In each step, it would be done too late."""
        steps = (
            [one for rank in ranks.values() for one in rank.micro_batches] for ranks in self.recording.steps
        )
        seldom = any(not any(one.zeroed for one in micro) for micro in steps)
        return seldom and all(
            any(one.used and not one.zeroed for one in rank.micro_batches) for rank in self.ranks.values()
        )

    def judge(self, expect: str | None) -> StepVerdict:
        verdict, ranks = self.verdict, self.of_ranks
        weights, gradients = ranks.agreed("weight"), ranks.agreed("gradient")
        odd = next((name for name, weight in weights.items() if weight.is_complex()), None)
        if odd is not None:
            raise UserError(
                f"{odd} is complex, and what is computed with such parameters cannot be judged yet"
            )
        self._require_shapes(weights)
        if self.ranks[0].hooked:
            verdict.notes.append(
                f"a forward hook changes what {and_more(self.ranks[0].hooked)} returns, and the reference has no hooks: "
                "if that is meant, let the module's forward method do it"
            )
        if self.thrown_away:
            number = len({one.number for one in self.thrown_away})
            verdict.notes.append(
                f"the first {number} of the micro batches count for nothing: their gradient was set to zero, as not in each step"
            )
        ranks.judge_launch()
        ranks.judge_clips()
        self.gradients = ranks.before_clipping_by_value(gradients)
        verdict.lowered = sorted(self._lowered())
        in_tf32 = bool(tf32_of(self.recording, self.recording.skeleton))
        verdict.arithmetic = arithmetic_of(
            self.recording.origin.device, single=not verdict.lowered, tf32=in_tf32
        )
        problem = _unusable(self.gradients)
        optimizers = self.ranks[0].optimizers
        copies = 0 if any(one.held for one in optimizers) else sum(one.strangers for one in optimizers)
        if problem and copies:
            raise UserError(
                f"{problem}, and the optimizer holds {copies} tensors that are none of the model's: an update of copies of the weights cannot be judged; "
                "record a run whose optimizer holds the model's parameters"
            )
        if problem and all(one.is_zero for one in self.micro):
            return self._leave("nothing but zeros arrives at what the model returned")
        if problem and all(one.about.loss == 0 for one in self.micro) and not self._arrives():
            return self._leave("its loss and its gradient are 0")
        if problem and self._arrives() is False:
            return self._leave("no gradient other than zero arrives at any module, as where no label counts")
        if problem:
            verdict.wrong.append(Wrong(problem, _taken_off(self.gradients)))
            return verdict
        ranks.require_returned()
        ranks.judge_unused(self.unused)
        ranks.judge_skipped()
        ranks.judge_modes()
        ranks.note_draws()
        ranks.note_losses()
        if (
            ranks.untied(weights)
            or ranks.frozen_apart()
            or ranks.clipped_in_parts(gradients)
            or ranks.parted()
            or ranks.drawn_apart()
        ):
            return verdict
        dtypes = {one.dtype for one in self.recording.skeleton.parameters()}
        for called in self.micro:
            draws.require_known(called, self.ranks[0].data_parallel, dtypes)
        nominal, place = self._judge_free(weights, expect)
        missing = self._missing(weights)
        for one in (*self.free.exact, *self.free.near):
            one.gradients = {}  # they take the most room
        self._judge_alone(nominal, place)
        verdict.wrong += self.of_norm + missing + ranks.of_update
        update.judge(self.recording, verdict, weights, gradients, streamed=self.streamed)
        self._say_unseen()
        return verdict

    def _arrives(self) -> bool | None:
        """Whether a gradient other than zero arrived at a module; None if none was recorded."""
        recording, step = self.recording, self.verdict.step
        places = ((rank, name) for rank, about in self.ranks.items() for name in about.places)
        parts = (recording.part(rank, step, name) for rank, name in places if name.startswith("backward/"))
        found = [bool(one.any()) for one in parts if one is not None]
        return any(found) if found else None

    def _leave(self, why: str) -> StepVerdict:
        self.verdict.nothing = True
        self.verdict.leave(f"step {self.verdict.step} is not judged: {why}")
        return self.verdict

    def _require_shapes(self, weights: Gradients) -> None:
        whole = {name: one.shape for name, one in self.recording.skeleton.named_parameters()}
        odd = next((name for name, one in weights.items() if one.shape != whole.get(name, one.shape)), None)
        if odd is not None:
            raise UserError(
                f"{odd} has the shape {list(weights[odd].shape)} in step {self.verdict.step}, and {list(whole[odd])} when the recording began: which shard it is was not found, "
                "as none of the weights were then what they are now; begin the recording after weights are loaded or made"
            )

    def _say_unseen(self) -> None:
        """Which parts of the gradient, and which tensors, are not judged."""
        beside = {name for one in self.micro for name in one.beside}
        if beside and self.loss is None:
            self.verdict.leave(
                f"the part of the gradient of {and_more(sorted(beside))} that the loop's own loss gives it by itself is not judged"
            )
        if self.alone_in_loss:
            self.verdict.leave(
                f"the gradient of {and_more(self.alone_in_loss)}, which the loop's loss alone depends on, is not judged"
            )
        if self.ranks[0].of_others:
            self.verdict.leave(
                f"tensors of other models, whose optimizers step, too, are not judged: {self.ranks[0].of_others}"
            )

    def _judge_free(self, weights: Gradients, expect: str | None) -> tuple[torch.Tensor | None, int]:
        """The whole computation, from the batch to the gradients.

        Returns (the weights that the losses of the micro batches should have in the gradient, None if they are not known; how many sentences say
        what is wrong in modules).
        """
        verdict = self.verdict
        self.free = Free(
            self.recording,
            verdict,
            self.micro,
            weights,
            self.loss,
            streamed=self.streamed,
            redraws=self.redraws,
        )
        modules_wrong = self.free.judge(self.of_ranks)
        after_modules = len(verdict.wrong)
        beside = self._leave_loss_out()
        self.clipped = {name: self.ranks[0].clipped(name) for name in self.gradients}
        columns = columns_of(self.free.exact)
        made_of = functools.partial(Sum, self.gradients, columns, factors=self.clipped)
        losses = len(self.micro)
        fitted = normalisation.fit(self.gradients, columns, self.clipped, losses=losses)
        yardstick = Sum(self.gradients, columns_of(self.free.near), fitted.weights, self.clipped)
        self.of_ranks.judge_samples()
        self.free.judge_losses()
        weights_of, nominal = fitted.weights, None
        if not modules_wrong:  # what follows from them says nothing of the loop
            again = normalisation.fit(yardstick, columns, self.clipped, like=fitted, losses=losses)
            numbers = {len(ranks[0].micro_batches) for ranks in self.recording.steps}
            elsewhere = max(numbers - {len(self.ranks[0].micro_batches)}, default=0)
            norm = functools.partial(self.of_ranks.norm_of_steps, self.gradients.keys())
            weighed = Weighed(
                verdict, self.ranks, self.micro, self.free.exact, made_of, elsewhere, norm, beside
            )
            weights_of = weighed.judge(fitted, again, expect)
            yardstick = Sum(self.gradients, columns_of(self.free.near), weights_of, self.clipped)
            self.of_norm, nominal = weighed.of_norm, weighed.nominal
            self.by_hand = weighed.by_hand != 1
            counts = Counts(self.of_ranks, self.gradients, self.clipped, columns, weighed)
            if weighed.unexplained:
                unknown = verdict.wrong.pop()
                verdict.wrong.append(Wrong(unknown, counts.in_shards(self.gradients)))
            terms = fitted.weights[len(self.micro) :]
            means = self._means_of_ranks()
            if any(self._are_right(means, torch.cat([known, terms])) for known in weighed.known if means):
                # No rank is the one to blame
                self.of_ranks.say_of_unreduced(": each rank has its own, and their mean is right")
            elif self.of_ranks.unreduced:
                counts.on_odd_rank(fitted.weights)
        right = made_of(weights_of)
        rows = verdict.gradients(self.gradients, right, yardstick)
        verdict.rows += rows
        self._judge_kept_gradient(rows)
        if nominal is not None:
            self.counted = counts.in_worst(rows, nominal)
        wrong = len(verdict.wrong) > after_modules or any(row.too_far for row in rows)
        if wrong and not modules_wrong and not verdict.lowered:
            rounding = self._rounding(rows)
            self.verdict.wrong[after_modules:after_modules] = [rounding] * bool(rounding)
        if 2 * sum(row.too_far for row in rows) > len(rows):
            verdict.wrong[after_modules:after_modules] = self.of_ranks.clipped_apart()
        return nominal, after_modules

    def _means_of_ranks(self) -> dict[str, torch.Tensor]:
        """Of the gradients that were not reduced, unless they were clipped since."""
        if not self.of_ranks.unreduced or self.ranks[0].clips:
            return {}
        step = self.verdict.step
        return {
            name: self.recording.whole(step, f"gradient/{name}", mean=True)[0] for name in self.verdict.differ
        }

    def _are_right(self, means: dict[str, torch.Tensor], weights: torch.Tensor) -> bool:
        """Whether these are the gradients for `weights` of the micro batches' losses."""
        right, near = (Sum(means, columns_of(of), weights) for of in (self.free.exact, self.free.near))
        rows = self.verdict.gradients(means, right, near)
        return not any(row.too_far for row in rows)

    def _leave_loss_out(self) -> dict[str, float]:
        """Leave out the parameters that the loop's loss alone depends on, such as the weights of its terms; returns the norms of their gradients."""
        if any(one.loss is not None for one in self.free.exact):
            return {}
        used = {name for one in self.free.exact for name in one.gradients}
        every, alone = self.gradients, [name for name in self.gradients if name not in used]
        if not used or not alone:
            return {}
        self.gradients = Lazy((name for name in every if name in used), lambda name: every[name])
        self.alone_in_loss = [name for name in alone if every[name].any()]
        return {name: float(every[name].double().norm()) for name in alone}

    def _judge_alone(self, nominal: torch.Tensor | None, after_modules: int) -> None:
        if any(math.isnan(one.arrived) for one in self.free.exact):
            self.verdict.notes.append(
                "modules are not judged by themselves: what arrived at the loss is not known"
            )
            self._say_gradients()
            return
        for called, right, near in zip(self.micro, self.free.exact, self.free.near, strict=True):
            self.free.alone.add(called, *self.free.recorded(called), right, near)
        # A piece's loss alone has no gradient there, and a head that TRL replaced rounds otherwise.
        known = self.verdict.pieces == 1 and not any(LOG_PROBS in one.arrived for one in self.micro)
        free = {row.name: row.distance for row in self.verdict.rows if row.kind == "gradient"}
        entries = {
            f"gradient/{name}": {"shape": list(one.shape), "dtype": "F64"}
            for name, one in self.recording.skeleton.named_parameters()
        }
        zeros = zeros_of(free, entries, self.verdict.precision)
        rows = self.free.alone.judge(
            self.gradients, nominal if known else None, self.clipped, zeros, by_hand=self.by_hand
        )
        self.verdict.alone = rows
        self._say_gradients()
        first = next((row for row in rows if row.too_far), None)
        if first is not None:
            place = after_modules if first.kind != "gradient" else len(self.verdict.wrong)
            rounding = self._rounding(rows) if self.verdict.lowered and first.kind == "gradient" else ""
            follow = following(rows, [row for row in self.verdict.rows if row.too_far])
            self.verdict.wrong[place:place] = [*[rounding] * bool(rounding), Wrong(sentence(rows) + follow)]

    def _lowered(self) -> set[str]:
        """The dtypes other than float32 and float64 that the step was computed in."""
        micro = self.micro[0].about
        found = {micro.autocast, micro.param_dtype, *(str(one.dtype) for one in self.gradients.values())}
        return {one for one in found if one is not None} - {"torch.float32", "torch.float64"}

    def _missing(self, weights: Gradients) -> list[str]:
        """What has a gradient in the reference has one on every rank that holds it."""
        found = []
        waiting = self.recording.waiting(self.verdict.step)
        beside = {*self.ranks[0].frozen, *self.alone_in_loss, *waiting}
        unused = sorted(weights.keys() - self.gradients.keys() - beside)
        if unused:
            self.verdict.notes.append(
                f"nothing that was trained depends on {and_more(unused)}: without a gradient"
            )
        for name in (one for one in weights if one not in waiting):
            holders = self.recording.holders(self.verdict.step).get(name, self.ranks)
            without = [
                rank
                for rank, about in self.ranks.items()
                if f"weight/{name}" in about.places
                and f"gradient/{name}" not in about.places
                and (rank in holders or name in about.frozen)
            ]
            if not without:
                continue
            if any(bool(one.gradients[name].any()) for one in self.free.exact if name in one.gradients):
                found.append(f"{name} has no gradient on rank {without[0]}, though the loss depends on it")
            elif name in self.recording.names(self.verdict.step, "gradient"):
                found.append(
                    f"{name} has a gradient, of zeros, on some ranks, and none on rank {without[0]}: its optimizer does not step it"
                )
        return found

    def _judge_kept_gradient(self, rows: list[Judgement]) -> None:
        """Whether what is too much in the gradients that are too far is that of the step before."""
        last = self.verdict.step - 1
        wrong = [row.name.removeprefix("gradient/") for row in rows if row.too_far]
        if last == 0 or not wrong or not set(wrong) <= set(self.recording.names(last, "gradient")):
            return
        own = Lazy(wrong, lambda name: self.gradients[name])
        kept = Lazy(wrong, lambda name: self.of_ranks.whole(last, f"gradient/{name}"))
        columns = columns_of(self.free.exact)
        without, with_it = (
            normalisation.fit(own, some, self.clipped, losses=len(columns))
            for some in (columns, [*columns, kept])
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

    def _rounding(self, rows: list[Judgement]) -> str:
        """Whether what is wrong with a gradient, by these rows, is that it was rounded to 16 bits after the backward pass; else ""."""
        # The median: a gradient that all but cancels is farther off, and 16 bits have no smaller number for it
        far = [one for one in rows if one.kind == "gradient" and one.too_far]
        off = statistics.median(one.distance.relative for one in far) if far else math.inf
        # Clipping comes after it
        before = Lazy(self.gradients, lambda name: self.gradients[name] / self.clipped[name])
        for dtype in (torch.bfloat16, torch.float16):
            if any(one.dtype == dtype for one in self.gradients.values()):
                continue
            near = off <= ROUNDED * torch.finfo(dtype).eps  # signs, too, are numbers of 16 bits
            if near and all(one.allclose(one.to(dtype).to(one.dtype), 3e-7, 0) for one in before.values()):
                how = "kept" if self.verdict.lowered else "computed"
                return (
                    f"all elements of the gradient are numbers of {dtype}, though it is {how} in float32: it was rounded after the backward pass, "
                    "as where its reduction is in 16 bits"
                )
        return ""

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
