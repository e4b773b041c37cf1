"""Weights that hooks of torch.nn.utils compute before each call."""

import json

import pytest
import torch
from torch.nn import functional as F
from torch.nn.utils import prune, spectral_norm, weight_norm

import lockstep
from lockstep import judge


class Vocoder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.one = weight_norm(torch.nn.Conv1d(4, 8, 3, padding=1))
        self.two = spectral_norm(torch.nn.Conv1d(8, 4, 3, padding=1))
        prune.l1_unstructured(self.one, "bias", 0.5)

    def forward(self, x):
        return self.two(F.leaky_relu(self.one(x), 0.1))


def trained(folder, model):
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    with lockstep.record(model, folder):
        for _ in range(2):
            optimizer.zero_grad()
            F.l1_loss(model(torch.randn(4, 4, 16)), torch.randn(4, 4, 16)).backward()
            optimizer.step()


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("name", ["", "one.weight_g", "one.weight_v", "two.weight_orig", "one.bias_orig"])
def test_weights_that_hooks_compute(tmp_path, capsys, name):
    """Right, and with a gradient that is off by one in a thousand."""
    torch.manual_seed(0)
    model = Vocoder()
    if name:
        model.get_parameter(name).register_hook(lambda gradient: 1.001 * gradient)
    trained(tmp_path, model)
    assert judge.main([str(tmp_path)]) == bool(name)
    assert (
        not name
        or f"gradients is too far from the reference, {name}: " in capsys.readouterr().out.splitlines()[-1]
    )


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_a_recording_whose_hook_computes_no_weight(tmp_path, capsys):
    torch.manual_seed(0)
    trained(tmp_path, Vocoder())
    path = tmp_path / "model.json"
    content = json.loads(path.read_text())
    content["tree"]["children"]["one"]["weight_hooks"][0]["object"] = "torch.nn:Linear"
    path.write_text(json.dumps(content))
    assert judge.main([str(tmp_path)]) == 2
    assert "Linear computes no weight" in capsys.readouterr().err
