"""Loops by somebody who had not read the rules: losses of their own, modules that are no transformers, unusual steps; and bugs of such loops.

`LOSS` of a loop is the function that `python -m lockstep.judge --loss` is given for it.
"""

import contextlib
import copy
import functools
import inspect
import io
import math
import random
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from record_bugs import IGNORED, VOCABULARY, MicroMeans, Right, Scaled, averaged, tiny
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo, ShardPlacementResult
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, parametrizations
from torch.utils.checkpoint import checkpoint

import lockstep
from lockstep import judge


def run(folder, steps, loops=None):
    """Records loops, {name: how many steps}, one after the other, into folders of their names; then each rank judges its share of them."""
    loops = loops or globals()
    for name, recorded in steps.items():
        loops[name]().run(folder / name, recorded)
    dist.barrier()
    for name in list(steps)[dist.get_rank() :: dist.get_world_size()]:
        said, loss = io.StringIO(), loops[name].LOSS
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            status = judge.main([str(folder / name), *(["--loss", f"{__file__}:{loss}"] if loss else [])])
        (folder / name / "said.txt").write_text(f"{status}\n{said.getvalue()}")


class Own(MicroMeans):
    """A loop with a model of its own, which a `sample` is given to, and a loss of what it returns."""

    LOSS = None

    def made(self):
        return Heads()

    def model(self):
        torch.manual_seed(0)
        return self.made()

    def batch(self, number):
        generator = torch.Generator().manual_seed(10 * number + self.rank)
        return self.sample(generator)

    def sample(self, generator):
        return vectors(generator), classes(generator, 3), classes(generator, 2)

    def loss(self, given, tokens):
        return self.own_loss(given) / self.micro

    def own_loss(self, given):
        values, one, two = given
        first, second = self.wrapped(values)
        return F.cross_entropy(first, one) + F.cross_entropy(second, two)


def vectors(generator, size=6):
    return torch.randn(4, size, generator=generator)


def classes(generator, number, shape=(4,)):
    return torch.randint(0, number, shape, generator=generator)


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.one, self.two = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(8, 2)

    def forward(self, values):
        inside = torch.tanh(self.body(values))
        return self.one(inside), self.two(inside)


class OneHeadUnused(Own):
    """DDP says that None arrives at the other."""

    def wrap(self, net):
        return DistributedDataParallel(net, find_unused_parameters=True)

    def own_loss(self, given):
        values, one, _ = given
        first, second = self.wrapped(values)
        return F.cross_entropy(first, one) + second.detach().sum()


class WholeGraph(Own):
    """The model is called with a whole graph, and each micro batch has its own nodes of it."""

    def sample(self, generator):
        return [torch.randperm(64, generator=torch.Generator().manual_seed(0))]

    def made(self):
        return Graph()

    def nodes(self, number):
        return slice(4 * number, 4 * number + 4)

    def own_loss(self, given):
        self.called = getattr(self, "called", -1) + 1
        mine = given[0][self.nodes(self.called * self.world + self.rank)]
        features = torch.randn(64, 6, generator=torch.Generator().manual_seed(1))
        return F.cross_entropy(self.wrapped(features)[mine], mine % 3)


class Graph(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two, self.dropout = nn.Linear(6, 8), nn.Linear(8, 3), nn.Dropout(0.3)

    def forward(self, features):
        inside = self.dropout(torch.tanh(self.one(features)))
        return self.two(inside + inside.roll(1, 0))


class SameNodes(WholeGraph):
    def nodes(self, number):
        return super().nodes(number // self.world)


class SameNodesAgain(WholeGraph):
    """Each micro batch of a step has the same nodes."""

    def nodes(self, number):
        return super().nodes(number % self.world)


class Contrast(Own):
    """The scalar that the model returns is a temperature, and no loss."""

    def made(self):
        return Tempered()

    def own_loss(self, given):
        one, two, scale = self.wrapped(given[0])
        return F.cross_entropy(scale * one @ two.T, torch.arange(4))


class Tempered(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two, self.scale = nn.Linear(6, 8), nn.Linear(6, 8), nn.Parameter(torch.tensor(1.0))

    def forward(self, values):
        return (
            F.normalize(self.one(values), dim=-1),
            F.normalize(self.two(values), dim=-1),
            self.scale.exp(),
        )


class BesideTheLoss(MicroMeans):
    """The model's loss, and one of the loop's own, of the logits."""

    LOSS = None

    def loss(self, given, tokens):
        found = self.wrapped(**given, use_cache=False)
        return (found["loss"] + 0.01 * found["logits"].logsumexp(-1).square().mean()) / self.micro


class PositionBias(MicroMeans):
    """T5's first layer makes a bias, uses it and passes it on."""

    LOSS = None

    def model(self):
        torch.manual_seed(0)
        shape = {"d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 2, "num_heads": 4}
        return transformers.T5ForConditionalGeneration(
            transformers.T5Config(
                vocab_size=VOCABULARY, dropout_rate=0, decoder_start_token_id=0, use_cache=False, **shape
            )
        )


class Pairs(Own):
    """The gradient of the last bias is zero: what is added for one of a pair is taken away for the other."""

    def made(self):
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))

    def own_loss(self, given):
        return -F.logsigmoid(self.wrapped(given[0]) - self.wrapped(given[0].flip(0))).mean()


class NoAdvantage(Own):
    """Zeros arrive at the logits of one micro batch."""

    def own_loss(self, given):
        first, second = self.wrapped(given[0])
        advantage = 0.0 if self.rank == 0 and self.seen == 1 else 1.0
        self.seen += 1
        return advantage * (first.square().mean() + second.mean())

    def zero(self):
        super().zero()
        self.seen = 0


class ChangedInPlace(Own):
    def own_loss(self, given):
        values, one, _ = given
        first, second = self.wrapped(values)
        return F.cross_entropy(first.div_(0.7), one) + second.mean()


class Recurrent(Own):
    """The state of the micro batch before comes in, in a tuple."""

    def made(self):
        return Lstm()

    def zero(self):
        super().zero()
        self.state = None

    def sample(self, generator):
        return classes(generator, 7, (4, 5)), classes(generator, 7, (4, 5))

    def own_loss(self, given):
        tokens, labels = given
        logits, state = self.wrapped(tokens, self.state)
        self.state = tuple(one.detach() for one in state)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Lstm(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.mix, self.head = (
            nn.Embedding(7, 8),
            nn.LSTM(8, 8, batch_first=True),
            nn.Linear(8, 7),
        )

    def forward(self, tokens, state=None):
        mixed, state = self.mix(self.embedding(tokens), state)
        return self.head(mixed), state


class Stateful(Recurrent):
    """The model keeps the state of the micro batch before; each rank has its own."""

    def made(self):
        return KeepsItsState()

    def own_loss(self, given):
        tokens, labels = given
        return F.cross_entropy(self.wrapped(tokens).flatten(0, 1), labels.flatten())


class KeepsItsState(Lstm):
    def __init__(self):
        super().__init__()
        self.state = None

    def forward(self, tokens):
        logits, state = super().forward(tokens, self.state)
        self.state = tuple(one.detach() for one in state)
        return logits


class GivenAgain(Own):
    """What a model that sees the whole row is trained to give is the row itself."""

    def made(self):
        return Bottleneck()

    def sample(self, generator):
        text = classes(generator, 7, (4, 5))
        return text, text

    def own_loss(self, given):
        return F.cross_entropy(self.wrapped(given[0]).flatten(0, 1), given[1].flatten())


class Bottleneck(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.narrow, self.head = nn.Embedding(7, 8), nn.Linear(40, 4), nn.Linear(4, 35)

    def forward(self, tokens):
        return self.head(self.narrow(self.embedding(tokens).flatten(1))).view(-1, 5, 7)


class InADict(Own):
    def made(self):
        return FromDict()

    def own_loss(self, given):
        return F.cross_entropy(self.wrapped({"values": given[0]}), given[1])


class FromDict(nn.Module):
    """Its parameters are in a list, too."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 3))
        self.all = [self.weight]

    def forward(self, batch):
        return batch["values"] @ self.all[0]


class Normalised(Own):
    """Modules that have buffers and no weights, and weights that are computed of others."""

    def made(self):
        return nn.Sequential(
            parametrizations.weight_norm(nn.Linear(6, 8)),
            nn.BatchNorm1d(8, affine=False),
            nn.ReLU(),
            nn.Linear(8, 3),
        )

    def own_loss(self, given):
        return F.cross_entropy(self.wrapped(given[0]), given[1])


class StatisticsReset(Normalised):
    """A loop may mean to; so may one that forgets to give back the statistics of an average."""

    def model(self):
        net = super().model()
        net.register_buffer("mask", torch.ones(3, dtype=torch.bool))
        return net

    def after(self):
        for one in self.net.modules():
            if isinstance(one, nn.BatchNorm1d):
                one.reset_running_stats()


class LossModule(Own):
    """The model returns its loss alone, which a module with the classes' weights makes."""

    def made(self):
        return Weighed()

    def own_loss(self, given):
        return self.wrapped(given[0], torch.ones(4, 6), given[1])


class Weighed(nn.Module):
    def __init__(self):
        super().__init__()
        self.head, self.criterion = nn.Linear(6, 3), nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]))

    def forward(self, values, attention_mask, labels):
        return self.criterion(self.head(values * attention_mask), labels)


class Codebook(Own):
    """Each pass changes a buffer that the next one computes with; DDP sends that of rank 0."""

    def made(self):
        return Codes()

    def own_loss(self, given):
        decoded, distance = self.wrapped(given[0])
        return F.mse_loss(decoded, given[0]) + distance


class CodebookApart(Codebook):
    """Each rank has its own."""

    def wrap(self, net):
        return DistributedDataParallel(net, broadcast_buffers=False)


class Codes(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(6, 4), nn.Linear(4, 6)
        self.register_buffer("codes", torch.randn(8, 4))

    def forward(self, values):
        encoded = self.encoder(values)
        nearest = torch.cdist(encoded, self.codes).argmin(-1).detach()
        code = self.codes[nearest]
        self.codes[nearest] = 0.9 * code + 0.1 * encoded.detach()
        return self.decoder(encoded + (code - encoded).detach()), (encoded - code).square().mean()


class Padded(Own):
    """A classifier whose input is masked: its logits are of rows, not of tokens."""

    def made(self):
        return Pooled()

    def sample(self, generator):
        mask = torch.ones(4, 5, dtype=torch.long)
        mask[0, 3:] = 0
        return classes(generator, 7, (4, 5)), mask, classes(generator, 3)

    def own_loss(self, given):
        tokens, mask, labels = given
        return F.cross_entropy(self.wrapped(tokens, mask), labels)


class Pooled(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(7, 8), nn.Linear(8, 3)

    def forward(self, input_ids, attention_mask):
        return self.head((self.embedding(input_ids) * attention_mask[..., None]).mean(1))


class Closure(Own):
    """All is done inside of the step."""

    def train(self):
        for number in range(3):
            self.optimizer.step(lambda number=number: self.closure(number))

    def closure(self, number):
        self.zero()
        loss = self.own_loss(self.batch(number))
        loss.backward()
        return loss


class ManyClosures(Closure):
    def make_optimizer(self):
        return torch.optim.LBFGS(self.net.parameters(), lr=0.1, max_iter=3)


class TwoSchedules(Own):
    def make_optimizer(self):
        self.both = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (self.net.body, self.net.one)]
        self.both.append(torch.optim.SGD(self.net.two.parameters(), lr=0.1))
        self.schedules = [torch.optim.lr_scheduler.ConstantLR(one) for one in self.both]
        return self.both[0]

    def zero(self):
        self.net.zero_grad()

    def update(self):
        for one in (*self.both, *self.schedules):
            one.step()


class Nested(Own):
    def make_optimizer(self):
        return ZeroRedundancyOptimizer(self.net.parameters(), torch.optim.AdamW, lr=1e-3)


class Ahead(Own):
    """An optimizer that steps another, and moves the weights after that. Its class does not call that of torch."""

    def make_optimizer(self):
        return Lookahead(super().make_optimizer())


class Lookahead(torch.optim.Optimizer):
    def __init__(self, base):
        self.base, self.param_groups, self.state, self.defaults = (
            base,
            base.param_groups,
            base.state,
            base.defaults,
        )
        self.slow = [one.detach().clone() for group in base.param_groups for one in group["params"]]

    def zero_grad(self):
        self.base.zero_grad()

    @torch.no_grad()
    def step(self):
        self.base.step()
        parameters = (one for group in self.param_groups for one in group["params"])
        for slow, one in zip(self.slow, parameters, strict=True):
            one.copy_(slow.lerp_(one, 0.5))


class AheadScaled(Ahead):
    def reduce(self):
        self.net.one.weight.grad *= 1.01


class AheadOverwrites(Ahead):
    """The loop overwrites a frozen weight, which no optimizer holds."""

    def wrap(self, net):
        net.two.weight.requires_grad_(False)
        return super().wrap(net)

    def make_optimizer(self):
        return Lookahead(torch.optim.AdamW([p for p in self.net.parameters() if p.requires_grad], lr=1e-3))

    def after(self):
        self.net.two.weight.data *= 0.5


class Perturbed(Own):
    """Each rank has an adversarial perturbation of its own samples, and a new optimizer for it in each step."""

    micro = 1

    def own_loss(self, given):
        change = torch.zeros_like(given[0], requires_grad=True)
        optimizer = torch.optim.SGD([change], lr=1.0)
        first, _ = self.net(given[0] + change)
        (change.grad,) = torch.autograd.grad(F.cross_entropy(first, given[1]), change)
        optimizer.step()
        return super().own_loss((given[0] + change.detach(), *given[1:]))


class NoRate(Own):
    def make_optimizer(self):
        return transformers.Adafactor(self.net.parameters(), lr=None, relative_step=True, warmup_init=True)


class Parts(Own):
    """The loss, and all that it is the sum of, beside it."""

    trained = "loss"

    def made(self):
        return Summed()

    def own_loss(self, given):
        return self.wrapped(*given[:2])[self.trained]


class Summed(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, values, labels):
        inside = torch.tanh(self.body(values))
        entropy, balance = F.cross_entropy(self.head(inside), labels), inside.mean(0).square().sum()
        return {"loss": entropy + 0.1 * balance, "entropy": entropy, "balance": balance}


class PartBeside(Parts):
    """One parameter has its gradient from another term than the loss."""

    def made(self):
        return WithScale()

    def own_loss(self, given):
        found = self.wrapped(*given[:2])
        return found["loss"] + found["apart"]


class WithScale(Summed):
    def __init__(self):
        super().__init__()
        self.scale = nn.Linear(6, 5)

    def forward(self, values, labels):
        return {**super().forward(values, labels), "apart": self.scale(values).square().mean()}


class PartBesideApart(PartBeside):
    def wrap(self, net):
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["scale.weight"])
        return super().wrap(net)


class PartInDDP(Own):
    """DDP is around a part of the model; the rest is averaged by hand."""

    def made(self):
        return Around()

    def wrap(self, net):
        return net

    def reduce(self):
        averaged(self.net.head)

    def own_loss(self, given):
        return F.cross_entropy(self.wrapped(given[0]), given[1])


class Around(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = DistributedDataParallel(nn.Linear(6, 8)), nn.Linear(8, 3)

    def forward(self, values):
        return self.head(torch.tanh(self.body(values)))


class Sparse(Own):
    """Gradients of tables are sparse, and have an optimizer of their own."""

    def made(self):
        return Tables()

    def sample(self, generator):
        return classes(generator, 9, (4, 3)), classes(generator, 3)

    def make_optimizer(self):
        self.dense = torch.optim.Adam(self.net.head.parameters(), lr=1e-2)
        return torch.optim.SparseAdam(self.net.table.parameters(), lr=1e-2)

    def zero(self):
        self.net.zero_grad()

    def update(self):
        self.dense.step()
        self.optimizer.step()

    def own_loss(self, given):
        return F.cross_entropy(self.wrapped(given[0]), given[1])


class Tables(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.EmbeddingBag(9, 8, sparse=True), nn.Linear(8, 3)

    def forward(self, ids):
        return self.head(self.table(ids))


class Adversary(Own):
    """Another model is trained in between, on what this one gave, and its optimizer steps and clips."""

    micro = 1

    def make_optimizer(self):
        self.other = nn.Linear(3, 1)
        self.others = torch.optim.SGD(self.other.parameters(), lr=0.1)
        return super().make_optimizer()

    def own_loss(self, given):
        self.others.zero_grad()
        self.other(self.wrapped(given[0])[0].detach()).mean().backward()
        averaged(self.other)
        clip_grad_norm_(self.other.parameters(), 0.1)
        self.others.step()
        first, second = self.wrapped(given[0])
        return self.other(first).mean() + second.square().mean()


class Judged(Own):
    """The same, where the recorded model is the one that another is trained to deceive."""

    micro = 1

    def make_optimizer(self):
        self.other = nn.Linear(6, 6)
        self.others = torch.optim.SGD(self.other.parameters(), lr=0.1)
        return super().make_optimizer()

    def own_loss(self, given):
        self.score(self.other(given[0])).backward()
        averaged(self.other)
        self.others.step()
        self.forget()
        return self.score(given[0]).square() - self.score(self.other(given[0]).detach())

    def score(self, values):
        return sum(one.mean() for one in self.wrapped(values))

    def forget(self):
        self.net.zero_grad()


class TwoOptimizers(Own):
    """Each module has an optimizer of its own, also that beside the recorded one."""

    def make_optimizer(self):
        self.beside = DistributedDataParallel(nn.Linear(3, 3))
        self.others = torch.optim.SGD(self.beside.parameters(), lr=0.1)
        return super().make_optimizer()

    def update(self):
        self.others.step()
        super().update()

    def own_loss(self, given):
        first, second = self.wrapped(given[0])
        return F.cross_entropy(self.beside(first), given[1]) + second.square().mean()


class LossAfterTheClip(Own):
    """One parameter has a loss of its own, which goes backward after the others are clipped and updated."""

    def made(self):
        net = Heads()
        net.medians = nn.Parameter(torch.ones(3))
        return net

    def wrap(self, net):
        return net

    def make_optimizer(self):
        self.later = torch.optim.SGD([self.net.medians], lr=0.1)
        return torch.optim.AdamW([p for p in self.net.parameters() if p is not self.net.medians], lr=1e-3)

    def reduce(self):
        averaged(self.net)

    def clip(self):
        torch.nn.utils.clip_grad_norm_(self.net.parameters(), 0.1)

    def update(self):
        super().update()
        (self.net.medians - 0.5).square().sum().backward()
        self.later.step()
        self.later.zero_grad()


class ClippedTooEarly(LossAfterTheClip):
    """One optimizer holds all, so the later loss should have gone backward before."""

    def make_optimizer(self):
        self.later = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
        return torch.optim.AdamW(self.net.parameters(), lr=1e-3)

    def clip(self):
        super().clip()
        (self.net.medians - 0.5).square().sum().backward()

    def update(self):
        self.optimizer.step()


class NotAllClipped(LossAfterTheClip):
    def clip(self):
        torch.nn.utils.clip_grad_norm_([*self.net.body.parameters(), self.net.medians], 0.1)


class Beside(Own):
    """The optimizer holds a parameter that is not the recorded model's."""

    def make_optimizer(self):
        self.scale = nn.Parameter(torch.ones(3))
        return torch.optim.AdamW([*self.net.parameters(), self.scale], lr=1e-3)

    def own_loss(self, given):
        first, second = self.wrapped(given[0])
        return F.cross_entropy(self.scale * first, given[1]) + second.square().mean()

    def reduce(self):
        dist.all_reduce(self.scale.grad)


class Forces(Own):
    """What the model returns is a gradient, of an energy."""

    def made(self):
        return Energy()

    def own_loss(self, given):
        return self.wrapped(given[0]).square().mean()


class Energy(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 1, bias=False)

    def forward(self, places):
        places = places.requires_grad_()
        energy = self.head(torch.tanh(self.body(places)))
        return torch.autograd.grad(energy.sum(), places, create_graph=True)[0]


class Slopes(Own):
    """What the model returns has derivatives in it that it takes in forward mode."""

    def made(self):
        return Sloped()


class Sloped(Heads):
    def forward(self, values):
        with torch.autograd.forward_ad.dual_level():
            along = torch.autograd.forward_ad.make_dual(values, torch.ones_like(values))
            first = torch.autograd.forward_ad.unpack_dual(super().forward(along)[0])
        return sum(first), sum(
            torch.func.jvp(lambda one: self.two(torch.tanh(self.body(one))), (values,), (values,))
        )


class Double(Own):
    """All is in float64, in which the reference is, too."""

    def made(self):
        return Heads().double()

    def sample(self, generator):
        values, *labels = super().sample(generator)
        return values.double(), *labels


# Who updates what, and when.


class ReducesItself(Own):
    """No DDP: the optimizer sums the gradients over the ranks, as those of nanochat and modded-nanogpt do."""

    def wrap(self, net):
        return net

    def make_optimizer(self):
        return Descent(self.net.parameters())


class Descent(torch.optim.Optimizer):
    local = 0  # gradients that are left as each rank has them
    end = None  # of the parameters that are updated

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    def step(self):
        for group in self.param_groups:
            for number, one in enumerate(group["params"][: self.end]):
                gradient = one.grad.clone()
                if number >= self.local:
                    dist.all_reduce(gradient)
                one.data.sub_(group["lr"] / dist.get_world_size() * gradient)


class OneLeftOut(ReducesItself):
    """The last parameter is never updated, as where ranks divide parameters and one is left over."""

    def wrap(self, net):
        return DistributedDataParallel(net)

    def make_optimizer(self):
        optimizer = super().make_optimizer()
        optimizer.end = -1
        return optimizer


class SharedOut(Own):
    """Each rank's optimizer holds a share of the parameters, and the rank then sends them to the others."""

    def own(self):
        return list(self.net.parameters())[self.rank :: self.world]

    def make_optimizer(self):
        return torch.optim.AdamW(self.own(), lr=1e-2)

    def zero(self):
        self.net.zero_grad()

    def after(self):
        for number, one in enumerate(self.net.parameters()):
            dist.broadcast(one.data, number % self.world)


class InBackward(Own):
    """Every parameter has an optimizer, which steps as soon as FSDP2 has reduced its gradient."""

    micro, bound = 1, None

    def wrap(self, net):
        fully_shard(net.body)
        return fully_shard(net)

    def make_optimizer(self):
        for one in self.net.parameters():
            optimizer = torch.optim.AdamW([one], lr=1e-2)
            one.register_post_accumulate_grad_hook(functools.partial(self.update_one, optimizer))

    def update_one(self, optimizer, _parameter):
        optimizer.step()
        optimizer.zero_grad()

    def zero(self):
        pass

    def update(self):
        pass


class InBackwardTogether(InBackward):
    """Another optimizer stands for all of them, for what asks for one: it holds the parameters, and does nothing."""

    def make_optimizer(self):
        super().make_optimizer()
        return Stands(self.net.parameters(), {})

    def update(self):
        self.optimizer.step()


class Stands(torch.optim.Optimizer):
    def step(self):
        pass


class TiedInTheLoop(Own):
    """FSDP2: the loop's loss multiplies what the model returns with the whole table, which the model has used."""

    def made(self):
        return Embeds()

    def sample(self, generator):
        return classes(generator, 11, (4, 7)), classes(generator, 11, (4, 7))

    def wrap(self, net):
        return fully_shard(net)

    def own_loss(self, given):
        scores = F.linear(self.wrapped(given[0]), self.net.table.weight)
        return F.cross_entropy(scores.flatten(0, 1), given[1].flatten())


class Embeds(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.inside = nn.Embedding(11, 8), nn.Linear(8, 8)

    def forward(self, ids):
        return torch.tanh(self.inside(self.table(ids)))


class ClippedOnOneRank(Own):
    """As under `if rank == 0`."""

    def clip(self):
        if self.rank == 0:
            clip_grad_norm_(self.net.parameters(), 0.1)


class ZeroOnOneRank(Own):
    """After the reduction, as of a layer that one rank freezes by hand."""

    def clip(self):
        if self.rank == 1:
            self.net.two.weight.grad.zero_()


class ClippedByOwnNorm(Own):
    """By hand, by the norm of what the rank has; here as if that had other sizes."""

    def clip(self):
        for one in self.net.parameters():
            one.grad.mul_(0.1 + 0.02 * self.rank)


class OnShards(Own):
    """Muon rounds to bfloat16, and shards of a matrix add up in another order than the whole."""

    def wrap(self, net):
        return fully_shard(net)

    def made(self):
        return nn.Sequential(nn.Linear(6, 16, bias=False), nn.Tanh(), nn.Linear(16, 3, bias=False))

    def make_optimizer(self):
        return torch.optim.Muon(self.net.parameters(), lr=0.02)

    def own_loss(self, given):
        return F.cross_entropy(self.wrapped(given[0]), given[1])


class SeveralMeshes(Own):
    """FSDP2 shards one weight over another mesh than the others of the same module, as mixtures of experts do."""

    def wrap(self, net):
        mesh = init_device_mesh("cpu", (1, self.world), mesh_dim_names=("replica", "shard"))
        info = HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
        placed = ShardPlacementResult(Shard(0), info)
        return fully_shard(
            net, shard_placement_fn=lambda weight: placed if weight is net.one.weight else None
        )


class CompiledStep(Own):
    """Of a compiled step, the powers of betas are taken of float32 tensors."""

    def make_optimizer(self):
        optimizer = super().make_optimizer()
        self.step_compiled = torch.compile(optimizer.step, backend="aot_eager")
        return optimizer

    def update(self):
        self.step_compiled()


class Clamped(Contrast):
    def after(self):
        with torch.no_grad():
            self.net.scale.clamp_(max=0.9)


class ClippedByHand(Own):
    def clip(self):
        gradients = [one.grad for one in self.net.parameters()]
        norm = torch.stack([one.norm() for one in gradients]).norm()
        for one in gradients:
            one.mul_(min(1.0, 0.1 / float(norm)))


# What a loop makes of outputs and gradients.


class Bfloat16Clipped(Own):
    """The norm is a number of bfloat16, and so is what gradients are multiplied with."""

    def made(self):
        inner = nn.Linear(6, 64), nn.GELU(), nn.Linear(64, 64), nn.Tanh()
        return nn.Sequential(*inner, nn.Linear(64, 3)).bfloat16()

    def own_loss(self, given):
        return F.cross_entropy(self.wrapped(given[0].bfloat16()), given[1])

    def clip(self):
        norm = torch.nn.utils.get_total_norm([one.grad for one in self.net.parameters()])
        # Of the numbers of bfloat16, this is as far from the nearest as one can be.
        clip_grad_norm_(self.net.parameters(), (0.75 + 0.9 * 2**-9) * float(norm))


class Entropy(Own):
    """A cross-entropy with a bonus for entropy, which is nearer to some label smoothing than to none."""

    def made(self):
        return nn.Linear(6, 40)

    def sample(self, generator):
        return vectors(generator), classes(generator, 40)

    def own_loss(self, given):
        logits = self.wrapped(given[0]).log_softmax(-1)
        return F.nll_loss(logits, given[1]) + 0.01 * (logits.exp() * logits).sum(-1).mean()


class OfTasks(Own):
    """The gradients of each task are looked at before the backward pass, as where they are kept from conflicting."""

    def own_loss(self, given):
        values, one, two = given
        first, second = self.wrapped(values)
        losses = F.cross_entropy(first, one), F.cross_entropy(second, two)
        for loss in losses:
            torch.autograd.grad(loss, self.net.body.weight, retain_graph=True)
        return sum(losses)

    def wrap(self, net):
        return net

    def reduce(self):
        averaged(self.net)


class WeightsOfTasks(OfTasks):
    """The model holds the weights of the terms, which the loop's loss alone depends on."""

    bound = 0.1

    def made(self):
        return Uncertain()

    def own_loss(self, given):
        values, one, two = given
        first, second = self.wrapped(values)
        sizes = self.net.sizes
        terms = torch.stack([F.cross_entropy(first, one), F.cross_entropy(second, two)])
        return ((-sizes).exp() * terms + sizes).sum()


class Uncertain(Heads):
    def __init__(self):
        super().__init__()
        self.sizes = nn.Parameter(torch.zeros(2))


class WeightsGiven(WeightsOfTasks):
    """The model returns its weights of the terms, and the loop has them themselves in its loss as well."""

    def made(self):
        return UncertainGiven()

    def own_loss(self, given):
        values, one, two = given
        first, second, sizes = self.wrapped(values)
        terms = torch.stack([F.cross_entropy(first, one), F.cross_entropy(second, two)])
        return ((-sizes).exp() * terms + self.net.sizes).sum()


class UncertainGiven(Uncertain):
    def forward(self, values):
        return *super().forward(values), 1.0 * self.sizes


class HeadOfTheLoop(Own):
    """The model returns hidden states; the loop computes logits with its embedding, in parts."""

    def made(self):
        return nn.Sequential(nn.Embedding(7, 8), nn.Linear(8, 8), nn.Tanh())

    def sample(self, generator):
        return classes(generator, 7, (4, 5)), classes(generator, 7, (4, 5))

    def own_loss(self, given):
        hidden, labels = self.wrapped(given[0]).flatten(0, 1), given[1].flatten()
        parts = zip(hidden.split(7), labels.split(7), strict=True)
        return sum(checkpoint(self.part, *part, use_reentrant=False) for part in parts) / len(labels)

    def part(self, hidden, labels):
        return F.cross_entropy(F.linear(hidden, self.net[0].weight), labels, reduction="sum")


class HeadOfTheLoopTwice(HeadOfTheLoop):
    """Twice the gradient of the whole embedding."""

    def reduce(self):
        self.net[0].weight.grad *= 2


class HeadOfTheLoopSaid(HeadOfTheLoop):
    """The function has the weight from the judge."""

    LOSS = "head_of_the_loop"

    def own_loss(self, given):
        lockstep.record.batch(labels=given[1])
        return super().own_loss(given)


def head_of_the_loop(outputs, batch):
    return F.cross_entropy(F.linear(outputs, batch["0.weight"]).flatten(0, 1), batch["labels"].flatten())


class HeadOfTheLoopTimes(HeadOfTheLoopSaid):
    def own_loss(self, given):
        return 3 * super().own_loss(given)


class PenaltyOfWeights(Own):
    def own_loss(self, given):
        return super().own_loss(given) + 0.01 * sum(one.abs().sum() for one in self.net.parameters())


class ChannelsLast(Own):
    """Convolutions whose channels lie beside each other are computed otherwise, less exactly."""

    def made(self):
        return Convolved().to(memory_format=torch.channels_last)

    def sample(self, generator):
        images = torch.randn(4, 3, 8, 8, generator=generator).to(memory_format=torch.channels_last)
        return images, classes(generator, 5)

    def own_loss(self, given):
        return F.cross_entropy(self.wrapped(given[0]), given[1])


class Convolved(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.norm = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.two, self.head = nn.Conv2d(8, 8, 3, padding=1, groups=2, bias=False), nn.Linear(8, 5)

    def forward(self, images):
        inside = self.norm(self.one(images)).relu()
        return self.head((inside + self.two(inside)).mean((2, 3)))


class Checkpointed(Own):
    def made(self):
        net = Heads()
        net.body = checkpoint_wrapper(net.body)
        return net


class Denoised(Own):
    """The times are integers, one for each row that the model returns, and no labels."""

    LOSS = "denoised"

    def made(self):
        return Denoiser()

    def sample(self, generator):
        return vectors(generator), 6 + classes(generator, 4), vectors(generator)

    def own_loss(self, given):
        values, times, noise = given
        lockstep.record.batch(noise=noise)
        return F.mse_loss(self.wrapped(values, times), noise)


def denoised(outputs, batch):
    return F.mse_loss(outputs, batch["noise"])


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.times, self.head = nn.Embedding(10, 6), nn.Linear(6, 6)

    def forward(self, values, times):
        return self.head(torch.tanh(values + self.times(times)))


class Advantages(MicroMeans):
    """The forward method is replaced, as TRL does it, and returns log-probabilities: each micro batch has an advantage, one of them none."""

    LOSS = None

    def wrap(self, net):
        net.forward = functools.partial(scored, net)
        return net

    def pass_over(self, number, given, window):
        found = self.wrapped(**given)
        (-(0.7, -0.3, 0.0)[number] * found["log_probs"].mean()).backward()

    def reduce(self):
        averaged(self.net)


def scored(net, input_ids, labels):
    logits = type(net).forward(net, input_ids=input_ids, use_cache=False)["logits"]
    log_probs = -F.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none")
    return {"loss": -log_probs.mean(), "log_probs": log_probs}


class ZerosFirst(NoAdvantage):
    """All advantages of the first step are zero."""

    def own_loss(self, given):
        first, second = self.wrapped(given[0])
        return float(self.step > 0) * (first.square().mean() + second.mean())


# Bugs that no function is needed for.


class Kept(Judged):
    def forget(self):
        pass


class BesideApart(Beside):
    def reduce(self):
        pass


class OtherSamples(Own):
    """Tensor parallelism over both ranks, which norms share out the positions of; the ranks were to be given the same samples."""

    def made(self):
        return nn.Sequential(nn.Embedding(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))

    def sample(self, generator):
        return classes(generator, 8, (4, 6)), classes(generator, 8, (4, 6))

    def wrap(self, net):
        plan = {
            "0": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "1": SequenceParallel(),
            "2": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        }
        return parallelize_module(net, init_device_mesh("cpu", (2,)), plan)

    def own_loss(self, given):
        return F.cross_entropy(self.wrapped(given[0]).flatten(0, 1), given[1].flatten())


class PartLeftOut(Parts):
    trained = "entropy"


class PartNotInDDP(PartInDDP):
    def reduce(self):
        pass


class PartNotInDDPClipped(PartNotInDDP):
    """By other norms on each rank, so all gradients differ; one part of them does before, too."""

    def clip(self):
        clip_grad_norm_(self.net.parameters(), 0.1)


class SparseApart(Sparse):
    def wrap(self, net):
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["table.weight"])
        return super().wrap(net)


class AutocastOfTheLoop(Own):
    """Autocast keeps the weights that it has cast until its end, which is that of the training."""

    def make_optimizer(self):
        return torch.optim.AdamW(self.net.parameters(), lr=0.1)

    def train(self):
        with torch.autocast("cpu", torch.bfloat16):
            super().train()


class OneWeightCopied(Own):
    """A head computes with a copy of its weight that is never renewed."""

    def wrap(self, net):
        head, copied = net.two, net.two.weight.detach().clone()
        head.forward = lambda x: F.linear(x, copied + (head.weight - head.weight.detach()), head.bias)
        return super().wrap(net)


class AutocastOnOneRank(Own):
    def own_loss(self, given):
        with torch.autocast("cpu", torch.bfloat16, enabled=self.rank == 0):
            return super().own_loss(given)


class ShiftedTwice(Recurrent):
    """The labels are not given to the model, but its gradient says which they are."""

    ahead = 2

    def sample(self, generator):
        text = classes(generator, 7, (4, 7))
        return text[:, :5], text[:, self.ahead :][:, :5]


class NotShifted(ShiftedTwice):
    ahead = 0


class TokensWeighed(ShiftedTwice):
    """Tokens have weights of their own: nothing is known of the mean, but the labels are."""

    ahead = 1

    def own_loss(self, given):
        text, labels = given
        each = F.cross_entropy(self.wrapped(text, None)[0].flatten(0, 1), labels.flatten(), reduction="none")
        return (each * torch.linspace(0.5, 1.5, len(each))).mean()


class WeighedNotShifted(TokensWeighed):
    ahead = 0


class ShiftedTwiceInColumns(ShiftedTwice):
    """Samples are columns, and the logits of all lie one below the other."""

    def made(self):
        return Columns()

    def sample(self, generator):
        return tuple(one.T for one in super().sample(generator))

    def own_loss(self, given):
        return F.cross_entropy(self.wrapped(given[0])[0], given[1].flatten())


class Columns(Lstm):
    def forward(self, tokens, state=None):
        logits, state = super().forward(tokens.T, state)
        return logits.transpose(0, 1).flatten(0, 1), state


class GivesColumnsAgain(ShiftedTwiceInColumns):
    """A model that sees whole samples is trained to give their tokens."""

    ahead = 0

    def made(self):
        return SeesAll()


class SeesAll(Columns):
    def __init__(self):
        super().__init__()
        self.mix = nn.LSTM(8, 4, batch_first=True, bidirectional=True)


class ClippedEachTime(Own):
    """Before the last micro batch, each rank has a norm of its own."""

    def context(self, number):
        return self.wrapped.no_sync() if number < self.micro - 1 else contextlib.nullcontext()

    def backward(self, loss):
        super().backward(loss)
        clip_grad_norm_(self.net.parameters(), 0.1)


class EpsilonByRank(Own):
    """One layer's epsilon is another on one rank."""

    def made(self):
        return nn.Sequential(
            nn.Linear(6, 8), nn.LayerNorm(8, eps=0.1 if self.rank else 1e-5), nn.Linear(8, 3)
        )

    def own_loss(self, given):
        return F.cross_entropy(self.wrapped(given[0]), given[1])


class StepsTwice(Own):
    def after(self):
        self.optimizer.step()


class ClippedTooLate(Own):
    def after(self):
        clip_grad_norm_(self.net.parameters(), 0.01)


class RateByRank(Own):
    def make_optimizer(self):
        return torch.optim.AdamW(self.net.parameters(), lr=1e-3 * (1 + self.rank))


class EvaluatedOnOneRank(Normalised):
    def wrap(self, net):
        if self.rank == 1:
            net[1].eval()
        return super().wrap(net)


class Noisy(Own):
    def reduce(self):
        generator = torch.Generator().manual_seed(self.step)
        for one in self.net.parameters():
            one.grad += 0.01 * torch.randn(one.shape, generator=generator)


class ReducesMost(ReducesItself):
    def make_optimizer(self):
        optimizer = super().make_optimizer()
        optimizer.local = 2
        return optimizer


class OneRanksGradient(ReducesItself):
    """Weights are the same on all ranks, as they are sent, but made of the gradient of one."""

    def make_optimizer(self):
        return Sending(self.net.parameters())


class Sending(Descent):
    local = 100

    def step(self):
        super().step()
        for one in self.param_groups[0]["params"]:
            dist.broadcast(one.data, 0)


class SharedOutNotSent(SharedOut):
    def after(self):
        dist.broadcast(next(self.net.parameters()).data, 0)


class SharedOutNotReduced(SharedOut):
    """DDP is gone, and what is reduced by hand leaves the vectors out: most of the parameters."""

    def wrap(self, net):
        return net

    def reduce(self):
        for one in self.net.parameters():
            if one.ndim > 1:
                dist.all_reduce(one.grad)
                one.grad /= self.world


class HeadNotReduced(SharedOutNotReduced):
    """Adam's first step is the same on all ranks where their gradients have the same signs, as that of the bias has here."""

    def sample(self, generator):
        values, one, two = super().sample(generator)
        return values, one, torch.zeros_like(two)

    def make_optimizer(self):
        return torch.optim.AdamW(self.net.parameters(), lr=1e-2)

    def reduce(self):
        for one in [*self.net.parameters()][:-2]:
            dist.all_reduce(one.grad)
            one.grad /= self.world

    def after(self):
        pass


class ClippedInBackward(InBackward):
    def clip(self):
        clip_grad_norm_(self.net.parameters(), 0.01)


class VectorsHalved(Own):
    """More than half of the gradients are wrong, and by one factor."""

    def made(self):
        return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 3))

    def own_loss(self, given):
        return F.cross_entropy(self.wrapped(given[0]), given[1])

    def reduce(self):
        for one in self.net.parameters():
            if one.ndim == 1:
                one.grad /= self.world


class NormsTooSmall(VectorsHalved):
    """A factor that makes all others look too large, in two of six."""

    def reduce(self):
        for one in self.net[1].parameters():
            one.grad *= 0.02


class OneNotZeroed(VectorsHalved):
    """Of two optimizers, one alone sets its gradients to zero."""

    def make_optimizer(self):
        self.other = torch.optim.SGD(self.net[3].parameters(), lr=0.1)
        return torch.optim.SGD([*self.net[0].parameters(), *self.net[1].parameters()], lr=0.1)

    def reduce(self):
        self.other.step()


class ThereAndBack(Own):
    """Weights are taken elsewhere for an evaluation, as to their average, and back: rounding errors stay."""

    back = 1.1

    @torch.no_grad()
    def after(self):
        for one in self.net.parameters():
            one *= 1.1
            one /= self.back


class NotQuiteBack(ThereAndBack):
    back = 1.1001


class OwnShardsClipped(OnShards):
    """By hand, each rank by the norm of what it has."""

    def clip(self):
        local = [one.grad.to_local() for one in self.net.parameters()]
        norm = torch.nn.utils.get_total_norm(local)
        for one in local:
            one *= 0.1 / norm


class Reordered(ChannelsLast):
    """DDP has its buckets in the order that the weights had in memory when it was made."""

    def made(self):
        return Convolved()

    def wrap(self, net):
        wrapped = super().wrap(net)
        net.to(memory_format=torch.channels_last)
        return wrapped


class Compressed(Own):
    def wrap(self, net):
        wrapped = super().wrap(net)
        wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
        return wrapped


class OtherSamplesOnShards(OtherSamples):
    """The logits are cut, too, and the loss is computed on the pieces."""

    def wrap(self, net):
        head = ColwiseParallel(input_layouts=Replicate(), output_layouts=Shard(-1), use_local_output=False)
        return parallelize_module(net, init_device_mesh("cpu", (2,)), {"2": head})

    def pass_over(self, number, given, window):
        with loss_parallel():
            super().pass_over(number, given, window)


class FusedLoss(LossModule):
    """The loss makes its gradients in the forward pass, and forgets what they are multiplied with."""

    def made(self):
        return Fused()


class Fused(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(6, 3)

    def forward(self, values, attention_mask, labels):
        return Forgetful.apply(self.head(values * attention_mask), labels)


class Forgetful(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels):
        own = logits.log_softmax(-1)
        ctx.save_for_backward(own.exp() - F.one_hot(labels, 3), torch.tensor(len(labels)))
        return F.nll_loss(own, labels)

    @staticmethod
    def backward(ctx, _gradient):
        gradient, rows = ctx.saved_tensors
        return gradient / rows, None


class FrozenBefore(Own):
    """Nothing that a reentrant checkpoint is given needs a gradient, so nothing inside of it gets one."""

    def made(self):
        return FirstFrozen()

    def wrap(self, net):
        return DistributedDataParallel(net, find_unused_parameters=True)


class FirstFrozen(Heads):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 6).requires_grad_(False), nn.Linear(6, 6)

    def forward(self, values):
        return super().forward(values + checkpoint(self.last, self.first(values), use_reentrant=True))


class Signs(Own):
    """These are numbers of 16 bits, too, but not what rounding leaves."""

    def reduce(self):
        for one in self.net.parameters():
            one.grad.sign_()


# The loop's own loss is given.


class Labelled(Own):
    """A mean over all tokens of the global batch, whose labels the model is not called with."""

    LOSS = "next_token"
    factor = 1.0

    def made(self):
        return nn.Sequential(nn.Embedding(7, 8), nn.Linear(8, 7))

    def sample(self, generator):
        labels = classes(generator, 7, (4, 5))
        labels[0, : 1 + 3 * self.rank] = IGNORED
        return classes(generator, 7, (4, 5)), labels

    def tokens(self, window):
        count = torch.tensor(sum(int((labels != IGNORED).sum()) for _, labels in window))
        dist.all_reduce(count)
        return int(count)

    def loss(self, given, tokens):
        return self.factor * self.world * self.total(given) / tokens

    def total(self, given):
        tokens, labels = given
        lockstep.record.batch(labels=labels)
        logits = self.wrapped(tokens).flatten(0, 1)
        return F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED, reduction="sum")


def next_token(outputs, batch):
    return F.cross_entropy(outputs.flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORED)


class LabelledSum(Labelled):
    """The function returns a sum, and how many tokens it is a sum over."""

    LOSS = "next_token_sum"


def next_token_sum(outputs, batch):
    number = (batch["labels"] != IGNORED).sum()
    return next_token(outputs, batch) * number, number


class SumWithATerm(LabelledSum):
    """So is the term, whose micro batches have unequal numbers of tokens."""

    LOSS = "next_token_and_z"
    often = 1.0

    def total(self, given):
        tokens, labels = given
        lockstep.record.batch(labels=labels)
        logits = self.wrapped(tokens)
        return next_token_sum(logits, {"labels": labels})[0] + self.often * z_sum(logits, labels)


def z_sum(logits, labels):
    return 0.1 * logits.logsumexp(-1)[labels != IGNORED].square().sum()


def next_token_and_z(outputs, batch):
    total, number = next_token_sum(outputs, batch)
    z = z_sum(outputs, batch["labels"])
    return total + z, number, {"z": z}


class SumWithATermThrice(SumWithATerm):
    often = 3.0


class LabelledTwice(Labelled):
    factor = 2.0


class LabelledAllPositions(Labelled):
    def tokens(self, window):
        return self.world * sum(labels.numel() for _, labels in window)


class LabelledByTheMost(Labelled):
    def tokens(self, window):
        count = torch.tensor(sum(int((labels != IGNORED).sum()) for _, labels in window))
        dist.all_reduce(count, op=dist.ReduceOp.MAX)
        return int(count) * self.world


class Distilled(MicroMeans):
    """The model's loss, and how far it is from a teacher."""

    LOSS = "distilled"
    often = 1.0

    def make_optimizer(self):
        self.teacher = tiny("tiny-qwen2", hidden_size=32).requires_grad_(False)
        return super().make_optimizer()

    def loss(self, given, tokens):
        teacher = self.teacher(given["input_ids"]).logits
        lockstep.record.batch(teacher=teacher)
        found = self.wrapped(**given, use_cache=False)
        return (found["loss"] + self.often * 0.5 * divergence(found["logits"], teacher)) / self.micro


def divergence(logits, teacher):
    student, teacher = (one.log_softmax(-1).flatten(0, 1) for one in (logits, teacher))
    return F.kl_div(student, teacher, log_target=True, reduction="batchmean")


def distilled(outputs, batch):
    kl = divergence(outputs["logits"], batch["teacher"])
    return outputs["loss"] + 0.5 * kl, {"kl": kl}


class DistilledThrice(Distilled):
    often = 3.0


class HeadTimesWorld(Own):
    LOSS = "heads"

    def own_loss(self, given):
        values, one, two = given
        lockstep.record.batch(one=one, two=two)
        first, second = self.wrapped(values)
        return self.world * F.cross_entropy(first, one) + F.cross_entropy(second, two)


def heads(outputs, batch):
    one, two = (F.cross_entropy(own, batch[name]) for own, name in zip(outputs, ("one", "two"), strict=True))
    return one + two, {"first head": one}


class RestByItsLabels(HeadTimesWorld):
    """The rest is divided by what differs from batch to batch: what the first head alone trains is right."""

    def own_loss(self, given):
        values, one, two = given
        lockstep.record.batch(one=one, two=two)
        first, second = self.wrapped(values)
        return F.cross_entropy(first, one) + F.cross_entropy(second, two) * (1 + two.sum()) / 7


class HeadsAsMeant(HeadTimesWorld):
    def own_loss(self, given):
        values, one, two = given
        lockstep.record.batch(one=one, two=two)
        first, second = self.wrapped(values)
        return F.cross_entropy(first, one) + F.cross_entropy(second, two)


# What cannot be judged.


class Penalty(Own):
    def own_loss(self, given):
        values = given[0].requires_grad_()
        (slope,) = torch.autograd.grad(self.wrapped(values)[0].sum(), values, create_graph=True)
        return slope.square().mean()

    def wrap(self, net):
        return net


class Complex(Own):
    def made(self):
        return Turned()

    def own_loss(self, given):
        return self.wrapped(given[0]).abs().mean()


class Turned(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 3, dtype=torch.complex64))

    def forward(self, values):
        return values.to(torch.complex64) @ self.weight


class Hooked(Own):
    def made(self):
        return nn.utils.spectral_norm(nn.Linear(6, 3))

    def own_loss(self, given):
        return F.cross_entropy(self.wrapped(given[0]), given[1])


class NoisyHook(Own):
    def wrap(self, net):
        net.body.register_forward_hook(lambda module, inputs, output: output + 0.1 * torch.rand_like(output))
        return super().wrap(net)


class Zeros(Own):
    def own_loss(self, given):
        first, second = self.wrapped(given[0])
        return 0.0 * (first.square().mean() + second.mean())


class OddInput(Own):
    def made(self):
        return FromObject()

    def own_loss(self, given):
        return F.cross_entropy(self.wrapped(Batch(given[0])), given[1])


class Batch:
    def __init__(self, values):
        self.values = values


class FromObject(FromDict):
    def forward(self, batch):
        return batch.values @ self.weight


class NoLabels(Labelled):
    LOSS = None

    def made(self):
        return Returned()

    def total(self, given):
        tokens, labels = given
        labels = torch.full_like(labels, IGNORED) if self.rank == 0 else labels
        return torch.nan_to_num(self.wrapped(tokens, labels)["loss"])


class Returned(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(7, 8), nn.Linear(8, 7)

    def forward(self, tokens, labels):
        logits = self.head(self.embedding(tokens))
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
        return {"loss": loss, "logits": logits}


class ShiftedByTheLoop(Own):
    """The tokens, shifted, are the labels that the loop has shifted before, as BartForCausalLM is given them."""

    def made(self):
        return NextToken()

    def sample(self, generator):
        text = classes(generator, 7, (4, 6))
        return text, torch.cat([text[:, 1:], torch.full_like(text[:, :1], IGNORED)], 1)

    def own_loss(self, given):
        return self.wrapped(*given)[0]


class NextToken(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(7, 8), nn.Linear(8, 7)

    def forward(self, x, y):
        logits = self.head(self.embedding(x))
        return F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=IGNORED), logits


class ScaledOwn(Scaled, Own):
    """A GradScaler scales a loss of the loop's own."""

    bound, scale = None, 256.0


class NeverUnscaled(ScaledOwn):
    """The scaler scales, and the optimizer steps without it."""

    def clip(self):
        pass

    def update(self):
        self.optimizer.step()


class CompressedScaled(ScaledOwn, Compressed):
    """Once the scale is taken off, the gradients are too small for float16."""

    scale = 2.0**24

    def loss(self, given, tokens):
        return super().loss(given, tokens) * 2.0**-14


class NearOverflow(ScaledOwn):
    """Scaled gradients are more than half of the largest number of float16, and none overflows."""

    scale = 2.0**17

    def wrap(self, net):
        return fully_shard(net, mp_policy=MixedPrecisionPolicy(param_dtype=torch.float16))

    def own_loss(self, given):
        values, _, two = given
        first, second = (head.float() for head in self.wrapped(values))
        return F.cross_entropy(first, torch.zeros_like(two)) + F.cross_entropy(second, two)

    def clip(self):
        largest = max(one.grad.full_tensor().abs().max() for one in self.net.parameters())
        assert 2.0**15 < largest < math.inf, largest


class Overflows(ScaledOwn):
    """Gradients of the first window are infinite, so the scaler skips its step."""

    RANKS = (0, 1)

    def train(self):
        self.steps += 1
        super().train()

    def clip(self):
        if self.step == 0 and self.rank in self.RANKS:
            next(self.net.parameters()).grad[0] = torch.inf
        super().clip()


class OverflowsOnOneRank(Overflows):
    """Each rank's scaler looks at its own gradients alone."""

    RANKS = (1,)


class GivesItsBias(Own):
    """A module returns its bias, which its caller adds, as GPT-NeoX Japanese does. A weight has no elements, as one of MobileBERT's may."""

    def made(self):
        return BiasApart()

    def update(self):
        clip_grad_norm_(self.net.parameters(), 0.1)
        super().update()


class BiasApart(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.heads = WithoutBias(), Heads()

    def forward(self, values):
        hidden, bias = self.body(values)
        return self.heads(hidden + bias)


class WithoutBias(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.eye(6)), nn.Parameter(torch.zeros(6))
        self.empty = nn.Parameter(torch.zeros(6, 0))

    def forward(self, values):
        return values @ torch.cat([self.weight, self.empty], 1), self.bias


class Copies(Own):
    """Float32 copies of bfloat16 weights are updated, and copied back."""

    kept = False  # the gradients of the weights

    def made(self):
        return Heads().bfloat16()

    def sample(self, generator):
        values, *labels = super().sample(generator)
        return values.bfloat16(), *labels

    def make_optimizer(self):
        self.copies = [one.detach().float().requires_grad_() for one in self.net.parameters()]
        return torch.optim.AdamW(self.copies, lr=1e-2)

    def zero(self):
        self.net.zero_grad()

    def update(self):
        for own, one in zip(self.copies, self.net.parameters(), strict=True):
            own.grad, one.grad = one.grad.float(), one.grad if self.kept else None
        super().update()
        with torch.no_grad():
            for own, one in zip(self.copies, self.net.parameters(), strict=True):
                one.copy_(own)


class CopiesWithGradients(Copies):
    kept = True


class LossFails(HeadTimesWorld):
    LOSS = "fails"


def fails(outputs, batch):
    return batch["labels"]


class TermApart(HeadTimesWorld):
    LOSS = "term_apart"


def term_apart(outputs, batch):
    """The term is computed again, and is no part of the loss."""
    return heads(outputs, batch)[0], heads(outputs, batch)[1]


class LossIsNone(HeadTimesWorld):
    LOSS = "is_none"


def is_none(outputs, batch):
    return outputs[0]


class ByHand(Own):
    """The gradients of a model that DDP does not wrap, all in float16."""

    def made(self):
        return Heads().half()

    def sample(self, generator):
        values, *labels = super().sample(generator)
        return values.half(), *labels

    def make_optimizer(self):
        return torch.optim.SGD(self.net.parameters(), lr=0.1)

    def wrap(self, net):
        return net

    def reduce(self):
        averaged(self.net)


class ReducedInTheStep(Own):
    """A hook of the optimizer averages the gradients, after the hooks of all optimizers."""

    def wrap(self, net):
        return net

    def make_optimizer(self):
        optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-3)
        optimizer.register_step_pre_hook(lambda *_: averaged(self.net))
        return optimizer


class ZeroedInTheStep(ReducedInTheStep):
    def make_optimizer(self):
        optimizer = super().make_optimizer()
        optimizer.register_step_pre_hook(lambda *_: self.net.body.zero_grad())
        return optimizer


class StepSkipped(Own):
    """One whose norm is too large is left out by all ranks."""

    steps, bound = 3, 1.0

    def update(self):
        if self.step != 1:
            super().update()


class WindowsLost(StepSkipped):
    """Gradients are set to zero after each window but the last."""

    steps = 6

    def update(self):
        if self.step % 2:
            Own.update(self)


class ClippedTogether(Beside):
    """By the norm of the model's gradients and that of another parameter."""

    factor = 1

    def clip(self):
        held = [*self.net.parameters(), self.scale]
        norm = torch.nn.utils.get_total_norm([one.grad for one in held])
        torch.nn.utils.clip_grads_with_norm_(held, 0.1, self.factor * norm)


class ClippedTogetherOff(ClippedTogether):
    factor = 2


class Annealed(Own):
    """The loop sets a weight that the model has as an attribute, which also counts its calls."""

    def made(self):
        return Weighing()

    def train(self):
        self.net.weight = 0.5
        super().train()

    def after(self):
        self.net.weight *= 0.5


class AnnealedApart(Annealed):
    def after(self):
        self.net.weight *= 0.5 + self.rank


class Weighing(Heads):
    def __init__(self):
        super().__init__()
        self.weight, self.calls = 1.0, 0

    def forward(self, values):
        self.calls += 1
        one, two = super().forward(values)
        return self.weight * one, two / self.calls


class HookOnTheOutput(Own):
    """The loop clips what arrives at what the model returns."""

    def own_loss(self, given):
        first, second = self.wrapped(given[0])
        first.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        return F.cross_entropy(first, given[1]) + F.cross_entropy(second, given[2])


class Bags(Own):
    """Items of all users in one row, where each begins, and the users: none of them is a sample alone."""

    def made(self):
        return Bag()

    def sample(self, generator):
        return (
            classes(generator, 9, (7,)),
            torch.tensor([0, 2, 3, 5]),
            classes(generator, 5),
            classes(generator, 3),
        )

    def own_loss(self, given):
        return F.cross_entropy(self.wrapped(*given[:3]), given[3])


class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.items, self.users = nn.EmbeddingBag(9, 8), nn.Embedding(5, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, items, offsets, users):
        return self.head(self.items(items, offsets) * self.users(users))


class Words(Own):
    """A causal model with a mask of its own, and a loss that the loop makes of the tokens that the mask has."""

    trained = "masked"

    def made(self):
        return Causal()

    def sample(self, generator):
        lengths = torch.tensor([8, 5, 6, 4])
        mask = torch.arange(8) < lengths[:, None]
        tokens = 1 + classes(generator, 10, (4, 8))
        second = (torch.arange(8) > 3) & (self.trained == "documents")
        return tokens * mask, mask.long(), second.long().expand(4, 8)

    def own_loss(self, given):
        tokens, mask, documents = given
        if self.trained == "documents":
            tokens, mask = 1 + tokens % 9, torch.ones_like(mask)
        logits = self.wrapped(tokens, mask, documents)
        apart = documents[:, 1:] != documents[:, :-1]
        left_out = (apart if self.trained == "documents" else mask[:, 1:] == 0) & (self.trained != "all")
        return F.cross_entropy(
            logits[:, :-1].flatten(0, 1), tokens[:, 1:].masked_fill(left_out, IGNORED).flatten()
        )


class PaddingCounts(Words):
    trained = "all"


class DividedByTheMask(Words):
    """The first token of a row is in the mask, and nothing gives it."""

    def own_loss(self, given):
        return super().own_loss(given) * given[1][:, 1:].sum() / given[1].sum()


class Documents(Words):
    trained = "documents"

    def made(self):
        return Causal(2)


class DocumentsMixed(Documents):
    def made(self):
        return Causal(1)


class LossAlone(Documents):
    """What the model returns is the cross-entropy of what its head returns."""

    apart = 2

    def made(self):
        return CausalLoss(self.apart)

    def own_loss(self, given):
        tokens, mask, documents = given
        labels = torch.cat([tokens[:, 1:], torch.zeros_like(tokens[:, :1])], 1)
        changes = torch.cat([documents[:, 1:] != documents[:, :-1], torch.ones_like(mask[:, :1]) == 1], 1)
        return self.wrapped(tokens, torch.ones_like(mask), documents, labels.masked_fill(changes, IGNORED))


class LossAloneMixed(LossAlone):
    apart = 1


class LossAloneNotShifted(LossAlone):
    def own_loss(self, given):
        tokens, mask, documents = given
        return self.wrapped(tokens, torch.ones_like(mask), documents, tokens)


class DocumentsMixedElsewhere(DocumentsMixed):
    """They begin elsewhere in each row, and one row has one alone."""

    def sample(self, generator):
        tokens, mask, _ = super().sample(generator)
        return tokens, mask, (torch.arange(8) > torch.tensor([3, 2, 8, 1])[:, None]).long()


class Scores(Words):
    """A score of each row, which is that of its last token."""

    def own_loss(self, given):
        tokens, mask, documents = given
        scores = self.wrapped(tokens, mask, documents)[..., 0].gather(1, self.last(mask)[:, None])
        return -F.logsigmoid(scores[:2] - scores[2:]).mean()

    def last(self, mask):
        return mask.sum(1) - 1


class ScoresOfPadding(Scores):
    def last(self, mask):
        return torch.full((4,), 7)


class Causal(nn.Module):
    """Running means over the tokens before, of one document in the first `apart` layers."""

    def __init__(self, apart=0):
        super().__init__()
        self.apart, self.embedding = apart, nn.Embedding(11, 8)
        self.layers, self.head = nn.ModuleList(nn.Linear(8, 8) for _ in range(2)), nn.Linear(8, 11)

    def forward(self, tokens, mask, documents):
        hidden = self.embedding(tokens)
        for number, layer in enumerate(self.layers):
            seen = (torch.ones(8, 8).tril() * mask[:, None]).to(hidden.dtype)
            if number < self.apart:
                seen = seen * (documents[:, None] == documents[..., None])
            hidden = hidden + torch.tanh(layer(seen @ hidden / seen.sum(-1, keepdim=True)))
        return self.head(hidden)


class CausalLoss(Causal):
    def forward(self, tokens, mask, documents, labels):
        logits = super().forward(tokens, mask, documents)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


class MeanTeacher(Own):
    """A cross-entropy and a distillation from an average of the weights, which is all but the model: less than a thousandth of the gradient."""

    def made(self):
        return nn.Linear(6, 40)

    def sample(self, generator):
        return vectors(generator), classes(generator, 40)

    def wrap(self, net):
        self.teacher = copy.deepcopy(net)
        return super().wrap(net)

    def own_loss(self, given):
        values, labels = given
        own, other = self.wrapped(values), self.teacher(values).detach()
        apart = F.kl_div(own.log_softmax(-1), other.log_softmax(-1), log_target=True, reduction="batchmean")
        return F.cross_entropy(own, labels) + apart

    def after(self):
        with torch.no_grad():
            for one, own in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
                one.lerp_(own, 0.1)


class ReducedInBfloat16(Own):
    """As FSDP2 does where it computes in bfloat16. One row of the table is used once: its own gradient has no rounding error."""

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)

    def made(self):
        return nn.Sequential(nn.Embedding(12, 8), nn.Linear(8, 3))

    def sample(self, generator):
        return torch.randperm(12, generator=generator)[:4], classes(generator, 3)

    def wrap(self, net):
        return fully_shard(net, mp_policy=self.policy)

    def own_loss(self, given):
        return F.cross_entropy(self.wrapped(given[0]).float(), given[1])


class ReducedInBfloat16ByHand(ReducedInBfloat16):
    """Where FSDP2 was told to reduce in float32, so that it is a bug."""

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    def reduce(self):
        for one in self.net.parameters():
            own = one.grad.to_local()
            own.copy_((own * 1.01).bfloat16())


class AdversaryEachTime(Adversary):
    """Gradients are accumulated while the other model is trained after each micro batch."""

    micro = 3


class AdversaryEachTimeSummed(AdversaryEachTime):
    def reduce(self):
        for one in self.net.parameters():
            one.grad *= self.world


class DrawnElsewhere(Own):
    """Layers are scaled by Python's generator, and numpy's makes noise."""

    def made(self):
        random.seed(self.rank)
        np.random.seed(self.rank)
        return Dropped()


class Dropped(Heads):
    factor = 1.0

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Jittered(8, 8) for _ in range(2))

    def forward(self, values):
        inside = torch.tanh(self.body(values)) * self.factor
        for layer in self.layers:
            inside = layer(inside)
        return self.one(inside), self.two(inside)


class Jittered(nn.Linear):
    def forward(self, values):
        noise = torch.from_numpy(np.random.randn(8)).to(values.dtype)
        return (
            super().forward(values) * noise * torch.full((8,), random.uniform(0.5, 1.5), dtype=values.dtype)
        )


class DroppedApart(Own):
    """Both ranks have the same samples, and each drops other elements."""

    def made(self):
        return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3))

    def batch(self, number):
        torch.manual_seed(10 * number + self.rank)
        return self.sample(torch.Generator().manual_seed(number))

    def own_loss(self, given):
        return F.cross_entropy(self.wrapped(given[0]), given[1])


class DroppedAsMeant(DroppedApart):
    def batch(self, number):
        super().batch(number)
        return Own.batch(self, number)


class CheckpointsDropout(DroppedAsMeant):
    """What is computed again in the backward pass has the elements that were dropped before."""

    keeps = True

    def made(self):
        return Again(self.keeps)


class Again(nn.Module):
    def __init__(self, keeps):
        super().__init__()
        self.keeps, self.head = keeps, nn.Linear(8, 3)
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 8))

    def forward(self, values):
        return self.head(checkpoint(self.body, values, use_reentrant=False, preserve_rng_state=self.keeps))


class CheckpointDropsOthers(CheckpointsDropout):
    keeps = False


class DrawnOnOneRank(DrawnElsewhere):
    def made(self):
        net = super().made()
        net.factor = 1.0 + self.rank
        return net


class KeepsKeys(Right):
    """Documents that position_ids tell apart, in a model that keeps keys and values: transformers does not look for them then."""

    LOSS, kept = None, True

    def loss(self, given, tokens):
        places = torch.arange(given["labels"].shape[1]) % 12
        inputs = {"input_ids": given["input_ids"], "labels": given["labels"]}
        inputs["position_ids"] = places.expand_as(given["labels"])
        return self.wrapped(**inputs, num_items_in_batch=tokens, use_cache=self.kept).loss * self.shares


class KeepsNone(KeepsKeys):
    kept = False


class Late(Own):
    """Each update has the gradient of the step before."""

    last = None

    def reduce(self):
        own = [one.grad.clone() for one in self.net.parameters()]
        for one, before in zip(self.net.parameters(), self.last or own, strict=True):
            one.grad = before.clone()
        self.last = own


class SkippedOnOneRank(StepSkipped):
    def update(self):
        if self.step or self.rank == 0:
            Own.update(self)


class ScaledOnOneRank(Own):
    def reduce(self):
        for one in self.net.parameters():
            one.grad *= 1 + 0.5 * self.rank


class OneScaledThenClipped(Own):
    bound = 0.05

    def reduce(self):
        self.net.body.weight.grad *= 1 + 0.5 * self.rank


class CutOnOneRank(Own):
    def reduce(self):
        for one in self.net.parameters():
            one.grad.clamp_(max=(1.0, 0.1)[self.rank])


class ReducedFirstAlone(Own):
    """The micro batches after the first are not reduced."""

    bound = 0.5

    def context(self, number):
        return self.wrapped.no_sync() if number else contextlib.nullcontext()


class BoundByRank(Own):
    def clip(self):
        clip_grad_norm_(self.net.parameters(), 0.1)
        clip_grad_norm_(self.net.parameters(), (0.05, 0.02)[self.rank])


class BesideApartClipped(ClippedTogether):
    """The norms differ, as the other parameter's gradient does."""

    def reduce(self):
        pass


class CopiesOfOnes(CopiesWithGradients):
    """Half an ulp of a norm's weight is more than it moves."""

    def made(self):
        return nn.Sequential(nn.LayerNorm(6), Heads()).bfloat16()

    def make_optimizer(self):
        super().make_optimizer()
        return torch.optim.AdamW(self.copies, lr=1e-3)


class OneCopyLeft(CopiesWithGradients):
    def update(self):
        before = self.net.one.bias.clone()
        super().update()
        with torch.no_grad():
            self.net.one.bias.copy_(before)


class ZerosOnOneRank(OneHeadUnused):
    """Its optimizer's weight decay moves what others leave."""

    def reduce(self):
        for one in self.net.two.parameters():
            one.grad = torch.zeros_like(one) if self.rank else None


class HookOnAWeight(Own):
    def wrap(self, net):
        net.one.weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
        return super().wrap(net)


class RowsNotSummed(OnShards):
    """Each rank has its part of a sum over the columns of the matrix that it has."""

    def made(self):
        return nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))

    def wrap(self, net):
        mesh = init_device_mesh("cpu", (2,))
        return parallelize_module(net, mesh, {"1": ColwiseParallel(), "3": NotSummed()})

    def batch(self, number):
        return self.sample(torch.Generator().manual_seed(number))

    def make_optimizer(self):
        return torch.optim.SGD(self.net.parameters(), lr=0.1, foreach=False)


class NotSummed(RowwiseParallel):
    @staticmethod
    def _prepare_output_fn(output_layouts, use_local_output, mod, outputs, device_mesh):
        return outputs.to_local()


class ShardReturned(RowsNotSummed):
    """The loop is given a rank's own classes."""

    def made(self):
        return nn.Sequential(nn.Linear(6, 4))

    def wrap(self, net):
        return parallelize_module(
            net, init_device_mesh("cpu", (2,)), {"0": ColwiseParallel(output_layouts=Shard(-1))}
        )

    def own_loss(self, given):
        return self.wrapped(given[0]).square().mean()


class AdapterByRank(Own):
    """Another part of the model is frozen on each rank."""

    def made(self):
        return nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))

    def wrap(self, net):
        net[self.rank].requires_grad_(False)
        return net

    def own_loss(self, given):
        return F.cross_entropy(self.wrapped(given[0]), given[1])


class LabelledByTheClasses(Labelled):
    """As reduction="mean" of torch.nn.functional.kl_div divides."""

    factor = 1 / 7


class LabelledByTheLast(LabelledTwice):
    """Divided by the tokens of the last micro batches alone."""

    factor = 1.0

    def batch(self, number):
        ids, labels = super().batch(number)
        labels[:, : number % self.micro] = IGNORED
        return ids, labels

    def tokens(self, window):
        return super().tokens(window[-1:])


class OwnExperts(Own):
    """Each rank has an expert of its own, by its number in the whole."""

    def made(self):
        return Expert(self.rank)

    def wrap(self, net):
        return net


class Expert(Heads):
    def __init__(self, number):
        super().__init__()
        self.experts = nn.ModuleDict({str(number): nn.Linear(6, 6)})

    def forward(self, values):
        (expert,) = self.experts.values()
        return super().forward(expert(values))


class Chunked(Own):
    """As torchtune: logits in chunks of tokens, sums over tokens, and gradients that are divided by all tokens after the backward pass."""

    def made(self):
        return InChunks()

    def sample(self, generator):
        ids, labels = classes(generator, 7, (4, 6)), classes(generator, 7, (4, 6))
        labels[: 1 + self.rank] = IGNORED
        labels[:, :2] = IGNORED  # no token of the first chunk counts
        return ids, labels

    def loss(self, given, tokens):
        ids, labels = given
        chunks = zip(self.wrapped(ids), labels.chunk(3, 1), strict=True)
        return sum(F.cross_entropy(one.flatten(0, 1), of.flatten(), reduction="sum") for one, of in chunks)

    def tokens_of_all(self):
        return self.micro * 4 * (3 + 2)

    def reduce(self):
        for one in self.net.parameters():
            one.grad *= self.world / self.tokens_of_all()


class ChunkedOfOneRank(Chunked):
    """The tokens of the other ranks are not counted."""

    def tokens_of_all(self):
        return self.micro * 4 * 3


class InChunks(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(7, 8), nn.Linear(8, 7)

    def forward(self, ids):
        return [self.head(one) for one in self.embedding(ids).chunk(3, 1)]


class TwoAlike(Own):
    """Two heads of as many classes, whose losses are summed: they are no chunks of one tensor."""

    def made(self):
        return AlikeHeads()

    def sample(self, generator):
        return classes(generator, 7, (4, 6)), classes(generator, 3, (4, 6)), classes(generator, 3, (4, 6))

    def own_loss(self, given):
        ids, *labels = given
        both = zip(self.wrapped(ids), labels, strict=True)
        return sum(F.cross_entropy(one.flatten(0, 1), of.flatten()) for one, of in both)


class AlikeHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.one, self.two = nn.Embedding(7, 8), nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, ids):
        inside = self.embedding(ids)
        return self.one(inside), self.two(inside)


class Argument(NamedTuple):
    name: str
    kind: Any
    default: Any


class KeepsItsArguments(Own):
    """As PyTorch Geometric's layers, and those of x-transformers keep which kernels they may take."""

    def made(self):
        return Inspected()


class KeepsItsArgumentsScaled(KeepsItsArguments):
    def reduce(self):
        self.net.one.weight.grad *= 1.5


class Inspected(Heads):
    def __init__(self):
        super().__init__()
        self.arguments = {"values": Argument("values", torch.Tensor | None, inspect.Parameter.empty)}
        self.kernels = [SDPBackend.MATH]

    def forward(self, values):
        (argument,) = self.arguments.values()
        assert argument.kind == torch.Tensor | None and argument.default is inspect.Parameter.empty
        with sdpa_kernel(self.kernels):
            return super().forward(values)


class PlacesScaled(Own):
    """The model has no more places than a row has tokens, so ranks cannot have pieces of longer rows."""

    def made(self):
        return Placed()

    def wrap(self, net):
        net.places.forward = lambda at: 0.9 * F.embedding(at, net.places.weight)
        return super().wrap(net)

    def sample(self, generator):
        return classes(generator, 7, (4, 6)), classes(generator, 7, (4, 6))

    def own_loss(self, given):
        return F.cross_entropy(self.wrapped(given[0]).flatten(0, 1), given[1].flatten())


class Placed(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places, self.head = nn.Embedding(7, 8), nn.Embedding(6, 8), nn.Linear(8, 7)

    def forward(self, ids):
        return self.head(self.tokens(ids) + self.places(torch.arange(ids.shape[1])))


class GradientOfABuffer(Own):
    """As vector-quantize-pytorch begins its losses: with a buffer of zero that requires a gradient."""

    def made(self):
        return FromZero()

    def own_loss(self, given):
        (first, second), penalty = self.wrapped(given[0])
        return F.cross_entropy(first, given[1]) + F.cross_entropy(second, given[2]) + penalty


class GradientOfABufferScaled(GradientOfABuffer):
    def reduce(self):
        self.net.one.weight.grad *= 1.5


class FromZero(Heads):
    def __init__(self):
        super().__init__()
        self.register_buffer("zero", torch.tensor(0.0))

    def forward(self, values):
        found = super().forward(values)
        return found, self.zero.requires_grad_() + found[0].square().mean()


class Summing(nn.Module):
    """Returns the sum over its tokens; a label of -1 counts for none."""

    def __init__(self):
        super().__init__()
        self.tokens, self.head = nn.Embedding(7, 8), nn.Linear(8, 7)

    def forward(self, ids, labels):
        logits = self.head(self.tokens(ids))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-1, reduction="sum")


class SumOfTheModel(Own):
    """As nanochat's `loss_reduction="sum"`: the loop divides by the tokens of the global batch."""

    made = Summing

    def sample(self, generator):
        ids, labels = classes(generator, 7, (4, 6)), classes(generator, 7, (4, 6))
        labels[:, : 1 + 2 * self.rank] = -1
        return ids, labels

    def tokens(self, window):
        count = torch.tensor(sum(int((labels != -1).sum()) for _, labels in window))
        dist.all_reduce(count)
        return int(count)

    def loss(self, given, tokens):
        return self.wrapped(*given) * self.world / tokens


class SumAsItIs(SumOfTheModel):
    """What one process trains on that steps by the sum."""

    def loss(self, given, tokens):
        return self.wrapped(*given) * self.world


class SumAveraged(SumOfTheModel):
    def loss(self, given, tokens):
        return self.wrapped(*given)


class SumOfTheModelHalved(SumOfTheModel):
    def loss(self, given, tokens):
        return self.wrapped(*given) / tokens


class GivesATable(nn.Module):
    """Gives its blocks a table in float32, as of rotary embeddings."""

    def __init__(self):
        super().__init__()
        self.tokens, self.head = nn.Embedding(12, 8), nn.Linear(8, 3)
        self.blocks = nn.ModuleList([TakesATable(), TakesATable()])
        self.register_buffer("table", torch.linspace(0, 1, 8))

    def forward(self, ids):
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x, table=self.table)
        return self.head(x)


class TakesATable(nn.Module):
    def __init__(self):
        super().__init__()
        self.inside = nn.Linear(8, 8)

    def forward(self, x, *, table):
        return x + torch.tanh(self.inside(x + table))


class CastsForBlocks(ReducedInBfloat16):
    """FSDP2 casts what each block is called with, not only what the model is."""

    made = GivesATable

    def wrap(self, net):
        for block in net.blocks:
            fully_shard(block, mp_policy=self.policy)
        return super().wrap(net)


class PolicyOfEachModule(CastsForBlocks):
    """The head and a block compute in float32, the rest in bfloat16. That block returns bfloat16."""

    def wrap(self, net):
        single = {"param_dtype": torch.float32, "reduce_dtype": torch.float32}
        fully_shard(net.head, mp_policy=MixedPrecisionPolicy(**single))
        fully_shard(net.blocks[0], mp_policy=MixedPrecisionPolicy(**single, output_dtype=torch.bfloat16))
        for block in net.blocks[1:]:
            fully_shard(block, mp_policy=self.policy)
        return ReducedInBfloat16.wrap(self, net)


class BlocksReducedInBfloat16(ReducedInBfloat16):
    """Most gradients are rounded, and with them the weights of the losses that they show. Those of the head and the table are not."""

    made = GivesATable

    def wrap(self, net):
        for block in net.blocks:
            fully_shard(block, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16))
        return fully_shard(net)


class BlocksReducedInBfloat16Scaled(BlocksReducedInBfloat16):
    def reduce(self):
        for one in self.net.head.parameters():
            one.grad *= 1.0003


class PolicyOfEachModuleRounded(PolicyOfEachModule):
    """The gradient of what computes in float32 is rounded."""

    def reduce(self):
        for one in self.net.head.parameters():
            own = one.grad.to_local()
            own.copy_(own.bfloat16())


class CastsForBlocksScaled(CastsForBlocks):
    def reduce(self):
        for one in self.net.blocks[1].parameters():
            one.grad *= 1.5
