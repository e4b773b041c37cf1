"""The model's architecture: a built-in name, a folder or a hub id becomes a Hugging Face config, as a plain dict.

Nothing here imports torch, so that a wrong model name is answered at once.
"""

import copy
import os
from pathlib import Path

from lockstep.ground import user_file
from lockstep.ground.errors import UserError
from lockstep.ground.files import read_json
from lockstep.inputs import shapes
from lockstep.inputs.hub import hub_file
from lockstep.inputs.modules import LIKE_LLAMA

# A small model with all that makes tensor parallelism go wrong: grouped KV heads, q/k/v biases, tied embeddings.
TINY_QWEN2 = {
    "model_type": "qwen2",
    "vocab_size": 2048,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "rope_theta": 1000000.0,
    "use_sliding_window": False,
    "attention_dropout": 0.0,
}

# Norms on the heads of q and k: every tp rank holds their weights, and its gradient comes from its own heads alone. No biases.
TINY_QWEN3 = {**TINY_QWEN2, "model_type": "qwen3", "head_dim": 16, "attention_bias": False}

# Embedding and head are two matrices. No biases.
TINY_LLAMA = {
    **TINY_QWEN2,
    "model_type": "llama",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}

# Learned positions, some of which get no gradient from a short sequence; biases everywhere; transposed weights; q, k and v in one
# matrix.
TINY_GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 2048,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "n_inner": None,
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "initializer_range": 0.02,
    "tie_word_embeddings": True,
    "attn_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "bos_token_id": None,
    "eos_token_id": None,
}

# The published config.json of openai-community/gpt2, gpt2-medium and gpt2-large, whose dropouts are 0.1.
GPT2 = {
    **TINY_GPT2,
    "vocab_size": 50257,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 1024,
    "bos_token_id": 50256,
    "eos_token_id": 50256,
}

BUILT_IN = {  # content of config.json
    "tiny-qwen2": TINY_QWEN2,
    # a vocabulary that tp does not divide: the last shard is shorter
    "tiny-qwen2-odd-vocab": {**TINY_QWEN2, "vocab_size": 2047},
    # KV heads that tp 4 divides: a factor of tp is then told from a factor of 2
    "tiny-qwen2-4kv": {**TINY_QWEN2, "num_attention_heads": 8, "num_key_value_heads": 4},
    "tiny-qwen3": TINY_QWEN3,
    "tiny-llama": TINY_LLAMA,
    # a window in all layers, shorter than the sequences of the tests; no biases
    "tiny-mistral": {
        **{key: value for key, value in TINY_QWEN2.items() if key != "use_sliding_window"},
        "model_type": "mistral",
        "tie_word_embeddings": False,
        "sliding_window": 32,
    },
    # Deep and narrow: the width, depth and heads of a model with which DDP and FSDP were once compared (docs/studies.md)
    "narrow-qwen2": {
        **TINY_QWEN2,
        "hidden_size": 192,
        "intermediate_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
    },
    "tiny-gpt2": TINY_GPT2,
    # Mixtures of experts. The loss of the first two has a term that keeps the load of the experts even.
    "tiny-qwen3-moe": {
        **TINY_QWEN3,
        "model_type": "qwen3_moe",
        "tie_word_embeddings": False,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "output_router_logits": True,
        "router_aux_loss_coef": 0.01,
    },
    "tiny-mixtral": {
        **TINY_LLAMA,
        "model_type": "mixtral",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "output_router_logits": True,
        "router_aux_loss_coef": 0.02,
    },
    # latent attention, groups of experts, a shared expert beside them, and a dense first layer
    "tiny-deepseek-v3": {
        **TINY_LLAMA,
        "model_type": "deepseek_v3",
        "num_key_value_heads": 4,
        "q_lora_rank": 32,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "n_group": 2,
        "topk_group": 1,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
    },
    # The published config.json of Qwen/Qwen2.5-0.5B (https://huggingface.co/Qwen/Qwen2.5-0.5B).
    "Qwen2.5-0.5B": {
        **TINY_QWEN2,
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "max_position_embeddings": 32768,
        "max_window_layers": 24,
    },
    "gpt2": GPT2,
    "gpt2-medium": {**GPT2, "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16},
    "gpt2-large": {**GPT2, "hidden_size": 1280, "num_hidden_layers": 36, "num_attention_heads": 20},
}
# Built-in model -> the hub id of its weights
HUB_IDS = {name: f"openai-community/{name}" for name in ("gpt2", "gpt2-medium", "gpt2-large")}
NO_DROPOUT = dict.fromkeys(HUB_IDS, " (its dropouts are 0, those of the published model 0.1)")
# Hub id -> the built-in model that takes its place where the hub cannot be reached
HUB_STAND_INS = {"Qwen/Qwen2.5-0.5B": "Qwen2.5-0.5B"}
LARGEST_CONFIG = 1 << 24  # bytes
_BUILT_IN_SOURCE = "built-in architecture"
# Key of a config -> what it counts. Every tp rank takes equally many.
SPLIT_BY_TP = {
    "num_attention_heads": "attention heads",
    "num_key_value_heads": "KV heads",
    "intermediate_size": "MLP columns",
}


def resolve(model_name: str, num_layers: int | None = None) -> tuple[dict, str]:
    """The config of a model as a dict, and a sentence on where it came from.

    For a config.json, the dict is what transformers' own config object says, in the names that all architectures share (`hidden_size`,
    not `n_embd`). `num_layers` replaces the depth. Raises UserError for a name that is not built in, not a folder with a config.json and
    not available from the hub, and for a config.json that is no causal language model of transformers.
    """
    if user_file.is_named(model_name):
        if num_layers is not None:
            raise UserError(
                f"--num_layers {num_layers}: {model_name} is a model of your own; choose its depth there"
            )
        from lockstep.inputs import own_model  # imports torch

        return own_model.architecture_of(model_name), f"model of {model_name}"
    content, source = find(model_name)
    architecture = copy.deepcopy(content)
    if not is_built_in(source):
        architecture = shapes.as_transformers_says(content, f"--model_name {model_name}: its config.json")
    if num_layers is not None:
        depth = architecture.get("num_hidden_layers")
        if depth is None or num_layers > depth:
            raise UserError(
                f"--num_layers {num_layers}: {model_name} has {depth} layers; ask for 1 to {depth}, or for all"
            )
        architecture = with_layers(architecture, list(range(num_layers)))
    return architecture, source


def of_layers(architecture: dict) -> dict[str, list]:
    """The entries that have a value for each layer, such as layer_types."""
    depth = architecture.get("num_hidden_layers")
    return {
        key: value for key, value in architecture.items() if isinstance(value, list) and len(value) == depth
    }


def with_layers(architecture: dict, chosen: list[int]) -> dict:
    """The architecture with the `chosen` layers alone, which are given by their numbers."""
    cut = {key: [value[layer] for layer in chosen] for key, value in of_layers(architecture).items()}
    return {**architecture, **cut, "num_hidden_layers": len(chosen)}


def in_words(architecture: dict) -> str:
    """The size of a model, for people."""
    depth = architecture.get("num_hidden_layers")
    return "own model" if depth is None else f"{depth} layers"


def is_built_in(source: str) -> bool:
    """Whether a source, as `resolve` returns it, is that of a BUILT_IN model, which tests cover, and not of a user's."""
    return source.startswith(_BUILT_IN_SOURCE)


def find(model_name: str) -> tuple[dict, str]:
    """(content of a model's config.json, unchecked; where it came from). Raises UserError."""
    if model_name in BUILT_IN:
        return BUILT_IN[model_name], f"{_BUILT_IN_SOURCE} {model_name}{NO_DROPOUT.get(model_name, '')}"
    if not model_name:  # an empty path would be the current folder
        raise UserError(f"--model_name is empty; give a folder, a hub id, or one of {', '.join(BUILT_IN)}")
    folder = Path(os.path.expanduser(model_name))
    if folder.is_dir():
        config_file = folder / "config.json"
        if not config_file.exists():
            raise UserError(
                f"--model_name {model_name}: the folder has no config.json; give a Hugging Face model folder"
            )
        return _read_config(config_file), f"config of {folder}"
    path, problem = hub_file(model_name, "config.json")
    if path is not None:
        return _read_config(path), f"config of {model_name} from the hub"
    if model_name in HUB_STAND_INS:
        name = HUB_STAND_INS[model_name]
        return BUILT_IN[
            name
        ], f"{_BUILT_IN_SOURCE} {name} ({model_name} cannot be read from the hub: {problem})"
    raise UserError(
        f"--model_name {model_name}: no built-in model, no folder, and not available from the hub ({problem}); "
        f"built-in: {', '.join(BUILT_IN)}"
    )


def _read_config(path: Path) -> dict:
    config = read_json(path, limit=LARGEST_CONFIG)
    if not isinstance(config, dict):
        raise UserError(f"{path}: not a JSON object; fetch the model folder again")
    return config


def tensor_parallel_problem(architecture: dict, tp_size: int) -> str | None:
    """Why this project's own tensor parallelism cannot shard this architecture over tp_size ranks, in a sentence, or None."""
    if tp_size == 1:
        return None
    if architecture["model_type"] not in LIKE_LLAMA:
        return (
            f"--tp_size {tp_size}: layers of {', '.join(LIKE_LLAMA)} are cut here, and the model is {architecture['model_type']}; choose "
            "--tp_size 1, or transformers' own tensor parallelism (examples/transformers_tp.py)"
        )
    for key, noun in SPLIT_BY_TP.items():
        if architecture[key] % tp_size:
            candidates = range(1, architecture[key] + 1)
            allowed = [n for n in candidates if all(architecture[k] % n == 0 for k in SPLIT_BY_TP)]
            return (
                f"--tp_size {tp_size} does not divide the model's {architecture[key]} {noun} ({key}); "
                f"choose --tp_size from {', '.join(map(str, allowed))}"
            )
    vocabulary = architecture["vocab_size"]
    # With any other remainder, the strategies cut the vocabulary differently
    if vocabulary % tp_size not in (0, tp_size - 1):
        return (
            f"--tp_size {tp_size} leaves a rest of {vocabulary % tp_size} of the model's {vocabulary} vocabulary entries "
            "(vocab_size), which AutoTP and DTensor share out differently; choose a --tp_size that divides it, or 2"
        )
    return None
