"""Another way to compute a module's output is named where it explains the output, and only there. torch computes the ways here."""

import re

import pytest
import torch
from families import FAMILIES, ONLY_EAGER, architecture
from one_tensor import case_of
from programs import ROOT
from torch.nn import functional

from lockstep.diagnosis import attention
from lockstep.diagnosis.exchanged import other_rows
from lockstep.diagnosis.modules import another_way
from lockstep.dumps.trace import layout_of
from lockstep.inputs import own_model
from lockstep.inputs.architectures import BUILT_IN
from lockstep.verdict.gpu_arithmetic import rounded as as_tf32

LAYER, BEFORE = "model.layers.1", "model.layers.0"
NORM, MLP = f"{LAYER}.input_layernorm", f"{LAYER}.mlp"
CHANNELS = 64


def draw(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()


X, OTHER = draw(4, 8, CHANNELS, seed=0), draw(4, 8, CHANNELS, seed=1)
WEIGHT, BIAS, OLD = 1 + 0.1 * draw(CHANNELS, seed=2), draw(CHANNELS, seed=3), 1 + 0.1 * draw(CHANNELS, seed=4)
MATRIX, OLD_MATRIX, OTHER_MATRIX = (draw(CHANNELS, CHANNELS, seed=seed) / 8 for seed in (5, 6, 10))


def rms(x=X, weight=WEIGHT, eps=1e-6):
    return functional.rms_norm(x, (x.shape[-1],), weight, eps)


def of_norm(own, right=None, bias=None, **options):
    weights = [
        {f"{NORM}.weight": OLD, f"{NORM}.bias": bias},
        {f"{NORM}.weight": WEIGHT, f"{NORM}.bias": bias},
    ]
    if bias is None:
        weights = [{f"{NORM}.weight": weight} for weight in (OLD, WEIGHT)]
    tensors = {f"forward/{BEFORE}": X, f"forward/{BEFORE}.mlp": OTHER}
    return case_of(
        f"forward/{NORM}",
        own,
        rms() if right is None else right,
        tensors,
        step=2,
        weights=weights,
        sources={NORM: (BEFORE,)},
        architecture={"rms_norm_eps": 1e-6},
        **options,
    )


def variance_in(dtype):
    return X * (X.square().mean(-1, keepdim=True).to(dtype).double() + 1e-6).rsqrt() * WEIGHT


def variance_computed_in(dtype):
    return X * (X.to(dtype).pow(2).mean(-1, keepdim=True).double() + 1e-6).rsqrt() * WEIGHT


def computed_in(dtype):
    x = X.to(dtype)
    return (x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * WEIGHT.to(dtype)).double()


@pytest.mark.parametrize(
    "own, name, said",
    [
        (rms(eps=1e-3), "module settings", "has an epsilon of 0.001, not 1e-06"),
        (rms(weight=WEIGHT**0), "module settings", "is not multiplied with its weight"),
        (rms(weight=1 + WEIGHT), "module settings", "is multiplied with 1 + its weight"),
        (rms(weight=OLD), "weights", f"is computed with {NORM}.weight as it was before step 1"),
        (
            functional.layer_norm(X, (CHANNELS,), WEIGHT, None, 1e-6),
            "module settings",
            "has the mean subtracted",
        ),
        (
            rms(OTHER),
            "module inputs",
            f"is computed from {BEFORE}.mlp's output, in the place of {BEFORE}'s output",
        ),
        (variance_in(torch.bfloat16), "precision", "has its variance rounded to bfloat16"),
        (variance_computed_in(torch.bfloat16), "precision", "has its variance computed in bfloat16"),
        (computed_in(torch.bfloat16), "precision", "is computed in bfloat16"),
        (computed_in(torch.float16), "precision", "is computed in float16"),
        (rms(weight=WEIGHT.half().double()), "precision", "is computed with its weight rounded to float16"),
        (rms(X.bfloat16().double()), "precision", "is computed with its input rounded to bfloat16"),
        # What no way explains, or several do
        (rms() * 0.5, None, None),  # as a large epsilon, where all rows are as large
        (rms() * 1.01, None, None),
        (rms() + 0.01 * OTHER, None, None),
        (0 * X, None, None),
        (rms().roll(1, 0), None, None),
    ],
)
@pytest.mark.parametrize("in_one_sample", [False, True])
def test_norms(own, name, said, in_one_sample):
    if in_one_sample:
        own = torch.cat([rms()[:1], own[1:2], rms()[2:]])
    found = another_way(of_norm(own))
    assert (found and found.name, found and found.evidence) == (
        name,
        said and f"{NORM}'s output {said}, as recomputed",
    )


def test_a_multiple_of_a_norm_is_no_other_epsilon():
    """Rows of an embedding have nearly the same variance, so another epsilon is a multiple."""
    x = 0.02 * draw(4, 8, 896, seed=0)
    weight = torch.ones(896).double()
    for times in (0.5, 0.8, 2.0):  # 2: as by 1 + the weight
        right = rms(x, weight)
        case = case_of(
            f"forward/{NORM}",
            (times * right).bfloat16().double(),
            right,
            {f"forward/{BEFORE}": x},
            weights=[{f"{NORM}.weight": weight}],
            sources={NORM: (BEFORE,)},
            architecture={"rms_norm_eps": 1e-6},
            precision="autocast",
        )
        assert another_way(case) is None


def test_the_right_epsilon_is_that_of_the_reference_where_the_model_does_not_say_it():
    right, own = (functional.layer_norm(0.1 * X, (CHANNELS,), weight, BIAS, 1e-5) for weight in (WEIGHT, OLD))
    case = of_norm(own, right, bias=BIAS)
    case.dump.run["architecture"].clear()
    case.own = {
        f"forward/{NORM}": own,
        f"forward/{BEFORE}": 0.1 * X,
        f"forward/{BEFORE}.mlp": OTHER,
    }.__getitem__
    found = another_way(case)
    assert (
        found.evidence
        == f"{NORM}'s output is computed with {NORM}.weight as it was before step 1, as recomputed"
    )


@pytest.mark.parametrize("scale, dtype", [(1e-4, "TF32"), (1.0, "float16 or TF32")])
def test_operands_in_tf32_are_not_in_float16(scale, dtype):
    x, matrix = scale * X, scale * MATRIX
    own = as_tf32(x.float()).double() @ as_tf32(matrix.float()).double().T
    name = f"{MLP}.up_proj"
    case = case_of(
        f"forward/{name}",
        own,
        x @ matrix.T,
        {f"forward/{LAYER}.norm": x},
        weights=[{f"{name}.weight": matrix}],
        sources={name: (f"{LAYER}.norm",)},
    )
    found = another_way(case)
    assert (
        found.evidence
        == f"{name}'s output is computed with its input and weight rounded to {dtype}, as recomputed"
    )


def test_a_norm_of_each_tp_ranks_features():
    own = torch.cat(
        [rms(part, weight) for part, weight in zip(X.chunk(2, -1), WEIGHT.chunk(2), strict=True)], -1
    )
    found = another_way(of_norm(own, tp=2))
    assert found.evidence == f"{NORM}'s output is normed over each tp rank's features alone, as recomputed"
    assert another_way(of_norm(own)) is None
    whole = of_norm(own, tp=2)
    whole.sharded = lambda name: {}  # each rank has all features
    found = another_way(whole)
    assert (found.name, found.evidence) == (
        "module settings",
        f"{NORM}'s output is normed over 2 groups of features alone, as recomputed",
    )


def test_a_norm_with_a_mean_and_a_bias():
    right = functional.layer_norm(X, (CHANNELS,), WEIGHT, BIAS, 1e-6)
    own = functional.layer_norm(X, (CHANNELS,), WEIGHT, BIAS, 1e-3)
    found = another_way(of_norm(own, right, bias=BIAS))
    assert found.evidence == f"{NORM}'s output has an epsilon of 0.001, not 1e-06, as recomputed"
    assert another_way(of_norm(right + 0.01 * OTHER, right, bias=BIAS)) is None


def of_linear(own, **options):
    name, other = f"{MLP}.up_proj", f"{MLP}.gate_proj.weight"
    return case_of(
        f"forward/{name}",
        own,
        X @ MATRIX.T,
        {
            f"forward/{LAYER}.norm": X,
            f"forward/{LAYER}.self_attn": OTHER,
            f"forward/{BEFORE}.self_attn": 2 * OTHER,
        },
        step=2,
        weights=[{f"{name}.weight": matrix, other: OTHER_MATRIX} for matrix in (OLD_MATRIX, MATRIX)],
        sources={name: (f"{LAYER}.norm",)},
        **options,
    )


@pytest.mark.parametrize(
    "own, said",
    [
        (
            OTHER @ MATRIX.T,
            f"is computed from {LAYER}.self_attn's output, in the place of {LAYER}.norm's output",
        ),
        (X @ OLD_MATRIX.T, f"is computed with {MLP}.up_proj.weight as it was before step 1"),
        (X @ OTHER_MATRIX.T, f"is computed with {MLP}.gate_proj.weight"),
        (X @ MATRIX, None),
        (X @ MATRIX.T + 0.01 * OTHER, None),
        (OTHER, None),
    ],
)
@pytest.mark.parametrize("precision", ["fp32", "autocast"])
def test_linear_layers(own, said, precision):
    if precision == "autocast":
        own = own.bfloat16().double()
    found = another_way(of_linear(own, precision=precision))
    assert (found and found.evidence) == (said and f"{MLP}.up_proj's output {said}, as recomputed")


def test_a_linear_layer_of_one_tp_rank():
    own = torch.cat([(X @ MATRIX.T)[..., :32], (OTHER @ MATRIX.T)[..., 32:]], -1)
    assert "is computed from" in another_way(of_linear(own, tp=2)).evidence
    assert another_way(of_linear(own)) is None


@pytest.mark.parametrize(
    "function, said",
    [
        (functional.gelu, "is gelu of its input"),
        (lambda x: functional.gelu(x, approximate="tanh"), "is the tanh approximation of gelu of its input"),
        (
            lambda x: functional.silu(OTHER),
            f"is computed from {MLP}.up_proj's output, in the place of {MLP}.gate_proj's output",
        ),
        (lambda x: 1.01 * functional.silu(x), None),
    ],
)
def test_activations(function, said):
    name = f"{MLP}.act_fn"
    found = another_way(
        case_of(
            f"forward/{name}",
            function(X),
            functional.silu(X),
            {f"forward/{MLP}.gate_proj": X, f"forward/{MLP}.up_proj": OTHER},
            sources={name: (f"{MLP}.gate_proj",)},
        )
    )
    assert (found and found.evidence) == (said and f"{name}'s output {said}, as recomputed")


@pytest.mark.parametrize(
    "own, right, said",
    [
        (X, X + OTHER, f"lacks {MLP}'s output"),
        (X + 2 * OTHER, X + OTHER, f"has {MLP}'s output added"),
        (2 * (X + OTHER), X + OTHER, None),
        (X + OTHER + rms(), X + OTHER, f"has {NORM}'s output added"),
        (rms() + OTHER, X + OTHER, f"is computed from {NORM}'s output, in the place of {BEFORE}'s output"),
        (rms() * OTHER, X * OTHER, f"is computed from {NORM}'s output, in the place of {BEFORE}'s output"),
        (X + 1.5 * OTHER, X + OTHER, None),
        (X - OTHER, X + OTHER, None),
        (X, X / OTHER, None),
    ],
)
def test_sums_and_products(own, right, said):
    tensors = {f"forward/{BEFORE}": X, f"forward/{MLP}": OTHER, f"forward/{NORM}": rms()}
    found = another_way(case_of(f"forward/{LAYER}", own, right, tensors, sources={LAYER: (BEFORE, MLP)}))
    assert (found and found.evidence) == (said and f"{LAYER}'s output {said}, as recomputed")


EMBEDDING = "model.embed_tokens"


@pytest.mark.parametrize(
    "looked_up, said",
    [
        (
            lambda ids: torch.where(ids > 20, ids - 1, ids),
            "of .* ids from 2. to 3. is the row 1 before the right one",
        ),
        (lambda ids: 39 - ids, "the embeddings of 34 ids are those of others: id 1 has that of 38"),
        (None, None),
        (lambda ids: ids.roll(1, 1), None),  # positions
        (lambda ids: ids.roll(1, 0), None),  # samples
        (lambda ids: torch.where(torch.arange(16) == 3, ids + 1, ids), None),  # these ids are right elsewhere
    ],
)
def test_rows_of_the_embedding(looked_up, said):
    weight = draw(42, CHANNELS, seed=7)
    ids = torch.randint(0, 40, (4, 16), generator=torch.Generator().manual_seed(8))
    own = weight[looked_up(ids)] if looked_up else weight[ids] + 0.01 * draw(4, 16, CHANNELS, seed=9)
    case = case_of(
        f"forward/{EMBEDDING}",
        own,
        weight[ids],
        {"batch/input_ids": ids.double()},
        weights=[{f"{EMBEDDING}.weight": weight}],
        sources={EMBEDDING: ()},
    )
    found = other_rows(case)
    assert (found is None) == (said is None)
    assert found is None or re.search(said, found.evidence)


SIZES = {"batch": 4, "sequence": 12}
OWN_MODEL = f"{ROOT}/examples/own_model.py:make_model"


@pytest.mark.parametrize("name", [*(name for name in BUILT_IN if "tiny" in name), *FAMILIES, OWN_MODEL])
def test_no_rule_fails_for_any_module_of_any_model(name):
    """The rules take shapes and names for granted that only some models have. Wrong outputs are noise, which nothing explains."""
    if name == OWN_MODEL:
        config = own_model.architecture_of(name)
    else:
        config = BUILT_IN[name] if name in BUILT_IN else architecture(name)
    layout = layout_of(config, "eager" if name in ONLY_EAGER else "sdpa")
    tensors = {
        f"forward/{module}": draw(*(SIZES.get(size, size) for size in shape), seed=number)
        for number, (module, shape) in enumerate(layout.outputs.items())
    }
    tensors |= {f"batch/{which}": torch.arange(48).view(4, 12).double() for which in ("input_ids", "labels")}
    tensors |= {f"backward/{module}": tensors[f"forward/{module}"] for module in layout.backward}
    weights = {
        parameter: draw(*shape, seed=number)
        for number, (parameter, shape) in enumerate(layout.parameters.items())
    }
    for first in (name for name in tensors if not name.startswith("batch/")):
        case = case_of(
            first,
            tensors[first] + draw(*tensors[first].shape, seed=1),
            tensors[first],
            tensors,
            weights=[weights],
            sources=layout.sources,
            architecture=config,
        )
        case.names, case.dump.layout.outputs = layout.names, layout.outputs
        if layout.names.not_on_heads:
            case.head_size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        else:
            del case.head_size
        for rule in (attention.another_way, attention.another_way_back, another_way, other_rows):
            assert rule(case) is None or first.startswith("backward/"), (first, rule)
