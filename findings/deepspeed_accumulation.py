"""DeepSpeed 0.18.6 divides by the accumulation steps at each output of the model; 0.17.6 at stage 2 keeps the last micro batch alone.

python findings/deepspeed_accumulation.py
"""

import os

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import torch
from deepspeed.utils import safe_get_full_grad
from finding import settle

STEPS, SIZE = 2, 3  # micro batches, samples in each


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x):
        logits = self.head(self.body(x).tanh())
        return logits.square().mean(), logits


def gradients(x: torch.Tensor, stage: int) -> dict[str, torch.Tensor]:
    """Of the mean over all samples, in micro batches."""
    net = Net()
    settings = {
        "train_micro_batch_size_per_gpu": SIZE,
        "gradient_accumulation_steps": STEPS,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(
        model=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), config=settings
    )
    for number in range(STEPS):
        loss, _ = engine(x[number * SIZE : (number + 1) * SIZE])
        engine.backward(loss)
        if number < STEPS - 1:
            engine.step()
    return {name: safe_get_full_grad(parameter).clone() for name, parameter in net.named_parameters()}


def check() -> tuple[bool, str]:
    x = torch.randn(STEPS * SIZE, 4, generator=torch.Generator().manual_seed(1))
    plain = Net()
    plain(x)[0].backward()
    said, wrong = [], False
    for stage in (0, 1, 2):
        found = gradients(x, stage)
        for name in ("body.weight", "head.weight"):
            right = plain.get_parameter(name).grad
            ratio = float((found[name] * right).sum() / right.square().sum())
            wrong |= not torch.allclose(found[name], right, rtol=1e-4, atol=1e-7)
            said.append(f"stage {stage}, {name}: {ratio:.4f}")
    return wrong, f"DeepSpeed {deepspeed.__version__}, times the gradient of one batch: " + "; ".join(said)


if __name__ == "__main__":
    raise SystemExit(settle(check, libraries=("torch", "deepspeed")))
