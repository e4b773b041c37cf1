"""DeepSpeed: `torch_autocast` reduces the gradients of `nn.Linear` in bfloat16 by default, at tp 1 and not at tp 2.

python findings/deepspeed_reduction_dtype.py
"""

import torch
from finding import deepspeed_engine, settle


def dtypes(more: dict) -> list[str]:
    """The dtypes in which gradients of the attention's projections are to be reduced."""
    from deepspeed.runtime.torch_autocast import get_comm_dtype

    engine = deepspeed_engine({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}, **more})
    return sorted({str(get_comm_dtype(p)) for name, p in engine.module.named_parameters() if "proj" in name})


def check() -> tuple[bool, str]:
    alone, parallel = dtypes({}), dtypes({"tensor_parallel": {"autotp_size": 2}})
    holds = alone == [str(torch.bfloat16)] and parallel == [str(torch.float32)]
    return holds, f"the projections' gradients are reduced in {alone} at tp 1, in {parallel} at tp 2"


if __name__ == "__main__":
    raise SystemExit(settle(check, libraries=("deepspeed",), ranks=2))
