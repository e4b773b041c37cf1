"""Turn a Hugging Face model into one that computes in float64 only.

transformers casts to float32 inside its RMS norms, its softmax and its loss, so these are replaced here. torch's own LayerNorm computes
in the dtype of its input. The rotary table stays the model's own float32 table: it is an input, the same for all runs.
"""

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.models.llama.modeling_llama import LlamaRMSNorm
    from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

ATTENTION = "lockstep_float64"
WITHOUT_EFFECT = {
    "position_ids",
    "use_cache",
    "shift_labels",
}  # arguments that transformers passes to an attention function


def attention(
    module: Any,  # an attention module of any of the families
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **others: object,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """softmax(q k^T scaling, causal) v in the dtype of its input; (B, H, S, D) -> (B, S, H, D), and the weights.

    With a window of W, position i sees the W positions i - W + 1 ... i (transformers/masking_utils.py). Raises ValueError for an
    argument that it does not support: it would compute another model.
    """
    foreign = sorted(
        name for name, value in others.items() if value is not None and name not in WITHOUT_EFFECT
    )
    if attention_mask is not None or dropout or foreign:
        asked = foreign or ["attention_mask" if attention_mask is not None else "dropout"]
        raise ValueError(
            f"the model asks for {', '.join(asked)}, which the float64 attention does not support"
        )
    groups = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
    scores = query @ key.transpose(-2, -1) * scaling
    positions = torch.arange(query.shape[2])
    back = positions[:, None] - positions  # positions from a key to its query
    hidden = back < 0 if sliding_window is None else (back < 0) | (back >= sliding_window)
    probabilities = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)
    wanted = probabilities if module.config.gives_attention_weights else None
    return (probabilities @ value).transpose(1, 2).contiguous(), wanted


def norm_forward(module: "Qwen2RMSNorm | Qwen3RMSNorm | LlamaRMSNorm", hidden: torch.Tensor) -> torch.Tensor:
    """The forward pass of a Qwen2RMSNorm, Qwen3RMSNorm or LlamaRMSNorm, in the dtype of its input."""
    return module.weight * (
        hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + module.variance_epsilon)
    )


def loss_per_token(
    logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, shift_labels: torch.Tensor, **_: Any
) -> torch.Tensor:
    """Cross-entropy of every position, (B * S,), in the dtype of the logits."""
    return torch.nn.functional.cross_entropy(logits.flatten(0, -2), shift_labels.flatten(), reduction="none")


def make_exact(model: "PreTrainedModel", *, attn_impl: str) -> None:
    """Make a causal LM of the supported families compute in float64, in place. Its loss becomes one number per token.

    With `attn_impl` "eager", attention modules return their weights too, as transformers' eager attention does.
    """
    from transformers import AttentionInterface

    model.double()
    AttentionInterface.register(ATTENTION, attention)
    model.config.gives_attention_weights = attn_impl == "eager"
    model.config._attn_implementation = ATTENTION
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = norm_forward.__get__(module)
    model.loss_function = loss_per_token
