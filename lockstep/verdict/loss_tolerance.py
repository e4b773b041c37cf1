"""The tolerances of loss curves, with their reasons, and when a control run is a measure of rounding errors. Imports no torch.

The control run is DDP once more, from weights perturbed by one ulp. Rounding errors enter a run in its first step, and training amplifies
them step by step. A difference that jumps, stands alone, is large from the start or grows without end has another cause: damage, or
unstable training. Such a control run is no measure for other runs. docs/precision.md derives the numbers, measures the noise that they
follow from, and says what correct runs do and how the bounds of a control run were chosen.
"""

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from lockstep.dumps.history import History
from lockstep.inputs.initial_weights import DRAWN
from lockstep.plan.config import tokens_per_step

# How many float32 ulps the losses of two correct runs may be apart
MEAN_ULPS = 2  # mean over two DP ranks or more
RANK_ULPS = 5  # loss of one rank, which is not averaged
DERIVED_STEPS = 100  # number of steps over which the growth factors below were measured
TRAINED_SPREAD = 4.0  # upper bound on the standard deviation of a trained model's logits


@dataclass(frozen=True)
class Tolerance:
    """How far a run may be from DDP.

    `loss` has a bound on |loss - DDP's loss| for every step, and `mean` is the bound on its mean over steps, both in nats. `grad_norm` has
    a bound on the relative difference of the gradient norm for every step.

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

    mean_growth: float  # mean difference over these steps / first difference
    grad_norm: float  # relative difference of gradient norms that is tolerated at any step
    first_grad_norm: float  # allowed at any step, however little the control run shows
    reason: str


@dataclass(frozen=True)
class Noise:
    """The rounding noise of one quantity in a run's first step, and limits on the control run's gaps.

    Stable training reaches a third of `growth` and of `alone`.
    """

    what: str
    floor: float  # two correct runs may differ by this much in the first step
    first: float  # a control run may differ by this much in the first step: its weights differ, too
    growth: float  # a step's gap may be so many times the largest gap before it
    alone: float  # a step's gap may be so many times the largest of its NEIGHBOURS
    unit: str


GROWTH = 10  # by which the noise of the first loss may have grown in later steps
# The one table of tolerances.
RULES = {
    "fp32": Rule(
        mean_growth=2,
        grad_norm=1e-5,
        first_grad_norm=1e-6,
        reason="only the order of float32 sums differs: two float32 ulps of the first loss, ten times that in "
        "100 steps; the gradient norm is summed in float64 from gradients that differ by a few unit roundoffs (6e-8)",
    ),
    "autocast": Rule(
        mean_growth=2.5,
        grad_norm=1e-2,
        first_grad_norm=1e-3,
        reason="every bfloat16 product is rounded: the mean loss of N tokens carries noise of at most "
        "5 x 2^-9 x (spread of the logits) / sqrt(N); four standard deviations of the difference of two runs, ten "
        "times that in 100 steps; the gradient norm starts within 3e-4 and is amplified likewise",
    ),
}


# As `first_grad_norm` of a Rule. mixed and bf16 have no rule; weights and residuals are rounded there, too.
FIRST_GRAD_NORM_BF16 = 8e-3
CONTROL_FACTOR = 8  # twice WORST_RATIO
WORST_RATIO = 4  # the margin by which correct runs have exceeded one control run
NEIGHBOURS = 5  # number of steps before, and of steps after a step, with which its gap is compared
# Largest gap of a control run / noise of the first loss, at most. Up to 290 was seen where the control run was a measure.
AMPLIFICATION = 400
USUAL = 10  # an amplification that is usual in any run, however short
# A tolerance may be at most so much of the range of the loss. A larger one would pass a run that learns nothing.
POWER = 0.5
_REMEDY_OF_DAMAGE = (
    "one of the two histories is wrong, or training is unstable: run both again, or lower --learning_rate"
)
_REMEDY_OF_INSTABILITY = "lower --learning_rate or --debug_steps"


def bounds(gaps: list[float], least: float = 0.0, cap: float = math.inf) -> tuple[float, ...]:
    """Return a bound for each gap of the control run: CONTROL_FACTOR times the gap, but at least `least`.

    Where WORST_RATIO times the gap is within `cap`, the bound is at most `cap`.
    """
    uncapped = ((gap, max(CONTROL_FACTOR * gap, least)) for gap in gaps)
    return tuple(min(bound, cap) if WORST_RATIO * gap <= cap else bound for gap, bound in uncapped)


def derived(rule: Rule, noise: list[float]) -> Tolerance:
    """Return the tolerance that follows from a rule, if rounding errors alone may move the loss of step i by `noise[i]` nats.

    No later step is allowed less than the first.
    """
    first, steps = noise[0], len(noise)
    least = [max(first, nats) for nats in noise]
    losses = (first, *(GROWTH * nats for nats in least[1:]))
    return Tolerance(
        losses, rule.mean_growth * sum(least) / steps, (rule.grad_norm,) * steps, rule.reason, steps
    )


def floors(run: dict, steps: Sequence[dict]) -> list[float]:
    """Return by how much rounding errors alone may move the loss of each step (nats), with the weights of the first step.

    The losses of the ranks are what is rounded. If ranks have unequal numbers of labels, one rank's loss may be a binade above the mean.
    """
    first, ranks = steps[0]["loss"], steps[0]["rank_losses"]
    ulps = MEAN_ULPS if len(ranks) > 1 else RANK_ULPS

    def of_step(tokens: float) -> float:
        noise = (loss_noise(run, first, loss, tokens, ulps=ulps) for loss in ranks)
        return math.hypot(*noise) / math.sqrt(len(ranks))

    tokens = tokens_per_step(run["config"])
    return [of_step(step.get("independent_tokens") or tokens) for step in steps]


def rule_and_noise(baseline: History) -> tuple[Rule | None, Noise, Noise]:
    """Return the rule for a run, or None; the noise of its loss; the noise of its gradient norm."""
    config, step = baseline.run["config"], baseline.steps[0]
    precision = config["precision"]
    has_random_weights = is_fresh(baseline.run, step["loss"])
    rule = RULES.get(precision) if has_random_weights or precision == "fp32" else None
    floor = floors(baseline.run, baseline.steps)[0]
    norm_floor = RULES[precision].first_grad_norm if precision in RULES else FIRST_GRAD_NORM_BF16
    # The relative change of a weight in the control run
    unit_roundoff = 2.0**-24 if precision == "fp32" else 2.0**-8
    # As if weights were at most 1 and all of them moved in the direction of the gradient
    first = WORST_RATIO * floor + unit_roundoff * step["grad_norm"]
    return (
        rule,
        Noise("loss", floor, first, 100, 64, " nats"),
        Noise("gradient norm", norm_floor, 8 * norm_floor, 250, 250, " of it"),
    )


def is_fresh(run: dict, first_loss: float) -> bool:
    """Whether the run started from random weights, for which the spread of the logits is known.

    The first loss is then that of logits independent of the labels: ln(vocabulary) + spread^2 / 2, within three times the spread. With
    tied embeddings the logit of the token just read is higher by spread x sqrt(hidden_size). So a text that repeats its tokens starts
    lower, by at most as much. This much is allowed to a run whose weights, by its own record, were drawn from a seed.
    """
    architecture = run["architecture"]
    if not (architecture.get("initializer_range") and architecture.get("hidden_size")):
        return False
    spread = fresh_spread(architecture)
    expected = math.log(architecture["vocab_size"]) + spread**2 / 2
    allowed_below = 3 * spread
    if architecture.get("tie_word_embeddings") and run["initial_weights"].startswith(DRAWN):
        allowed_below += spread * math.sqrt(architecture["hidden_size"])
    difference = first_loss - expected
    is_broken = not math.isfinite(first_loss)  # such a run fails anyway
    return not run["config"]["pretrained"] and (is_broken or -allowed_below <= difference <= 3 * spread)


def fresh_spread(architecture: dict) -> float:
    """Return the standard deviation of a fresh model's logits: normed activations times rows of size initializer_range."""
    return architecture["initializer_range"] * math.sqrt(architecture["hidden_size"])


def loss_noise(run: dict, first_loss: float, loss: float, num_tokens: float, *, ulps: int) -> float:
    """Return by how much the mean losses of correct runs may differ from `loss` by rounding errors alone, in nats.

    The losses are means over the same `num_tokens` independent tokens. `run` is what a history or a dump records of one of the runs,
    `first_loss` the loss of its first step. In float32, the result is `ulps` ulps of the loss.
    """
    if run["config"]["precision"] == "fp32":
        return ulps * 2.0 ** (math.floor(math.log2(loss)) - 23) if 0 < loss < math.inf else 2.0**-23
    spread = fresh_spread(run["architecture"]) if is_fresh(run, first_loss) else TRAINED_SPREAD
    return 4 * math.sqrt(2) * 5 * 2.0**-9 * spread / math.sqrt(num_tokens)


def loss_gap(mine: dict, theirs: dict) -> float:
    """Return the absolute difference of the losses of two steps, in nats."""
    return abs(theirs["loss"] - mine["loss"])


def norm_gap(mine: dict, theirs: dict) -> float:
    """Return the difference of the gradient norms of two steps, relative to the smaller.

    Relative to the larger it could never exceed 1.
    """
    return abs(theirs["grad_norm"] - mine["grad_norm"]) / (
        min(mine["grad_norm"], theirs["grad_norm"]) or math.nan
    )


def envelope(gaps: list[float]) -> list[float]:
    """Return how far rounding errors have moved the control run by each step.

    This is the largest of: the third largest gap so far, the gap of this step, the gap of the step before. So one outlier, which a single
    batch can cause, raises the bound of its own step and the next one only. The first three steps share their largest gap, because a
    single draw can be small by chance.
    """
    largest_three: list[float] = []
    moved = []
    for step, gap in enumerate(gaps):
        heapq.heappush(largest_three, gap)
        if len(largest_three) > 3:
            heapq.heappop(largest_three)
        moved.append(max(gaps[:3]) if step < 3 else max(largest_three[0], gaps[step - 1], gap))
    return moved


def ratios(gaps: list[float], noise: Noise) -> Iterator[tuple[float, float]]:
    """Yield for every step: its gap / the largest gap before it, and its gap / the largest gap of its neighbours.

    Both divisors are at least the noise.
    """
    largest_before = noise.floor
    for step, gap in enumerate(gaps):
        neighbours = [*gaps[max(0, step - NEIGHBOURS) : step], *gaps[step + 1 : step + 1 + NEIGHBOURS]]
        yield gap / largest_before, gap / max([noise.floor, *neighbours])
        largest_before = max(largest_before, gap)


def damage(gaps: list[float], noise: Noise) -> str:
    """Return why the control run's gaps are not the effect of rounding errors, as a sentence; "" if they are."""
    for step, (gap, (growth, alone)) in enumerate(zip(gaps, ratios(gaps, noise), strict=True), start=1):
        finding = f"in step {step} the control's {noise.what} is {gap:.1e}{noise.unit} from DDP's"
        # "not <=": a NaN is no gap of rounding errors either
        if step == 1 and not gap <= noise.first:
            return f"{finding}; weights perturbed by one ulp move it by at most {noise.first:.1e}; {_REMEDY_OF_DAMAGE}"
        if not growth <= noise.growth:
            expected = f"training amplifies rounding errors by less than {noise.growth:.0f} in a step"
            return f"{finding}, {growth:.0f} times the largest difference before; {expected}; {_REMEDY_OF_DAMAGE}"
        if not alone <= noise.alone:
            return f"{finding}, {alone:.0f} times its neighbours; a single batch does less than {noise.alone:.0f}; {_REMEDY_OF_DAMAGE}"
    return ""


def instability(gaps: list[float], noise: Noise, losses: list[float]) -> str:
    """Return why rounding errors that are amplified like this are no measure for other runs, as a sentence; "" if they are one.

    `gaps` are the control run's, `losses` DDP's.
    """
    largest_gap = max(gaps)
    if largest_gap > AMPLIFICATION * noise.floor:
        excess = f"more than {AMPLIFICATION} times the first loss's noise"
        return f"training is unstable: it amplifies one ulp to {largest_gap:.1e} nats, {excess}; {_REMEDY_OF_INSTABILITY}"
    loss_range = max(losses) - min(losses)
    if largest_gap > USUAL * noise.floor and CONTROL_FACTOR * largest_gap > POWER * loss_range:
        return f"a tolerance of {CONTROL_FACTOR * largest_gap:.1e} nats is more than half the range of the loss, {loss_range:.1e}, so it proves nothing; {_REMEDY_OF_INSTABILITY}"
    return ""
