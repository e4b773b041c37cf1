"""What watches a run at the moments of a step. The loop calls each; what one finds goes into the step's record or the history."""

import contextlib
import math
from collections.abc import Container, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from lockstep.ground.collective import gather_objects
from lockstep.inputs import modules
from lockstep.inputs.data import Inputs
from lockstep.inputs.samples import IGNORED
from lockstep.inputs.shapes import from_config
from lockstep.plan import rates
from lockstep.plan.config import OPTIMIZERS
from lockstep.training.observe import collectives, learning_rate
from lockstep.training.optim import set_rate
from lockstep.training.strategy import MicroBatch, Strategy


class Listener(Protocol):
    """The moments of a step; every rank calls them in this order, so each may be collective."""

    steps: Container[int]  # that it listens to, from 1

    def begin(self, strategy: Strategy, step: int, fed: Sequence[MicroBatch]) -> None:
        """Before the forward pass of `step`, from 1, with the micro batches of this rank."""
        return

    def gradients(self) -> None:
        """Between the backward pass and the update."""
        return

    def end(self, record: dict[str, Any]) -> None:
        """After the update. `record` is the step's, and may be given further entries."""
        return


class LearningRate(Listener):
    """Gives the optimizer the rate of each step, by the flags of a run of so many steps."""

    def __init__(self, options: dict[str, Any], num_steps: int):
        self.options, self.num_steps = options, num_steps
        self.steps = range(1, num_steps + 1)

    def begin(self, strategy: Strategy, step: int, fed: Sequence[MicroBatch]) -> None:
        self.optimizer, self.rate = strategy.optimizer, rates.rate_of(self.options, step, self.num_steps)

    def gradients(self) -> None:
        if rates.changes(self.options):
            set_rate(self.optimizer, self.rate, self.options["learning_rate"])

    def end(self, record: dict[str, Any]) -> None:
        known = self.options["optimizer"] in OPTIMIZERS  # groups of others may have several rates
        record["learning_rate"] = learning_rate(self.optimizer.param_groups[0]) if known else self.rate


class GroupNorms(Listener):
    """The gradient norm of each layer, of the embedding and of the rest (--group_norms)."""

    def __init__(self, num_steps: int):
        self.steps = range(1, num_steps + 1)

    def begin(self, strategy: Strategy, step: int, fed: Sequence[MicroBatch]) -> None:
        self.strategy = strategy

    def gradients(self) -> None:
        self.norms = group_norms(self.strategy)

    def end(self, record: dict[str, Any]) -> None:
        record["group_norms"] = self.norms


class CountedCollectives(Listener):
    """The collective operations of the last step (--count_collectives), by name in `counted` after it."""

    def __init__(self, num_steps: int):
        self.steps = (num_steps,)

    def begin(self, strategy: Strategy, step: int, fed: Sequence[MicroBatch]) -> None:
        self.counting = contextlib.ExitStack()
        self.counted = self.counting.enter_context(collectives())

    def end(self, record: dict[str, Any]) -> None:
        self.counting.close()


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
    """Loss (nats per token) and next-token accuracy of the full weights on the held-out windows; None if there are none. Collective.

    The `lead` rank computes them, in float32 on its CPU, with a model that is not parallel: the figures are about the weights.
    """
    if not inputs.batches.held_out:
        return None
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
