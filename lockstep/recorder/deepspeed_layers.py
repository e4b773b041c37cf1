"""The layers by which DeepSpeed's AutoTP replaces torch's: what was there before, and which part of a weight a rank has."""

from typing import Any

import torch

from lockstep.ground.blocks import Runs
from lockstep.ground.errors import UserError

FILE = "deepspeed.module_inject.layers"
LINEAR = ("LinearLayer", "LinearAllreduce", "LmHeadLinearAllreduce", "VocabParallelLinear")
EMBEDDING = {"max_norm": None, "norm_type": 2.0, "scale_grad_by_freq": False, "sparse": False}


def noted(tensor: torch.Tensor) -> dict[str, Any]:
    """Return AutoTP's note on a parameter of its layers (original_shape, partition_dim, partition_sizes); {} for others."""
    return getattr(tensor, "ds_autotp_universal_checkpoint_meta", {})


def runs(parameter: torch.Tensor) -> list[Runs] | None:
    """Return the runs of this rank's shard along each dim of the whole parameter; None if AutoTP has not cut it."""
    note = noted(parameter)
    cut_dim = note.get("partition_dim")
    if cut_dim is None:
        return None
    from deepspeed.utils import groups

    by_dim, sizes = [[(0, size)] for size in note["original_shape"]], note["partition_sizes"]
    rank = groups.get_tensor_model_parallel_rank()
    by_dim[cut_dim] = [(sum(sizes[:rank]), sizes[rank])]
    return by_dim


def before(module: torch.nn.Module) -> tuple[type, dict[str, Any]]:
    """Return the class and the attributes of the layer that was replaced. Raises UserError if these are no longer known."""
    name = type(module).__name__
    if name in LINEAR:
        return torch.nn.Linear, {} if "bias" in module._parameters else {"bias": None}
    if name == "VocabParallelEmbedding" and module._buffers["embed_scale"] is None:
        return torch.nn.Embedding, {"padding_idx": module.padding_idx, **EMBEDDING}
    raise UserError(
        f"AutoTP has replaced a layer by its {name}, and what it was is not known any more; "
        "record in the script, `with lockstep.record(model, folder)` before deepspeed.initialize"
    )
