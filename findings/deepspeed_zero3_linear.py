"""DeepSpeed ZeRO-3: under autocast, biases are added in float32; `torch.nn.functional.linear` stays replaced for all models of the process.

python findings/deepspeed_zero3_linear.py
"""

import torch
from finding import deepspeed_engine, settle


def check() -> tuple[bool, str]:
    original = torch.nn.functional.linear
    engine = deepspeed_engine({"zero_optimization": {"stage": 3}})
    is_replaced = torch.nn.functional.linear is not original
    del engine
    torch.manual_seed(0)
    layer, x = torch.nn.Linear(64, 64), torch.randn(2, 16, 64)  # of no engine
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        own, expected = layer(x), original(x, layer.weight, layer.bias)
        in_float32 = (original(x, layer.weight) + layer.bias).bfloat16()
    holds = is_replaced and torch.equal(own, in_float32) and not torch.equal(own, expected)
    seen = f"{int((own != expected).sum())} of {own.numel()} outputs of a layer outside of the engine are not those of torch"
    return holds, seen


if __name__ == "__main__":
    raise SystemExit(settle(check, libraries=("deepspeed", "torch"), ranks=2))
