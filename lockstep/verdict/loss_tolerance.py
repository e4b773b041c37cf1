"""The tolerances of loss curves, with their reasons, and when a control run is a measure of rounding errors. No distributed.

The control run is DDP once more, from weights perturbed by one ulp. Rounding errors enter a run in its first step, and training amplifies
them step by step. A difference that jumps, stands alone, is large from the start or grows without end has another cause: damage, or unstable
training. It is no measure for other runs. docs/precision.md derives the numbers, measures the noise that they are made of, says what correct
runs do and how the bounds of a control run were chosen.
"""

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from lockstep.dumps.history import History
from lockstep.inputs.initial_weights import DRAWN
from lockstep.plan.config import tokens_per_step

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


@dataclass(frozen=True)
class Noise:
    """The rounding noise of one quantity in a run's first step, and limits of the control's gaps."""

    what: str
    floor: float  # by which two correct runs may differ in the first step
    first: float  # by which a control run may: its weights differ, too
    growth: float  # a step may have so many times the largest gap so far
    # and so many times the largest of its NEIGHBOURS; stable training reaches a third of both
    alone: float
    unit: str


GROWTH = 10  # of the noise of a loss after its first step
# The one table of tolerances.
RULES = {
    "fp32": Rule(
        growth=GROWTH,
        mean_growth=2,
        grad_norm=1e-5,
        first_grad_norm=1e-6,
        reason="only the order of float32 sums differs: two float32 ulps of the first loss, ten times that in "
        "100 steps; the gradient norm is summed in float64 from gradients that differ by a few unit roundoffs (6e-8)",
    ),
    "autocast": Rule(
        growth=GROWTH,
        mean_growth=2.5,
        grad_norm=1e-2,
        first_grad_norm=1e-3,
        reason="every bfloat16 product is rounded: the mean loss of N tokens carries noise of at most "
        "5 x 2^-9 x (spread of the logits) / sqrt(N); four standard deviations of the difference of two runs, ten "
        "times that in 100 steps; the gradient norm starts within 3e-4 and is amplified likewise",
    ),
}


FIRST_GRAD_NORM_BF16 = 8e-3  # mixed and bf16 have no rule; weights and residuals are rounded, too
CONTROL_FACTOR = 8  # twice WORST_RATIO
WORST_RATIO = 4  # the margin by which correct runs have exceeded one control run
NEIGHBOURS = 5  # steps before and after a step with which its gap is compared
AMPLIFICATION = 400  # of the noise of the first loss; seen where the control was a measure: 290
USUAL = 10  # an amplification that is usual in any run, however short
POWER = 0.5  # of the range of the loss; a larger tolerance would pass a run that learns nothing
_AGAIN = (
    "one of the two histories is wrong, or training is unstable: run both again, or lower --learning_rate"
)
_CALMER = "lower --learning_rate or --debug_steps"


def bounds(gaps: list[float], least: float = 0.0, cap: float = math.inf) -> tuple[float, ...]:
    """CONTROL_FACTOR times the gap, at least `least`, at most `cap` where WORST_RATIO times the gap is within."""
    bounds = ((gap, max(CONTROL_FACTOR * gap, least)) for gap in gaps)
    return tuple(min(bound, cap) if WORST_RATIO * gap <= cap else bound for gap, bound in bounds)


def derived(rule: Rule, noise: list[float]) -> Tolerance:
    """What RULES say when rounding alone may move the loss of each step by `noise` nats; no later step is allowed less than the first."""
    first, steps = noise[0], len(noise)
    later = [max(first, each) for each in noise]
    losses = (first, *(rule.growth * each for each in later[1:]))
    return Tolerance(
        losses, rule.mean_growth * sum(later) / steps, (rule.grad_norm,) * steps, rule.reason, steps
    )


def floors(run: dict, steps: Sequence[dict]) -> list[float]:
    """By how much rounding alone may move the loss of each step (nats), with the weights of the first.

    What is rounded are the losses of the ranks. Of unequal numbers of labels, one may be a binade above the mean.
    """
    first, ranks = steps[0]["loss"], steps[0]["rank_losses"]
    ulps = MEAN_ULPS if len(ranks) > 1 else RANK_ULPS

    def of_step(tokens: float) -> float:
        noise = (loss_noise(run, first, loss, tokens, ulps=ulps) for loss in ranks)
        return math.hypot(*noise) / math.sqrt(len(ranks))

    tokens = tokens_per_step(run["config"])
    return [of_step(step.get("independent_tokens") or tokens) for step in steps]


def rule_and_noise(baseline: History) -> tuple[Rule | None, Noise, Noise]:
    """(the rule for this run, or None; the noise of its loss; the noise of its gradient norm)."""
    config, step = baseline.run["config"], baseline.steps[0]
    precision = config["precision"]
    fresh = is_fresh(baseline.run, step["loss"])
    rule = RULES.get(precision) if fresh or precision == "fp32" else None
    floor = floors(baseline.run, baseline.steps)[0]
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


def loss_gap(mine: dict, theirs: dict) -> float:
    """Difference of two losses in nats."""
    return abs(theirs["loss"] - mine["loss"])


def norm_gap(mine: dict, theirs: dict) -> float:
    """Difference of two gradient norms, relative to the smaller: relative to the larger it could never exceed 1."""
    return abs(theirs["grad_norm"] - mine["grad_norm"]) / (
        min(mine["grad_norm"], theirs["grad_norm"]) or math.nan
    )


def envelope(gaps: list[float]) -> list[float]:
    """How far rounding errors have moved the control run by each step: the third largest gap so far, or that of this step or the
    last one if it is larger.

    So one outlier, which a single batch can cause, raises the bound of its own step and the next one only. The first three steps share
    their largest gap, because a single draw can be small by chance.
    """
    largest: list[float] = []
    found = []
    for step, gap in enumerate(gaps):
        heapq.heappush(largest, gap)
        if len(largest) > 3:
            heapq.heappop(largest)
        found.append(max(gaps[:3]) if step < 3 else max(largest[0], gaps[step - 1], gap))
    return found


def ratios(gaps: list[float], noise: Noise) -> Iterator[tuple[float, float]]:
    """For every step: its gap over the largest before it, and over the largest of its neighbours (at least the noise)."""
    so_far = noise.floor
    for step, gap in enumerate(gaps):
        around = [*gaps[max(0, step - NEIGHBOURS) : step], *gaps[step + 1 : step + 1 + NEIGHBOURS]]
        yield gap / so_far, gap / max([noise.floor, *around])
        so_far = max(so_far, gap)


def damage(gaps: list[float], noise: Noise) -> str:
    """Why these gaps are not the effect of rounding errors, in words, or ""."""
    for step, (gap, (growth, alone)) in enumerate(zip(gaps, ratios(gaps, noise), strict=True), start=1):
        here = f"in step {step} the control's {noise.what} is {gap:.1e}{noise.unit} from DDP's"
        if step == 1 and not gap <= noise.first:  # "not <=": a NaN is no gap of rounding either
            return f"{here}; weights perturbed by one ulp move it by at most {noise.first:.1e}; {_AGAIN}"
        if not growth <= noise.growth:
            less = f"training amplifies rounding errors by less than {noise.growth:.0f} in a step"
            return f"{here}, {growth:.0f} times the largest difference before; {less}; {_AGAIN}"
        if not alone <= noise.alone:
            return f"{here}, {alone:.0f} times its neighbours; a single batch does less than {noise.alone:.0f}; {_AGAIN}"
    return ""


def instability(gaps: list[float], noise: Noise, losses: list[float]) -> str:
    """Why rounding errors, amplified like this, are no measure for other runs, in words, or ""."""
    worst = max(gaps)
    if worst > AMPLIFICATION * noise.floor:
        more = f"more than {AMPLIFICATION} times the first loss's noise"
        return f"training is unstable: it amplifies one ulp to {worst:.1e} nats, {more}; {_CALMER}"
    scope = max(losses) - min(losses)
    if worst > USUAL * noise.floor and CONTROL_FACTOR * worst > POWER * scope:
        return f"a tolerance of {CONTROL_FACTOR * worst:.1e} nats is more than half the range of the loss, {scope:.1e}, so it proves nothing; {_CALMER}"
    return ""
