"""Each module of a recorded step by itself: computed from the inputs that it had in the run, and from the gradient that arrived at it.

In a free pass, rounding errors pile up from the batch to the loss, and everything after a wrong module is wrong. Here the recorded
tensors take the places of the computed ones, so what is wrong is wrong by itself.
"""

from collections.abc import Collection

import torch

from lockstep.ground.words import and_more
from lockstep.recorded.model import dtype_of
from lockstep.recorded.reference import Reference
from lockstep.recorded.weights import SCALARS
from lockstep.recorder.called import LOG_PROBS, Called
from lockstep.recorder.module_hooks import module_of
from lockstep.verdict import normalisation
from lockstep.verdict.alone import with_factors
from lockstep.verdict.computed import Computed
from lockstep.verdict.factors import Factors
from lockstep.verdict.judgement import Judgement
from lockstep.verdict.lazy import Lazy
from lockstep.verdict.modules import Modules, Tensors, as_pieces
from lockstep.verdict.normalisation import Gradients, Sum, accumulated
from lockstep.verdict.rows import StepVerdict


class Alone:
    """`exact` and `plain` compute in float64 and in the run's dtypes. `steps` of the run are judged."""

    def __init__(self, verdict: StepVerdict, exact: Reference, plain: Reference, steps: int):
        self.verdict, self.exact, self.plain = verdict, exact, plain
        self.factors = Factors(steps, verdict.arithmetic.factor)
        self.modules = Modules(verdict, verdict.precision, self.factors)
        self.right: list[Gradients] = []
        self.near: list[Gradients] = []
        # Modules whose outputs the run does not have, in order of execution
        self.unseen: dict[str, None] = {}

    def add(
        self, called: Called, own: Tensors, told: dict[str, torch.Tensor], right: Computed, near: Computed
    ) -> None:
        """One micro batch, as the first rank that was called with it has it; `right` and `near` are what free passes gave."""
        rank = called.ranks[0]
        mine = {name: [(rank, tensor)] for name, found in own.items() for of, tensor in found if of == rank}
        # A rank may compute parts that one process does not, such as its own experts' tokens in an order of its own.
        written = {
            name: found[0][1]
            for name, found in mine.items()
            if all(free.shapes.get(name) == found[0][1].shape for free in (right, near))
        }
        self.unseen |= dict.fromkeys(
            module_of(name)
            for name in right.shapes
            if name.startswith("forward/") and name not in own and "/returned." not in name
        )
        if called.piece is not None:
            of_all = [self.exact.recording.of_modules(self.verdict.step, one) for one in called.piece.all]
            written = {}
            for name, shape in right.shapes.items():
                parts = [of[name][0][1] for of in of_all if name in of]
                whole = called.piece.pieces.joined(parts, shape) if len(parts) == len(of_all) else None
                if whole is not None:
                    written[name] = whole
        if LOG_PROBS in called.arrived:  # from a head that is not the model's own
            mine.pop(
                next((name for name in right.shapes if name.startswith("backward/") and name in mine), ""),
                None,
            )
        exact = self.exact.compute(called, told, written, right)
        plain = self.plain.compute(called, told, written, near)
        for computed in (exact, plain):
            as_pieces([computed], [called], [mine])
        self.modules.add(called.number, called.ranks, mine, exact, plain)
        self.right.append(exact.gradients)
        self.near.append(plain.gradients)

    def judge(
        self,
        observed: Gradients,
        weights: torch.Tensor | None,
        clipped: dict[str, float],
        zeros: Collection[str],
        *,
        by_hand: bool,
    ) -> list[Judgement]:
        """All rows, in order of execution. `zeros` are those that are zero in a free pass.

        `observed` are the recorded gradients, whole, in their own dtypes, `weights` those that the micro batches' losses have in them
        before they are `clipped` by factors; `by_hand`: the loop clipped by itself, too. If the weights are not known, gradients are not judged: a weight that is off by little would be seen in each.
        """
        if self.unseen:
            self.verdict.notes.append(
                f"no output of {and_more(list(self.unseen))} was recorded: each is judged as one piece with what follows it"
            )
        if weights is None:
            return with_factors(list(self.modules.rows.values()), self.factors)
        reduced_in = self._reduced_in(observed)
        if by_hand:
            # The factor of a clipping that was not seen follows from norms, so it has the errors of the free pass.
            found = normalisation.fit(observed, self.near, clipped).weights
            weights = weights * ((found * weights).sum() / weights.square().sum())
        weights = self._measured(observed, weights, clipped, reduced_in)
        right = Sum(observed, self.right, weights, clipped)
        near = accumulated(Sum(observed, self.near, weights, clipped), reduced_in)
        rows = self.verdict.gradients(
            observed, right, near, factors=self.factors, dtypes=reduced_in, zeros=zeros
        )
        return with_factors([*self.modules.rows.values(), *rows], self.factors)

    def _reduced_in(self, observed: Gradients) -> dict[str, torch.dtype]:
        """The dtypes in which gradients are added up. Those that are read of copies in float32 have less in them than these."""
        recording = self.exact.recording
        micro = recording.steps[0][0].micro_batches[0]
        told = micro.reduce_dtype or micro.param_dtype
        begun = {name: one.dtype for name, one in recording.skeleton.named_parameters()}
        return {
            name: dtype_of(told) if told else max(begun[name], observed[name].dtype, key=_eps)
            for name in observed
        }

    def _measured(
        self,
        observed: Gradients,
        weights: torch.Tensor,
        clipped: dict[str, float],
        dtypes: dict[str, torch.dtype],
    ) -> torch.Tensor:
        """`weights` as they were after rounding: in 16 bits, a third is 1.002 times a third, and so is all that a loss is divided by.

        They are measured where gradients are rounded least: some may be in float32, as of a last layer.
        """
        least, eps = (of(map(_eps, dtypes.values())) for of in (min, max))
        if eps <= _eps(torch.float32):
            return weights
        finest = Lazy((name for name in observed if _eps(dtypes[name]) == least), lambda name: observed[name])
        found = normalisation.fit(finest, self.near, clipped).weights
        return found if bool(((found / weights - 1).abs() <= SCALARS * eps).all()) else weights


def _eps(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps
