"""Loops as people write them, in one process: what is wrong in them is found, and what is right passes."""

import argparse
import contextlib
import copy
import dataclasses
import os

import pytest
import torch
from scripts import TRAINS
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, TensorDataset

import lockstep
from lockstep import judge, record
from lockstep.recorder.recording import Recording
from lockstep.verdict.mean_over import recognise

VOCABULARY, LENGTH = 50, 16


def at_once(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class LM(torch.nn.Module):
    """`loss`: how the model computes its loss, from logits that it does not return."""

    def __init__(self, loss=at_once):
        super().__init__()
        self.embedding, self.inside = torch.nn.Embedding(VOCABULARY, 16), torch.nn.Linear(16, 16)
        self.head, self.loss = torch.nn.Linear(16, VOCABULARY), loss
        self.register_buffer("scale", torch.ones(16))

    def forward(self, ids, targets):
        assert self.scale.dtype == torch.float32, f"found {self.scale.dtype}"
        x = F.gelu(self.inside(self.embedding(ids))) * self.scale
        return self.loss(10 * torch.tanh(self.head(x) / 10), targets)


def two_chunks(logits, targets):
    """The sum over both halves of the positions, divided by all labels."""
    of = zip(logits.chunk(2, 1), targets.chunk(2, 1), strict=True)
    total = sum(F.cross_entropy(one.flatten(0, 1), two.flatten(), reduction="sum") for one, two in of)
    return total / (targets != -100).sum()


def shifted_inside(logits, targets):
    return F.cross_entropy(logits[:, :-1].transpose(1, 2), targets[:, 1:])


class Sees(LM):
    def forward(self, ids, targets):
        x = self.embedding(ids)
        return self.loss(self.head(x + self.inside(x.mean(1, keepdim=True))), targets)


def verdict(folder, capsys):
    status = judge.main([str(folder)])
    return status, capsys.readouterr().out


@contextlib.contextmanager
def recorded(folder, make):
    """(a model, its optimizer), for a loop that a test writes itself."""
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    with lockstep.record(model, folder):
        yield model, optimizer


def trained_twice(folder, make):
    """A run of two steps, of a model that returns a loss of eight numbers."""
    with recorded(folder, make) as (model, optimizer):
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(4, 8)).backward()
            optimizer.step()


def trained(folder, model, batches, *, before=lambda model: None):
    """A run whose steps are given: the tokens and labels of each micro batch."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    with lockstep.record(model, folder):
        before(model)
        for step in batches:
            optimizer.zero_grad()
            for ids, labels in step:
                (model(ids, labels) / len(step)).backward()
            optimizer.step()


def drawn(number=1, steps=2, ahead=1):
    """Tokens, and those that are `ahead`."""
    tokens = torch.randint(0, VOCABULARY, (steps, number, 4, LENGTH + 2))
    return [[(one[:, :LENGTH], one[:, ahead : LENGTH + ahead]) for one in step] for step in tokens]


@pytest.mark.parametrize("loss", [at_once, two_chunks])
@pytest.mark.parametrize("ahead, status", [(1, 0), (0, 1), (2, 1)])
def test_labels_of_a_loss_that_the_model_computes_alone(tmp_path, capsys, loss, ahead, status):
    torch.manual_seed(0)
    trained(tmp_path, LM(loss), drawn(ahead=ahead))
    found, out = verdict(tmp_path, capsys)
    assert found == status and f"{4 * LENGTH} tokens" in out
    assert ("labels are not shifted" in out, "labels are shifted twice" in out) == (ahead == 0, ahead == 2)


@pytest.mark.parametrize("kind, status", [("prompt", 1), ("end", 0), ("other tokens", 0)])
def test_labels_of_tokens_that_should_not_count(tmp_path, capsys, kind, status):
    """Zeros in the place of -100 are labels. An end that the tokens lack, or tokens that were replaced, are right."""
    torch.manual_seed(0)
    steps = [[(ids.clone(), targets.clone()) for ids, targets in step] for step in drawn()]
    for ((ids, targets),) in steps:
        if kind == "prompt":
            targets[:, :5] = 0
        elif kind == "end":
            targets[:, -1] = targets[:, 7] = 0
        else:
            ids[:, 3:6] = 0
    trained(tmp_path, LM(), steps)
    found, out = verdict(tmp_path, capsys)
    assert found == status, out
    assert ("tokens that count have the label 0, which is not the next token" in out) == (kind == "prompt")


class Recurrent(torch.nn.Module):
    def __init__(self, columns):
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(VOCABULARY, 16), torch.nn.Linear(16, VOCABULARY)
        self.inside = torch.nn.LSTM(16, 16, batch_first=not columns)

    def forward(self, ids):
        return self.head(self.inside(self.embedding(ids))[0]).flatten(0, 1)


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("divisor, status", [(4, 0), (LENGTH, 1)])
def test_a_sum_over_the_tokens_of_each_sample(tmp_path, capsys, columns, divisor, status):
    """In every step, of flat logits, and of samples that are columns."""
    with recorded(tmp_path, lambda: Recurrent(columns)) as (model, optimizer):
        for ((ids, targets),) in drawn():
            if columns:
                ids, targets = ids.T, targets.T
            optimizer.zero_grad()
            loss = F.cross_entropy(model(ids), targets.reshape(-1), reduction="sum") / divisor
            loss.backward()
            optimizer.step()
    found, out = verdict(tmp_path, capsys)
    assert found == status, out
    assert ("the mean over all samples of the sums over their tokens" in out) == (status == 0)


def test_labels_that_the_model_shifts(tmp_path, capsys):
    torch.manual_seed(0)
    steps = [[(ids, ids) for ids, _ in step] for step in drawn()]
    trained(tmp_path / "right", LM(shifted_inside), steps)
    assert verdict(tmp_path / "right", capsys)[0] == 0
    trained(tmp_path / "twice", LM(shifted_inside), drawn())
    assert "labels are shifted twice" in verdict(tmp_path / "twice", capsys)[1]


def test_unequal_labels_of_a_loss_that_the_model_computes_alone(tmp_path, capsys):
    """Micro batches count alike, whatever their tokens: a documented difference, with its size."""
    torch.manual_seed(0)
    steps = drawn(number=2)
    for step in steps:
        step[0] = step[0][0], step[0][1].clone()
        step[0][1][:, 4:] = -100
    trained(tmp_path, LM(), steps)
    found, out = verdict(tmp_path, capsys)
    assert found == 0 and "a token would count 0.4 to 1.6 times as much" in out


def test_a_model_that_sees_later_tokens_and_returns_its_loss_alone(tmp_path, capsys):
    torch.manual_seed(0)
    trained(tmp_path, Sees(), drawn())
    found, out = verdict(tmp_path, capsys)
    assert found == 1 and "the logits depend on the tokens that they must give" in out


def test_labels_of_another_micro_batch(tmp_path, capsys):
    torch.manual_seed(0)
    right = drawn(number=2)
    trained(tmp_path / "right", LM(), right)
    assert verdict(tmp_path / "right", capsys)[0] == 0
    stale = [[(ids, step[0][1]) for ids, _ in step] for step in right]
    trained(tmp_path / "stale", LM(), stale)
    found, out = verdict(tmp_path / "stale", capsys)
    said = "micro batches 0 of rank 0 and 1 of rank 0 have the same targets and not the same ids"
    assert found == 1 and said in out


@pytest.mark.parametrize("same", [True, False])
def test_a_pass_that_is_thrown_away_before_the_first_step(tmp_path, capsys, same):
    torch.manual_seed(0)
    steps = drawn(number=2, steps=3)
    other = steps[0][0] if same else drawn()[0][0]
    trained(tmp_path, LM(), steps, before=lambda model: model(*other).backward())
    found, out = verdict(tmp_path, capsys)
    assert found == 0 and "the first 1 micro batches of this step count for nothing" in out


def test_gradients_that_are_set_to_zero_in_each_step(tmp_path, capsys):
    with recorded(tmp_path, LM) as (model, optimizer):
        for step in drawn(number=2):
            for ids, labels in step:
                optimizer.zero_grad()
                (model(ids, labels) / 2).backward()
            optimizer.step()
    found, out = verdict(tmp_path, capsys)
    assert found == 1 and "the micro batches count 0, 0.5" in out


def test_a_pass_that_is_thrown_away_between_steps(tmp_path, capsys):
    with recorded(tmp_path, LM) as (model, optimizer):
        for number, step in enumerate(drawn(number=2, steps=3)):
            optimizer.zero_grad()
            for ids, labels in step:
                (model(ids, labels) / 2).backward()
            optimizer.step()
            if number == 0:
                model(*drawn()[0][0]).backward()
    found, out = verdict(tmp_path, capsys)
    assert found == 0 and "count for nothing" in out.partition("step 2")[2]


def test_gradients_that_are_set_to_zero_before_some_steps(tmp_path, capsys):
    with recorded(tmp_path, LM) as (model, optimizer):
        for number, step in enumerate(drawn()):
            model(*step[0]).backward()
            if number == 1:
                optimizer.zero_grad()
            optimizer.step()
            optimizer.zero_grad()
    found, out = verdict(tmp_path, capsys)
    assert found == 1 and "FAIL: step 2: " in out and "to None before the optimizer's step" in out


def test_a_pass_in_evaluation_mode_that_goes_backward(tmp_path, capsys):
    with recorded(tmp_path, LM) as (model, optimizer):
        for number, step in enumerate(drawn(steps=4)):
            if number == 2:
                model.eval()
                model(*drawn()[0][0]).backward()
                model.train()
            model(*step[0]).backward()
            optimizer.step()
            optimizer.zero_grad()
    found, out = verdict(tmp_path, capsys)
    assert found == 0 and "note: a pass in evaluation mode goes backward after step 2" in out


@pytest.mark.parametrize("world", ["1", "2"])
def test_a_launcher_without_a_process_group(tmp_path, capsys, monkeypatch, world):
    torch.manual_seed(0)
    for name, value in {"WORLD_SIZE": world, "RANK": "0", "LOCAL_RANK": "0"}.items():
        monkeypatch.setitem(os.environ, name, value)
    trained(tmp_path, LM(), drawn())
    found, out = verdict(tmp_path, capsys)
    assert found == int(world) - 1
    assert ("FAIL: step 1: 2 processes were started, and the script made no process group" in out) == (
        found == 1
    )


@pytest.mark.parametrize("told", [True, False])
def test_epochs_of_samples_that_are_not_known_again(tmp_path, capsys, told):
    """As of images that are augmented."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))
    data = TensorDataset(torch.randn(24, 8), torch.randint(0, 4, (24,)))
    sampler = DistributedSampler(data, 1, 0)
    loader = DataLoader(data, 4, sampler=sampler)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    with lockstep.record(model, tmp_path):
        next(iter(loader))  # a look at the first batch is no epoch
        for epoch in range(3):
            if told:
                sampler.set_epoch(epoch)
            for x, y in loader:
                optimizer.zero_grad()
                F.cross_entropy(model(x + torch.randn_like(x)), y).backward()
                optimizer.step()
    found, out = verdict(tmp_path, capsys)
    assert found == int(not told)
    assert ("is told epoch 0 in two epochs" in out) == (not told)


@pytest.mark.parametrize("kind", ["twice", "replacement"])
def test_samples_that_a_data_set_holds_twice_or_that_are_drawn_again(tmp_path, capsys, kind):
    torch.manual_seed(0)
    x, y = torch.randn(400, 8), torch.randint(0, 4, (400,))
    if kind == "twice":
        x[5], y[5] = x[0], y[0]
    data = TensorDataset(x, y)
    sampler = RandomSampler(data, replacement=True, num_samples=4000) if kind == "replacement" else None
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    with lockstep.record(model, tmp_path):
        steps = 200 if kind == "replacement" else 12
        for _, (x, y) in zip(range(steps), DataLoader(data, 4, sampler=sampler), strict=False):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    assert verdict(tmp_path, capsys)[0] == 0


def test_an_evaluation_that_draws_with_replacement_says_nothing_of_training(tmp_path, capsys):
    torch.manual_seed(0)
    x, y = torch.randn(64, 8), torch.randint(0, 4, (64,))
    other = TensorDataset(torch.randn(8, 8))
    drawn_again = DataLoader(other, 4, sampler=RandomSampler(other, replacement=True, num_samples=4))
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    with lockstep.record(model, tmp_path):
        for first in [0] * 8 + list(range(8, 40, 8)):
            optimizer.zero_grad()
            F.cross_entropy(model(x[first : first + 8]), y[first : first + 8]).backward()
            optimizer.step()
            model.eval()
            with torch.no_grad():
                for (rows,) in drawn_again:
                    model(rows)
            model.train()
    found, out = verdict(tmp_path, capsys)
    assert found == 1 and "56 samples were seen again before others" in out


@pytest.mark.parametrize("told", [True, False])
def test_an_evaluation_whose_sampler_shuffles_has_no_epochs(tmp_path, capsys, told):
    torch.manual_seed(0)
    data, other = TensorDataset(torch.randn(16, 8)), TensorDataset(torch.randn(4, 8))
    sampler, of_other = DistributedSampler(data, 1, 0), DistributedSampler(other, 1, 0)
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    with lockstep.record(model, tmp_path):
        for epoch in range(3):
            if told:
                sampler.set_epoch(epoch)
            for (x,) in DataLoader(data, 4, sampler=sampler):
                optimizer.zero_grad()
                model(x + torch.randn_like(x)).square().mean().backward()
                optimizer.step()
                with torch.no_grad():
                    for (x,) in DataLoader(other, 4, sampler=of_other):
                        model.eval()(x)
                model.train()
    assert verdict(tmp_path, capsys)[0] == int(not told)


def negative_logarithm(logits, targets):
    return F.nll_loss(F.log_softmax(logits.flatten(0, 1), -1), targets.flatten())


@pytest.mark.parametrize("ahead, status", [(1, 0), (0, 1)])
def test_labels_of_a_negative_logarithm(tmp_path, capsys, ahead, status):
    torch.manual_seed(0)
    trained(tmp_path, LM(negative_logarithm), drawn(ahead=ahead))
    found, out = verdict(tmp_path, capsys)
    assert found == status and f"{4 * LENGTH} tokens" in out
    assert ("labels are not shifted" in out) == (ahead == 0)


class TakesItsTokens(LM):
    def forward(self, ids, targets):
        return super().forward(ids, ids)


def test_a_loss_that_takes_the_tokens_for_the_labels(tmp_path, capsys):
    torch.manual_seed(0)
    trained(tmp_path, TakesItsTokens(), drawn())
    found, out = verdict(tmp_path, capsys)
    assert found == 1 and "labels are not shifted" in out


class Sequence(torch.nn.Module):
    """Averages what it sees: all tokens up to each, or all."""

    def __init__(self, causal):
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(100, 32), torch.nn.Linear(32, 100)
        self.causal = causal

    def forward(self, ids):
        x = self.embedding(ids)
        seen = x.cumsum(1) if self.causal else x.sum(1, keepdim=True) + x
        return self.head(F.gelu(seen))


ORDERS = {
    "next": (lambda ids: ids[:, 1:], True, 0),
    "other rows": (lambda ids: ids[:, 1:].roll(1, 0), True, 1),
    "columns for rows": (lambda ids: ids[:, 1:].T, True, 1),
    "others": (lambda ids: torch.randint(0, 100, (4, LENGTH)), True, 0),  # such as classes
    # A task of recurrent models: at each place, give the token of three places before
    "earlier": (lambda ids: F.pad(ids[:, :-4], (3, 0), value=-100), True, 0),
    # A model that sees all positions may learn this
    "backwards": (lambda ids: ids[:, :-1].flip(1), False, 0),
}


@pytest.mark.parametrize("order", ORDERS)
def test_labels_in_another_order_than_the_tokens(tmp_path, capsys, order):
    torch.manual_seed(0)
    labels_of, causal, status = ORDERS[order]
    with recorded(tmp_path, lambda: Sequence(causal)) as (model, optimizer):
        for _ in range(2):
            ids = torch.randint(0, 100, (4, LENGTH + 1))
            optimizer.zero_grad()
            F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), labels_of(ids).flatten()).backward()
            optimizer.step()
    found, out = verdict(tmp_path, capsys)
    assert found == status and ("the labels are the next tokens, but of other positions" in out) == (
        status == 1
    ), out


def test_a_pass_without_autocast_that_is_thrown_away(tmp_path, capsys):
    with recorded(tmp_path, LM) as (model, optimizer):
        model(*drawn()[0][0]).backward()
        for step in drawn(number=2, steps=3):
            optimizer.zero_grad()
            for ids, labels in step:
                with torch.autocast("cpu", torch.bfloat16):
                    loss = model(ids, labels) / 2
                loss.backward()
            optimizer.step()
    found, out = verdict(tmp_path, capsys)
    assert found == 0 and "count for nothing" in out


class Adversaries(torch.nn.Module):
    """A generator and what judges it, in one module."""

    def __init__(self):
        super().__init__()
        self.made, self.judged = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)

    def forward(self, x, turn):
        y = self.made(x)
        if turn == 0:
            return (y - x).square().mean() - self.judged(y).mean()
        return (1 - self.judged(x)).relu().mean() + (1 + self.judged(y.detach())).relu().mean()


@pytest.mark.parametrize("kind", ["", "zeroed", "frozen", "one missing", "late"])
def test_two_optimizers_that_take_turns(tmp_path, capsys, kind):
    torch.manual_seed(0)
    model = Adversaries()
    parts = [model.made, model.judged]
    optimizers = [torch.optim.Adam(part.parameters(), 1e-2) for part in parts]
    if kind == "one missing":
        optimizers[1] = torch.optim.Adam([model.judged.weight], 1e-2)
    with lockstep.record(model, tmp_path):
        for _ in range(4):
            x = torch.randn(4, 4)
            for turn, optimizer in enumerate(optimizers):
                if kind == "frozen":
                    parts[1 - turn].requires_grad_(False)
                if kind == "zeroed":
                    model.zero_grad()
                if kind != "late":
                    optimizer.zero_grad()
                model(x, turn).backward()
                optimizer.step()
                model.requires_grad_()
    found, out = verdict(tmp_path, capsys)
    wrong = {
        "one missing": "no optimizer holds judged.bias, with a gradient",
        "late": "the gradient has 1 times that of step 1 in it: it was not set to zero",
    }
    assert found == (kind in wrong) and wrong.get(kind, "") in out, out


class CallsItself(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inside = torch.nn.Linear(4, 4)

    def forward(self, x, y=None):
        return self.inside(x) if y is None else (self(x) - y).square().mean()


@pytest.mark.parametrize("times", [1, 2])
def test_a_model_that_calls_itself(tmp_path, capsys, times):
    with recorded(tmp_path, CallsItself) as (model, optimizer):
        for _ in range(3):
            optimizer.zero_grad()
            (times * model(torch.randn(2, 4), torch.randn(2, 4))).backward()
            optimizer.step()
    found, out = verdict(tmp_path, capsys)
    assert found == times - 1 and "whole run: 3 steps, 6 samples" in out


class Adapted(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inside, self.head = torch.nn.Linear(8, 8), torch.nn.Linear(8, 4)

    def forward(self, x, weight=1.0):
        return self.head(self.inside(x)).square().mean() * weight


@pytest.mark.parametrize("kind, status", [("adapter", 0), ("patch", 1)])
def test_a_function_that_a_module_is_given_as_forward(tmp_path, capsys, kind, status):
    """One that knows another module is an adapter; any other is a patch, and not what the module's class says."""

    def make():
        model = Adapted()
        inside, before = model.inside, model.inside.forward
        inside.low_rank = torch.nn.Sequential(torch.nn.Linear(8, 2), torch.nn.Linear(2, 8))
        if kind == "adapter":
            inside.forward = lambda x, before=before, other=inside.low_rank: before(x) + other(x)
        else:
            inside.forward = lambda x: 1.01 * before(x)
        return model

    trained_twice(tmp_path, make)
    found, out = verdict(tmp_path, capsys)
    assert found == status, out


class Options(dict):
    __getattr__ = dict.__getitem__


class Sizes(list):
    unit = 1.0


class Configured(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.options, self.sizes = Options(scale=2.0, inside=Options(shift=0.5)), Sizes([1.0, 0.5])
        self.inside = torch.nn.Linear(8, 8)

    def train(self, mode):  # without a default, and returns nothing
        super().train(mode)

    def forward(self, x):
        for size in self.sizes:
            x = x + self.inside(x) * size * self.sizes.unit
        return x.square().mean() * self.options.scale + self.options.inside.shift


def test_configurations_that_are_dicts_and_lists_of_their_own_classes(tmp_path, capsys):
    trained_twice(tmp_path, Configured)
    found, out = verdict(tmp_path, capsys)
    assert found == 0, out


class Temperature:
    def __init__(self):
        self.tau, self.local_rank = 1.0, 3


class Annealed(torch.nn.Module):
    """Two modules have one configuration, which the loop changes."""

    def __init__(self, options):
        super().__init__()
        self.options, self.inside, self.head = options, torch.nn.Linear(8, 8), torch.nn.Linear(8, 4)
        self.head.options = options

    def forward(self, x):
        return self.head(self.inside(x).tanh() / self.options.tau).square().mean() * self.head.options.tau


@pytest.mark.parametrize("make", [Temperature, lambda: argparse.Namespace(tau=1.0), lambda: Options(tau=1.0)])
def test_a_configuration_that_the_loop_changes(tmp_path, capsys, make):
    options = make()
    with recorded(tmp_path, lambda: Annealed(options)) as (model, optimizer):
        for step in range(3):
            if isinstance(options, dict):
                options["tau"] = 1 / (step + 1)
            else:
                options.tau = 1 / (step + 1)
            optimizer.zero_grad()
            model(torch.randn(4, 8)).backward()
            optimizer.step()
    found, out = verdict(tmp_path, capsys)
    assert found == 0, out
    attributes = Recording(tmp_path).steps[1][0].micro_batches[0].attributes
    assert attributes == {":options.tau": 0.5}


def test_a_step_whose_loss_is_zero(tmp_path, capsys):
    """As before a term begins to count."""
    with recorded(tmp_path, Adapted) as (model, optimizer):
        for weight in (1.0, 0.0):
            optimizer.zero_grad()
            model(torch.randn(4, 8), weight).backward()
            optimizer.step()
    found, out = verdict(tmp_path, capsys)
    assert found == 0 and "step 2 is not judged: its loss and its gradient are 0" in out


class Task(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.LayerNorm(16))
        self.average = copy.deepcopy(self.model).requires_grad_(False)

    def forward(self, x):
        return self.model(x).square().mean() + self.model(x).mean()


class Surrogate(Adapted):
    def forward(self, x):
        value = super().forward(x)
        return value - value.detach()


def test_gradients_that_are_deleted_of_a_loss_whose_value_is_zero(tmp_path, capsys):
    with recorded(tmp_path, Surrogate) as (model, optimizer):
        for step in range(2):
            optimizer.zero_grad()
            model(torch.randn(4, 8)).backward()
            if step == 1:
                for one in model.parameters():
                    one.grad.zero_()
            optimizer.step()
    found, out = verdict(tmp_path, capsys)
    assert found == 1 and "FAIL: step 2: no parameter has a gradient other than zero" in out


@pytest.mark.parametrize(
    "decay, end", [(0.9998, "0.0002 to 0.0002"), (0.9, "0.1 to 0.1"), (0.5, "0.5 to 0.5")]
)
def test_an_average_in_the_model(tmp_path, capsys, decay, end):
    with recorded(tmp_path, Task) as (model, optimizer):
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(4, 8)).backward()
            optimizer.step()
            with torch.no_grad():
                for one, other in zip(model.average.parameters(), model.model.parameters(), strict=True):
                    one.lerp_(other, 1 - decay)
    found, out = verdict(tmp_path, capsys)
    assert found == 0 and f"moved by {end} of the way to trained weights" in out, out


class Widens(torch.nn.Module):
    """A norm in float32, as that of Llama."""

    def forward(self, x):
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class Recomputes(torch.nn.Module):
    """What a checkpoint recomputes widens, and chooses an expert."""

    def __init__(self, reentrant):
        super().__init__()
        self.norm, self.router, self.head = Widens(), torch.nn.Linear(8, 4), torch.nn.Linear(8, 4)
        self.experts = torch.nn.Parameter(torch.randn(4, 8))
        self.reentrant = reentrant

    def mix(self, x):
        x = self.norm(x)
        weights, chosen = self.router(x).softmax(-1).topk(2)
        return (weights[..., None] * self.experts[chosen]).sum(-2) * x

    def forward(self, x):
        x = checkpoint(self.mix, x.requires_grad_(), use_reentrant=self.reentrant)
        return self.head(x).square().mean()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("factor", [1.0, 1.01])
def test_a_checkpoint_in_the_models_code(tmp_path, capsys, reentrant, autocast, factor):
    with recorded(tmp_path, lambda: Recomputes(reentrant)) as (model, optimizer):
        model.experts.register_hook(lambda gradient: gradient * factor)
        for _ in range(2):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = model(torch.randn(64, 8))
            loss.backward()
            optimizer.step()
    status, out = verdict(tmp_path, capsys)
    assert status == (factor != 1), out
    assert ("experts" in out.splitlines()[-1]) == (factor != 1)


def test_a_model_in_a_checkpoint_wrapper(tmp_path, capsys):
    trained_twice(tmp_path, lambda: checkpoint_wrapper(Adapted()))
    assert verdict(tmp_path, capsys)[0] == 0


NET = """
import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = torch.nn.Linear(8, 16), torch.nn.Linear(16, 5)
        self.register_buffer("scale", torch.ones(16))
    def forward(self, x):
        return self.two(self.one(x).relu() * self.scale)
"""


def test_a_copy_on_the_meta_device_is_not_what_is_trained(tmp_path, capsys):
    """Such as one that operations are counted with."""
    script, output = tmp_path / "train.py", tmp_path / "out"
    copy = "\n    ".join(
        ('with torch.device("meta"):', "    copy = Net()", "    copy(torch.randn(4, 8)).sum().backward()")
    )
    script.write_text(NET + TRAINS.format(before=copy))
    assert record.main(["--output", str(output), str(script)]) == 0
    assert verdict(output, capsys)[0] == 0


def test_a_model_that_is_trained_in_evaluation_mode_alone(tmp_path, capsys):
    """A note says so: from_pretrained leaves a model in this mode. Its first step shows that it is trained; the next ones are recorded."""
    script, output = tmp_path / "train.py", tmp_path / "out"
    script.write_text(NET + TRAINS.format(before="model.eval()"))
    assert record.main(["--output", str(output), str(script)]) == 0
    found, out = verdict(output, capsys)
    assert found == 0 and "note: the model is trained in evaluation mode, without dropout" in out
    with recorded(tmp_path / "by hand", LM) as (model, optimizer):
        model.eval()
        for ((ids, labels),) in drawn(steps=4):
            model(ids, labels).backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                model(ids, labels)
    found, out = verdict(tmp_path / "by hand", capsys)
    assert found == 0 and "note: the model is trained in evaluation mode, without dropout" in out
    assert "goes backward" not in out


def test_a_model_that_is_called_in_evaluation_mode_and_not_trained(tmp_path, capsys):
    script = tmp_path / "train.py"
    script.write_text(NET + "model = Net().eval()\nmodel(torch.randn(4, 8))\n")
    assert record.main(["--output", str(tmp_path / "out"), str(script)]) == 2
    said = "called Net in evaluation mode alone, and no optimizer stepped it, so nothing was recorded; name the script that trains"
    assert said in capsys.readouterr().err


class WithAdapter(torch.nn.Module):
    """LoRA's: the gradient of `down` is exactly zero until `up` has moved."""

    def __init__(self):
        super().__init__()
        self.base, self.down, self.up = (torch.nn.Linear(8, 8, bias=False) for _ in range(3))
        torch.nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return (self.base(x) + self.up(self.down(x))).square().mean()


@pytest.mark.parametrize("kind", ["", "of one shard"])
def test_gradients_of_zero_that_are_clipped_apart(tmp_path, capsys, kind):
    """A norm of zero is right for gradients of zero, and no other norm is."""
    with recorded(tmp_path, WithAdapter) as (model, optimizer):
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(4, 8)).backward()
            for parameter in model.parameters():
                if kind and parameter is model.base.weight:
                    parameter.grad.mul_(2)
                torch.nn.utils.clip_grad_norm_(parameter, 0.01)
            optimizer.step()
    status, out = verdict(tmp_path, capsys)
    assert status == bool(kind), out


class Ranker(torch.nn.Module):
    """Returns a hinge loss and its scores."""

    def __init__(self):
        super().__init__()
        self.inside, self.head = torch.nn.Linear(8, 16), torch.nn.Linear(16, 1)

    def forward(self, x, sign):
        scores = self.head(self.inside(x).tanh())
        return (1 - sign * scores).clamp(min=0).mean(), scores


def test_a_loss_of_zero_beside_others(tmp_path, capsys):
    with recorded(tmp_path, Ranker) as (model, optimizer):
        for _ in range(2):
            optimizer.zero_grad()
            for size in (1.0, 1e3):  # all margins are met in the second micro batch
                x = torch.randn(4, 8)
                scores = model.head(model.inside(x).tanh()).detach()
                (model(x, size * scores.sign() / scores.abs())[0] / 2).backward()
            optimizer.step()
    status, out = verdict(tmp_path, capsys)
    assert status == 0, out


class TwoTerms(torch.nn.Module):
    """A loss of two terms, of which now one, now the other is larger."""

    def __init__(self):
        super().__init__()
        self.inside, self.head = torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)

    def forward(self, x, scale):
        left, right = self.inside(x).square().mean() * scale, self.head(x).square().mean()
        return {"loss": left + right, "left": left, "right": right}


def test_terms_of_which_another_is_the_largest_in_each_micro_batch(tmp_path, capsys):
    with recorded(tmp_path, TwoTerms) as (model, optimizer):
        for _ in range(2):
            optimizer.zero_grad()
            for scale in (0.01, 100.0):
                (model(torch.randn(4, 8), scale)["loss"] / 2).backward()
            optimizer.step()
    status, out = verdict(tmp_path, capsys)
    assert status == 0, out


class LossesByName(torch.nn.Module):
    """What it names `loss` is no scalar."""

    def __init__(self, make):
        super().__init__()
        self.inside, self.make = torch.nn.Linear(8, 8), make

    def forward(self, x):
        return {"loss": self.make(self.inside(x).square()), "size": 8}


@pytest.mark.parametrize("kind", ["a dict", "of each sample", "a number"])
def test_a_loss_by_name_that_is_no_scalar(tmp_path, capsys, kind):
    make = {
        "a dict": lambda y: {"left": y[:, :4].mean(), "right": y[:, 4:].mean()},
        "of each sample": lambda y: y.mean(1),
        "a number": lambda y: 0.0,
    }[kind]
    with recorded(tmp_path, lambda: LossesByName(make)) as (model, optimizer):
        for _ in range(2):
            optimizer.zero_grad()
            loss = model(torch.randn(4, 8))["loss"]
            if kind == "a number":
                loss = model.inside(torch.randn(4, 8)).square().mean()
            (sum(loss.values()) if kind == "a dict" else loss.mean()).backward()
            optimizer.step()
    if kind == "a number":
        assert judge.main([str(tmp_path)]) == 2
        assert "no gradient arrived at what the model returned" in capsys.readouterr().err
    else:
        status, out = verdict(tmp_path, capsys)
        assert status == 0, out


@pytest.mark.parametrize("scale, weight", [(1.0, 0.5), (200.0, 0.0)])
def test_a_batch_that_is_known_by_heart(scale, weight):
    """Gradients that are all tiny are those of a cross-entropy, and say nothing of what a token weighs."""
    torch.manual_seed(0)
    labels = torch.randint(0, 8, (4, 16))
    logits = (torch.rand(4, 16, 8) + scale / 20 * F.one_hot(labels, 8)).requires_grad_()
    (32 * F.cross_entropy(logits.flatten(0, 1), labels.flatten())).backward()
    found = recognise(logits.double(), logits.grad)
    assert found is not None and found.labels.equal(labels)
    assert found.weight == pytest.approx(weight, rel=1e-4)


@pytest.mark.parametrize("norm_type", [1, 2, torch.inf])
@pytest.mark.parametrize("factor, status", [(1, 0), (2, 1)])
def test_norms_of_other_kinds(tmp_path, capsys, norm_type, factor, status):
    """Negative control: a gradient that was doubled before it was clipped."""
    torch.manual_seed(0)
    with recorded(tmp_path, LM) as (model, optimizer):
        for ((ids, labels),) in drawn():
            optimizer.zero_grad()
            (factor * model(ids, labels)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type=norm_type)
            optimizer.step()
    found, out = verdict(tmp_path, capsys)
    assert found == status, out


class Scores(torch.nn.Module):
    """The bias of the keys has no effect: its gradient is zero in exact arithmetic, and rounding errors are its norm."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (torch.nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        weights = (self.query(x) @ self.key(x).transpose(1, 2)).softmax(-1)
        return (weights @ self.value(x)).square().mean()


def test_a_norm_of_rounding_errors_alone(tmp_path, capsys):
    with recorded(tmp_path, Scores) as (model, optimizer):
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(4, 5, 8)).backward()
            for parameter in model.parameters():
                torch.nn.utils.clip_grad_norm_(parameter, 1e-3)
            optimizer.step()
    status, out = verdict(tmp_path, capsys)
    assert status == 0, out


@dataclasses.dataclass(slots=True)
class Slots:
    loss: torch.Tensor
    scores: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Frozen:
    loss: torch.Tensor
    scores: torch.Tensor


class Returns(torch.nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.inside, self.kind = torch.nn.Linear(8, 8), kind

    def forward(self, x):
        scores = self.inside(x)
        return self.kind(scores.square().mean(), scores)


@pytest.mark.parametrize("kind", [Slots, Frozen])
@pytest.mark.parametrize("factor, status", [(1, 0), (2, 1)])
def test_outputs_without_a_dict_or_frozen(tmp_path, capsys, kind, factor, status):
    with recorded(tmp_path, lambda: Returns(kind)) as (model, optimizer):
        for _ in range(2):
            optimizer.zero_grad()
            (factor * model(torch.randn(4, 8)).loss).backward()
            optimizer.step()
    found, out = verdict(tmp_path, capsys)
    assert found == status, out


CLOSURE = """
import torch
from torch.nn import functional as F

torch.manual_seed(0)
net = torch.nn.Linear(4, 1)


def main():
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(4):
        x = torch.randn(8, 4)

        def closure():
            optimizer.zero_grad()
            loss = {factor} * F.mse_loss(net(x), x[:, :1])
            loss.backward()
            return loss

        optimizer.step(closure)


if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize("factor", [1, 3])
def test_the_loss_of_a_model_that_is_first_called_in_a_closure(tmp_path, capsys, factor):
    """The command finds the model inside of the first step, and sees the losses of the steps after it."""
    script = tmp_path / "train.py"
    script.write_text(CLOSURE.format(factor=factor))
    assert record.main(["--output", str(tmp_path / "out"), str(script)]) == 0
    status, out = verdict(tmp_path / "out", capsys)
    assert status == 0 and "mse_loss" in out
    # A factor that is none of the run's numbers may be meant: a note.
    assert ("the loop makes its own loss by mse_loss" in out, "3 times" in out) == (
        factor == 1,
        factor == 3,
    ), out


CONFIGURED = """
import torch
from transformers import Qwen2Config
from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP
config = Qwen2Config(hidden_size=8, intermediate_size=16)
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.config, self.mlp, self.head = config, Qwen2MLP(config), torch.nn.Linear(config.hidden_size, 5)
    def forward(self, x):
        return self.head(self.mlp(x)) / config.hidden_size
"""


def test_a_configuration_of_the_script_that_the_model_keeps(tmp_path, capsys):
    """The script's classes are needed before the model's attributes are."""
    script, output = tmp_path / "train.py", tmp_path / "out"
    script.write_text(CONFIGURED + TRAINS.format(before=""))
    assert record.main(["--output", str(output), str(script)]) == 0
    assert verdict(output, capsys)[0] == 0


REGISTERED = """
import argparse, torch
CLASSES = {}
def register(kind):
    CLASSES[kind.__name__] = kind
    return kind
@register
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(arguments.width, 5)
    def forward(self, x):
        return self.head(x) * len(CLASSES)
def train():
    return arguments
parser = argparse.ArgumentParser()
parser.set_defaults(function=train, width=8)
arguments = parser.parse_args()
"""


def test_a_registry_of_the_script(tmp_path, capsys):
    """Its recorded value has the class, whose definition needs the registry."""
    script, output = tmp_path / "train.py", tmp_path / "out"
    script.write_text(REGISTERED + TRAINS.format(before=""))
    assert record.main(["--output", str(output), str(script)]) == 0
    assert verdict(output, capsys)[0] == 0
