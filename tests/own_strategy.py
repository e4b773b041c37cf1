"""A strategy from outside the repository: DDP's file under another name."""

from pathlib import Path

from ranks import ROOT

SPEC = """from lockstep.ground.errors import UserError
from lockstep.plan.ddp import DDP


class MineSpec(DDP):
    def require(self, config, architecture):
        if config.own["bucket_cap_mb"] > 100:
            raise UserError(f"--bucket_cap_mb {config.own['bucket_cap_mb']}: mine has 100 at most; lower it")


"""
ATTRIBUTES = """    spec = MineSpec()
    label = "mine"
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
    renamed = ddp.replace("class DDPStrategy(TorchStrategy):", f"{SPEC}class {name}(TorchStrategy):")
    path.write_text(renamed.replace("    def parallelize", ATTRIBUTES) + then)
