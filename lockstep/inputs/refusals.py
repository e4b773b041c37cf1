"""Keys of a config.json that ask for another model than the one computed here. They are refused by name, unless they ask for nothing.

transformers' class of the family does not know most of them and would silently build the plain model. Whoever wrote such a key meant
something by it.
"""

import re

from lockstep.errors import UserError, printable

Refusal = tuple[
    tuple[object, ...], str
]  # the values that ask for nothing, why any other is refused and what to do
OFF: tuple[object, ...] = (None, False, 0, 0.0, [], {})
_OTHER = "transformers' model of this family does not do that, nor does the reference; remove it, or choose another model"
_PLAN = "the plan comes from transformers' class of the family, not from config.json; remove it"
_WHOLE_HEADS = "the supported families apply rotary embedding to the whole head; remove it"
NEUTRAL: dict[str, Refusal] = {
    "quantization_config": (
        OFF,
        "quantized weights are not trained here; choose the model that is not quantized",
    ),
    "compression_config": (
        OFF,
        "compressed weights are not trained here; choose the model that is not compressed",
    ),
    "auto_map": (OFF, "code of the model's own is not run; remove it if transformers' own model is meant"),
    "per_layer_config": (OFF, _OTHER),
    "base_model_tp_plan": (OFF, _PLAN),
    "base_model_pp_plan": (OFF, _PLAN),
    "base_model_ep_plan": (OFF, _PLAN),
    "base_model_fsdp_plan": (OFF, _PLAN),
    "is_causal": ((None, True), "the reference is causal; remove it"),
    "is_encoder_decoder": (OFF, _OTHER),
    "add_cross_attention": (OFF, _OTHER),
    "pruned_heads": (OFF, _OTHER),
    "chunk_size_feed_forward": (OFF, _OTHER),
    "partial_rotary_factor": ((None, 1, 1.0), _WHOLE_HEADS),
    "rotary_pct": ((None, 1, 1.0), _WHOLE_HEADS),
    "no_rope_layers": (OFF, _OTHER),
    "attention_chunk_size": (OFF, _OTHER),
    "query_pre_attn_scalar": ((None,), _OTHER),
    "use_mrope": (OFF, _OTHER),
    "qk_norm": (OFF, _OTHER),
    "use_qk_norm": (OFF, _OTHER),
    "mlp_bias": (
        OFF,
        "biases of row-parallel layers are not covered by the tensor-parallel plan; choose a model without",
    ),
}
_PATTERNS = (  # of names; the same two things
    (
        re.compile(r".*(drop_?out|pdrop|drop_?path|layer_?drop|drop_rate).*"),
        (None, False, 0, 0.0),
        "every strategy would drop different elements; set it to 0 in config.json",
    ),
    (re.compile(r".*soft_?cap.*"), OFF, _OTHER),
    (
        re.compile(r".*(_multiplier|logits?_scal(e|ing)|residual_scale|scale_emb|scale_depth)"),
        (None, 1, 1.0),
        _OTHER,
    ),
    (re.compile(r"(num|n)_(local_|routed_|shared_)?experts"), OFF, _OTHER),
)
JUMPING = ("relu", "relu6", "leaky_relu", "hardswish", "gelu_10")  # activations whose derivative jumps
_NO_DROPOUT: Refusal = (
    (0, 0.0),
    "every strategy would drop different elements; set it to 0 in config.json, or choose the built-in gpt2, gpt2-medium or gpt2-large",
)
_ONE_NAME: Refusal = (
    (),
    "GPT-2 has another name for it (n_embd, n_layer, n_head, n_positions, n_inner); remove it",
)
_ONE_WINDOW = "transformers' Mistral has the window of sliding_window in all layers (null: none); remove it"
_ONLY_OTHERS_HAVE: dict[str, dict[str, Refusal]] = {  # family -> keys that mean something to other families
    "qwen2": {
        "attention_bias": (
            (None, True),
            "transformers' Qwen2 has biases of q, k and v, whatever this says; remove it",
        )
    },
    "qwen3": {"attention_bias": NEUTRAL["mlp_bias"]},
    "llama": {
        "attention_bias": NEUTRAL["mlp_bias"],
        "use_sliding_window": (OFF, "transformers' Llama has no windows; remove it"),
        "sliding_window": (OFF, "transformers' Llama has no windows; remove it"),
    },
    "mistral": {
        "attention_bias": NEUTRAL["mlp_bias"],
        "use_sliding_window": ((None,), _ONE_WINDOW),
        "max_window_layers": ((None,), _ONE_WINDOW),
        "layer_types": ((None,), _ONE_WINDOW),
    },
    "gpt2": {
        **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), _NO_DROPOUT),
        **dict.fromkeys(
            (
                "hidden_size",
                "num_hidden_layers",
                "num_attention_heads",
                "max_position_embeddings",
                "intermediate_size",
            ),
            _ONE_NAME,
        ),
        "reorder_and_upcast_attn": (
            OFF,
            "it changes the precision of the attention in autocast and with eager attention alone; set it to false",
        ),
    },
}


def refuse(content: dict, family: str, class_name: str, where: str) -> set[str]:
    """The keys of this config.json that could ask for another model than the family's, but do not.

    Raises UserError, beginning with `where`, for the first that does.
    """
    rules = {**NEUTRAL, **_ONLY_OTHERS_HAVE[family]}
    ruled = set()
    for key, value in content.items():
        rule = rules.get(key) or next(
            ((neutral, why) for pattern, neutral, why in _PATTERNS if pattern.fullmatch(key)), None
        )
        if rule is None:
            continue
        neutral, why = rule
        switched_off = key == "sliding_window" and content.get("use_sliding_window") is False  # as in Qwen2.5
        if not switched_off and not any(
            value == each and isinstance(value, bool) == isinstance(each, bool) for each in neutral
        ):
            raise UserError(f"{where}: {printable(key, 60)} is {printable(repr(value), 60)}: {why}")
        ruled.add(key)
    activation = next((key for key in ("hidden_act", "activation_function") if key in content), "hidden_act")
    if content.get(activation) in JUMPING:
        raise UserError(
            f"{where}: {activation} is {content[activation]!r}: its derivative jumps, so rounding errors alone can change an element of a "
            "gradient by its whole size, and no tolerance holds; choose a model with a smooth activation"
        )
    if family == "llama" and any(each != "full_attention" for each in _listed(content.get("layer_types"))):
        types = printable(repr(content["layer_types"]), 60)
        raise UserError(f"{where}: layer_types is {types}: transformers' Llama has none; remove it")
    named = _listed(content.get("architectures"))
    if any(name != class_name for name in named):
        raise UserError(
            f"{where}: architectures is {printable(repr(named), 60)}: only {class_name} is trained here; "
            f"correct it if {class_name} is meant, or choose another model"
        )
    return ruled


def _listed(value: object) -> list:
    return value if isinstance(value, list) else [] if value is None else [value]
