"""Optimizers of one's own (docs/models.md).

python run_verification.py --optimizer examples/optimizers.py:muon --strategies ddp,fsdp@tp1xdp2
python run_verification.py --optimizer Adafactor --strategies ddp,fsdp@tp1xdp2
"""

import torch

Named = list[tuple[str, torch.nn.Parameter]]


def muon(named: Named, *, learning_rate: float, weight_decay: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside of layers, AdamW for embedding, head, norms and biases."""
    inside = [parameter for name, parameter in named if ".layers." in name and parameter.ndim == 2]
    chosen = {id(parameter) for parameter in inside}
    others = [parameter for _, parameter in named if id(parameter) not in chosen]
    return [
        torch.optim.Muon(inside, lr=20 * learning_rate, weight_decay=weight_decay),
        torch.optim.AdamW(others, lr=learning_rate, weight_decay=weight_decay),
    ]


def sgd_with_momentum(named: Named, *, learning_rate: float, weight_decay: float) -> torch.optim.Optimizer:
    parameters = [parameter for _, parameter in named]
    return torch.optim.SGD(
        parameters, lr=learning_rate, momentum=0.9, nesterov=True, weight_decay=weight_decay
    )


def adamw_foreach(named: Named, *, learning_rate: float, weight_decay: float) -> torch.optim.Optimizer:
    parameters = [parameter for _, parameter in named]
    return torch.optim.AdamW(parameters, lr=learning_rate, weight_decay=weight_decay, foreach=True)
