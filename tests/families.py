"""Small config.json files of many families of transformers, and what a test needs to change their code for a while."""

import collections
import contextlib

import models
import pytest
import torch

from lockstep.dumps import trace
from lockstep.inputs import shapes
from lockstep.inputs.model import build_model, causal_lm_loss

NAMES = ("llama", "gemma3_text", "phi3", "olmo2", "gpt_neox", "mamba2", "mixtral", "deepseek_v3", "gpt_oss")
FAMILIES = {
    name: {
        **models.COMMON,
        "model_type": name,
        **{key: value for key, value in models.MODELS[name].items() if key != "eager"},
    }
    for name in NAMES
}
# of attention: transformers has no other for them
ONLY_EAGER = tuple(name for name in NAMES if models.MODELS[name].get("eager"))


def architecture(name: str, **changes) -> dict:
    return shapes.as_transformers_says({**FAMILIES[name], **changes}, name)


def step(model, ids, labels, mode=None):
    """(outputs of all modules and the loss by name, how often each module was called, gradients of all parameters) of a batch."""
    seen, calls = {}, collections.Counter()

    def keep(name):
        def see(_module, _inputs, output):
            calls[name] += 1
            seen.update((key, tensor.detach()) for key, tensor in trace.named_outputs(name, output))

        return see

    base = model.base_model_prefix
    hooks = [module.register_forward_hook(keep(name)) for name, module in trace.watched(model, base)]
    with mode or contextlib.nullcontext():
        loss = causal_lm_loss(model, ids, labels).mean()
        loss.backward()
    for hook in hooks:
        hook.remove()
    seen["loss"] = loss.detach()
    return seen, calls, {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.fixture
def own_code(tmp_path, monkeypatch):
    """monkeypatch, for transformers' classes: what is found of the patched models is kept for nobody else."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    forget()
    yield monkeypatch
    forget()


def built(architecture, attn_impl="sdpa", seed=0, path=None):
    """The model of a run: random weights of a seed, or those of a file."""
    return build_model(architecture, seed=seed, attn_impl=attn_impl, init_weights_path=path)[0]


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
