"""transformers: with tensor parallelism, accumulated gradients of the head norms are summed over tp again at every backward pass.

python findings/transformers_accumulated_head_norms.py
"""

import torch
from finding import settle, sharded_by_transformers
from transformers import Qwen3Config, Qwen3ForCausalLM

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4}
NORM = "model.layers.0.self_attn.q_norm.weight"


def gradient(model: torch.nn.Module, passes: int) -> torch.Tensor:
    """The gradient of a head norm after as many backward passes, of different samples."""
    model.zero_grad()
    for index in range(passes):
        ids = torch.arange(32).reshape(2, 16) + 32 * index
        model(input_ids=ids, labels=ids).loss.backward()
    found = dict(model.named_parameters())[NORM].grad
    return found.full_tensor() if hasattr(found, "full_tensor") else found.clone()


def check() -> tuple[bool, str]:
    torch.manual_seed(0)
    whole = Qwen3ForCausalLM(Qwen3Config(vocab_size=256, num_key_value_heads=2, head_dim=16, **SIZES))
    model = sharded_by_transformers(whole, tp_size=2)
    errors = {}
    for passes in (1, 2):
        right = gradient(whole, passes)
        errors[passes] = float((gradient(model, passes) - right).norm() / right.norm())
    seen = f"q_norm's gradient is off by {errors[1]:.1e} of its norm after one backward pass, by {errors[2]:.1e} after two"
    return errors[2] > 1e-2 > 1e-4 > errors[1], seen


if __name__ == "__main__":
    raise SystemExit(settle(check, libraries=("torch", "transformers"), ranks=2))
