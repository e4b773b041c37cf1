"""What watches a run at the moments of a step. The loop calls each; what one finds goes into the step's record or the history."""

import contextlib
import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch.utils.hooks import RemovableHandle

from lockstep.ground.collective import gather_objects
from lockstep.inputs import modules
from lockstep.inputs.data import Inputs
from lockstep.inputs.samples import IGNORED
from lockstep.inputs.shapes import from_config
from lockstep.plan import compiled
from lockstep.training.observe import collectives
from lockstep.training.strategy import MicroBatch, Strategy


class Listener(Protocol):
    """The moments of a step; every rank calls them in this order, so each may be collective."""

    def begin(self, strategy: Strategy, step: int, fed: Sequence[MicroBatch]) -> None:
        """Before the forward pass of `step`, from 1, with the micro batches of this rank."""
        return

    def gradients(self) -> None:
        """Between the backward pass and the update."""
        return

    def end(self, record: dict[str, Any]) -> None:
        """After the update. `record` is the step's, and may be given further entries."""
        return


class GroupNorms(Listener):
    """The gradient norm of each layer, of the embedding and of the rest (--group_norms)."""

    def begin(self, strategy: Strategy, step: int, fed: Sequence[MicroBatch]) -> None:
        self.strategy = strategy

    def gradients(self) -> None:
        self.norms = group_norms(self.strategy)

    def end(self, record: dict[str, Any]) -> None:
        record["group_norms"] = self.norms


class CountedCollectives(Listener):
    """The collective operations of a step (--count_collectives), by name in `counted` after it."""

    def begin(self, strategy: Strategy, step: int, fed: Sequence[MicroBatch]) -> None:
        self.counting = contextlib.ExitStack()
        self.counted = self.counting.enter_context(collectives())

    def end(self, record: dict[str, Any]) -> None:
        self.counting.close()


class ComputeDtypes(Listener):
    """The dtypes that linear layers and the embedding return in a step's forward pass, for the contract."""

    def __init__(self, compile_backend: str):
        self.compile_backend = compile_backend
        self._seen: dict[str, set[str]] = {
            "compute_dtype": set(),
            "biased_linear_dtype": set(),
            "embedding_dtype": set(),
        }

    def begin(self, strategy: Strategy, step: int, fed: Sequence[MicroBatch]) -> None:
        self._handles: list[RemovableHandle] = []
        names = modules.names_in(strategy.model)
        for name, module in strategy.model.named_modules():
            if compiled.is_hidden(names, self.compile_backend, name):
                continue
            if isinstance(module, torch.nn.Embedding) or name == names.embedding:
                self._watch(module, "embedding_dtype")
            elif name in names.linears or name in names.biased:
                self._watch(module, "biased_linear_dtype" if name in names.biased else "compute_dtype")

    def _watch(self, module: torch.nn.Module, key: str) -> None:
        seen = self._seen[key]

        def see(_module: torch.nn.Module, _inputs: object, output: object) -> None:
            if isinstance(output, torch.Tensor):  # not of a router, which returns several
                seen.add(str(output.dtype))

        self._handles.append(module.register_forward_hook(see))

    def end(self, record: dict[str, Any]) -> None:
        for handle in self._handles:
            handle.remove()

    def seen(self) -> dict[str, list[str]]:
        """Entry of the contract -> dtypes."""
        return {key: sorted(dtypes) for key, dtypes in self._seen.items()}


def group_of(name: str, names: modules.Names) -> str:
    """The group that a parameter belongs to: its layer, or the module itself outside of the layers."""
    layer = names.layer_of(name)
    return name.rpartition(".")[0] if layer < 0 else f"layer {layer}"


def group_norms(strategy: Strategy) -> dict[str, float]:
    """Group of parameters -> 2-norm of its gradient, between `forward_backward` and `update`. Collective.

    Ranks that hold the same shard count once.
    """
    mine: dict[str, list] = {}
    for name, local, _, start in strategy.held("gradient"):
        mine.setdefault(name, []).append(((start, tuple(local.shape)), float(local.double().square().sum())))
    everyone = gather_objects(mine)
    names = modules.names_in(strategy.model)
    squares: dict[str, float] = {}
    for name in mine:
        shards = dict(piece for held in everyone for piece in held[name])  # place -> sum of squares
        group = group_of(name, names)
        squares[group] = squares.get(group, 0.0) + sum(shards.values())
    return {group: math.sqrt(square) for group, square in squares.items()}


def held_out(strategy: Strategy, inputs: Inputs, attn_impl: str, *, lead: bool) -> dict[str, Any] | None:
    """Loss (nats per token) and next-token accuracy of the full weights on the held-out windows. Collective.

    The `lead` rank computes them, in float32 on its CPU, with a model that is not parallel: the figures are about the weights.
    """
    if not lead:
        for _ in strategy.full_parameters():
            pass
        return None
    model = from_config(inputs.architecture, attn_impl=attn_impl).eval()
    with torch.no_grad():
        weights = dict(model.named_parameters())
        for name, whole in strategy.full_parameters():
            weights[name].copy_(whole)
        total, right, tokens, sequences = 0.0, 0, 0, 0
        for input_ids, labels, *further in inputs.batches.held_out_batches():
            given = inputs.batches.made.named(further)
            logits = model(input_ids=input_ids, use_cache=False, **given).logits
            total += float(F.cross_entropy(logits.flatten(0, 1).double(), labels.flatten(), reduction="sum"))
            right += int((logits.argmax(dim=-1) == labels).sum())
            tokens, sequences = tokens + int((labels != IGNORED).sum()), sequences + len(labels)
    return {"sequences": sequences, "loss": total / tokens, "accuracy": right / tokens}
