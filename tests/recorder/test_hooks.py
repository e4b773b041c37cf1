"""Which tensors of a model's modules are recorded."""

import pytest
import torch

from lockstep.recorder.module_hooks import ModuleHooks


@pytest.mark.parametrize(
    "module, is_kept",
    [
        (torch.nn.Identity(), False),
        (torch.nn.Dropout(0.0).eval(), False),
        (torch.nn.ReLU(inplace=True), True),
        (torch.nn.Tanh(), True),
    ],
)
def test_a_module_that_returns_what_it_is_given_has_no_gradient_of_its_own(module, is_kept):
    """All uses of the tensor have a part in the gradient there. A wrapper may make another tensor of it, with a part alone."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), module, torch.nn.Linear(2, 2))
    found = {}
    hooks = ModuleHooks(model, "*", found.__setitem__)
    hooks.begin(0)
    output = model(torch.ones(1, 2))
    hooks.end()
    output.sum().backward()
    assert "forward/0/1" in found and ("backward/0/1" in found) is is_kept
    assert {"backward/0/0", "backward/0/2"} <= found.keys()
