"""Strategies of users on mixtures of experts: `BUGS`, each of a kind that real systems shipped, and correct `VARIANTS`.

    python run_verification.py --model_name tiny-mixtral --strategies ddp,tests/strangers/experts.py:TokensDroppedInOneLayer

`BUGS` says what each breaks; it was written first. benchmarks/strangers.py trains all. The model of tests/strangers/unnormalised is
tiny-qwen3-moe, but the scores of the chosen experts do not sum to 1.
"""

import functools
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers.distributed.expert_parallel import (
    AllReduceEP,
    AllToAllEP,
    EpDispatchExpertsParallel,
    EPImplementation,
    EPImplementationInterface,
)
from transformers.distributed.parallel_utils import _AllReduceBackward, _AllReduceForward

from lockstep.plan import strategies
from lockstep.training.torch_strategy import local, sharded_axes

HERE = Path(__file__).parent
DDP = strategies.load(f"{HERE / 'bugs.py'}:DDP")
Expected = strategies.load(f"{HERE / 'bugs.py'}:Expected")
Variant = strategies.load(f"{HERE / 'variants.py'}:Variant")
TransformersTP = strategies.load(f"{HERE.parents[1] / 'examples' / 'transformers_tp.py'}:TransformersTP")
TransformersEP = strategies.load(f"{HERE.parents[1] / 'examples' / 'transformers_tp.py'}:TransformersEP")


# The wrappers, without a bug.


class EP(TransformersEP):
    """transformers' expert parallelism over dp. Tokens reach the experts of the layers in `of` by `exchange`."""

    axes: tuple[str, ...] = ("dp",)
    exchange: type[EPImplementation] | None = None
    of: tuple[int, ...] = (0, 1)

    def __init_subclass__(cls):
        cls.label = cls.__name__

    def parallelize(self, model, device_mesh):
        self.dp = device_mesh["dp"].get_local_rank()
        model = super().parallelize(model, device_mesh)
        if self.exchange is not None:
            EPImplementationInterface.register(self.exchange.__name__, self.exchange)
            for layer in self.of:
                experts = model.model.layers[layer].mlp.experts
                del experts.forward  # transformers' exchange
                EpDispatchExpertsParallel().install_forward(
                    experts,
                    model._mesh_manager.get_mesh("ep"),
                    tp_mesh=model._mesh_manager.get_mesh("tp"),
                    ep_implementation=self.exchange.__name__,
                )
        return model


class SharedBatch(EP):
    """Expert parallelism over tp: all ranks of a group hold the same tokens."""

    axes = ("dp", "tp")


class OwnRouter(DDP):
    """The routers compute `route`."""

    of: tuple[int, ...] = (0, 1)

    def parallelize(self, model, device_mesh):
        wrapped = super().parallelize(model, device_mesh)
        for layer in self.of:
            gate = model.model.layers[layer].mlp.gate
            gate.forward = functools.partial(self.route, gate)
        return wrapped

    def route(self, gate, x):
        raise NotImplementedError


class BalanceGradient(DDP):
    """The gradient of the balance term is multiplied by 1 + `more()`; the loss is as it was."""

    def loss(self, input_ids, labels):
        self.num_tokens = labels.numel()
        output = self.wrapped(input_ids=input_ids, labels=labels, shift_labels=labels, use_cache=False)
        term = self.model.router_aux_loss_coef * output.aux_loss
        return output.loss + self.more() * (term - term.detach())

    def more(self):
        raise NotImplementedError


# Gradients of the experts


class ExpertGradientsSummed(EP):
    """The gradients of experts are summed over the ranks that send them tokens, and not divided by their number."""

    def parallelize(self, model, device_mesh):
        model = super().parallelize(model, device_mesh)
        for layer in model.model.layers:
            layer.mlp.experts.set_gradient_divide_factor(1.0)
        return model


class ExpertGradientsDividedTwice(EP):
    """The gradients of experts are divided by the number of ranks once more."""

    def parallelize(self, model, device_mesh):
        model = super().parallelize(model, device_mesh)
        for layer in model.model.layers:
            layer.mlp.experts.set_gradient_divide_factor(float(dist.get_world_size()) ** 2)
        return model


class ExpertsSkippedByAllReduce(DDP):
    """Every rank holds all experts, and their gradients are not averaged over dp."""

    def parallelize(self, model, device_mesh):
        experts = [name for name, _ in model.named_parameters() if ".experts." in name]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, experts)
        return super().parallelize(model, device_mesh)


# Gradients of router and input


class NoSumForScores(AllReduceEP):
    """AllReduceEP, but the gradient of the scores is that of the local experts."""

    def __call__(self, hidden_states, top_k_index, top_k_weights):
        group = self.ep_mesh.get_group()
        return self.experts_of(
            _AllReduceBackward.apply(hidden_states, group), top_k_index, top_k_weights, group
        )

    def experts_of(self, hidden_states, top_k_index, top_k_weights, group):
        away = (top_k_index // self.num_local_experts) != self.ep_mesh.get_local_rank()
        index = torch.where(away, self.num_local_experts, top_k_index % self.num_local_experts)
        output = self.experts_forward(hidden_states, index, top_k_weights.masked_fill(away, 0.0))
        return _AllReduceForward.apply(output, group)


class NoSumForInput(NoSumForScores):
    """AllReduceEP, but the gradient of the input is that of the local experts."""

    def __call__(self, hidden_states, top_k_index, top_k_weights):
        group = self.ep_mesh.get_group()
        return self.experts_of(
            hidden_states, top_k_index, _AllReduceBackward.apply(top_k_weights, group), group
        )


class ScoresOfLocalExperts(AllToAllEP):
    """AllToAllEP, but the scores of other ranks' experts have no gradient."""

    def __call__(self, hidden_states, top_k_index, top_k_weights):
        away = (top_k_index // self.num_local_experts) != self.ep_mesh.get_local_rank()
        return super().__call__(
            hidden_states, top_k_index, torch.where(away, top_k_weights.detach(), top_k_weights)
        )


class RouterLearnsFromLocalExperts(SharedBatch):
    """Over tp, each rank's router learns from its own experts only."""

    exchange = NoSumForScores


class RouterLearnsFromLocalExpertsOverDp(EP):
    """Over dp, each rank's router learns from its own experts only."""

    exchange = ScoresOfLocalExperts


class InputLearnsFromLocalExperts(SharedBatch):
    """Over tp, the gradient of the experts' input comes from each rank's own experts only."""

    exchange = NoSumForInput


# Norm and clipping


class NormWithoutOtherExperts(EP):
    """The norm of the gradient has the experts of this rank only."""

    def grad_norm(self):
        return (self.squares(False) + self.squares(True)).sqrt()

    def squares(self, of_experts):
        total = torch.zeros((), dtype=torch.float64)
        for alike in self.in_norm:
            names = alike[0].device_mesh.mesh_dim_names if isinstance(alike[0], DTensor) else ()
            if ("ep" in names) == of_experts:
                square = sum(local(p.grad).double().square().sum() for p in alike)
                for axis in sharded_axes(alike[0]):
                    if names[axis] != "ep":
                        dist.all_reduce(square, group=alike[0].device_mesh.get_group(axis))
                total += square
        return total


class NormsAveragedOverExperts(NormWithoutOtherExperts):
    """The norms of the ranks, each with its own experts, are averaged."""

    def grad_norm(self):
        norm = super().grad_norm()
        dist.all_reduce(norm)
        return norm / dist.get_world_size()


# Which experts, and how much of them


class Dropping(AllToAllEP):
    """No expert takes more tokens of a rank than an even load would give it; later ones are dropped."""

    def __call__(self, hidden_states, top_k_index, top_k_weights):
        number = self.num_local_experts * self.ep_mesh.size()
        chosen = F.one_hot(top_k_index.flatten(), number)
        place = (chosen.cumsum(0) * chosen).sum(-1).view_as(top_k_index)
        dropped = place > top_k_index.numel() // number
        return super().__call__(hidden_states, top_k_index, top_k_weights.masked_fill(dropped, 0.0))


class TokensDroppedInOneLayer(EP):
    """Layer 1 drops tokens beyond a capacity."""

    exchange = Dropping
    of = (1,)


class InOrderOfExperts(AllToAllEP):
    """The results of the experts stay in the order in which the tokens were sent."""

    def _combine_tokens(self, expert_output, state):
        return super()._combine_tokens(expert_output, state._replace(order=state.order.sort().values))


class ResultsAtWrongTokens(EP):
    """In layer 1 the results of experts are added to other tokens than those they are of."""

    exchange = InOrderOfExperts
    of = (1,)


class SharedExpertCountsTwice(EP):
    """In layer 1 the shared expert is added on each of two ranks before the sum over them."""

    def parallelize(self, model, device_mesh):
        model = super().parallelize(model, device_mesh)
        mlp, times = model.model.layers[1].mlp, dist.get_world_size()

        def forward(x):
            flat = x.view(-1, x.shape[-1])
            _, scores, chosen = mlp.gate(x)
            return mlp.experts(flat, chosen, scores).view_as(x) + times * mlp.shared_experts(x)

        mlp.forward = forward
        return model


class ScoresNotNormalised(OwnRouter):
    """The scores of the chosen experts do not sum to 1."""

    def route(self, gate, x):
        logits = F.linear(x.reshape(-1, gate.hidden_dim), gate.weight)
        scores, chosen = logits.float().softmax(-1).topk(gate.top_k)
        return logits, scores, chosen


class SoftmaxAfterChoice(OwnRouter):
    """The softmax is over the chosen experts, not over all."""

    def route(self, gate, x):
        logits = F.linear(x.reshape(-1, gate.hidden_dim), gate.weight)
        highest, chosen = logits.float().topk(gate.top_k)
        return logits, highest.softmax(-1), chosen


class OneTokenGoesElsewhere(OwnRouter):
    """dp rank 1 chooses by other scores in layer 1: one token's second expert is exchanged for the third."""

    of = (1,)

    def route(self, gate, x):
        logits = F.linear(x.reshape(-1, gate.hidden_dim), gate.weight)
        scores = logits.float().softmax(-1)
        _, ranked = scores.sort(-1, descending=True)
        chosen = ranked[:, :2].clone()
        if self.dp == 1:
            second, third = scores.gather(1, ranked[:, 1:3]).unbind(-1)
            token = (second - third).argmax()  # no tie
            chosen[token, 1] = ranked[token, 2]
        taken = scores.gather(1, chosen)
        return logits, taken / taken.sum(-1, keepdim=True), chosen


class OneExpertTwice(OwnRouter):
    """In layer 1 every fourth token takes its first expert twice, instead of its second."""

    of = (1,)

    def route(self, gate, x):
        logits = F.linear(x.reshape(-1, gate.hidden_dim), gate.weight)
        scores = logits.float().softmax(-1)
        chosen = scores.topk(gate.top_k).indices
        chosen[::4, 1] = chosen[::4, 0]
        taken = scores.gather(1, chosen)
        return logits, taken / taken.sum(-1, keepdim=True), chosen


class RouterDropsTokens(OwnRouter):
    """In layer 1 every fourth token's second expert is number 4, which there is not: dropped beyond the capacity."""

    of = (1,)

    def parallelize(self, model, device_mesh):
        model.set_experts_implementation("eager")
        return super().parallelize(model, device_mesh)

    def route(self, gate, x):
        logits = F.linear(x.reshape(-1, gate.hidden_dim), gate.weight)
        scores, taken = logits.float().softmax(-1).topk(gate.top_k)
        chosen = taken.clone()
        chosen[::4, 1] = gate.num_experts
        return logits, scores / scores.sum(-1, keepdim=True), chosen


class RouterInBfloat16(OwnRouter):
    """The routers' logits are a product in bfloat16."""

    def route(self, gate, x):
        logits = F.linear(x.reshape(-1, gate.hidden_dim).bfloat16(), gate.weight.bfloat16()).float()
        scores, chosen = logits.softmax(-1).topk(gate.top_k)
        return logits, scores / scores.sum(-1, keepdim=True), chosen


class GroupsByBestExpert(OwnRouter):
    """In layer 1 a group of experts is chosen by its best expert, not by the sum of its best two."""

    of = (1,)

    def route(self, gate, x):
        logits = F.linear(x.view(-1, gate.hidden_dim).float(), gate.weight.float())
        scores = logits.sigmoid()
        groups = scores.unflatten(-1, (gate.num_group, -1))
        outside = torch.ones_like(groups[..., 0], dtype=torch.bool)
        outside.scatter_(1, groups.amax(-1).topk(gate.topk_group).indices, False)
        within = groups.masked_fill(outside[..., None], -torch.inf).flatten(1)
        chosen = within.topk(gate.top_k, sorted=False).indices
        taken = scores.gather(1, chosen)
        taken = taken / (taken.sum(-1, keepdim=True) + 1e-20)
        return logits, taken * gate.routed_scaling_factor, chosen


# Balance


class BalancePerMicroBatch(BalanceGradient):
    """The balance terms of the micro batches are summed, not averaged."""

    def more(self):
        return self.config.gradient_accumulation_steps - 1


class BalanceDividedByDp(BalanceGradient):
    """The balance term is divided by dp once more."""

    def more(self):
        return 1 / dist.get_world_size() - 1


class BalanceNeverFlows(BalanceGradient):
    """The balance term is in the loss, and not in the gradient."""

    def more(self):
        return -1


# Correct variants


class ExpertsByEager(EP):
    """The loop over experts of the model's own code."""

    def parallelize(self, model, device_mesh):
        model = super().parallelize(model, device_mesh)
        model.set_experts_implementation("eager")
        return model


class ExpertsByBatchedProduct(DDP):
    """A batched matrix product of the weights of each token's experts."""

    def parallelize(self, model, device_mesh):
        model.set_experts_implementation("batched_mm")
        return super().parallelize(model, device_mesh)


class TokensSent(EP):
    """ep_implementation "all_to_all", over dp and tp."""

    axes = ("dp", "tp")
    exchange = AllToAllEP


class TokensKept(SharedBatch):
    """ep_implementation "all_reduce": each rank computes its own experts for the tokens that all hold."""

    exchange = AllReduceEP


class ExpertsCutOverTp(TransformersTP):
    """transformers' tensor parallelism: every rank has a part of each expert."""

    label = "ExpertsCutOverTp"


class ExpertsCheckpointed(EP):
    """Activations are computed again in backward, with the exchange of tokens."""

    def parallelize(self, model, device_mesh):
        model = super().parallelize(model, device_mesh)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        return model


class GroupsOfExperts(EP):
    """Expert parallelism, unchanged."""


class LeastExpertFirst(OwnRouter):
    """The chosen experts of a token are listed in the other order, scores with them."""

    def route(self, gate, x):
        logits = F.linear(x.reshape(-1, gate.hidden_dim), gate.weight)
        scores, chosen = logits.float().softmax(-1).topk(gate.top_k)
        scores = scores / scores.sum(-1, keepdim=True)
        return logits, scores.flip(-1), chosen.flip(-1)


class SoftmaxOfChosen(SoftmaxAfterChoice):
    """Right where the model renormalises: the softmax of the chosen logits is then the renormalised softmax of all."""


class BalanceByHand(DDP):
    """Cross-entropy, and the balance term from the routers' logits."""

    def loss(self, input_ids, labels):
        self.num_tokens = labels.numel()
        output = self.wrapped(input_ids=input_ids, labels=labels, use_cache=False)
        scores = torch.cat(output.router_logits).softmax(-1)
        chosen = F.one_hot(scores.topk(self.model.num_experts_per_tok).indices, self.model.num_experts)
        load = chosen.float().sum(1).mean(0)
        term = self.model.num_experts * (load * scores.mean(0)).sum()
        logits = output.logits.float().flatten(0, 1)
        return F.cross_entropy(logits, labels.flatten()) + self.model.router_aux_loss_coef * term


SHORT = ("--seq_length", "64")
MIXTRAL = ("--model_name", "tiny-mixtral", *SHORT)
QWEN = ("--model_name", "tiny-qwen3-moe", *SHORT)
DEEPSEEK = ("--model_name", "tiny-deepseek-v3", *SHORT)
UNNORMALISED = ("--model_name", "tests/strangers/unnormalised", *SHORT)
CLIP = ("--max_grad_norm", "0.5")
TWO = ("--gradient_accumulation_steps", "2")
TP = ("--tp_size", "2", "--dp_size", "1")
E = Expected
BUGS: dict[str, Expected] = {
    "ExpertGradientsSummed": E(
        "NVIDIA/Megatron-LM 5956, pytorch/pytorch 160285",
        1,
        "gradient",
        "gradient/model.layers.1.mlp.experts",
        "every gradient of an expert is twice what it should be: a sum over ranks, not a mean",
        "that a rank's own gradient is used, other parameters, the loss",
        "twice|times|scale|factor|not divided|not averaged",
        flags=MIXTRAL,
    ),
    "ExpertGradientsDividedTwice": E(
        "NVIDIA/Megatron-LM 6450",
        1,
        "gradient",
        "gradient/model.layers.1.mlp.experts",
        "every gradient of an expert is half of what it should be",
        "a missing sum, a rank's own gradient, tokens left out",
        "half|scale|factor|divided|0.5",
        flags=MIXTRAL,
    ),
    "ExpertsSkippedByAllReduce": E(
        "facebookresearch/fairseq 4220",
        1,
        "gradient",
        "gradient/model.layers.1.mlp.experts",
        "the gradients of experts are not averaged over dp",
        "other parameters, a scale, tokens left out",
        "dp reduction|averag|share",
        flags=MIXTRAL,
    ),
    "RouterLearnsFromLocalExperts": E(
        "huggingface/transformers 48205",
        1,
        "backward",
        "backward/model.layers.1.mlp.gate.1",
        "the gradient of the scores is each rank's own share, of its own experts",
        "the balance term, the input's gradient, dp, wrong choice",
        "scores|router|gate.1|share|sum over",
        flags=(*MIXTRAL, *TP),
    ),
    "RouterLearnsFromLocalExpertsOverDp": E(
        "pytorch/torchtitan 2416",
        1,
        "backward",
        "backward/model.layers.1.mlp.gate.1",
        "the gradient of the scores of other ranks' experts is zero",
        "the balance term, the input's gradient, other samples, tp",
        "scores|router|gate.1|local|zero",
        flags=MIXTRAL,
    ),
    "InputLearnsFromLocalExperts": E(
        "NVIDIA-NeMo/Automodel 1260",
        1,
        "backward",
        "backward/model.layers.1.post_attention_layernorm",
        "the gradient of the experts' input is each rank's own share, of its own experts",
        "the router's gradient, the balance term, dp, attention",
        "experts|mlp|share|sum over",
        flags=(*MIXTRAL, *TP),
    ),
    "NormWithoutOtherExperts": E(
        "hpcaitech/ColossalAI 2192, NVIDIA-NeMo/Automodel 3816",
        1,
        "gradient norm",
        "",
        "the norm lacks the gradients of the experts of other ranks",
        "wrong gradients, not clipped, tp",
        "norm|clip",
        flags=(*MIXTRAL, *CLIP),
    ),
    "NormsAveragedOverExperts": E(
        "deepspeedai/DeepSpeed 8475",
        1,
        "gradient norm",
        "",
        "the norm is the mean of norms that have other experts each",
        "wrong gradients, not clipped, tp",
        "norm|clip",
        flags=(*MIXTRAL, *CLIP),
    ),
    "TokensDroppedInOneLayer": E(
        "deepseek-ai/DeepSeek-V2 48",
        1,
        "forward",
        "forward/model.layers.1.mlp.experts",
        "in layer 1 tokens beyond a capacity get nothing from an expert",
        "wrong choice, wrong scores, a missing sum, weights",
        "drop|capacity|tokens|lack",
        flags=MIXTRAL,
    ),
    "ResultsAtWrongTokens": E(
        "pytorch/torchtitan 3604",
        1,
        "forward",
        "forward/model.layers.1.mlp.experts",
        "in layer 1 the results of experts are those of other tokens",
        "wrong choice, wrong scores, a missing sum, weights, positions of attention",
        "order|permut|exchang|tokens",
        flags=MIXTRAL,
    ),
    "SharedExpertCountsTwice": E(
        "sgl-project/sglang 35535",
        1,
        "forward",
        "forward/model.layers.1.mlp",
        "the shared expert counts twice in layer 1",
        "wrong routed experts, wrong scores, a missing sum, weights",
        "shared",
        flags=DEEPSEEK,
    ),
    "ScoresNotNormalised": E(
        "pytorch/torchtitan 1418",
        1,
        "forward",
        "forward/model.layers.0.mlp.gate.1",
        "the scores of the chosen experts do not sum to 1",
        "wrong choice, wrong logits, reduction, weights",
        "normali|sum to|score|softmax",
        flags=QWEN,
    ),
    "SoftmaxAfterChoice": E(
        "NVIDIA/Megatron-LM 955",
        1,
        "forward",
        "forward/model.layers.0.mlp.gate.1",
        "the softmax is over the chosen experts, not over all",
        "wrong choice, wrong logits, reduction, weights",
        "normali|sum to|score|softmax",
        flags=UNNORMALISED,
    ),
    "OneTokenGoesElsewhere": E(
        "no thread",
        1,
        "forward",
        "forward/model.layers.1.mlp.gate.2",
        "one token of dp rank 1 goes to its third expert, not to its second",
        "wrong scores, logits or experts, a missing sum, other samples",
        "cho|rout|expert",
        flags=MIXTRAL,
    ),
    "RouterInBfloat16": E(
        "vllm-project/vllm 14027",
        1,
        "forward",
        "forward/model.layers.0.mlp.gate",
        "the router's logits are rounded to bfloat16",
        "wrong weights, reduction, normalisation",
        "bfloat16|precision|round",
        flags=MIXTRAL,
    ),
    "GroupsByBestExpert": E(
        "vllm-project/vllm 13474",
        1,
        "forward",
        "forward/model.layers.1.mlp.gate.2",
        "in layer 1 groups are chosen by other scores, and so other experts",
        "wrong scores, logits or experts, a missing sum, other samples",
        "cho|rout|group",
        flags=DEEPSEEK,
    ),
    "OneExpertTwice": E(
        "ggml-org/llama.cpp 24591",
        1,
        "forward",
        "forward/model.layers.1.mlp.gate.2",
        "in layer 1 some tokens take one expert twice",
        "wrong scores, logits or experts, a missing sum, other samples",
        "cho|rout|twice|expert",
        flags=MIXTRAL,
    ),
    "RouterDropsTokens": E(
        "deepseek-ai/DeepSeek-V2 48",
        1,
        "forward",
        "forward/model.layers.1.mlp.gate",
        "in layer 1 some tokens have no second expert",
        "wrong scores, logits or experts, a missing sum, other samples",
        "cho|rout|drop|capacity|expert",
        flags=MIXTRAL,
    ),
    "BalancePerMicroBatch": E(
        "NVIDIA-NeMo/Automodel 3359",
        1,
        "backward",
        "backward/model.layers.1.mlp.gate",
        "the balance term's gradient counts twice, once per micro batch",
        "that the whole loss is scaled, scores, missing micro batches, dp",
        "balance|aux",
        flags=(*MIXTRAL, *TWO),
    ),
    "BalanceDividedByDp": E(
        "NVIDIA-NeMo/Automodel 1412",
        1,
        "backward",
        "backward/model.layers.1.mlp.gate",
        "the balance term's gradient is half of what it should be",
        "that the whole loss is scaled, scores, a missing sum",
        "balance|aux",
        flags=MIXTRAL,
    ),
    "BalanceNeverFlows": E(
        "NVIDIA-NeMo/Automodel 1408",
        1,
        "backward",
        "backward/model.layers.1.mlp.gate",
        "the balance term has no gradient",
        "that the whole loss is scaled, scores, frozen parameters",
        "balance|aux",
        flags=QWEN,
    ),
}
V = Variant
VARIANTS: dict[str, Variant] = {
    "ExpertsByEager": V(MIXTRAL),
    "ExpertsByBatchedProduct": V(MIXTRAL),
    "ExpertsCheckpointed": V(MIXTRAL),
    "LeastExpertFirst": V(MIXTRAL),
    "SoftmaxOfChosen": V(MIXTRAL),
    "TokensSent": V(QWEN),
    "ExpertsCutOverTp": V(QWEN),
    "TokensKept": V((*MIXTRAL, *TP)),
    "GroupsOfExperts": V(DEEPSEEK),
    "BalanceByHand": V((*MIXTRAL, *TWO)),
}
