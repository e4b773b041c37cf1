"""Judge each module of a recorded step by itself.

It is computed from the inputs that it had in the run, and from the gradient that arrived at it. In a free pass, rounding errors pile up
from the batch to the loss, and everything after a wrong module is wrong. Here the recorded tensors take the places of the computed ones,
so what is wrong is wrong by itself.
"""

from collections.abc import Collection

import torch

from lockstep.ground.words import and_more
from lockstep.plan import resources
from lockstep.recorded.loss_weights import SCALARS
from lockstep.recorded.model import dtype_of
from lockstep.recorded.model_pass import ModelPass
from lockstep.recorded.reduced import Reduction, eps_of
from lockstep.recorder.micro_batch import LOG_PROBS, JoinedMicroBatch
from lockstep.recorder.module_hooks import module_of
from lockstep.verdict import normalisation
from lockstep.verdict.computed import Computed
from lockstep.verdict.factors import Factors
from lockstep.verdict.judgement import Judgement
from lockstep.verdict.modules import Modules, Tensors, as_pieces
from lockstep.verdict.normalisation import Gradients, Sum
from lockstep.verdict.rows import StepVerdict


class ForcedPass:
    """The modules of a step by themselves. `steps` of the run are judged."""

    def __init__(self, verdict: StepVerdict, reference: ModelPass, yardstick: ModelPass, steps: int):
        self.verdict, self.reference, self.yardstick = verdict, reference, yardstick
        self.factors = Factors(steps, verdict.arithmetic.factor)
        self.modules = Modules(verdict, self.factors)
        # Of each micro batch
        self.reference_gradients: list[Gradients] = []
        self.yardstick_gradients: list[Gradients] = []
        self.of_loss = 0.0  # the machine epsilon of the coarsest dtype that a loss has
        # Modules whose outputs the run does not have, in order of execution
        self.unseen: dict[str, None] = {}

    def add(
        self,
        micro_batch: JoinedMicroBatch,
        own: Tensors,
        told: dict[str, torch.Tensor],
        free_reference: Computed,
        free_yardstick: Computed,
    ) -> None:
        """Compute and judge a micro batch, as the first rank that was called with it recorded it.

        `own` are the recorded tensors of modules, `told` the choices among them. `free_reference` and `free_yardstick` are the
        results of free passes.
        """
        resources.share_memory()
        rank, dtype = micro_batch.ranks[0], micro_batch.record.loss_dtype
        self.of_loss = max(self.of_loss, eps_of(dtype_of(dtype)) if dtype else 0.0)
        of_rank = {
            name: [(rank, tensor)]
            for name, tensors in own.items()
            for owner, tensor in tensors
            if owner == rank
        }
        # A rank may compute parts that one process does not, such as its own experts' tokens in an order of its own.
        written = {
            name: tensors[0][1]
            for name, tensors in of_rank.items()
            if all(free.shapes.get(name) == tensors[0][1].shape for free in (free_reference, free_yardstick))
        }
        self.unseen |= dict.fromkeys(
            module_of(name)
            for name in free_reference.shapes
            if name.startswith("forward/") and name not in own and "/returned." not in name
        )
        if micro_batch.piece is not None:
            pieces = [
                self.reference.recording.of_modules(self.verdict.step, piece)
                for piece in micro_batch.piece.members
            ]
            written = {}
            for name, shape in free_reference.shapes.items():
                tensors = [piece[name][0][1] for piece in pieces if name in piece]
                whole = (
                    micro_batch.piece.pieces.joined(tensors, shape) if len(tensors) == len(pieces) else None
                )
                if whole is not None:
                    written[name] = whole
        # The log-probabilities are of a head that is not the model's own, so the first gradient that arrives at a module is not judged.
        if LOG_PROBS in micro_batch.output_gradients:
            of_rank.pop(
                next(
                    (
                        name
                        for name in free_reference.shapes
                        if name.startswith("backward/") and name in of_rank
                    ),
                    "",
                ),
                None,
            )
        reference = self.reference.compute(micro_batch, told, written, free_reference)
        yardstick = self.yardstick.compute(micro_batch, told, written, free_yardstick)
        for computed in (reference, yardstick):
            as_pieces([computed], [micro_batch], [of_rank])
        self.modules.add(micro_batch.number, micro_batch.ranks, of_rank, reference, yardstick)
        self.reference_gradients.append(reference.gradients)
        self.yardstick_gradients.append(yardstick.gradients)

    def judge(
        self,
        observed: Gradients,
        weights: torch.Tensor | None,
        clipped: dict[str, float],
        zeros: Collection[str],
        reduction: Reduction,
        *,
        by_hand: bool,
    ) -> list[Judgement]:
        """Return all rows, of modules and then of gradients, in order of execution.

        `observed` are the recorded gradients, whole, in their own dtypes. `weights` are those that the micro batches' losses have in
        them, before they are multiplied by `clipped`, the factors of clipping; None if the weights are not known: then gradients are not
        judged, as a weight that is a little off would be seen in each. `zeros` are the rows that are zero in a free pass. `reduction` is
        how the run summed the gradients. `by_hand`: the loop clipped by itself, too.
        """
        if self.unseen:
            self.verdict.notes.append(
                f"no output of {and_more(list(self.unseen))} was recorded: each is judged together with the modules that follow it"
            )
        if weights is None:
            return self.modules.with_factors([])
        if by_hand:
            # The factor of a clipping that was not seen follows from norms, so it has the errors of the free pass. Measure it here.
            measured = normalisation.fit(observed, self.yardstick_gradients, clipped).weights
            weights = weights * ((measured * weights).sum() / weights.square().sum())
        weights = self._measured(observed, weights, clipped, reduction)
        reference = Sum(observed, self.reference_gradients, weights, clipped)
        terms = Sum(observed, self.yardstick_gradients, weights, clipped)
        yardstick = reduction.rounded(terms, weights)
        rows = self.verdict.judged(
            observed,
            reference,
            yardstick,
            kind="gradient/",
            factors=self.factors,
            dtypes=reduction.dtypes,
            zeros=zeros,
        )
        return self.modules.with_factors(rows)

    def _measured(
        self,
        observed: Gradients,
        weights: torch.Tensor,
        clipped: dict[str, float],
        reduction: Reduction,
    ) -> torch.Tensor:
        """Return `weights` as rounding left them: in 16 bits, a third is 1.002 times a third, and so is all that a loss is divided by.

        They are measured where gradients are rounded least.
        """
        most = max(self.of_loss, *map(eps_of, reduction.dtypes.values()))
        if most <= eps_of(torch.float32):
            return weights
        measured = normalisation.fit(reduction.finest(observed), self.yardstick_gradients, clipped).weights
        return measured if bool(((measured / weights - 1).abs() <= SCALARS * most).all()) else weights
