"""Are two loss curves the same computation? Differences and verdicts. No distributed."""

import math
from dataclasses import asdict, dataclass

from lockstep.losses.comparable_curves import require_comparable_curves
from lockstep.losses.control import CONTROL_FACTOR, loss_gap, norm_gap
from lockstep.losses.tolerance import (
    DERIVED_STEPS,
    RANK_ULPS,
    RULES,
    Tolerance,
    loss_noise,
    tolerance_for,
)
from lockstep.training.history import History, not_finite
from lockstep.training.rates import rate_of

__all__ = [
    "CONTROL_FACTOR",
    "DERIVED_STEPS",
    "FAIL",
    "NOT_JUDGED",
    "PASS",
    "RANK_ULPS",
    "RULES",
    "Tolerance",
    "CurveVerdict",
    "compare_curves",
    "loss_gap",
    "loss_noise",
    "norm_gap",
    "require_comparable_curves",
    "tolerance_for",
]
PASS, FAIL, NOT_JUDGED = "PASS", "FAIL", "NOT JUDGED"


@dataclass(frozen=True)
class CurveVerdict:
    """The comparison of one run with the baseline. `problems` are reasons to fail other than the tolerances."""

    label: str
    max_abs_diff: float
    mean_abs_diff: float
    first_diff: float
    final_diff: float
    worst_step: int
    max_grad_norm_diff: float  # relative
    worst_grad_norm_step: int
    red_loss_step: int | None  # the first at which it is too far; the last, if only the mean is
    red_grad_norm_step: int | None
    problems: list[str]
    doubt: str  # why the differences cannot be judged, or ""
    certain: int  # steps whose bounds can fail a run

    @property
    def loss_passed(self) -> bool:
        return self.red_loss_step is None

    @property
    def grad_norm_passed(self) -> bool:
        return self.red_grad_norm_step is None

    @property
    def outcome(self) -> str:
        """PASS, FAIL or NOT JUDGED. If the tolerance is in doubt, only the bounds of the `certain` steps can fail a run."""
        red = [step for step in (self.red_loss_step, self.red_grad_norm_step) if step is not None]
        if self.problems or any(step <= self.certain for step in red):
            return FAIL
        return NOT_JUDGED if self.doubt else PASS

    @property
    def passed(self) -> bool:
        return self.outcome == PASS

    def as_dict(self) -> dict:
        words = ("loss_passed", "grad_norm_passed", "passed", "outcome")
        return {**asdict(self), **{word: getattr(self, word) for word in words}}


def compare_curves(baseline: History, other: History, tolerance: Tolerance) -> CurveVerdict:
    """Compare a run with the baseline, step by step. Call `require_comparable_curves` first."""
    problems = [problem for history in (baseline, other) for problem in _own_problems(history)]
    if other.weights.get("moved") != baseline.weights.get("moved"):
        odd = sorted(set(other.weights.get("moved", [])) ^ set(baseline.weights.get("moved", [])))
        problems.append(f"not the same tensors were trained: {', '.join(odd[:3])} moved in one run only")
    pairs = list(zip(baseline.steps, other.steps, strict=False))
    for mine, theirs in pairs:
        if mine["learning_rate"] != theirs["learning_rate"]:
            rates = f"{theirs['learning_rate']!r} against {mine['learning_rate']!r}"
            problems.append(
                f"{other.run['label']}: the learning rate of step {mine['step']} differs, {rates}"
            )
            break
    differences = [theirs["loss"] - mine["loss"] for mine, theirs in pairs]
    absolute = [abs(difference) for difference in differences]
    relative = [norm_gap(mine, theirs) for mine, theirs in pairs]
    red_loss, red_norm = _first_red(absolute, tolerance.loss), _first_red(relative, tolerance.grad_norm)
    if red_loss is None and not sum(absolute) / len(absolute) <= tolerance.mean:
        red_loss = len(absolute)  # no single step shows it, the mean over all does
    return CurveVerdict(
        label=other.run["label"],
        max_abs_diff=_worst(absolute),
        mean_abs_diff=sum(absolute) / len(absolute),
        first_diff=differences[0],
        final_diff=differences[-1],
        worst_step=1 + absolute.index(_worst(absolute)) if _worst(absolute) in absolute else 0,
        max_grad_norm_diff=_worst(relative),
        worst_grad_norm_step=1 + relative.index(_worst(relative)) if _worst(relative) in relative else 0,
        red_loss_step=red_loss,
        red_grad_norm_step=red_norm,
        problems=problems,
        doubt=tolerance.doubt,
        certain=tolerance.certain,
    )


def _first_red(gaps: list[float], bounds: tuple[float, ...]) -> int | None:
    """The first step whose gap is too large, or NaN."""
    return next(
        (step for step, (gap, bound) in enumerate(zip(gaps, bounds, strict=False), 1) if not gap <= bound),
        None,
    )


def _worst(values: list[float]) -> float:
    return math.nan if any(math.isnan(value) for value in values) else max(values)


def _own_problems(history: History) -> list[str]:
    """Why a run fails, whatever it is compared with."""
    label, options = history.run["label"], history.run["config"]
    broken = next((step["step"] for step in history.steps if not_finite(step)), None)
    if broken is not None:
        return [f"{label}: step {broken} has a loss or gradient norm that is not finite"]
    for step in history.steps:
        rate = rate_of(options, step["step"], history.run["num_steps"])
        if step["learning_rate"] != rate:
            what = f"the learning rate of step {step['step']} is {step['learning_rate']!r}"
            return [f"{label}: {what}, its configuration says {rate!r}"]
        if step["loss"] < 0:
            return [
                f"{label}: the loss of step {step['step']} is {step['loss']!r}; a cross entropy cannot be negative"
            ]
    if not history.weights.get("moved"):
        return [f"{label}: no weight moved in {len(history.steps)} steps, so agreement proves nothing"]
    if all(step["loss"] == history.steps[0]["loss"] for step in history.steps) and len(history.steps) > 1:
        return [f"{label}: the loss never changed, so agreement proves nothing"]
    return []
