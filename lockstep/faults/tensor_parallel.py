"""Reductions over the tensor-parallel group that are missing, or done twice."""

import importlib

import torch
import torch.distributed as dist

from lockstep.faults import around, fault

MISSING, DOUBLED = "TP reduction missing", "TP reduction doubled"


def named(strategy, name: str) -> torch.nn.Module:
    return dict(strategy.model.named_modules())[name]


@fault(seen_in="NVIDIA/Megatron-LM 1446", bug_class=MISSING, cause="tp reduction missing",
       first="forward/model.layers.1.self_attn.o_proj")  # fmt: skip
def row_parallel_sum_dropped(run):
    """Each rank goes on with its own partial product of o_proj."""
    strategy = yield
    module = named(strategy, "model.layers.1.self_attn.o_proj")
    if run.autotp:
        module.mp_group = None
    else:
        module._forward_hooks.clear()
        module.register_forward_hook(lambda _module, _inputs, output: output.to_local())


@fault(seen_in="NVIDIA/Megatron-LM 1446", bug_class=MISSING, cause="tp reduction missing", first="forward/model.embed_tokens")
def embedding_sum_dropped(run):
    """A token whose id another rank holds has an embedding of zeros."""
    strategy = yield
    if run.autotp:
        named(strategy, "model.embed_tokens").mp_group = None
        return
    from torch.distributed.tensor.placement_types import _MaskPartial

    def masked_only(self, tensor, mesh, mesh_dim):
        self.mask_buffer.apply_mask(tensor)
        self.mask_buffer.release_mask()
        return tensor

    run.patch(_MaskPartial, "_reduce_value", masked_only)


class _EnterUnreduced(torch.autograd.Function):
    """A replicated DTensor of x; in backward, this rank's own share of the gradient."""

    @staticmethod
    def forward(ctx, x, mesh):
        from torch.distributed.tensor import DTensor, Replicate

        return DTensor.from_local(x, mesh, [Replicate()], run_check=False)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.to_local(), None


@fault(seen_in="pytorch/torchtitan 1805", bug_class=MISSING, cause="tp reduction missing",
       first="backward/model.layers.1.post_attention_layernorm")  # fmt: skip
def mlp_input_gradient_not_reduced(run):
    """Forward is right; the gradient of the MLP's input is this rank's share alone (a to_local without grad_placements)."""
    strategy = yield
    mlp = named(strategy, "model.layers.1.mlp")
    if run.autotp:
        mlp.gate_proj.mp_group = mlp.up_proj.mp_group = None
    else:
        mesh = strategy.device_mesh["tp"]
        mlp._forward_pre_hooks.clear()
        mlp.register_forward_pre_hook(lambda _module, inputs: (_EnterUnreduced.apply(inputs[0], mesh),))


@fault(seen_in="pytorch/torchtitan 1373", bug_class=MISSING, cause="tp reduction missing", strategies=("deepspeed",),
       first="backward/model.layers.1.post_attention_layernorm")  # fmt: skip
def one_projection_gradient_not_reduced(run):
    """Of all column-parallel layers just one up_proj does not sum the gradient of its input."""
    strategy = yield
    named(strategy, "model.layers.1.mlp.up_proj").mp_group = None


@fault(seen_in="bigcode-project/Megatron-LM 35", bug_class=MISSING, cause="tp reduction missing", strategies=("deepspeed",),
       first="backward/model.layers.1.input_layernorm")  # fmt: skip
def kv_input_gradient_not_reduced(run):
    """The gradients that come back through k and v are not summed over the ranks that share the heads."""
    strategy = yield
    attention = named(strategy, "model.layers.1.self_attn")
    attention.k_proj.mp_group = attention.v_proj.mp_group = None


@fault(seen_in="NVIDIA-NeMo/RL 3716", bug_class=MISSING, cause="tp reduction missing", model="tiny-qwen3",
       first="gradient/model.layers.1.self_attn.k_norm.weight")  # fmt: skip
def head_norm_gradients_not_summed(run):
    """The norms on the heads have their weights on every rank; each learns from its own heads only."""
    if run.autotp:
        auto_tp = importlib.import_module("deepspeed.module_inject.auto_tp").AutoTP
        run.patch(auto_tp, "register_replicated_grad_hooks", lambda self, model: None)
    else:
        import fsdp_strategy

        plan = {pattern: row for pattern, row in fsdp_strategy.TP_PLAN.items() if not pattern.endswith(("q_norm", "k_norm"))}
        run.patch(fsdp_strategy, "TP_PLAN", plan)
        run.patch(fsdp_strategy, "check_plan", lambda model: None)
    yield


@fault(seen_in="huggingface/text-generation-inference 1036", bug_class=DOUBLED, cause="tp reduction repeated",
       first="forward/model.layers.1.mlp.down_proj")  # fmt: skip
def row_parallel_sum_done_twice(run):
    """The output of down_proj, summed over tp already, is summed over tp once more."""
    strategy = yield
    group = run.tp_group(strategy)

    def sum_again(_module, _inputs, output):
        total = output.detach().clone()
        dist.all_reduce(total, group=group)
        return output + (total - output.detach())

    named(strategy, "model.layers.1.mlp.down_proj").register_forward_hook(sum_again)


@fault(seen_in="pytorch/torchtitan 2106", bug_class=DOUBLED, cause="tp reduction repeated",
       first="gradient/model.layers.1.self_attn.q_proj.bias")  # fmt: skip
def bias_gradient_times_tp(run):
    """The gradient of q's bias, whole on its shard already, is multiplied with the tensor-parallel size."""
    yield from _scaled(run, lambda name: name.endswith("layers.1.self_attn.q_proj.bias"), run.config.tp_size)


@fault(seen_in="pytorch/torchtitan 4332", bug_class=DOUBLED, cause="tp reduction repeated",
       first="gradient/model.norm.weight")  # fmt: skip
def norm_gradients_times_tp(run):
    """The gradients of the norms, equal on all ranks already, are summed over tp."""
    yield from _scaled(run, lambda name: name.endswith("norm.weight"), run.config.tp_size)


@fault(seen_in="pytorch/torchtitan 4332", bug_class=DOUBLED, cause="gradient scale",
       first="gradient/model.norm.weight")  # fmt: skip
def norm_gradients_divided_by_tp(run):
    """The gradients of the norms, equal on all ranks already, are averaged as if each rank had a share: divided by tp."""
    yield from _scaled(run, lambda name: name.endswith("norm.weight"), 1 / run.config.tp_size)


def _scaled(run, of, factor: float):
    """Multiply some gradients between backward and update."""
    strategy = yield

    def scale(_step):
        for name, gradient in run.gradients(strategy):
            if of(name):
                gradient.mul_(factor)

    around(strategy, "forward_backward", after=scale)
