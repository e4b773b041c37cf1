"""Evidence is found where it is, and not where it is not; a cause is named on evidence, and not without."""

import json
import math
import re
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch.nn import functional as F  # noqa: N812 - its usual name

from lockstep.diagnosis import diagnose as diagnose_module
from lockstep.diagnosis import evidence, exchanged, forward
from lockstep.diagnosis import loss as loss_rules
from lockstep.diagnosis import moments as moment_rules
from lockstep.diagnosis import update as update_rules
from lockstep.diagnosis.case import describe
from lockstep.diagnosis.diagnose import Stage, diagnose
from lockstep.diagnosis.gradients import cause_of_weights
from lockstep.inputs.architectures import BUILT_IN
from lockstep.inputs.shapes import describe as describe_model
from lockstep.plan.config import BETAS, EPS
from lockstep.training.optim import direction
from lockstep.verdict.distance import Distance, clip_factor
from lockstep.verdict.judgement import ROUNDOFF, Judgement, tolerance
from lockstep.verdict.result import Cause, Findings, Result
from lockstep.verdict.scalars import Norm

EXACT = torch.randn(40, 30, generator=torch.Generator().manual_seed(0)).double()
NOISE = torch.randn(40, 30, generator=torch.Generator().manual_seed(1)).double()
SIZES = {"tp": 2, "dp": 3, "accumulation steps": 5}


def test_a_multiple():
    assert (
        evidence.multiple_of(2 * EXACT, EXACT) == pytest.approx(2.0)
        and abs(evidence.multiple_of(EXACT, NOISE)) < 0.2
    )
    assert math.isnan(evidence.multiple_of(EXACT, 0 * EXACT)) and math.isnan(
        evidence.multiple_of(EXACT * math.nan, EXACT)
    )


@pytest.mark.parametrize(
    "factor, names",
    [
        (2.0, ["tp"]),
        (0.5, ["1/tp"]),
        (3.0, ["dp"]),
        (1 / 6, ["1/(tp x dp)"]),
        (5.0, ["accumulation steps"]),
        (math.sqrt(2), ["sqrt(tp)"]),
        (1.0, []),
        (2.2, []),
        (-2.0, []),
    ],
)
def test_the_name_of_a_factor(factor, names):
    assert evidence.name_factor(factor, SIZES, 1e-3) == names


def test_how_near_a_factor_must_be():
    assert evidence.name_factor(2.02, SIZES, 0.03) == ["tp"] and evidence.name_factor(2.02, SIZES, 1e-3) == []


def test_sizes_of_one_explain_nothing():
    assert evidence.name_factor(1.0, {"tp": 1, "dp": 1}, 1e-3) == []


def test_dropout():
    keep = torch.rand(EXACT.shape, generator=torch.Generator().manual_seed(2)) >= 0.1
    assert evidence.dropped_elements(EXACT * keep / 0.9, EXACT) == pytest.approx(0.1, abs=0.03)
    assert evidence.dropped_elements(EXACT * keep, EXACT) is None  # zeros alone
    assert evidence.dropped_elements(NOISE * keep / 0.9, EXACT) is None
    assert evidence.dropped_elements(EXACT, EXACT) is None


def test_zeros_in_a_block_are_no_dropout():
    """Though there are as many of them, and the rest is larger by as much."""
    rows, columns = torch.ones(40, 1).double(), torch.ones(1, 30).double()
    rows[:4], columns[:, :3] = 0, 0
    assert evidence.dropped_elements(EXACT * rows / 0.9, EXACT) is None
    assert evidence.dropped_elements(EXACT * columns / 0.9, EXACT) is None


def test_a_fixed_pattern_of_zeros_is_no_dropout():
    exact = torch.randn(2, 128, 128, generator=torch.Generator().manual_seed(0)).double()
    rows, columns = torch.arange(128)[:, None], torch.arange(128)
    drawn = torch.rand(exact.shape, generator=torch.Generator().manual_seed(1)) >= 1 / 16
    pattern = ((7 * rows + 11 * columns) % 16 != 0).expand(2, -1, -1)
    # Ranks with one seed drop the same.
    for keep, is_dropout in ((drawn, True), (pattern, False), (drawn[:1].expand(2, -1, -1), True)):
        assert (evidence.dropped_elements(exact * keep * 16 / 15, exact) is not None) == is_dropout


@pytest.mark.parametrize(
    "weights, name",
    [
        ([[1e-3], [2e-3]], "rank weights"),  # as of a loss scale that is taken off wrongly
        ([[5e-3, 2.5e-3], [5e-3, 2.5e-3]], "accumulation"),
        ([[1e-3, 2e-3], [2e-3, 1e-3]], None),
        ([[1, 1.5], [200, 200]], None),  # whose ranks have no weight of their own
        ([[0, 1e-3], [1, 1]], "rank weights"),  # in bfloat16, zero is not measured better
    ],
)
def test_small_weights_are_told_apart(weights, name):
    case = SimpleNamespace(options={"precision": "fp32"})
    found = cause_of_weights(case, torch.tensor(weights, dtype=torch.float64), "every gradient")
    assert (found and found.name) == name


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rounded(dtype):
    rounded, ones = EXACT.to(getattr(torch, dtype)).double(), torch.ones(99).double()
    assert evidence.rounded_to([(rounded, EXACT)]) == dtype
    assert evidence.rounded_to([(rounded, EXACT), (ones, ones)]) == dtype
    assert evidence.rounded_to([(rounded, EXACT), (EXACT.float().double(), EXACT)]) == ""
    assert evidence.rounded_to([(ones, ones)]) == ""  # telling nothing
    assert evidence.rounded_to([(rounded, 2 * EXACT)]) == evidence.rounded_to([]) == ""


def test_what_a_captured_name_stands_for():
    assert describe("model.layers.1.self_attn.o_proj.input") == "model.layers.1.self_attn.o_proj's input"
    assert (
        describe("model.layers.1") == "model.layers.1's output"
        and describe("model.rotary_emb.1") == "output 1 of model.rotary_emb"
    )
    assert describe("model.layers.0.input_layernorm") == "model.layers.0.input_layernorm's output"


# A run on tp 2 x dp 2: norm -> col, column-parallel with a bias -> row, row-parallel; 4 samples of 8 tokens

RATE, CHANNELS = 1e-2, 64
PARAMETERS = {
    "norm.weight": (CHANNELS,),
    "col.weight": (CHANNELS, CHANNELS),
    "col.bias": (CHANNELS,),
    "row.weight": (CHANNELS, CHANNELS),
}
SHARDED = {
    "parameter/col.weight": {"tp": 0},
    "parameter/col.bias": {"tp": 0},
    "parameter/row.weight": {"tp": 1},
    "forward/col": {"tp": 2},
}
SHARDED |= {
    name.replace("parameter", kind): dims
    for name, dims in SHARDED.items()
    for kind in ("gradient", "exp_avg", "exp_avg_sq")
}
MODULES = ("norm", "col", "row")


class Written:
    """What a diagnosis reads of a dump."""

    label = "FSDP"
    has_own_optimizer = False
    missing = ()
    layout = SimpleNamespace(
        state={"exp_avg": {}, "exp_avg_sq": {}},
        model=SimpleNamespace(frozen=()),
        names=describe_model(BUILT_IN["tiny-qwen2"]).names,
        sources={"norm": (), "col": ("norm",), "row": ("col",)},
        parameters=PARAMETERS,
        outputs={name: ("batch", "sequence", CHANNELS) for name in MODULES},
    )
    run = {
        "config": {
            "tp_size": 2,
            "dp_size": 2,
            "gradient_accumulation_steps": 1,
            "precision": "fp32",
            "optimizer": "adamw",
            "learning_rate": RATE,
            "schedule_steps": 0,
            "warmup_steps": 0,
            "lr_schedule": "constant",
            "weight_decay": 0.0,
            "max_grad_norm": 0.0,
        },
        "architecture": {"model_type": "qwen2", "hidden_size": CHANNELS, "num_attention_heads": 4},
        "num_steps": 2,
    }

    def __init__(self, steps, replicas_differ=None, dp_size=2, optimizer="AdamW", max_grad_norm=0.0):
        self.by_step = steps
        config = {**self.run["config"], "dp_size": dp_size, "max_grad_norm": max_grad_norm}
        self.run = {**self.run, "config": config}
        self.contract = {"tied_embeddings": False, "optimizer": optimizer}
        self.steps = {
            step: {
                "tensors": {
                    name: {"dtype": "F32", "shape": list(t.shape), "sharded": SHARDED.get(name, {})}
                    for name, t in tensors.items()
                },
                "replicas_differ": replicas_differ or {},
            }
            for step, tensors in steps.items()
        }

    def tensor(self, step, name):
        return self.by_step[step][name]

    def expected(self, step):
        return self.by_step[step]


def update(tensors, before, clip=1.0):
    """Moments and parameters of a first step, from the gradients, which are multiplied by `clip`."""
    b1, b2 = BETAS
    for name in PARAMETERS:
        gradient = clip * tensors[f"gradient/{name}"]
        tensors[f"exp_avg/{name}"], tensors[f"exp_avg_sq/{name}"] = (
            (1 - b1) * gradient,
            (1 - b2) * gradient.square(),
        )
        tensors[f"parameter/{name}"] = before[f"parameter/{name}"] - RATE * gradient / (gradient.abs() + EPS)


def step_one():
    """(tensors of step 1, initial parameters) of a right run."""
    generator = torch.Generator().manual_seed(5)
    draw = lambda *shape: torch.randn(*shape, generator=generator).double()  # noqa: E731
    before = {f"parameter/{name}": draw(*shape) for name, shape in PARAMETERS.items()}
    z, output = (
        draw(4, 8, CHANNELS),
        draw(4, 8, CHANNELS),
    )  # normed input, and the gradient of what row gives back
    w = {name: before[f"parameter/{name}"] for name in PARAMETERS}
    run = {"forward/norm": z * w["norm.weight"]}
    run["forward/col"] = run["forward/norm"] @ w["col.weight"].T + w["col.bias"]
    run["forward/row"] = run["forward/col"] @ w["row.weight"].T
    run["backward/row"] = output
    run["gradient/row.weight"] = output.flatten(0, 1).T @ run["forward/col"].flatten(0, 1)
    run["backward/col"] = output @ w["row.weight"]
    run["gradient/col.weight"] = run["backward/col"].flatten(0, 1).T @ run["forward/norm"].flatten(0, 1)
    run["gradient/col.bias"] = run["backward/col"].sum((0, 1))
    run["backward/norm"] = run["backward/col"] @ w["col.weight"]
    run["gradient/norm.weight"] = (run["backward/norm"] * z).sum((0, 1))
    update(run, before)
    return run, before


def diagnosed(changes, *, replicas_differ=None, recorded_norm=None, configuration=None, **written):
    """(causes, diagnosis) of a run with changes: name -> what its tensor is instead, given it and all."""
    reference, before = step_one()
    own = {
        name: changes[name](tensor, reference) if name in changes else tensor
        for name, tensor in reference.items()
    }
    held = math.sqrt(
        sum(float(tensor.square().sum()) for name, tensor in own.items() if name.startswith("gradient/"))
    )
    clip = clip_factor({"max_grad_norm": written.get("max_grad_norm", 0.0)}, held)
    update(own, before, clip)  # follows from the run's own gradients
    follows = {
        name: tensor
        for name, tensor in own.items()
        if name.split("/")[0] in ("exp_avg", "exp_avg_sq", "parameter")
    }
    own |= {name: changes[name](tensor, reference) for name, tensor in follows.items() if name in changes}
    rows = []
    for name, tensor in own.items():
        aim = follows.get(name, reference[name])
        error, change = tensor - aim, aim - before[name] if name in before else aim
        square = float((change * change).sum())
        scale = 1 + float((error * change).sum()) / square if square else math.nan
        sizes = [(float(t.norm()), float(t.abs().max())) for t in (error, aim)]
        distance = Distance(
            *sizes[0], *sizes[1], float(tensor.norm()), float(change.norm()), float(change.abs().max()), scale
        )
        tolerated = tolerance(name, distance, distance.size.times(1e-6), ROUNDOFF["F32"])
        rows.append(Judgement(1, name, distance, *tolerated))
    norms = [Norm(1, held * (recorded_norm or 1), held, clip=clip)]
    run = Written({1: own}, replicas_differ, **written)
    found = Findings("fsdp", run, "ddp", [], configuration or {}, rows, norms)
    result = Result({"fsdp": found}, "ddp", [])
    found = diagnose(result, "fsdp", Written({0: before, 1: reference}), {})
    return [cause.name for cause in found.causes], found


GRADIENTS = [f"gradient/{name}" for name in PARAMETERS]


def before_of(name):
    return step_one()[1][f"parameter/{name}"]


def of_samples(rows, factor):
    """A weight's gradient from some samples only."""
    return (
        lambda _t, e: factor * e["backward/col"][rows].flatten(0, 1).T @ e["forward/norm"][rows].flatten(0, 1)
    )


def own_parts(tensor, everything):
    """Each dp rank keeps its own part of the gradient."""
    both = [of_samples(rows, 2)(tensor, everything) for rows in (slice(2), slice(2, 4))]
    return torch.cat([both[0][:32], both[1][32:]])


def flip(tensor, _all):
    tensor = tensor.clone()
    tensor[3, 4] *= -1
    return tensor


def one_more(tensor, _all):
    return tensor + 1


def twice(tensor, _all):
    return 2 * tensor


def kept_half(off):
    """The second tp rank's share keeps its value."""
    return lambda tensor, _all: torch.cat([tensor[:32] + off, before_of("col.weight")[32:]])


def of_every_parameter(change, names=PARAMETERS):
    return {f"parameter/{name}": lambda t, e, name=name: change(t, before_of(name)) for name in names}


def updated_by(**options):
    """Every parameter, updated from the moments of the first step, with other options of AdamW's direction."""

    def change(name):
        return lambda t, e: before_of(name) - RATE * direction(
            e[f"exp_avg/{name}"], e[f"exp_avg_sq/{name}"], **{"step": 1, **options}
        )

    return {f"parameter/{name}": change(name) for name in PARAMETERS}


def epsilon_in_root():
    """Every parameter, updated with epsilon added before the root is taken, and a large one."""
    root = lambda e, name: (e[f"exp_avg_sq/{name}"] / (1 - BETAS[1])).sqrt()  # noqa: E731
    return {
        f"parameter/{name}": lambda t, e, name=name: before_of(name)
        - RATE * e[f"exp_avg/{name}"] / (1 - BETAS[0]) / (root(e, name) ** 2 + EPS).sqrt()
        for name in PARAMETERS
    }


def linear(change):
    """The output of `row` from another input and weight."""

    def output(t, e):
        x, w = change(e["forward/col"], before_of("row.weight"))
        return x @ w.T

    return {"forward/row": output}


def moments_of(change):
    """Moments of other gradients in a first step."""
    b1, b2 = BETAS

    def moments(name):
        gradient = lambda e: change(name, e[f"gradient/{name}"])  # noqa: E731
        return {
            f"exp_avg/{name}": lambda t, e: (1 - b1) * gradient(e),
            f"exp_avg_sq/{name}": lambda t, e: (1 - b2) * gradient(e).square(),
        }

    return {key: value for name in PARAMETERS for key, value in moments(name).items()}


def off_from(sample):
    """What makes the samples from this one on wrong."""
    return (torch.arange(4) >= sample)[:, None, None] * torch.arange(CHANNELS).double()


def moved_on(places):
    """Parameters that began the step with the values so many places after them."""

    def change(name, shift):
        before = before_of(name)
        return lambda t, e: t + before.flatten().roll(-shift).view(before.shape) - before

    return {f"parameter/{name}": change(name, shift) for name, shift in places.items()}


SAID = {  # what is changed, the causes that are named, and what else is said
    "nothing": ({}, [], ""),
    "twice, where nothing is summed": ({"forward/col": twice}, ["output scale"], "it is 2 = tp or dp times the right one"),
    "one dp rank's samples": ({"gradient/col.weight": of_samples(slice(2, 4), 2)}, ["dp reduction missing"], "DP rank 1's"),
    "own parts": ({"gradient/col.weight": own_parts}, ["dp reduction missing"], "DP rank 0 or 1's"),
    "one micro batch twice, the other never": ({"gradient/col.weight": lambda t, e: of_samples(slice(0, 1), 2)(t, e) + of_samples(slice(2, 3), 2)(t, e)}, [], ""),
    "one sample of four left out": ({"gradient/col.weight": of_samples(slice(3), 1)}, [], ""),
    "one dp rank at half its weight": ({"gradient/col.weight": lambda t, e: t - of_samples(slice(2), 0.5)(t, e)}, ["rank weights"], r"different weights \(0.5, 1; 1 is right\)"),
    "a flipped sign of a gradient": ({"gradient/col.weight": flip}, [], r"\[3, 4\] is .*: its sign is flipped"),
    "a flipped sign of a weight": ({"parameter/col.weight": flip}, [], r"\[3, 4\] is .*: its sign is flipped"),
    "not finite": ({"gradient/col.weight": lambda t, e: t * math.nan}, [], "not finite"),
    "zeros": ({"gradient/col.weight": lambda t, e: 0 * t}, [], r'\[\[\], \["all elements are zero"\]\]'),
    "weights that are off": ({"forward/row": one_more, "parameter/row.weight": lambda t, e: t + 0.1}, ["weights"], ""),
    "weights that are right": ({"forward/row": one_more}, [], ""),
    "weights of another module": ({"forward/row": one_more, "parameter/col.weight": lambda t, e: t + 0.1}, [], ""),
    "frozen weights": ({"forward/row": one_more, "parameter/row.weight": lambda t, e: before_of("row.weight")}, [], ""),
    "no update": ({"parameter/col.weight": lambda t, e: before_of("col.weight")}, ["update left out"], ""),
    "no update of one share": ({"parameter/col.weight": kept_half(0)}, ["update left out"], "in the share of tp rank 1 of 2"),
    "no update of one share, and wrong elsewhere": ({"parameter/col.weight": kept_half(0.1)}, [], ""),
    "every update twice": (of_every_parameter(lambda t, before: 2 * t - before), ["update scale"], "the change of all parameters is 2 times"),
    "some updates twice": (of_every_parameter(lambda t, before: 2 * t - before, ("col.weight", "col.bias")), ["update scale"], "the change of col.weight, col.bias is 2 times"),
    "some updates twice, others thrice": ({**of_every_parameter(lambda t, before: 2 * t - before), "parameter/col.bias": lambda t, e: 3 * t - 2 * before_of("col.bias")}, [], "its change is 2 times"),
    "the bias of the moments of step 4": (updated_by(step=4), ["bias correction"], "corrected as in step 4"),
    "the bias of the moments is kept": (updated_by(step=math.inf), ["bias correction"], "is not corrected"),
    "another epsilon": (updated_by(eps=0.1), ["optimizer settings"], "has an epsilon of 0.1, not 1e-08"),
    "another epsilon of some": ({**updated_by(eps=0.1), "parameter/col.bias": lambda t, e: 2 * t - before_of("col.bias")}, [], ""),
    "a negative epsilon": (updated_by(eps=-0.1), [], ""),
    "halves in the other order": ({"parameter/col.weight": lambda t, e: t.roll(32, 0)}, ["pieces exchanged"], "col.weight has the parts 1, 0 of 2"),
    "a third moved": ({"parameter/col.weight": lambda t, e: t.roll(20, 0)}, ["pieces exchanged"], "col.weight has 64 rows in other places, the first of them row 0"),
    "transposed": ({"gradient/row.weight": lambda t, e: t.T}, ["pieces exchanged"], "row.weight is transposed"),
    "two gradients exchanged": ({"gradient/col.weight": lambda t, e: e["gradient/row.weight"], "gradient/row.weight": lambda t, e: e["gradient/col.weight"]}, ["pieces exchanged"], "row.weight is that of col.weight, col.weight is that of row.weight"),
    "one gradient exchanged, and one off": ({"gradient/col.weight": lambda t, e: e["gradient/row.weight"], "gradient/row.weight": flip}, [], ""),
    "a branch is cut off": ({"backward/norm": lambda t, e: 0.5 * t}, [], "it is 0.5 = 1/tp or 1/dp times the right one"),
    "epsilon within the root": (epsilon_in_root(), ["optimizer settings"], "epsilon is within the root"),
    "input of a layer in bfloat16": (linear(lambda x, w: (x.bfloat16().double(), w)), ["precision"], "computed with its input rounded to bfloat16"),
    "weight of a layer in float16": (linear(lambda x, w: (x, w.half().double())), ["precision"], "computed with its weight rounded to float16"),
    "input of a layer that is off": (linear(lambda x, w: (x * 1.01, w)), ["output scale"], "row's output is 1.01 times what it should be"),
    "input of a layer that is off in a sample": (linear(lambda x, w: (x * torch.tensor([1, 1, 1.01, 1])[:, None, None], w)), [], ""),
    "weights added to the gradients": (moments_of(lambda name, g: g + 0.1 * before_of(name)), ["weight decay"], "have 0.1 times the weights added"),
    "other gradients in two groups": (moments_of(lambda name, g: (0.5 if name == "col.bias" else 0.25) * g), ["gradient scale"], "are 0.25 or 0.5 times those that were recorded"),
    "no gradient in the moments": (moments_of(lambda name, g: 0 * g), [], ""),
    "each gradient another factor": (moments_of(lambda name, g: (1.5 + list(PARAMETERS).index(name)) * g), [], ""),
    "weight decay after the update": (of_every_parameter(lambda t, before: t * (1 - RATE * 0.1), ("col.weight", "col.bias")), ["weight decay"], r"is off by \+0.1"),
    "moments in bfloat16": ({f"exp_avg/{name}": lambda t, e: t.bfloat16().double() for name in PARAMETERS}, ["precision"], "every element of 4 exp_avgs is a bfloat16 number"),
    "an average of weights that has one term too many": (of_every_parameter(lambda t, before: t * 0.9, ("col.weight", "col.bias")), ["weights"], "the step also multiplies col.weight, col.bias by 0.9"),
    "weight decay": (of_every_parameter(lambda t, before: t - RATE * 0.1 * before, ("norm.weight", "col.bias")), ["weight decay"], r"is off by \+0.1"),
    "samples exchanged": ({"forward/col": lambda t, e: t[[1, 0, 2, 3]]}, ["pieces exchanged"], "sample 0 has the values of sample 1, sample 1 has the values of sample 0; all else is right"),
    "positions moved": ({"backward/norm": lambda t, e: t.roll(1, 1)}, ["pieces exchanged"], "positions 1 to 7 have the values of positions 0 to 6"),
    "one sample of another, and two that are off": ({"forward/col": lambda t, e: t[[0, 0, 2, 3]] + off_from(2)}, [], "only samples 1 to 3 of 4 are wrong"),
    "one sample of another, and one that is off": ({"forward/col": lambda t, e: t[[0, 0, 2, 3]] + off_from(3)}, ["pieces exchanged"], "sample 1 has the values of sample 0; 1 more is wrong in another way"),
    "no gradient": ({"backward/col": lambda t, e: 0 * t}, ["gradient lost"], "arrives at col's output: it is zero there"),
    "no gradient in a sample": ({"backward/col": lambda t, e: t * (torch.arange(4) != 1)[:, None, None]}, ["gradient lost"], "arrives at col's output at sample 1: it is zero there"),
    "no gradient in a column": ({"backward/col": lambda t, e: t * (torch.arange(CHANNELS) != 1)}, [], "only column 1 of 64 is wrong"),
    "weights one place on": (moved_on({"col.weight": 1, "row.weight": 1}), ["weights"], "elements of col.weight, row.weight had the values 1 place after them"),
    "weights one and two places on": (moved_on({"col.weight": 1, "row.weight": 2}), [], ""),
    "a vector that is off otherwise": ({"parameter/norm.weight": lambda t, e: t - 1e-3}, [], ""),
}  # fmt: skip


@pytest.mark.parametrize("what", SAID)
def test_what_is_named_and_said(what):
    changes, causes, words = SAID[what]
    names, found = diagnosed(changes)
    assert names == causes
    assert re.search(words, json.dumps([[cause.evidence for cause in found.causes], found.odd])), found


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("name", [name for name in step_one()[0] if name.partition("/")[0] != "exp_avg_sq"])
def test_what_is_not_finite_is_not_explained(name, bad):
    names, found = diagnosed({name: lambda t, e: torch.where(t == t.max(), bad, t)})
    assert names == [] and (name.startswith("backward/row") or "not finite" in found.odd[-1]), found


def test_clipped_twice_is_no_scale():
    clipped = moments_of(lambda name, g: 0.5 * g)
    assert diagnosed(clipped)[0] == ["gradient scale"]
    bound = 0.79 * math.sqrt(sum(float(step_one()[0][name].square().sum()) for name in GRADIENTS))
    again = moments_of(lambda name, g: 0.79 * 0.79 * g)
    assert diagnosed(again, max_grad_norm=bound)[0] == ["clipping"]


def test_noise_is_not_explained():
    """In every gradient alike, and in none a factor."""

    def noisy(tensor, _all):
        return tensor + 1e-3 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(6)).double()

    assert diagnosed(dict.fromkeys(GRADIENTS, noisy))[0] == []
    assert diagnosed({"forward/row": noisy})[0] == [] and diagnosed({"backward/norm": noisy})[0] == []


def share(rank, kind):
    """One tp rank's share, computed from what is there."""
    columns = slice(rank * CHANNELS // 2, (rank + 1) * CHANNELS // 2)

    def of(_tensor, everything):
        _, before = step_one()
        if kind == "forward":
            return everything["forward/col"][..., columns] @ before["parameter/row.weight"][:, columns].T
        return everything["backward/col"][..., columns] @ before["parameter/col.weight"][columns]

    return of


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", ["forward/row", "backward/norm"])
def test_one_ranks_share_of_a_sum(name, rank):
    """Without the sum, each rank has its own. Where all have the same, the sum was made, and a share was lost before it."""
    for differ, cause in (({name: [1, 3]}, "tp reduction missing"), ({}, "share lost")):
        names, found = diagnosed({name: share(rank, name.split("/")[0])}, replicas_differ=differ)
        assert names == [cause] and f"tp rank {rank}'s share" in found.causes[0].evidence


@pytest.mark.parametrize("name", ["forward/row", "backward/norm"])
def test_what_is_no_share_is_no_missing_sum(name):
    """Half of it, another sign of one share, replicas that differ: it is where it went wrong, not why."""
    kind = name.split("/")[0]
    for change, names in (
        (lambda t, e: 0.5 * t, ["output scale"] if kind == "forward" else []),
        (lambda t, e: t - 2 * share(1, kind)(t, e), []),
        (lambda t, e: 0.9 * share(0, kind)(t, e), []),
    ):
        assert diagnosed({name: change}, replicas_differ={name: [1, 3]})[0] == names


@pytest.mark.parametrize("name", ["forward/row", "backward/norm"])
def test_a_sum_done_twice(name):
    """Named where 2 can be nothing but tp."""
    assert diagnosed({name: twice}, dp_size=1)[0] == ["tp reduction repeated"]
    names, found = diagnosed({name: twice})
    assert names == (["output scale"] if name == "forward/row" else [])
    assert "it is 2 = tp or dp times the right one" in found.odd[-1]


def test_replicas_of_weights_that_differ():
    """They were different before the step only if gradients and moments are not."""
    wrong, apart = {"forward/norm": one_more}, {"forward/norm": [1], "parameter/norm.weight": [1]}
    assert diagnosed(wrong, replicas_differ=apart)[0] == ["weights"]
    assert diagnosed(wrong, replicas_differ={**apart, "gradient/norm.weight": [1]})[0] == []


def test_updates_that_are_not_the_same_on_all_ranks():
    twice = of_every_parameter(lambda t, before: 2 * t - before)
    _, found = diagnosed(twice, replicas_differ={"parameter/norm.weight": [1], "parameter/col.bias": [3]})
    said = "the change of all parameters is 2 times what it should be; ranks 1 and 3 have another, which was not judged"
    assert [cause.evidence for cause in found.causes] == [said]


AXES = {
    ("sample", "model.layers.2.input_layernorm", "pp"): "pipeline",
    ("sample", "model.layers.1.input_layernorm", "pp"): "",  # within a stage
    ("sample", "model.layers.1.mlp.up_proj", "pp"): "",
    ("sample", "model.layers.0.input_layernorm", "pp"): "",
    ("sample", "model.layers.1.input_layernorm", "cp"): "",
    ("position", "model.rotary_emb", "cp"): "context parallelism",
    ("position", "model.layers.1.self_attn.o_proj.input", "cp"): "context parallelism",
    ("head", "model.layers.1.self_attn.o_proj.input", "cp"): "context parallelism",
    ("head", "model.layers.1.self_attn.q_proj", "cp"): "",
    ("position", "model.layers.1.mlp.up_proj", "cp"): "",
}


@pytest.mark.parametrize("word, path, axis", AXES)
def test_an_axis_is_named_where_it_sends_pieces_on(word, path, axis):
    layer = ("input_layernorm", "self_attn.q_proj", "self_attn.o_proj.input", "mlp.up_proj")
    of_layers = [
        f"model.layers.{number}{name}" for number in range(4) for name in (*(f".{one}" for one in layer), "")
    ]
    rows = {
        name: SimpleNamespace(kind="forward", path=name)
        for name in ("model.embed_tokens", "model.rotary_emb", *of_layers)
    }
    mesh = SimpleNamespace(**{"tp": 1, "pp": 1, "cp": 1, axis: 2})
    cuts = {"pp": {"units": [[["embedding", 0, 1]], [[2, 3, "head"]]]}} if axis == "pp" else {}
    dump = SimpleNamespace(contract={"cuts": cuts})
    case = SimpleNamespace(
        first=f"forward/{path}", path=path, rows=rows, mesh=mesh, names=Written.layout.names, dump=dump
    )
    assert exchanged._of_axis(case, word) == AXES[word, path, axis]


def test_replicas_that_differ_though_the_one_that_was_written_is_right():
    for name in ("gradient/norm.weight", "parameter/norm.weight", "forward/row"):
        names, found = diagnosed({}, replicas_differ={name: [1, 3]})
        assert (
            names == []
            and "rank 1 (dp 0, tp 1), 3 (dp 1, tp 1)" in found.odd[0]
            and "it is right" in found.odd[0]
        )


def test_a_factor_in_every_gradient():
    names, found = diagnosed(dict.fromkeys(GRADIENTS, twice))
    assert names == ["gradient scale"] and "2 = tp or dp" in found.causes[0].evidence
    assert found.excluded == [
        "forward: right in step 1",
        "backward: right in step 1",
    ]  # no batch was captured: nothing is said of it


def test_a_factor_in_one_gradient():
    """That of what every tp rank holds speaks for tp, if it is no other number; that of a shard may be anything."""
    assert diagnosed({"gradient/norm.weight": twice}, dp_size=1)[0] == ["tp reduction repeated"]
    assert diagnosed({"gradient/norm.weight": twice})[0] == ["gradient scale"]
    names, found = diagnosed({"gradient/col.bias": twice})
    assert names == [] and "2 = tp or dp times" in found.odd[-1]
    assert diagnosed({"gradient/col.bias": lambda tensor, _all: 1.5 * tensor})[0] == ["gradient scale"]
    assert diagnosed({"gradient/col.bias": lambda tensor, _all: -tensor})[0] == []


def test_copies_that_differ_elsewhere_are_observed():
    change, apart = {"gradient/col.weight": flip}, {"parameter/row.weight": [1]}
    assert (
        diagnosed(change, replicas_differ=apart)[1].odd[0]
        == "copies of parameter/row.weight differ between ranks"
    )
    assert not any("copies" in sentence for sentence in diagnosed(change)[1].odd)


def test_what_is_wrong_as_well_is_not_excluded():
    flipped = lambda tensor, _all: -tensor  # noqa: E731
    assert diagnosed({"backward/norm": flipped, "gradient/col.weight": flipped})[1].excluded == [
        "forward: right in step 1"
    ]
    found = diagnosed({"backward/norm": flipped, "forward/norm": flipped})[1]
    assert found.excluded == []


def test_what_enters_is_called_right_where_it_was_seen():
    assert "col's output: right in step 1" in diagnosed({"forward/row": one_more})[1].excluded
    assert not any("output: right" in one for one in diagnosed({"forward/norm": one_more})[1].excluded)


# The update


@pytest.mark.parametrize("configured, is_named", [(0.0, False), (0.1, True)])
def test_weights_that_are_all_equal_show_the_configured_weight_decay_only(configured, is_named):
    """A multiple of them is a constant, too."""
    ones = {f"parameter/{name}": torch.ones(shape).double() for name, shape in PARAMETERS.items()}
    row = SimpleNamespace(name="parameter/col.weight", path="col.weight")
    case = SimpleNamespace(
        wrong=lambda kind: [row],
        before=lambda name: ones[f"parameter/{name}"],
        updated=lambda name: ones[f"parameter/{name}"],
        own=lambda name: ones[name] * (1 - RATE * 0.1),
        explains=lambda name, value: True,
        rate=RATE,
        options={"weight_decay": configured},
    )
    assert (update_rules.other_decay(case) is not None) is is_named
    ones["parameter/col.weight"][0, 0] = 2.0
    assert update_rules.other_decay(case).evidence.endswith("is off by +0.1")


def test_weight_decay_that_is_not_multiplied_by_the_learning_rate():
    row, before = SimpleNamespace(name="parameter/row.weight", path="row.weight"), before_of("row.weight")
    case = SimpleNamespace(
        wrong=lambda kind: [row],
        before=lambda name: before,
        updated=lambda name: before * (1 - RATE * 0.1),
        own=lambda name: before * (1 - 0.1),
        explains=lambda name, value: torch.allclose(value, before * (1 - 0.1)),
        rate=RATE,
        options={"weight_decay": 0.1},
    )
    found = update_rules.other_decay(case)
    said = "the moments are right; the weight decay of row.weight is not multiplied by the learning rate"
    assert (found.name, found.evidence) == ("weight decay", said)


def test_moments():
    """One that is a multiple of the right one contradicts the betas of the contract: it is said, and not explained."""
    names, found = diagnosed({f"exp_avg_sq/{name}": lambda t, e: 50 * t for name in PARAMETERS})
    assert names == [] and "it is 50 times the right one" in found.odd[-1]
    halved = {f"exp_avg/{name}": lambda t, e: 0.5 * t for name in PARAMETERS}
    assert diagnosed(halved)[0] == []  # other gradients would show in both moments
    names, found = diagnosed(halved | {f"exp_avg_sq/{name}": lambda t, e: 0.25 * t for name in PARAMETERS})
    assert names == ["gradient scale"] and "0.5 times those that were recorded" in found.causes[0].evidence


@pytest.mark.parametrize("by, names", [("its own norm", ["clipping"]), ("half its norm", [])])
def test_gradients_that_are_clipped_one_by_one(by, names):
    reference, _ = step_one()

    def clipped(name):
        norm = float(reference[f"gradient/{name}"].norm())
        factor = clip_factor({"max_grad_norm": 1.0}, norm if by == "its own norm" else norm / 2)
        return lambda t, e: (1 - BETAS[0]) * factor * e[f"gradient/{name}"]

    found = diagnosed({f"exp_avg/{name}": clipped(name) for name in PARAMETERS}, max_grad_norm=1.0)
    assert found[0] == names


def of_moments(kind, own, *, step=2, later=(), second=None, shape=(40, 30)):
    """A case whose wrong tensors are moments of `kind`, after one of 1s, a last gradient of EXACT and one of NOISE."""
    newest = {"exp_avg": NOISE, "exp_avg_sq": NOISE.square()}
    own = {kind: own(newest[kind])} | ({"exp_avg_sq": second} if second is not None else {})
    tensors = {f"{which}/w": tensor for which, tensor in own.items()}
    return SimpleNamespace(
        step=step,
        wrong=lambda which: [SimpleNamespace(name=f"{which}/w", path="w")] if which in own else [],
        own=lambda name, at=step: EXACT if at < step else NOISE if name == "gradient/w" else tensors[name],
        moment_before=lambda name: torch.ones_like(EXACT),
        newest=lambda name: newest[name.partition("/")[0]],
        explains=lambda name, value: evidence.relative_error(tensors[name], value) < 1e-6,
        first_of_later_steps=lambda: later,
        dump=SimpleNamespace(layout=SimpleNamespace(parameters={"w": shape})),
        found=SimpleNamespace(norm_of=lambda step: SimpleNamespace(clip=0.5)),
        clip=0.25,
    )


def test_another_beta():
    named = lambda *arguments, **options: moment_rules.other_beta(of_moments(*arguments, **options))  # noqa: E731
    cause = named("exp_avg_sq", lambda new: 0.95 + 0.05 * new)
    assert cause.evidence == "exp_avg_sq of w: as with beta2 = 0.95, not 0.999"
    assert named("exp_avg", lambda new: 0.8 + 0.2 * new).name == "betas"
    assert named("exp_avg", lambda new: 0.8 + 0.3 * new) is None
    assert named("exp_avg", lambda new: 0.8 + 0.2 * new, second=NOISE) is None  # both are wrong
    assert named("exp_avg", lambda new: 0.8 + 0.2 * new, shape=(1,)) is None  # any number would fit
    # In a first step, these moments must be wrong in a later step, too.
    for first, is_named in (("exp_avg/w", True), ("loss of DP rank 0", False)):
        cause = named("exp_avg", lambda new: 0.8 + 0.2 * new, step=1, later=[(2, 0, first, "")])
        assert (cause is not None) is is_named


def test_a_value_that_is_another_one_in_a_later_step_is_in_doubt():
    one = Cause("betas", "", 0.05)
    assert diagnose_module._are_one(one, Cause("betas", "", 0.0501))
    assert not diagnose_module._are_one(one, Cause("betas", "", 0.1))
    assert diagnose_module._are_one(one, Cause("betas", "configured differently"))
    assert not diagnose_module._are_one(one, Cause("clipping", "", 0.05))


def test_moments_of_the_gradients_of_the_step_before():
    b1, b2 = BETAS

    def named(times, **options):
        return moment_rules.last_gradients(
            of_moments("exp_avg", lambda new: b1 + (1 - b1) * times * EXACT, **options)
        )

    said = "the moments of w have the gradient of the step before"
    assert named(0.5).evidence == named(0.25).evidence == said  # clipped as in either step
    assert named(0.5, second=b2 + (1 - b2) * (0.5 * EXACT).square()).evidence == said
    assert named(0.5, second=EXACT) is None
    assert named(0.4) is None and named(0.0) is None
    assert named(0.5, step=1) is None


def test_the_norm():
    reference, _ = step_one()
    squares = {name: float(reference[f"gradient/{name}"].square().sum()) for name in PARAMETERS}
    total = sum(squares.values())
    copied = math.sqrt((total + squares["norm.weight"]) / total)
    names, found = diagnosed({}, recorded_norm=copied)
    assert names == ["clipping"] and "counted tp times" in found.causes[0].evidence
    half = squares["norm.weight"] + sum(
        float(reference[f"gradient/{name}"].chunk(2, dim)[1].square().sum())
        for name, dim in (("col.weight", 0), ("col.bias", 0), ("row.weight", 1))
    )
    names, found = diagnosed({}, recorded_norm=math.sqrt(half / total))
    assert names == ["clipping"] and "tp rank 1's shards alone" in found.causes[0].evidence
    # Flat parts of ZeRO: the first has the first weight and the first vector
    flat = squares["norm.weight"] + squares["col.weight"]
    names, found = diagnosed({}, recorded_norm=math.sqrt(flat / total))
    assert names == ["clipping"] and "dp rank 0's shards alone" in found.causes[0].evidence
    assert diagnosed({}, recorded_norm=1.1)[0] == []  # too large, and it is not known by what
    after = 1 / math.sqrt(total)
    names, found = diagnosed({}, recorded_norm=after, max_grad_norm=1.0)
    assert (
        names == ["reported norm"]
        and "the norm is that of the gradients after clipping, 1, not" in found.causes[0].evidence
    )
    assert diagnosed({}, recorded_norm=after)[0] == []  # where nothing is clipped


# What a run was configured with


@pytest.mark.parametrize(
    "entry, name",
    [
        ("compute_dtype", "precision"),
        ("learning_rates", "learning rate"),
        ("eps", "optimizer settings"),
    ],
)
def test_a_difference_in_the_configuration_is_the_cause_only_of_what_it_can_break(entry, name):
    configured = {entry: f"{entry} is a, not b"}
    doubled = of_every_parameter(lambda t, before: 2 * t - before)
    assert diagnosed(doubled, configuration=configured)[0] == [name]
    names, found = diagnosed({"forward/row": one_more}, configuration=configured)
    early = entry == "compute_dtype"
    assert (
        names == ([name] if early else [])
        and ("with no effect before a later stage" in json.dumps(found.excluded)) is not early
    )


@pytest.mark.parametrize("optimizer, names", [("Adam", ["weight decay"]), ("AdamW", [])])
def test_coupled_weight_decay_breaks_the_moments(optimizer, names):
    """Decoupled, it acts on the parameters alone."""
    configured = {"weight_decay on rank 1": "on rank 1, weight_decay of w is 0.1, not 0.0"}
    found = diagnosed(
        {"exp_avg/col.weight": lambda t, e: t + 1}, configuration=configured, optimizer=optimizer
    )
    assert found[0] == names


def test_a_cause_must_explain_the_later_steps_too():
    """A parameter keeps its value in step 1, and is off by something else in step 2."""
    frozen = Cause("update left out", "all is unchanged")
    first, later = (
        SimpleNamespace(
            first="parameter/w",
            step=step,
            names=Written.layout.names,
            dump=Written,
            steps_built_in=lambda parameter: True,
            wrong=lambda kind: [],
        )
        for step in (1, 2)
    )
    first.first_of_later_steps, first.at = lambda: [(2, 0, "parameter/w", "")], lambda failure: later
    rules = {"parameters": Stage(("parameter",), (lambda case: frozen if case.step == 1 else None,))}
    with mock.patch.dict(diagnose_module.STAGES, rules):
        doubt = diagnose_module._doubt(first, "parameters", frozen)
        assert doubt == "step 1 alone, and not step 2, looks like this: update left out: all is unchanged"
        later.first = "gradient/w"  # something else is wrong first
        assert diagnose_module._doubt(first, "parameters", frozen) == ""
    holds = {"parameters": Stage(("parameter",), (lambda case: frozen,))}
    later.first = "parameter/w"
    with mock.patch.dict(diagnose_module.STAGES, holds):
        assert diagnose_module._doubt(first, "parameters", frozen) == ""


def test_what_only_a_first_step_shows_needs_no_later_one():
    """Unclipped moments of step 1: those of step 2 hold two gradients, and the rule says nothing of them."""
    case = SimpleNamespace(
        step=1,
        clip=0.25,
        judged=lambda kind: kind,
        factor=lambda kind: 4.0 if kind == "exp_avg" else 16.0,
        names_of=lambda factor: ["1/clip factor"],
    )
    assert moment_rules.not_clipped(case).name == "clipping"
    assert moment_rules.not_clipped in diagnose_module.OF_A_FIRST_STEP
    case.names_of = lambda factor: ["tp", "1/clip factor"]
    assert moment_rules.not_clipped(case) is None


def test_the_rules_of_an_update_are_of_built_in_optimizers():
    """Another optimizer may make other moments of the same name, and a frozen parameter has none."""
    rule = {"moments": Stage(("exp_avg",), (lambda case: Cause("betas", "made up"),))}
    row = SimpleNamespace(path="w")
    case = SimpleNamespace(steps_built_in=lambda parameter: parameter == "w", wrong=lambda kind: [row])
    with mock.patch.dict(diagnose_module.STAGES, rule):
        assert [cause.evidence for _, cause in diagnose_module._explanations(case, "moments")] == ["made up"]
        row.path = "frozen"
        assert list(diagnose_module._explanations(case, "moments")) == []


def test_a_rule_that_needs_no_arithmetic_is_of_any_optimizer():
    doubled = of_every_parameter(lambda t, before: 2 * t - before)
    decayed = of_every_parameter(lambda t, before: t - RATE * 0.1 * before, ("norm.weight", "col.bias"))
    with mock.patch.object(Written, "has_own_optimizer", new=True):
        assert diagnosed(doubled)[0] == ["update scale"] and diagnosed(decayed)[0] == []


def test_a_frozen_weight_that_moved_is_named():
    changes = {"parameter/norm.weight": one_more, "parameter/col.bias": one_more}
    with mock.patch.object(Written.layout, "model", SimpleNamespace(frozen=("norm.weight", "row.weight"))):
        names, found = diagnosed(changes)
    assert names == ["frozen weights"] and found.causes[0].evidence.endswith("by the step: norm.weight")


LOGITS = "backward/lm_head"


@pytest.mark.parametrize(
    "weights, said",
    [
        (
            [0, 0, 1, 1, 2, 2, 2, 2],
            "2 tokens count 0 times, 2 tokens count 1 times, 4 tokens count 2 times (1 is right)",
        ),
        ([1, 1, 1, 1, 1, 1, 1, 0.5], "1 token counts 0.5 times, 7 tokens count 1 times (1 is right)"),
        ([2, 2, 2, 2, 2, 2, 2, 2], None),  # a factor
        (
            [0, 0, 1, 1, 1, 1, 200, 200],
            "2 tokens count 0 times, 4 tokens count 1 times, 2 tokens count 200 times (1 is right)",
        ),
        ([1e-3] * 4 + [2e-3] * 4, "4 tokens count 0.001 times, 4 tokens count 0.002 times (1 is right)"),
        ([1, 2, 3, 4, 5, 6, 7, 8], None),  # as many weights as tokens
    ],
)
@pytest.mark.parametrize("off", [0.0, 0.1])
def test_weights_of_tokens(weights, said, off):
    generator = torch.Generator().manual_seed(0)
    right, noise = torch.randn(2, 2, 4, 30, generator=generator).double()
    own = torch.tensor(weights).view(2, 4, 1) * right + off * noise
    case = SimpleNamespace(
        first=LOGITS,
        names=SimpleNamespace(logits_gradient=LOGITS),
        own=lambda name: own,
        right=lambda name: right,
        sharded=lambda name: {},
        explains=lambda name, value: float((own - value).norm()) <= 1e-9 * float(own.norm()),
    )
    found = loss_rules.weights_of_tokens(case)
    assert (found is None) == (said is None or off > 0)
    assert found is None or found.evidence == f"in the gradient of the logits, {said}"


@pytest.mark.parametrize("are_weights", [False, True])
def test_the_labels_of_a_shard_are_told_from_weights_of_tokens(are_weights):
    generator = torch.Generator().manual_seed(0)
    right, noise = torch.randn(2, 4, 8, 20, generator=generator).double()
    labels = torch.arange(32).view(4, 8) % 20
    of_shard = (labels >= 10)[..., None]
    case = of_logits(
        torch.where(of_shard, 0.5 * right if are_weights else right + noise, right),
        right,
        None,
        labels.double(),
    )
    case.sharded, case.mesh, case.reference = lambda name: {"tp": 2}, SimpleNamespace(tp=2), case.right
    found = loss_rules.labels_of_a_shard(case)
    assert found is None if are_weights else "in the shard of tp rank 1, and for no others" in found.evidence
    found = loss_rules.weights_of_tokens(case)
    said = "those whose weight is wrong have their label in the shard of tp rank 1"
    assert found.evidence.endswith(said) if are_weights else found is None


def summed_in_bfloat16(z, y):
    """Mean cross entropy whose sums of exponentials are rounded; of tokens with a label."""
    z, y = z[y != -100], y[y != -100]
    total = z.exp().sum(-1)
    rounded = total.detach().bfloat16().double()
    return (total / rounded - z.gather(-1, y[:, None])[:, 0]).mean()


def of_logits(own, right, logits, labels, precision="fp32"):
    """A case whose first wrong tensor is the gradient of the logits."""
    tensors = {LOGITS: own, "forward/lm_head": logits, "batch/labels": labels}
    return SimpleNamespace(
        first=LOGITS,
        names=SimpleNamespace(logits_gradient=LOGITS, logits="forward/lm_head"),
        options={"precision": precision},
        entry={"tensors": {LOGITS: {"shape": list(own.shape)}}},
        sharded=lambda name: {},
        has=lambda *names: all(name in tensors for name in names),
        own=lambda name: tensors[name],
        right=lambda name: right,
        explains=lambda name, value: float((own - value).norm()) <= 1e-6 * float((own - right).norm()),
    )


@pytest.mark.parametrize(
    "loss, said",
    [
        (
            lambda z, y: F.cross_entropy(z, y, label_smoothing=0.1),
            "a cross entropy with label smoothing of 0.1",
        ),
        (
            lambda z, y: F.cross_entropy(z, y) + 1e-2 * z.logsumexp(-1).square()[y != -100].mean(),
            "with a z-loss of 0.01",
        ),
        (lambda z, y: F.cross_entropy(z / 1.5, y), "of logits that are divided by a temperature of 1.5"),
        (
            lambda z, y: F.cross_entropy(z.detach().bfloat16().double() + z - z.detach(), y),
            "of logits that are rounded to bfloat16",
        ),
        (lambda z, y: F.cross_entropy(z.tanh(), y), "of logits that are capped, 1 tanh(logits / 1)"),
        (
            lambda z, y: F.cross_entropy(7 * (z / 7).tanh(), y),
            "of logits that are capped, 7 tanh(logits / 7)",
        ),
        (
            lambda z, y: F.cross_entropy(torch.cat([z, z.new_zeros(12, 8)], -1), y),
            "whose sums of exponentials have 8 more entries, of logits 0",
        ),
        (lambda z, y: summed_in_bfloat16(z, y), "whose sums of exponentials are 0.99"),
        (lambda z, y: F.cross_entropy(z.sin(), y), None),
        (lambda z, y: F.cross_entropy(400 * z, y), None),  # whose sums of exponentials overflow
        (lambda z, y: math.nan * F.cross_entropy(z, y), None),
        (lambda z, y: -z.gather(-1, y.clamp(min=0)[:, None])[y != -100].mean(), None),  # no softmax
        (lambda z, y: 0.9 * F.cross_entropy(z, y), None),  # a factor
        (lambda z, y: F.multi_margin_loss(z[y != -100], y[y != -100]), None),
    ],
)
def test_another_loss(loss, said):
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(2, 6, 20, generator=generator).double()
    labels = torch.randint(0, 20, (2, 6), generator=generator)
    labels[0, :2] = -100

    def gradient(function):
        z = logits.clone().requires_grad_()
        function(z.flatten(0, 1), labels.flatten()).backward()
        return z.grad

    case = of_logits(gradient(loss), gradient(F.cross_entropy), logits, labels)
    found = loss_rules.another_loss(case)
    assert (found is None) == (said is None) and (found is None or said in found.evidence), found


@pytest.mark.parametrize(
    "angles, said",
    [
        (lambda p, f: p * f.bfloat16().float(), "has frequencies that are rounded to bfloat16"),
        (lambda p, f: 0.25 * p * f, "has 0.25 times the right angles"),
        (lambda p, f: p * f.double() ** 0.5, "has the angles of a theta of 100, not 10000"),
        (lambda p, f: p * f + 0.1, None),
        (lambda p, f: p**1.1 * f, None),
    ],
)
@pytest.mark.parametrize("function", [torch.cos, torch.sin])
def test_rotary_angles(angles, said, function):
    frequencies = (10000.0 ** (-torch.arange(0, 16, 2) / 16)).repeat(2)
    positions = torch.arange(32.0)[:, None]
    own, right = (function(of(positions, frequencies).double())[None] for of in (angles, lambda p, f: p * f))
    case = SimpleNamespace(
        first="forward/rotary",
        path="rotary",
        own=lambda name: own,
        right=lambda name: right,
        explains=lambda name, value: float((own - value).norm()) <= 1e-4 * float((own - right).norm()),
        dump=SimpleNamespace(
            layout=SimpleNamespace(sources={"rotary": ()}), run={"architecture": {"rope_theta": 10000.0}}
        ),
    )
    found = forward.rotary_frequencies(case)
    assert (found is None) == (said is None) and (found is None or said in found.evidence), found
