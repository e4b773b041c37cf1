"""Whether two loss curves are of the same computation: what must agree, how far they differ, the verdict. Imports no torch."""

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace

from lockstep.dumps.header import is_finite, require_comparable
from lockstep.dumps.history import History
from lockstep.ground.errors import UserError
from lockstep.plan.contract import KNOWN_DIFFERENCES, contract_differences, on_any_mesh
from lockstep.plan.rates import rate_of
from lockstep.verdict.loss_tolerance import (
    CONTROL_FACTOR,
    DERIVED_STEPS,
    RULES,
    Tolerance,
    bounds,
    damage,
    derived,
    envelope,
    floors,
    instability,
    loss_gap,
    norm_gap,
    rule_and_noise,
)

PASS, FAIL, NOT_JUDGED = "PASS", "FAIL", "NOT JUDGED"
VERDICTS = (FAIL, "CONFIGURED DIFFERENTLY", NOT_JUDGED, PASS)  # the worst first


def worst(outcomes: Iterable[str]) -> str:
    """Return the worst of some outcomes, in the order of VERDICTS."""
    return min(outcomes, key=VERDICTS.index)


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
    # The first step whose loss is too far; the last step if only the mean over steps is
    red_loss_step: int | None
    red_grad_norm_step: int | None
    problems: list[str]
    doubt: str  # why the differences cannot be judged, or ""
    certain: int  # if there is a doubt, only the bounds of so many first steps can fail a run

    @property
    def outcome(self) -> str:
        """PASS, FAIL or NOT JUDGED."""
        return (
            FAIL
            if self.problems
            else worst(map(self.outcome_of, (self.red_loss_step, self.red_grad_norm_step)))
        )

    def outcome_of(self, red: int | None) -> str:
        """Return what follows from `red`, the first step that is too far, or None.

        If the tolerance is in doubt, only the bounds of the first `certain` steps can fail a run.
        """
        if red is not None and red <= self.certain:
            return FAIL
        return NOT_JUDGED if self.doubt else PASS

    @property
    def passed(self) -> bool:
        return self.outcome == PASS

    def as_dict(self) -> dict:
        return {**asdict(self), "passed": self.passed, "outcome": self.outcome}


def compare_curves(baseline: History, other: History, tolerance: Tolerance) -> CurveVerdict:
    """Compare a run with the baseline, step by step. Call `require_comparable_curves` first."""
    problems = [problem for history in (baseline, other) for problem in _own_problems(history)]
    moved = _moved_in_one(baseline, other)
    if moved:
        problems.append(f"not the same tensors were trained: {', '.join(moved[:3])} moved in one run only")
    # A run that broke down has fewer steps.
    pairs = list(zip(baseline.steps, other.steps, strict=False))
    differences = [other_step["loss"] - baseline_step["loss"] for baseline_step, other_step in pairs]
    loss_gaps, norm_gaps = [*map(abs, differences)], [norm_gap(*pair) for pair in pairs]
    mean_gap = sum(loss_gaps) / len(loss_gaps)
    red_loss = _first_red(loss_gaps, tolerance.loss)
    if red_loss is None and not mean_gap <= tolerance.mean:
        red_loss = len(loss_gaps)  # no single step shows it, the mean over all does
    (largest_loss_gap, worst_step), (largest_norm_gap, worst_norm_step) = _worst(loss_gaps), _worst(norm_gaps)
    return CurveVerdict(
        label=other.run["label"],
        max_abs_diff=largest_loss_gap,
        mean_abs_diff=mean_gap,
        first_diff=differences[0],
        final_diff=differences[-1],
        worst_step=worst_step,
        max_grad_norm_diff=largest_norm_gap,
        worst_grad_norm_step=worst_norm_step,
        red_loss_step=red_loss,
        red_grad_norm_step=_first_red(norm_gaps, tolerance.grad_norm),
        problems=problems,
        doubt=tolerance.doubt,
        certain=tolerance.certain,
    )


def _first_red(gaps: list[float], limits: tuple[float, ...]) -> int | None:
    """Return the first step whose gap is above its limit or NaN; None if there is none."""
    return next(
        (step for step, pair in enumerate(zip(gaps, limits, strict=False), 1) if not pair[0] <= pair[1]), None
    )


def _worst(gaps: list[float]) -> tuple[float, int]:
    """Return the first NaN, or else the largest gap; and its step."""
    step, gap = max(enumerate(gaps, 1), key=lambda pair: (math.isnan(pair[1]), pair[1]))
    return gap, step


def _own_problems(history: History) -> list[str]:
    """Return why a run fails whatever it is compared with."""
    label, options = history.run["label"], history.run["config"]
    broken_step = next((step["step"] for step in history.steps if not is_finite(step)), None)
    if broken_step is not None:
        return [f"{label}: step {broken_step} has a loss or gradient norm that is not finite"]
    for step in history.steps:
        rate = rate_of(options, step["step"], history.run["num_steps"])
        if step["learning_rate"] != rate:
            recorded = f"the learning rate of step {step['step']} is {step['learning_rate']!r}"
            return [f"{label}: {recorded}, its configuration says {rate!r}"]
        if step["loss"] < 0:
            return [
                f"{label}: the loss of step {step['step']} is {step['loss']!r}; a cross entropy cannot be negative"
            ]
    if not history.weights.get("moved"):
        return [f"{label}: no weight moved in {len(history.steps)} steps, so agreement proves nothing"]
    if all(step["loss"] == history.steps[0]["loss"] for step in history.steps) and len(history.steps) > 1:
        return [f"{label}: the loss never changed, so agreement proves nothing"]
    return []


def tolerance_for(baseline: History, control: History | None = None) -> Tolerance:
    """Return the tolerance for comparing other runs with the baseline.

    `control` is the baseline once more, from weights perturbed by one ulp. With it, every step is allowed CONTROL_FACTOR times as much as
    rounding errors have moved the control run by then. The tolerances of RULES, where they are derived for such a run and its length,
    cap this where correct runs can be expected to stay within them: where WORST_RATIO times the control's difference does. What RULES
    give for the first step is always allowed. In the first step nothing more is, because only the control run starts from other weights.
    A control run that shows something else than rounding errors leaves a doubt.

    Raises UserError if there is neither a rule nor a control run, and if the control run is not the baseline's.
    """
    rule, noise, norm_noise = rule_and_noise(baseline)
    fixed = derived(rule, floors(baseline.run, baseline.steps)) if rule else None
    if control is None:
        if fixed is None:
            precision = baseline.run["config"]["precision"]
            options = f"--precision {precision}" + (" and trained weights" if precision in RULES else "")
            derived_for = "fp32" if precision in RULES else " or ".join(RULES)
            raise UserError(
                f"no tolerance is derived for {options}, so there is no verdict; add a control run "
                f"(train_ddp.py --noise_control), or compare with --precision {derived_for}"
            )
        return fixed
    require_control(baseline, control)
    # A baseline that is not finite fails anyway, and its control shows nothing.
    if any(not is_finite(step) for step in baseline.steps):
        zeros = (0.0,) * len(baseline.steps)
        return fixed or Tolerance(zeros, 0.0, zeros, "nothing: DDP broke down", len(zeros))
    loss_gaps, norm_gaps = ([*map(gap_of, baseline.steps, control.steps)] for gap_of in (loss_gap, norm_gap))
    reason = f"{CONTROL_FACTOR} times what one ulp in the initial weights did to DDP's own run by that step"
    steps, mean_gap = len(loss_gaps), [sum(loss_gaps) / len(loss_gaps)]
    if rule is None or fixed is None:
        (mean,) = bounds(mean_gap)
        tolerance = Tolerance(bounds(envelope(loss_gaps)), mean, bounds(envelope(norm_gaps)), reason, steps)
    else:
        caps = (fixed.maximum, fixed.mean, rule.grad_norm) if steps <= DERIVED_STEPS else (math.inf,) * 3
        later = bounds(envelope(loss_gaps), fixed.first, caps[0])[1:]
        grad_norm = bounds(envelope(norm_gaps), rule.first_grad_norm, caps[2])
        (mean,) = bounds(mean_gap, fixed.first, caps[1])
        tolerance = Tolerance((fixed.first, *later), mean, grad_norm, f"{reason}; {rule.reason}", steps)
    losses = [step["loss"] for step in baseline.steps]
    doubt = damage(loss_gaps, noise) or damage(norm_gaps, norm_noise) or instability(loss_gaps, noise, losses)
    return replace(tolerance, doubt=doubt, certain=1 if fixed else 0) if doubt else tolerance


def require_comparable_curves(baseline: History, other: History, *, same_weights: bool = True) -> None:
    """Raise UserError naming the first difference between two runs that no verdict may overlook.

    Compared are initial weights (`same_weights=False`: may differ), batches, length, configuration and contract. A run that ended in a
    NaN is comparable: it fails.
    """
    labels = f"{other.run['label']} and {baseline.run['label']}"
    refusal = f"{labels} cannot be compared"
    for history in (baseline, other):
        is_broken = any(not is_finite(step) for step in history.steps)
        is_complete = history.ended == "finished" and len(history.steps) == history.run["num_steps"]
        if not is_complete and not is_broken:
            reason = history.ended or "it was killed or is still running"
            raise UserError(
                f"{refusal}: {history.run['label']} has {len(history.steps)} of {history.run['num_steps']} steps "
                f"({reason}); run it again"
            )
    if other.run["num_steps"] != baseline.run["num_steps"]:
        raise UserError(
            f"{refusal}: {other.run['num_steps']} steps against {baseline.run['num_steps']}; use the same --debug_steps"
        )
    require_comparable(other, baseline, "losses", labels, same_weights=same_weights)
    # With router logits, the loss has a term that is a mean over micro batches.
    if baseline.run["architecture"].get("output_router_logits"):
        batch_size, wanted = (history.run["config"]["batch_size"] for history in (other, baseline))
        if batch_size != wanted:
            raise UserError(
                f"{refusal}: the balance of a mixture's experts is a mean over micro batches, which have {batch_size} sequences against {wanted}; "
                "give both the same --dp_size and --batch_size"
            )
    # A run whose first step is not finite has no contract; it fails for that.
    if baseline.contract is not None and other.contract is not None:
        contracts = on_any_mesh(baseline.contract), on_any_mesh(other.contract)
        difference = next(iter(contract_differences(*contracts, KNOWN_DIFFERENCES).values()), "")
        if difference:
            raise UserError(
                f"{refusal}: their effective contracts differ, {difference}; run both with the same options"
            )


def _moved_in_one(baseline: History, other: History) -> list[str]:
    """Return the names of the weights that moved in one of two runs only, sorted.

    Weights in bf16 round small updates away in one run and not in another, so nothing follows there: return [].
    """
    if baseline.run["config"]["precision"] == "bf16":
        return []
    return sorted(set(baseline.weights.get("moved") or []) ^ set(other.weights.get("moved") or []))


def require_control(baseline: History, control: History) -> None:
    """Raise UserError unless `control` is the same run as the baseline but for its initial weights."""
    remedy = "make it again with train_ddp.py --noise_control and the baseline's flags"
    try:
        require_comparable_curves(baseline, control, same_weights=False)
    except UserError as error:
        raise UserError(f"{error}; the control run is not the baseline's: {remedy}") from error
    broken_step = next((step["step"] for step in control.steps if not is_finite(step)), None)
    if broken_step is not None:
        raise UserError(
            f"{control.run['label']} has a loss or gradient norm in step {broken_step} that is not finite; lower --learning_rate, or leave the control run out"
        )
    for control_step, baseline_step in zip(control.steps, baseline.steps, strict=True):
        if control_step["learning_rate"] != baseline_step["learning_rate"]:
            raise UserError(
                f"{control.run['label']} has a different learning rate in step {control_step['step']} from the baseline's; {remedy}"
            )
    if _moved_in_one(baseline, control):
        raise UserError(f"{control.run['label']} trained other tensors than the baseline; {remedy}")
    if control.weights["initial_sha256"] == baseline.weights["initial_sha256"]:
        raise UserError(
            f"{control.run['label']} started from the baseline's own weights, which were not perturbed; {remedy}"
        )
