"""torch: Adafactor cannot step a DTensor, and Muon none whose sharded dim has one element.

python findings/torch_adafactor_on_dtensors.py
"""

import torch
from finding import settle
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

CASES = ((torch.optim.Adafactor, (4, 4)), (torch.optim.Muon, (1, 4)))


def check() -> tuple[bool, str]:
    mesh = init_device_mesh("cpu", (2,))
    said = []
    for optimizer, shape in CASES:
        parameter = torch.nn.Parameter(distribute_tensor(torch.ones(shape), mesh, [Shard(0)]))
        parameter.grad = distribute_tensor(torch.ones(shape), mesh, [Shard(0)])
        try:
            optimizer([parameter]).step()
        except RuntimeError as error:
            said.append(f"{optimizer.__name__}: a step ends with: {str(error).splitlines()[0][:120]}")
    return len(said) == len(CASES), "; ".join(said) or "a step works"


if __name__ == "__main__":
    raise SystemExit(settle(check, libraries=("torch",), ranks=2))
