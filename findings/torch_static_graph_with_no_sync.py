"""torch: DDP with `static_graph=True` fails if the first backward pass is inside `no_sync`.

python findings/torch_static_graph_with_no_sync.py
"""

import torch
from finding import message_of, settle
from torch.nn.parallel import DistributedDataParallel


def two_micro_batches(*, static_graph: bool) -> None:
    model = DistributedDataParallel(torch.nn.Linear(8, 8), static_graph=static_graph)
    with model.no_sync():
        model(torch.ones(2, 8)).sum().backward()
    model(torch.ones(2, 8)).sum().backward()


def check() -> tuple[bool, str]:
    two_micro_batches(static_graph=False)
    try:
        two_micro_batches(static_graph=True)
    except RuntimeError as error:
        return "INTERNAL ASSERT" in str(error), message_of(error)
    return False, "two micro batches go through"


if __name__ == "__main__":
    raise SystemExit(settle(check, libraries=("torch",), ranks=2))
