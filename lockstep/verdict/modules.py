"""What the modules of a recorded run returned, and the gradients that arrived there, against the reference's."""

from collections.abc import Mapping
from dataclasses import replace

import torch

from lockstep.recorder.called import Called
from lockstep.recorder.module_hooks import module_of
from lockstep.verdict.computed import Computed
from lockstep.verdict.distance import distance_of
from lockstep.verdict.factors import Factors
from lockstep.verdict.float64 import GROUPS
from lockstep.verdict.judgement import FLOOR, MULTIPLE, UNIT, Judgement
from lockstep.verdict.lazy import Lazy
from lockstep.verdict.rows import StepVerdict, Wrong, judged
from lockstep.verdict.scalars import Chosen

Tensors = dict[str, list[tuple[int, torch.Tensor]]]  # by rank


class Modules:
    """The rows of a step: of each module, the one of the micro batch and rank that is farthest from what is tolerated.

    `factors`: each module was computed from the inputs that it had in the run, so it answers for itself, and is judged by factors, too.
    `scaled`: what arrives at the first module may be any multiple of the reference's. `whose` the tensors are: a "rank" or a "DP rank".
    """

    def __init__(
        self,
        verdict: StepVerdict,
        precision: str,
        factors: Factors | None = None,
        *,
        scaled: bool = True,
        whose: str = "rank",
    ):
        self.verdict, self.precision, self.factors = verdict, precision, factors
        self.scaled, self.whose = scaled, whose
        self.rows: dict[str, Judgement] = {}
        # Those that have a row, and the largest `multiple` there
        self.ranks: dict[str, dict[int, float]] = {}
        self.chosen: list[Chosen] = []
        self.left_out: dict[str, None] = {}  # in order of execution
        # By how much more than recorded the gradients are scaled, for each micro batch and rank
        self.scales: dict[tuple[int, int], float] = {}

    def add(self, number: int, ranks: list[int], own: Tensors, exact: Computed, near: Computed) -> None:
        """A micro batch, by its number in the step, as the ranks that were called with it have it."""
        for which in ("forward", "backward"):
            names = [name for name in exact.modules if name.startswith(which) and name in own]
            for rank in ranks:
                mine = {name: dict(own[name])[rank] for name in names if rank in dict(own[name])}
                self._judge(number, rank, mine, exact.modules, near.modules)
        for module, choice in exact.told.items():
            tolerated = self._tolerated_regret(choice.scores, near.told[module].scores.double())
            self.chosen.append(Chosen(self.verdict.step, f"forward/{module}", choice.regret, tolerated))

    def _tolerated_regret(self, exact: torch.Tensor, near: torch.Tensor) -> float:
        """Two scores that are near each other may each be as far off as any score of a correct run."""
        # A group of experts that is left out may have none
        finite = exact.isfinite() & near.isfinite()
        scores = exact[finite]
        error = float((near[finite] - scores).abs().max())
        return 2 * (MULTIPLE * error + FLOOR * UNIT[self.precision] * float(scores.abs().max()))

    def _judge(
        self,
        number: int,
        rank: int,
        mine: dict[str, torch.Tensor],
        exact: Mapping[str, torch.Tensor],
        near: Mapping[str, torch.Tensor],
    ) -> None:
        """Tensors of one pass, in order of execution."""
        where = {name: f"micro batch {number}, {self._whose(name, rank)}" for name in mine}
        scale = None if self.scaled else 1.0
        scales: dict[str, float] = {}
        for name, tensor in mine.items():
            if tensor.shape != exact[name].shape or name not in near:
                self.left_out[module_of(name)] = None
            elif tensor.is_floating_point() and tensor.numel():
                if name.startswith("backward"):
                    # A library may scale the loss's gradient after it was recorded there, so it is measured where it arrives first.
                    # Of one process's, which rounds as the run does: values that lie close together may all round to the same side.
                    if scale is None and bool(near[name].any()):
                        scale = distance_of(tensor, near[name]).scale
                        self.scales[number, rank] = scale
                    elif self.factors is not None:
                        # What arrives later follows from what was recorded
                        scale = 1.0
                scales[name] = 1.0 if scale is None else scale
        # One in a lower dtype than one process gives is no better for it
        dtypes = {name: torch.promote_types(mine[name].dtype, near[name].dtype) for name in scales}

        def scaled(of: Mapping[str, torch.Tensor]) -> Lazy:
            return Lazy(
                scales, lambda name: of[name] if scales[name] == 1 else of[name].double() * scales[name]
            )

        rows = judged(
            self.verdict.step,
            mine,
            scaled(exact),
            scaled(near),
            self.precision,
            arithmetic=self.verdict.arithmetic,
            factors=self.factors,
            dtypes=dtypes,
            where=where,
            rank=rank,
        )
        for row in rows:
            name = f"{row.kind}/{module_of(row.name)}"
            ranks = self.ranks.setdefault(name, {})
            ranks[rank] = max(row.multiple, ranks.get(rank, 0.0))
            if name not in self.rows or row.multiple > self.rows[name].multiple:
                self.rows[name] = replace(row, name=name, where=where[row.name], ranks=ranks)

    def _whose(self, name: str, rank: int) -> str:
        shards = self.verdict.shards.get(f"{name.partition('/')[0]}/{module_of(name)}", {})
        return f"ranks {', '.join(map(str, shards))}" if rank in shards else f"{self.whose} {rank}"

    def close(self) -> bool:
        """Add the rows and what is wrong to the verdict; returns whether anything is."""
        self.verdict.rows += self.rows.values()
        order = list(self.rows)
        found = [
            (_first_of(one.name, order), f"{one.name} {one.describe()}") for one in self.chosen if one.too_far
        ]
        wrong = [row for row in self.rows.values() if row.too_far]
        if wrong:
            first = wrong[0]
            of_pass = [row for row in self.rows.values() if row.which_pass == first.which_pass]
            what = "outputs" if first.which_pass == "forward" else "gradients at outputs"
            whose = " (of the loss, at what the model returned)" * first.name.startswith("backward/returned.")
            found.append(
                (
                    order.index(first.name),
                    f"{first.name}{whose} ({first.where}) is the first of {sum(row.too_far for row in of_pass)} of {len(of_pass)} {what} "
                    f"that are too far from the reference, in order of execution: {first.describe()}",
                )
            )
        self.verdict.wrong += [Wrong(sentence) for _, sentence in sorted(found)]
        if self.left_out:
            self.verdict.notes.append(
                f"{len(self.left_out)} modules return tensors of other shapes than in the reference, and are not judged, first {next(iter(self.left_out))}"
            )
        return bool(found)


def as_pieces(computed: list[Computed], pieces: list[Called], own: list[Tensors]) -> None:
    """Leaves of what modules gave for whole samples what each piece has. At a piece, the gradients of all pieces' losses arrive."""
    of_all: dict[str, torch.Tensor] = {}
    for one in computed:
        one.shapes = {name: tensor.shape for name, tensor in one.modules.items()}
        for name, tensor in one.modules.items():
            if name.startswith("backward/") and "/returned." not in name:
                of_all[name] = of_all[name] + tensor if name in of_all else tensor
    for one, called, mine in zip(computed, pieces, own, strict=True):
        if called.piece is not None:
            one.modules = {
                name: called.piece.cut(of_all.get(name, tensor), mine[name][0][1].shape)
                for name, tensor in one.modules.items()
                if name in mine
            }


def _first_of(choice: str, order: list[str]) -> int:
    """The place of the first row of the module that a choice is an output of."""
    outputs = choice.removesuffix(GROUPS).rstrip("0123456789").removesuffix(".")
    return next((place for place, name in enumerate(order) if name.startswith(outputs)), len(order))
