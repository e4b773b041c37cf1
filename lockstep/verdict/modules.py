"""Judge what the modules of a recorded run returned, and the gradients that arrived there, against the reference's."""

from collections.abc import Mapping
from dataclasses import replace

import torch

from lockstep.recorder.micro_batch import JoinedMicroBatch
from lockstep.recorder.module_hooks import module_of
from lockstep.verdict.computed import Computed
from lockstep.verdict.distance import distance_of
from lockstep.verdict.factors import Factors
from lockstep.verdict.float64 import GROUPS
from lockstep.verdict.judgement import FLOOR, MULTIPLE, UNIT, Judgement
from lockstep.verdict.lazy import Lazy
from lockstep.verdict.rows import StepVerdict, Wrong
from lockstep.verdict.scalars import Chosen

Tensors = dict[str, list[tuple[int, torch.Tensor]]]  # name -> (rank, tensor) of each rank that has it


class Modules:
    """The rows of a step. A module's row is that of the micro batch and rank whose tensor is farthest beyond what is tolerated.

    `factors` is given if each module was computed from the inputs that it had in the run. A module then answers for itself, and is judged
    by factors, too. `scaled`: what arrives at the first module may be any multiple of the reference's. `whose` says whose the tensors
    are: "rank" or "DP rank".
    """

    def __init__(
        self,
        verdict: StepVerdict,
        factors: Factors | None = None,
        *,
        scaled: bool = True,
        whose: str = "rank",
    ):
        self.verdict, self.factors = verdict, factors
        self.scaled, self.whose = scaled, whose
        self.rows: dict[str, Judgement] = {}
        # Name of a row -> rank that has the tensor -> the largest `multiple` there
        self.ranks: dict[str, dict[int, float]] = {}
        self.chosen: list[Chosen] = []
        self.left_out: dict[str, None] = {}  # names of modules, in order of execution
        # (micro batch, rank) -> the factor on the gradients that the recorded gradient of the loss does not have
        self.scales: dict[tuple[int, int], float] = {}

    def add(
        self, number: int, ranks: list[int], own: Tensors, reference: Computed, yardstick: Computed
    ) -> None:
        """Judge a micro batch. `number` is its place in the step, `ranks` were called with it, and `own` are their tensors.

        `reference` and `yardstick` are what each of them computed.
        """
        for pass_name in ("forward", "backward"):
            names = [name for name in reference.modules if name.startswith(pass_name) and name in own]
            for rank in ranks:
                tensors = {name: dict(own[name])[rank] for name in names if rank in dict(own[name])}
                self._judge(number, rank, tensors, reference.modules, yardstick.modules)
        for module, choice in reference.told.items():
            tolerated = self._tolerated_regret(choice.scores, yardstick.told[module].scores.double())
            self.chosen.append(Chosen(self.verdict.step, f"forward/{module}", choice.regret, tolerated))

    def _tolerated_regret(self, reference: torch.Tensor, yardstick: torch.Tensor) -> float:
        """Return the regret that is tolerated of a choice: two scores may each be as far off as any score of a correct run."""
        # A group of experts that is left out may have no finite score.
        is_finite = reference.isfinite() & yardstick.isfinite()
        scores = reference[is_finite]
        error = float((yardstick[is_finite] - scores).abs().max())
        return 2 * (MULTIPLE * error + FLOOR * UNIT[self.verdict.precision] * float(scores.abs().max()))

    def _judge(
        self,
        number: int,
        rank: int,
        run_tensors: dict[str, torch.Tensor],
        reference: Mapping[str, torch.Tensor],
        yardstick: Mapping[str, torch.Tensor],
    ) -> None:
        """Judge a rank's tensors of one pass, which are in order of execution."""
        scale = None if self.scaled else 1.0
        scales: dict[str, float] = {}
        for name, tensor in run_tensors.items():
            if tensor.shape != reference[name].shape or name not in yardstick:
                self.left_out[module_of(name)] = None
            elif tensor.is_floating_point() and tensor.numel():
                if name.startswith("backward"):
                    # A library may scale the gradient of the loss after it was recorded there. So the scale is measured where the gradient
                    # arrives first. It is measured against the yardstick, which rounds as the run does: values that lie close together
                    # may all round to the same side.
                    if scale is None and bool(yardstick[name].any()):
                        scale = distance_of(tensor, yardstick[name]).scale
                        self.scales[number, rank] = scale
                    elif self.factors is not None:
                        # What arrives later follows from what was recorded.
                        scale = 1.0
                scales[name] = 1.0 if scale is None else scale
        # A tensor in a lower dtype than the yardstick's has no wider tolerance for it.
        dtypes = {
            name: torch.promote_types(run_tensors[name].dtype, yardstick[name].dtype) for name in scales
        }

        def scaled(raw: Mapping[str, torch.Tensor]) -> Lazy:
            return Lazy(
                scales, lambda name: raw[name] if scales[name] == 1 else raw[name].double() * scales[name]
            )

        rows = self.verdict.judged(
            run_tensors,
            scaled(reference),
            scaled(yardstick),
            factors=self.factors,
            dtypes=dtypes,
            rank=rank,
        )
        for row in rows:
            name = f"{row.kind}/{module_of(row.name)}"
            ranks = self.ranks.setdefault(name, {})
            ranks[rank] = max(row.multiple, ranks.get(rank, 0.0))
            if name not in self.rows or row.multiple > self.rows[name].multiple:
                self.rows[name] = replace(row, name=name, where=self._place(row.name, rank), ranks=ranks)

    def _place(self, name: str, rank: int) -> str:
        """Return the micro batch, and the rank or ranks, that a tensor is of, in words."""
        kind, number, module = name.split("/", 2)
        shards = self.verdict.shards.get(f"{kind}/{module}", {})
        whose = f"ranks {', '.join(map(str, shards))}" if rank in shards else f"{self.whose} {rank}"
        return f"micro batch {number}, {whose}"

    def with_factors(self, gradients: list[Judgement]) -> list[Judgement]:
        """Return the rows, and then those of the parameters' gradients, with their factors.

        A module with factors in several micro batches gets the one that is farthest beyond what is tolerated, and all ranks that
        have one.
        """
        assert self.factors is not None
        rows = {**self.rows, **{row.name: row for row in gradients}}
        for factor in sorted(self.factors.beyond(), key=lambda factor: factor.multiple):
            kind, *_, module = factor.name.split("/", 1 if factor.rank is None else 2)
            row = rows[f"{kind}/{module}"]
            row.factor = factor  # that of the last is the farthest
            if factor.rank is not None:
                factor.where = self._place(factor.name, factor.rank)
                row.ranks[factor.rank] = max(factor.multiple, row.ranks.get(factor.rank, 0.0))
            if not row.is_far:
                row.where = factor.where
        return list(rows.values())

    def close(self) -> bool:
        """Add the rows, and what is wrong, to the verdict. Return whether anything is wrong."""
        self.verdict.rows += self.rows.values()
        order = list(self.rows)
        problems = [
            (_place_of_choice(choice.name, order), f"{choice.name} {choice.describe()}")
            for choice in self.chosen
            if choice.too_far
        ]
        wrong = [row for row in self.rows.values() if row.too_far]
        if wrong:
            first = wrong[0]
            of_pass = [row for row in self.rows.values() if row.which_pass == first.which_pass]
            kind = "outputs" if first.which_pass == "forward" else "gradients at outputs"
            note = " (of the loss, at what the model returned)" * first.name.startswith("backward/returned.")
            problems.append(
                (
                    order.index(first.name),
                    f"{first.name}{note} ({first.where}) is the first of {sum(row.too_far for row in of_pass)} of {len(of_pass)} {kind} "
                    f"that are too far from the reference, in order of execution: {first.describe()}",
                )
            )
        self.verdict.wrong += [Wrong(sentence) for _, sentence in sorted(problems)]
        if self.left_out:
            self.verdict.notes.append(
                f"{len(self.left_out)} modules return tensors of other shapes than in the reference, and are not judged, first {next(iter(self.left_out))}"
            )
        return bool(problems)


def as_pieces(computed: list[Computed], pieces: list[JoinedMicroBatch], own: list[Tensors]) -> None:
    """Cut what modules gave for whole samples into what each piece has of it, in place.

    `computed` are the results for each of the pieces, `own` the tensors that were recorded of it. At a piece, the gradients of all pieces'
    losses arrive.
    """
    gradients: dict[str, torch.Tensor] = {}
    for result in computed:
        result.shapes = {name: tensor.shape for name, tensor in result.modules.items()}
        for name, tensor in result.modules.items():
            if name.startswith("backward/") and "/returned." not in name:
                gradients[name] = gradients[name] + tensor if name in gradients else tensor
    for result, called, recorded in zip(computed, pieces, own, strict=True):
        if called.piece is not None:
            result.modules = {
                name: called.piece.cut(gradients.get(name, tensor), recorded[name][0][1].shape)
                for name, tensor in result.modules.items()
                if name in recorded
            }


def _place_of_choice(choice: str, order: list[str]) -> int:
    """Return the place in `order` of the first row of the module that a choice is an output of."""
    outputs = choice.removesuffix(GROUPS).rstrip("0123456789").removesuffix(".")
    return next((place for place, name in enumerate(order) if name.startswith(outputs)), len(order))
