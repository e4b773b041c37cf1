"""torch: fused SGD does not work on DTensors; fused AdamW does.

python findings/torch_fused_sgd_on_dtensors.py
"""

import torch
from finding import message_of, settle
from torch.distributed.fsdp import fully_shard


def step(optimizer_class) -> None:
    model = torch.nn.Linear(8, 8)
    fully_shard(model)
    optimizer = optimizer_class(model.parameters(), lr=0.1, fused=True)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()


def check() -> tuple[bool, str]:
    step(torch.optim.AdamW)
    try:
        step(torch.optim.SGD)
    except NotImplementedError as error:
        return "_fused_sgd_" in str(error), message_of(error)
    return False, "a fused step of SGD over sharded parameters goes through"


if __name__ == "__main__":
    raise SystemExit(settle(check, libraries=("torch",)))
