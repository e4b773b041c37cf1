"""config.json: real ones are accepted, what is not computed here is refused by name."""

import hub
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.errors import UserError
from lockstep.inputs import model_config, refusals
from lockstep.inputs.architectures import BUILT_IN
from lockstep.inputs.model_config import FAMILIES, checked

TINY = {family: BUILT_IN[f"tiny-{family}"] for family in FAMILIES}
YARN = {"rope_type": "yarn", "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize("name", hub.ALL)
def test_real_ones_are_accepted(name):
    known, unknown = checked(hub.ALL[name], "x")
    family = known["model_type"]
    said = {**model_config.SCHEMAS[family].defaults, **hub.ALL[name]}
    assert unknown == [] and model_config.in_own_names(known, family).items() <= said.items()


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_ones_are_accepted(name):
    content = {
        key: value
        for key, value in BUILT_IN[name].items()
        if "llama" not in name or key != "use_sliding_window"
    }
    assert checked(content, "x") == (model_config.in_common_names(content), [])


REFUSED = [
    ("qwen2", {"num_hidden_layers": 1.5}, "num_hidden_layers is 1.5"),
    ("qwen2", {"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
    ("qwen2", {"num_attention_heads": True}, "num_attention_heads is True"),
    ("qwen2", {"hidden_size": 0}, "hidden_size is 0"),
    ("qwen2", {"vocab_size": -5}, "vocab_size is -5"),
    ("qwen2", {"hidden_size": "64"}, "hidden_size is '64'"),
    ("qwen2", {"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
    ("qwen2", {"rope_theta": None}, "rope_theta is None"),
    ("qwen2", {"initializer_range": 0}, "initializer_range is 0"),
    (
        "qwen2",
        {"num_key_value_heads": 3},
        "num_key_value_heads is 3: it does not divide num_attention_heads, 4",
    ),
    ("qwen2", {"hidden_size": 66}, "hidden_size is 66: num_attention_heads, 4, does not divide it"),
    ("qwen2", {"head_dim": 15}, "head_dim is 15: rotary embedding needs an even head_dim, it is 15"),
    ("qwen2", {"head_dim": None}, "head_dim is None"),
    ("qwen2", {"hidden_size": 60}, "hidden_size is 60: rotary embedding needs an even head_dim, it is 15"),
    ("qwen2", {"eos_token_id": -1}, "eos_token_id is -1: "),
    ("qwen2", {"eos_token_id": 1.5}, "eos_token_id"),
    ("qwen2", {"eos_token_id": "1"}, "eos_token_id"),
    ("qwen2", {"eos_token_id": True}, "eos_token_id"),
    ("qwen2", {"eos_token_id": []}, "eos_token_id"),
    ("qwen2", {"eos_token_id": 2048}, "eos_token_id is 2048: token ids run from 0 to 2047"),
    ("qwen2", {"eos_token_id": [0, 2048]}, "eos_token_id"),
    ("qwen2", {"pad_token_id": -1}, "pad_token_id is -1"),
    ("qwen2", {"hidden_act": "xielu"}, "hidden_act is 'xielu'"),
    *(
        ("qwen2", {"hidden_act": name}, f"hidden_act is '{name}': its derivative jumps")
        for name in ("relu", "relu6", "leaky_relu", "hardswish", "gelu_10")
    ),
    ("qwen2", {"hidden_act": "prelu"}, "hidden_act is 'prelu'"),
    (
        "qwen2",
        {"attention_dropout": 0.1},
        "attention_dropout is 0.1: every strategy would drop different elements",
    ),
    ("llama", {"resid_pdrop": 0.1}, "resid_pdrop is 0.1"),
    ("llama", {"attention_bias": True}, "attention_bias is True: biases of row-parallel layers"),
    ("llama", {"mlp_bias": True}, "mlp_bias is True"),
    ("qwen3", {"attention_bias": True}, "attention_bias is True"),
    ("mistral", {"attention_bias": True}, "attention_bias is True: biases of row-parallel layers"),
    ("mistral", {"mlp_bias": True}, "mlp_bias is True"),
    ("mistral", {"sliding_window": 0}, "sliding_window is 0"),
    (
        "mistral",
        {"use_sliding_window": False},
        "use_sliding_window is False: transformers' Mistral has the window",
    ),
    ("mistral", {"max_window_layers": 1}, "max_window_layers is 1: transformers' Mistral has the window"),
    ("mistral", {"layer_types": ["full_attention"] * 2}, "layer_types is"),
    ("mistral", {"num_local_experts": 8}, "num_local_experts is 8"),
    ("qwen2", {"attention_bias": False}, "attention_bias is False"),
    ("llama", {"use_sliding_window": True}, "use_sliding_window is True: transformers' Llama has no windows"),
    ("llama", {"sliding_window": 4096, "use_sliding_window": None}, "sliding_window is 4096"),
    ("llama", {"layer_types": ["sliding_attention"] * 2}, "layer_types is"),
    (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": None},
        "use_sliding_window is True: there is no sliding_window",
    ),
    ("qwen2", {"layer_types": ["sliding_attention"] * 2}, "layer_types is .*without use_sliding_window"),
    ("qwen2", {"layer_types": ["full_attention"]}, "layer_types is .*1 layers, and num_hidden_layers is 2"),
    ("qwen2", {"layer_types": ["linear_attention"] * 2}, "layer_types.0 is 'linear_attention'"),
    ("qwen2", {"sliding_window": 0, "use_sliding_window": True}, "sliding_window is 0"),
    (
        "llama",
        {"partial_rotary_factor": 0.5},
        "partial_rotary_factor is 0.5: the supported families apply rotary",
    ),
    ("llama", {"rope_scaling": {"rope_type": "su", "factor": 2.0}}, "rope_scaling.rope_type is 'su'"),
    ("llama", {"rope_scaling": {**YARN, "type": "linear"}}, "its type is linear, its rope_type yarn"),
    (
        "llama",
        {"rope_scaling": {**YARN, "low_freq_factor": 1.0}},
        "low_freq_factor is not a key of rope type yarn",
    ),
    ("llama", {"rope_scaling": {**YARN, "mrope_section": [1]}}, "rope_scaling.mrope_section"),
    ("llama", {"rope_scaling": {**YARN, "beta_fast": 1, "beta_slow": 32}}, "beta_fast"),
    ("llama", {"rope_scaling": {"rope_type": "linear"}}, "rope type linear needs factor"),
    ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, "rope_scaling.factor is 0.5"),
    ("llama", {"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, "high_freq_factor must be above"),
    ("llama", {"rope_scaling": YARN, "rope_parameters": LLAMA3}, "rope_parameters says something else"),
    (
        "llama",
        {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0] * 8}},
        "short_factor has 1 numbers, and heads of 16 need 8",
    ),
    (
        "qwen2",
        {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
        "rope_parameters.full_attention",
    ),
    ("qwen2", {"architectures": ["Qwen2ForSequenceClassification"]}, "only Qwen2ForCausalLM is trained here"),
    (
        "qwen2",
        {"auto_map": {"AutoModelForCausalLM": "modeling.Mine"}},
        "auto_map is .*code of the model's own is not run",
    ),
    (
        "qwen2",
        {"quantization_config": {"bits": 4}},
        "quantization_config is .*quantized weights are not trained",
    ),
    ("qwen2", {"base_model_tp_plan": {"layers.*": "rowwise"}}, "base_model_tp_plan"),
    ("qwen2", {"per_layer_config": {"0": {"num_attention_heads": 2}}}, "per_layer_config"),
    ("qwen2", {"is_causal": False}, "is_causal is False"),
    ("qwen2", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0"),
    ("llama", {"residual_multiplier": 0.22}, "residual_multiplier is 0.22"),
    ("llama", {"num_local_experts": 8}, "num_local_experts is 8"),
    ("gpt2", {"n_embd": 66}, "n_embd is 66: n_head, 4, does not divide it"),
    ("gpt2", {"n_layer": 0}, "n_layer is 0"),
    ("gpt2", {"n_positions": None}, "n_positions is None"),
    ("gpt2", {"n_inner": 0}, "n_inner is 0"),
    ("gpt2", {"activation_function": "relu"}, "activation_function is 'relu': its derivative jumps"),
    ("gpt2", {"activation_function": "nosuch"}, "activation_function is 'nosuch'"),
    ("gpt2", {"layer_norm_epsilon": -1.0}, "layer_norm_epsilon is -1.0"),
    *(
        ("gpt2", {key: 0.1}, f"{key} is 0.1: every strategy would drop .* or choose the built-in gpt2")
        for key in ("attn_pdrop", "embd_pdrop", "resid_pdrop")
    ),
    ("gpt2", {"reorder_and_upcast_attn": True}, "reorder_and_upcast_attn is True"),
    ("gpt2", {"add_cross_attention": True}, "add_cross_attention is True"),
    ("gpt2", {"hidden_size": 64}, "hidden_size is 64: GPT-2 has another name for it"),
    ("gpt2", {"eos_token_id": 2048}, "eos_token_id is 2048: token ids run from 0 to 2047"),
    ("gpt2", {"architectures": ["GPT2Model"]}, "only GPT2LMHeadModel is trained here"),
]


@pytest.mark.parametrize("family, change, message", REFUSED)
def test_refused_by_name(family, change, message):
    with pytest.raises(UserError, match=f"^x: {message}|^x: .*{message}") as error:
        checked({**TINY[family], **change}, "x")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "family, change",
    [
        (
            "llama",
            {
                "resid_pdrop": 0.0,
                "hidden_dropout": 0,
                "partial_rotary_factor": 1.0,
                "num_local_experts": None,
            },
        ),
        ("llama", {"sliding_window": 4096, "use_sliding_window": False}),
        ("mistral", {"sliding_window": None, "use_sliding_window": None, "attention_bias": False}),
        (
            "gpt2",
            {"n_ctx": 256, "summary_first_dropout": 0.1, "task_specific_params": {"text-generation": {}}},
        ),
        ("llama", {"quantization_config": None, "auto_map": {}, "is_causal": True}),
        ("qwen2", {"eos_token_id": [0, 2047], "pad_token_id": 2047, "use_mrope": False}),
        (
            "llama",
            {
                "rope_scaling": {**YARN, "type": "yarn", "attention_factor": None},
                "rope_parameters": {**YARN, "type": "yarn", "attention_factor": None},
            },
        ),
    ],
)
def test_what_asks_for_nothing_is_not_refused(family, change):
    """Negative control of the refusals."""
    assert checked({**TINY[family], **change}, "x")[1] == []


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=6,
)
KEYS = sorted(
    {key for content in hub.ALL.values() for key in content}
    | {"layer_types", "auto_map", "is_causal", "hidden_dropout"}
)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(hub.ALL)), st.dictionaries(st.sampled_from(KEYS), JSON, max_size=3))
def test_whatever_it_says_the_answer_is_one_line(name, changes):
    try:
        checked({**hub.ALL[name], **changes}, "x")
    except UserError as error:
        assert str(error).startswith("x") and str(error).isprintable()


@pytest.mark.parametrize("key", ["vocab_size", "num_key_value_heads", "initializer_range"])
def test_missing(key):
    content = {each: value for each, value in TINY["qwen2"].items() if each != key}
    with pytest.raises(UserError, match=f"x gives no {key}; fetch the model again"):
        checked(content, "x")
    if key == "num_key_value_heads":  # transformers' Llama has as many as attention heads then
        without = {**{each: value for each, value in TINY["llama"].items() if each != key}}
        assert checked(without, "x")[0][key] == TINY["llama"]["num_attention_heads"]


@pytest.mark.parametrize("key", ["attn_pdrop", "embd_pdrop", "resid_pdrop"])
def test_a_dropout_of_gpt2_that_is_not_named_is_transformers_default(key):
    with pytest.raises(UserError, match=f"x: {key} is 0.1"):
        checked({each: value for each, value in TINY["gpt2"].items() if each != key}, "x")


def test_gpt2_is_tied_where_nothing_is_said():
    content = {key: value for key, value in TINY["gpt2"].items() if key != "tie_word_embeddings"}
    assert checked(content, "x")[0]["tie_word_embeddings"] is True


def test_heads_of_qwen3_are_128_wide_where_nothing_is_said():
    assert (
        checked({key: value for key, value in TINY["qwen3"].items() if key != "head_dim"}, "x")[0]["head_dim"]
        == 128
    )


@pytest.mark.parametrize("name", [*model_config.ACTIVATIONS, *refusals.JUMPING])
def test_the_derivative_of_an_activation_jumps_where_it_is_refused_for_that(name):
    import torch
    from transformers.activations import ACT2FN

    points = torch.linspace(-12, 12, 240_001, dtype=torch.float64, requires_grad=True)
    ACT2FN[name](points).sum().backward()
    steepest = float(points.grad.diff().abs().max())
    assert steepest > 0.4 if name in refusals.JUMPING else steepest < 1e-3
