"""One run that failed, and its first wrong tensor: what was captured, and whether a value explains it.

In this folder, `own` is what the run computed, and `reference` what the reference has.
"""

import math
import re
from collections.abc import Iterable

import torch

from lockstep.diagnosis import evidence
from lockstep.dumps.dump import Dump
from lockstep.ground.words import and_more
from lockstep.plan.config import BETAS, EPS
from lockstep.plan.mesh import Mesh
from lockstep.plan.rates import rate_of
from lockstep.training.optim import decays, direction
from lockstep.verdict.float64 import GROUPS
from lockstep.verdict.judgement import Judgement
from lockstep.verdict.result import Failure, Result

MOMENTS = dict(zip(("exp_avg", "exp_avg_sq"), BETAS, strict=True))
LEFT = 0.05  # the share of an error that an explanation may leave


class NotCaptured(Exception):
    """A rule asks for an output that the run lacks, because one kernel computes several modules."""


class Case:
    """One run of a finished comparison, and its first wrong tensor.

    The run must have a failure from the batch on (`Findings.failures_from_batch`). `first` is the name of the first wrong tensor, and
    `step` its step; given a `failure`, they are those of this failure. `rows` has the judgements of all tensors of the step by name,
    and `entry` is what the manifest says of the step. Tensors are whole, in float64.
    """

    def __init__(
        self,
        result: Result,
        strategy: str,
        reference: Dump,
        replay: Dump | None,
        failure: Failure | None = None,
    ):
        self.result, self.strategy, self._reference, self._replay = result, strategy, reference, replay
        self.found = result.runs[strategy]
        self.dump = self.found.dump
        self.step, _, first, _ = failure or self.found.failures_from_batch[0]
        # A choice of groups of experts is captured as that of the experts.
        self.first = first.removesuffix(GROUPS)
        self.options = self.dump.run["config"]
        self.names = self.dump.layout.names
        self.mesh = Mesh.of_options(self.options)
        self.micro_batches: int = self.options["gradient_accumulation_steps"]
        # How near a measured factor must be to tp, 1/dp, ... to be called that: in autocast, noise blurs it.
        self.near = evidence.NEAR[self.options["precision"]]
        self.sizes = {
            **{axis: self.mesh.size(axis) for axis in ("tp", "dp", *self.mesh.further_axes)},
            "accumulation steps": self.micro_batches,
        }
        self.entry = self.dump.steps[self.step]
        self.rows, self.norm = self.found.rows_of(self.step), self.found.norm_of(self.step)
        self.not_computed = [name for step, name in self.found.not_computed if step == self.step]
        self._reference_of_step = replay if replay is not None and self.step in replay.steps else reference

    def first_of_later_steps(self) -> list[Failure]:
        """Return the first failure of every later step that has one."""
        later: dict[int, Failure] = {}
        for failure in self.found.failures_from_batch:
            if failure[0] > self.step:
                later.setdefault(failure[0], failure)
        return list(later.values())

    def at(self, failure: Failure) -> "Case":
        """Return the case of the same run, with another failure as the first."""
        return Case(self.result, self.strategy, self._reference, self._replay, failure)

    def at_step(self, step: int) -> "Case":
        """Return the case of another captured step, with the same tensor as the first wrong one."""
        return self.at((step, 0, self.first, ""))

    @property
    def path(self) -> str:
        """The name of the first wrong tensor without its kind."""
        return self.first.partition("/")[2]

    # Tensors

    def own(self, name: str, step: int | None = None) -> torch.Tensor:
        """Return a tensor that the run computed, in its first wrong step unless another step is given.

        Raises NotCaptured for one that a kernel skips, and for a gradient that a parameter did not have.
        """
        step = self.step if step is None else step
        if (step, name) in self.found.skipped or name not in self.dump.steps[step]["tensors"]:
            raise NotCaptured
        return self.dump.tensor(step, name).double()

    def reference(self, name: str) -> torch.Tensor:
        """Return the reference's tensor of the step. It has the batch, forward, backward, and gradients."""
        return self._reference_of_step.tensor(self.step, name).double()

    def before(self, parameter: str, step: int | None = None) -> torch.Tensor:
        """Return a parameter as it must have been before the step, or before an earlier one.

        Before step 1 this is the initial parameter, otherwise the run's own after the step before.
        """
        step = self.step if step is None else step
        source = self._reference if step == 1 else self.dump
        return source.tensor(step - 1, f"parameter/{parameter}").double()

    def average_before(self, parameter: str) -> torch.Tensor:
        """Return the average of a parameter before the step. It begins with the initial parameter."""
        return self.before(parameter) if self.step == 1 else self.own(f"average/{parameter}", self.step - 1)

    @property
    def rate(self) -> float:
        """The learning rate that the configuration has for the step."""
        return rate_of(self.options, self.step, self.dump.run["num_steps"])

    def updated(self, parameter: str, step: float | None = None, eps: float = EPS) -> torch.Tensor:
        """Return the parameter after the right update from the run's own gradient and moments.

        Given a `step`, the moments are those of this step for AdamW; those of an infinite step have no bias. `eps` is AdamW's.
        """
        before, rate = self.before(parameter), self.rate
        if self.options["optimizer"] == "adamw":
            m, v = (self.own(f"{kind}/{parameter}") for kind in ("exp_avg", "exp_avg_sq"))
            update = direction(m, v, self.step if step is None else step, eps)
        else:
            update = self.clip * self.own(f"gradient/{parameter}")
        return before * self.kept(parameter) - rate * update

    def kept(self, parameter: str) -> float:
        """Return what weight decay multiplies a parameter with in the step."""
        has_decay = decays(len(self.dump.layout.parameters[parameter]))
        return 1 - self.rate * self.options["weight_decay"] * has_decay

    def steps_built_in(self, parameter: str) -> bool:
        """Whether the built-in AdamW or SGD steps a parameter: it is trained, and the optimizer is not one of the user's own."""
        return not self.dump.has_own_optimizer and parameter not in self.dump.layout.model.frozen

    def right(self, name: str) -> torch.Tensor:
        """Return what a tensor must be: the reference's, and after the gradients what follows from the run's own tensors."""
        kind, _, parameter = name.partition("/")
        if kind in ("parameter", *self.dump.layout.state) and not self.steps_built_in(parameter):
            is_frozen = parameter in self.dump.layout.model.frozen
            return self.before(parameter) if is_frozen else self.reference(name)
        if kind == "parameter":
            return self.updated(parameter)
        if kind == "average":
            decay = self.options["ema_decay"]
            return decay * self.average_before(parameter) + (1 - decay) * self.own(f"parameter/{parameter}")
        if kind in MOMENTS:
            return self.fresh(name) + MOMENTS[kind] * self.moment_before(name)
        return self.reference(name)

    def fresh(self, name: str) -> torch.Tensor:
        """Return what a first step makes of a moment: (1 - beta) times the run's own clipped gradient, or times its square."""
        return (1 - MOMENTS[name.partition("/")[0]]) * self.newest(name)

    def newest(self, name: str) -> torch.Tensor:
        """Return what the step adds to a moment, before its weight: the run's own clipped gradient, or its square."""
        kind, _, parameter = name.partition("/")
        gradient = self.clip * self.own(f"gradient/{parameter}")
        return gradient if kind == "exp_avg" else gradient.square()

    def moment_before(self, name: str) -> torch.Tensor:
        """Return a moment as it was before the step. It begins with zeros."""
        return self.own(name, self.step - 1) if self.step > 1 else torch.zeros(())

    @property
    def clip(self) -> float:
        """The factor by which the gradients must have been clipped before the update; NaN if no norm was recorded."""
        return math.nan if self.norm is None else self.norm.clip

    # Rows

    def is_wrong(self, name: str) -> bool:
        return name in self.rows and self.rows[name].too_far

    def wrong(self, kind: str) -> list[Judgement]:
        return [row for row in self.rows.values() if row.kind == kind and row.too_far]

    def judged(self, kind: str) -> list[Judgement]:
        return [row for row in self.rows.values() if row.kind == kind and row.judged]

    # Whether a value explains what is wrong

    def explains(self, name: str, value: torch.Tensor) -> bool:
        """Whether a wrong tensor is this value, as exactly as a right tensor would match the reference."""
        return self.is_wrong(name) and self.leaves_little(name, float((self.own(name) - value).norm()))

    def leaves_little(self, name: str, left: float) -> bool:
        """Whether an explanation is good enough that leaves an error of `left` (2-norm) of a wrong tensor.

        It may leave what is tolerated of a right tensor, in proportion if the tensor is larger than the right one, but no more than
        LEFT of the tensor's error.
        """
        row = self.rows[name]
        size = max(1.0, row.distance.own_norm / row.distance.norm) if row.distance.norm > 0 else 1.0
        return left < math.inf and left <= min(row.tolerated * size, LEFT * row.distance.error)

    def factor(self, rows: list[Judgement]) -> float | None:
        """Return the one factor c with tensor = c reference for all of these rows; None if there is none.

        Of parameters, c is the factor of their changes.
        """
        measured = []
        for row in rows:
            distance = row.distance
            if not 0 < distance.change < math.inf:
                return None
            tolerated = row.tolerated * max(1.0, abs(distance.scale))
            if not (
                0 < distance.error < math.inf and distance.across <= min(tolerated, LEFT * distance.error)
            ):
                return None
            measured.append((distance.scale, tolerated / distance.change))
        if not measured:
            return None
        surest, _ = min(measured, key=lambda pair: pair[1])
        is_common = all(
            abs(scale - surest) <= max(uncertainty, 1e-6 * abs(surest)) and uncertainty <= abs(surest - 1) / 2
            for scale, uncertainty in measured
        )
        return surest if is_common else None

    def names_of(self, factor: float) -> list[str]:
        """Return what a factor may be: a number of ranks or of micro batches, its inverse, or in a moment the factor of clipping."""
        names = evidence.name_factor(factor, self.sizes, self.near)
        clip = self.clip if self.first.startswith("exp_avg") else 1.0
        if math.isfinite(clip) and abs(clip - 1) > self.near:
            known = {"clip factor": clip, "1/clip factor": 1 / clip, "1/clip factor^2": clip**-2}
            names += [name for name, value in known.items() if abs(factor - value) <= self.near * value]
        return names

    def in_words(self, factor: float) -> str:
        """Return a factor and what it may be, such as "2 = tp or dp"."""
        names = self.names_of(factor)
        return evidence.shown(factor) + (f" = {' or '.join(names)}" if names else "")

    def losses(self) -> list[tuple[float, float, float]]:
        """Return (reported loss, reference's loss, what is tolerated of their difference) of each group of DP ranks in the step."""
        return [
            (loss.by_strategy[self.strategy], loss.exact[self.strategy], loss.tolerated)
            for loss in self.result.losses
            if loss.step == self.step and self.strategy in loss.exact
        ]

    def loss_is_scaled(self, factor: float) -> bool:
        """Whether every reported loss is the reference's, or this factor times the reference's.

        If not, the loss is another function.
        """
        return all(
            min(abs(loss - reference), abs(loss - factor * reference)) <= max(1.0, abs(factor)) * tolerated
            for loss, reference, tolerated in self.losses()
        )

    # Where a tensor lies on the mesh

    def sharded(self, name: str) -> dict[str, int]:
        """Return mesh axis -> the dim of a tensor that it cuts. The innermost axis comes first, because it cuts first."""
        dims = self.entry["tensors"][name]["sharded"]
        return {axis: dims[axis] for axis in reversed(self.mesh.axes) if axis in dims}

    def cut_of_output(self, module: str, axis: str) -> str | int | None:
        """Return what an axis cuts of a module's output: BATCH, SEQUENCE, or the size of another dim; None if it cuts nothing."""
        dim = self.sharded(f"forward/{module}").get(axis)
        return None if dim is None else self.dump.layout.outputs[module][dim]

    @property
    def pieces(self) -> list[list[list[int]]]:
        """[start, length] of the pieces of the sequence that each cp rank has; [] without context parallelism."""
        return self.dump.contract.get("cuts", {}).get("cp", [])

    def cp_rank_of(self, length: int) -> torch.Tensor:
        """Return the cp rank that has each of `length` positions; 0 without context parallelism."""
        owner = torch.zeros(length, dtype=torch.long)
        for rank, pieces in enumerate(self.pieces):
            for start, size in pieces:
                owner[start : start + size] = rank
        return owner

    def is_replicated(self, name: str) -> bool:
        """Whether there are several tp ranks, and each has the whole parameter."""
        return self.mesh.tp > 1 and "tp" not in self.sharded(name)

    def shares(self, name: str, axis: str, tensor: torch.Tensor) -> list[list[torch.Tensor]]:
        """Return the pieces of a tensor that each rank along an axis holds.

        An axis cuts each piece that the axes inside it have made.
        """
        pieces = [tensor]
        for inner_axis, dim in self.sharded(name).items():
            if inner_axis == axis:
                break
            pieces = [chunk for piece in pieces for chunk in piece.chunk(self.mesh.size(inner_axis), dim)]
        size, dim = self.mesh.size(axis), self.sharded(name)[axis]
        chunked = [piece.chunk(size, dim) for piece in pieces]
        return [[chunks[rank] for chunks in chunked if rank < len(chunks)] for rank in range(size)]

    def in_one_share(self, name: str, wrong: torch.Tensor, axes: Iterable[str]) -> list[str]:
        """Return a sentence for each of these axes along which one rank alone holds wrong elements of a tensor.

        `wrong` is a mask of the elements.
        """
        sentences = []
        for axis in axes:
            if axis in self.sharded(name):
                hit = [
                    any(bool(piece.any()) for piece in pieces) for pieces in self.shares(name, axis, wrong)
                ]
                if hit.count(True) == 1 < len(hit):
                    sentences.append(f"only in the share of {axis} rank {hit.index(True)} of {len(hit)}")
        return sentences

    def odd_ranks(self, name: str) -> list[int]:
        """Return the ranks whose replica of a shard differs from the one that was written. The written one is judged."""
        return self.entry["replicas_differ"].get(name, [])

    def unjudged_replicas(self, names: Iterable[str]) -> str:
        """Return which ranks have another replica of these tensors, as the end of a sentence on what was judged; "" if none do."""
        ranks = sorted({rank for name in names for rank in self.odd_ranks(name)})
        if not ranks:
            return ""
        who = f"ranks {and_more([*map(str, ranks)])} have" if len(ranks) > 1 else f"rank {ranks[0]} has"
        return f"; {who} another, which was not judged"

    # The model

    @property
    def head_size(self) -> int:
        """The size of an attention head, by the model's configuration."""
        config = self.dump.run["architecture"]
        return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]

    def weight_of(self, module: str) -> str | None:
        """Return the name of a module's weight; None for a module without one. A tied head has the embedding's."""
        weight = f"{module}.weight"
        if weight in self.dump.layout.parameters:
            return weight
        tied = self.names.embedding_weight
        is_tied_head = module == self.names.head and tied in self.dump.layout.parameters
        return tied if is_tied_head else None

    def source(self, module: str) -> str | None:
        """Return the captured tensor that a module computes its output from; None unless it is exactly one."""
        sources = self.dump.layout.sources.get(module, ())
        return sources[0] if len(sources) == 1 else None

    def is_transposed(self, module: str) -> bool:
        """Whether a linear layer holds W^T, (in, out), in the place of W."""
        return self.names.linear_is_transposed and module != self.names.head

    def is_linear(self, module: str) -> bool:
        """Whether a module is y = x W^T + b of one captured x."""
        weight = self.weight_of(module)
        return (
            weight is not None
            and self.source(module) is not None
            and len(self.dump.layout.parameters[weight]) == 2
        )

    def has(self, *names: str) -> bool:
        """Whether the run and its reference have all of these tensors of the step."""
        return all(
            name in self.entry["tensors"] and name in self._reference_of_step.steps[self.step]["tensors"]
            for name in names
        )


def describe(name: str) -> str:
    """Return what a captured name stands for, in words: a module's output, its input, or a further output."""
    as_input, as_further = (
        re.fullmatch(r"(.*)\.input(\.\d+)?", name),
        re.fullmatch(r"(.*(?<!\.layers)(?<!\.h))\.(\d+)", name),
    )
    if as_input:
        return f"{as_input[1]}'s input"
    return f"output {as_further[2]} of {as_further[1]}" if as_further else f"{name}'s output"
