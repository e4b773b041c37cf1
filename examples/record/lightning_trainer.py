"""A LightningModule, trained by Lightning's Trainer: DDP, or FSDP2 by ModelParallelStrategy.

torchrun --nproc_per_node 2 -m lockstep.record --output runs/lightning examples/record/lightning_trainer.py --strategy fsdp
python -m lockstep.judge runs/lightning
"""

import argparse

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader
from trainer import Samples, model


class Lit(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = model()

    def configure_model(self):
        if self.device_mesh is not None:
            for layer in self.net.model.layers:
                fully_shard(layer, mesh=self.device_mesh["data_parallel"])
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch, _):
        return self.net(**batch, use_cache=False).loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", choices=("ddp", "fsdp"), default="ddp")
    parser.add_argument("--accumulation", type=int, default=2)
    options = parser.parse_args()
    strategy = DDPStrategy()
    if options.strategy == "fsdp":
        strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_steps=3,
        accumulate_grad_batches=options.accumulation,
        gradient_clip_val=0.5 if options.strategy == "ddp" else None,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Lit(), DataLoader(Samples(), batch_size=2))


if __name__ == "__main__":
    main()
