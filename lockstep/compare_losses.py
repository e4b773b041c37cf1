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


DERIVED_STEPS = 100  # what the growth factors below were measured over


@dataclass(frozen=True)
class Rule:
    """How a tolerance follows from a run: the first loss may be off by its rounding noise; training amplifies that."""

    growth: float  # largest difference over up to 100 steps / first difference
    mean_growth: float
    grad_norm: float
    reason: str


# The one table of tolerances; docs/precision.md derives the numbers and measures the noise they are made of.
RULES = {
    "fp32": Rule(
        growth=10,
        mean_growth=2,
        grad_norm=1e-5,
        reason="only the order of float32 sums differs: two float32 spacings of the first loss, ten times that in "
        "100 steps; the gradient norm is summed in float64 from gradients that differ by a few roundings of 6e-8",
    ),
    "autocast": Rule(
        growth=10,
        mean_growth=2.5,
        grad_norm=1e-2,
        reason="every bfloat16 product is rounded by a relative 2^-9: the mean loss of N tokens carries noise of at most "
        "5 x 2^-9 x (spread of the logits) / sqrt(N); four standard deviations of the difference of two runs, ten "
        "times that in 100 steps; the gradient norm starts within 3e-4 and is amplified likewise",
    ),
}


def tolerance_for(baseline: History) -> Tolerance:
    """The tolerance for comparing other runs with this one. Raises UserError where none has been derived.

    The spread of the logits of a fresh tied model is initializer_range x sqrt(hidden_size).
    """
    precision = baseline.run["config"]["precision"]
    if precision not in RULES:
        raise UserError(
            f"no tolerance is derived for --precision {precision}, so there is no verdict; "
            f"compare with --precision {' or '.join(RULES)}"
        )
    rule, step = RULES[precision], baseline.steps[0]
    first = loss_noise(precision, step["loss"], baseline.run["architecture"], step["tokens"])
    return Tolerance(first, rule.growth * first, rule.mean_growth * first, rule.grad_norm, rule.reason)


def loss_noise(precision: str, loss: float, architecture: dict, num_tokens: int) -> float:
    """By how much the mean losses (nats) of two correct runs over the same tokens may differ by rounding alone."""
    if precision == "fp32":
        return 2 * 2.0 ** (math.floor(math.log2(loss)) - 23) if 0 < loss < math.inf else 2.0**-23
    spread = architecture["initializer_range"] * math.sqrt(architecture["hidden_size"])
    return 4 * math.sqrt(2) * 5 * 2.0**-9 * spread / math.sqrt(num_tokens)


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
        whole = history.ended == "finished" and len(history.steps) == history.run["num_steps"]
        if not whole and not broken:
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
    if other.run["architecture"] != baseline.run["architecture"]:
        raise UserError(f"{pair}: their models differ; use one --model_name and --num_layers")
    # a run that broke down in its first step has no contract; it fails for that
    both = baseline.contract is not None and other.contract is not None
    difference = contract_difference(baseline.contract, other.contract, KNOWN_DIFFERENCES) if both else ""
    if difference:
        raise UserError(f"{pair}: their effective contracts differ, {difference}; run both with the same options")
    if other.run["versions"] != baseline.run["versions"]:
        raise UserError(
            f"{pair}: versions {other.run['versions']} against {baseline.run['versions']}; run both in one environment"
        )


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
    if not history.weights.get("moved"):
        return [f"{label}: no weight moved in {len(history.steps)} steps, so agreement proves nothing"]
    if all(step["loss"] == history.steps[0]["loss"] for step in history.steps) and len(history.steps) > 1:
        return [f"{label}: the loss never changed, so agreement proves nothing"]
    return []
