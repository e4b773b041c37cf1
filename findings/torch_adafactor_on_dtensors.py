"""torch: Adafactor cannot step a DTensor.

python findings/torch_adafactor_on_dtensors.py
"""

import torch
from finding import settle
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor


def check() -> tuple[bool, str]:
    mesh = init_device_mesh("cpu", (2,))
    parameter = torch.nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]))
    parameter.grad = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
    try:
        torch.optim.Adafactor([parameter]).step()
    except RuntimeError as error:
        return True, f"a step ends with: {str(error).splitlines()[0][:120]}"
    return False, "a step works"


if __name__ == "__main__":
    raise SystemExit(settle(check, libraries=("torch",), ranks=2))
