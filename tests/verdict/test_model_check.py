"""A user's model is tried before a run: its own code must give a float64 reference, and it must fit the machine."""

import json

import numpy as np
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
)
from torch.utils.checkpoint import checkpoint
from transformers.models.llama import modeling_llama

from lockstep.ground.errors import UserError
from lockstep.inputs.architectures import BUILT_IN
from lockstep.inputs.shapes import from_config
from lockstep.plan import command_line, resources
from lockstep.training import preflight
from lockstep.verdict import model_check
from lockstep.verdict.model_check import problem_of, shallow

pytestmark = pytest.mark.usefixtures("one_thread")

LLAMA = BUILT_IN["tiny-llama"]
LOWER = "off central differences of its loss in float64"
TESTED = [name for name in FAMILIES if name != "llama"]


@pytest.mark.parametrize("name", TESTED)
def test_families_are_accepted(name):
    attn_impl = "eager" if name in ONLY_EAGER else "sdpa"
    assert problem_of(architecture(name), attn_impl, 16) == ""


@pytest.mark.parametrize("name", [name for name in BUILT_IN if name.startswith("tiny")])
def test_built_in_models_are_accepted(name):
    for attn_impl in ("sdpa", "eager"):
        assert problem_of(BUILT_IN[name], attn_impl, 16) == ""


WINDOWS = {**BUILT_IN["tiny-qwen2"], "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
VARIANTS = {
    "windows": WINDOWS,
    "llama3": {
        **LLAMA,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
    "padding among the tokens": {**LLAMA, "vocab_size": 8, "pad_token_id": 5},
    "yarn": {**LLAMA, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_are_accepted(name):
    assert problem_of(VARIANTS[name], "sdpa", 16) == ""


def around(change):
    """A forward pass of Llama's MLP that changes what it returns."""
    real = modeling_llama.LlamaMLP.forward
    return lambda self, hidden: change(self, real(self, hidden))


def by_numpy(_module, hidden):
    """Rounded to float32 where no mode sees it; the gradient passes unchanged."""
    rounded = hidden.detach().numpy().astype(np.float32).astype(np.float64)
    return hidden + (torch.from_numpy(rounded).to(hidden.dtype) - hidden.detach())


def behind_the_mode(_module, hidden):
    with torch._C.DisableTorchFunction():
        return hidden.float().to(hidden.dtype)


class WrongBackward(torch.autograd.Function):
    @staticmethod
    def forward(_ctx, hidden):
        return hidden * 2

    @staticmethod
    def backward(_ctx, gradient):
        return gradient * 2.001


class RightBackward(WrongBackward):
    @staticmethod
    def backward(_ctx, gradient):
        return gradient * 2


def count(module, hidden):
    module.calls = getattr(module, "calls", 0) + 1
    return hidden * (1 + 1e-9 * module.calls)


BAD_CODE = {
    "numpy": (by_numpy, LOWER),
    "float32": (behind_the_mode, LOWER),
    "a wrong backward pass": (lambda _, hidden: WrongBackward.apply(hidden), LOWER),
    "a state": (count, "it draws random numbers or keeps a state"),
    "random numbers": (
        lambda _, hidden: hidden + 1e-6 * torch.randn_like(hidden),
        "it draws random numbers or keeps a state",
    ),
    "an error of its own": (
        lambda *_: 1 / 0,
        "no model of this architecture can be run on sequences of 3, 5, 7 tokens",
    ),
}


@pytest.mark.parametrize("what", BAD_CODE)
def test_code_that_gives_no_reference_is_refused(what, own_code):  # noqa: F811
    change, message = BAD_CODE[what]
    assert problem_of(LLAMA, "sdpa", 16) == ""  # negative control
    forget()
    own_code.setattr(modeling_llama.LlamaMLP, "forward", around(change))
    said = problem_of(LLAMA, "sdpa", 16)
    assert message in said and "\n" not in said


@pytest.mark.parametrize("lower", [torch.Tensor.bfloat16, torch.Tensor.half])
def test_lower_precision_that_the_mode_sees_is_widened(lower, own_code):  # noqa: F811
    """The run rounds there, and the reference does not; how far that takes the run is for the verdict to say."""
    change = around(lambda _, hidden: lower(hidden).to(hidden.dtype))
    own_code.setattr(modeling_llama.LlamaMLP, "forward", change)
    assert problem_of(LLAMA, "sdpa", 16) == ""


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_a_checkpoint_recomputes_may_be_widened(reentrant, own_code):  # noqa: F811
    """Such as a norm that computes in float32."""

    def recomputed(_, hidden):
        return checkpoint(lambda x: x.float().square().to(x.dtype), hidden, use_reentrant=reentrant)

    own_code.setattr(modeling_llama.LlamaMLP, "forward", around(recomputed))
    assert problem_of(LLAMA, "sdpa", 16) == ""


def test_a_backward_pass_of_its_own_that_is_right_is_accepted(own_code):  # noqa: F811
    """Negative control."""
    own_code.setattr(
        modeling_llama.LlamaMLP, "forward", around(lambda _, hidden: RightBackward.apply(hidden))
    )
    assert problem_of(LLAMA, "sdpa", 16) == ""


def test_a_parameter_that_nothing_uses_is_named(own_code):  # noqa: F811
    real = modeling_llama.LlamaMLP.__init__

    def with_one_more(self, config):
        real(self, config)
        self.extra = torch.nn.Parameter(torch.ones(3))

    own_code.setattr(modeling_llama.LlamaMLP, "__init__", with_one_more)
    said = problem_of(LLAMA, "sdpa", 16)
    assert said.startswith("its loss does not depend on model.layers.0.mlp.extra, ")


@pytest.mark.parametrize("attn_impl", ["sdpa", "eager"])
def test_dropout_is_seen(attn_impl):
    said = problem_of({**LLAMA, "attention_dropout": 0.1}, attn_impl, 16)
    assert said.startswith("two forward passes of the same batch have the losses ")


def test_a_copy_has_a_layer_of_each_kind():
    kinds = ["full_attention", "full_attention", "sliding_attention", "full_attention"]
    small = shallow({**LLAMA, "num_hidden_layers": 4, "layer_types": kinds, "eos_token_id": [1, 2, 3]})
    assert small["num_hidden_layers"] == 2 and small["eos_token_id"] == [1, 2, 3]
    assert small["layer_types"] == ["full_attention", "sliding_attention"]
    alike = shallow({**LLAMA, "num_hidden_layers": 4, "layer_types": ["full_attention"] * 4})
    assert alike["layer_types"] == ["full_attention"] * 2 and alike["num_hidden_layers"] == 2
    assert shallow({**LLAMA, "num_hidden_layers": 40})["num_hidden_layers"] == 2
    assert shallow(LLAMA) == LLAMA and shallow({"model_type": "x"}) == {"model_type": "x"}


def test_a_deep_model_is_tried_in_a_shallow_copy(monkeypatch):
    built = []
    monkeypatch.setattr(
        model_check, "from_config", lambda each, **options: built.append(each) or from_config(each, **options)
    )
    assert problem_of({**LLAMA, "num_hidden_layers": 500}, "sdpa", 16) == ""
    assert [each["num_hidden_layers"] for each in built] == [2]


def folder(tmp_path, content):
    (tmp_path / "config.json").write_text(json.dumps(content))
    config = command_line.parse_config("ddp", ["--model_name", str(tmp_path), "--seq_length", "64"])
    return config, preflight.load_inputs(config)


def test_only_models_of_users_are_checked(tmp_path, monkeypatch):
    config, inputs = folder(tmp_path, WINDOWS)
    model_check.check(config, inputs)
    asked = []
    monkeypatch.setattr(model_check, "problem_of", lambda *given: asked.append(given) or "it is odd")
    with pytest.raises(UserError, match=f"^--model_name {tmp_path}: it is odd$"):
        model_check.check(config, inputs)
    assert asked == [(inputs.architecture, "sdpa", 16)]
    config = command_line.parse_config("ddp", [])
    model_check.check(config, preflight.load_inputs(config))
    assert len(asked) == 1


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
    model = built(LLAMA)
    parameters = sum(p.numel() for p in model.parameters())
    assert resources.least_bytes(config, parameters) == parameters * 16 * 2
    monkeypatch.setattr(resources, "machine_bytes", lambda: parameters * 16 * 2)
    resources.require_memory(config, LLAMA, 2)
    monkeypatch.setattr(resources, "machine_bytes", lambda: parameters * 16 * 2 - 1)
    with pytest.raises(UserError, match="choose a smaller model"):
        resources.require_memory(config, LLAMA, 2)


def test_a_verification_ends_before_it_starts(tmp_path, monkeypatch, capsys):
    """With a model that has no reference nothing is started, nothing removed; with one that has, training starts."""
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
    right = model_check.problem_of
    monkeypatch.setattr(model_check, "problem_of", lambda *_: "its gradient is off")
    assert run_verification.main([*arguments, "--overwrite"]) == 2 and len(started) == 1
    assert "its gradient is off" in capsys.readouterr().err.splitlines()[-1]
    monkeypatch.setattr(model_check, "problem_of", right)
    monkeypatch.setattr(
        resources, "machine_bytes", lambda: 10_000_000
    )  # enough for the runs, not for the reference in float64
    monkeypatch.setattr(
        resources, "least_bytes", lambda config, _: 10_000_000 + (config.run_name == "reference")
    )
    assert run_verification.main([*arguments, "--overwrite"]) == 2 and len(started) == 1
