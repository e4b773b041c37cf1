"""Are two loss curves the same computation? Tolerances with their reasons, differences, verdicts. No distributed."""

import itertools
import math
from dataclasses import asdict, dataclass

from lockstep.contract import KNOWN_DIFFERENCES, contract_difference
from lockstep.errors import UserError
from lockstep.history import History, not_finite


@dataclass(frozen=True)
class Tolerance:
    """Bounds on |loss - DDP's loss| in nats, of every step and of the mean over steps, and on the relative difference of
    every step's gradient norm."""

    loss: tuple[float, ...]
    mean: float
    grad_norm: tuple[float, ...]
    reason: str

    @property
    def first(self) -> float:
        return self.loss[0]

    @property
    def maximum(self) -> float:
        return max(self.loss)

    def as_dict(self) -> dict:
        return {**asdict(self), "first": self.first, "maximum": self.maximum}


MEAN_SPACINGS, RANK_SPACINGS = 2, 5  # of float32, between the losses of two correct runs: mean over DP ranks, one rank
CONTROL_FACTOR = 8  # twice
WORST_RATIO = 4  # how far correct runs have gone beyond what one control run had shown (docs/precision.md)
DERIVED_STEPS = 100  # what the growth factors below were measured over


@dataclass(frozen=True)
class Rule:
    """How a tolerance follows from a run: the first loss may be off by its rounding noise; training amplifies that."""

    growth: float  # largest difference over up to 100 steps / first difference
    mean_growth: float
    grad_norm: float
    first_grad_norm: float  # allowed at any step, however little the control run shows
    reason: str


# The one table of tolerances; docs/precision.md derives the numbers and measures the noise they are made of.
RULES = {
    "fp32": Rule(
        growth=10,
        mean_growth=2,
        grad_norm=1e-5,
        first_grad_norm=1e-6,
        reason="only the order of float32 sums differs: two float32 spacings of the first loss, ten times that in "
        "100 steps; the gradient norm is summed in float64 from gradients that differ by a few roundings of 6e-8",
    ),
    "autocast": Rule(
        growth=10,
        mean_growth=2.5,
        grad_norm=1e-2,
        first_grad_norm=1e-3,
        reason="every bfloat16 product is rounded by a relative 2^-9: the mean loss of N tokens carries noise of at most "
        "5 x 2^-9 x (spread of the logits) / sqrt(N); four standard deviations of the difference of two runs, ten "
        "times that in 100 steps; the gradient norm starts within 3e-4 and is amplified likewise",
    ),
}


def tolerance_for(baseline: History, control: History | None = None) -> Tolerance:
    """The tolerance for comparing other runs with this one; `control` is the same run from weights one rounding off.

    With a control run every step is allowed CONTROL_FACTOR times as much as rounding has moved the control run by then.
    RULES cap that, as long as correct runs can be expected to stay within them: up to the step at which WORST_RATIO times
    the control's difference no longer does, and only for precisions and lengths that they are derived for. What RULES give
    for the first step is always allowed, and there no more: only the control run starts from other weights. Raises UserError
    where there is neither a rule nor a control run, and for a control run of something else.
    """
    precision = baseline.run["config"]["precision"]
    rule = RULES.get(precision)
    if rule is None and control is None:
        raise UserError(
            f"no tolerance is derived for --precision {precision}, so there is no verdict; add a control run "
            f"(train_ddp.py --noise_control), or compare with --precision {' or '.join(RULES)}"
        )
    fixed = _derived(rule, baseline) if rule else None
    if control is None:
        return fixed
    _require_control(baseline, control)
    if any(not_finite(step) for step in baseline.steps):  # it fails by itself; its control says nothing
        return fixed or Tolerance((0.0,) * len(baseline.steps), 0.0, (0.0,) * len(baseline.steps), "nothing: DDP broke down")
    pairs = list(zip(baseline.steps, control.steps, strict=True))
    gaps, norms = [loss_gap(*pair) for pair in pairs], [norm_gap(*pair) for pair in pairs]
    reason = f"{CONTROL_FACTOR} times what one rounding of the initial weights did to DDP's own run by that step"
    if fixed is None:
        return Tolerance(_envelope(gaps), CONTROL_FACTOR * sum(gaps) / len(gaps), _envelope(norms), reason)
    capped = len(pairs) <= DERIVED_STEPS
    later = _envelope(gaps, fixed.first, fixed.maximum if capped else math.inf)[1:]
    (mean,) = _envelope([sum(gaps) / len(gaps)], fixed.first, fixed.mean if capped else math.inf)
    norm = _envelope(norms, rule.first_grad_norm, rule.grad_norm if capped else math.inf)
    return Tolerance((fixed.first, *later), mean, norm, f"{reason}; {rule.reason}")


def _envelope(gaps: list[float], least: float = 0.0, cap: float = math.inf) -> tuple[float, ...]:
    """CONTROL_FACTOR times the largest gap so far, at least `least`, at most `cap` while WORST_RATIO times it is within."""
    so_far = itertools.accumulate(gaps, max)
    bounds = ((gap, max(CONTROL_FACTOR * gap, least)) for gap in so_far)
    return tuple(min(bound, cap) if WORST_RATIO * gap <= cap else bound for gap, bound in bounds)


def _derived(rule: Rule, baseline: History) -> Tolerance:
    """What RULES say. The spread of the logits of a fresh tied model is initializer_range x sqrt(hidden_size)."""
    config, step, later = baseline.run["config"], baseline.steps[0], len(baseline.steps) - 1
    first = loss_noise(config["precision"], step["loss"], baseline.run["architecture"], step["tokens"])
    losses = (first, *[rule.growth * first] * later)
    return Tolerance(losses, rule.mean_growth * first, (rule.grad_norm,) * len(losses), rule.reason)


def _require_control(baseline: History, control: History) -> None:
    """Raise UserError unless `control` is the baseline's run but for its initial weights."""
    again = "make it again with train_ddp.py --noise_control and the baseline's flags"
    try:
        require_comparable(baseline, control, same_weights=False)
    except UserError as error:
        raise UserError(f"{error}; the control run is not the baseline's: {again}") from error
    broken = next((step["step"] for step in control.steps if not_finite(step)), None)
    if broken is not None:
        raise UserError(f"{control.run['label']} broke down in step {broken} and shows no noise; lower --learning_rate, or leave it out")
    if control.weights["initial_sha256"] == baseline.weights["initial_sha256"]:
        raise UserError(f"{control.run['label']} started from the baseline's own weights and shows no noise; {again}")


def loss_gap(mine: dict, theirs: dict) -> float:
    return abs(theirs["loss"] - mine["loss"])


def norm_gap(mine: dict, theirs: dict) -> float:
    return abs(theirs["grad_norm"] - mine["grad_norm"]) / (mine["grad_norm"] or math.nan)


def loss_noise(precision: str, loss: float, architecture: dict, num_tokens: int, *, spacings: int = MEAN_SPACINGS) -> float:
    """By how much the mean losses (nats) of two correct runs over the same tokens may differ by rounding alone."""
    if precision == "fp32":
        return spacings * 2.0 ** (math.floor(math.log2(loss)) - 23) if 0 < loss < math.inf else 2.0**-23
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
    red_loss_step: int | None  # the first at which it is too far; the last, if only the mean is
    red_grad_norm_step: int | None
    problems: list[str]

    @property
    def loss_passed(self) -> bool:
        return self.red_loss_step is None

    @property
    def grad_norm_passed(self) -> bool:
        return self.red_grad_norm_step is None

    @property
    def passed(self) -> bool:
        return self.loss_passed and self.grad_norm_passed and not self.problems

    def as_dict(self) -> dict:
        words = ("loss_passed", "grad_norm_passed", "passed")
        return {**asdict(self), **{word: getattr(self, word) for word in words}}


def require_comparable(baseline: History, other: History, *, same_weights: bool = True) -> None:
    """Raise UserError naming the first thing in which two runs differ that no verdict may overlook.

    Initial weights (`same_weights=False`: may differ), batches, length and contract. A run that ended in a NaN is comparable: it fails.
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
    if same_weights and other.weights["initial_sha256"] != baseline.weights["initial_sha256"]:
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
    relative = [norm_gap(mine, theirs) for mine, theirs in pairs]
    red_loss, red_norm = _first_red(absolute, tolerance.loss), _first_red(relative, tolerance.grad_norm)
    if red_loss is None and not sum(absolute) / len(absolute) <= tolerance.mean:
        red_loss = len(absolute)  # no single step shows it, the mean over all does
    return Verdict(
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
    )


def _first_red(gaps: list[float], bounds: tuple[float, ...]) -> int | None:
    """The first step whose gap is too large; a NaN is, for it compares false with everything."""
    return next((step for step, (gap, bound) in enumerate(zip(gaps, bounds, strict=False), 1) if not gap <= bound), None)


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
