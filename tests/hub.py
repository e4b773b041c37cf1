"""config.json files as they are on the hub, written from their model cards' repositories: what must be accepted."""

# fmt: off
_QWEN = {"attention_dropout": 0.0, "hidden_act": "silu", "initializer_range": 0.02, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "torch_dtype": "bfloat16", "use_cache": True, "use_sliding_window": False, "bos_token_id": 151643}

QWEN2_5_0_5B = {
    **_QWEN, "architectures": ["Qwen2ForCausalLM"], "eos_token_id": 151643, "hidden_size": 896, "intermediate_size": 4864,
    "max_position_embeddings": 32768, "max_window_layers": 24, "model_type": "qwen2", "num_attention_heads": 14,
    "num_hidden_layers": 24, "num_key_value_heads": 2, "sliding_window": 32768, "tie_word_embeddings": True,
    "transformers_version": "4.40.1", "use_mrope": False, "vocab_size": 151936,
}
QWEN2_5_7B_INSTRUCT = {
    **_QWEN, "architectures": ["Qwen2ForCausalLM"], "eos_token_id": 151645, "hidden_size": 3584, "intermediate_size": 18944,
    "max_position_embeddings": 32768, "max_window_layers": 28, "model_type": "qwen2", "num_attention_heads": 28,
    "num_hidden_layers": 28, "num_key_value_heads": 4, "sliding_window": 131072, "tie_word_embeddings": False,
    "transformers_version": "4.43.1", "vocab_size": 152064,
}
_LLAMA = {
    "architectures": ["LlamaForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 4096,
    "initializer_range": 0.02, "intermediate_size": 11008, "max_position_embeddings": 4096, "model_type": "llama",
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32, "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False, "torch_dtype": "float16", "transformers_version": "4.31.0.dev0", "use_cache": True,
    "vocab_size": 32000,
}
LLAMA_3_2_1B = {
    **_LLAMA, "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 128000, "eos_token_id": [128001, 128008,
    128009], "head_dim": 64, "hidden_size": 2048, "intermediate_size": 8192, "max_position_embeddings": 131072, "mlp_bias":
    False, "num_hidden_layers": 16, "num_key_value_heads": 8, "pretraining_tp": 1, "rope_scaling": {"factor": 32.0,
    "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192, "rope_type": "llama3"},
    "rope_theta": 500000.0, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "transformers_version": "4.45.0.dev0",
    "vocab_size": 128256,
}
LLAMA_2_7B = {  # older than most keys
    **_LLAMA, "_name_or_path": "meta-llama/Llama-2-7b-hf", "pretraining_tp": 1, "rope_scaling": None,
}
MISTRAL_7B_V0_1 = {
    **_LLAMA, "architectures": ["MistralForCausalLM"], "intermediate_size": 14336, "max_position_embeddings": 32768,
    "model_type": "mistral", "num_key_value_heads": 8, "rope_theta": 10000.0, "sliding_window": 4096, "torch_dtype":
    "bfloat16", "transformers_version": "4.34.0.dev0",
}
GPT2_WITHOUT_DROPOUT = {  # the published file has 0.1 for the three
    "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.0, "bos_token_id": 50256, "embd_pdrop": 0.0,
    "eos_token_id": 50256, "initializer_range": 0.02, "layer_norm_epsilon": 1e-05, "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768,
    "n_head": 12, "n_layer": 12, "n_positions": 1024, "resid_pdrop": 0.0, "summary_activation": None, "summary_first_dropout": 0.1,
    "summary_proj_to_labels": True, "summary_type": "cls_index", "summary_use_proj": True,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}}, "vocab_size": 50257,
}
SAVED_BY_TRANSFORMERS_5 = {
    "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": None, "dtype": "float32", "eos_token_id": 2,
    "hidden_act": "silu", "hidden_size": 64, "initializer_range": 0.02, "intermediate_size": 128, "layer_types": ["full_attention", "sliding_attention"],
    "max_position_embeddings": 4096, "max_window_layers": 1, "model_type": "qwen2", "num_attention_heads": 4, "num_hidden_layers": 2,
    "num_key_value_heads": 2, "pad_token_id": None, "rms_norm_eps": 1e-06, "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
    "sliding_window": 32, "tie_word_embeddings": True, "transformers_version": "5.23.0", "use_cache": True, "use_sliding_window": True,
    "vocab_size": 2048,
}
# fmt: on
ALL = {
    name: value
    for name, value in globals().items()
    if name.isupper() and not name.startswith("_") and name != "ALL"
}
