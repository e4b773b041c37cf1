"""The effective contract: every group and every rank is read, and a difference is said in one line."""

import pytest
import torch

from lockstep.ground.errors import TrainingFailure
from lockstep.inputs.architectures import BUILT_IN
from lockstep.inputs.shapes import build_empty, describe, settings_of
from lockstep.plan.contract import contract_differences, of_all_ranks
from lockstep.plan.mesh import Mesh
from lockstep.training.observe import clipping_problem, optimizer_contract


def model():
    return torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.LayerNorm(3))


def optimized(optimizer, change=None, **options):
    """The contract of an optimizer with a group for weights and one for biases, after change(its groups)."""
    made = model()
    named = dict(made.named_parameters())
    groups = [
        {"params": [named["0.weight"]], "weight_decay": 0.01},
        {"params": [p for name, p in named.items() if name != "0.weight"], "weight_decay": 0.0},
    ]
    live = optimizer(groups, lr=1e-3, **options)
    if change:
        change(live.param_groups)
    return optimizer_contract(made, live, "adamw")


RIGHT = optimized(torch.optim.AdamW, fused=True)


@pytest.mark.parametrize(
    "options", [{"foreach": True}, {"foreach": False}, {}, {"capturable": True}, {"amsgrad": False}]
)
def test_how_torch_steps_is_no_configuration(options):
    other = optimized(torch.optim.AdamW, **options)
    assert contract_differences(RIGHT, other) == {}
    assert other["optimizer_implementation"] != RIGHT["optimizer_implementation"] == "fused"


def test_adam_whose_decay_is_decoupled_is_adamw():
    assert contract_differences(RIGHT, optimized(torch.optim.Adam, decoupled_weight_decay=True)) == {}


@pytest.mark.parametrize(
    "change, said",
    [
        (
            lambda groups: groups[1].update(betas=(0.999, 0.9)),
            "betas of 0.bias and 2 more is [0.999, 0.9], not [0.9, 0.999]",
        ),
        (lambda groups: groups[1].update(eps=1e-6), "eps of 0.bias and 2 more is 1e-06, not 1e-08"),
        (lambda groups: groups[0].update(weight_decay=0.1), "weight_decay of 0.weight is 0.1, not 0.01"),
        (lambda groups: groups[1].update(amsgrad=True), "optimizer_options is ['amsgrad'], not []"),
        (lambda groups: groups[1].update(lr=2e-3), "learning_rates is [0.001, 0.002], not [0.001]"),
        (
            lambda groups: groups[1].update(decoupled_weight_decay=False),
            "optimizer is 'Adam and AdamW', not 'AdamW'",
        ),
    ],
)
def test_every_group_is_read(change, said):
    differences = contract_differences(RIGHT, optimized(torch.optim.AdamW, change))
    assert next(iter(differences.values())) == said


def test_momentum_of_one_group():
    assert optimized(torch.optim.SGD)["momentum"] == 0
    with pytest.raises(TrainingFailure, match="SGD with momentum, and --optimizer says adamw or sgd"):
        optimized(torch.optim.SGD, lambda groups: groups[1].update(momentum=0.9))


def test_a_rank_that_differs_is_named():
    """On a pipeline of two stages with two replicas, the ranks of a pipeline are one."""
    decay = {"weight_decay": {"0.0": ["a"]}}, {"weight_decay": {"0.0": ["b"]}}
    ranks = [decay[0], decay[0], decay[1], {"weight_decay": {"0.1": ["b"]}}]
    whole = of_all_ranks(ranks, Mesh(pp=2, dp=2))
    expected = {"weight_decay": {"0.0": ["a", "b"]}}
    assert contract_differences(expected, whole) == {
        "weight_decay on rank 1": "on rank 1, weight_decay of b is 0.1, not 0.0"
    }
    assert contract_differences(expected, of_all_ranks(ranks[:2] + [decay[1]] * 2, Mesh(pp=2, dp=2))) == {}


def test_what_modules_were_built_with():
    """An epsilon of one norm is seen, in the whole model and through modules that a library has replaced."""
    architecture = BUILT_IN["tiny-qwen2"]
    live = build_empty(architecture, attn_impl="eager")
    expected = {"module_settings": describe(architecture).settings}
    assert contract_differences(expected, {"module_settings": settings_of(live)}) == {}
    live.model.layers[1].input_layernorm.variance_epsilon = 1e-5
    live.model.layers[0].mlp = torch.nn.Identity()
    assert contract_differences(expected, {"module_settings": settings_of(live)}) == {
        "module_settings": "variance_epsilon of model.layers.1.input_layernorm is 1e-05, not 1e-06"
    }


@pytest.mark.parametrize(
    "configured, before, after, odd",
    [
        (0.5, 2.0, 0.5, False),
        (0.5, 0.3, 0.3, False),
        (0.0, 2.0, 2.0, False),
        (0.5, 2.0, None, False),
        (0.5, 2.0, 0.6, True),
        (0.5, 2.0, 2.0, True),
        (0.0, 2.0, 1.0, True),
        (0.5, 0.3, 0.2, True),
    ],
)
def test_norms_before_and_after_clipping(configured, before, after, odd):
    assert bool(clipping_problem(configured, before, after, "fp32")) is odd


@pytest.mark.parametrize(
    "after, precision, odd",
    [(0.1001, "fp32", False), (0.1004, "fp32", True), (0.1004, "bf16", False), (0.1006, "bf16", True)],
)
def test_clipping_rounds_gradients_of_bf16(after, precision, odd):
    assert bool(clipping_problem(0.1, 1.6, after, precision)) is odd


def test_checkpointing_is_held_against_a_run_that_asks_for_it():
    asked, live = {"activation_checkpointing": True}, {"activation_checkpointing": False}
    assert contract_differences(asked, live) and not contract_differences(live, asked)


def test_a_learning_rate_may_be_a_tensor():
    assert optimized(torch.optim.AdamW, lambda groups: groups[0].update(lr=torch.tensor(1e-3)))[
        "learning_rates"
    ] == [1e-3]
