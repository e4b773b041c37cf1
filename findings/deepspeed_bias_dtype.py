"""DeepSpeed AutoTP: under `torch_autocast`, column-parallel layers with a bias return float32.

python findings/deepspeed_bias_dtype.py
"""

import torch
from finding import deepspeed_engine, settle


def check() -> tuple[bool, str]:
    autocast = {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": []}
    engine = deepspeed_engine({"torch_autocast": autocast, "tensor_parallel": {"autotp_size": 2}})
    seen = {}
    layer = engine.module.model.layers[0]
    for name, module in (
        ("q_proj, with a bias", layer.self_attn.q_proj),
        ("gate_proj, without", layer.mlp.gate_proj),
    ):
        module.register_forward_hook(
            lambda module, args, output, name=name: seen.update({name: output.dtype})
        )
    ids = torch.zeros(2, 16, dtype=torch.int64)
    engine(input_ids=ids, labels=ids)
    holds = seen["q_proj, with a bias"] == torch.float32 and seen["gate_proj, without"] == torch.bfloat16
    return holds, ", ".join(f"{name}: {dtype}" for name, dtype in seen.items())


if __name__ == "__main__":
    raise SystemExit(settle(check, libraries=("deepspeed", "torch"), ranks=2))
