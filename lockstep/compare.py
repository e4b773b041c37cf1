"""Are two loss curves the same computation? Tolerances with their reasons, differences, verdicts. No distributed."""

import math
from dataclasses import asdict, dataclass

from lockstep.contract import KNOWN_DIFFERENCES, contract_difference
from lockstep.errors import UserError
from lockstep.history import History, not_finite


@dataclass(frozen=True)
class Tolerance:
    """Bounds on |loss - DDP's loss| in nats (at the first step, the largest, the mean over steps) and on the largest
    relative difference of the gradient norm."""

    first: float
    maximum: float
    mean: float
    grad_norm: float
    reason: str


# The one table of tolerances, for up to 100 steps. Losses here lie between 2 and 12 nats, so one float32 rounding
# of a loss is up to 2^-21 = 4.8e-7, and one bfloat16 rounding (8 significant bits) is a relative 2^-9 = 2e-3.
TOLERANCES = {
    "fp32": Tolerance(
        first=1e-6,
        maximum=1e-5,
        mean=2e-6,
        grad_norm=1e-5,
        reason="only the order of float32 sums differs: two roundings of the first loss; training then amplifies "
        "the roundings of the weights about tenfold in 100 steps",
    ),
    "autocast": Tolerance(
        first=2e-4,
        maximum=2e-3,
        mean=5e-4,
        grad_norm=1e-2,
        reason="each shard of a row-parallel product is rounded to bfloat16 before the sum: a relative 2^-9 per token, "
        "2^-9 / sqrt(tokens) or about 1e-4 in the mean loss; training amplifies it about tenfold in 100 steps",
    ),
}


@dataclass(frozen=True)
class Verdict:
    """The comparison of one run with the baseline. `problems` are reasons to fail beyond the tolerances."""

    label: str
    max_abs_diff: float
    mean_abs_diff: float
    first_diff: float
    final_diff: float
    worst_step: int
    max_grad_norm_diff: float  # relative
    worst_grad_norm_step: int
    loss_passed: bool
    grad_norm_passed: bool
    problems: list[str]

    @property
    def passed(self) -> bool:
        return self.loss_passed and self.grad_norm_passed and not self.problems

    def as_dict(self) -> dict:
        return {**asdict(self), "passed": self.passed}


def require_comparable(baseline: History, other: History) -> None:
    """Raise UserError naming the first thing in which two runs differ that no verdict may overlook.

    Weights, batches, length and contract. A run that ended in a NaN is comparable: it fails.
    """
    pair = f"{other.run['label']} and {baseline.run['label']} cannot be compared"
    for history in (baseline, other):
        broken = any(not_finite(step) for step in history.steps)
        if history.ended != "finished" and not broken:
            why = history.ended or "it was killed or is still running"
            raise UserError(
                f"{pair}: {history.run['label']} has {len(history.steps)} of {history.run['num_steps']} steps "
                f"({why}); run it again"
            )
    if other.run["num_steps"] != baseline.run["num_steps"]:
        raise UserError(f"{pair}: {other.run['num_steps']} steps against {baseline.run['num_steps']}; use one --debug_steps")
    if other.weights["initial_sha256"] != baseline.weights["initial_sha256"]:
        raise UserError(f"{pair}: they started from different weights; give all runs one --init_weights_path")
    for mine, theirs in zip(other.steps, baseline.steps, strict=False):
        if mine["batch_hash"] != theirs["batch_hash"]:
            raise UserError(
                f"{pair}: step {mine['step']} was trained on different batches; use one corpus, seed, batch size and dp_size"
            )
    difference = contract_difference(baseline.contract, other.contract, KNOWN_DIFFERENCES)
    if difference:
        raise UserError(f"{pair}: their effective contracts differ, {difference}; run both with the same options")
    if other.run["versions"] != baseline.run["versions"]:
        raise UserError(
            f"{pair}: versions {other.run['versions']} against {baseline.run['versions']}; run both in one environment"
        )


def tolerance_for(baseline: History) -> Tolerance:
    precision = baseline.run["config"]["precision"]
    if precision not in TOLERANCES:
        raise UserError(
            f"no tolerance is derived for --precision {precision}, so there is no verdict; "
            f"compare with --precision {' or '.join(TOLERANCES)}"
        )
    return TOLERANCES[precision]


def compare(baseline: History, other: History, tolerance: Tolerance) -> Verdict:
    """Compare a run with the baseline, step by step. Call `require_comparable` first."""
    problems = [problem for history in (baseline, other) for problem in _own_problems(history)]
    if other.weights.get("moved") != baseline.weights.get("moved"):
        odd = sorted(set(other.weights.get("moved", [])) ^ set(baseline.weights.get("moved", [])))
        problems.append(f"not the same tensors were trained: {', '.join(odd[:3])} moved in one run only")
    pairs = list(zip(baseline.steps, other.steps, strict=False))
    differences = [theirs["loss"] - mine["loss"] for mine, theirs in pairs]
    absolute = [abs(difference) for difference in differences]
    relative = [abs(b["grad_norm"] - a["grad_norm"]) / (a["grad_norm"] or math.nan) for a, b in pairs]
    # Written so that a NaN anywhere fails: it compares false with everything.
    return Verdict(
        label=other.run["label"],
        max_abs_diff=_worst(absolute),
        mean_abs_diff=sum(absolute) / len(absolute),
        first_diff=differences[0],
        final_diff=differences[-1],
        worst_step=1 + absolute.index(_worst(absolute)) if _worst(absolute) in absolute else 0,
        max_grad_norm_diff=_worst(relative),
        worst_grad_norm_step=1 + relative.index(_worst(relative)) if _worst(relative) in relative else 0,
        loss_passed=(
            absolute[0] <= tolerance.first
            and all(value <= tolerance.maximum for value in absolute)
            and sum(absolute) / len(absolute) <= tolerance.mean
        ),
        grad_norm_passed=all(value <= tolerance.grad_norm for value in relative),
        problems=problems,
    )


def _worst(values: list[float]) -> float:
    return math.nan if any(math.isnan(value) for value in values) else max(values)


def _own_problems(history: History) -> list[str]:
    """Why a run proves nothing, whatever it is compared with."""
    label = history.run["label"]
    broken = next((step["step"] for step in history.steps if not_finite(step)), None)
    if broken is not None:
        return [f"{label}: step {broken} has a loss or gradient norm that is not finite"]
    if not history.weights["moved"]:
        return [f"{label}: no weight moved in {len(history.steps)} steps, so agreement proves nothing"]
    if all(step["loss"] == history.steps[0]["loss"] for step in history.steps) and len(history.steps) > 1:
        return [f"{label}: the loss never changed, so agreement proves nothing"]
    return []
