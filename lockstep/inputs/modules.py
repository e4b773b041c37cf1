"""Modules by their role: the embedding, the layers, the head.

The names are found in the model itself (`find`). Code that needs the embedding, the head or a layer's blocks asks here. Only faults name
the tensors that they break.
"""

import re
from typing import TYPE_CHECKING, Any

from lockstep.ground import schemas

if TYPE_CHECKING:
    import torch

# The parts of a model beside its layers (`Names.unit_of`)
HEAD = "lm_head"
EMBEDDING = "embedding"
_REMEMBERED = "lockstep_names"


class Names(schemas.Strict):
    """The names in one model; "" for what it does not have. Those of `attention` and `mlp` are inside a layer."""

    base: str  # all but the head
    embedding: str  # of the tokens
    layers: str  # a list, in order of execution
    head: str  # its output is the logits, and its weight may be the embedding's
    attention: str
    mlp: str
    # ends of the names of outputs inside the attention whose last dim is not that of the heads; () if that is not known
    not_on_heads: schemas.Names
    linears: schemas.Names  # linear layers without a bias
    biased: schemas.Names  # and with one
    linear_is_transposed: bool  # linear layers but the head hold W^T, as transformers' Conv1D does

    @property
    def embedding_weight(self) -> str:
        return f"{self.embedding}.weight"

    @property
    def head_weight(self) -> str:
        return f"{self.head}.weight"

    @property
    def logits(self) -> str:
        """The captured tensor that the loss is computed from."""
        return f"forward/{self.head}"

    @property
    def logits_gradient(self) -> str:
        return f"backward/{self.head}"

    def layer_of(self, name: str) -> int:
        """The number of the layer that a tensor belongs to, from 0; -1 if it belongs to none."""
        match = re.match(rf"{re.escape(self.layers)}\.([0-9]{{1,5}})\.", name)
        return int(match[1]) if self.layers and match else -1

    def unit_of(self, name: str) -> str | int:
        """The part of the model that a tensor belongs to: the number of its layer, EMBEDDING, or HEAD with the norm before it."""
        layer = self.layer_of(name)
        return layer if layer >= 0 else EMBEDDING if name == self.embedding_weight else HEAD

    def is_on_heads(self, name: str) -> bool:
        """Whether the last dim of a captured output or input is that of the attention's heads."""
        return (
            bool(self.not_on_heads) and f".{self.attention}." in name and not name.endswith(self.not_on_heads)
        )


# The architectures whose layers this project cuts itself, over tp, pp and cp.
LIKE_LLAMA = ("llama", "mistral", "qwen2", "qwen3")
# Inside the attention of these, the last dim of an output is that of the heads, but for the outputs named.
NOT_ON_HEADS = {
    **dict.fromkeys(LIKE_LLAMA, ("self_attn.o_proj",)),
    # c_attn: q, k and v beside each other
    "gpt2": ("attn.c_attn", "attn.c_proj", "attn.resid_dropout"),
}


def find(model: "torch.nn.Module") -> Names:
    """The names in a whole model, of transformers or of a user's own. The layers are its largest ModuleList."""
    import torch

    config = getattr(model, "config", None)
    model_type = getattr(config, "model_type", "")
    names = {id(module): name for name, module in model.named_modules()}
    if hasattr(model, "get_input_embeddings"):
        hf_model: Any = model
        embedding, head = hf_model.get_input_embeddings(), hf_model.get_output_embeddings()
    else:
        embedding = next((m for m in model.modules() if isinstance(m, torch.nn.Embedding)), None)
        head = next((m for m in reversed([*model.modules()]) if isinstance(m, torch.nn.Linear)), None)
    module_lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    layers = max(module_lists, key=lambda modules: sum(p.numel() for p in modules.parameters()), default=None)
    children = [name for name, _ in layers[0].named_children()] if layers else []
    linears = {
        name: getattr(module, "bias", None) is not None
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) or type(module).__name__ == "Conv1D"
    }
    base = getattr(model, "base_model_prefix", "")
    return Names(
        base=base if base in dict(model.named_children()) else "",
        embedding=names.get(id(embedding), ""),
        layers=names.get(id(layers), ""),
        head=names.get(id(head), ""),
        attention=next((name for name in children if "att" in name), ""),
        mlp=next((name for name in children if "mlp" in name), ""),
        not_on_heads=NOT_ON_HEADS.get(model_type, ()),
        linears=tuple(name for name, has_bias in linears.items() if not has_bias),
        biased=tuple(name for name, has_bias in linears.items() if has_bias),
        linear_is_transposed=any(type(module).__name__ == "Conv1D" for module in model.modules()),
    )


def names_in(model: "torch.nn.Module") -> Names:
    """The names in a live model, which may be sharded or a stage of a pipeline: those that `remember` kept when it was whole."""
    return getattr(model, _REMEMBERED, None) or find(model)


def remember(model: "torch.nn.Module") -> None:
    """Keep the names of a whole model with it."""
    setattr(model, _REMEMBERED, find(model))


def is_tied(model: "torch.nn.Module") -> bool:
    """Whether embedding and head of a live model share one Parameter. A stage of a pipeline that lacks one of them shares none."""
    names, by_name = names_in(model), dict(model.named_modules())
    head, embedding = (by_name.get(name) for name in (names.head, names.embedding))
    head_weight, embedding_weight = (getattr(module, "weight", None) for module in (head, embedding))
    return head_weight is not None and head_weight is embedding_weight


def to_dtype(model: "torch.nn.Module", dtype: "torch.dtype") -> None:
    """Convert parameters and buffers of floating point, in place.

    `torch.nn.Module.to` would also make complex buffers real, such as a rotary table, without its imaginary parts.
    """
    model._apply(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)
