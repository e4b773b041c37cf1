"""torch, gloo: the gradient of `torch.distributed.nn.functional.all_gather` is wrong if it lies transposed in memory.

python findings/torch_gloo_all_gather_gradient.py
"""

import torch
import torch.distributed as dist
from finding import settle
from torch.distributed.nn.functional import all_gather


def gradient_of(arriving: torch.Tensor) -> torch.Tensor:
    own = torch.ones(2, 3, requires_grad=True)
    torch.cat(all_gather(own)).backward(arriving)
    assert own.grad is not None
    return own.grad


def check() -> tuple[bool, str]:
    transposed = torch.arange(12.0).view(3, 4).T  # what arrives on each of two ranks
    right = 2 * transposed.chunk(2)[dist.get_rank()]
    contiguous, other = gradient_of(transposed.contiguous()), gradient_of(transposed)
    seen = f"{other.tolist()} instead of {right.tolist()}"
    return torch.equal(contiguous, right) and not torch.equal(other, right), seen


if __name__ == "__main__":
    raise SystemExit(settle(check, libraries=("torch",), ranks=2))
