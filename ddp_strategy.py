"""The baseline: PyTorch DistributedDataParallel. Every rank holds the whole model; gradients are averaged over dp."""

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel

from lockstep.training.torch_strategy import TorchStrategy

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class DDPStrategy(TorchStrategy):
    """Whole replicas; `lockstep.training.torch_strategy` has what it shares with other strategies in torch."""

    def parallelize(self, model: "PreTrainedModel", device_mesh: DeviceMesh) -> torch.nn.Module:
        replica = CastWeights(model, torch.bfloat16) if self.config.precision == "mixed" else model
        return DistributedDataParallel(
            replica, process_group=device_mesh["dp"].get_group(), gradient_as_bucket_view=True
        )


class CastWeights(torch.nn.Module):
    """Runs a model with its weights cast to another dtype. Their gradients arrive in the weights' own dtype, and are reduced in it.

    DDP's own `mixed_precision` does the same on GPUs and raises on CPUs (torch 2.13).
    """

    def __init__(self, model: torch.nn.Module, dtype: torch.dtype):
        super().__init__()
        self.module, self.dtype = model, dtype

    def forward(self, *arguments: Any, **options: Any) -> Any:
        cast = {name: weight.to(self.dtype) for name, weight in self.module.named_parameters()}
        return functional_call(self.module, cast, arguments, options)  # tied weights are cast once
