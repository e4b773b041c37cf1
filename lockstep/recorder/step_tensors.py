"""The tensors that a rank keeps of one step: its blocks of each, and where they lie in the whole.

It is also kept which tensors have changed since the step before.
"""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor, Replicate

from lockstep.ground.blocks import blocks, pieces
from lockstep.ground.errors import UserError
from lockstep.recorder import quantized
from lockstep.recorder.complex_numbers import as_real
from lockstep.recorder.hashes import digest
from lockstep.recorder.plain_shards import PlainShards


class StepTensors:
    """What a rank keeps of one step.

    `before` are the hashes of the tensors that the step before ended with, `last_contents` the contents of its large weights, by key.
    """

    def __init__(self, plain_shards: PlainShards, before: dict[str, int], last_contents: dict[str, str]):
        self.plain_shards, self.before, self.last_contents = plain_shards, before, last_contents
        self.tensors: dict[str, torch.Tensor] = {}
        self.places: dict[str, dict[str, Any]] = {}
        self.digests: dict[str, int] = {}  # hashes of what the step ends with
        self.begun: dict[str, int] = {}  # hashes of the state that the optimizer begins with
        self.elsewhere: dict[str, str] = {}  # contents of weights that are written already, by key
        self.changed: list[str] = []  # weights and state that are not what it ended with

    def keep(self, name: str, tensor: torch.Tensor, *, added: bool = False) -> None:
        """Keep a copy of a tensor. `added`: add it to what was kept under this name before."""
        copy = copied(tensor)
        self.tensors[name] = self.tensors[name] + copy if added and name in self.tensors else copy

    def keep_shard(
        self, name: str, tensor: torch.Tensor, *, added: bool = False, known: Mapping[str, str] = {}
    ) -> None:
        """Keep this rank's blocks of a tensor, and where they lie in the whole.

        `added`: add them to what was kept before. `known` has the contents of blocks that are written already, by key.
        Complex numbers are kept as pairs (lockstep/recorder/complex_numbers.py).
        """
        if isinstance(tensor, DTensor) and any(placement.is_partial() for placement in tensor.placements):
            summed = [Replicate() if placement.is_partial() else placement for placement in tensor.placements]
            tensor = tensor.redistribute(placements=summed)
        last_name = name.rpartition("/")[2]
        runs = self.plain_shards.runs(last_name, tensor)
        parts = pieces(tensor.detach()) if runs is None else blocks(tensor.detach(), runs)
        full = tensor.shape if runs is None else self.plain_shards.shapes[last_name]
        pair = [2] if tensor.is_complex() else []
        places = []
        for number, (start, block) in enumerate(parts):
            key = f"{name}#{number}"
            if key in known:
                self.elsewhere[key] = known[key]
            else:
                self.keep(key, as_real(block), added=added)
            places.append({"start": [*start, *[0] * len(pair)], "shape": [*block.shape, *pair]})
        self.places[name] = {"full": [*full, *pair], "blocks": places}

    def forget(self, prefix: str) -> None:
        """Drop the tensors whose names begin with `prefix`."""
        for by_name in (self.tensors, self.places):
            for name in [name for name in by_name if name.startswith(prefix)]:
                del by_name[name]

    def keep_weight(self, name: str, tensor: torch.Tensor) -> None:
        """Keep a parameter from before the step."""
        tensor, key = quantized.values(tensor), f"weight/{name}"
        is_known = key in self.before and self._is_as_before(key, digest_of(tensor))
        self.keep_shard(key, tensor, known=self.last_contents if is_known else {})

    def keep_updated(self, name: str, tensor: torch.Tensor) -> None:
        """Keep a parameter from after the update."""
        tensor = quantized.values(tensor)
        self.keep_shard(f"updated/{name}", tensor)
        self.digests[f"weight/{name}"] = digest_of(tensor)

    def keep_state(self, name: str, tensor: torch.Tensor) -> None:
        """Keep a tensor of an optimizer's state from before the step.

        `name` is state/KEY/NAME for what it has of a parameter, or attribute/KEY/NUMBER.
        """
        self.keep_shard(name, tensor)
        self.begun[name] = digest_of(tensor)
        self._is_as_before(name, self.begun[name])

    def keep_updated_state(self, name: str, tensor: torch.Tensor) -> None:
        """Keep a hash of the same tensor from after the update.

        There is no hash of a setting that the update leaves alone, as the loop may change it.
        """
        hashed = digest_of(tensor)
        if name.startswith("state/") or hashed != self.begun.get(name):
            self.digests[name] = hashed

    def _is_as_before(self, name: str, hashed: int) -> bool:
        """Whether a tensor, whose hash is given, is what the step before ended with, if that is known. If not, it is noted in `changed`."""
        is_same = self.before.pop(name, hashed) == hashed
        if not is_same:
            self.changed.append(name)
        return is_same


def digest_of(tensor: torch.Tensor) -> int:
    return digest(tensor.to_local() if isinstance(tensor, DTensor) else tensor)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy to be written. Raises UserError for complex128, which safetensors cannot write; pairs of real numbers it can."""
    if tensor.dtype is torch.complex128:
        raise UserError(
            f"a complex128 tensor of shape {[*tensor.shape]}, which the model is given or keeps beside its parameters, cannot be recorded: "
            "record the training in complex64"
        )
    return tensor.detach().cpu().contiguous().clone()


def order_of(tensor: torch.Tensor) -> list[int]:
    """Return the dims in their order in memory, such as that of channels last, by which kernels are chosen.

    It is [] for the usual order, and for a tensor with gaps in memory.
    """
    tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    strides, dims = tensor.stride(), [*range(tensor.ndim)]
    # Dims of size 1 count, too: their strides may say that channels are last.
    order = sorted(dims, key=lambda dim: (-strides[dim], tensor.shape[dim] == 1))
    return order if order != dims and tensor.permute(order).is_contiguous() else []


def in_order(tensor: torch.Tensor, order: list[int]) -> torch.Tensor:
    """Return the same values with the dims in this order in memory. Raises UserError if it is no order of the dims."""
    if sorted(order) != list(range(tensor.ndim)):
        raise UserError(f"{order} is no order of the {tensor.ndim} dims of a tensor; record again")
    # contiguous() would leave strides of dims of size 1 as they are.
    permuted = tensor.permute(order).clone(memory_format=torch.contiguous_format)
    return permuted.permute(torch.tensor(order).argsort().tolist())


def generators() -> dict[str, list[Any]]:
    """Return the states of Python's and of numpy's random generators, which a forward pass may draw from."""
    version, words, normal = random.getstate()
    kind, state, *others = np.random.get_state()
    return {"random": [version, list(words), normal], "numpy": [kind, np.asarray(state).tolist(), *others]}


def restore_generators(states: dict[str, list[Any]]) -> None:
    if "random" in states:
        version, words, normal = states["random"]
        random.setstate((version, tuple(words), normal))
    if "numpy" in states:
        np.random.set_state(tuple(states["numpy"]))
