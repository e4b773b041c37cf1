"""Losses that a loop computes by torch's functions, or that a model leaves in an attribute: how much each counts is judged."""

import pytest
import torch
from torch.nn import functional as F
from trained import train, verdict


class Net(torch.nn.Module):
    """Leaves its loss if it is given labels."""

    def __init__(self):
        super().__init__()
        self.inside, self.head = torch.nn.Linear(8, 16), torch.nn.Linear(16, 4)

    def forward(self, x, labels=None):
        logits = self.head(torch.tanh(self.inside(x)))
        if labels is not None:
            self.last_loss = F.cross_entropy(logits, labels)
        return logits


LOSSES = {
    "mse": lambda out, wanted, labels: F.mse_loss(out, wanted),
    "mse by element": lambda out, wanted, labels: F.mse_loss(out, wanted, reduction="none").mean(),
    "mse of a sum": lambda out, wanted, labels: F.mse_loss(out, wanted, reduction="sum") / out.numel(),
    "l1": lambda out, wanted, labels: F.l1_loss(out, wanted),
    "nll": lambda out, wanted, labels: torch.nn.NLLLoss()((out / 2).log_softmax(-1), labels),
    "classes": lambda out, wanted, labels: F.cross_entropy(out / 0.7, labels),
    "bce": lambda out, wanted, labels: F.binary_cross_entropy_with_logits(out, (wanted > 0).float()),
    "discriminator": lambda out, wanted, labels: F.binary_cross_entropy_with_logits(
        out, torch.ones_like(out)
    ),
    "two": lambda out, wanted, labels: F.mse_loss(out, wanted) + 0.3 * F.l1_loss(out, wanted),
}
TIMES = "the gradient is 3 times that of the mean over all elements of the global batch, which is the micro batches of a rank"


def trained(folder, name, factor=1 / 3, last=6):
    """Three micro batches a step; the last may be smaller."""

    def go_backward(net):
        for rows in (6, 6, last):
            x, wanted, labels = torch.randn(rows, 8), torch.randn(rows, 4), torch.randint(4, (rows,))
            if name == "left":
                net(x, labels)
                loss = net.last_loss
            else:
                loss = LOSSES[name](net(x), wanted, labels)
            (loss * factor).backward()

    torch.manual_seed(0)
    train(folder, Net(), go_backward)


@pytest.mark.parametrize("name", ["mse", "mse by element", "mse of a sum", "nll", "classes", "bce"])
def test_a_mean_over_the_micro_batches_passes(tmp_path, capsys, name):
    trained(tmp_path, name)
    status, out = verdict(tmp_path, capsys)
    assert status == 0 and "PASS: 2 steps; the targets of the loss are not judged" in out, out


@pytest.mark.parametrize("name", ["mse", "mse by element", "mse of a sum", "nll", "classes", "bce"])
def test_losses_that_are_added_up_fail(tmp_path, capsys, name):
    trained(tmp_path, name, 1.0)
    status, out = verdict(tmp_path, capsys)
    assert status == 1 and f"FAIL: step 1: {TIMES}" in out, out


def test_a_smaller_micro_batch_counts_as_much_as_another(tmp_path, capsys):
    trained(tmp_path, "mse", last=2)
    status, out = verdict(tmp_path, capsys)
    assert status == 0 and "of the micro batches' means; in the mean over all elements" in out, out


@pytest.mark.parametrize(
    "name, factor, said",
    [
        ("discriminator", 1.0, "3 times that of the mean over all elements"),
        ("mse", 1 / 6, "0.5 times that of the mean over all elements"),
        ("l1", 10 / 3, "10 times that of the mean over all elements"),
    ],
)
def test_a_factor_that_may_be_meant_is_noted(tmp_path, capsys, name, factor, said):
    """Both losses of a discriminator are added up, half of a square has the gradient of a difference, and a number may be chosen."""
    trained(tmp_path, name, factor)
    status, out = verdict(tmp_path, capsys)
    assert status == 0 and f"note: the gradient is {said} of the global batch" in out, out


def test_of_several_terms_none_is_the_loss(tmp_path, capsys):
    trained(tmp_path, "two", 1.0)
    status, out = verdict(tmp_path, capsys)
    assert status == 0 and "PASS: 2 steps; the loss itself is not judged" in out, out


@pytest.mark.parametrize(
    "factor, status, said", [(1 / 3, 0, "18 tokens"), (1.0, 1, "the gradient is 3 times")]
)
def test_a_loss_that_the_model_leaves_in_an_attribute(tmp_path, capsys, factor, status, said):
    trained(tmp_path, "left", factor)
    found, out = verdict(tmp_path, capsys)
    assert found == status and said in out and "not judged" not in out, out


@pytest.mark.parametrize(
    "shift, status, said", [(1, 0, "PASS"), (0, 1, "the token itself: labels are not shifted")]
)
def test_targets_of_tokens_are_seen(tmp_path, capsys, shift, status, said):
    """Of nll_loss, of log-probabilities that the model returns."""

    def go_backward(net):
        tokens = torch.randint(30, (4, 13))
        out = net(tokens[:, :-1])
        F.nll_loss(out.flatten(0, 1), tokens[:, shift : shift + 12].flatten()).backward()

    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Embedding(30, 16), torch.nn.Linear(16, 30), torch.nn.LogSoftmax(-1))
    train(tmp_path, net, go_backward)
    found, out = verdict(tmp_path, capsys)
    assert found == status and said in out, out


def test_losses_that_are_made_in_several_places_are_added_up(tmp_path, capsys):
    """As inside and at the boundary of a region. Negative control: test_losses_that_are_added_up_fail."""

    def go_backward(net):
        F.mse_loss(net(torch.randn(6, 8)), torch.randn(6, 4)).backward()
        F.mse_loss(net(torch.randn(6, 8)), torch.zeros(6, 4)).backward()

    torch.manual_seed(0)
    train(tmp_path, Net(), go_backward)
    status, out = verdict(tmp_path, capsys)
    assert status == 0 and "note: the gradient is 2 times that of the mean over all elements" in out, out


@pytest.mark.parametrize("kind", ["ones", "sums of a sample", "soft", "of another model", "no loss"])
def test_factors_that_may_be_something_else(tmp_path, capsys, kind):
    """Each has the factor 4, and 4 micro batches; a scalar that is no loss may be taken by its negative."""
    torch.manual_seed(0)
    other = torch.nn.Linear(4, 4)

    def go_backward(net):
        for _ in range(4):
            out, wanted = net(torch.randn(6, 8)), torch.randn(6, 4)
            if kind == "ones":
                loss = 4 * F.binary_cross_entropy_with_logits(out, torch.rand(6, 4) / 5 + 0.8)
            elif kind == "sums of a sample":
                loss = F.mse_loss(out, wanted, reduction="none").sum(-1).mean()
            elif kind == "soft":
                loss = 4 * F.kl_div(out.log_softmax(-1), wanted.softmax(-1), reduction="batchmean")
            elif kind == "of another model":
                F.mse_loss(other(wanted), wanted).backward()
                loss = out.square().mean() / 4
            else:
                loss = -out.mean() / 4
            loss.backward()

    train(tmp_path, Net(), go_backward)
    status, out = verdict(tmp_path, capsys)
    assert status == 0 and "PASS: 2 steps; the loss itself is not judged" in out, out


def scripted_loss(out, wanted):
    return F.mse_loss(out, wanted)


def test_a_loss_that_is_scripted_while_losses_are_seen(tmp_path, capsys):
    real, script = F.mse_loss, torch.jit.script

    def go_backward(net):
        loss = torch.jit.script(scripted_loss)
        assert F.mse_loss is not real
        loss(net(torch.randn(6, 8)), torch.randn(6, 4)).backward()

    torch.manual_seed(0)
    train(tmp_path, Net(), go_backward)
    assert F.mse_loss is real and torch.jit.script is script
    assert verdict(tmp_path, capsys)[0] == 0


def test_a_loss_that_is_divided_in_place(tmp_path, capsys):
    def go_backward(net):
        for _ in range(3):
            loss = F.mse_loss(net(torch.randn(6, 8)), torch.randn(6, 4))
            loss /= 3
            loss /= 3
            loss.backward()

    torch.manual_seed(0)
    train(tmp_path, Net(), go_backward)
    status, out = verdict(tmp_path, capsys)
    assert status == 1 and "the gradient is 0.3333333 times that of the mean over all elements" in out, out


@pytest.mark.parametrize(
    "loss, says",
    [
        (
            lambda out, labels: F.cross_entropy(out.softmax(-1), labels),
            "cross_entropy is given probabilities",
        ),
        (lambda out, labels: F.nll_loss(out.softmax(-1), labels), "nll_loss is given values above 0"),
        (lambda out, labels: F.mse_loss(out[:, 0], out.new_ones(6, 1)), "their shapes are (6,) and (6, 1)"),
        (lambda out, labels: F.mse_loss(out[:, :1], out.new_ones(1)), ""),
        (lambda out, labels: F.cross_entropy(out, labels), ""),
    ],
)
def test_what_a_function_is_given_that_is_hardly_meant(tmp_path, capsys, loss, says):
    """One process would compute the same, so it is a note."""
    torch.manual_seed(0)
    train(tmp_path, Net(), lambda net: loss(net(torch.randn(6, 8)), torch.randint(4, (6,))).backward())
    status, out = verdict(tmp_path, capsys)
    odd = [line for line in out.splitlines() if " is given " in line or "their shapes are" in line]
    assert status == 0 and len(odd) == bool(says) and says in "".join(odd), out
