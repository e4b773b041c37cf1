"""How a loop uses a model: what of its forward pass a loss is made of, calls with one batch, torch.jit, classes inside of `if`."""

import dataclasses
import sys
import types

import pytest
import torch
from programs import completed
from scripts import TRAINS
from torch.distributions import Categorical
from torch.nn import functional as F

import lockstep
from lockstep import judge, record

LEFT: list[torch.Tensor] = []


@dataclasses.dataclass
class Heads:
    policy: torch.Tensor
    value: torch.Tensor


class Policy(torch.nn.Module):
    """`gives`: what it returns, or leaves where."""

    def __init__(self, gives="tensor", dropout=0.0):
        super().__init__()
        self.inside, self.dropout = torch.nn.Linear(8, 16), torch.nn.Dropout(dropout)
        self.head, self.gives, self.beside = torch.nn.Linear(16, 5), gives, types.SimpleNamespace(left=None)

    def forward(self, x):
        hidden = self.dropout(self.inside(x)).tanh()
        scores, value = self.head(hidden), hidden.mean(-1)
        if self.gives == "records":
            return {"heads": Heads(scores, value)}
        if self.gives == "distribution":
            return Categorical(logits=scores), value
        if self.gives == "global":
            LEFT[:] = [value]
        if self.gives == "attribute":
            self.beside.left = value
        return scores


def loss_of(model, output, hooked):
    if model.gives == "records":
        return output["heads"].policy.square().mean() + output["heads"].value.mean()
    if model.gives == "distribution":
        return output[1].mean() - output[0].entropy().mean()
    beside = {"global": LEFT, "attribute": [model.beside.left], "hook": hooked}.get(model.gives, [])
    return output.square().mean() + sum(one.mean() for one in beside)


def trained(folder, model, backward, steps=3):
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    with lockstep.record(model, folder):
        for _ in range(steps):
            optimizer.zero_grad()
            backward(torch.randn(4, 8))
            optimizer.step()


@pytest.mark.parametrize("gives", ["records", "distribution", "attribute", "global", "hook"])
def test_tensors_of_the_forward_pass_that_a_loss_uses(tmp_path, capsys, gives):
    """Those that the model returns or keeps are known; others are named, and nothing is judged. They were a wrong FAIL once."""
    torch.manual_seed(0)
    model, hooked = Policy(gives), []
    if gives == "hook":
        model.inside.register_forward_hook(lambda _module, _given, output: hooked.append(output))

    def backward(x):
        hooked.clear()
        loss_of(model, model(x), hooked).backward()

    trained(tmp_path, model, backward)
    status = judge.main([str(tmp_path)])
    said = capsys.readouterr()
    around = (
        "the loss of micro batch 0 of rank 0 uses tensors of the forward pass that the model does not return"
    )
    assert status == (2 if gives in ("global", "hook") else 0), said
    assert (around in said.err) == (status == 2)
    assert ("such as the output of inside" in said.err) == (gives == "hook")


@pytest.mark.parametrize(
    "dropout, together, status", [(0.2, True, 0), (0.0, True, 1), (0.2, False, 1)], ids=str
)
def test_two_calls_with_one_batch(tmp_path, capsys, dropout, together, status):
    """Two views of it by two masks of dropout, in one loss. The same view twice, or two losses, are a batch that was given twice."""
    torch.manual_seed(0)
    model = Policy(dropout=dropout)

    def backward(x):
        if together:
            F.cross_entropy(model(x) @ model(x).T, torch.arange(4)).backward()
        else:
            for _ in range(2):
                model(x).square().mean().backward()

    trained(tmp_path, model, backward)
    found, out = judge.main([str(tmp_path)]), capsys.readouterr().out
    assert found == status, out
    assert ("are the same samples" in out) == bool(status) and not (status == 0 and "seen again" in out)


class WithLoss(Policy):
    def forward(self, x):
        scores = super().forward(x)
        return scores.square().mean(), scores


@pytest.mark.parametrize("factor, status", [(None, 0), (0.5, 1)])
def test_a_hook_on_logits_that_the_model_makes_its_loss_of(tmp_path, capsys, factor, status):
    """It works as it does without a recording, whose copies the loop is given: DeepSpeed 0.18.6 halves there what the loss gives the logits."""

    def backward(x):
        loss, scores = model(x)
        scores.register_hook(lambda gradient: factor and gradient * factor)
        scores.retain_grad()
        loss.backward()
        assert torch.allclose(scores.grad, scores / 10 * (factor or 1))

    torch.manual_seed(0)
    model = WithLoss()
    trained(tmp_path, model, backward)
    found, out = judge.main([str(tmp_path)]), capsys.readouterr().out
    assert found == status and ("0.5 times the reference's" in out) == bool(status), out


def test_a_backward_pass_by_its_keyword(tmp_path, capsys):
    model = Policy()
    trained(tmp_path, model, lambda x: torch.autograd.backward(tensors=model(x).square().mean()))
    assert judge.main([str(tmp_path)]) == 0, capsys.readouterr().out


NET = """
import torch
if __name__ == "__main__":
    torch.manual_seed(0)
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = torch.nn.Linear(8, 16), torch.nn.Linear(16, 5)
        def forward(self, x):
            return self.two(self.one(x).relu())
"""


def test_a_class_inside_of_an_if(tmp_path, capsys):
    script, output = tmp_path / "train.py", tmp_path / "out"
    script.write_text(NET + TRAINS.format(before=""))
    assert record.main(["--output", str(output), str(script)]) == 0
    assert judge.main([str(output)]) == 0, capsys.readouterr().out


TRACED = "torch.jit.trace(model, torch.randn(4, 8))"


@pytest.mark.parametrize(
    "before, status", [(f"from torch.distributed import optim; {TRACED}", 0), (f"model = {TRACED}", 2)]
)
def test_torch_jit(tmp_path, capsys, before, status):
    """What torch scripts when it is imported, and a model that is traced beside the training. One that torch.jit made cannot be built again.

    In a process of its own: the judge turns torch.jit off.
    """
    script, output = tmp_path / "train.py", tmp_path / "out"
    script.write_text(NET + TRAINS.format(before=before))
    done = completed([sys.executable, "-m", "lockstep.record", "--output", str(output), str(script)])
    assert done.returncode == status, done.stderr
    assert ("was made by torch.jit" in done.stderr) == bool(status)
    assert status or judge.main([str(output)]) == 0


class Gan(torch.nn.Module):
    """A generator and a discriminator in one module."""

    def __init__(self):
        super().__init__()
        self.generator, self.critic = torch.nn.Linear(4, 8), torch.nn.Linear(8, 1)

    def forward(self, x, which):
        return getattr(self, which)(x)


@pytest.mark.parametrize("zeroed", [True, False])
def test_two_optimizers_of_one_module(tmp_path, capsys, zeroed):
    """What the critic is called with has no part in the generator's gradient but by what arrives there. Both are trained on the same numbers."""
    torch.manual_seed(0)
    model, like = Gan(), F.binary_cross_entropy_with_logits
    optimizers = [torch.optim.Adam(one.parameters(), 1e-2) for one in (model.critic, model.generator)]
    with lockstep.record(model, tmp_path, steps=4):
        for _ in range(4):
            noise, real = torch.randn(6, 4), torch.randn(6, 8)
            optimizers[0].zero_grad()
            fake = model(noise, "generator").detach()
            ones, zeros = torch.ones(6, 1), torch.zeros(6, 1)
            (like(model(real, "critic"), ones) + like(model(fake, "critic"), zeros)).backward()
            optimizers[0].step()
            if zeroed:
                optimizers[1].zero_grad()
            like(model(model(noise, "generator"), "critic"), ones).backward()
            optimizers[1].step()
    status = judge.main([str(tmp_path)])
    out = capsys.readouterr().out
    assert status == (not zeroed), out
    assert "samples were seen again" not in out


class Translator(torch.nn.Module):
    """Its decoder has tokens of its own, without padding; `attention_mask` is of the encoder's."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(20, 16), torch.nn.Linear(16, 20)

    def forward(self, input_ids, attention_mask, decoder_input_ids, labels):
        source = (self.embedding(input_ids) * attention_mask[..., None]).mean(1, keepdim=True)
        logits = self.head(torch.tanh(self.embedding(decoder_input_ids) + source))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100), logits


def test_the_mask_of_an_encoder_says_nothing_of_a_decoder(tmp_path, capsys):
    torch.manual_seed(0)
    model = Translator()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    with lockstep.record(model, tmp_path):
        for _ in range(3):
            source, target = torch.randint(1, 20, (2, 4, 8))
            mask = torch.ones_like(source)
            mask[:, 5:] = 0
            begun = torch.nn.functional.pad(target[:, :-1], (1, 0))
            optimizer.zero_grad()
            model(source.masked_fill(mask == 0, 0), mask, begun, target)[0].backward()
            optimizer.step()
    assert judge.main([str(tmp_path)]) == 0, capsys.readouterr().out


@pytest.mark.parametrize("dtype, cast", [(torch.float32, True), (torch.bfloat16, False)])
def test_gradients_that_the_loop_clips_in_16_bits(tmp_path, capsys, dtype, cast):
    """The factor is known by the norms of the steps alone, which rounding moves."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 8)).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    with lockstep.record(model, tmp_path):
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=cast):
                logits = model(torch.randn(16, 32, dtype=dtype))
            F.cross_entropy(logits.float(), torch.randint(8, (16,))).backward()
            norm = torch.stack([one.grad.float().norm() for one in model.parameters()]).norm()
            for one in model.parameters():
                one.grad.mul_(0.1 / norm)
            optimizer.step()
    status = judge.main([str(tmp_path)])
    out = capsys.readouterr().out
    assert status == 0 and out.count("clipped by the loop itself to a norm of 0.1") == 2, out


def test_a_model_whose_other_methods_are_called(tmp_path, capsys):
    model = Policy()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with lockstep.record(model, tmp_path):
        model.forward(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
    assert (
        "no step was recorded: the model was not called for training, as in model(batch)"
        in capsys.readouterr().err
    )
