"""Loops whose optimizer is none of torch's: small versions of published ones, and bugs in what a loop does with them."""

import record_strangers
import torch
import transformers
from accelerate import Accelerator
from record_strangers import Own
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


def run(folder, steps):
    record_strangers.run(folder, steps, globals())


# Optimizers.


class Lion(torch.optim.Optimizer):
    """Chen et al. 2023, arXiv 2302.06675. `foreach` adds up in another order than the loop."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1, foreach=False):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "foreach": foreach})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            (one, two), rate = group["betas"], group["lr"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                average = state["exp_avg"]
                p.mul_(1 - rate * group["weight_decay"])
                if group["foreach"]:
                    p.add_(torch.lerp(p.grad, average, one).sign_(), alpha=-rate)
                else:
                    p.add_((one * average + (1 - one) * p.grad).sign_(), alpha=-rate)
                average.mul_(two).add_(p.grad, alpha=1 - two)


class ScheduleFree(torch.optim.Optimizer):
    """Defazio et al. 2024, arXiv 2405.15682: with SGD. The group has how many steps there were, and the sum of their weights."""

    def __init__(self, params, lr=0.1, momentum=0.9, warmup=3):
        super().__init__(
            params, {"lr": lr, "momentum": momentum, "warmup": warmup, "k": 0, "weight_sum": 0.0}
        )

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            rate = group["lr"] * min(1.0, (group["k"] + 1) / group["warmup"])
            group["weight_sum"] += rate**2
            share = rate**2 / group["weight_sum"]
            for p in group["params"]:
                z = self.state[p].setdefault("z", p.detach().clone())
                p.lerp_(z, share).add_(p.grad, alpha=rate * (group["momentum"] * (1 - share) - 1))
                z.sub_(p.grad, alpha=rate)
            group["k"] += 1


class Lamb(torch.optim.Optimizer):
    """You et al. 2020, arXiv 1904.00962, with NVIDIA's clipping by the norm of all gradients; the steps are counted in an attribute."""

    def __init__(self, params, lr=1e-2, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.01, bound=0.05):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.bound, self.steps = bound, 0

    @torch.no_grad()
    def step(self):
        self.steps += 1
        every = [p.grad for group in self.param_groups for p in group["params"]]
        norm = torch.stack([one.norm() for one in every]).norm()
        divisor = torch.clamp(norm / self.bound, min=1.0)
        for group in self.param_groups:
            one, two = group["betas"]
            for p in group["params"]:
                state = self.state[p]
                m = state.setdefault("m", torch.zeros_like(p))
                v = state.setdefault("v", torch.zeros_like(p))
                g = p.grad / divisor
                m.mul_(one).add_(g, alpha=1 - one)
                v.mul_(two).addcmul_(g, g, value=1 - two)
                size = (v / (1 - two**self.steps)).sqrt() + group["eps"]
                update = m / (1 - one**self.steps) / size + group["weight_decay"] * p
                p.sub_(update * self.ratio(p, update), alpha=group["lr"])

    def ratio(self, p, update):
        return p.norm() / update.norm()


class Muon(torch.optim.Optimizer):
    """Jordan et al. 2024: the matrices by Newton-Schulz in bfloat16, the rest by Adam, told apart by an entry of the group."""

    def __init__(self, groups):
        for group in groups:
            group.update({"lr": 0.02, "momentum": 0.95} if group["use_muon"] else {"lr": 1e-3, "eps": 1e-8})
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if group["use_muon"]:
                    average = state.setdefault("momentum_buffer", torch.zeros_like(p))
                    average.lerp_(p.grad, 1 - group["momentum"])
                    update = orthogonal(p.grad.lerp(average, group["momentum"]))
                    p.add_(update.to(p.dtype), alpha=-group["lr"] * max(1, p.size(0) / p.size(1)) ** 0.5)
                else:
                    state["step"] = state.get("step", 0) + 1
                    v = state.setdefault("v", torch.zeros_like(p)).lerp_(p.grad.square(), 0.05)
                    right = 1 - 0.95 ** state["step"]
                    p.addcdiv_(p.grad, (v / right).sqrt() + group["eps"], value=-group["lr"])


@torch.compile(backend="aot_eager")
def orthogonal(gradient):
    x = gradient.bfloat16()
    x = x / (x.norm() + 1e-7)
    x = x.T if gradient.size(0) > gradient.size(1) else x
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.T if gradient.size(0) > gradient.size(1) else x


class Shampoo(torch.optim.Optimizer):
    """Gupta et al. 2018, arXiv 1802.09568: a list of matrices for each parameter, one for each dim."""

    def __init__(self, params, lr=0.1, eps=1e-3):
        super().__init__(params, {"lr": lr})
        self.eps = eps

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(step=0, of_dims=[self.eps * torch.eye(size) for size in p.shape])
                state["step"] += 1
                update = p.grad
                for dim, matrix in enumerate(state["of_dims"]):
                    flat = p.grad.movedim(dim, 0).flatten(1) if p.ndim > 1 else p.grad[:, None]
                    matrix.add_(flat @ flat.T)
                    values, vectors = torch.linalg.eigh(matrix)
                    root = vectors @ torch.diag(values.clamp(min=self.eps) ** (-1 / 2 / p.ndim)) @ vectors.T
                    update = torch.tensordot(root, update, dims=([1], [dim])).movedim(0, dim)
                p.sub_(update, alpha=group["lr"])


class Listed(torch.optim.Optimizer):
    """Momentum in a list beside the parameters, as in many a first optimizer, and sets of parameters by id."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, {"lr": lr})
        self.held = [p for group in self.param_groups for p in group["params"]]
        self.averages = [torch.zeros_like(p) for p in self.held]
        self.decayed = {id(p) for p in self.held if p.ndim > 1}

    @torch.no_grad()
    def step(self):
        for p, average in zip(self.held, self.averages, strict=True):
            average.mul_(0.9).add_(p.grad)
            if id(p) in self.decayed:
                p.mul_(0.99)
            p.sub_(average, alpha=self.param_groups[0]["lr"])


class Lookahead(torch.optim.Optimizer):
    """Zhang et al. 2019, arXiv 1907.08610, around another optimizer; it counts in a tensor."""

    def __init__(self, base, k=2, alpha=0.5):
        super().__init__(base.param_groups, {})
        self.base, self.k, self.alpha, self.count = base, k, alpha, torch.tensor(0)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["slow"] = p.detach().clone()

    @torch.no_grad()
    def step(self):
        self.base.step()
        self.count += 1
        if self.count % self.k == 0:
            for p, state in self.state.items():
                p.copy_(state["slow"].lerp_(p, self.alpha))


class Capped(torch.optim.AdamW):
    """torch's, and a largest norm of each parameter."""

    @torch.no_grad()
    def step(self, closure=None):
        loss = super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_((group["cap"] / p.norm()).clamp(max=1.0))
        return loss


class Rounded(torch.optim.Optimizer):
    """Adds noise of the size of the step."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad * torch.rand_like(p), alpha=group["lr"])


class Sharp(torch.optim.Optimizer):
    """Needs the loop's loss."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    def step(self, closure=None):
        assert closure is not None, "a closure is needed"
        with torch.enable_grad():
            closure()
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                p.sub_(p.grad, alpha=0.1)


# Right loops.


class WithLion(Own):
    kind, options = Lion, {}

    def make_optimizer(self):
        matrices = [p for p in self.net.parameters() if p.ndim > 1]
        others = [p for p in self.net.parameters() if p.ndim < 2]
        groups = [{"params": matrices, **self.options}, {"params": others, "lr": 3e-3}]
        return self.kind(groups)


class WithForeachLion(WithLion):
    options = {"foreach": True}


class LionOnShards(WithLion):
    def wrap(self, net):
        fully_shard(net.body)
        return fully_shard(net)


class WithTorchAdafactor(WithLion):
    kind = torch.optim.Adafactor


class WithAdafactor(WithLion):
    def make_optimizer(self):
        return transformers.Adafactor(self.net.parameters(), lr=None, relative_step=True, warmup_init=True)


class WithScheduleFree(WithLion):
    kind = ScheduleFree


class WithLamb(WithLion):
    kind = Lamb


class LambOnShards(LionOnShards):
    kind = Lamb


class WithMuon(WithLion):
    def make_optimizer(self):
        groups = [
            {"params": [p for p in self.net.parameters() if (p.ndim > 1) == use], "use_muon": use}
            for use in (True, False)
        ]
        return Muon(groups)


class WithShampoo(WithLion):
    kind = Shampoo


class WithListed(WithLion):
    kind = Listed


class WithLookahead(WithLion):
    def make_optimizer(self):
        return Lookahead(super().make_optimizer())


class WithCapped(WithLion):
    kind, options = Capped, {"cap": 0.5}

    def make_optimizer(self):
        return Capped([{"params": list(self.net.parameters()), "cap": 0.5}], lr=1e-3)


class Accelerated(WithLion):
    def make_optimizer(self):
        return Accelerator(cpu=True).prepare(super().make_optimizer())


class TurnedSigns(WithLion):
    """One element of each second gradient cancels what is kept of the first: its sign is that of rounding errors, which depend on the way to add up."""

    micro = 1

    def made(self):
        return Parts()

    def make_optimizer(self):
        return Lion([{"params": list(self.net.parameters()), "foreach": True}])

    def sample(self, generator):
        values = torch.randn(4, 40, 8, generator=generator)
        values[..., 0] = torch.randn(4, 40, generator=torch.Generator().manual_seed(self.rank))
        return (values,)

    def own_loss(self, given):
        return (-0.09 if self.step else 1.0) * self.wrapped(*given).sum()


class Parts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = torch.nn.ModuleList(torch.nn.Linear(8, 1, bias=False) for _ in range(40))

    def forward(self, values):
        return sum(part(values[:, number]) for number, part in enumerate(self.parts))


# Wrong ones. The reference is the class itself, so these are of what is not in its step as one process makes it.


class WrongForeach(WithLion):
    """Another way to compute the same has the second beta for the first."""

    def make_optimizer(self):
        return ForeachWrong([{"params": list(self.net.parameters()), "foreach": True}])


class ForeachWrong(Lion):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            if group["foreach"]:
                group["betas"] = group["betas"][::-1]
        super().step()


class RatioOfShards(LambOnShards):
    def make_optimizer(self):
        return LambOfShards(self.net.parameters())


class LambOfShards(Lamb):
    def ratio(self, p, update):
        if isinstance(p, DTensor):
            p, update = p.to_local(), update.to_local()
        return super().ratio(p, update)


class MovedInHook(WithLion):
    def make_optimizer(self):
        optimizer = super().make_optimizer()
        optimizer.register_step_post_hook(self.change)
        return optimizer

    def change(self, optimizer, *_):
        with torch.no_grad():
            for one in optimizer.param_groups[1]["params"]:
                one.mul_(1.01)


class StateReset(WithLamb):
    def after(self):
        self.optimizer.state.clear()


class CountReset(WithScheduleFree):
    def after(self):
        self.optimizer.param_groups[0]["k"] = 0


class AttributeReset(WithLamb):
    def after(self):
        self.optimizer.steps = 0


class LowState(WithLion):
    """To save memory, without the class."""

    def make_optimizer(self):
        optimizer = super().make_optimizer()
        optimizer.register_step_post_hook(self.save)
        return optimizer

    def save(self, optimizer, *_):
        for state in optimizer.state.values():
            state["exp_avg"] = state["exp_avg"].bfloat16()


class SignsApart(WithLion):
    """Not what rounding errors turn: the largest elements of one matrix go the other way."""

    def make_optimizer(self):
        optimizer = super().make_optimizer()
        optimizer.register_step_post_hook(self.turn)
        return optimizer

    def turn(self, *_):
        with torch.no_grad():
            self.net.body.weight[0, 0] += 2e-3 * self.net.body.weight.grad[0, 0].sign()


# What one process cannot step.


class WithRounded(WithLion):
    kind = Rounded


class WithSharp(Own):
    def make_optimizer(self):
        return Sharp(self.net.parameters())

    def update(self):
        self.optimizer.step(lambda: None)


class EightBits(WithLion):
    """What it keeps has 8 bits, so its step has no float64."""

    def make_optimizer(self):
        import bitsandbytes

        return bitsandbytes.optim.AdamW8bit(self.net.parameters(), min_8bit_size=1)


class Inside(WithLion):
    def make_optimizer(self):
        class Own(Lion):
            pass

        return Own(self.net.parameters())
