"""torch: FSDP2's `set_gradient_divide_factor` does not work over gloo.

python findings/torch_divide_factor_over_gloo.py
"""

import torch
from finding import message_of, settle
from torch.distributed.fsdp import fully_shard


def backward(*, forced: bool) -> None:
    model = fully_shard(torch.nn.Linear(8, 8))
    model.set_gradient_divide_factor(4.0)
    model.set_force_sum_reduction_for_comms(forced)
    model(torch.ones(2, 8)).sum().backward()


def check() -> tuple[bool, str]:
    backward(forced=True)
    try:
        backward(forced=False)
    except (RuntimeError, ValueError) as error:
        return "PREMUL_SUM" in str(error), message_of(error)
    return False, "a backward pass with a factor of 4 goes through"


if __name__ == "__main__":
    raise SystemExit(settle(check, libraries=("torch",), ranks=2))
