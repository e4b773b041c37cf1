"""What tensors of a recorded run may be off by: a yardstick that is drawn again, and sums whose terms all but cancel."""

import pytest
import torch

import lockstep
from lockstep.recorded import redrawn, step
from lockstep.recorded.model_pass import ModelPass
from lockstep.recorder.recording import Recording
from lockstep.verdict.distance import Distance
from lockstep.verdict.judgement import Judgement
from lockstep.verdict.rows import StepVerdict


class Normed(torch.nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)
        self.register_buffer("table", torch.rand(width, width) / 2)

    def forward(self, x):
        return torch.nn.functional.layer_norm(self.linear(x) @ self.table, (x.shape[-1],))


def of_logarithm(net, number):
    """A loss whose gradient few elements dominate: those near zero."""
    return net(torch.randn(8, net.linear.in_features)).square().log().mean()


def trained(folder, net, micro_batches, loss, then=lambda net: None):
    """A recording of one step."""
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)
    with lockstep.record(net, str(folder)):
        for number in range(micro_batches):
            loss(net, number).backward()
        then(net)
        optimizer.step()
    return Recording(folder)


def test_a_yardstick_that_is_small_by_chance_raises_no_alarm(tmp_path):
    """On one machine, the single draw was too small for two of these, 39 and 141."""
    for seed in (*range(30, 45), 141):
        torch.manual_seed(seed)
        verdict = step.judge(trained(tmp_path / str(seed), Normed(), 1, of_logarithm), 1)
        assert not verdict.wrong, (seed, verdict.wrong)


def test_a_small_error_is_found_by_several_draws_too(tmp_path, monkeypatch):
    """They tolerate little more of a tensor of many elements."""

    def spoil(net):
        net.linear.weight.grad *= 1 + 5e-5 * torch.randn(64, 64)

    torch.manual_seed(0)
    own = trained(tmp_path, Normed(64), 1, of_logarithm, spoil)
    rows = []
    for chance in (False, True):
        monkeypatch.setattr(redrawn, "may_be_chance", lambda _: chance)  # noqa: B023
        rows += [row for row in step.judge(own, 1).rows if row.name == "gradient/linear.weight"]
    one, several = rows
    assert one.is_far and several.is_far
    assert one.tolerated <= several.tolerated < 2 * one.tolerated


class Scale(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(64))

    def forward(self, x):
        return x.float() * self.weight


def scaled():
    """Biases, whose gradients autocast rounds, and scales, whose gradients it does not."""
    layers = [(torch.nn.Linear(64, 64), torch.nn.Tanh(), Scale()) for _ in range(3)]
    return torch.nn.Sequential(*(module for layer in layers for module in layer))


@pytest.mark.parametrize("spoilt", [False, True])
def test_vectors_that_autocast_does_not_round_are_judged_apart(tmp_path, spoilt):
    """The gradient of a bias has errors of bfloat16. They say nothing of the gradient of a scale, which is summed in float32."""

    def loss(net, number):
        with torch.autocast("cpu", torch.bfloat16):
            return net(torch.randn(32, 64)).square().mean() / 3

    def then(net):
        if spoilt:
            net[5].weight.grad *= 1 + 1e-5 * torch.randn(64)

    torch.manual_seed(0)
    verdict = step.judge(trained(tmp_path, scaled(), 3, loss, then), 1)
    rows = {row.name: row for row in verdict.alone}
    of_scales, of_biases = (
        [rows[f"gradient/{number}.{name}"] for number in range(first, 9, 3)]
        for first, name in ((2, "weight"), (0, "bias"))
    )
    assert [row.name for row in verdict.alone if row.is_far] == ["gradient/5.weight"] * spoilt
    assert all(row.tolerated < 1e-5 * row.distance.norm for row in of_scales)
    assert all(1e-3 * row.distance.norm < row.tolerated for row in of_biases)


def row(name, multiple):
    return Judgement(1, name, Distance(multiple, multiple, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0), 1.0, 1.0)


@pytest.mark.parametrize(
    "rows, alone, chance",
    [
        ([row("gradient/w", 1.5), row("forward/a", 0.5)], [row("gradient/w", 0.5)], True),
        ([row("gradient/w", 0.9)], [], False),
        ([row("gradient/w", 1.5)], [row("gradient/w", 1.5)], False),  # which is not drawn again
        ([row("gradient/w", 1.5), row("gradient norm", 1.5)], [], False),
        ([row("gradient/w", 1.5), row("gradient/v", 11.0)], [], False),
    ],
)
def test_what_may_be_chance(rows, alone, chance):
    assert redrawn.may_be_chance(StepVerdict(1, rows=rows, alone=alone)) == chance


def test_each_tensor_is_that_of_the_farthest_draw(tmp_path):
    torch.manual_seed(0)
    own = trained(tmp_path, Normed(), 1, of_logarithm)
    weights = {name: own.whole(1, f"weight/{name}")[0] for name in own.names(1, "weight")}
    reference_pass, yardstick_pass = (
        ModelPass(own, 1, weights, None, exact=exact) for exact in (True, False)
    )
    [called] = own.micro_batches(1)
    yardstick, reference = yardstick_pass.compute(called), reference_pass.compute(called)

    def errors():
        modules = {name: tensor - reference.modules[name] for name, tensor in yardstick.modules.items()}
        gradients = {name: tensor - reference.gradients[name] for name, tensor in yardstick.gradients.items()}
        return {name: float(one.norm()) for name, one in (modules | gradients).items()}

    before = errors()
    redrawn.draw_again(yardstick_pass, yardstick, reference, called, {})
    after = errors()
    assert all(after[name] >= before[name] for name in before) and after != before
    assert all(torch.equal(one, weights[name]) for name, one in yardstick_pass.model.named_parameters())


class Weighted(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(64))

    def forward(self, x):
        return (self.weight * x).sum()


@pytest.mark.parametrize("error, wrong", [(0.0, False), (1e-6, True)])
def test_micro_batches_that_all_but_cancel(tmp_path, error, wrong):
    """A sum in float32 rounds at the size of its terms, here at 1e-7; the gradient is a thousandth of them."""
    torch.manual_seed(0)
    w, x, y, z = torch.randn(4, 64)
    given = [w, x, y, 1e-3 * z - (w + x + y)]

    def spoil(net):
        net.weight.grad += error * torch.randn(64)

    own = trained(tmp_path, Weighted(), 4, lambda net, number: net(given[number]) / 4, spoil)
    assert bool(step.judge(own, 1).wrong) == wrong


class Attends(torch.nn.Module):
    """The gradient of the bias of its keys is zero in exact arithmetic: softmax does not see it."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (torch.nn.Linear(16, 16) for _ in range(3))

    def forward(self, x):
        query, key, value = (each(x) for each in (self.query, self.key, self.value))
        return (query @ key.mT).softmax(-1) @ value


@pytest.mark.parametrize("more, wrong", [(0.0, set()), (1e-3, {"gradient/key.bias"})])
def test_a_gradient_that_is_zero_in_exact_arithmetic(tmp_path, monkeypatch, more, wrong):
    """What the run's rounding errors leave of it depends on the order in which rows are added up; here, the largest come last."""
    torch.manual_seed(2)
    net, arrived = Attends(), []
    net.key.register_full_backward_hook(lambda *given: arrived.append(given[2][0].reshape(-1, 16).T))

    def add_up(net):
        [columns] = arrived
        own = torch.stack([sum(column[column.abs().argsort()]) for column in columns])
        net.key.bias.grad = own + more * net.query.bias.grad

    own = trained(tmp_path, net, 1, lambda net, _: net(torch.randn(8, 64, 16)).square().mean(), add_up)
    verdict = step.judge(own, 1)
    assert {one.name for one in verdict.alone if one.too_far} == wrong and bool(verdict.wrong) == bool(wrong)
    # Negative control: as one that is not known to be zero, it would be held against the yardstick's own order alone.
    monkeypatch.setattr(step, "zeros_of", lambda *_: set())
    known, unknown = (
        next(one for one in found.alone if one.name == "gradient/key.bias")
        for found in (verdict, step.judge(own, 1))
    )
    assert known.tolerated > 1.5 * unknown.tolerated
