"""What a run may measure beside its losses: gradient norms of groups of parameters, and the final weights on held-out text."""

import math
from typing import Any

import torch
import torch.nn.functional as F

from lockstep.ground.collective import gather_objects
from lockstep.inputs import modules
from lockstep.inputs.data import Inputs
from lockstep.inputs.shapes import from_config
from lockstep.training.strategy import Strategy


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
        for input_ids, labels in inputs.batches.held_out_pairs():
            logits = model(input_ids=input_ids, use_cache=False).logits
            total += float(F.cross_entropy(logits.flatten(0, 1).double(), labels.flatten(), reduction="sum"))
            right += int((logits.argmax(dim=-1) == labels).sum())
            tokens, sequences = tokens + labels.numel(), sequences + len(labels)
    return {"sequences": sequences, "loss": total / tokens, "accuracy": right / tokens}
