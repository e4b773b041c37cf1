"""Listeners watch a run. The loop calls them at the moments of a step; what they find goes into the step's record or the history."""

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
    """A method for each moment of a step. Every rank calls them in this order, so each may be collective."""

    steps: Container[int]  # the steps that it listens to, from 1

    def begin(self, strategy: Strategy, step: int, fed: Sequence[MicroBatch]) -> None:
        """Before the forward pass of `step`, from 1, with the micro batches of this rank."""
        return

    def gradients(self) -> None:
        """Between the backward pass and the update."""
        return

    def end(self, record: dict[str, Any]) -> None:
        """After the update. Further entries may be added to `record`, the step's."""
        return


class LearningRate(Listener):
    """Sets the optimizer's learning rate in each step, by the flags of a run of `num_steps` steps."""

    def __init__(self, options: dict[str, Any], num_steps: int):
        self.options, self.num_steps = options, num_steps
        self.steps = range(1, num_steps + 1)

    def begin(self, strategy: Strategy, step: int, fed: Sequence[MicroBatch]) -> None:
        self.optimizer, self.rate = strategy.optimizer, rates.rate_of(self.options, step, self.num_steps)

    def gradients(self) -> None:
        if rates.changes(self.options):
            set_rate(self.optimizer, self.rate, self.options["learning_rate"])

    def end(self, record: dict[str, Any]) -> None:
        # The groups of other optimizers may have several rates.
        is_built_in = self.options["optimizer"] in OPTIMIZERS
        record["learning_rate"] = learning_rate(self.optimizer.param_groups[0]) if is_built_in else self.rate


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
    """Counts the collective operations of the last step (--count_collectives): afterwards `counted` has them by name."""

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
    """Return the 2-norm of the gradient of each group of parameters, between `forward_backward` and `update`. Collective.

    A shard that several ranks hold counts once.
    """
    mine: dict[str, list] = {}
    for name, block, _, start in strategy.held("gradient"):
        mine.setdefault(name, []).append(((start, tuple(block.shape)), float(block.double().square().sum())))
    all_ranks = gather_objects(mine)
    names = modules.names_in(strategy.model)
    squares: dict[str, float] = {}
    # The ranks of other pipeline stages have other parameters.
    for name in dict.fromkeys(name for of_rank in all_ranks for name in of_rank):
        # place -> sum of squares
        shards = dict(shard for of_rank in all_ranks for shard in of_rank.get(name, []))
        group = group_of(name, names)
        squares[group] = squares.get(group, 0.0) + sum(shards.values())
    return {group: math.sqrt(square) for group, square in squares.items()}


def held_out(strategy: Strategy, inputs: Inputs, attn_impl: str, *, lead: bool) -> dict[str, Any] | None:
    """Return loss (nats per token) and next-token accuracy on the held-out windows; None if there are none. Collective.

    The `lead` rank gathers the full weights and computes both in float32 on its CPU, with a model that is not parallel. So they say
    something about the weights alone. Other ranks return None.
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
        for name, weight in strategy.full_parameters():
            weights[name].copy_(weight)
        total, correct, tokens, sequences = 0.0, 0, 0, 0
        for input_ids, labels, *further in inputs.batches.held_out_batches():
            options = inputs.batches.made.named(further)
            logits = model(input_ids=input_ids, use_cache=False, **options).logits
            total += float(F.cross_entropy(logits.flatten(0, 1).double(), labels.flatten(), reduction="sum"))
            correct += int((logits.argmax(dim=-1) == labels).sum())
            tokens, sequences = tokens + int((labels != IGNORED).sum()), sequences + len(labels)
    return {"sequences": sequences, "loss": total / tokens, "accuracy": correct / tokens}
