"""DeepSpeed AutoTP: with a preset, the gradients of Qwen3's norms of heads are not summed over the tensor-parallel ranks.

python findings/deepspeed_preset_and_head_norms.py
"""

from finding import deepspeed_engine, settle

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4}
NORM = "model.layers.0.self_attn.q_norm.weight"
PRESET = {"preset_model": "qwen2"}
SUMMED = {"patterns": [r".*\.[qk]_norm\.weight$"], "partition_type": "skip", "grad_allreduce": True}


def gradient(tensor_parallel: dict | None):
    """The gradient of a norm of heads, of the model as it is or in an engine; on this rank."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=256, num_key_value_heads=2, head_dim=16, **SIZES))
    ids = torch.arange(32).reshape(2, 16)
    if tensor_parallel is None:
        model(input_ids=ids, labels=ids).loss.backward()
    else:
        whole = {"zero_optimization": {"stage": 0}, "tensor_parallel": {"autotp_size": 2, **tensor_parallel}}
        engine = deepspeed_engine(whole, model=model)
        engine.backward(engine(input_ids=ids, labels=ids).loss)
    return dict(model.named_parameters())[NORM].grad


def check() -> tuple[bool, str]:
    right = gradient(None)
    told = {}, PRESET, {**PRESET, "partition_config": {"layer_specs": [SUMMED]}}
    plan, preset, rule = (float((gradient(each) - right).norm() / right.norm()) for each in told)
    seen = f"q_norm's gradient is off by {plan:.1e} of its norm by default, by {preset:.1e} with a preset, by {rule:.1e} with a rule beside it"
    return preset > 1e-2 > 1e-4 > max(plan, rule), seen


if __name__ == "__main__":
    raise SystemExit(settle(check, libraries=("deepspeed", "transformers"), ranks=2))
