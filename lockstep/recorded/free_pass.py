"""Compute the micro batches of a recorded step from their batches on, in float64 and in the run's dtypes, and judge the modules."""

import itertools
import math

import torch

from lockstep.ground.errors import UserError
from lockstep.ground.words import and_more
from lockstep.plan import resources
from lockstep.recorded import redrawn, task
from lockstep.recorded.forced_pass import ForcedPass
from lockstep.recorded.model import dtype_of
from lockstep.recorded.model_pass import ModelPass
from lockstep.recorded.own_loss import Loss
from lockstep.recorded.pieces import explain, explain_cache
from lockstep.recorded.ranks import Ranks
from lockstep.recorder.micro_batch import JoinedMicroBatch
from lockstep.recorder.module_hooks import module_of
from lockstep.recorder.recording import Recording
from lockstep.verdict.computed import Computed
from lockstep.verdict.distance import distance_of
from lockstep.verdict.judgement import FLOOR, MULTIPLE, UNIT, Judgement
from lockstep.verdict.modules import Modules, Tensors, as_pieces
from lockstep.verdict.normalisation import Gradients
from lockstep.verdict.rows import StepVerdict, Wrong

# The relative difference of two passes in float64 that compute the same
SAME = 1e-9
# The relative error of shards that are put together in the order of their ranks is below this. In another order, they are off by more than
# they are large.
IN_ORDER = 0.5
NOT_LINEAR = (
    "if twice the gradient arrives at what the model returns, gradients of parameters are not twice as large"
)


class FreePass:
    """The free passes over the micro batches of a step: from the batch on, where `ForcedPass` computes each module from what was recorded.

    `judge` adds rows and sentences to the verdict. `reference_results` and `yardstick_results` then have the result of each micro batch.
    `redraws`: the yardstick is the farthest of several draws (lockstep/recorded/redrawn.py).
    """

    def __init__(
        self,
        recording: Recording,
        verdict: StepVerdict,
        micro: list[JoinedMicroBatch],
        weights: Gradients,
        loss: Loss | None,
        *,
        streamed: bool,
        redraws: bool,
    ):
        self.recording, self.verdict, self.micro, self.loss = recording, verdict, micro, loss
        self.streamed, self.redraws = streamed, redraws
        self.reference, self.yardstick = (
            ModelPass(recording, verdict.step, weights, loss, exact=exact, streamed=streamed)
            for exact in (True, False)
        )
        self.reference.dtypes = self.yardstick.dtypes
        self.reference_results: list[Computed] = []
        self.yardstick_results: list[Computed] = []
        self.loss_noise = 0.0
        # Whether all outputs are right and gradients at them are not. A wrong loss then comes before these.
        self.losses_first = False
        # Outputs of modules of which each rank has a shard, and the dim
        self.cut: dict[str, int] = {}
        self.modules = Modules(verdict)
        self.alone = ForcedPass(verdict, self.reference, self.yardstick, len(recording.steps))

    def recorded(self, micro_batch: JoinedMicroBatch) -> tuple[Tensors, dict[str, torch.Tensor]]:
        """Return what modules returned for a micro batch and what arrived there, by name, and the choices among it, by module."""
        tensors = self.recording.of_modules(self.verdict.step, micro_batch)
        for name, shards in tensors.items():
            dim = self.cut.get(name.replace("backward/", "forward/", 1))
            if dim is not None:
                tensors[name] = [(micro_batch.ranks[0], torch.cat([shard for _, shard in shards], dim))]
                row = f"{name.partition('/')[0]}/{module_of(name)}"
                places = _places_of(shards, dim)
                known = self.verdict.shards.setdefault(row, places)
                self.verdict.shards[row] = places if places.keys() == known.keys() else {}
        told = {
            module_of(name): shards[0][1]
            for name, shards in tensors.items()
            if not shards[0][1].is_floating_point()
        }
        # The whole is told what all pieces chose.
        if micro_batch.piece is not None:
            pieces = [
                self.recording.of_modules(self.verdict.step, piece) for piece in micro_batch.piece.members
            ]
            for module, choice in told.items():
                name = f"forward/{micro_batch.number}/{module}"
                whole = micro_batch.piece.pieces.joined_rows([piece[name][0][1] for piece in pieces])
                told[module] = choice if whole is None else whole
        return tensors, told

    def judge(self, rank_checks: Ranks) -> bool:
        """Judge modules, the task and replicas. Return whether a module is wrong."""
        verdict, reference = self.verdict, self.reference
        if reference.kernels:
            verdict.notes.append(
                f"the model's attention was computed by {and_more(reference.kernels)}; the reference computes the same in plain torch"
            )
        for _, pieces in itertools.groupby(self.micro, key=lambda called: id(called.first)):
            self._judge_samples(list(pieces))
        task.shape_targets(reference.model, self.micro, self.reference_results)
        # Only the last stage of a pipeline has a task. Others return hidden states.
        if verdict.step == 1 and self.recording.steps[0][0].has_loss:
            task.judge(verdict, reference, self.micro, self.reference_results)
        task.judge_replicas(verdict, reference, self.micro)
        far = [row for row in self.modules.rows.values() if row.too_far]
        first = far[0] if far else None
        outputs_wrong = any(row.which_pass == "forward" for row in far)
        choices_wrong = any(choice.too_far for choice in self.modules.chosen)
        self.losses_first = bool(far) and not outputs_wrong and not choices_wrong
        if self.losses_first:
            self.judge_losses()
        before = len(verdict.wrong)
        is_wrong = self.modules.close()
        if first is not None and first.which_pass == "forward":
            verdict.wrong[before:before] = self._why(first, rank_checks)
            later = {*rank_checks.clip_problems}
            # Gradients differ between ranks because the outputs do that they come from.
            if rank_checks.unreduced:
                rank_checks.say_of_unreduced("", instead=True)
                later |= {sentence for sentence in verdict.wrong if sentence.startswith("gradients differ")}
            verdict.wrong.sort(key=lambda sentence: sentence in later)
        return is_wrong

    def _judge_samples(self, pieces: list[JoinedMicroBatch]) -> None:
        """Compute and judge a micro batch, or all pieces of one."""
        resources.share_memory()
        recorded = [self.recorded(called) for called in pieces]
        for called in pieces if self.reference.all_wide else ():
            if called.generator_state is not None:
                self.reference.note_draws(called)
        for called, (_, told) in zip(pieces, recorded, strict=True):
            for model_pass, results in (
                (self.yardstick, self.yardstick_results),
                (self.reference, self.reference_results),
            ):
                results.append(model_pass.compute(called, told))
            # The units of a streamed model are computed twice.
            if not self.streamed:
                task.note_buffers(self.verdict, called, self.reference, self.yardstick)
            if self.redraws:
                redrawn.draw_again(
                    self.yardstick, self.yardstick_results[-1], self.reference_results[-1], called, told
                )
        references, yardsticks = (
            self.reference_results[-len(pieces) :],
            self.yardstick_results[-len(pieces) :],
        )
        is_first = self.verdict.step == 1 and references[0] is self.reference_results[0]
        arrived = references[0].arrived
        if self._find_cut(recorded, references):
            recorded = [self.recorded(called) for called in pieces]
        for reference, yardstick in zip(references, yardsticks, strict=True):
            yardstick.terms = {name: yardstick.terms[name] for name in reference.terms}
        for computed in (references, yardsticks):
            as_pieces(computed, pieces, [tensors for tensors, _ in recorded])
        for called, (tensors, _), reference, yardstick in zip(
            pieces, recorded, references, yardsticks, strict=True
        ):
            self.modules.add(called.number, called.ranks, tensors, reference, yardstick)
            reference.arrived *= self.modules.scales.get((called.number, called.ranks[0]), 1.0)
            self.loss_noise = max(self.loss_noise, _loss_noise(reference, yardstick))
            # These take the most memory.
            for result in (reference, yardstick):
                result.modules, result.logits = {}, None
        if is_first:
            self._judge_linearity(pieces[0], recorded[0][1], arrived)

    def _find_cut(
        self, recorded: list[tuple[Tensors, dict[str, torch.Tensor]]], references: list[Computed]
    ) -> bool:
        """Find outputs that the ranks of a tensor-parallel group have shards of; return whether there are any.

        The gradient at such an output is cut likewise.
        """
        dims = {
            name: dim
            for (tensors, _), reference in zip(recorded, references, strict=True)
            for name, shards in tensors.items()
            if name.startswith("forward/") and name in reference.modules
            # Else the reference's output, which may be on disk, need not be read.
            if len(shards) > 1
            if (dim := _cut_dim([shard for _, shard in shards], reference.modules[name])) is not None
        }
        self.cut |= dims
        return bool(dims)

    def _judge_linearity(
        self, micro_batch: JoinedMicroBatch, told: dict[str, torch.Tensor], arrived: float
    ) -> None:
        """Judge whether the gradients are twice as large if twice the gradient arrives at what the model returns.

        `arrived` is what arrived at the loss in the run.
        """
        first = self.reference_results[0]
        name = _not_linear(self.reference, micro_batch, told, first)
        if name and arrived == 1 and first.loss is not None:
            self.verdict.notes.append(
                f"{NOT_LINEAR}, such as that of {name}; here 1 arrives, so this run is not affected"
            )
        elif name:
            self.verdict.wrong.append(
                f"{NOT_LINEAR}, such as that of {name}: a function's backward method forgets what it is given"
            )

    def _why(self, first: Judgement, rank_checks: Ranks) -> list[str]:
        """Return why the first output of a module that is wrong is wrong, as sentences; [] if it is not known."""
        ranks = [rank for rank, multiple in first.ranks.items() if not multiple <= 1]
        sentences = rank_checks.unlike(first.path, ranks)
        if sentences or self.verdict.pieces > 1 or self.verdict.step > 1:
            return sentences
        name = first.name.replace("/", "/0/", 1)
        wrong = (
            called for called in self.micro if called.number == 0 and first.ranks.get(called.ranks[0], 0) > 1
        )
        called = next(wrong, self.micro[0])
        return explain_cache(self.reference, called, name) or explain(self.reference, self.micro, name)

    def judge_losses(self) -> None:
        """Judge the losses of all micro batches and ranks.

        Every loss is a draw of the same rounding errors, and one may be small by chance. So what is tolerated follows from the largest
        error of the yardstick's losses, and at least from what the errors of its logits lead to expect.
        """
        pairs = [
            (reference.loss, yardstick.loss)
            for reference, yardstick in zip(self.reference_results, self.yardstick_results, strict=True)
            if reference.loss is not None and yardstick.loss is not None
        ]
        error = max(
            (abs(yardstick - reference) / abs(reference) for reference, yardstick in pairs if reference),
            default=0.0,
        )
        error = max(error, self.loss_noise)
        tolerated = MULTIPLE * error + FLOOR * UNIT["fp32"]
        for called, reference in zip(self.micro, self.reference_results, strict=True):
            # A loss that the loop makes itself is not recorded.
            if reference.loss is None or self.loss is not None:
                continue
            dtype = called.record.loss_dtype
            roundoff = torch.finfo(dtype_of(dtype)).eps / 2 if dtype else 0.0
            for rank, loss in called.losses.items():
                name = f"loss of micro batch {called.number}, rank {rank}"
                allowed = (tolerated + roundoff) * abs(reference.loss)
                self.verdict.losses.append((loss, reference.loss, allowed))
                if self.verdict.number(name, loss, reference.loss, allowed).too_far:
                    self.verdict.wrong.append(
                        Wrong(f"{name} is {loss:.9g}, the reference's is {reference.loss:.9g}")
                    )


def _places_of(shards: list[tuple[int, torch.Tensor]], dim: int) -> dict[int, tuple[list[int], list[int]]]:
    """Return, by rank, (start, shape) of its shard in the whole. The shards follow each other along `dim`."""
    places, offset = {}, 0
    for rank, shard in shards:
        start = [0] * shard.ndim
        start[dim], offset = offset, offset + shard.shape[dim]
        places[rank] = (start, list(shard.shape))
    return places


def _cut_dim(shards: list[torch.Tensor], whole: torch.Tensor) -> int | None:
    """Return the dim along which the shards of ranks, put together in their order, are near `whole`; None if they are not."""
    for dim, length in enumerate(whole.shape):
        others = [tensor.shape[:dim] + tensor.shape[dim + 1 :] for tensor in (whole, *shards)]
        if len(set(others)) == 1 and sum(shard.shape[dim] for shard in shards) == length:
            return dim if distance_of(torch.cat(shards, dim), whole).relative < IN_ORDER else None
    return None


def columns_of(computed: list[Computed]) -> list[Gradients]:
    """Return the gradients of the losses of all micro batches, then those of their further terms."""
    gradients = [result.gradients for result in computed]
    return gradients + [term.gradients for result in computed for term in result.terms.values()]


def _not_linear(
    reference: ModelPass, micro_batch: JoinedMicroBatch, told: dict[str, torch.Tensor], first: Computed
) -> str | None:
    """Return a parameter whose gradient is not twice as large if twice the gradient arrives; None if all are.

    `first` is what the reference gave for the micro batch. Raises UserError for a model that draws random numbers.
    """

    def other(again: Computed, factor: float) -> str | None:
        """Return a parameter whose gradient is not `factor` times that in `first`; None if there is none."""
        pairs = ((name, factor * x, again.gradients[name]) for name, x in first.gradients.items())
        return next((name for name, x, y in pairs if float((y - x).norm()) > SAME * float(x.norm())), None)

    # The gradient of a loss is divided by what arrived at the loss, so it stays the same.
    twice = reference.compute(micro_batch.doubled, told)
    name = other(twice, 1.0 if first.loss is not None else 2.0)
    if name is None and twice.loss == first.loss:
        return None
    again = reference.compute(micro_batch, told)
    if again.loss != first.loss or other(again, 1.0) is not None:
        raise UserError(
            "two passes of the recorded model over one micro batch differ: it draws random numbers that are not those of torch on CPUs, Python's random or numpy.random, "
            "or changes its own weights, so no reference can follow it; record a run in which it does neither"
        )
    return name


def _loss_noise(reference: Computed, yardstick: Computed) -> float:
    """Return the relative standard deviation of a loss whose logits are as far off as the yardstick's, each independently of the others.

    With the gradient g at the logits, the standard deviation of a sum of g_i times errors of one size is |g| times this size.
    """
    # `judge_losses` asks nothing of a loss of 0.
    if not reference.loss or not reference.at_logits or reference.logits is None or yardstick.logits is None:
        return 0.0
    errors = yardstick.logits - reference.logits
    return reference.at_logits * float(errors.norm()) / math.sqrt(errors.numel()) / abs(reference.loss)
