"""transformers: with tensor parallelism, the learned slopes of Apertus' activation get each rank's own share of their gradient.

python findings/transformers_apertus_tp.py
"""

import torch
from finding import settle, sharded_by_transformers
from transformers import ApertusConfig, ApertusForCausalLM

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4}
SLOPE = "model.layers.0.mlp.act_fn.alpha_p"


def gradient(model: torch.nn.Module) -> torch.Tensor:
    ids = torch.arange(32).reshape(2, 16)
    model(input_ids=ids, labels=ids).loss.backward()
    found = dict(model.named_parameters())[SLOPE].grad
    return found.full_tensor() if hasattr(found, "full_tensor") else found


def check() -> tuple[bool, str]:
    torch.manual_seed(0)
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    whole = ApertusForCausalLM(ApertusConfig(vocab_size=256, num_key_value_heads=2, **SIZES, **tokens))
    model = sharded_by_transformers(whole, tp_size=2)
    right, found = gradient(whole), gradient(model)
    error = float((found - right).norm() / right.norm())
    return error > 1e-2, f"the gradient of {SLOPE} is off by {error:.1e} of its size on rank 0"


if __name__ == "__main__":
    raise SystemExit(settle(check, libraries=("torch", "transformers"), ranks=2))
