"""The pass from the batch of each micro batch of a recorded step, in float64 and in the run's dtypes, and its modules judged."""

import itertools
import math

import torch

from lockstep.ground.errors import UserError
from lockstep.ground.words import and_more
from lockstep.recorded import redrawn, task
from lockstep.recorded.alone import Alone
from lockstep.recorded.model import dtype_of
from lockstep.recorded.own_loss import Loss
from lockstep.recorded.pieces import explain, explain_cache
from lockstep.recorded.ranks import Ranks
from lockstep.recorded.reference import Reference
from lockstep.recorder.called import Called
from lockstep.recorder.module_hooks import module_of
from lockstep.recorder.recording import Recording
from lockstep.verdict.computed import Computed
from lockstep.verdict.distance import distance_of
from lockstep.verdict.judgement import FLOOR, MULTIPLE, UNIT, Judgement
from lockstep.verdict.modules import Modules, Tensors, as_pieces
from lockstep.verdict.normalisation import Gradients
from lockstep.verdict.rows import StepVerdict, Wrong

SAME = 1e-9  # relative: two passes in float64
# Relative, of shards that are put together in the order of their ranks: in another order they are off by more than they are large.
IN_ORDER = 0.5
NOT_LINEAR = (
    "if twice the gradient arrives at what the model returns, gradients of parameters are not twice as large"
)


class Free:
    """Adds rows and sentences to the verdict. `redraws`: the yardstick is the farthest of several draws (lockstep/recorded/redrawn.py).

    `exact` and `near` are then what each micro batch gives, in float64 and in the run's dtypes.
    """

    def __init__(
        self,
        recording: Recording,
        verdict: StepVerdict,
        micro: list[Called],
        weights: Gradients,
        loss: Loss | None,
        *,
        streamed: bool,
        redraws: bool,
    ):
        self.recording, self.verdict, self.micro, self.loss = recording, verdict, micro, loss
        self.streamed, self.redraws = streamed, redraws
        self.right, self.plain = (
            Reference(recording, verdict.step, weights, loss, exact=exact, streamed=streamed)
            for exact in (True, False)
        )
        self.right.dtypes = self.plain.dtypes
        self.exact: list[Computed] = []
        self.near: list[Computed] = []
        self.loss_noise = 0.0
        # Outputs of modules of which each rank has a shard, and the dim
        self.cut: dict[str, int] = {}
        self.modules = Modules(verdict, verdict.precision)
        self.alone = Alone(verdict, self.right, self.plain, len(recording.steps))

    def recorded(self, called: Called) -> tuple[Tensors, dict[str, torch.Tensor]]:
        """(what modules returned for a micro batch and what arrived there, the choices among it)."""
        own = self.recording.of_modules(self.verdict.step, called)
        for name, shards in own.items():
            dim = self.cut.get(name.replace("backward/", "forward/", 1))
            if dim is not None:
                own[name] = [(called.ranks[0], torch.cat([shard for _, shard in shards], dim))]
                row = f"{name.partition('/')[0]}/{module_of(name)}"
                parts = _parts(shards, dim)
                known = self.verdict.shards.setdefault(row, parts)
                self.verdict.shards[row] = parts if parts.keys() == known.keys() else {}
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

    def judge(self, of_ranks: Ranks) -> bool:
        """Returns whether a module is wrong."""
        verdict, reference = self.verdict, self.right
        if reference.kernels:
            verdict.notes.append(
                f"the model's attention was computed by {and_more(reference.kernels)}; the reference computes the same in plain torch"
            )
        for _, same in itertools.groupby(self.micro, key=lambda one: id(one.first)):
            self._judge_samples(list(same))
        if verdict.step == 1:
            task.judge(verdict, reference, self.micro, self.exact)
        task.judge_replicas(verdict, reference, self.micro)
        before = len(verdict.wrong)
        wrong = self.modules.close()
        first = next((row for row in self.modules.rows.values() if row.too_far), None)
        if first is not None and first.which_pass == "forward":
            verdict.wrong[before:before] = self._why(first, of_ranks)
            later = {*of_ranks.of_clips}
            if of_ranks.unreduced:  # they differ as what they come from does
                of_ranks.say_of_unreduced("", instead=True)
                later |= {said for said in verdict.wrong if said.startswith("gradients differ")}
            verdict.wrong.sort(key=lambda said: said in later)
        return wrong

    def _judge_samples(self, pieces: list[Called]) -> None:
        """A micro batch, or all pieces of one."""
        recorded = [self.recorded(called) for called in pieces]
        for called, (_, told) in zip(pieces, recorded, strict=True):
            for reference, kept in ((self.plain, self.near), (self.right, self.exact)):
                kept.append(reference.compute(called, told))
            if not self.streamed:  # whose units are computed twice
                task.note_buffers(self.verdict, called, self.right, self.plain)
            if self.redraws:
                redrawn.draw_again(self.plain, self.near[-1], self.exact[-1], called, told)
            if self.verdict.step == 1 and len(self.exact) == 1:
                self._judge_linearity(called, told)
        rights, near = self.exact[-len(pieces) :], self.near[-len(pieces) :]
        if self._find_cut(recorded, rights):
            recorded = [self.recorded(called) for called in pieces]
        for right, measured in zip(rights, near, strict=True):
            measured.terms = {name: measured.terms[name] for name in right.terms}
        for computed in (rights, near):
            as_pieces(computed, pieces, [own for own, _ in recorded])
        for called, (own, _), right, measured in zip(pieces, recorded, rights, near, strict=True):
            self.modules.add(called.number, called.ranks, own, right, measured)
            right.arrived *= self.modules.scales.get((called.number, called.ranks[0]), 1.0)
            self.loss_noise = max(self.loss_noise, _loss_noise(right, measured))
            for one in (right, measured):
                one.modules, one.logits, one.at_logits = {}, None, None  # they take the most memory

    def _find_cut(
        self, recorded: list[tuple[Tensors, dict[str, torch.Tensor]]], rights: list[Computed]
    ) -> bool:
        """Find outputs that the ranks of a tensor-parallel group have shards of. The gradient there is cut likewise."""
        found = {
            name: dim
            for (own, _), right in zip(recorded, rights, strict=True)
            for name, shards in own.items()
            if name.startswith("forward/") and name in right.modules
            if len(shards) > 1  # else the reference's, which may be on disk, need not be read
            if (dim := _cut_dim([shard for _, shard in shards], right.modules[name])) is not None
        }
        self.cut |= found
        return bool(found)

    def _judge_linearity(self, called: Called, told: dict[str, torch.Tensor]) -> None:
        first = self.exact[0]
        odd = _not_linear(self.right, called, told, first)
        if odd and first.arrived == 1 and first.loss is not None:
            self.verdict.notes.append(f"{NOT_LINEAR}, such as that of {odd}; here, 1 arrives")
        elif odd:
            self.verdict.wrong.append(
                f"{NOT_LINEAR}, such as that of {odd}: a function's backward method forgets what it is given"
            )

    def _why(self, first: Judgement, of_ranks: Ranks) -> list[str]:
        """Why an output of a module, the first that is wrong, is wrong."""
        odd = [rank for rank, one in first.ranks.items() if not one <= 1]
        why = of_ranks.unlike(first.name.removeprefix("forward/"), odd)
        if why or self.verdict.pieces > 1 or self.verdict.step > 1:
            return why
        name = first.name.replace("/", "/0/", 1)
        of_odd = (one for one in self.micro if one.number == 0 and first.ranks.get(one.ranks[0], 0) > 1)
        called = next(of_odd, self.micro[0])
        return explain_cache(self.right, called, name) or explain(self.right, self.micro, name)

    def judge_losses(self) -> None:
        """Every loss is a draw of the same rounding errors, and one may be small by chance.

        So the measure is the yardstick's largest, and at least what the errors of its logits let expect.
        """
        pairs = [
            (one.loss, own.loss)
            for one, own in zip(self.exact, self.near, strict=True)
            if one.loss is not None and own.loss is not None
        ]
        measure = max((abs(own - right) / abs(right) for right, own in pairs if right), default=0.0)
        measure = max(measure, self.loss_noise)
        tolerated = MULTIPLE * measure + FLOOR * UNIT["fp32"]
        for called, exact in zip(self.micro, self.exact, strict=True):
            # What a loop makes itself is not recorded
            if exact.loss is None or self.loss is not None:
                continue
            dtype = called.about.loss_dtype
            rounded = torch.finfo(dtype_of(dtype)).eps / 2 if dtype else 0.0
            for rank, loss in called.losses.items():
                name = f"loss of micro batch {called.number}, rank {rank}"
                allowed = (tolerated + rounded) * abs(exact.loss)
                self.verdict.losses.append((loss, exact.loss, allowed))
                if self.verdict.number(name, loss, exact.loss, allowed).too_far:
                    self.verdict.wrong.append(
                        Wrong(f"{name} is {loss:.9g}, the reference's is {exact.loss:.9g}")
                    )


def _parts(shards: list[tuple[int, torch.Tensor]], dim: int) -> dict[int, tuple[list[int], list[int]]]:
    """Rank -> (start, shape) of its shard in the whole."""
    found, begin = {}, 0
    for rank, shard in shards:
        start = [0] * shard.ndim
        start[dim], begin = begin, begin + shard.shape[dim]
        found[rank] = (start, list(shard.shape))
    return found


def _cut_dim(shards: list[torch.Tensor], whole: torch.Tensor) -> int | None:
    """The dim along which the shards of ranks, in their order, are near this tensor; None if they are not."""
    for dim, length in enumerate(whole.shape):
        others = [one.shape[:dim] + one.shape[dim + 1 :] for one in (whole, *shards)]
        if len(set(others)) == 1 and sum(one.shape[dim] for one in shards) == length:
            return dim if distance_of(torch.cat(shards, dim), whole).relative < IN_ORDER else None
    return None


def columns_of(computed: list[Computed]) -> list[Gradients]:
    """The gradients of the losses of all micro batches, then those of their further terms."""
    found = [one.gradients for one in computed]
    return found + [term.gradients for one in computed for term in one.terms.values()]


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
