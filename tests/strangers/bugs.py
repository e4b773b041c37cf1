"""Strategies of users, each with one bug of a kind that real systems shipped. `BUGS` says what each breaks; it was written first.

    python run_verification.py --strategies ddp,tests/strangers/bugs.py:TiedHeadKeepsFirstWeights --output_dir runs/stranger

benchmarks/strangers.py trains each of them and holds the outcome against `BUGS`.
"""

import copy
import functools
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW
from transformers import AttentionInterface

from lockstep.training.torch_strategy import TorchStrategy


class Expected(NamedTuple):
    """What a bug breaks, written down before it ran."""

    seen_in: str  # public thread
    step: int  # the first in which it acts
    # Of the first tensor that must be wrong; a loss is no tensor, and the first tensor after it is its gradient
    kind: str
    tensor: str  # how its name begins; "" where several may come first
    true: str  # what a true explanation says
    untrue: str  # what no explanation may say
    # A named cause, or the one line, is allowed if this pattern is found in it; "": only "not explained"
    may: str = ""
    flags: tuple[str, ...] = ()
    end: str = "report"  # or "line": one line about contract or weights says it all
    never: str = ""  # what was said of it once and is false


# The wrappers, without a bug.


class DDP(TorchStrategy):
    """DistributedDataParallel."""

    axes = ("dp",)

    def change(self, model):
        """What a bug does to the model first."""

    def parallelize(self, model, device_mesh):
        self.dp = device_mesh["dp"].get_local_rank()
        self.change(model)
        return DistributedDataParallel(model, process_group=device_mesh["dp"].get_group())


class FSDP(TorchStrategy):
    """fully_shard of every layer and of the model."""

    axes = ("dp",)

    def parallelize(self, model, device_mesh):
        self.dp = device_mesh["dp"].get_local_rank()
        for layer in model.model.layers:
            fully_shard(layer, mesh=device_mesh["dp"])
        fully_shard(model, mesh=device_mesh["dp"])
        return model


class Plan(TorchStrategy):
    """parallelize_module over tp, logits gathered; fully_shard over dp."""

    def parallelize(self, model, device_mesh):
        plan = {
            "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
            "lm_head": ColwiseParallel(output_layouts=Replicate()),
        }
        for block, names, style in (
            ("self_attn", ("q_proj", "k_proj", "v_proj"), ColwiseParallel),
            ("self_attn", ("o_proj",), RowwiseParallel),
            ("mlp", ("gate_proj", "up_proj"), ColwiseParallel),
            ("mlp", ("down_proj",), RowwiseParallel),
        ):
            plan |= {f"model.layers.*.{block}.{name}": style() for name in names}
        parallelize_module(model, device_mesh["tp"], plan)
        model.lm_head.weight = model.model.embed_tokens.weight
        for layer in model.model.layers:
            fully_shard(layer, mesh=device_mesh["dp"])
        fully_shard(model, mesh=device_mesh["dp"])
        return model


class Hooks(TorchStrategy):
    """No wrapper: a hook of each parameter averages its gradient over dp."""

    axes = ("dp",)

    def parallelize(self, model, device_mesh):
        self.dp = device_mesh["dp"].get_local_rank()
        self.group = device_mesh["dp"].get_group()
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(self.reduce)
        return model

    def reduce(self, parameter):
        gradient = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
        dist.all_reduce(gradient, group=self.group)
        gradient /= dist.get_world_size(self.group)


class EmbeddingKeepsItsOwn(Hooks):
    """The gradient of the embedding, which is the head's weight, too, is not averaged over dp."""

    def parallelize(self, model, device_mesh):
        self.embedding = model.get_input_embeddings().weight
        return super().parallelize(model, device_mesh)

    def reduce(self, parameter):
        if parameter is not self.embedding:
            super().reduce(parameter)


class FusedActivationOfOneRank(Hooks):
    """A fused activation, whose module is not called, is off on the second dp rank."""

    def parallelize(self, model, device_mesh):
        model = super().parallelize(model, device_mesh)
        for layer in model.model.layers:
            layer.mlp.forward = functools.partial(self.fused, layer.mlp)
        return model

    def fused(self, mlp, x):
        return mlp.down_proj(F.silu((1 + 0.01 * self.dp) * mlp.gate_proj(x)) * mlp.up_proj(x))


class Identity(torch.autograd.Function):
    """Megatron's f: identity, and an all-reduce of the gradient."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class Sum(torch.autograd.Function):
    """Megatron's g: an all-reduce, and the identity for the gradient."""

    @staticmethod
    def forward(ctx, x, group):
        x = x.contiguous()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class VocabularyLoss(torch.autograd.Function):
    """Mean cross-entropy of logits (T, V / tp) on vocabulary shards."""

    @staticmethod
    def forward(ctx, logits, labels, group, rank, reduce_maximum, reduce_sum):
        logits = logits.float()
        maximum = logits.amax(-1)
        if reduce_maximum:
            dist.all_reduce(maximum, dist.ReduceOp.MAX, group=group)
        exp = (logits - maximum[:, None]).exp()
        total = exp.sum(-1)
        dist.all_reduce(total, group=group)
        if reduce_sum == "twice":
            dist.all_reduce(total, group=group)
        own = labels - rank * logits.shape[1]
        mine = (own >= 0) & (own < logits.shape[1])
        own = own.clamp(0, logits.shape[1] - 1)
        target = logits.gather(1, own[:, None])[:, 0] * mine
        dist.all_reduce(target, group=group)
        probabilities = exp / total[:, None]
        probabilities[torch.arange(len(own)), own] -= mine.float()
        ctx.save_for_backward(probabilities / len(own))
        return (total.log() + maximum - target).mean()

    @staticmethod
    def backward(ctx, gradient):
        return ctx.saved_tensors[0] * gradient, None, None, None, None, None


class Megatron(Hooks):
    """Tensor parallelism by hand: DTensor parameters, local products, f and g; loss on vocabulary shards."""

    axes = ("dp", "tp")
    reduce_maximum, reduce_sum = True, "once"

    def parallelize(self, model, device_mesh):
        self.tp_mesh = device_mesh["tp"]
        self.tp = self.tp_mesh.get_group()
        for number, layer in enumerate(model.model.layers):
            attention, mlp = layer.self_attn, layer.mlp
            for linear in (attention.q_proj, attention.k_proj, attention.v_proj):
                self.columns(linear, f"{number}.attention")
            for linear in (mlp.gate_proj, mlp.up_proj):
                self.columns(linear, f"{number}.mlp")
            self.rows(attention.o_proj)
            self.rows(mlp.down_proj)
            if hasattr(attention, "q_norm"):
                self.head_norm(attention.q_norm)
                self.head_norm(attention.k_norm)
        table = model.model.embed_tokens
        self.split(table, "weight", 0)
        self.columns(model.lm_head, "head", cut=False)
        model.lm_head.weight = table.weight
        table.forward = functools.partial(self.look_up, table)
        rank = self.tp_mesh.get_local_rank()

        def loss(logits, labels, vocab_size, shift_labels, **_):
            return VocabularyLoss.apply(
                logits.flatten(0, 1),
                shift_labels.flatten(),
                self.tp,
                rank,
                self.reduce_maximum,
                self.reduce_sum,
            )

        model.loss_function = loss
        return super().parallelize(model, device_mesh)

    def split(self, module, name, dim):
        whole = getattr(module, name)
        setattr(module, name, nn.Parameter(distribute_tensor(whole.detach(), self.tp_mesh, [Shard(dim)])))

    def columns(self, linear, where, cut=True):
        if cut:
            self.split(linear, "weight", 0)
            if linear.bias is not None:
                self.split(linear, "bias", 0)
        linear.forward = functools.partial(self.column_product, linear, where)

    def column_product(self, linear, where, x):
        bias = None if linear.bias is None else linear.bias.to_local()
        return F.linear(self.enter(x, where), linear.weight.to_local(), bias)

    def enter(self, x, where):
        return Identity.apply(x, self.tp)

    def rows(self, linear):
        self.split(linear, "weight", 1)
        linear.forward = lambda x: Sum.apply(F.linear(x, linear.weight.to_local()), self.tp)

    def head_norm(self, norm):
        norm.weight.register_hook(self.sum_over_tp)

    def sum_over_tp(self, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=self.tp)
        return gradient

    def look_up(self, table, ids):
        weight = table.weight.to_local()
        own = ids - self.tp_mesh.get_local_rank() * len(weight)
        mine = (own >= 0) & (own < len(weight))
        found = F.embedding(own.clamp(0, len(weight) - 1), weight) * mine[..., None]
        return Sum.apply(found, self.tp)


class Counting(DDP):
    """DDP that knows the number of the step."""

    step = 0

    def forward_backward(self, micro_batches):
        self.step += 1
        return super().forward_backward(micro_batches)


# Forward


class TiedHeadKeepsFirstWeights(Counting):
    """The head computes with a copy of the weights it had at the start; the gradient goes to the live ones."""

    def change(self, model):
        weight = model.lm_head.weight
        first = weight.detach().clone()
        model.lm_head.forward = lambda x: F.linear(x, first + (weight - weight.detach()))


class RotaryPositionsHalvedInOneLayer(DDP):
    """Layer 1 turns by half of each position's angle."""

    def change(self, model):
        def halve(_module, arguments, options):
            angles = torch.arange(options["hidden_states"].shape[1])[:, None] / 2 * inverse[None]
            angles = torch.cat([angles, angles], -1)[None]
            return arguments, {**options, "position_embeddings": (angles.cos(), angles.sin())}

        inverse = model.model.rotary_emb.inv_freq
        model.model.layers[1].self_attn.register_forward_pre_hook(halve, with_kwargs=True)


class KeysOnePositionLate(DDP):
    """In layer 1 the keys are turned by the angles of the next position, the queries by their own."""

    def change(self, model):
        layer = model.model.layers[1].self_attn
        half = layer.head_dim // 2
        inverse = model.model.rotary_emb.inv_freq

        def turn(_module, _arguments, keys):
            # One step of the rotation, before the rotation of transformers: rotations of one plane commute.
            heads = keys.unflatten(-1, (-1, 2, half))
            a, b = heads[..., 0, :], heads[..., 1, :]
            turned = [a * inverse.cos() - b * inverse.sin(), b * inverse.cos() + a * inverse.sin()]
            return torch.stack(turned, -2).flatten(-3)

        layer.k_proj.register_forward_hook(turn)


class CausalMaskLostInOneLayer(DDP):
    """Layer 1 attends to all positions."""

    def change(self, model):
        model.model.layers[1].self_attn.is_causal = False


class NormEpsilon(DDP):
    """All norms have 1e-5 where the model says 1e-6."""

    def change(self, model):
        for module in model.modules():
            if hasattr(module, "variance_epsilon"):
                module.variance_epsilon = 1e-5


class ResidualDroppedOnOneRank(DDP):
    """dp rank 1 forgets the residual after layer 1's mlp."""

    def parallelize(self, model, device_mesh):
        wrapped = super().parallelize(model, device_mesh)
        if self.dp == 1:
            last = model.model.layers[1].mlp
            kept = {}
            last.register_forward_hook(lambda _m, _a, output: kept.update(output=output))
            model.model.layers[1].register_forward_hook(lambda _m, _a, _output: kept["output"])
        return wrapped


class DropoutInOneMlp(DDP):
    """A dropout of 1 % that the configuration does not know, after layer 0's mlp."""

    def change(self, model):
        model.model.layers[0].mlp.register_forward_hook(lambda _m, _a, y: F.dropout(y, 0.01))


class AttentionScale(DDP):
    """Layer 0 divides its scores by sqrt(hidden size), not by sqrt(head_dim)."""

    def change(self, model):
        model.model.layers[0].self_attn.scaling = model.config.hidden_size**-0.5


class WrongHeadsShareKeys(DDP):
    """The KV heads are repeated as 0 1 0 1 where the model has 0 0 1 1, in layer 0."""

    def change(self, model):
        def attend(module, query, key, value, mask, scaling, **_):
            groups = module.num_key_value_groups
            key, value = key.repeat(1, groups, 1, 1), value.repeat(1, groups, 1, 1)
            found = F.scaled_dot_product_attention(
                query, key, value, mask, is_causal=mask is None, scale=scaling
            )
            return found.transpose(1, 2).contiguous(), None

        AttentionInterface.register("repeated_in_turn", attend)
        attention = model.model.layers[0].self_attn
        attention.config = copy.deepcopy(attention.config)
        attention.config._attn_implementation = "repeated_in_turn"


class OneReplicaHasOtherWeights(DDP):
    """dp rank 1 starts with another q_proj in layer 1, loaded after DDP had made the replicas equal."""

    def parallelize(self, model, device_mesh):
        wrapped = super().parallelize(model, device_mesh)
        if self.dp == 1:
            with torch.no_grad():
                model.model.layers[1].self_attn.q_proj.weight.mul_(1.01)
        return wrapped


class InitialisedAgain(DDP):
    """layers.1.mlp.down_proj is drawn anew after the weights were loaded."""

    def change(self, model):
        torch.manual_seed(1)
        nn.init.normal_(model.model.layers[1].mlp.down_proj.weight, std=0.02)


# Batch


class InputsRolledOnOneRank(DDP):
    """dp rank 1 pairs the inputs with the labels of the next sample."""

    def loss(self, input_ids, labels):
        return super().loss(input_ids.roll(1, 0) if self.dp == 1 else input_ids, labels)


class EveryRankTheSameBatch(DDP):
    """The sampler is not told the rank: all take rank 0's samples."""

    def loss(self, input_ids, labels):
        for ids in (input_ids, labels):
            dist.broadcast(ids, src=0)
        return super().loss(input_ids, labels)


class TpPeersReadDifferentOrders(Plan):
    """tp rank 1 reads the samples in the opposite order."""

    def loss(self, input_ids, labels):
        if self.device_mesh["tp"].get_local_rank() == 1:
            input_ids, labels = input_ids.flip(0), labels.flip(0)
        return super().loss(input_ids, labels)


# Loss


class OwnLoss(DDP):
    """A loss of the user's own, from the logits."""

    def loss(self, input_ids, labels):
        self.num_tokens = labels.numel()
        logits = self.wrapped(input_ids=input_ids, labels=labels, use_cache=False).logits
        return self.of(logits.float().flatten(0, 1), labels.flatten())

    def of(self, logits, labels):
        return F.cross_entropy(logits, labels)


class LabelSmoothing(OwnLoss):
    """Label smoothing of 0.1 left on."""

    def of(self, logits, labels):
        return F.cross_entropy(logits, labels, label_smoothing=0.1)


class ZLoss(OwnLoss):
    """z-loss: 1e-3 log(Z)^2 is added."""

    def of(self, logits, labels):
        return super().of(logits, labels) + 1e-3 * logits.logsumexp(-1).square().mean()


class OneTokenTakenForPadding(OwnLoss):
    """The commonest token is taken for padding and ignored, as where pad_token is eos_token."""

    def of(self, logits, labels):
        return F.cross_entropy(logits, labels, ignore_index=int(labels.mode().values))


class MaximumNotReducedOverTp(Megatron):
    """The maximum that is subtracted before exp is each vocabulary shard's own."""

    reduce_maximum = False


class SumReducedTwice(Megatron):
    """sum exp is reduced over tp twice: the loss is off by log(tp)."""

    reduce_sum = "twice"


class LossTimesTp(Plan):
    """The loss is multiplied by tp, against an average over tp that never comes."""

    def loss(self, input_ids, labels):
        return super().loss(input_ids, labels) * self.device_mesh["tp"].size()


class OnlyRank0sMetric(DDP):
    """All ranks report rank 0's loss; the gradients are right."""

    def forward_backward(self, micro_batches):
        loss = super().forward_backward(micro_batches)
        dist.broadcast(loss, src=0)
        return loss


# Backward and gradients


class CopyToTpMissing(Megatron):
    """f is missing before layer 1's mlp: the gradient of its input is not summed over tp."""

    def enter(self, x, where):
        return x if where == "1.mlp" else super().enter(x, where)


class HeadNormGradientsNotSummed(Megatron):
    """The gradients of q_norm and k_norm, of which each tp rank has its own heads' share, are not summed."""

    def head_norm(self, norm):
        pass


class RootNotSharded(FSDP):
    """fully_shard is called for the layers only: embedding and last norm are never reduced over dp."""

    def parallelize(self, model, device_mesh):
        for layer in model.model.layers:
            fully_shard(layer, mesh=device_mesh["dp"])
        return model


class HeadDoesNotTeachTheEmbedding(DDP):
    """The tied head computes with a detached copy of the embedding."""

    def change(self, model):
        model.lm_head.forward = lambda x: F.linear(x, model.model.embed_tokens.weight.detach())


class HookAveragesTwice(Hooks):
    """The hook divides by dp before the sum and after it."""

    def reduce(self, parameter):
        parameter.grad /= dist.get_world_size(self.group)
        super().reduce(parameter)


class DividedByWorld(Megatron):
    """Gradients are divided by the number of ranks, not by dp."""

    def reduce(self, parameter):
        super().reduce(parameter)
        parameter.grad.mul_(dist.get_world_size(self.group) / dist.get_world_size())


class OneProjectionIgnoredByDDP(DDP):
    """DDP is told to ignore layers.0.self_attn.v_proj.weight."""

    def change(self, model):
        name = "model.layers.0.self_attn.v_proj.weight"
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, [name])


class ReducedInBfloat16(Hooks):
    """Gradients are rounded to bfloat16 before they are summed."""

    def reduce(self, parameter):
        parameter.grad.copy_(parameter.grad.bfloat16())
        super().reduce(parameter)


class SignOfOneShard(FSDP):
    """dp rank 1 has its shard of layers.0.mlp.down_proj.weight's gradient with the other sign."""

    def forward_backward(self, micro_batches):
        loss = super().forward_backward(micro_batches)
        if self.dp == 1:
            self.model.model.layers[0].mlp.down_proj.weight.grad.to_local().neg_()
        return loss


class NoZeroGrad(DDP):
    """The gradient of a step is added to what is left of the last one's."""

    def forward_backward(self, micro_batches):
        self.optimizer.zero_grad = lambda: None
        return super().forward_backward(micro_batches)


class LastMicroBatchLeftOut(Hooks):
    """Gradients are averaged over dp before the last micro batch is added."""

    def forward_backward(self, micro_batches):
        self.left = len(micro_batches)
        return super().forward_backward(micro_batches)

    def loss(self, input_ids, labels):
        self.left -= 1
        return super().loss(input_ids, labels)

    def reduce(self, parameter):
        if self.left > 0:
            super().reduce(parameter)


class RunningMeanOfMicroBatches(DDP):
    """The mean over micro batches is (last + new) / 2, so that the last one counts half."""

    def loss(self, input_ids, labels):
        self.number += 1
        weights = {2: [1.0, 1.0], 3: [0.75, 0.75, 1.5]}[self.config.gradient_accumulation_steps]
        loss = super().loss(input_ids, labels)
        return loss.detach() + weights[self.number - 1] * (loss - loss.detach())

    def forward_backward(self, micro_batches):
        self.number = 0
        return super().forward_backward(micro_batches)


class DividedByAccumulationTwice(DDP):
    """The gradient is divided by the number of micro batches once more; the reported loss is not."""

    def loss(self, input_ids, labels):
        loss = super().loss(input_ids, labels)
        return loss.detach() + (loss - loss.detach()) / self.config.gradient_accumulation_steps


class SyncFlagTooLate(DDP):
    """require_backward_grad_sync is set between forward and backward, one micro batch too late for the reducer."""

    def loss(self, input_ids, labels):
        loss = super().loss(input_ids, labels)
        self.number += 1
        self.wrapped.require_backward_grad_sync = self.number == self.config.gradient_accumulation_steps
        return loss

    def forward_backward(self, micro_batches):
        self.number = 0
        return super().forward_backward(micro_batches)

    def _reducing(self, last):
        return torch.enable_grad()


class GradientClearedBetweenMicroBatches(DDP):
    """zero_grad is called for every micro batch: only the last one counts."""

    def loss(self, input_ids, labels):
        self.optimizer.zero_grad()
        return super().loss(input_ids, labels)


class LayerFrozenByFlag(DDP):
    """requires_grad is False for layers.0.mlp, left from a fine-tuning script."""

    def change(self, model):
        model.model.layers[0].mlp.requires_grad_(False)


class NormInNoGrad(DDP):
    """The last norm's weight is used detached; its gradient is zero."""

    def change(self, model):
        norm = model.model.norm
        norm.weight.register_hook(torch.zeros_like)


# Norm and clipping


class ClippedByOwnShard(FSDP):
    """Each rank clips with the norm of its own shards."""

    def grad_norm(self):
        shards = [parameter.grad.to_local() for parameter in self.parameters]
        return torch.linalg.vector_norm(
            torch.stack([torch.linalg.vector_norm(shard, dtype=torch.float64) for shard in shards])
        )


class NormWithoutTp(Megatron):
    """The norm of the gradient adds nothing up over tp."""

    def grad_norm(self):
        shards = [
            p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in self.model.parameters()
        ]
        return torch.linalg.vector_norm(
            torch.stack([torch.linalg.vector_norm(shard, dtype=torch.float64) for shard in shards])
        )


class ReplicatedCountedTpTimes(Megatron):
    """Norms, whole on every tp rank, are counted tp times in the norm of the gradient."""

    def grad_norm(self):
        total = torch.zeros((), dtype=torch.float64)
        for parameter in self.model.parameters():
            gradient = parameter.grad.to_local() if isinstance(parameter, DTensor) else parameter.grad
            total += gradient.double().square().sum()
        dist.all_reduce(total, group=self.tp)
        return total.sqrt()


class NormReportedAfterClipping(DDP):
    """The norm that is logged is that of the clipped gradient."""

    def update(self):
        norm = super().update()
        self.last_norm = min(norm, self.config.max_grad_norm)
        return self.last_norm


class NotClipped(DDP):
    """The gradient is not clipped."""

    def update(self):
        self.last_norm = float(self.grad_norm())
        self.optimizer.step()
        return self.last_norm


# Update


class OwnUpdate(DDP):
    """Clips as the base does, then calls `step_optimizer`."""

    def update(self):
        norm = self.grad_norm()
        if self.config.max_grad_norm > 0:
            torch.nn.utils.clip_grads_with_norm_(self.parameters, self.config.max_grad_norm, norm)
        self.step_optimizer()
        self.last_norm = float(norm)
        return self.last_norm

    def step_optimizer(self):
        self.optimizer.step()


class StaleOptimizer(FSDP):
    """The optimizer was built before fully_shard, and holds the parameters of that time."""

    def parallelize(self, model, device_mesh):
        self.before = list(model.parameters())
        return super().parallelize(model, device_mesh)

    def update(self):
        if not hasattr(self, "stale"):
            self.stale = AdamW(self.before, lr=self.config.learning_rate, weight_decay=0.01, fused=True)
        self.last_norm = float(self.grad_norm())
        torch.nn.utils.clip_grads_with_norm_(
            self.parameters, self.config.max_grad_norm, torch.tensor(self.last_norm)
        )
        self.stale.step()
        return self.last_norm


class StaleOptimizerAsSelf(FSDP):
    """The same, and `self.optimizer` is that optimizer."""

    def parallelize(self, model, device_mesh):
        self.before = list(model.parameters())
        return super().parallelize(model, device_mesh)

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.optimizer = AdamW(self.before, lr=self.config.learning_rate, weight_decay=0.01, fused=True)


class BetasSwappedInOneGroup(DDP):
    """The group of norms and biases has betas (0.999, 0.9)."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.optimizer.param_groups[1]["betas"] = (0.999, 0.9)


class EpsOfOneGroup(DDP):
    """The group of norms and biases has eps 1e-5."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.optimizer.param_groups[1]["eps"] = 1e-5


class EpsOfAll(DDP):
    """All groups have eps 1e-6."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        for group in self.optimizer.param_groups:
            group["eps"] = 1e-6


class DecayOnOneRankOnly(DDP):
    """dp rank 1 does not decay weights."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        if self.dp == 1:
            self.optimizer.param_groups[0]["weight_decay"] = 0.0


class CoupledDecay(OwnUpdate):
    """Weight decay is added to the gradient, as Adam does and AdamW does not; the decoupled one is left out."""

    def step_optimizer(self):
        decayed = self.optimizer.param_groups[0]
        for parameter in decayed["params"]:
            parameter.grad.add_(parameter.detach(), alpha=0.01)
        decayed["weight_decay"] = 0.0
        self.optimizer.step()
        decayed["weight_decay"] = 0.01


class Bfloat16Master(OwnUpdate):
    """The weights are rounded to bfloat16 after each update."""

    def step_optimizer(self):
        self.optimizer.step()
        with torch.no_grad():
            for parameter in self.parameters:
                parameter.copy_(parameter.bfloat16())


class ConstantSubtractedFromNorm(OwnUpdate):
    """The last norm's weight loses 1e-3 after each update, a decay towards zero that is not the optimizer's."""

    def step_optimizer(self):
        self.optimizer.step()
        with torch.no_grad():
            self.model.model.norm.weight.sub_(1e-3)


class AverageTakenForWeights(OwnUpdate):
    """The moving average of the weights is written back into the weights."""

    def step_optimizer(self):
        before = [parameter.detach().clone() for parameter in self.parameters]
        self.optimizer.step()
        with torch.no_grad():
            for parameter, old in zip(self.parameters, before, strict=True):
                parameter.lerp_(old, 0.5)


class ScheduleSteppedPerProcess(Counting):
    """From step 2 on the warm-up is ahead: the schedule is stepped once for each process."""

    def update(self):
        ahead = 1 + (self.step - 1) * dist.get_world_size()
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.learning_rate * min(1, ahead / self.config.warmup_steps)
        return super().update()


class UpdateSkippedOnOneRank(Counting):
    """dp rank 1 skips step 2, because its own loss scaler saw an overflow."""

    def update(self):
        if self.step == 2 and self.dp == 1:
            self.optimizer.step = lambda: None
        return super().update()


class SteppedTwice(OwnUpdate):
    """optimizer.step() is called by the engine and by the loop."""

    def step_optimizer(self):
        self.optimizer.step()
        self.optimizer.step()


class CountsFromOne(OwnUpdate):
    """The step count of the optimizer begins at 1, as after a resume; the bias corrections are those of the next step."""

    started = False

    def step_optimizer(self):
        if not self.started:
            self.started = True
            for parameter in self.parameters:
                self.optimizer.state[parameter] = {
                    "step": torch.tensor(1.0),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
        self.optimizer.step()


class AmsGrad(DDP):
    """AdamW with amsgrad, which keeps the largest second moment."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        for group in self.optimizer.param_groups:
            group["amsgrad"] = True


class LastRowsNeverUpdate(OwnUpdate):
    """The last 100 rows of the embedding are left out of the update, as a shorter last shard."""

    def step_optimizer(self):
        table = self.model.model.embed_tokens.weight
        before = table.detach()[-100:].clone()
        self.optimizer.step()
        with torch.no_grad():
            table[-100:] = before


class MomentumInSGD(DDP):
    """SGD with a momentum of 0.9 where plain SGD was asked for."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        groups = [
            {"params": group["params"], "weight_decay": group["weight_decay"]}
            for group in self.optimizer.param_groups
        ]
        self.optimizer = SGD(groups, lr=self.config.learning_rate, momentum=0.9)


class HiddenMomentumInSGD(OwnUpdate):
    """A momentum of 0.9 without dampening of the user's own; the SGD that is shown has none."""

    def step_optimizer(self):
        if not hasattr(self, "velocity"):
            self.velocity = [torch.zeros_like(parameter) for parameter in self.parameters]
        for parameter, velocity in zip(self.parameters, self.velocity, strict=True):
            velocity.mul_(0.9).add_(parameter.grad)
            parameter.grad = velocity.clone()
        self.optimizer.step()


class DecayOnNorms(DDP):
    """One group for all: norms and biases decay, too."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.optimizer.param_groups[1]["weight_decay"] = 0.01


class ShardsGatheredInWrongOrder(OwnUpdate):
    """After the update the halves of layers.1.mlp.up_proj.weight are gathered in the wrong order."""

    def step_optimizer(self):
        self.optimizer.step()
        with torch.no_grad():
            weight = self.model.model.layers[1].mlp.up_proj.weight
            weight.copy_(torch.cat(weight.chunk(2)[::-1]))


THREE = ("--gradient_accumulation_steps", "3")
CLIP = ("--max_grad_norm", "0.1")
E = Expected
Q3 = ("--model_name", "tiny-qwen3")
BUGS: dict[str, Expected] = {
    "EmbeddingKeepsItsOwn": E(
        "pytorch/torchtitan 577",
        1,
        "gradient",
        "gradient/model.embed_tokens.weight",
        "the gradient is that of a rank's own samples",
        "anything about the head, or the loss",
        "one DP rank's contribution",
    ),
    "FusedActivationOfOneRank": E(
        "linkedin/Liger-Kernel, kernels beside modules",
        1,
        "forward",
        "forward/model.layers.0.mlp.down_proj.input",
        "the activation is wrong",
        "that a module was not computed",
    ),
    "TiedHeadKeepsFirstWeights": E(
        "pytorch/pytorch 176076",
        2,
        "forward",
        "forward/lm_head",
        "the head computes with the weights of step 1",
        "anything about reductions, the loss, or the update of step 1",
        "stale|older|first step|not the live|before",
    ),
    "RotaryPositionsHalvedInOneLayer": E(
        "NVIDIA/Megatron-LM 453",
        1,
        "forward",
        "forward/model.layers.1.self_attn.o_proj.input",
        "layer 1's rotation is that of other positions",
        "mask, reduction, weights, heads",
        "rotary|position",
    ),
    "KeysOnePositionLate": E(
        "NVIDIA/Megatron-LM 453",
        1,
        "forward",
        "forward/model.layers.1.self_attn.k_proj",
        "k_proj's output is not x W + b; it is turned",
        "reduction, weights of another step, dtype",
        "",
    ),
    "CausalMaskLostInOneLayer": E(
        "facebookresearch/xformers 103",
        1,
        "forward",
        "forward/model.layers.1.self_attn.o_proj.input",
        "layer 1 attends without causal mask",
        "positions, heads, reduction",
        "mask|causal",
    ),
    "NormEpsilon": E(
        "meta-pytorch/torchtune 152",
        1,
        "forward",
        "forward/model.layers.0.input_layernorm",
        "norms have an epsilon of 1e-5",
        "weights, reductions, dtype",
        "eps",
    ),
    "ResidualDroppedOnOneRank": E(
        "huggingface/transformers 17877",
        1,
        "forward",
        "forward/model.layers.1",
        "rank 1's output of layer 1 lacks the residual",
        "reduction, other weights, other samples",
        "residual",
    ),
    "DropoutInOneMlp": E(
        "pytorch/pytorch 168058",
        1,
        "forward",
        "forward/model.layers.0.mlp",
        "elements are zero at random",
        "reduction, dtype, weights",
        "dropout|dropped|zero",
    ),
    "AttentionScale": E(
        "NVIDIA/Megatron-LM 453",
        1,
        "forward",
        "forward/model.layers.0.self_attn.o_proj.input",
        "scores of layer 0 are scaled by hidden_size ** -0.5",
        "mask, positions, heads, reduction",
        "scale|scaling|scores",
    ),
    "WrongHeadsShareKeys": E(
        "onnx/onnx 7274",
        1,
        "forward",
        "forward/model.layers.0.self_attn.o_proj.input",
        "query heads use other KV heads",
        "reduction, positions, mask",
        "head",
    ),
    "OneReplicaHasOtherWeights": E(
        "NVIDIA-NeMo/Automodel 3822",
        1,
        "forward",
        "forward/model.layers.1.self_attn.q_proj",
        "rank 1 holds another q_proj",
        "reduction, precision, samples",
        "weight|replica",
    ),
    "InitialisedAgain": E(
        "huggingface/transformers 17877",
        1,
        "parameter",
        "",
        "down_proj's initial weights are not the file's",
        "",
        "down_proj",
        end="line",
    ),
    "InputsRolledOnOneRank": E(
        "huggingface/accelerate 3092",
        1,
        "batch",
        "batch/input_ids",
        "rank 1's inputs are in another order than its labels",
        "that labels are wrong, shift by a position",
        "order|sample|batch|row",
        never="not those of this step",
    ),
    "EveryRankTheSameBatch": E(
        "ray-project/ray 64315",
        1,
        "batch",
        "batch/input_ids",
        "both dp ranks computed with rank 0's samples",
        "anything else",
        "same|batch|sample",
        never="without repetitions",
    ),
    "TpPeersReadDifferentOrders": E(
        "deepspeedai/DeepSpeed 7199",
        1,
        "batch",
        "batch/input_ids",
        "tp peers have other orders of samples",
        "that dp ranks are exchanged",
        "order|sample|batch|peer",
    ),
    "LabelSmoothing": E(
        "NVIDIA/Megatron-LM 737",
        1,
        "loss|backward",
        "",
        "labels are smoothed by 0.1",
        "scaled loss, wrong labels, reduction over tp",
        "smooth",
    ),
    "ZLoss": E(
        "NVIDIA/Megatron-LM 1652",
        1,
        "loss|backward",
        "",
        "a term of log(Z)^2 is added",
        "scaled loss, smoothing, reduction",
        "z-loss|z loss|log|term",
    ),
    "OneTokenTakenForPadding": E(
        "huggingface/transformers 34191",
        1,
        "loss|backward",
        "",
        "positions with one label are ignored, and the mean is over the others",
        "scaled loss, smoothing, other samples",
        "ignor|label|padding|mask",
    ),
    "MaximumNotReducedOverTp": E(
        "NVIDIA/Megatron-LM 7452",
        1,
        "loss|backward",
        "",
        "shards subtract their own maximum from the logits",
        "that sums are not reduced, smoothing, scale",
        "maxim",
    ),
    "SumReducedTwice": E(
        "NVIDIA/Megatron-LM 7452",
        1,
        "loss|backward",
        "",
        "the sum of exp is twice what it should be, over tp",
        "a missing reduction",
        "twice|log|normali|sum",
    ),
    "LossTimesTp": E(
        "huggingface/transformers 39648",
        1,
        "loss|backward",
        "",
        "the loss, and with it all gradients, is twice what it should be",
        "wrong gradient reduction",
        "scale|factor|times|multiplied|twice",
    ),
    "OnlyRank0sMetric": E(
        "ray-project/ray 31409",
        1,
        "loss",
        "",
        "dp rank 1 reports rank 0's loss",
        "wrong gradients, samples",
        "report|rank 0|same|loss",
    ),
    "CopyToTpMissing": E(
        "pytorch/torchtitan 1373",
        1,
        "backward",
        "backward/model.layers.1.post_attention_layernorm",
        "the gradient of mlp's input in layer 1 is each tp rank's own share",
        "dp reduction, forward reduction",
        "tp reduction|sum over tp|share",
    ),
    "HeadNormGradientsNotSummed": E(
        "NVIDIA/Megatron-LM 1446",
        1,
        "gradient",
        "gradient/model.layers.1.self_attn.",
        "the gradient of a head norm is not summed over tp",
        "dp reduction",
        "tp reduction|sum over tp|share",
        flags=Q3,
    ),
    "RootNotSharded": E(
        "pytorch/torchtitan 577",
        1,
        "gradient",
        "gradient/model.norm.weight",
        "gradients of embedding and last norm are not averaged over dp",
        "all gradients, tp, a scale",
        "dp reduction|averag|share",
        never="max_grad_norm",
    ),
    "HeadDoesNotTeachTheEmbedding": E(
        "pytorch/pytorch 176076",
        1,
        "gradient",
        "gradient/model.embed_tokens.weight",
        "the embedding's gradient lacks the head's share",
        "dp or tp reduction, scale",
        "tied|head",
    ),
    "HookAveragesTwice": E(
        "pytorch/torchtitan 2318",
        1,
        "gradient",
        "gradient/model.norm.weight",
        "every gradient is half of what it should be",
        "a missing sum, clipping",
        "scale|factor|divided|twice|half",
    ),
    "DividedByWorld": E(
        "meta-pytorch/torchtune 2420",
        1,
        "gradient",
        "gradient/model.norm.weight",
        "every gradient is half of what it should be",
        "a missing sum, clipping",
        "scale|factor|divided|twice|half",
    ),
    "OneProjectionIgnoredByDDP": E(
        "pytorch/torchtitan 1373",
        1,
        "gradient",
        "gradient/model.layers.0.self_attn.v_proj.weight",
        "v_proj's gradient is not averaged over dp",
        "others are wrong, a scale",
        "dp reduction|averag|share",
    ),
    "ReducedInBfloat16": E(
        "huggingface/accelerate 3979",
        1,
        "gradient",
        "gradient/model.norm.weight",
        "gradients are rounded to bfloat16 before the sum over dp",
        "missing reduction, rounding after the sum",
        "bfloat16|precision|round",
    ),
    "SignOfOneShard": E(
        "pytorch/torchtitan 1805",
        1,
        "gradient",
        "gradient/model.layers.0.mlp.down_proj.weight",
        "half of down_proj's gradient has the other sign",
        "reduction, other samples",
        "sign|negat|shard|-1",
    ),
    "NoZeroGrad": E(
        "meta-pytorch/torchforge 71",
        2,
        "gradient",
        "gradient/model.norm.weight",
        "the gradient is added to the last step's clipped one",
        "reduction, scale",
        "zero_grad|last step|previous|left|accumulat",
    ),
    "LastMicroBatchLeftOut": E(
        "deepspeedai/DeepSpeed 7985",
        1,
        "gradient",
        "gradient/model.norm.weight",
        "the last micro batch's gradients are not averaged over dp",
        "that no micro batch is reduced, or that the last one's gradients are missing",
        "micro batch|accumulat",
        flags=THREE,
    ),
    "RunningMeanOfMicroBatches": E(
        "NVIDIA/Megatron-LM 6660",
        1,
        "backward",
        "backward/lm_head",
        "micro batches weigh 1/4, 1/4, 1/2",
        "missing reduction, one scale for all",
        "weigh|micro batch|factor",
        flags=THREE,
    ),
    "DividedByAccumulationTwice": E(
        "huggingface/accelerate 3533",
        1,
        "backward",
        "backward/lm_head",
        "every gradient is a third of what it should be",
        "missing micro batches, the loss",
        "scale|factor|divided|twice|third|1/accumulation",
        flags=THREE,
    ),
    "SyncFlagTooLate": E(
        "karpathy/build-nanogpt 30",
        1,
        "gradient",
        "gradient/model.norm.weight",
        "the gradients are not averaged over dp in the last micro batch",
        "scale, tp",
        "dp reduction|micro batch|averag|accumulat",
        flags=THREE,
    ),
    "GradientClearedBetweenMicroBatches": E(
        "huggingface/accelerate 616",
        1,
        "gradient",
        "gradient/model.norm.weight",
        "only the last micro batch's gradient is there",
        "missing dp reduction, plain scale",
        "micro batch|accumulat",
        flags=THREE,
    ),
    "LayerFrozenByFlag": E(
        "NVIDIA-NeMo/Automodel 1408",
        1,
        "gradient",
        "gradient/model.layers.0.mlp",
        "layers.0.mlp has no gradients",
        "that the loss does not depend on it",
        "frozen|no gradient|requires_grad|zero",
        end="line",
    ),
    "NormInNoGrad": E(
        "NVIDIA-NeMo/Automodel 1408",
        1,
        "gradient",
        "gradient/model.norm.weight",
        "the last norm's gradient is zero",
        "reduction, scale",
        "zero|frozen",
    ),
    "ClippedByOwnShard": E(
        "pytorch/pytorch 170862",
        1,
        "gradient norm",
        "",
        "the norm is that of dp rank 0's shards",
        "wrong gradients, not clipped",
        "norm|clip",
        flags=CLIP,
    ),
    "NormWithoutTp": E(
        "deepspeedai/DeepSpeed 5411",
        1,
        "gradient norm",
        "",
        "the norm lacks the other tp rank's shards",
        "wrong gradients, not clipped",
        "norm|clip",
        flags=CLIP,
    ),
    "ReplicatedCountedTpTimes": E(
        "NVIDIA-NeMo/RL 3788",
        1,
        "gradient norm",
        "",
        "replicated gradients are counted tp times",
        "wrong gradients, a missing sum",
        "norm|clip|twice|counted",
        flags=CLIP,
    ),
    "NormReportedAfterClipping": E(
        "pytorch/torchtitan 2972",
        1,
        "gradient norm",
        "",
        "the reported norm is that after clipping",
        "wrong gradients or update",
        "norm|clip|report",
        flags=CLIP,
    ),
    "NotClipped": E(
        "deepspeedai/DeepSpeed 8068",
        1,
        "exp_avg",
        "",
        "gradients are not clipped",
        "",
        "clip|max_grad_norm",
        flags=CLIP,
        end="line",
    ),
    "StaleOptimizer": E(
        "huggingface/accelerate 3256",
        1,
        "exp_avg",
        "",
        "no parameter is updated; the optimizer that is stepped holds other parameters",
        "a learning rate of 0, frozen layers",
        "not updated|never|no update|stale|exp_avg",
    ),
    "StaleOptimizerAsSelf": E(
        "pytorch/pytorch 149205",
        1,
        "exp_avg",
        "",
        "the optimizer holds parameters that are not the model's",
        "",
        "optimizer",
        end="line",
    ),
    "BetasSwappedInOneGroup": E(
        "NovaSky-AI/SkyRL 1646",
        1,
        "exp_avg",
        "exp_avg/model.",
        "betas of norms and biases are (0.999, 0.9)",
        "clipping, gradient, all parameters",
        "beta",
    ),
    "EpsOfOneGroup": E(
        "NovaSky-AI/SkyRL 1646",
        1,
        "parameter",
        "parameter/model.",
        "eps of norms and biases is 1e-5",
        "learning rate, decay, moments",
        "eps",
    ),
    "EpsOfAll": E(
        "NovaSky-AI/SkyRL 1646", 1, "parameter", "", "eps is 1e-6, not 1e-8", "", "eps", end="line"
    ),
    "DecayOnOneRankOnly": E(
        "verl-project/verl 5070",
        1,
        "parameter",
        "parameter/model.embed_tokens.weight",
        "rank 1's weights are not decayed",
        "gradients, learning rate",
        "decay",
    ),
    "CoupledDecay": E(
        "verl-project/verl 5070",
        1,
        "exp_avg",
        "exp_avg/model.embed_tokens.weight",
        "weight decay is added to the gradient",
        "clipping, wrong betas",
        "decay|coupled",
        never="max_grad_norm",
    ),
    "Bfloat16Master": E(
        "huggingface/accelerate 2624",
        1,
        "parameter",
        "parameter/model.embed_tokens.weight",
        "weights are rounded to bfloat16 after the update",
        "learning rate, decay",
        "bfloat16|precision|round",
    ),
    "ConstantSubtractedFromNorm": E(
        "verl-project/verl 5070",
        1,
        "parameter",
        "parameter/model.norm.weight",
        "1e-3 is subtracted from the last norm's weight after the update",
        "weight decay of norms, learning rate",
        "constant|subtract|after the update",
        never="weight decay",
    ),
    "AverageTakenForWeights": E(
        "pytorch/pytorch 76282",
        1,
        "parameter",
        "parameter/model.embed_tokens.weight",
        "each weight moved half of the way",
        "decay, moments",
        "half|scale|average|factor|0.5 times|0.5 =",
        never="learning rate",
    ),
    "ScheduleSteppedPerProcess": E(
        "huggingface/accelerate 2926",
        2,
        "parameter",
        "",
        "the learning rate of step 2 is 3/8, not 2/8, of the whole",
        "decay, moments, gradients",
        "learning rate|learning_rate",
        flags=("--warmup_steps", "8"),
    ),
    "UpdateSkippedOnOneRank": E(
        "pytorch/pytorch 76282",
        2,
        "exp_avg",
        "exp_avg/model.embed_tokens.weight",
        "rank 1 made no update in step 2",
        "gradients, decay",
        "not updated|skip|no update|rank",
    ),
    "SteppedTwice": E(
        "huggingface/accelerate 2142",
        1,
        "exp_avg",
        "exp_avg/model.embed_tokens.weight",
        "two updates in one step",
        "clipping, gradient scale",
        "twice|two",
    ),
    "CountsFromOne": E(
        "huggingface/transformers 39215",
        1,
        "parameter",
        "parameter/model.embed_tokens.weight",
        "the bias corrections are those of another step",
        "the learning rate is other, eps, decay",
        "bias correction|step count",
    ),
    "AmsGrad": E(
        "NovaSky-AI/SkyRL 1646",
        2,
        "parameter",
        "parameter/model.",
        "the largest second moment is used",
        "learning rate, decay, eps",
        "amsgrad|largest|second moment",
    ),
    "LastRowsNeverUpdate": E(
        "pytorch/pytorch 176076",
        1,
        "parameter",
        "parameter/model.embed_tokens.weight",
        "the last 100 rows are not updated",
        "decay, learning rate",
        "not updated|left out|rows|part|never|no update",
    ),
    "MomentumInSGD": E(
        "NovaSky-AI/SkyRL 1646",
        2,
        "parameter",
        "",
        "momentum is 0.9, not 0",
        "",
        "momentum",
        flags=("--optimizer", "sgd"),
        end="line",
    ),
    "HiddenMomentumInSGD": E(
        "NovaSky-AI/SkyRL 1646",
        2,
        "parameter",
        "parameter/model.",
        "the last step's update is added",
        "learning rate, gradients of step 2, clipping",
        "momentum|last step|previous",
        flags=("--optimizer", "sgd"),
    ),
    "DecayOnNorms": E(
        "verl-project/verl 5070",
        1,
        "parameter",
        "",
        "norms and biases decay, too",
        "",
        "decay",
        end="line",
    ),
    "ShardsGatheredInWrongOrder": E(
        "huggingface/transformers 48205",
        1,
        "parameter",
        "parameter/model.layers.1.mlp.up_proj.weight",
        "the halves of up_proj are exchanged",
        "learning rate, decay, scale",
        "order|exchanged|permut|rows|half",
    ),
}
AUTOCAST = (
    "LabelSmoothing",
    "ZLoss",
    "MaximumNotReducedOverTp",
    "HiddenMomentumInSGD",
    "HookAveragesTwice",
    "EpsOfOneGroup",
)
