"""Where a plain tensor that is a part of a parameter lies in the whole. It is found by its content.

AutoTP and Megatron have such parts, which are no DTensors.
"""

import torch

from lockstep.ground.blocks import Runs, runs_of
from lockstep.recorder import deepspeed_layers
from lockstep.recorder.hashes import hashes_of_slices
from lockstep.recorder.wrapped import named_parameters


class PlainShards:
    """Tells which slices of a parameter a part has. It is made of a model that is whole, or cut by AutoTP.

    A part is cut along one dim. Slices along it are compared as bfloat16, so it may be of another dtype.
    """

    def __init__(self, model: torch.nn.Module):
        # The shape of the whole, by the name of the parameter
        self.shapes = {name: tuple(tensor.shape) for name, tensor in named_parameters(model).items()}
        # For each dim: the hash of a slice -> its place along the dim. ZeRO 3 empties parameters.
        self.places: dict[str, list[dict[int, int]]] = {
            name: [
                {slice_hash: place for place, slice_hash in enumerate(hashes_of_slices(tensor, dim))}
                for dim in range(tensor.ndim)
            ]
            for name, tensor in named_parameters(model).items()
            if type(tensor.data) is torch.Tensor and tensor.device.type != "meta" and tensor.numel()
            if not tensor.is_complex()
        }
        # The runs that are known, by the name of the parameter
        self.found: dict[str, list[Runs]] = {}
        for name, tensor in named_parameters(model).items():
            # AutoTP may have cut it already.
            runs = deepspeed_layers.runs(tensor)
            if runs is not None:
                self.found[name], self.shapes[name] = runs, deepspeed_layers.noted(tensor)["original_shape"]

    def runs(self, name: str, part: torch.Tensor) -> list[Runs] | None:
        """Return the runs of a parameter's part along each dim of the whole; None if it is not known as a part.

        The weights are asked for first. What is found of them holds for gradient and optimizer state, too.
        """
        full = self.shapes.get(name, ())
        dims = [dim for dim, (size, own) in enumerate(zip(full, part.shape, strict=False)) if size != own]
        if len(full) != part.ndim or len(dims) != 1 or not (name in self.places or name in self.found):
            return None
        if name not in self.found:
            (dim,) = dims
            place_of, size = self.places[name][dim], full[dim]
            if len(place_of) < size:
                # Slices are the same, as in a bias of zeros. It is cut as other parameters of its module are.
                along = [runs[dim] for other, runs in self.found.items() if _same_module(other, name)]
            else:
                places = [place_of.get(slice_hash, -1) for slice_hash in hashes_of_slices(part, dim)]
                along = [] if -1 in places else [runs_of(places)]
            if not along or sum(length for _, length in along[0]) != part.shape[dim]:
                return None
            self.found[name] = [[(0, size)] for size in full]
            self.found[name][dim] = along[0]
        return self.found[name]


def _same_module(one: str, other: str) -> bool:
    return one.rpartition(".")[0] == other.rpartition(".")[0]
