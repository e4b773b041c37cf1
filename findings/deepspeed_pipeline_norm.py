"""DeepSpeed's pipeline engine, in float32 without ZeRO, clips by the norm of the first stage's gradients alone.

python findings/deepspeed_pipeline_norm.py
"""

import math
import os

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule
from finding import settle

SIZE, BOUND = 4, 1e-3


def change(stage: int, bound: float) -> torch.Tensor:
    """The norm of what a step of SGD with a rate of 1 changes on this rank: that of its stage's gradient, after clipping."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(SIZE, SIZE) for _ in range(4)]
    net = PipelineModule(
        layers, num_stages=2, loss_fn=lambda y, _: y.square().mean(), partition_method="uniform"
    )
    settings = {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": bound,
    }
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=settings)
    before = [parameter.detach().clone() for parameter in net.parameters()]
    x = torch.randn(3, SIZE, generator=torch.Generator().manual_seed(1))
    engine.train_batch(data_iter=iter([(x, x)]))
    return torch.stack(
        [(old - new.detach()).norm() for old, new in zip(before, net.parameters(), strict=True)]
    ).norm()


def check() -> tuple[bool, str]:
    deepspeed.init_distributed("gloo")
    said, wrong = [], {}
    for stage in (0, 1):
        norm = change(stage, 0.0)
        used = float(BOUND * norm / change(stage, BOUND))
        of_stages = [torch.zeros(()) for _ in range(2)]
        dist.all_gather(of_stages, norm)
        first, second = map(float, of_stages)
        whole = math.hypot(first, second)
        wrong[stage] = math.isclose(used, first, rel_tol=1e-3) and not math.isclose(used, whole, rel_tol=1e-3)
        said.append(
            f"ZeRO {stage}: clipped by a norm of {used:.4f}; the stages' are {first:.4f} and {second:.4f}, together {whole:.4f}"
        )
    return wrong[0] and not wrong[1], "; ".join(said)


if __name__ == "__main__":
    raise SystemExit(settle(check, libraries=("torch", "deepspeed"), ranks=2))
