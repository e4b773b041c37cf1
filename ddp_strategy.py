"""The baseline: PyTorch DistributedDataParallel. Every rank holds the whole model; gradients are averaged over dp."""

from typing import TYPE_CHECKING

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from lockstep.training.torch_strategy import TorchStrategy

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class DDPStrategy(TorchStrategy):
    """Whole replicas; `lockstep.training.torch_strategy` has what it shares with other strategies in torch."""

    def parallelize(self, model: "PreTrainedModel", device_mesh: DeviceMesh) -> torch.nn.Module:
        return DistributedDataParallel(
            model, process_group=device_mesh["dp"].get_group(), gradient_as_bucket_view=True
        )
