"""The tensors that a rank keeps of one step: its blocks of each, where they lie in the whole, and what has changed since the step before."""

import random
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor, Replicate

from lockstep.ground.blocks import blocks, pieces
from lockstep.ground.errors import UserError
from lockstep.recorder import quantized
from lockstep.recorder.hashes import digest
from lockstep.recorder.plain_shards import PlainShards


class Kept:
    """`before` are the hashes of what the step before ended with."""

    def __init__(self, plain_shards: PlainShards, before: dict[str, int]):
        self.plain_shards, self.before = plain_shards, before
        self.tensors: dict[str, torch.Tensor] = {}
        self.places: dict[str, list[dict[str, Any]]] = {}
        self.digests: dict[str, int] = {}  # of what the step ends with
        self.begun: dict[str, int] = {}  # of what the optimizer begins with
        self.unchanged: list[str] = []  # weights that the step before ended with
        self.changed: list[str] = []  # weights and state that it ended otherwise with

    def keep(self, name: str, tensor: torch.Tensor, *, added: bool = False) -> None:
        """`added`: to what has arrived before."""
        copy = copied(tensor)
        self.tensors[name] = self.tensors[name] + copy if added and name in self.tensors else copy

    def keep_shard(
        self, name: str, tensor: torch.Tensor, *, added: bool = False, written: bool = True
    ) -> None:
        """This rank's blocks of a tensor, and where they lie in the whole. `written` is false for one that is written elsewhere."""
        if isinstance(tensor, DTensor) and any(placement.is_partial() for placement in tensor.placements):
            summed = [Replicate() if placement.is_partial() else placement for placement in tensor.placements]
            tensor = tensor.redistribute(placements=summed)
        own = name.rpartition("/")[2]
        runs = self.plain_shards.runs(own, tensor)
        found = pieces(tensor.detach()) if runs is None else blocks(tensor.detach(), runs)
        full = tensor.shape if runs is None else self.plain_shards.shapes[own]
        places = []
        for number, (start, block) in enumerate(found):
            if written:
                self.keep(f"{name}#{number}", block, added=added)
            places.append({"start": list(start), "shape": list(block.shape)})
        self.places[name] = [{"full": list(full)}, *places]

    def forget(self, prefix: str) -> None:
        """Tensors whose names begin so."""
        for found in (self.tensors, self.places):
            for name in [name for name in found if name.startswith(prefix)]:
                del found[name]

    def keep_weight(self, name: str, tensor: torch.Tensor) -> None:
        """A parameter before the step."""
        tensor = quantized.values(tensor)
        same = self._is_as_before(f"weight/{name}", tensor)
        if same:
            self.unchanged.append(f"weight/{name}")
        self.keep_shard(f"weight/{name}", tensor, written=not same)

    def keep_updated(self, name: str, tensor: torch.Tensor) -> None:
        """A parameter after the update."""
        tensor = quantized.values(tensor)
        self.keep_shard(f"updated/{name}", tensor)
        self.digests[f"weight/{name}"] = digest_of(tensor)

    def keep_state(self, name: str, tensor: torch.Tensor) -> None:
        """What an optimizer keeps before the step; `name` is state/KEY/NAME, of a parameter, or attribute/KEY/NUMBER."""
        self.keep_shard(name, tensor)
        self._is_as_before(name, tensor)
        self.begun[name] = digest_of(tensor)

    def keep_updated_state(self, name: str, tensor: torch.Tensor) -> None:
        """The same after the update, of which a hash is kept. A setting that the update leaves alone is the loop's to change."""
        own = digest_of(tensor)
        if name.startswith("state/") or own != self.begun.get(name):
            self.digests[name] = own

    def _is_as_before(self, name: str, tensor: torch.Tensor) -> bool:
        """Whether a tensor is what the step before ended with; where it ended with another, that is noted."""
        before = self.before.pop(name, None)
        same = before == digest_of(tensor)
        if before is not None and not same:
            self.changed.append(name)
        return same


def digest_of(tensor: torch.Tensor) -> int:
    return digest(tensor.to_local() if isinstance(tensor, DTensor) else tensor)


def copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().clone()


def order_of(tensor: torch.Tensor) -> list[int]:
    """The dims in the order that they have in memory, such as channels last, by which kernels are chosen; [] for the usual one, or gaps."""
    tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if tensor.is_contiguous():
        return []
    strides = tensor.stride()
    order = sorted(range(tensor.ndim), key=lambda dim: -strides[dim])
    return order if tensor.permute(order).is_contiguous() else []


def in_order(tensor: torch.Tensor, order: list[int]) -> torch.Tensor:
    """The same values, in such an order. Raises UserError for one that is none."""
    if sorted(order) != list(range(tensor.ndim)):
        raise UserError(f"{order} is no order of the {tensor.ndim} dims of a tensor; record again")
    return tensor.permute(order).contiguous().permute(torch.tensor(order).argsort().tolist())


def generators() -> dict[str, list[Any]]:
    """The states of Python's generator and of numpy's, which a forward pass may draw from."""
    version, words, normal = random.getstate()
    kind, state, *others = np.random.get_state()
    return {"random": [version, list(words), normal], "numpy": [kind, np.asarray(state).tolist(), *others]}


def restore_generators(states: dict[str, list[Any]]) -> None:
    if "random" in states:
        version, words, normal = states["random"]
        random.setstate((version, tuple(words), normal))
    if "numpy" in states:
        np.random.set_state(tuple(states["numpy"]))
