"""A strategy from outside the repository: DDP's file under another name."""

from pathlib import Path

from ranks import ROOT

ATTRIBUTES = """    label = "mine"
    axes = ("dp",)
    handles = "lockstep.faults.torch_handles:DDPHandles"

    def parallelize"""
DOUBLED = """

class Doubled(Mine):
    label, axes = "Doubled", ("dp",)

    def forward_backward(self, micro_batches):
        loss = super().forward_backward(micro_batches)
        for parameter in self.parameters:
            parameter.grad.mul_(2)
        return loss
"""


def own_strategy(path: Path, name: str, then: str = "") -> None:
    """Write a file whose class `name` is DDPStrategy, followed by `then`."""
    ddp = (ROOT / "ddp_strategy.py").read_text()
    renamed = ddp.replace("class DDPStrategy(TorchStrategy):", f"class {name}(TorchStrategy):")
    path.write_text(renamed.replace("    def parallelize", ATTRIBUTES) + then)
