"""Models with complex weights, such as neural operators, and modules that return complex numbers."""

import json

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import lockstep
from lockstep import judge


class Spectrum(nn.Module):
    def forward(self, x):
        return torch.fft.rfft(x)


class Spectral(nn.Module):
    """Multiplies the lowest frequencies with complex weights, in a tensor that its code makes complex64."""

    def __init__(self, channels=3, modes=4):
        super().__init__()
        self.modes, self.spectrum = modes, Spectrum()
        self.weight = nn.Parameter(torch.randn(channels, channels, modes, dtype=torch.cfloat))

    def forward(self, x):
        spectrum = self.spectrum(x)
        low = spectrum[..., : self.modes]
        result = torch.zeros(spectrum.shape, dtype=torch.cfloat)
        result[..., : self.modes] = torch.einsum("bix,iox->box", low, self.weight)
        return torch.fft.irfft(result, n=x.shape[-1])


class Operator(nn.Module):
    """A Fourier neural operator of two layers. `phase` is given complex numbers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Spectral() for _ in range(2))
        self.mix = nn.Linear(16, 16)

    def forward(self, x, phase):
        for layer in self.layers:
            x = torch.nn.functional.gelu(layer(x) + self.mix(x))
        return torch.fft.rfft(x) * phase


class ConjugateAdam(torch.optim.Optimizer):
    """An Adam with one second moment for both parts of a complex number, as neural operators' own."""

    def __init__(self, parameters, lr=1e-2):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(mean=torch.zeros_like(p), square=torch.zeros_like(p))
                state["mean"].mul_(0.9).add_(p.grad, alpha=0.1)
                state["square"].mul_(0.99).addcmul_(p.grad, p.grad.conj(), value=0.01)
                p.addcdiv_(state["mean"], state["square"].sqrt().add_(1e-8), value=-group["lr"])


OPTIMIZERS = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, 1e-2, amsgrad=True),
    "SGD": lambda parameters: torch.optim.SGD(parameters, 1e-2, momentum=0.9),
    "own": ConjugateAdam,
}


def status(folder, model, optimizer="AdamW", before_step=lambda model: None, dtype=torch.float32):
    """The judge's status of two steps, before whose updates `before_step` is called."""
    optimizer = OPTIMIZERS[optimizer](model.parameters())
    with lockstep.record(model, folder):
        for _ in range(2):
            optimizer.zero_grad()
            x, phase = torch.randn(4, 3, 16, dtype=dtype), torch.randn(9, dtype=torch.cfloat)
            model(x, phase).abs().square().mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            before_step(model)
            optimizer.step()
    return judge.main([str(folder)])


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_complex_weights(tmp_path, optimizer, capsys):
    torch.manual_seed(0)
    assert status(tmp_path, Operator(), optimizer) == 0
    rows = json.loads((tmp_path / "report.json").read_text())["steps"][0]["tensors"]
    assert rows.keys() >= {"gradient/layers.1.weight", "update/layers.1.weight", "forward/layers.1.spectrum"}
    assert "update" not in capsys.readouterr().out  # such as one that was not judged


def test_complex_weights_in_double_precision(tmp_path):
    torch.manual_seed(0)
    model = Operator().double()
    for layer in model.layers:
        layer.weight.data = layer.weight.data.to(torch.complex128)
    assert status(tmp_path, model, dtype=torch.float64) == 0


def of_imaginary_parts(model):
    model.layers[1].weight.grad.imag.mul_(1.001)


def of_one_number(model):
    model.layers[0].weight.grad[0, 1, 2] *= 1j


@pytest.mark.parametrize("bug", [of_imaginary_parts, of_one_number])
def test_a_gradient_that_is_wrong(tmp_path, bug, capsys):
    torch.manual_seed(0)
    model = Operator()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: bug(model) if p is bugged else None)
    bugged = model.layers[bug is of_imaginary_parts].weight
    assert status(tmp_path, model) == 1
    number = int(bug is of_imaginary_parts)
    assert (
        f"1 of 4 gradients is too far from the reference, layers.{number}.weight" in capsys.readouterr().out
    )


def test_an_update_that_is_wrong(tmp_path, capsys):
    """Of the weights, the imaginary parts do not move."""
    torch.manual_seed(0)
    model = Operator()
    weight = model.layers[0].weight

    def keep_imaginary(optimizer, _arguments, _options):
        weight.data.imag.copy_(imaginary)

    imaginary = weight.detach().imag.clone()
    handle = register_optimizer_step_post_hook(keep_imaginary)
    try:
        assert status(tmp_path, model) == 1
    finally:
        handle.remove()
    assert "most of all layers.0.weight" in capsys.readouterr().out
