"""How a recorded model is divided among ranks, and in which dtypes it computes, as far as torch knows."""

import inspect
import sys
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from lockstep.ground.errors import UserError
from lockstep.recorder.wrapped import clean, fsdp_groups

OTHER_PIPELINES = ("pipeline_parallel",)


def require_not_fsdp1(model: torch.nn.Module, *wrapped: torch.nn.Module) -> None:
    """Raise UserError if FSDP1 wraps the model or a part of it, or is about to wrap one of the modules `wrapped`."""
    for name, module in model.named_modules():
        if isinstance(module, FullyShardedDataParallel) or any(module is one for one in wrapped):
            raise UserError(
                f"{name or 'the model'} is wrapped by FSDP1, whose flat parameters have no names of their own; use fully_shard (FSDP2)"
            )


class Stage(NamedTuple):
    """A stage of a pipeline, by its number."""

    number: int
    stages: int
    is_trial: bool  # whether it is called to learn the shapes of what it returns, and not for a micro batch
    of_rank: dict[int, torch.nn.Module]  # by their numbers, the stages that the rank has in its schedule


def stage() -> Stage | None:
    """Return the stage of a pipeline, of torch or of a PipelineEngine, that calls the model; None if none does.

    Raises UserError for a pipeline of another library.
    """
    frame, owner, functions, schedule = inspect.currentframe(), None, set[str](), None
    while frame is not None:
        caller = frame.f_globals.get("__name__", "")
        if caller.endswith(".runtime.pipe.engine") and frame.f_code.co_name == "_exec_forward_pass":
            engine = frame.f_locals["self"]
            return Stage(engine.stage_id, engine.num_stages, False, {engine.stage_id: engine.module})
        if any(word in caller for word in OTHER_PIPELINES):
            raise UserError(
                f"the model is a stage of a pipeline, called by {caller}, whose stages are not known; use torch.distributed.pipelining, or record a run without pipeline parallelism"
            )
        if caller == "torch.distributed.pipelining.stage":
            owner = frame.f_locals.get("self", owner)
            functions.add(frame.f_code.co_name)
        elif caller == "torch.distributed.pipelining.schedules":
            schedule = frame.f_locals.get("self", schedule)
        frame = frame.f_back
    if owner is None:
        return None
    of_rank = {one.stage_index: one.submod for one in getattr(schedule, "_stages", ())}
    return Stage(owner.stage_index, owner.num_stages, "forward_one_chunk" not in functions, of_rank)


def autocast_of(model: torch.nn.Module) -> str | None:
    """Return the dtype of autocast on the model's device; None without autocast."""
    device = next(model.parameters()).device.type
    return str(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else None


def policies(model: torch.nn.Module) -> dict[str, dict[str, str | None]]:
    """Return module -> the dtypes that FSDP2 has for the module and its weights; "" is the model itself.

    They are the `Policy` of lockstep/recorder/recorded_step.py. A weight is of the nearest module around it.
    """
    found = {
        clean(name): module._get_fsdp_state()._mp_policy
        for name, module in model.named_modules()
        if isinstance(module, FSDPModule)
    }

    def named(dtype: torch.dtype | None) -> str | None:
        return None if dtype is None else str(dtype)

    return {
        name: {
            "param": named(policy.param_dtype),
            "reduce": named(policy.reduce_dtype),
            "input": named(policy.param_dtype) if policy.cast_forward_inputs else None,
            "output": named(policy.output_dtype),
        }
        for name, policy in found.items()
    }


def tf32() -> list[str]:
    """Return which float32 operations a GPU with TF32 computes in it: "matmul", "convolution".

    By default, torch allows it for convolutions.
    """
    matmul: Any = torch.backends.cuda.matmul
    cudnn: Any = torch.backends.cudnn
    if hasattr(matmul, "fp32_precision"):  # since torch 2.9
        uses_tf32 = [matmul.fp32_precision == "tf32", cudnn.conv.fp32_precision == "tf32"]
    else:
        uses_tf32 = [matmul.allow_tf32, cudnn.allow_tf32]
    return [name for name, is_used in zip(("matmul", "convolution"), uses_tf32, strict=True) if is_used]


def compiled_frames() -> int:
    """Return how many frames torch.compile has seen in this process."""
    # Only compiling imports it
    dynamo = sys.modules.get("torch._dynamo.utils")
    return 0 if dynamo is None else sum(dynamo.counters["frames"].values())


def groups() -> list[list[int]]:
    """Return the ranks of each process group that this rank is in, in the order of the group."""
    # For each group: rank -> its number in the group
    numbers = dist.distributed_c10d._world.pg_group_ranks.values() if dist.is_initialized() else ()
    return [sorted(number_of, key=lambda rank: number_of[rank]) for number_of in numbers]


def data_parallel(model: torch.nn.Module) -> list[int]:
    """Return the ranks that FSDP2 divides the samples among, as far as this rank knows; [] without FSDP2."""
    meshes = [group.mesh_info.mesh for group in fsdp_groups(model)]
    return sorted({rank for mesh in meshes for rank in mesh.mesh.flatten().tolist()})
