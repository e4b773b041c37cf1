"""Are two loss curves the same computation? What must agree, differences, verdicts. No distributed."""

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


def worst(outcomes: Iterable[str]) -> str:
    """The worst of some verdicts."""
    found = set(outcomes)
    return next(word for word in (FAIL, NOT_JUDGED, PASS) if word in found)


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
        """PASS, FAIL or NOT JUDGED."""
        return (
            FAIL
            if self.problems
            else worst(map(self.outcome_of, (self.red_loss_step, self.red_grad_norm_step)))
        )

    def outcome_of(self, red: int | None) -> str:
        """What the first step that is too far says. If the tolerance is in doubt, only the bounds of the `certain` steps can fail a run."""
        if red is not None and red <= self.certain:
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
    odd = _moved_in_one(baseline, other)
    if odd:
        problems.append(f"not the same tensors were trained: {', '.join(odd[:3])} moved in one run only")
    # One that broke down has fewer steps
    pairs = list(zip(baseline.steps, other.steps, strict=False))
    differences = [theirs["loss"] - mine["loss"] for mine, theirs in pairs]
    gaps, norms = [*map(abs, differences)], [norm_gap(*pair) for pair in pairs]
    mean = sum(gaps) / len(gaps)
    red_loss = _first_red(gaps, tolerance.loss)
    if red_loss is None and not mean <= tolerance.mean:
        red_loss = len(gaps)  # no single step shows it, the mean over all does
    (largest, worst_step), (largest_norm, worst_norm_step) = _worst(gaps), _worst(norms)
    return CurveVerdict(
        label=other.run["label"],
        max_abs_diff=largest,
        mean_abs_diff=mean,
        first_diff=differences[0],
        final_diff=differences[-1],
        worst_step=worst_step,
        max_grad_norm_diff=largest_norm,
        worst_grad_norm_step=worst_norm_step,
        red_loss_step=red_loss,
        red_grad_norm_step=_first_red(norms, tolerance.grad_norm),
        problems=problems,
        doubt=tolerance.doubt,
        certain=tolerance.certain,
    )


def _first_red(gaps: list[float], bounds: tuple[float, ...]) -> int | None:
    """The first step whose gap is too large, or NaN."""
    return next(
        (step for step, pair in enumerate(zip(gaps, bounds, strict=False), 1) if not pair[0] <= pair[1]), None
    )


def _worst(gaps: list[float]) -> tuple[float, int]:
    """The first NaN, else the largest gap; and its step."""
    step, gap = max(enumerate(gaps, 1), key=lambda one: (math.isnan(one[1]), one[1]))
    return gap, step


def _own_problems(history: History) -> list[str]:
    """Why a run fails, whatever it is compared with."""
    label, options = history.run["label"], history.run["config"]
    broken = next((step["step"] for step in history.steps if not is_finite(step)), None)
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


def tolerance_for(baseline: History, control: History | None = None) -> Tolerance:
    """The tolerance for comparing other runs with this one; `control` is the same run from weights perturbed by one ulp.

    With a control run, every step is allowed CONTROL_FACTOR times as much as rounding errors have moved the control run by then. RULES cap
    this where correct runs can be expected to stay within them: where WORST_RATIO times the control's difference does, for runs and
    lengths for which RULES are derived. What RULES give for the first step is always allowed; in the first step nothing more is, because
    only the control run starts from other weights. A control run that shows something else than rounding errors leaves a doubt. Raises
    UserError if there is neither a rule nor a control run, and if the control run is not this run's.
    """
    rule, noise, norm_noise = rule_and_noise(baseline)
    fixed = derived(rule, floors(baseline.run, baseline.steps)) if rule else None
    if control is None:
        if fixed is None:
            precision = baseline.run["config"]["precision"]
            kind = f"--precision {precision}" + (" and trained weights" if precision in RULES else "")
            instead = "fp32" if precision in RULES else " or ".join(RULES)
            raise UserError(
                f"no tolerance is derived for {kind}, so there is no verdict; add a control run "
                f"(train_ddp.py --noise_control), or compare with --precision {instead}"
            )
        return fixed
    require_control(baseline, control)
    # A baseline that is not finite fails anyway, and its control shows nothing
    if any(not is_finite(step) for step in baseline.steps):
        nothing = (0.0,) * len(baseline.steps)
        return fixed or Tolerance(nothing, 0.0, nothing, "nothing: DDP broke down", len(nothing))
    gaps, norms = ([*map(gap, baseline.steps, control.steps)] for gap in (loss_gap, norm_gap))
    reason = f"{CONTROL_FACTOR} times what one ulp in the initial weights did to DDP's own run by that step"
    steps, mean = len(gaps), [sum(gaps) / len(gaps)]
    if rule is None or fixed is None:
        (bound,) = bounds(mean)
        shown = Tolerance(bounds(envelope(gaps)), bound, bounds(envelope(norms)), reason, steps)
    else:
        caps = (fixed.maximum, fixed.mean, rule.grad_norm) if steps <= DERIVED_STEPS else (math.inf,) * 3
        later = bounds(envelope(gaps), fixed.first, caps[0])[1:]
        norm = bounds(envelope(norms), rule.first_grad_norm, caps[2])
        (bound,) = bounds(mean, fixed.first, caps[1])
        shown = Tolerance((fixed.first, *later), bound, norm, f"{reason}; {rule.reason}", steps)
    losses = [step["loss"] for step in baseline.steps]
    doubt = damage(gaps, noise) or damage(norms, norm_noise) or instability(gaps, noise, losses)
    return replace(shown, doubt=doubt, certain=1 if fixed else 0) if doubt else shown


def require_comparable_curves(baseline: History, other: History, *, same_weights: bool = True) -> None:
    """Raise UserError naming the first thing in which two runs differ that no verdict may overlook.

    Initial weights (`same_weights=False`: may differ), batches, length, configuration and contract. A run that ended in a NaN is
    comparable: it fails.
    """
    names = f"{other.run['label']} and {baseline.run['label']}"
    pair = f"{names} cannot be compared"
    for history in (baseline, other):
        broken = any(not is_finite(step) for step in history.steps)
        whole = history.ended == "finished" and len(history.steps) == history.run["num_steps"]
        if not whole and not broken:
            why = history.ended or "it was killed or is still running"
            raise UserError(
                f"{pair}: {history.run['label']} has {len(history.steps)} of {history.run['num_steps']} steps "
                f"({why}); run it again"
            )
    if other.run["num_steps"] != baseline.run["num_steps"]:
        raise UserError(
            f"{pair}: {other.run['num_steps']} steps against {baseline.run['num_steps']}; use the same --debug_steps"
        )
    require_comparable(other, baseline, "losses", names, same_weights=same_weights)
    if baseline.run["architecture"].get(
        "output_router_logits"
    ):  # then the loss has a term that is a mean over micro batches
        batch, wanted = (run.run["config"]["batch_size"] for run in (other, baseline))
        if batch != wanted:
            raise UserError(
                f"{pair}: the balance of a mixture's experts is a mean over micro batches, which have {batch} sequences against {wanted}; "
                "give both the same --dp_size and --batch_size"
            )
    # a run whose first step is not finite has no contract; it fails for that
    if baseline.contract is not None and other.contract is not None:
        contracts = on_any_mesh(baseline.contract), on_any_mesh(other.contract)
        difference = next(iter(contract_differences(*contracts, KNOWN_DIFFERENCES).values()), "")
        if difference:
            raise UserError(
                f"{pair}: their effective contracts differ, {difference}; run both with the same options"
            )


def _moved_in_one(baseline: History, other: History) -> list[str]:
    """The weights that moved in one of two runs. Weights of bf16 round small updates away, in one run and not in another: nothing follows then."""
    if baseline.run["config"]["precision"] == "bf16":
        return []
    return sorted(set(baseline.weights.get("moved") or []) ^ set(other.weights.get("moved") or []))


def require_control(baseline: History, control: History) -> None:
    """Raise UserError unless `control` is the baseline's run but for its initial weights."""
    again = "make it again with train_ddp.py --noise_control and the baseline's flags"
    try:
        require_comparable_curves(baseline, control, same_weights=False)
    except UserError as error:
        raise UserError(f"{error}; the control run is not the baseline's: {again}") from error
    broken = next((step["step"] for step in control.steps if not is_finite(step)), None)
    if broken is not None:
        raise UserError(
            f"{control.run['label']} has a loss or gradient norm in step {broken} that is not finite; lower --learning_rate, or leave the control run out"
        )
    for mine, theirs in zip(control.steps, baseline.steps, strict=True):
        if mine["learning_rate"] != theirs["learning_rate"]:
            raise UserError(
                f"{control.run['label']} has a different learning rate in step {mine['step']} from the baseline's; {again}"
            )
    if _moved_in_one(baseline, control):
        raise UserError(f"{control.run['label']} trained other tensors than the baseline; {again}")
    if control.weights["initial_sha256"] == baseline.weights["initial_sha256"]:
        raise UserError(
            f"{control.run['label']} started from the baseline's own weights, which were not perturbed; {again}"
        )
