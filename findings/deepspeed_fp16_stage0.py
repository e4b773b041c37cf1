"""DeepSpeed's engine in fp16 without ZeRO does not scale the loss, and divides the gradients by the scale all the same.

python findings/deepspeed_fp16_stage0.py
"""

import math
import os

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import torch
from finding import settle

# Without this, DeepSpeed compiles it
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
SCALE, RATE = 128.0, 0.5


def share(stage: int) -> float:
    """The first update of SGD, as a multiple of -RATE x gradient."""
    torch.manual_seed(0)
    net = torch.nn.Linear(8, 8, bias=False)
    x = torch.randn(4, 8)
    weight = net.weight.detach().clone().requires_grad_()
    torch.nn.functional.linear(x, weight).square().mean().backward()
    settings = {
        "train_micro_batch_size_per_gpu": len(x),
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "optimizer": {"type": "SGD", "params": {"lr": RATE}},
        "fp16": {"enabled": True, "loss_scale": SCALE},
    }
    engine, *_ = deepspeed.initialize(model=net, config=settings, model_parameters=list(net.parameters()))
    before = engine.module.weight.detach().float().clone()
    engine.backward(engine(x.half()).float().square().mean())
    engine.step()
    moved = before - engine.module.weight.detach().float()
    expected = RATE * weight.grad
    return float((moved * expected).sum() / expected.square().sum())


def check() -> tuple[bool, str]:
    deepspeed.init_distributed("gloo")
    shares = {stage: share(stage) for stage in (0, 1)}
    said = "; ".join(f"ZeRO {stage}: {value:.4f} times the gradient" for stage, value in shares.items())
    is_divided = math.isclose(shares[0], 1 / SCALE, rel_tol=0.2)
    return is_divided and math.isclose(shares[1], 1, rel_tol=0.05), said


if __name__ == "__main__":
    raise SystemExit(settle(check, libraries=("torch", "deepspeed"), ranks=1))
