"""Modules by their role, with the names that transformers gives them.

Code that needs the embedding, the head or a layer's blocks asks here. Only faults name the tensors that they break.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel

HEAD = "lm_head"  # in all families; its output is the logits, and its weight may be the embedding's
HEAD_WEIGHT = f"{HEAD}.weight"
EMBEDDING = "embedding"  # as a part of a model, beside its layers and HEAD


@dataclass(frozen=True)
class Names:
    """The names of one naming scheme. Those of `attention` and `mlp` are inside a layer."""

    base: str  # all but the head
    embedding: str  # of the tokens
    layers: str  # a list, in order of execution
    attention: str
    mlp: str
    not_on_heads: tuple[
        str, ...
    ]  # ends of names inside the attention whose last dim is not that of the heads
    buffers: tuple[str, ...]  # how the names of what a published file holds beside the parameters end
    linear_is_transposed: bool = False  # linear layers but the head hold W^T, as transformers' Conv1D does

    @property
    def embedding_weight(self) -> str:
        return f"{self.embedding}.weight"

    def layer_of(self, name: str) -> int:
        """The number of the layer that a tensor belongs to, from 0; -1 if it belongs to none."""
        number, inside, _ = name.removeprefix(f"{self.layers}.").partition(".")
        is_layer = name.startswith(f"{self.layers}.") and inside and number.isascii() and number.isdigit()
        return int(number) if is_layer and len(number) < 6 else -1

    def unit_of(self, name: str) -> str | int:
        """The part of the model that a tensor belongs to: the number of its layer, EMBEDDING, or HEAD with the norm before it."""
        layer = self.layer_of(name)
        return layer if layer >= 0 else EMBEDDING if name == self.embedding_weight else HEAD

    def is_on_heads(self, name: str) -> bool:
        """Whether the last dim of a captured output or input is that of the attention's heads."""
        return f".{self.attention}." in name and not name.endswith(self.not_on_heads)


LLAMA = Names(
    base="model",
    embedding="model.embed_tokens",
    layers="model.layers",
    attention="self_attn",
    mlp="mlp",
    not_on_heads=("self_attn.o_proj",),
    buffers=(".rotary_emb.inv_freq",),
)


GPT2 = Names(
    base="transformer",
    embedding="transformer.wte",
    layers="transformer.h",
    attention="attn",
    mlp="mlp",
    not_on_heads=("attn.c_attn", "attn.c_proj", "attn.resid_dropout"),  # c_attn: q, k and v beside each other
    buffers=(".attn.bias", ".attn.masked_bias"),
    linear_is_transposed=True,
)
SCHEMES = {"gpt2": GPT2}  # by model_type; all others are like Llama


def names_of(architecture: dict) -> Names:
    """The names in a model of this architecture."""
    return SCHEMES.get(architecture["model_type"], LLAMA)


def names_in(model: "PreTrainedModel") -> Names:
    """The names in a live model, sharded or not."""
    return names_of({"model_type": model.config.model_type})


def is_tied(model: "PreTrainedModel") -> bool:
    """Whether embedding and head of a live model share one Parameter. A stage of a pipeline that has not both has none to share."""
    here = dict(model.named_modules())
    head, embedding = (here.get(name) for name in (HEAD, names_in(model).embedding))
    return head is not None and embedding is not None and head.weight is embedding.weight
