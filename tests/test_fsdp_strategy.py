"""The TP plan against the model's own, and what it must not leave out."""

import pytest

import fsdp_strategy
from lockstep.inputs.architectures import BUILT_IN
from lockstep.inputs.model import build_model


@pytest.fixture(scope="module")
def model():
    return build_model(BUILT_IN["tiny-qwen2"], seed=0, attn_impl="sdpa", init_weights_path=None)[0]


def test_the_plan_agrees_with_the_models_own(model):
    fsdp_strategy.check_plan(model)


def test_a_changed_style_is_found(model, monkeypatch):
    style = fsdp_strategy.TP_PLAN["model.layers.*.mlp.up_proj"]
    monkeypatch.setitem(fsdp_strategy.TP_PLAN, "model.layers.*.mlp.down_proj", style)
    with pytest.raises(
        ValueError, match="'colwise' for model.layers.*.mlp.down_proj, the model's own plan has 'rowwise'"
    ):
        fsdp_strategy.check_plan(model)


@pytest.mark.parametrize("row", ["lm_head", "model.embed_tokens"])
def test_a_missing_row_is_found(model, monkeypatch, row):
    monkeypatch.delitem(fsdp_strategy.TP_PLAN, row)
    with pytest.raises(ValueError, match=f"says nothing about {row}"):
        fsdp_strategy.check_plan(model)


def test_a_missing_attention_row_is_found(model, monkeypatch):
    monkeypatch.delitem(fsdp_strategy.TP_PLAN, "model.layers.*.self_attn.k_proj")
    with pytest.raises(ValueError, match="'nothing' for model.layers.*.self_attn.k_proj"):
        fsdp_strategy.check_plan(model)
