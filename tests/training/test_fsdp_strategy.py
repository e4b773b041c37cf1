"""The tensor-parallel plan that is made of the model's own, and what it must not leave out."""

import pytest
from families import built

import fsdp_strategy
from lockstep.inputs.architectures import BUILT_IN
from lockstep.inputs.modules import LIKE_LLAMA


def model_of(name):
    return built(BUILT_IN[name])


@pytest.fixture(scope="module")
def model():
    return model_of("tiny-qwen3")


@pytest.fixture
def own(model, monkeypatch):
    """The model's own plan, to be changed."""
    plan = dict(model.config.base_model_tp_plan)
    monkeypatch.setattr(model.config, "base_model_tp_plan", plan)
    return plan


@pytest.mark.parametrize(
    "name",
    [name for name, content in BUILT_IN.items() if content["model_type"] in LIKE_LLAMA and "tiny" in name],
)
def test_every_model_has_a_plan(name):
    model = model_of(name)
    plan = fsdp_strategy.tp_plan(model)
    for pattern, style in model.config.base_model_tp_plan.items():
        assert plan[f"model.{pattern}"] is fsdp_strategy.STYLES[style]
    assert len(plan) == len(model.config.base_model_tp_plan) + len(fsdp_strategy.OWN_ROWS)


def test_gpt2_has_none():
    """That is why --tp_size 2 is refused; if transformers gives it one, that refusal can go."""
    with pytest.raises(ValueError, match="GPT2LMHeadModel comes with no tensor-parallel plan"):
        fsdp_strategy.tp_plan(model_of("tiny-gpt2"))


def test_an_unknown_style_is_refused_by_name(model, own):
    own["layers.*.mlp.up_proj"] = "moe_tp_experts"
    with pytest.raises(
        ValueError, match="'moe_tp_experts' for model.layers.*.mlp.up_proj, which is not known here"
    ):
        fsdp_strategy.tp_plan(model)


@pytest.mark.parametrize("row", ["mlp.gate_proj", "self_attn.k_proj", "self_attn.k_norm"])
def test_a_row_that_the_models_plan_lacks_is_missed(model, own, row):
    """Without k_norm's row each rank would keep its own heads' share of the gradient, and nothing would say so."""
    del own[f"layers.*.{row}"]
    with pytest.raises(ValueError, match=rf"says nothing about model.layers.\*.{row}"):
        fsdp_strategy.tp_plan(model)


@pytest.mark.parametrize("row", ["lm_head", "model.embed_tokens"])
def test_a_missing_row_of_ours_is_found(model, monkeypatch, row):
    monkeypatch.delitem(fsdp_strategy.OWN_ROWS, row)
    with pytest.raises(ValueError, match=f"says nothing about {row}"):
        fsdp_strategy.tp_plan(model)


def test_a_row_without_a_module_is_refused(model, own):
    own["layers.*.mlp.router"] = "colwise"
    with pytest.raises(
        ValueError, match=r"a row for model.layers.\*.mlp.router, and the model has no such module"
    ):
        fsdp_strategy.tp_plan(model)


def test_no_row_is_there_twice(model, own):
    own["embed_tokens"] = "rowwise"
    with pytest.raises(ValueError, match=r"a row for model.embed_tokens \('rowwise'\), and so has"):
        fsdp_strategy.tp_plan(model)


def test_a_norm_that_is_not_on_heads_is_refused(model, own):
    """Its input is not cut along dim 2: the sum over tp would be wrong."""
    own["layers.*.self_attn.q_proj"] = "replicated_with_grad_allreduce"
    with pytest.raises(ValueError, match="only a norm on heads of 16 may have its gradient summed"):
        fsdp_strategy.tp_plan(model)
