"""Small config.json files of many families of transformers, and what a test needs to change their code for a while."""

import pytest
import torch

from lockstep.inputs import shapes
from lockstep.tensors import trace

_COMMON = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_KEYS = {
    "llama": {},
    "gemma3_text": {"head_dim": 16, "sliding_window": 32},
    "phi3": {},
    "olmo2": {},
    "gpt_neox": {"attention_dropout": 0.0, "hidden_dropout": 0.0},
    "mamba2": {
        "num_heads": 8,
        "head_dim": 16,
        "state_size": 16,
        "n_groups": 2,
        "chunk_size": 16,
        "expand": 2,
    },
    "mixtral": _EXPERTS,
    "deepseek_v3": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "n_group": 2,
        "topk_group": 1,
        "q_lora_rank": 32,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 16,
        "num_key_value_heads": 4,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
    },
    "gpt_oss": {**_EXPERTS, "head_dim": 16, "sliding_window": 32},
}
FAMILIES = {name: {**_COMMON, "model_type": name, **keys} for name, keys in _KEYS.items()}
# of attention: transformers has no other for them
ONLY_EAGER = ("gpt_oss", "mamba2")


def architecture(name: str, **changes) -> dict:
    return shapes.as_transformers_says({**FAMILIES[name], **changes}, name)


@pytest.fixture
def own_code(tmp_path, monkeypatch):
    """monkeypatch, for transformers' classes: what is found of the patched models is kept for nobody else."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    forget()
    yield monkeypatch
    forget()


def forget() -> None:
    """Let everything that was found in a model be found again."""
    shapes._described.cache_clear()
    trace._layout.cache_clear()


@pytest.fixture(scope="module")
def one_thread():
    """The models are so small that a second thread only waits, which costs twice the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
