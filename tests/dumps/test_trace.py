"""The layout of a model is found in the model: it is what a real step of any size gives, and what is no tensor of a batch is left out."""

import sys

import pytest
import torch
from families import (  # noqa: F401 - fixtures
    FAMILIES,
    ONLY_EAGER,
    architecture,
    built,
    forget,
    one_thread,
    own_code,
    step,
)
from programs import completed
from transformers.models.llama import modeling_llama
from transformers.models.mixtral import modeling_mixtral

from lockstep.dumps.layout import BATCH, SEQUENCE, Choice
from lockstep.dumps.trace import SIZES, layout_of
from lockstep.ground.errors import UserError
from lockstep.inputs.architectures import BUILT_IN
from lockstep.inputs.shapes import use_eager_experts

pytestmark = pytest.mark.usefixtures("one_thread")

TINY = [name for name in BUILT_IN if name.startswith("tiny")]
LLAMA = BUILT_IN["tiny-llama"]


def test_sizes_cannot_be_confused():
    """Two symbols that are equal in every pass would be one."""
    batches, sequences = zip(*SIZES, strict=True)
    tokens = tuple(batch * sequence for batch, sequence in SIZES)
    assert len({batches, sequences, tokens}) == 3 and all(len(set(each)) > 1 for each in (batches, sequences))


def real_step(given, attn_impl, batch, sequence):
    """Name -> shape of module outputs in a step of the model itself, in order; calls of each module; parameters that have a gradient."""
    model = built(given, attn_impl)
    use_eager_experts(model)
    ids = torch.randint(0, given["vocab_size"], (batch, sequence), generator=torch.Generator().manual_seed(3))
    seen, calls, gradients = step(model, ids, ids)
    del seen["loss"]
    shapes = {key: tuple(tensor.shape) for key, tensor in seen.items()}
    return shapes, calls, {name for name, gradient in gradients.items() if gradient is not None}


CASES = [(name, attn_impl, BUILT_IN[name]) for name in TINY for attn_impl in ("sdpa", "eager")]
CASES += [
    (name, attn_impl, None)
    for name in FAMILIES
    for attn_impl in (["eager"] if name in ONLY_EAGER else ["sdpa", "eager"])
]


@pytest.mark.parametrize("name, attn_impl, given", CASES, ids=lambda each: each if type(each) is str else "")
def test_a_real_step_has_this_layout(name, attn_impl, given):
    """With a batch and a sequence that the layout was not found with."""
    given = given or architecture(name)
    layout, batch, sequence = layout_of(given, attn_impl), 5, 11
    shapes, calls, gradients = real_step(given, attn_impl, batch, sequence)
    assert gradients == set(layout.parameters)
    sizes = {BATCH: batch, SEQUENCE: sequence}
    wanted = {
        key: tuple(sizes.get(size, size) for size in shape)
        for key, shape in layout.outputs.items()
        if not key.endswith(".input") and ".input." not in key
    }
    found = {
        key: (batch, sequence, *shape[1:]) if key in layout.flat else shape
        for key, shape in shapes.items()
        if key not in layout.unknown
    }
    assert list(found.items()) == list(wanted.items())
    assert all(count == 1 or name.startswith(layout.unknown) for name, count in calls.items())
    assert {f"{name}.weight" for name in (layout.names.embedding, layout.names.head)} & set(layout.parameters)
    assert set(layout.sources) == set(layout.outputs) and set(layout.backward) <= set(layout.outputs)


def test_the_layout_of_llama():
    """In words, once: order, inputs, sources, tables."""
    layout = layout_of({**LLAMA, "num_hidden_layers": 1}, "sdpa")
    layer = "model.layers.0"
    assert layout.sources == {
        "model.embed_tokens": (),
        "model.rotary_emb": (),
        "model.rotary_emb.1": (),
        f"{layer}.input_layernorm": ("model.embed_tokens",),
        **{
            f"{layer}.self_attn.{name}_proj": (f"{layer}.input_layernorm",) for name in "qkv"
        },
        f"{layer}.self_attn.o_proj.input": tuple(f"{layer}.self_attn.{name}_proj" for name in "qkv"),
        f"{layer}.self_attn.o_proj": (f"{layer}.self_attn.o_proj.input",),
        f"{layer}.self_attn": (f"{layer}.self_attn.o_proj",),
        f"{layer}.post_attention_layernorm.input": ("model.embed_tokens", f"{layer}.self_attn.o_proj"),
        f"{layer}.post_attention_layernorm": (f"{layer}.post_attention_layernorm.input",),
        f"{layer}.mlp.gate_proj": (f"{layer}.post_attention_layernorm",),
        f"{layer}.mlp.act_fn": (f"{layer}.mlp.gate_proj",),
        f"{layer}.mlp.up_proj": (f"{layer}.post_attention_layernorm",),
        f"{layer}.mlp.down_proj.input": (f"{layer}.mlp.act_fn", f"{layer}.mlp.up_proj"),
        f"{layer}.mlp.down_proj": (f"{layer}.mlp.down_proj.input",),
        f"{layer}.mlp": (f"{layer}.mlp.down_proj",),
        layer: (f"{layer}.post_attention_layernorm.input", f"{layer}.mlp.down_proj"),
        "model.norm": (layer,),
        "lm_head": ("model.norm",),
    }  # fmt: skip
    assert list(layout.outputs) == list(layout.sources)
    assert layout.inputs == {
        module: {"0": f"{module}.input"}
        for module in (
            f"{layer}.self_attn.o_proj",
            f"{layer}.post_attention_layernorm",
            f"{layer}.mlp.down_proj",
        )
    }
    assert layout.backward[0] == "lm_head" and layout.backward[-1] == "model.embed_tokens"
    assert set(layout.backward) == set(layout.outputs) - {"model.rotary_emb", "model.rotary_emb.1"}
    assert layout.tables == ("model.rotary_emb",) and layout.flat == layout.unknown == () == tuple(
        layout.choices
    )


def test_the_gradient_of_what_all_samples_share_is_not_captured():
    layout = layout_of(BUILT_IN["tiny-gpt2"], "sdpa")
    assert layout.outputs["transformer.wpe"] == (1, SEQUENCE, 64)
    assert "transformer.wpe" not in layout.backward and "transformer.wte" in layout.backward


@pytest.mark.parametrize(
    "name, router",
    [
        ("mixtral", "model.layers.{}.mlp.gate"),
        ("gpt_oss", "model.layers.{}.mlp.router"),
        ("deepseek_v3", "model.layers.{}.mlp.gate"),
    ],
)
def test_choices_of_routers_are_found(name, router):
    layout = layout_of(architecture(name), "eager")
    numbers = [1] if name == "deepseek_v3" else [0, 1]  # its first layer has no experts
    assert list(layout.choices) == [f"{router.format(number)}.2" for number in numbers]
    for number, (key, choice) in zip(numbers, layout.choices.items(), strict=True):
        assert choice.scores == router.format(number) and layout.outputs[key] == (BATCH, SEQUENCE, 2)
        assert {key, choice.scores} <= set(layout.flat) and key not in layout.backward
    # the calls of torch.topk before the last one of DeepSeek's router choose groups of experts
    assert [choice.call for choice in layout.choices.values()] == ([2] if name == "deepseek_v3" else [0, 1])
    assert layout_of(architecture("phi3"), "eager").choices == {}  # negative control


def test_tokens_of_one_expert_are_not_captured():
    layout = layout_of(architecture("mixtral"), "eager")
    assert {name.removesuffix(".input") for name in layout.unknown} == {
        f"model.layers.{number}.mlp.experts.act_fn" for number in (0, 1)
    }
    assert not set(layout.unknown) & set(layout.outputs)
    assert not any(set(places.values()) - set(layout.outputs) for places in layout.inputs.values())


def test_a_module_that_is_called_twice_is_not_captured(own_code):  # noqa: F811
    def twice(self, hidden):
        return self.down_proj(self.act_fn(self.gate_proj(hidden)) * self.act_fn(self.up_proj(hidden)))

    assert "model.layers.0.mlp.act_fn" in layout_of(LLAMA, "sdpa").outputs  # negative control
    forget()
    own_code.setattr(modeling_llama.LlamaMLP, "forward", twice)
    layout = layout_of(LLAMA, "sdpa")
    assert [name for name in layout.unknown if ".0." in name] == ["model.layers.0.mlp.act_fn"]
    for part in (layout.outputs, layout.backward, layout.sources):
        assert "model.layers.0.mlp.act_fn" not in part and "model.layers.0.mlp.down_proj" in part
    assert layout.sources["model.layers.0.mlp.down_proj.input"] == (
        "model.layers.0.mlp.gate_proj",
        "model.layers.0.mlp.up_proj",
    )


def test_a_module_that_is_called_in_one_pass_only_is_not_captured(own_code):  # noqa: F811
    real = modeling_llama.LlamaMLP.forward

    def at_times(self, hidden):
        return real(self, hidden) if hidden.shape[0] != SIZES[1][0] else hidden * self.down_proj.weight.mean()

    own_code.setattr(modeling_llama.LlamaMLP, "forward", at_times)
    layout = layout_of(LLAMA, "sdpa")
    assert {"model.layers.0.mlp.gate_proj", "model.layers.0.mlp.down_proj"} <= set(layout.unknown)
    assert "model.layers.0.mlp" in layout.outputs


def test_outputs_that_are_no_tensors_are_passed_over(own_code):  # noqa: F811
    real = modeling_llama.LlamaMLP.forward
    own_code.setattr(
        modeling_llama.LlamaDecoderLayer,
        "forward",
        lambda self, hidden_states, **_: hidden_states + self.mlp(hidden_states)["of it"],
    )
    own_code.setattr(modeling_llama.LlamaMLP, "forward", lambda self, hidden: {"of it": real(self, hidden)})
    layout = layout_of(LLAMA, "sdpa")
    assert "model.layers.0.mlp" not in layout.outputs and "model.layers.0.mlp.down_proj" in layout.outputs
    assert not any(".self_attn." in name for name in layout.outputs)


def test_a_choice_of_scores_from_two_tensors_names_none(own_code):  # noqa: F811
    """Scores of a router that are computed from two captured tensors: which of them decides is not known."""
    real = modeling_mixtral.MixtralTopKRouter.forward

    def of_two(self, hidden):
        logits, _, _ = real(self, hidden)
        weights, chosen = torch.topk((logits + hidden.mean(-1, keepdim=True)).softmax(-1), 2, dim=-1)
        return logits, weights, chosen

    own_code.setattr(modeling_mixtral.MixtralTopKRouter, "forward", of_two)
    layout = layout_of(architecture("mixtral"), "eager")
    assert layout.choices["model.layers.0.mlp.gate.2"] == Choice(call=1, width=4, scores="", number=0)
    assert layout.choices["model.layers.1.mlp.gate.2"] == Choice(call=3, width=4, scores="", number=0)


def test_a_term_of_the_loss_is_not_told_what_it_counts():
    """It counts the experts once more, from the logits that they were chosen by."""
    for number, name in enumerate(("model.layers.0.mlp.gate", "model.layers.1.mlp.gate")):
        found = layout_of(architecture("mixtral", output_router_logits=True), "eager").choices
        assert found.keys() == {"model.layers.0.mlp.gate.2", "model.layers.1.mlp.gate.2"}
        assert found[f"{name}.2"] == Choice(call=number, width=4, scores=name, number=0)


def test_a_choice_that_no_module_returns_follows_from_its_logits():
    """Llama 4's router returns scores, of which those that it does not choose are zero."""
    llama4 = {
        **architecture("llama"),
        "model_type": "llama4_text",
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
    }
    layout = layout_of(llama4, "eager")
    logits = [f"model.layers.{number}.feed_forward.router.1" for number in (0, 1)]
    assert layout.choices == {
        name: Choice(call=call, width=4, scores=name, number=1) for call, name in enumerate(logits)
    }
    choice = layout.choices[logits[0]]
    assert choice.of(torch.tensor([[0.1, 0.4, 0.3, 0.2]])).tolist() == [[1]]


MEMORY = """
import resource
from lockstep.inputs.architectures import BUILT_IN
from lockstep.dumps.trace import layout_of
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
layout_of(BUILT_IN["tiny-llama"], "sdpa")  # what the libraries take
before = peak()
sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 8, "num_hidden_layers": 12}
layout = layout_of({**BUILT_IN["tiny-llama"], **sizes}, "sdpa")
elements = sum(a * (shape[1] if len(shape := layout.parameters[name]) > 1 else 1) for name, (a, *_) in layout.parameters.items())
print(peak() - before, 4 * elements)
"""


def test_weights_take_no_memory():
    """Seven hundred megabytes of weights: the pass takes a quarter of that, such as a copy of one matrix."""
    done = completed([sys.executable, "-c", MEMORY])
    taken, whole = map(int, done.stdout.split())
    assert whole > 6e8 and taken < whole / 4, (taken, whole)


def test_a_model_that_cannot_be_run_is_one_line(own_code):  # noqa: F811
    own_code.setattr(modeling_llama.LlamaMLP, "forward", lambda *_: 1 / 0)
    with pytest.raises(UserError, match=r"3, 5, 7 tokens, .* .division by zero, at test_trace.py:\d+.$"):
        layout_of(LLAMA, "sdpa")
    with pytest.raises(UserError, match="^no model can be built from this architecture"):
        layout_of({**LLAMA, "hidden_act": "none"}, "sdpa")
