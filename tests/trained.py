"""A short training that is recorded, and its verdict."""

import torch

import lockstep
from lockstep import judge


def train(folder, net, go_backward, *, rate=1e-3, steps=2, after=lambda net: None):
    """Each step, `go_backward(net)` computes losses and their gradients; `after(net)` follows the update."""
    optimizer = torch.optim.AdamW([one for one in net.parameters() if one.requires_grad], rate)
    with lockstep.record(net, folder, steps=steps):
        for _ in range(steps):
            optimizer.zero_grad()
            go_backward(net)
            optimizer.step()
            after(net)


def verdict(folder, capsys):
    """(exit status, what was said)."""
    status = judge.main([str(folder)])
    captured = capsys.readouterr()
    return status, captured.out + captured.err
