"""How a recorded model is divided among ranks, and in which dtypes it computes, as far as torch knows."""

import inspect
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from lockstep.ground.errors import UserError

PIPELINES = ("torch.distributed.pipelining", ".runtime.pipe.", "pipeline_parallel")


def require_recordable(model: torch.nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, FullyShardedDataParallel):
            raise _of_fsdp1(name)


def require_not_fsdp1(model: torch.nn.Module, given: tuple) -> None:
    """`given` are the arguments of an FSDP1 that is made: itself, and a module."""
    names = {id(module): name for name, module in model.named_modules()}
    found = [names[id(one)] for one in given[1:2] if id(one) in names]
    if found:
        raise _of_fsdp1(found[0])


def _of_fsdp1(name: str) -> UserError:
    return UserError(
        f"{name or 'the model'} is wrapped by FSDP1, whose flat parameters have no names of their own; use fully_shard (FSDP2)"
    )


def require_no_pipeline() -> None:
    """Libraries of pipelines call a model that is a stage alone."""
    frame = inspect.currentframe()
    while frame is not None:
        caller = frame.f_globals.get("__name__", "")
        if any(word in caller for word in PIPELINES):
            raise UserError(
                f"the model is a stage of a pipeline, called by {caller}, and no reference can compute a stage alone; record a run without pipeline parallelism"
            )
        frame = frame.f_back


def autocast_of(model: torch.nn.Module) -> str | None:
    """The dtype of autocast on the model's device, or None."""
    device = next(model.parameters()).device.type
    return str(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else None


def dtypes_of(model: torch.nn.Module) -> dict[str, str]:
    """The dtypes that FSDP2 gives parameters for the forward and the backward pass, and reduces gradients in, but for their own."""
    if not isinstance(model, FSDPModule):
        return {}
    policy = model._get_fsdp_state()._mp_policy
    found = {"param_dtype": policy.param_dtype, "reduce_dtype": policy.reduce_dtype or policy.param_dtype}
    return {name: str(dtype) for name, dtype in found.items() if dtype is not None}


def casts_inputs(model: torch.nn.Module) -> bool:
    """Whether FSDP2 casts what the model is called with to the dtype of its parameters."""
    return isinstance(model, FSDPModule) and model._get_fsdp_state()._mp_policy.cast_forward_inputs


def tf32() -> list[str]:
    """What a GPU that has TF32 computes of float32 in it: "matmul", "convolution". By default, torch says so of convolutions."""
    matmul: Any = torch.backends.cuda.matmul
    cudnn: Any = torch.backends.cudnn
    if hasattr(matmul, "fp32_precision"):  # since torch 2.9
        found = [matmul.fp32_precision == "tf32", cudnn.conv.fp32_precision == "tf32"]
    else:
        found = [matmul.allow_tf32, cudnn.allow_tf32]
    return [name for name, used in zip(("matmul", "convolution"), found, strict=True) if used]


def compiled_frames() -> int:
    """How many frames torch.compile has seen in this process."""
    found = sys.modules.get("torch._dynamo.utils")  # which is imported to compile
    return 0 if found is None else sum(found.counters["frames"].values())


def groups() -> list[list[int]]:
    """The ranks of each process group that this rank is in, in their order there."""
    groups = dist.distributed_c10d._world.pg_group_ranks.values() if dist.is_initialized() else ()
    return [sorted(ranks, key=lambda rank: ranks[rank]) for ranks in groups]


def data_parallel(model: torch.nn.Module) -> list[int]:
    """The ranks that FSDP2 divides the samples among, as far as this rank knows; empty without it."""
    groups = [
        module._get_fsdp_state()._fsdp_param_group
        for module in model.modules()
        if isinstance(module, FSDPModule)
    ]
    return sorted(
        {rank for group in groups if group for rank in group.mesh_info.mesh.mesh.flatten().tolist()}
    )
