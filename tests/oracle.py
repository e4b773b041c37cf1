"""Turn a Hugging Face model into one that computes in float64 only.

transformers casts to float32 inside its RMS norms, its softmax and its loss, so these are replaced here. torch's own LayerNorm computes
in the dtype of its input. The rotary table stays the model's own float32 table: it is an input, the same for all runs.
"""

import torch
from transformers import AttentionInterface

ATTENTION = "lockstep_float64"
# arguments that transformers passes to an attention function
WITHOUT_EFFECT = {"position_ids", "use_cache", "shift_labels"}


def attention(module, query, key, value, attention_mask, scaling, dropout=0.0, sliding_window=None, **others):
    """softmax(q k^T scaling, causal) v in the dtype of its input; (B, H, S, D) -> (B, S, H, D), and the weights.

    With a window of W, position i sees the W positions i - W + 1 ... i (transformers/masking_utils.py). Anything else that the model asks
    for would be another model.
    """
    asked = {name for name, value in others.items() if value is not None} - WITHOUT_EFFECT
    assert attention_mask is None and not dropout and not asked, asked
    groups = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
    scores = query @ key.transpose(-2, -1) * scaling
    positions = torch.arange(query.shape[2])
    back = positions[:, None] - positions  # positions from a key to its query
    hidden = back < 0 if sliding_window is None else (back < 0) | (back >= sliding_window)
    probabilities = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)
    wanted = probabilities if module.config.gives_attention_weights else None
    return (probabilities @ value).transpose(1, 2).contiguous(), wanted


def norm_forward(module, hidden):
    """The forward pass of a Qwen2RMSNorm, Qwen3RMSNorm or LlamaRMSNorm, in the dtype of its input."""
    return module.weight * (
        hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + module.variance_epsilon)
    )


def loss_per_token(logits, labels, vocab_size, shift_labels, **_):
    """Cross-entropy of every position, (B * S,), in the dtype of the logits."""
    return torch.nn.functional.cross_entropy(logits.flatten(0, -2), shift_labels.flatten(), reduction="none")


def make_exact(model, *, attn_impl):
    """Make a causal LM of the supported families compute in float64, in place. Its loss becomes one number per token.

    With `attn_impl` "eager", attention modules return their weights too, as transformers' eager attention does.
    """
    model.double()
    AttentionInterface.register(ATTENTION, attention)
    model.config.gives_attention_weights = attn_impl == "eager"
    model.config._attn_implementation = ATTENTION
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = norm_forward.__get__(module)
    model.loss_function = loss_per_token
