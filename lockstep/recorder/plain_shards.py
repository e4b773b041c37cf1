"""Where a plain tensor that is a part of a parameter, as AutoTP and Megatron have them, lies in the whole: found by its content."""

import torch

from lockstep.ground.blocks import Runs, runs_of
from lockstep.recorder import deepspeed_layers
from lockstep.recorder.hashes import hashes_of_slices
from lockstep.recorder.wrapped import named_parameters


class PlainShards:
    """Made of a model that is whole, or cut by AutoTP; `runs` then says which slices of a parameter a part has.

    A part is cut along one dim, and its slices along it are compared as bfloat16, so it may be of another dtype.
    """

    def __init__(self, model: torch.nn.Module):
        self.shapes = {name: tuple(one.shape) for name, one in named_parameters(model).items()}
        self.places: dict[str, list[dict[int, int]]] = {
            name: [
                {value: place for place, value in enumerate(hashes_of_slices(one, dim))}
                for dim in range(one.ndim)
            ]
            for name, one in named_parameters(model).items()
            if type(one.data) is torch.Tensor
            and one.device.type != "meta"
            and one.numel()  # ZeRO 3 has emptied it
        }
        self.found: dict[str, list[Runs]] = {}
        for name, one in named_parameters(model).items():  # which may be cut already
            runs = deepspeed_layers.runs(one)
            if runs is not None:
                self.found[name], self.shapes[name] = runs, deepspeed_layers.noted(one)["original_shape"]

    def runs(self, name: str, part: torch.Tensor) -> list[Runs] | None:
        """The runs of a parameter's part along each dim of the whole; None if it is no part, or not known as one.

        What is found of the first tensor, the weights, holds for gradients and what an optimizer keeps.
        """
        whole = self.shapes.get(name, ())
        cut = [dim for dim, (size, own) in enumerate(zip(whole, part.shape, strict=False)) if size != own]
        if len(whole) != part.ndim or len(cut) != 1 or not (name in self.places or name in self.found):
            return None
        if name not in self.found:
            (dim,) = cut
            known, size = self.places[name][dim], whole[dim]
            if len(known) < size:
                # Slices are alike, as those of a bias of zeros are: it is cut as its module's other parameters are.
                along = [runs[dim] for other, runs in self.found.items() if _same_module(other, name)]
            else:
                places = [known.get(value, -1) for value in hashes_of_slices(part, dim)]
                along = [] if -1 in places else [runs_of(places)]
            if not along or sum(length for _, length in along[0]) != part.shape[dim]:
                return None
            self.found[name] = [[(0, own)] for own in whole]
            self.found[name][dim] = along[0]
        return self.found[name]


def _same_module(one: str, other: str) -> bool:
    return one.rpartition(".")[0] == other.rpartition(".")[0]
