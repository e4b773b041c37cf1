"""Modules by their role, with the names that Hugging Face gives them in all supported families.

Code that needs the embedding, the head or a layer's blocks asks here. Only faults name the tensors that they break.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

BASE = "model"  # all but the head
EMBEDDING = f"{BASE}.embed_tokens"
LAYERS = f"{BASE}.layers"  # a list, in order of execution
HEAD = "lm_head"  # its output is the logits; its weight may be the embedding's
EMBEDDING_WEIGHT, HEAD_WEIGHT = f"{EMBEDDING}.weight", f"{HEAD}.weight"
# of a layer
ATTENTION, MLP = "self_attn", "mlp"
ATTENTION_OUTPUT = f"{ATTENTION}.o_proj"


def is_tied(model: "torch.nn.Module") -> bool:
    """Whether embedding and head of a live model share one Parameter."""
    return model.get_submodule(HEAD).weight is model.get_submodule(EMBEDDING).weight


def layer_of(name: str) -> int:
    """The number of the layer that a tensor belongs to, from 0; -1 if it belongs to none."""
    number, inside, _ = name.removeprefix(f"{LAYERS}.").partition(".")
    is_layer = name.startswith(f"{LAYERS}.") and inside and number.isascii() and number.isdigit()
    return int(number) if is_layer and len(number) < 6 else -1


def is_on_heads(name: str) -> bool:
    """Whether the last dim of a captured output or input is that of the attention's heads."""
    inside = f".{ATTENTION}." in name
    return inside and not name.endswith(ATTENTION_OUTPUT)
