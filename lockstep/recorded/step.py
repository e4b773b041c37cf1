"""Judge a recorded run: the recorded model in float64, by one process, on the micro batches that the run saw.

The gradient of a step is compared with what its micro batches give (lockstep/verdict/normalisation.py), tensor by
tensor. The yardstick of a tensor is one process in the run's own dtype on the same micro batches. The update is compared
with the same optimizer's step in float64 from the gradients that the run had.
"""

import contextlib
import functools
import math

import torch

from lockstep.ground.errors import UserError
from lockstep.ground.words import and_more
from lockstep.plan.resources import free_bytes
from lockstep.recorded import far_gradients, old_weights, redrawn, update
from lockstep.recorded.calls import Calls
from lockstep.recorded.counts import Counts
from lockstep.recorded.free_pass import FreePass, columns_of
from lockstep.recorded.loss_weights import LossWeights
from lockstep.recorded.model import tf32_of
from lockstep.recorded.other_stages import OtherStages
from lockstep.recorded.own_loss import Loss
from lockstep.recorded.ranks import Ranks
from lockstep.recorded.reduced import Reduction
from lockstep.recorder.micro_batch import LOG_PROBS, data_parallel_shares
from lockstep.recorder.recording import Recording
from lockstep.verdict import draws, normalisation
from lockstep.verdict.gpu_arithmetic import arithmetic_of
from lockstep.verdict.judgement import Judgement, zeros_of
from lockstep.verdict.lazy import Lazy
from lockstep.verdict.module_results import following, sentence
from lockstep.verdict.normalisation import Gradients, Sum
from lockstep.verdict.rows import StepVerdict, Wrong


def judge(
    recording: Recording,
    step: int,
    expect: str | None = None,
    loss: Loss | None = None,
    memory: float | None = None,
    others: OtherStages | None = None,
) -> StepVerdict:
    """Return the verdict on a recorded step.

    `expect` is the weighting that was meant; None: any known one will do. `loss` is the loop's own. A model whose weights,
    in float64 and in the run's dtype, take more than a quarter of `memory` (bytes; default: half of what is free) is
    computed unit by unit. `others` is for a stage of a pipeline. Raises UserError for a model that cannot be computed again.
    """
    memory = free_bytes() / 2 if memory is None else memory
    streamed = bytes_to_judge(recording) > memory
    verdict = _Step(recording, step, loss, streamed, others).judge(expect)
    if redrawn.may_be_chance(verdict):
        # The weights may be at the edge of where the model can be computed.
        with contextlib.suppress(UserError):
            verdict = _Step(recording, step, loss, streamed, others, redraws=True).judge(expect)
    return verdict


def bytes_to_judge(recording: Recording) -> int:
    """Return about how many bytes it takes to judge a step if the model is computed as a whole."""
    # The weights in float64 and as the model has them; gradients, and what is computed in between, need memory, too.
    return 4 * sum(weight.numel() * (8 + weight.itemsize) for weight in recording.parameters.values())


def _why_unusable(gradients: Gradients) -> str:
    """Return why these gradients cannot be judged, as a sentence; "" if they can."""
    broken = next((name for name, tensor in gradients.items() if not tensor.isfinite().all()), None)
    if broken is not None:
        return f"the gradient of {broken} is not finite"
    return "" if any(map(torch.any, gradients.values())) else "no parameter has a gradient other than zero"


def _why_none_left(gradients: Gradients, *, is_fsdp: bool) -> str:
    """Return why no gradient is left, though one arrived at what the model returned; "" if some are left.

    It is the end of a sentence. `is_fsdp`: FSDP2 reduces gradients.
    """
    if any(map(torch.any, gradients.values())):
        return ""
    if gradients:
        return ": they were set to zero between the backward pass and the optimizer's step"
    unreduced = ", or FSDP2 has not reduced them, as set_requires_gradient_sync(False) says" * is_fsdp
    return f": they were set to None before the optimizer's step, or it steps before the backward pass{unreduced}"


class _Step:
    """One recorded step, which is judged once."""

    def __init__(
        self,
        recording: Recording,
        step: int,
        loss: Loss | None,
        streamed: bool,
        others: OtherStages | None,
        *,
        redraws: bool = False,
    ):
        self.recording, self.ranks, self.loss = recording, recording.steps[step - 1], loss
        self.others = others  # of the pipeline that the model is a stage of
        self.streamed = streamed  # memory has one unit of the model at a time
        self.redraws = redraws  # the yardstick is the farthest of several draws
        every = recording.micro_batches(step)
        self.thrown_away = (
            [micro_batch for micro_batch in every if micro_batch.record.zeroed] if self._discards() else []
        )
        every = [micro_batch for micro_batch in every if not (self.thrown_away and micro_batch.record.zeroed)]
        self.unused = [micro_batch for micro_batch in every if not micro_batch.record.used]
        used = [micro_batch for micro_batch in every if micro_batch.record.used]
        pieces = max(
            1 if micro_batch.piece is None else len(micro_batch.piece.members) for micro_batch in used
        )
        number = len({id(micro_batch.first) for micro_batch in used})
        self.verdict = StepVerdict(
            step, micro_batches=number, shares=len(set(data_parallel_shares(used))), pieces=pieces
        )
        wholes = {
            id(micro_batch.first): micro_batch.piece.members
            for micro_batch in used
            if micro_batch.piece is not None
        }
        cut = (
            ranks
            for whole in wholes.values()
            for ranks in zip(*(piece.ranks for piece in whole), strict=False)
        )
        self.verdict.cut = list(dict.fromkeys(cut))
        # Zeros do not show how a micro batch is weighed, as where all advantages are zero, or no label counts.
        self.micro = [micro_batch for micro_batch in used if not micro_batch.is_zero] or used
        # Pieces of the same samples follow each other.
        self.micro.sort(key=lambda micro_batch: (micro_batch.first.ranks[0], micro_batch.number))
        self.calls = Calls(recording, self.verdict, self.micro)
        self.rank_checks = Ranks(recording, self.verdict, self.micro, streamed=streamed)
        # What is wrong with the norm of clipping. It is said after what may have caused it.
        self.norm_problems: list[str] = []
        # How much each micro batch counts in the worst gradient, as the end of a sentence about it
        self.counted = ""
        self.by_hand = False  # whether the loop clipped by itself
        self.only_in_loss: list[str] = []  # parameters that the loop's loss alone depends on

    def _discards(self) -> bool:
        """Whether gradients that are set to zero before the step are those of passes that do not belong to it.

        A loop that sets gradients to zero so in each step does it too late.
        """
        steps = (
            [micro_batch for record in records.values() for micro_batch in record.micro_batches]
            for records in self.recording.steps
        )
        is_rare = any(not any(micro_batch.zeroed for micro_batch in step) for step in steps)
        return is_rare and all(
            any(micro_batch.used and not micro_batch.zeroed for micro_batch in record.micro_batches)
            for record in self.ranks.values()
        )

    def judge(self, expect: str | None) -> StepVerdict:
        verdict, ranks = self.verdict, self.rank_checks
        weights, gradients = ranks.agreed("weight"), ranks.agreed("gradient")
        self._require_shapes(weights)
        if self.ranks[0].hooked:
            verdict.notes.append(
                f"a forward hook changes what {and_more(self.ranks[0].hooked)} returns, and the reference has no hooks: "
                "if that is meant, let the module's forward method do it"
            )
        if self.thrown_away:
            number = len({micro_batch.number for micro_batch in self.thrown_away})
            verdict.notes.append(
                f"the first {number} micro batches of this step count for nothing: their gradient was set to zero before the step, which the loop does not do in every step"
            )
        self.calls.leave_the_rest()
        self.calls.judge_launch()
        ranks.judge_clips()
        self.gradients = ranks.before_clipping_by_value(gradients)
        verdict.lowered = sorted(self._lowered())
        in_tf32 = bool(tf32_of(self.recording, self.recording.skeleton))
        verdict.arithmetic = arithmetic_of(
            self.recording.origin.device, single=not verdict.lowered, tf32=in_tf32
        )
        problem = _why_unusable(self.gradients)
        optimizers = self.ranks[0].optimizers
        copies = (
            0
            if any(optimizer.held for optimizer in optimizers)
            else sum(optimizer.strangers for optimizer in optimizers)
        )
        if problem and copies:
            raise UserError(
                f"{problem}, and the optimizer holds {copies} tensors that are none of the model's: an update of copies of the weights cannot be judged; "
                "record a run whose optimizer holds the model's parameters"
            )
        if problem and all(micro_batch.is_zero for micro_batch in self.micro):
            return self._leave("nothing but zeros arrives at what the model returned")
        if (
            problem
            and all(micro_batch.record.loss == 0 for micro_batch in self.micro)
            and not self._arrives()
        ):
            return self._leave("its loss and its gradient are 0")
        if problem and self._arrives() is False:
            return self._leave("no gradient other than zero arrives at any module, as where no label counts")
        if problem:
            verdict.wrong.append(
                Wrong(problem, _why_none_left(self.gradients, is_fsdp=bool(self.ranks[0].data_parallel)))
            )
            return verdict
        self.calls.require_returned()
        self.calls.judge_unused(self.unused)
        ranks.judge_skipped()
        self.calls.judge_modes()
        self.calls.note_draws()
        self.calls.note_losses()
        self.calls.note_scalars()
        if (
            ranks.untied(weights)
            or self.calls.frozen_apart()
            or ranks.clipped_in_parts(gradients)
            or self.calls.parted()
            or self.calls.drawn_apart()
        ):
            return verdict
        dtypes = {parameter.dtype for parameter in self.recording.parameters.values()}
        for micro_batch in self.micro:
            draws.require_known(micro_batch, self.ranks[0].data_parallel, dtypes)
        nominal, after_modules = self._judge_free(weights, expect)
        missing = self._missing(weights)
        for result in (*self.free.reference_results, *self.free.yardstick_results):
            result.gradients = {}  # they take the most room
        self._judge_alone(nominal, after_modules)
        before = len(verdict.wrong)
        verdict.wrong += missing + ranks.update_problems
        update.judge(self.recording, verdict, weights, gradients, streamed=self.streamed)
        # A weight that no optimizer holds may be why the norm is another.
        is_unheld = any(sentence.startswith(update.UNHELD) for sentence in verdict.wrong[before:])
        place = len(verdict.wrong) if is_unheld else before
        verdict.wrong[place:place] = self.norm_problems
        self._say_unjudged()
        return verdict

    def _arrives(self) -> bool | None:
        """Whether a gradient other than zero arrived at a module; None if no gradient at a module was recorded."""
        recording, step = self.recording, self.verdict.step
        places = ((rank, name) for rank, record in self.ranks.items() for name in record.places)
        parts = (recording.part(rank, step, name) for rank, name in places if name.startswith("backward/"))
        are_nonzero = [bool(part.any()) for part in parts if part is not None]
        return any(are_nonzero) if are_nonzero else None

    def _leave(self, why: str) -> StepVerdict:
        """Return the verdict that the step is not judged, and why."""
        self.verdict.nothing = True
        self.verdict.leave(f"step {self.verdict.step} is not judged: {why}")
        return self.verdict

    def _require_shapes(self, weights: Gradients) -> None:
        """Raise UserError for a weight that has another shape than when the recording began."""
        shapes = {name: parameter.shape for name, parameter in self.recording.parameters.items()}
        name = next((name for name, w in weights.items() if w.shape != shapes.get(name, w.shape)), None)
        if name is not None:
            raise UserError(
                f"{name} has the shape {list(weights[name].shape)} in step {self.verdict.step}, and {list(shapes[name])} when the recording began: where this shard lies in the whole was not found, "
                "because the weights were changed after the recording began; begin the recording after weights are loaded or initialised"
            )

    def _say_unjudged(self) -> None:
        """Say which parts of the gradient, and which tensors, are not judged."""
        beside = {name for micro_batch in self.micro for name in micro_batch.direct_gradients}
        if beside and self.loss is None:
            self.verdict.leave(
                f"the part of the gradient of {and_more(sorted(beside))} that the loop's own loss gives it by itself is not judged"
            )
        if self.only_in_loss:
            self.verdict.leave(
                f"the gradient of {and_more(self.only_in_loss)}, which the loop's loss alone depends on, is not judged"
            )
        if self.ranks[0].of_others:
            self.verdict.leave(
                f"tensors of other models, whose optimizers step, too, are not judged: {self.ranks[0].of_others}"
            )

    def _judge_free(self, weights: Gradients, expect: str | None) -> tuple[torch.Tensor | None, int]:
        """Judge the whole computation, from the batch to the gradients.

        Returns (the weights that the losses of the micro batches should have in the gradient, None if they are not known;
        the place among the sentences of the verdict after those about modules).
        """
        verdict = self.verdict
        self.free = FreePass(
            self.recording,
            verdict,
            self.micro,
            weights,
            self.loss,
            streamed=self.streamed,
            redraws=self.redraws,
        )
        modules_wrong = self.free.judge(self.rank_checks)
        after_modules = len(verdict.wrong)
        beside = self._leave_loss_out() | self._leave_shared_out()
        self.clipped = {name: self.ranks[0].clipped(name) for name in self.gradients}
        columns = columns_of(self.free.reference_results)
        made_of = functools.partial(Sum, self.gradients, columns, factors=self.clipped)
        losses = len(self.micro)
        arrived = [result.arrived for result in self.free.reference_results]
        self.reduction = Reduction(self.recording, self.gradients, arrived, verdict.shares)
        fitted = normalisation.fit(self.gradients, columns, self.clipped, losses=losses)
        yardstick = self._yardstick(fitted.weights)
        self.calls.judge_samples()
        if not self.free.losses_first:
            self.free.judge_losses()
        loss_weights, nominal = fitted.weights, None
        # Gradients that follow from wrong modules say nothing of the loop.
        if not modules_wrong:
            again = normalisation.fit(yardstick, columns, self.clipped, like=fitted, losses=losses)
            numbers = {len(records[0].micro_batches) for records in self.recording.steps}
            elsewhere = max(numbers - {len(self.ranks[0].micro_batches)}, default=0)
            norm = functools.partial(self.rank_checks.norm_of_steps, self.gradients.keys())
            weighed = LossWeights(
                self.rank_checks, self.free.reference_results, made_of, elsewhere, norm, beside, self.others
            )
            finest, finest_weights = self.reduction.finest(self.gradients), fitted.weights
            if len(finest) < len(self.gradients):
                finest_weights = normalisation.fit(finest, columns, self.clipped, losses=losses).weights
            loss_weights = weighed.judge(fitted, again, expect, finest_weights)
            yardstick = self._yardstick(loss_weights)
            self.norm_problems, nominal = weighed.norm_problems, weighed.nominal
            self.by_hand = weighed.by_hand != 1
            counts = Counts(self.rank_checks, self.gradients, self.clipped, columns, weighed)
            if weighed.unexplained:
                message = verdict.wrong.pop()
                verdict.wrong.append(Wrong(message, counts.in_shards(self.gradients)))
            term_weights = fitted.weights[len(self.micro) :]
            means = self._means_of_ranks()
            if any(
                self._are_right(means, torch.cat([known, term_weights])) for known in weighed.known if means
            ):
                # No rank is the one to blame.
                self.rank_checks.say_of_unreduced(": each rank has its own, and their mean is right")
            elif self.rank_checks.unreduced:
                counts.on_odd_rank(fitted.weights)
        if nominal is not None:
            arrived = [1.0 if x.loss is None else x.arrived for x in self.free.reference_results]
            keys = [(called.ranks[0], called.number) for called in self.micro]
            of_arrived = (weight / there for weight, there in zip(nominal.tolist(), arrived, strict=True))
            verdict.weights = dict(zip(keys, of_arrived, strict=True))
        reference = made_of(loss_weights)
        rows = verdict.judged(self.gradients, reference, yardstick, kind="gradient/")
        verdict.rows += rows
        far_gradients.judge_kept(rows, self.rank_checks, self.gradients, columns, self.clipped)
        if nominal is not None:
            self.counted = counts.in_worst(rows, nominal)
        is_wrong = len(verdict.wrong) > after_modules or any(row.too_far for row in rows)
        if is_wrong and not modules_wrong and not verdict.lowered:
            rounding = far_gradients.rounding(self.rank_checks, rows, self.gradients, self.clipped)
            self.verdict.wrong[after_modules:after_modules] = [rounding] * bool(rounding)
        if 2 * sum(row.too_far for row in rows) > len(rows):
            verdict.wrong[after_modules:after_modules] = self.rank_checks.clipped_apart()
        return nominal, after_modules

    def _yardstick(self, weights: torch.Tensor) -> Gradients:
        """Return the gradients of the yardstick for these weights of losses and terms, rounded as in the run where it sums in 16 bits."""
        terms = Sum(self.gradients, columns_of(self.free.yardstick_results), weights, self.clipped)
        return (
            self.reduction.rounded(terms, weights[: len(self.micro)]) if self.reduction.in_16_bits else terms
        )

    def _means_of_ranks(self) -> dict[str, torch.Tensor]:
        """Return the means over the ranks of gradients that were not reduced; none if they were clipped since."""
        if not self.rank_checks.unreduced or self.ranks[0].clips:
            return {}
        step = self.verdict.step
        return {
            name: self.recording.whole(step, f"gradient/{name}", mean=True)[0] for name in self.verdict.differ
        }

    def _are_right(self, means: dict[str, torch.Tensor], weights: torch.Tensor) -> bool:
        """Whether these are the gradients for `weights` of the micro batches' losses."""
        reference, yardstick = (
            Sum(means, columns_of(passes), weights)
            for passes in (self.free.reference_results, self.free.yardstick_results)
        )
        rows = self.verdict.judged(means, reference, yardstick, kind="gradient/")
        return not any(row.too_far for row in rows)

    def _leave_loss_out(self) -> dict[str, float]:
        """Leave out the parameters that the loop's loss alone depends on, such as the weights of its terms.

        Returns the norms of their gradients.
        """
        if any(result.loss is not None for result in self.free.reference_results):
            return {}
        used = {name for result in self.free.reference_results for name in result.gradients}
        every, alone = self.gradients, [name for name in self.gradients if name not in used]
        if not used or not alone:
            return {}
        self.only_in_loss = [name for name in alone if every[name].any()]
        return self._leave_out(alone)

    def _leave_out(self, names: list[str]) -> dict[str, float]:
        """Leave out the gradients with these names. Returns the norms of those that there are."""
        every = self.gradients
        self.gradients = Lazy((name for name in every if name not in names), lambda name: every[name])
        return {name: float(every[name].double().norm()) for name in names if name in every}

    def _leave_shared_out(self) -> dict[str, float]:
        """Leave out the parameters that another stage of the pipeline has, too. Returns the norms of their gradients."""
        shared = sorted(self.others.shared) if self.others else []
        if not shared:
            return {}
        norms = self._leave_out(shared)
        if not self.gradients:
            raise UserError(
                f"{self.recording.folder}: another stage has all weights of this one, too, which cannot be judged"
            )
        self.verdict.leave(f"the gradient of {and_more(shared)}, which another stage has, too, is not judged")
        return norms

    def _judge_alone(self, nominal: torch.Tensor | None, after_modules: int) -> None:
        """Judge each module by itself, and say which gradients are too far.

        `nominal` and `after_modules` are what `_judge_free` returns.
        """
        if any(math.isnan(result.arrived) for result in self.free.reference_results):
            self.verdict.notes.append(
                "modules are not judged by themselves: what arrived at the loss is not known"
            )
            far_gradients.say(self.verdict, self.ranks[0].hooked_parameters, self.counted)
            return
        for micro_batch, reference, yardstick in zip(
            self.micro, self.free.reference_results, self.free.yardstick_results, strict=True
        ):
            self.free.alone.add(micro_batch, *self.free.recorded(micro_batch), reference, yardstick)
        # A piece's loss alone has no gradient there, and a head that TRL replaced rounds otherwise.
        is_known = self.verdict.pieces == 1 and not any(
            LOG_PROBS in micro_batch.output_gradients for micro_batch in self.micro
        )
        distances = {row.name: row.distance for row in self.verdict.rows if row.kind == "gradient"}
        entries = {
            f"gradient/{name}": {"shape": list(parameter.shape), "dtype": "F64"}
            for name, parameter in self.recording.parameters.items()
        }
        zeros = zeros_of(distances, entries, self.verdict.precision)
        rows = self.free.alone.judge(
            self.gradients,
            nominal if is_known else None,
            self.clipped,
            zeros,
            self.reduction,
            by_hand=self.by_hand,
        )
        self.verdict.alone = rows
        far_gradients.say(self.verdict, self.ranks[0].hooked_parameters, self.counted)
        first = next((row for row in rows if row.too_far), None)
        if first is not None:
            place = after_modules if first.kind != "gradient" else len(self.verdict.wrong)
            rounding = (
                far_gradients.rounding(self.rank_checks, rows, self.gradients, self.clipped)
                if self.verdict.lowered and first.kind == "gradient"
                else ""
            )
            end = following(rows, [row for row in self.verdict.rows if row.too_far])
            self.verdict.wrong[place:place] = [*[rounding] * bool(rounding), Wrong(sentence(rows) + end)]
            if first.which_pass == "forward":
                self.verdict.wrong[:0] = self._old_weights(first)

    def _old_weights(self, row: Judgement) -> list[str]:
        """Return a sentence if a module's output is that of weights from before an update, and [] if not."""
        ranks = {rank for rank, multiple in row.ranks.items() if not multiple <= 1}
        called = next(
            (called for called in self.micro if called.number == 0 and ranks & {*called.ranks}), None
        )
        if called is None or self.verdict.pieces > 1 or self.verdict.step == 1:
            return []
        return old_weights.explain(self.free.yardstick, called, row.name.replace("/", "/0/", 1))

    def _lowered(self) -> set[str]:
        """Return the dtypes other than float32 and float64 that the step was computed in."""
        about = self.micro[0].record
        names = {about.autocast, *about.param_dtypes, *(str(grad.dtype) for grad in self.gradients.values())}
        names |= {policy.reduce for policy in about.policies.values()}
        return {name for name in names if name is not None} - {"torch.float32", "torch.float64"}

    def _missing(self, weights: Gradients) -> list[str]:
        """Return what is wrong with gradients that are missing, in sentences.

        A parameter that has a gradient in the reference must have one on every rank that holds it.
        """
        wrong = []
        waiting = self.recording.waiting(self.verdict.step)
        shared = self.others.shared if self.others else ()
        beside = {*self.ranks[0].frozen, *self.only_in_loss, *waiting, *shared}
        unused = sorted(weights.keys() - self.gradients.keys() - beside)
        if unused:
            self.verdict.notes.append(
                f"nothing that was trained depends on {and_more(unused)}: without a gradient"
            )
        for name in (key for key in weights if key not in waiting):
            holders = self.recording.holders(self.verdict.step).get(name, self.ranks)
            without = [
                rank
                for rank, record in self.ranks.items()
                if f"weight/{name}" in record.places
                and f"gradient/{name}" not in record.places
                and (rank in holders or name in record.frozen)
            ]
            if not without:
                continue
            if any(
                bool(result.gradients[name].any())
                for result in self.free.reference_results
                if name in result.gradients
            ):
                wrong.append(f"{name} has no gradient on rank {without[0]}, though the loss depends on it")
            elif name in self.recording.names(self.verdict.step, "gradient"):
                wrong.append(
                    f"{name} has a gradient, of zeros, on some ranks, and none on rank {without[0]}: its optimizer does not step it"
                )
        return wrong
