"""torch: DDP gives wrong gradients if the memory format of the model is changed after it was wrapped.

python findings/torch_ddp_memory_format.py
"""

import torch
from finding import settle
from torch.nn.parallel import DistributedDataParallel


def gradient(*, before: bool) -> torch.Tensor:
    """Of a convolution's weight, with the same images on all ranks; the format is changed before the model is wrapped, or after."""
    torch.manual_seed(0)
    model = torch.nn.Conv2d(3, 8, 3)
    if before:
        model.to(memory_format=torch.channels_last)
    wrapped = DistributedDataParallel(model)
    model.to(memory_format=torch.channels_last)
    wrapped(torch.randn(4, 3, 8, 8)).square().mean().backward()
    assert model.weight.grad is not None
    return model.weight.grad


def check() -> tuple[bool, str]:
    right, wrong = gradient(before=True), gradient(before=False)
    off = float((wrong - right).norm() / right.norm())
    same = float((wrong.flatten().sort().values - right.flatten().sort().values).norm())
    return off > 0.1, f"relative difference {off:.2g}; sorted, the elements differ by {same:.1g}"


if __name__ == "__main__":
    raise SystemExit(settle(check, libraries=("torch",), ranks=2))
