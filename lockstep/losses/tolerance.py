"""The tolerances of loss curves, with their reasons. No distributed.

docs/precision.md derives the numbers and measures the noise that they are made of.
"""

import math
from dataclasses import asdict, dataclass, replace

from lockstep.errors import UserError
from lockstep.losses.comparable_curves import require_control
from lockstep.losses.control import (
    CONTROL_FACTOR,
    WORST_RATIO,
    Noise,
    damage,
    envelope,
    instability,
    loss_gap,
    norm_gap,
)
from lockstep.training.history import History, not_finite
from lockstep.training.initial_weights import DRAWN

# float32 ulps between the losses of two correct runs
MEAN_ULPS = 2  # of the mean over two DP ranks or more
RANK_ULPS = 5  # of one rank, whose loss is no mean
DERIVED_STEPS = 100  # over which the growth factors below were measured
TRAINED_SPREAD = 4.0  # standard deviation of a trained model's logits, at most


@dataclass(frozen=True)
class Tolerance:
    """Bounds on |loss - DDP's loss| in nats, for every step and for the mean over steps, and on the relative difference of every step's
    gradient norm.

    `doubt` says why the control run is no measure of rounding errors. Then only the bounds of the first `certain` steps can fail a run;
    they hold without a control run.
    """

    loss: tuple[float, ...]
    mean: float
    grad_norm: tuple[float, ...]
    reason: str
    certain: int
    doubt: str = ""

    @property
    def first(self) -> float:
        return self.loss[0]

    @property
    def maximum(self) -> float:
        return max(self.loss)

    def as_dict(self) -> dict:
        return {**asdict(self), "first": self.first, "maximum": self.maximum}


@dataclass(frozen=True)
class Rule:
    """How a tolerance follows from a run: the rounding noise of the first loss, and its amplification by training."""

    growth: float  # largest difference over up to 100 steps / first difference
    mean_growth: float
    grad_norm: float
    first_grad_norm: float  # allowed at any step, however little the control run shows
    reason: str


# The one table of tolerances.
RULES = {
    "fp32": Rule(
        growth=10,
        mean_growth=2,
        grad_norm=1e-5,
        first_grad_norm=1e-6,
        reason="only the order of float32 sums differs: two float32 ulps of the first loss, ten times that in "
        "100 steps; the gradient norm is summed in float64 from gradients that differ by a few unit roundoffs (6e-8)",
    ),
    "autocast": Rule(
        growth=10,
        mean_growth=2.5,
        grad_norm=1e-2,
        first_grad_norm=1e-3,
        reason="every bfloat16 product is rounded: the mean loss of N tokens carries noise of at most "
        "5 x 2^-9 x (spread of the logits) / sqrt(N); four standard deviations of the difference of two runs, ten "
        "times that in 100 steps; the gradient norm starts within 3e-4 and is amplified likewise",
    ),
}


FIRST_GRAD_NORM_BF16 = 8e-3  # mixed and bf16 have no rule; weights and residuals are rounded, too


def tolerance_for(baseline: History, control: History | None = None) -> Tolerance:
    """The tolerance for comparing other runs with this one; `control` is the same run from weights perturbed by one ulp.

    With a control run, every step is allowed CONTROL_FACTOR times as much as rounding errors have moved the control run by then. RULES cap
    this where correct runs can be expected to stay within them: where WORST_RATIO times the control's difference does, for runs and
    lengths for which RULES are derived. What RULES give for the first step is always allowed; in the first step nothing more is, because
    only the control run starts from other weights. A control run that shows something else than rounding errors leaves a doubt. Raises
    UserError if there is neither a rule nor a control run, and if the control run is not this run's.
    """
    rule, noise, norm_noise = rule_and_noise(baseline)
    fixed = _derived(rule, floors(baseline)) if rule else None
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
    if any(not_finite(step) for step in baseline.steps):  # it fails anyway; its control shows nothing
        nothing = (0.0,) * len(baseline.steps)
        return fixed or Tolerance(nothing, 0.0, nothing, "nothing: DDP broke down", len(nothing))
    pairs = list(zip(baseline.steps, control.steps, strict=True))
    gaps, norms = [loss_gap(*pair) for pair in pairs], [norm_gap(*pair) for pair in pairs]
    reason = f"{CONTROL_FACTOR} times what one ulp in the initial weights did to DDP's own run by that step"
    steps, mean = len(pairs), [sum(gaps) / len(pairs)]
    if rule is None or fixed is None:
        (bound,) = _bounds(mean)
        shown = Tolerance(_bounds(envelope(gaps)), bound, _bounds(envelope(norms)), reason, steps)
    else:
        caps = (fixed.maximum, fixed.mean, rule.grad_norm) if steps <= DERIVED_STEPS else (math.inf,) * 3
        later = _bounds(envelope(gaps), fixed.first, caps[0])[1:]
        norm = _bounds(envelope(norms), rule.first_grad_norm, caps[2])
        (bound,) = _bounds(mean, fixed.first, caps[1])
        shown = Tolerance((fixed.first, *later), bound, norm, f"{reason}; {rule.reason}", steps)
    losses = [step["loss"] for step in baseline.steps]
    doubt = damage(gaps, noise) or damage(norms, norm_noise) or instability(gaps, noise, losses)
    return replace(shown, doubt=doubt, certain=1 if fixed else 0) if doubt else shown


def _bounds(gaps: list[float], least: float = 0.0, cap: float = math.inf) -> tuple[float, ...]:
    """CONTROL_FACTOR times the gap, at least `least`, at most `cap` where WORST_RATIO times the gap is within."""
    bounds = ((gap, max(CONTROL_FACTOR * gap, least)) for gap in gaps)
    return tuple(min(bound, cap) if WORST_RATIO * gap <= cap else bound for gap, bound in bounds)


def _derived(rule: Rule, noise: list[float]) -> Tolerance:
    """What RULES say when rounding alone may move the loss of each step by `noise` nats; no later step is allowed less than the first."""
    first, steps = noise[0], len(noise)
    later = [max(first, each) for each in noise]
    losses = (first, *(rule.growth * each for each in later[1:]))
    return Tolerance(
        losses, rule.mean_growth * sum(later) / steps, (rule.grad_norm,) * steps, rule.reason, steps
    )


def floors(baseline: History) -> list[float]:
    """By how much rounding alone may move the loss of each step (nats), with the weights of the first."""
    first, config = baseline.steps[0]["loss"], baseline.run["config"]
    ulps = MEAN_ULPS if len(baseline.steps[0]["rank_losses"]) > 1 else RANK_ULPS
    return [
        loss_noise(
            baseline.run,
            first,
            first,
            step.get("independent_tokens") or tokens_per_step(config),
            ulps=ulps,
        )
        for step in baseline.steps
    ]


def rule_and_noise(baseline: History) -> tuple[Rule | None, Noise, Noise]:
    """(the rule for this run, or None; the noise of its loss; the noise of its gradient norm)."""
    config, step = baseline.run["config"], baseline.steps[0]
    precision = config["precision"]
    fresh = is_fresh(baseline.run, step["loss"])
    rule = RULES.get(precision) if fresh or precision == "fp32" else None
    floor = floors(baseline)[0]
    norm = RULES[precision].first_grad_norm if precision in RULES else FIRST_GRAD_NORM_BF16
    unit_roundoff = (
        2.0**-24 if precision == "fp32" else 2.0**-8
    )  # the relative change of a weight of the control run
    first = (
        WORST_RATIO * floor + unit_roundoff * step["grad_norm"]
    )  # weights of at most 1, all moved as the gradient points
    return (
        rule,
        Noise("loss", floor, first, 100, 64, " nats"),
        Noise("gradient norm", norm, 8 * norm, 250, 250, " of it"),
    )


def tokens_per_step(config: dict) -> int:
    """Tokens of a global batch."""
    return (
        config["dp_size"]
        * config["batch_size"]
        * config["gradient_accumulation_steps"]
        * config["seq_length"]
    )


def is_fresh(run: dict, first_loss: float) -> bool:
    """Whether the run started from random weights, for which the spread of the logits is known.

    The first loss is then that of logits independent of the labels: ln(vocabulary) + spread^2 / 2, within three times the spread. With
    tied embeddings the logit of the token just read is higher by spread x sqrt(hidden_size), so a text that repeats its tokens starts
    lower, by at most as much. This much is allowed to a run whose weights, by its own record, were drawn from a seed.
    """
    architecture = run["architecture"]
    if not (architecture.get("initializer_range") and architecture.get("hidden_size")):
        return False
    spread = fresh_spread(architecture)
    expected = math.log(architecture["vocab_size"]) + spread**2 / 2
    lower = 3 * spread
    if architecture.get("tie_word_embeddings") and run["initial_weights"].startswith(DRAWN):
        lower += spread * math.sqrt(architecture["hidden_size"])
    off = first_loss - expected
    broken = not math.isfinite(first_loss)  # such a run fails anyway
    return not run["config"]["pretrained"] and (broken or -lower <= off <= 3 * spread)


def fresh_spread(architecture: dict) -> float:
    """Standard deviation of the logits of a fresh model: normed activations times rows of initializer_range."""
    return architecture["initializer_range"] * math.sqrt(architecture["hidden_size"])


def loss_noise(run: dict, first_loss: float, loss: float, num_tokens: float, *, ulps: int) -> float:
    """By how much mean losses (nats) over the same `num_tokens` independent tokens, of correct runs whose first loss was `first_loss`, may differ
    from `loss` by rounding alone. `run` is what a history or a dump says of one of them."""
    if run["config"]["precision"] == "fp32":
        return ulps * 2.0 ** (math.floor(math.log2(loss)) - 23) if 0 < loss < math.inf else 2.0**-23
    spread = fresh_spread(run["architecture"]) if is_fresh(run, first_loss) else TRAINED_SPREAD
    return 4 * math.sqrt(2) * 5 * 2.0**-9 * spread / math.sqrt(num_tokens)
