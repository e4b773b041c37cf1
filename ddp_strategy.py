"""The baseline: PyTorch DistributedDataParallel. Every rank holds the whole model; gradients are averaged over dp."""

import collections
import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel

from lockstep.plan import ddp
from lockstep.training.torch_strategy import TorchStrategy

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class DDPStrategy(TorchStrategy):
    """Whole replicas; `lockstep.training.torch_strategy` has what it shares with other strategies in torch."""

    wrapped: DistributedDataParallel

    def parallelize(self, model: "PreTrainedModel", device_mesh: DeviceMesh) -> torch.nn.Module:
        options = ddp.of(self.config)
        self.synced = collections.deque[str](maxlen=self.config.gradient_accumulation_steps)
        has_bucket_size = options.bucket_cap_mb != ddp.TORCHS_BUCKET
        wrapped = DistributedDataParallel(
            CastWeights(model, torch.bfloat16) if self.config.precision == "mixed" else model,
            process_group=device_mesh["dp"].get_group(),
            static_graph=options.static_graph,
            find_unused_parameters=options.find_unused_parameters,
            gradient_as_bucket_view=options.gradient_as_bucket_view,
            bucket_cap_mb=options.bucket_cap_mb if has_bucket_size else None,
        )
        if options.compress_gradients == "bf16":
            hook = bf16_compress_hook if self.device.type == "cuda" else sum_in_bfloat16
            wrapped.register_comm_hook(wrapped.process_group, hook)
        return wrapped

    @contextlib.contextmanager
    def _reducing(self, last: bool) -> Iterator[None]:
        with super()._reducing(last or ddp.of(self.config).gradient_sync == "every"):
            self.synced.append("all" if self.wrapped.require_backward_grad_sync else "none")
            yield

    def sharding(self) -> dict[str, Any]:
        # What the C++ reducer says. It has "static_graph" only if that was set.
        live = self.wrapped._get_ddp_logging_data()
        return {
            "replicas": dist.get_world_size(self.wrapped.process_group),
            "static_graph": bool(live.get("static_graph", 0)),
            "find_unused_parameters": bool(live["find_unused_parameters"]),
            "gradient_as_bucket_view": bool(live["gradient_as_bucket_view"]),
            "bucket_bytes": live["bucket_cap_bytes"],
            "gradients_of_micro_batches": list(self.synced),
        }

    def _reduction_dtype(self, parameter: torch.Tensor) -> torch.dtype:
        compressed = any(
            hook in (bf16_compress_hook, sum_in_bfloat16) for hook, _ in self.wrapped._comm_hooks
        )
        return torch.bfloat16 if compressed else super()._reduction_dtype(parameter)


def sum_in_bfloat16(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Call torch's hook, which DDP refuses by its name where there is no CUDA, although gloo can sum bfloat16."""
    return bf16_compress_hook(group, bucket)


class CastWeights(torch.nn.Module):
    """Runs a model with its weights cast to another dtype. Their gradients arrive in the weights' own dtype, and are reduced in it.

    DDP's own `mixed_precision` does the same on GPUs and raises on CPUs (torch 2.13).
    """

    def __init__(self, model: torch.nn.Module, dtype: torch.dtype):
        super().__init__()
        self.module, self.dtype = model, dtype

    def forward(self, *arguments: Any, **options: Any) -> Any:
        # Tied weights are cast once.
        weights = {name: weight.to(self.dtype) for name, weight in self.module.named_parameters()}
        return functional_call(self.module, weights, arguments, options)
