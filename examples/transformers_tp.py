"""transformers' own tensor and expert parallelism, and FSDP2, as a strategy (docs/your-own-strategy.md walks through it).

    python run_verification.py --strategies ddp,examples/transformers_tp.py:TransformersTP
    python run_verification.py --model_name tiny-mixtral --strategies ddp,examples/transformers_tp.py:TransformersEP@tp1xdp2

`from_pretrained` needs accelerate: pip install -e '.[transformers-tp]'
"""

import shutil
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel
from transformers.distributed import DistributedConfig

from lockstep.training.torch_strategy import TorchStrategy


class TransformersTP(TorchStrategy):
    """`from_pretrained(..., distributed_config=...)` cuts the weights by the model's own plan while it loads them."""

    label = "transformers TP"
    axes = ("dp", "tp")
    shares_experts = False

    def parallelize(self, model: PreTrainedModel, device_mesh: DeviceMesh) -> torch.nn.Module:
        tp, dp = device_mesh["tp"].size(), device_mesh["dp"].size()
        sizes = DistributedConfig(tp_size=tp, fsdp_size=dp, ep_size=tp * dp if self.shares_experts else 1)
        folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(folder)
        if dist.get_rank() == 0:
            model.save_pretrained(folder[0])
        dist.barrier()
        parallel = type(model).from_pretrained(
            folder[0],
            dtype=self.config.parameter_dtype,
            attn_implementation=self.config.attn_impl,
            distributed_config=sizes,
        )
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(Path(folder[0]))
        return parallel.train()


class TransformersEP(TransformersTP):
    """The same, with the experts of a mixture shared out over all ranks. Tokens are sent to them."""

    label = "transformers EP"
    shares_experts = True
