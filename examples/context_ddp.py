"""DistributedDataParallel with context parallelism: whole replicas, each with its own samples and positions.

    python run_verification.py --strategies ddp,examples/context_ddp.py:ContextDDP@dp2xcp2 --output_dir runs/context-ddp

The base class cuts each sequence and attends over all ranks along cp. What is left to do is to average gradients over dp and cp.
"""

from typing import TYPE_CHECKING

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from lockstep.training.torch_strategy import TorchStrategy

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class ContextDDP(TorchStrategy):
    label, axes = "DDP with cp", ("dp", "cp")

    def parallelize(self, model: "PreTrainedModel", device_mesh: DeviceMesh) -> torch.nn.Module:
        both = device_mesh["dp", "cp"]._flatten("dp_cp").get_group()
        return DistributedDataParallel(model, process_group=both, gradient_as_bucket_view=True)
