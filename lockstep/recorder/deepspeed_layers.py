"""The layers that DeepSpeed's AutoTP puts in the place of torch's: what was there before, and which part of its weight a rank has."""

from typing import Any

import torch

from lockstep.ground.blocks import Runs
from lockstep.ground.errors import UserError

FILE = "deepspeed.module_inject.layers"
LINEAR = ("LinearLayer", "LinearAllreduce", "LmHeadLinearAllreduce", "VocabParallelLinear")
EMBEDDING = {"max_norm": None, "norm_type": 2.0, "scale_grad_by_freq": False, "sparse": False}


def noted(tensor: torch.Tensor) -> dict[str, Any]:
    """What AutoTP notes of a parameter of its layers: original_shape, partition_dim, partition_sizes; of another, {}."""
    return getattr(tensor, "ds_autotp_universal_checkpoint_meta", {})


def runs(parameter: torch.Tensor) -> list[Runs] | None:
    """The places that this rank's part of a parameter has along each dim of the whole; None for one that AutoTP has not cut."""
    about = noted(parameter)
    cut = about.get("partition_dim")
    if cut is None:
        return None
    from deepspeed.utils import groups

    found, sizes = [[(0, size)] for size in about["original_shape"]], about["partition_sizes"]
    rank = groups.get_tensor_model_parallel_rank()
    found[cut] = [(sum(sizes[:rank]), sizes[rank])]
    return found


def before(module: torch.nn.Module) -> tuple[type, dict[str, Any]]:
    """The class and the attributes of the layer that was there. Raises UserError for one that is not known any more."""
    name = type(module).__name__
    if name in LINEAR:
        return torch.nn.Linear, {} if "bias" in module._parameters else {"bias": None}
    if name == "VocabParallelEmbedding" and module._buffers["embed_scale"] is None:
        return torch.nn.Embedding, {"padding_idx": module.padding_idx, **EMBEDDING}
    raise UserError(
        f"AutoTP has replaced a layer by its {name}, and what it was is not known any more; "
        "record in the script, `with lockstep.record(model, folder)` before deepspeed.initialize"
    )
