"""A user's model is tried before a run: transformers takes it, it fits, and the reference is transformers' model."""

import json

import hub
import model_families
import pytest
import torch

from lockstep import config as config_module
from lockstep import preflight
from lockstep.errors import UserError
from lockstep.inputs.architectures import BUILT_IN
from lockstep.inputs.model import build_model, causal_lm_loss
from lockstep.inputs.model_config import FAMILIES, checked
from lockstep import limit
from lockstep.tensors import exact, model_check


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """The models are so small that a second thread only waits, which costs twice the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


QWEN2, QWEN3, LLAMA, MISTRAL, GPT2 = (BUILT_IN[f"tiny-{family}"] for family in FAMILIES)
WINDOWS = {**QWEN2, "use_sliding_window": True, "sliding_window": 32, "max_window_layers": 1}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
MODELS = {
    "windows": WINDOWS,
    "window of one": {
        **WINDOWS,
        "sliding_window": 1,
        "max_window_layers": 0,
    },  # no attention, so no gradient of q and k
    "layer types": {
        **QWEN3,
        "use_sliding_window": True,
        "sliding_window": 5,
        "num_hidden_layers": 3,
        "layer_types": ["full_attention", "full_attention", "sliding_attention"],
    },
    "llama3": {**LLAMA, "rope_scaling": LLAMA3, "rope_theta": 10000.0},
    "longrope": {
        **QWEN3,
        "rope_scaling": {
            "rope_type": "longrope",
            "short_factor": [1.0] * 8,
            "long_factor": [4.0] * 8,
            "original_max_position_embeddings": 40,
        },
    },
    "wide heads": {**QWEN2, "head_dim": 32},
    "padding": {**LLAMA, "pad_token_id": 7},
    "a window in all layers": MISTRAL,
    "mistral without a window": {
        **MISTRAL,
        "sliding_window": None,
        "head_dim": 32,
        "tie_word_embeddings": True,
    },
    "gelu": {**LLAMA, "hidden_act": "gelu_new", "rms_norm_eps": 1e-3},
    "gpt2": GPT2,
    "gpt2, scaled by layer": {**GPT2, "scale_attn_by_inverse_layer_idx": True, "layer_norm_epsilon": 1e-2},
    "gpt2, not scaled": {**GPT2, "scale_attn_weights": False, "n_inner": 40, "tie_word_embeddings": False},
}


def difference(content, **options):
    return model_check.compare(checked(content, "x")[0], content, options.pop("seq_length", 64), **options)


@pytest.mark.parametrize("attn_impl", ["sdpa", "eager"])
@pytest.mark.parametrize("name", MODELS)
def test_the_reference_is_transformers_own_model(name, attn_impl):
    first, worst = difference(MODELS[name], attn_impl=attn_impl)
    assert first == "" and worst < model_check.TOLERANCE / 10


@pytest.mark.parametrize("name", hub.ALL)
def test_models_of_the_hub(name):
    model_check.try_out(checked(hub.ALL[name], "x")[0], hub.ALL[name], name)
    assert difference(hub.ALL[name])[0] == ""


def test_the_check_sees_a_window_that_is_left_out(monkeypatch):
    full = exact.attention
    monkeypatch.setattr(
        exact, "attention", lambda *inputs, sliding_window=None, **options: full(*inputs, **options)
    )
    assert difference(WINDOWS)[0].startswith("the output of model.layers.1.self_attn.o_proj differs by")
    assert difference(QWEN2)[0] == ""


def test_the_check_sees_a_scale_that_is_left_out(monkeypatch):
    full = exact.attention

    def usual(module, query, *inputs, scaling, **options):
        return full(module, query, *inputs, scaling=query.shape[-1] ** -0.5, **options)

    monkeypatch.setattr(exact, "attention", usual)
    assert difference(GPT2)[0] == ""
    for change, layer in ({"scale_attn_by_inverse_layer_idx": True}, 1), ({"scale_attn_weights": False}, 0):
        assert difference({**GPT2, **change})[0].startswith(
            f"the output of transformer.h.{layer}.attn.c_proj"
        )


def test_the_check_sees_a_window_that_is_one_too_wide(monkeypatch):
    full = exact.attention

    def wider(*inputs, sliding_window=None, **options):
        return full(*inputs, sliding_window=sliding_window and sliding_window + 1, **options)

    monkeypatch.setattr(exact, "attention", wider)
    assert "layers.1.self_attn" in difference(WINDOWS)[0]
    assert "layers.0.self_attn" in difference(MISTRAL)[0]


def test_the_check_sees_another_scale(monkeypatch):
    full = exact.attention
    monkeypatch.setattr(
        exact,
        "attention",
        lambda *inputs, scaling, **options: full(*inputs, scaling=scaling * (1 + 1e-6), **options),
    )
    assert "layers.0.self_attn" in difference(QWEN2)[0]


def test_the_check_sees_heads_in_another_order(monkeypatch):
    full = exact.attention
    monkeypatch.setattr(
        exact,
        "attention",
        lambda module, query, key, value, *rest, **options: full(
            module, query, key.flip(1), value.flip(1), *rest, **options
        ),
    )
    assert "layers.0.self_attn" in difference(QWEN2)[0]


@pytest.mark.parametrize(
    "key, value, module",
    [
        ("rms_norm_eps", 1e-5, "the output of model.layers.0.input_layernorm"),
        ("hidden_act", "gelu", "the output of model.layers.0.mlp.act_fn"),
        ("rope_theta", 10000.0, "the output of model.rotary_emb"),
        ("pad_token_id", 7, "gradient of model.embed_tokens.weight"),
        ("is_causal", False, "the output of model.layers.0.self_attn.o_proj"),
        ("attention_bias", True, "it has model.layers.0.self_attn.q_proj.bias"),
        ("partial_rotary_factor", 0.5, ""),  # transformers' own model passes over it, too
    ],
)
def test_the_check_sees_a_key_that_is_left_out(key, value, module):
    """What the reference does not know of, and transformers does: a difference there, whatever the key is called."""
    first, _ = model_check.compare(checked(LLAMA, "x")[0], {**LLAMA, key: value}, 64)
    assert first.startswith(module) and bool(first) == bool(module)


def test_casts_to_float32_are_all_that_is_changed():
    """The model that the check holds the reference against gives what transformers' own does, up to float32."""
    model, _ = build_model(QWEN3, seed=0, attn_impl="eager", init_weights_path=None)
    ids = torch.arange(32)[None]
    loss = causal_lm_loss(model.double(), ids, ids).item()
    with model_check._Float64Casts():
        exactly = causal_lm_loss(model, ids, ids)
    assert exactly.dtype == torch.float64 and 0 < abs(exactly.item() - loss) < 1e-6


def folder(tmp_path, content):
    (tmp_path / "config.json").write_text(json.dumps(content))
    config = config_module.parse_config("ddp", ["--model_name", str(tmp_path), "--seq_length", "64"])
    return config, preflight.load_inputs(config)


def test_only_models_of_users_are_checked(tmp_path, monkeypatch):
    monkeypatch.setattr(exact, "attention", None)
    config, inputs = folder(tmp_path, WINDOWS)
    with pytest.raises(
        UserError, match="the reference and transformers compute different models from its config.json"
    ):
        model_check.check(config, inputs)
    config = config_module.parse_config("ddp", [])
    model_check.check(config, preflight.load_inputs(config))


def test_what_transformers_refuses_is_one_line(tmp_path):
    heads = {**LLAMA, "hidden_size": 66, "head_dim": 16}  # Llama wants a multiple, whatever head_dim says
    with pytest.raises(UserError, match="transformers cannot build a model from its config.json") as error:
        folder(tmp_path, heads)
    assert "\n" not in str(error.value)
    assert folder(tmp_path, {**QWEN2, "hidden_size": 66, "head_dim": 16})[1].architecture["hidden_size"] == 66


def test_other_parameters_than_planned_are_refused():
    model_check.try_out(LLAMA, LLAMA, "x")
    with pytest.raises(UserError, match="has model.layers.0.self_attn.q_proj.bias of shape"):
        model_check.try_out(LLAMA, {**LLAMA, "attention_bias": True}, "x")


def test_a_method_is_no_key(tmp_path):
    with pytest.raises(UserError, match="to_dict would replace a method"):
        folder(tmp_path, {**LLAMA, "to_dict": "x"})


def test_a_model_that_does_not_fit(tmp_path, monkeypatch):
    huge = {
        **LLAMA,
        "hidden_size": 2**18,
        "intermediate_size": 2**20,
        "num_attention_heads": 2**11,
        "num_key_value_heads": 2,
        "num_hidden_layers": 1000,
    }
    config, inputs = folder(tmp_path, huge)
    with pytest.raises(UserError, match=r"9\.62e\+14 parameters.* need at least .* GB of memory"):
        preflight.check_environment(config, inputs.architecture)
    parameters = sum(
        p.numel()
        for p in build_model(LLAMA, seed=0, attn_impl="sdpa", init_weights_path=None)[0].parameters()
    )
    assert limit.least_bytes(config, parameters) == parameters * 16 * 2
    monkeypatch.setattr(limit, "machine_bytes", lambda: parameters * 16 * 2)
    limit.require(config, LLAMA, 2)
    monkeypatch.setattr(limit, "machine_bytes", lambda: parameters * 16 * 2 - 1)
    with pytest.raises(UserError, match="choose a smaller model"):
        limit.require(config, LLAMA, 2)


def test_a_rope_leaves_the_architecture_as_it_is():
    """transformers writes into the dict that it is given; what is recorded of a run must not depend on when it is recorded."""
    before = json.dumps(MODELS["llama3"])
    build_model(MODELS["llama3"], seed=0, attn_impl="sdpa", init_weights_path=None)
    assert json.dumps(MODELS["llama3"]) == before


@pytest.mark.parametrize("number", range(12))
def test_drawn_by_chance(number):
    """Each is computed right or refused by name (results/model_families.md has more of them)."""
    outcome, why = model_families.judge(model_families.drawn(12, seed=1)[number])
    assert outcome != model_families.WRONG, why


def test_a_draw_can_be_wrong(monkeypatch):
    """Negative control: a norm that leaves its epsilon out."""
    monkeypatch.setattr(
        exact,
        "norm_forward",
        lambda module, hidden: module.weight * hidden / hidden.square().mean(-1, keepdim=True).sqrt(),
    )
    drawn = [content for content in model_families.drawn(7, seed=1) if content["model_type"] != "gpt2"]
    outcomes = {model_families.judge(content)[0] for content in drawn}  # GPT-2's norms are torch's own
    assert model_families.RIGHT not in outcomes and model_families.WRONG in outcomes


def test_a_verification_ends_before_it_starts(tmp_path, monkeypatch, capsys):
    """With a model that the reference does not do, nothing is started, nothing removed; with one that it does, training starts."""
    import run_verification

    folder(tmp_path, WINDOWS)
    started = []
    monkeypatch.setattr(
        run_verification.jobs,
        "start_all_groups",
        lambda *groups, **_: started.append(groups) or (_ for _ in ()).throw(UserError("started")),
    )
    arguments = ["--model_name", str(tmp_path), "--output_dir", str(tmp_path / "out"), "--precision", "fp32"]
    assert run_verification.main(arguments) == 2 and len(started) == 1
    right = model_check.compare
    monkeypatch.setattr(model_check, "compare", lambda *inputs: ("the output of model.norm differs", 1.0))
    assert run_verification.main([*arguments, "--overwrite"]) == 2 and len(started) == 1
    assert "the output of model.norm differs" in capsys.readouterr().err.splitlines()[-1]
    monkeypatch.setattr(model_check, "compare", right)
    monkeypatch.setattr(
        limit, "machine_bytes", lambda: 10_000_000
    )  # enough for the runs, not for the reference in float64
    monkeypatch.setattr(limit, "least_bytes", lambda config, _: 10_000_000 + (config.run_name == "reference"))
    assert run_verification.main([*arguments, "--overwrite"]) == 2 and len(started) == 1
