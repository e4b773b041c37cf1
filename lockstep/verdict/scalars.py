"""Judge what a run recorded besides its tensors: the loss of every DP rank, the gradient norm, discrete choices."""

import math
from dataclasses import dataclass, field

import torch

from lockstep.dumps.dump import Dump, Dumps, number_of_elements
from lockstep.inputs.data import independent_tokens
from lockstep.inputs.samples import IGNORED
from lockstep.plan.config import BASELINE
from lockstep.verdict.distance import Distance
from lockstep.verdict.float64 import GROUPS
from lockstep.verdict.judgement import LIMIT, ROUNDOFF, Judgement
from lockstep.verdict.loss_tolerance import GROWTH, RANK_ULPS, loss_noise

# How many float32 unit roundoffs a recorded gradient norm may be off by: it is summed in float64, and passed on in float32.
NORM = 8
# A norm that was summed in float32 may have so many times the error that the norm of the same gradients has if it is summed in float32
# here: in another order, the error is another.
SUMMED_IN_FLOAT32 = 2


@dataclass
class Loss:
    """The loss of one DP rank in one step."""

    step: int
    dp_rank: int
    reference: float | None  # None without a reference
    by_strategy: dict[str, float]
    tolerated: float  # of the difference from DDP
    # Strategy -> the reference's loss for the weights that this run itself had
    exact: dict[str, float] = field(default_factory=dict)
    limit: float = math.inf  # what is tolerated of the difference from `exact`
    # Strategy -> by how much its loss should differ from the baseline's, because its weights, micro batches or choices are others
    moved: dict[str, float] = field(default_factory=dict)

    def problem(self, run: str, baseline: str) -> str:
        """Return what is wrong with the loss of a run, in words; "" if nothing is.

        Where a run and the baseline differ, and the run alone is near its reference, the baseline is to blame.
        """
        loss = self.by_strategy[run]
        blamed_for = [] if self._is_exact(baseline) else [*filter(self._is_exact, self.by_strategy)]
        checks = []
        if run == baseline and any(self._is_apart(other, baseline) for other in blamed_for):
            checks.append((self.exact[run], "the reference", self.tolerated))
        elif run not in blamed_for:
            checks.append((self._expected(run, baseline), baseline, self.tolerated))
        if run in self.exact:
            checks.append((self.exact[run], "the reference", self.limit))
        for base, whose, tolerated in checks:
            if not abs(loss - base) <= tolerated:  # a NaN fails
                return f"is {loss:.9f}, {whose}'s is {base:.9f}; {tolerated:.1e} is tolerated"
        return ""

    def _is_exact(self, run: str) -> bool:
        """Whether a run's loss is as near its reference as two runs must be to each other."""
        return run in self.exact and abs(self.by_strategy[run] - self.exact[run]) <= self.tolerated

    def _is_apart(self, run: str, baseline: str) -> bool:
        return not abs(self.by_strategy[run] - self._expected(run, baseline)) <= self.tolerated

    def _expected(self, run: str, baseline: str) -> float:
        """Return what the loss of a run should be by that of the baseline."""
        return self.by_strategy[baseline] + self.moved.get(run, 0.0)


def losses(baseline: Dump, dumps: Dumps, step: int, precision: str, references: Dumps) -> list[Loss]:
    """Return the losses of all DP ranks in a step, or of the smallest groups of ranks that see the same windows in every run.

    `references` are those of the runs, by strategy; empty without a reference.
    """
    shares = math.gcd(
        *(len(dump.steps[step]["rank_losses"]) for dump in (*dumps.values(), *references.values()))
    )
    batch = ("batch/input_ids", "batch/labels")
    # All dumps have the same batch; some may lack it.
    all_dumps = (baseline, *references.values(), *dumps.values())
    holder = next((dump for dump in all_dumps if dump.has(step, *batch)), baseline)
    ids, labels = (holder.tensor(step, name).numpy() for name in batch)
    rows = len(ids) // shares
    growth = 1 if step == 1 else GROWTH

    def of_rank(dump: Dump, share: int) -> float:
        losses = dump.steps[step]["rank_losses"]
        ranks = len(losses) // shares
        return sum(losses[share * ranks : (share + 1) * ranks]) / ranks

    # The loss is another one for weights that a bfloat16 optimizer has moved otherwise, and for other micro batches of a mixture.
    may_move = bool(references) and (bool(baseline.layout.choices) or baseline.has_own_optimizer)
    rank_losses = []
    for rank in range(shares):
        loss = of_rank(baseline, rank)
        own_rows = slice(rank * rows, (rank + 1) * rows)
        # A rank's loss is the sum over its labels, divided by an equal share of all labels. It is so many times the mean over its labels.
        times = shares * float((labels[own_rows] != IGNORED).sum() / (labels != IGNORED).sum())
        tokens = independent_tokens(ids[own_rows], labels[own_rows]) / times**2
        noise = loss_noise(baseline.run, baseline.steps[1]["loss"], loss, tokens, ulps=RANK_ULPS)
        by_strategy, reference_losses = (
            {name: of_rank(dump, rank) for name, dump in by_name.items()} for by_name in (dumps, references)
        )
        rank_losses.append(
            Loss(
                step,
                rank,
                loss if references else None,
                by_strategy,
                noise * growth,
                reference_losses,
                LIMIT[precision] * abs(loss),
                {name: reference_losses[name] - reference_losses[BASELINE] for name in reference_losses}
                if may_move
                else {},
            )
        )
    return rank_losses


@dataclass
class Norm:
    """The gradient norm that a run recorded, and the norm of the gradients that it held."""

    step: int
    recorded: float
    held: float
    # What a norm that is summed in float32 may be off by; 0 unless the recorded norm is off by more than one that is summed in float64
    float32: float = 0.0
    clip: float = math.nan  # what the gradients were multiplied with

    @property
    def inexact(self) -> bool:
        """Whether the recorded norm is off by more than a norm that was summed in float64 may be. A NaN is."""
        return not abs(self.recorded - self.held) <= NORM * ROUNDOFF["F32"] * self.held

    @property
    def off(self) -> bool:
        """Whether the recorded norm is off by more than even a sum in float32 explains."""
        return self.inexact and not abs(self.recorded - self.held) <= self.float32

    @property
    def used(self) -> float:
        """The norm that the gradients must have been clipped by: the recorded norm, or the gradients' own where the recorded one is off."""
        return self.held if self.off else self.recorded

    def describe(self) -> str:
        return f"was recorded as {self.recorded:.9g}; the gradients' is {self.held:.9g}"


def norm_of(dump: Dump, step: int, found: dict[str, Distance]) -> Norm | None:
    """Return the recorded gradient norm and that of the gradients; None if these are not all there.

    `found` are the distances of the step's tensors, by name.
    """
    gradients = [f"gradient/{name}" for name in dump.layout.model.trained]
    if not all(name in found for name in gradients):
        return None
    entry = dump.steps[step]
    norm = Norm(step, entry["grad_norm"], math.hypot(*(found[name].own_norm for name in gradients)))
    # If replicas differ, the norm that rank 0 recorded is of other gradients.
    has_equal_replicas = entry["replicas_differ"].keys().isdisjoint(gradients)
    if norm.inexact and has_equal_replicas and math.isfinite(norm.held):
        norms = [torch.linalg.vector_norm(dump.tensor(step, name).float()) for name in gradients]
        summed = float(torch.linalg.vector_norm(torch.stack(norms)))
        largest = max(number_of_elements(entry["tensors"][name]) for name in gradients)
        norm.float32 = float32_norm_error(norm.held, summed, largest)
    return norm


def float32_norm_error(held: float, summed: float, largest: int) -> float:
    """Return by how much a gradient norm may be off from `held` if it was summed in float32, as by `clip_grad_norm_`; absolute.

    `summed` is the same norm summed in float32 here. `largest` is the number n of elements of the largest gradient: its square is the sum
    of n rounded additions, each off by at most u of the sum so far, without a preferred sign. The norm is then off by less than u sqrt(n),
    relative to itself (docs/verification.md).
    """
    return SUMMED_IN_FLOAT32 * abs(summed - held) + math.sqrt(largest) * ROUNDOFF["F32"] * held


@dataclass(frozen=True)
class Chosen:
    """A discrete choice of a run in one step, such as a router's of experts, that the reference was told to make."""

    step: int
    name: str  # of the output that has the choice
    # The largest amount by which a score that was not chosen is above one that was, in the reference
    regret: float
    tolerated: float

    @property
    def too_far(self) -> bool:
        return not self.regret <= self.tolerated  # a NaN is

    def describe(self) -> str:
        return (
            f"is another choice than the reference's: a score that was left out is above one that was taken by {self.regret:.2e}, "
            f"tolerated {self.tolerated:.1e}"
        )


def choices(reference: Dump, step: int, rows: dict[str, Judgement]) -> list[Chosen]:
    """Judge the discrete choices that a run's reference was told to make. `rows` are the run's rows of the step, by name.

    Scores are made of logits by a softmax or a sigmoid, which never widen a difference. So two scores that the right choice has in
    another order are at most twice as far apart as a logit may be off. The score of a group of experts is the sum of its two largest
    scores (DeepSeek-V3, arXiv 2412.19437).
    """
    chosen = []
    for name, regret in reference.steps[step].get("regrets", {}).items():
        scores = rows.get(f"forward/{reference.layout.choices[name.removesuffix(GROUPS)].scores}")
        times = 4 if name.endswith(GROUPS) else 2
        chosen.append(Chosen(step, name, regret, times * scores.tolerated_largest if scores else 0.0))
    return chosen
