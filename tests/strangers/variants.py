"""Strategies of users that compute the same by other conventions, kernels and optimizers: each must PASS.

python run_verification.py --strategies ddp,tests/strangers/variants.py:ForeachAdamW --output_dir runs/stranger

`VARIANTS` has the flags of each; benchmarks/strangers.py trains those with the same flags together.
"""

import copy
import functools
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW
from transformers import AttentionInterface

from lockstep.plan import strategies
from lockstep.training.torch_strategy import TorchStrategy

BUGS = Path(__file__).with_name("bugs.py")
# No wrapper: each parameter's hook sums its gradient over dp, then divides.
Hooks = strategies.load(f"{BUGS}:Hooks")
# Megatron's f and g.
Identity, Sum = strategies.load(f"{BUGS}:Identity"), strategies.load(f"{BUGS}:Sum")


class Variant(NamedTuple):
    """How a variant is trained."""

    flags: tuple[str, ...] = ()


class DDP(TorchStrategy):
    """DistributedDataParallel."""

    axes = ("dp",)
    options: dict = {}

    def parallelize(self, model, device_mesh):
        self.change(model)
        group = device_mesh["dp"].get_group()
        return DistributedDataParallel(model, process_group=group, **self.options)

    def change(self, model):
        """What a variant does to the model first."""


# Losses


class OwnCrossEntropy(DDP):
    """`loss` from the logits, with F.cross_entropy."""

    def loss(self, input_ids, labels):
        logits = self.wrapped(input_ids=input_ids, labels=labels, use_cache=False).logits
        return self.of(logits.float().flatten(0, 1), labels.flatten())

    def of(self, logits, labels):
        return F.cross_entropy(logits, labels)


class CountedCrossEntropy(OwnCrossEntropy):
    """The same, and `num_tokens` is set as the base's `loss` does."""

    def loss(self, input_ids, labels):
        self.num_tokens = labels.numel()
        return super().loss(input_ids, labels)


class ChunkedCrossEntropy(CountedCrossEntropy):
    """Cross-entropy of 100 tokens at a time."""

    def of(self, logits, labels):
        parts = zip(logits.split(100), labels.split(100), strict=True)
        return torch.stack([F.cross_entropy(*part, reduction="sum") for part in parts]).sum() / len(labels)


class SumOverTokens(CountedCrossEntropy):
    """The sum over tokens, divided by their number."""

    def of(self, logits, labels):
        return F.cross_entropy(logits, labels, reduction="sum") / labels.numel()


class LogSoftmaxGather(CountedCrossEntropy):
    """log_softmax and gather."""

    def of(self, logits, labels):
        return -logits.log_softmax(-1).gather(1, labels[:, None]).mean()


class LogitsSkipped(Hooks):
    """Cross-entropy of 16 tokens at a time from the head's weight, as kernels without logits do: the head is not called."""

    def loss(self, input_ids, labels):
        hidden = self.wrapped.model(input_ids=input_ids, use_cache=False).last_hidden_state.flatten(0, 1)
        parts = zip(hidden.split(16), labels.flatten().split(16), strict=True)
        logits = ((F.linear(part, self.wrapped.lm_head.weight), of) for part, of in parts)
        return (
            torch.stack([F.cross_entropy(*part, reduction="sum") for part in logits]).sum() / labels.numel()
        )


class LogitsSkippedAndScaled(LogitsSkipped):
    """The same under a loss scale that is taken off the gradients again."""

    def loss(self, input_ids, labels):
        return super().loss(input_ids, labels) * 4096

    def forward_backward(self, micro_batches):
        mean = super().forward_backward(micro_batches)
        for parameter in self.parameters:
            parameter.grad.div_(4096)
        return mean / 4096


class OwnedByTurns(Hooks):
    """Each rank names all tensors, and holds every other one of them whole."""

    def held(self, kind):
        for number, (name, local, full, start) in enumerate(super().held(kind)):
            yield name, local if number % 2 == self.dp else local[:0], full, start


class InHalves(Hooks):
    """The loss of a micro batch is the mean of those of its two halves, each by the base's `loss`."""

    def loss(self, input_ids, labels):
        halves = zip(input_ids.chunk(2), labels.chunk(2), strict=True)
        return torch.stack([super(InHalves, self).loss(*half) for half in halves]).mean()


class LookedAtBefore(DDP):
    """A pass without gradients over the same samples before each micro batch, as for old log-probabilities."""

    def loss(self, input_ids, labels):
        with torch.no_grad():
            self.model(input_ids=input_ids, use_cache=False)
        return super().loss(input_ids, labels)


class ValidatedInTheStep(DDP):
    """A pass without gradients over other samples after the backward passes. Checkpointing of layers is reentrant."""

    def change(self, model):
        model.gradient_checkpointing_enable({"use_reentrant": True})

    def forward_backward(self, micro_batches):
        loss = super().forward_backward(micro_batches)
        with torch.no_grad(), self.config.autocast(self.device):
            self.model.model(input_ids=micro_batches[0][0].flip(1), use_cache=False)
        return loss


class TokensCountedOverRanks(CountedCrossEntropy):
    """The sum over tokens, divided by their number on all ranks and multiplied by dp, because DDP averages."""

    def of(self, logits, labels):
        number = torch.tensor(float(labels.numel()))
        dist.all_reduce(number)
        return F.cross_entropy(logits, labels, reduction="sum") * dist.get_world_size() / number


# Micro batches and scales


class DividedAfterSum(DDP):
    """Backward of each micro batch's whole loss; the sum is divided by their number afterwards."""

    def forward_backward(self, micro_batches):
        self.optimizer.zero_grad()
        losses = []
        for number, (input_ids, labels) in enumerate(micro_batches, 1):
            self.wrapped.require_backward_grad_sync = number == len(micro_batches)
            loss = self.loss(input_ids, labels)
            loss.backward()
            losses.append(loss.detach())
        for parameter in self.parameters:
            parameter.grad /= len(micro_batches)
        self.num_micro_batches = len(micro_batches)
        return torch.stack(losses).mean()


class LossScale(DDP):
    """The loss is multiplied by 1024 before backward; the gradients are divided by it before they are used."""

    def forward_backward(self, micro_batches):
        self.optimizer.zero_grad()
        losses = []
        for number, (input_ids, labels) in enumerate(micro_batches, 1):
            self.wrapped.require_backward_grad_sync = number == len(micro_batches)
            loss = self.loss(input_ids, labels)
            (loss * 1024 / len(micro_batches)).backward()
            losses.append(loss.detach())
        for parameter in self.parameters:
            parameter.grad /= 1024
        self.num_micro_batches = len(micro_batches)
        return torch.stack(losses).mean()


class SyncEveryMicroBatch(DDP):
    """No no_sync: gradients are averaged in every micro batch."""

    def _reducing(self, last):
        return torch.enable_grad()


class Float64Buffer(DDP):
    """Gradients of micro batches are added up in float64 and averaged in float64."""

    def parallelize(self, model, device_mesh):
        self.group = device_mesh["dp"].get_group()
        return model

    def forward_backward(self, micro_batches):
        sums = [torch.zeros_like(parameter, dtype=torch.float64) for parameter in self.parameters]
        losses = []
        for input_ids, labels in micro_batches:
            self.optimizer.zero_grad()
            loss = self.loss(input_ids, labels)
            (loss / len(micro_batches)).backward()
            losses.append(loss.detach())
            for total, parameter in zip(sums, self.parameters, strict=True):
                total += parameter.grad
        for total, parameter in zip(sums, self.parameters, strict=True):
            dist.all_reduce(total, group=self.group)
            parameter.grad = (total / dist.get_world_size(self.group)).float()
        self.num_micro_batches = len(micro_batches)
        return torch.stack(losses).mean()


class ZeroGradKeepsTensors(DDP):
    """zero_grad(set_to_none=False)."""

    def forward_backward(self, micro_batches):
        self.optimizer.zero_grad = functools.partial(
            type(self.optimizer).zero_grad, self.optimizer, set_to_none=False
        )
        return super().forward_backward(micro_batches)


# DDP's options, and reductions of one's own


class SmallBuckets(DDP):
    """Buckets of 10 KB."""

    options = {"bucket_cap_mb": 0.01}


class StaticGraph(DDP):
    """static_graph."""

    options = {"static_graph": True}


class BucketViews(DDP):
    """gradient_as_bucket_view and find_unused_parameters."""

    options = {"gradient_as_bucket_view": True, "find_unused_parameters": True}


class SumHook(DDP):
    """A communication hook that sums, then divides."""

    def parallelize(self, model, device_mesh):
        wrapped = super().parallelize(model, device_mesh)

        def hook(group, bucket):
            work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
            return work.get_future().then(lambda done: done.value()[0] / dist.get_world_size(group))

        wrapped.register_comm_hook(wrapped.process_group, hook)
        return wrapped


class DivideThenSum(Hooks):
    """Divided first, then summed."""

    def reduce(self, parameter):
        parameter.grad /= dist.get_world_size(self.group)
        dist.all_reduce(parameter.grad, group=self.group)


class ReducedInFloat64(Hooks):
    """Gradients are cast to float64, averaged and cast back."""

    def reduce(self, parameter):
        wide = parameter.grad.double()
        dist.all_reduce(wide, group=self.group)
        parameter.grad.copy_(wide / dist.get_world_size(self.group))


class ScatterAndGather(TorchStrategy):
    """One flat gradient, exchanged in shards, summed and gathered, instead of an all-reduce."""

    axes = ("dp",)

    def parallelize(self, model, device_mesh):
        self.group = device_mesh["dp"].get_group()
        return model

    def forward_backward(self, micro_batches):
        loss = super().forward_backward(micro_batches)
        size = dist.get_world_size(self.group)
        flat = torch.cat([parameter.grad.flatten() for parameter in self.parameters])
        padded = F.pad(flat, (0, -len(flat) % size))
        received = torch.empty_like(padded)
        dist.all_to_all_single(received, padded, group=self.group)
        own = received.view(size, -1).sum(0) / size
        parts = [torch.empty_like(own) for _ in range(size)]
        dist.all_gather(parts, own, group=self.group)
        flat = torch.cat(parts)[: len(flat)]
        sizes = [parameter.numel() for parameter in self.parameters]
        for parameter, part in zip(self.parameters, flat.split(sizes), strict=True):
            parameter.grad.copy_(part.view_as(parameter))
        return loss


class FlatParameter(Hooks):
    """All parameters, and all gradients, are views of one flat tensor; one all-reduce."""

    def parallelize(self, model, device_mesh):
        self.group = device_mesh["dp"].get_group()
        parameters = list(model.parameters())
        flat = torch.cat([parameter.detach().flatten() for parameter in parameters])
        self.flat_gradient = torch.zeros_like(flat)
        sizes = [parameter.numel() for parameter in parameters]
        for parameter, part, gradient in zip(
            parameters, flat.split(sizes), self.flat_gradient.split(sizes), strict=True
        ):
            parameter.data = part.view_as(parameter)
            parameter.grad = gradient.view_as(parameter)
        return model

    def forward_backward(self, micro_batches):
        self.optimizer.zero_grad = self.flat_gradient.zero_
        loss = super().forward_backward(micro_batches)
        dist.all_reduce(self.flat_gradient, group=self.group)
        self.flat_gradient /= dist.get_world_size(self.group)
        return loss


# Optimizers


class OwnOptimizer(DDP):
    """`self.optimizer` is built again by `build`."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        matrices = [p for p in self.parameters if p.ndim > 1]
        vectors = [p for p in self.parameters if p.ndim == 1]
        self.optimizer = self.build(
            [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}],
            self.config.learning_rate,
        )

    def build(self, groups, rate):
        raise NotImplementedError


class ForeachAdamW(OwnOptimizer):
    """foreach, not fused."""

    def build(self, groups, rate):
        return AdamW(groups, lr=rate, foreach=True)


class ForLoopAdamW(OwnOptimizer):
    """A for loop, not fused."""

    def build(self, groups, rate):
        return AdamW(groups, lr=rate, foreach=False, fused=False)


class NoAmsGradAdamW(OwnOptimizer):
    """Fused, with amsgrad=False, eps and betas spelt out, vectors first."""

    def build(self, groups, rate):
        return AdamW(
            groups[::-1], lr=rate, betas=(0.9, 0.999), eps=1e-8, amsgrad=False, maximize=False, fused=True
        )


class TensorRateAdamW(OwnOptimizer):
    """The learning rate is a tensor, as a compiled step needs it."""

    def build(self, groups, rate):
        return AdamW(groups, lr=torch.tensor(rate), fused=True)


class DecoupledAdam(OwnOptimizer):
    """Adam with decoupled_weight_decay, which AdamW is."""

    def build(self, groups, rate):
        return torch.optim.Adam(groups, lr=rate, decoupled_weight_decay=True, fused=True)


class AdamWByHand(torch.optim.Optimizer):
    """AdamW written out."""

    def __init__(self, groups, lr):
        super().__init__(groups, {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state.update(
                        step=0,
                        exp_avg=torch.zeros_like(parameter),
                        exp_avg_sq=torch.zeros_like(parameter),
                    )
                state["step"] += 1
                (beta, gamma), number = group["betas"], state["step"]
                m, v = state["exp_avg"], state["exp_avg_sq"]
                m.mul_(beta).add_(parameter.grad, alpha=1 - beta)
                v.mul_(gamma).addcmul_(parameter.grad, parameter.grad, value=1 - gamma)
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                corrected = (v / (1 - gamma**number)).sqrt_().add_(group["eps"])
                parameter.addcdiv_(m, corrected, value=-group["lr"] / (1 - beta**number))


class OwnAdamW(OwnOptimizer):
    """AdamW written out, by the user."""

    def build(self, groups, rate):
        return AdamWByHand(groups, rate)


class GroupOfEachParameter(OwnOptimizer):
    """A group of its own for each parameter, last first."""

    def build(self, groups, rate):
        single = [{**group, "params": [p]} for group in groups for p in group["params"]]
        return AdamW(single[::-1], lr=rate, fused=True)


class OptimizerOfEachLayer(DDP):
    """The update steps the groups of each layer one after the other."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        parts = [[], []]
        for parameter in self.model.model.layers[1].parameters():
            parts[0].append(parameter)
        inside = {id(parameter) for parameter in parts[0]}
        parts[1] = [parameter for parameter in self.parameters if id(parameter) not in inside]
        groups = [
            {"params": [p for p in part if (p.ndim > 1) == matrix], "weight_decay": 0.01 * matrix}
            for part in parts
            for matrix in (True, False)
        ]
        self.optimizer = AdamW(groups, lr=self.config.learning_rate, fused=True)

    def update(self):
        norm = self.grad_norm()
        torch.nn.utils.clip_grads_with_norm_(self.parameters, self.config.max_grad_norm, norm)
        groups = self.optimizer.param_groups
        for group in groups:
            self.optimizer.param_groups = [group]
            self.optimizer.step()
        self.optimizer.param_groups = groups
        self.last_norm = float(norm)
        return self.last_norm


class ForeachSGD(OwnOptimizer):
    """SGD, foreach."""

    def build(self, groups, rate):
        return SGD(groups, lr=rate, foreach=True)


class FusedSGD(OwnOptimizer):
    """SGD, fused."""

    def build(self, groups, rate):
        return SGD(groups, lr=rate, fused=True)


class SGDOfEachParameter(OwnOptimizer):
    """SGD, a group of its own for each parameter, vectors first."""

    def build(self, groups, rate):
        single = [{**group, "params": [p]} for group in groups for p in group["params"]]
        return SGD(single[::-1], lr=rate, foreach=False)


# Clipping


class StockClipping(DDP):
    """An update with torch.nn.utils.clip_grad_norm_, which sums in float32."""

    def update(self):
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.config.max_grad_norm)
        self.optimizer.step()
        return float(norm)


class StockClippingNotForeach(DDP):
    """clip_grads_with_norm_ with foreach=False."""

    def update(self):
        norm = self.grad_norm()
        torch.nn.utils.clip_grads_with_norm_(
            self.parameters, self.config.max_grad_norm, norm.float(), foreach=False
        )
        self.optimizer.step()
        self.last_norm = float(norm)
        return self.last_norm


class Float32Norm(DDP):
    """grad_norm in float32, parameter by parameter."""

    def grad_norm(self):
        return torch.stack([p.grad.norm().square() for p in self.parameters]).sum().sqrt()


class FactorByHand(DDP):
    """The factor min(1, bound / norm), without the 1e-6 that torch adds, multiplied by hand."""

    def update(self):
        norm = self.grad_norm()
        factor = min(1.0, self.config.max_grad_norm / float(norm))
        for parameter in self.parameters:
            parameter.grad.mul_(factor)
        self.optimizer.step()
        self.last_norm = float(norm)
        return self.last_norm


# Kernels


class EagerAttention(DDP):
    """The strategy chooses eager attention; the run says sdpa."""

    def change(self, model):
        model.set_attn_implementation("eager")


class OwnAttention(DDP):
    """An attention function of the user's own in all layers, in plain matrix products."""

    def change(self, model):
        def attend(module, query, key, value, mask, scaling, **_):
            key = key.repeat_interleave(module.num_key_value_groups, 1)
            value = value.repeat_interleave(module.num_key_value_groups, 1)
            scores = query @ key.transpose(2, 3) * scaling
            future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
            weights = scores.masked_fill(future, -torch.inf).softmax(-1)
            return (weights @ value).transpose(1, 2).contiguous(), None

        AttentionInterface.register("by_hand", attend)
        for layer in model.model.layers:
            layer.self_attn.config = copy.deepcopy(layer.self_attn.config)
            layer.self_attn.config._attn_implementation = "by_hand"


class OwnNorm(DDP):
    """F.rms_norm in place of transformers' formula."""

    def change(self, model):
        for module in model.modules():
            if hasattr(module, "variance_epsilon"):
                module.forward = functools.partial(self.norm, module)

    def norm(self, module, x):
        return F.rms_norm(x, module.weight.shape, module.weight, module.variance_epsilon)


class RotaryFrom100(DDP):
    """Positions begin at 100; relative positions are the same."""

    def loss(self, input_ids, labels):
        positions = torch.arange(100, 100 + labels.shape[1])[None]
        return self.wrapped(
            input_ids=input_ids, labels=labels, shift_labels=labels, position_ids=positions, use_cache=False
        ).loss


class CheckpointingByTransformers(DDP):
    """The user turns on activation checkpointing of transformers; the run does not say so."""

    def change(self, model):
        model.gradient_checkpointing_enable({"use_reentrant": False})


class CheckpointingByHand(DDP):
    """torch.utils.checkpoint around each mlp."""

    def change(self, model):
        for layer in model.model.layers:
            inner = layer.mlp.forward
            layer.mlp.forward = functools.partial(
                torch.utils.checkpoint.checkpoint, inner, use_reentrant=False
            )


class CompiledLayers(DDP):
    """Each layer is compiled by a call of its own."""

    def change(self, model):
        for layer in model.model.layers:
            layer.compile(backend="aot_eager")


class FusedActivation(DDP):
    """The activation is a part of the MLP's own code, as in a fused kernel: its module is not called."""

    def change(self, model):
        for layer in model.model.layers:
            layer.mlp.forward = functools.partial(self.fused, layer.mlp)

    @staticmethod
    def fused(mlp, x):
        return mlp.down_proj(F.silu(mlp.gate_proj(x)) * mlp.up_proj(x))


class CompiledMlp(DDP):
    """torch.compile with aot_eager of each mlp's forward."""

    def change(self, model):
        for layer in model.model.layers:
            layer.mlp.act_fn.forward = torch.compile(layer.mlp.act_fn.forward, backend="aot_eager")


class TiedHeadByLinear(DDP):
    """The head multiplies with the embedding's weight by F.linear."""

    def change(self, model):
        model.lm_head.forward = lambda x: F.linear(x, model.model.embed_tokens.weight)


# fully_shard


class FSDP(TorchStrategy):
    """fully_shard of every layer and of the model."""

    axes = ("dp",)
    reshard: bool | None = None

    def parallelize(self, model, device_mesh):
        mesh = self.mesh(device_mesh)
        for unit in [*self.units(model), model]:
            fully_shard(unit, mesh=mesh, reshard_after_forward=self.reshard)
        return model

    def mesh(self, device_mesh):
        return device_mesh["dp"]

    def units(self, model):
        return list(model.model.layers)


class Resharded(FSDP):
    """reshard_after_forward."""

    reshard = True


class NotResharded(FSDP):
    """reshard_after_forward is False."""

    reshard = False


class LinearByLinear(FSDP):
    """Each linear layer and each norm of the layers is a unit."""

    def units(self, model):
        return [m for m in model.model.layers.modules() if any(True for _ in m.parameters(recurse=False))]


class Hybrid(FSDP):
    """HSDP: two replicas of two shards."""

    def mesh(self, device_mesh):
        return device_mesh["dp"]._unflatten("dp", (2, 2), ("replicas", "shards"))["replicas", "shards"]


class FSDPForeach(FSDP):
    """fully_shard, and torch's own clip_grad_norm_ of DTensors."""

    def update(self):
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.config.max_grad_norm)
        norm = norm.full_tensor()
        self.optimizer.step()
        self.last_norm = float(norm)
        return self.last_norm


# Tensor parallelism


def tied(model):
    """parallelize_module makes two parameters of a tied one."""
    model.lm_head.weight = model.model.embed_tokens.weight


def sharded(model, device_mesh):
    """fully_shard over dp, layer by layer."""
    for layer in model.model.layers:
        fully_shard(layer, mesh=device_mesh["dp"])
    return fully_shard(model, mesh=device_mesh["dp"])


LINEARS = {
    "model.layers.*.self_attn.q_proj": ColwiseParallel,
    "model.layers.*.self_attn.k_proj": ColwiseParallel,
    "model.layers.*.self_attn.v_proj": ColwiseParallel,
    "model.layers.*.self_attn.o_proj": RowwiseParallel,
    "model.layers.*.mlp.gate_proj": ColwiseParallel,
    "model.layers.*.mlp.up_proj": ColwiseParallel,
    "model.layers.*.mlp.down_proj": RowwiseParallel,
}


class LogitsGathered(TorchStrategy):
    """parallelize_module with a head whose logits are gathered; stock loss; fully_shard."""

    def parallelize(self, model, device_mesh):
        plan = {name: style() for name, style in LINEARS.items()}
        plan["model.embed_tokens"] = RowwiseParallel(input_layouts=Replicate())
        plan["lm_head"] = ColwiseParallel(output_layouts=Replicate())
        parallelize_module(model, device_mesh["tp"], plan)
        tied(model)
        return sharded(model, device_mesh)


class BlocksOnly(TorchStrategy):
    """Only attention and mlp are cut over tp; embedding and head are whole on every rank. Hooks average over dp."""

    def parallelize(self, model, device_mesh):
        parallelize_module(model, device_mesh["tp"], {name: style() for name, style in LINEARS.items()})
        self.group = device_mesh["dp"].get_group()
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(functools.partial(Hooks.reduce, self))
        return model


class EmbeddingByColumns(TorchStrategy):
    """The embedding is cut along its features, the head along its inputs (rowwise)."""

    def parallelize(self, model, device_mesh):
        plan = {name: style() for name, style in LINEARS.items()}
        plan["model.embed_tokens"] = ColwiseParallel(output_layouts=Replicate())
        plan["lm_head"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
        parallelize_module(model, device_mesh["tp"], plan)
        tied(model)
        return sharded(model, device_mesh)


class SequenceParallelNorms(TorchStrategy):
    """Norms and residuals work on each rank's own positions."""

    def parallelize(self, model, device_mesh):
        between = Shard(1)
        plan = {
            name: style() if style is ColwiseParallel else style(output_layouts=between)
            for name, style in LINEARS.items()
        }
        plan["model.embed_tokens"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=between)
        plan["lm_head"] = ColwiseParallel(input_layouts=between, output_layouts=Replicate())
        for norm in ("layers.*.input_layernorm", "layers.*.post_attention_layernorm", "norm"):
            plan[f"model.{norm}"] = SequenceParallel(use_local_output=True)
        plan["model.layers.*.self_attn"] = PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": between},
            desired_input_kwarg_layouts={"hidden_states": Replicate()},
        )
        plan["model.layers.*.mlp"] = PrepareModuleInput(
            input_layouts=between, desired_input_layouts=Replicate()
        )
        parallelize_module(model, device_mesh["tp"], plan)
        tied(model)
        return sharded(model, device_mesh)

    def loss(self, input_ids, labels):
        self.num_tokens = labels.numel()
        positions = torch.arange(labels.shape[1])[None]
        return self.wrapped(
            input_ids=input_ids, labels=labels, shift_labels=labels, position_ids=positions, use_cache=False
        ).loss


class ByHand(Hooks):
    """Megatron's f and g by hand in attention and mlp; embedding and head are whole."""

    axes = ("dp", "tp")

    def parallelize(self, model, device_mesh):
        self.tp_mesh = device_mesh["tp"]
        self.tp = self.tp_mesh.get_group()
        for layer in model.model.layers:
            attention, mlp = layer.self_attn, layer.mlp
            for linear in (attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj):
                self.split(linear, 0)
                linear.forward = functools.partial(self.column_product, linear)
            for linear in (attention.o_proj, mlp.down_proj):
                self.split(linear, 1)
                linear.forward = functools.partial(self.row_product, linear)
        return super().parallelize(model, device_mesh)

    def split(self, linear, dim):
        linear.weight = nn.Parameter(distribute_tensor(linear.weight.detach(), self.tp_mesh, [Shard(dim)]))
        if linear.bias is not None:
            linear.bias = nn.Parameter(distribute_tensor(linear.bias.detach(), self.tp_mesh, [Shard(0)]))

    def column_product(self, linear, x):
        bias = None if linear.bias is None else linear.bias.to_local()
        return F.linear(Identity.apply(x, self.tp), linear.weight.to_local(), bias)

    def row_product(self, linear, x):
        return Sum.apply(F.linear(x, linear.weight.to_local()), self.tp)


THREE = ("--gradient_accumulation_steps", "3")
HARD = ("--max_grad_norm", "0.1")
SGD_RUN = ("--optimizer", "sgd")
V = Variant
VARIANTS: dict[str, Variant] = {
    "OwnCrossEntropy": V(),
    "CountedCrossEntropy": V(),
    "ChunkedCrossEntropy": V(),
    "SumOverTokens": V(),
    "LogSoftmaxGather": V(),
    "TokensCountedOverRanks": V(),
    "LogitsSkipped": V(),
    "LogitsSkippedAndScaled": V(),
    "OwnedByTurns": V(),
    "InHalves": V(),
    "LookedAtBefore": V(),
    "ValidatedInTheStep": V(),
    "DividedAfterSum": V(THREE),
    "LossScale": V(THREE),
    "SyncEveryMicroBatch": V(THREE),
    "Float64Buffer": V(THREE),
    "ZeroGradKeepsTensors": V(THREE),
    "SmallBuckets": V(THREE),
    "StaticGraph": V(),
    "BucketViews": V(),
    "SumHook": V(),
    "Hooks": V(THREE),
    "DivideThenSum": V(),
    "ReducedInFloat64": V(),
    "ScatterAndGather": V(THREE),
    "FlatParameter": V(),
    "ForeachAdamW": V(),
    "ForLoopAdamW": V(),
    "NoAmsGradAdamW": V(),
    "TensorRateAdamW": V(),
    "DecoupledAdam": V(),
    "OwnAdamW": V(),
    "GroupOfEachParameter": V(),
    "OptimizerOfEachLayer": V(),
    "ForeachSGD": V(SGD_RUN),
    "FusedSGD": V(SGD_RUN),
    "SGDOfEachParameter": V(SGD_RUN),
    "StockClipping": V(HARD),
    "StockClippingNotForeach": V(HARD),
    "Float32Norm": V(HARD),
    "FactorByHand": V(HARD),
    "EagerAttention": V(),
    "OwnAttention": V(),
    "OwnNorm": V(),
    "RotaryFrom100": V(),
    "CheckpointingByTransformers": V(),
    "CheckpointingByHand": V(),
    "CompiledMlp": V(),
    "CompiledLayers": V(),
    "FusedActivation": V(),
    "TiedHeadByLinear": V(),
    "Resharded": V(THREE),
    "NotResharded": V(THREE),
    "LinearByLinear": V(),
    "Hybrid": V(("--dp_size", "4", "--batch_size", "2")),
    "FSDPForeach": V(HARD),
    "LogitsGathered": V(),
    "BlocksOnly": V(),
    "EmbeddingByColumns": V(),
    "SequenceParallelNorms": V(),
    "ByHand": V(),
}
