"""A loop of Lightning Fabric: DDP, or FSDP2 by ModelParallelStrategy.

torchrun --nproc_per_node 2 -m lockstep.record --output runs/fabric examples/record/lightning_fabric.py --strategy fsdp
python -m lockstep.judge runs/fabric
"""

import argparse

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader
from trainer import Samples, model


def shard(net, device_mesh):
    for layer in net.model.layers:
        fully_shard(layer, mesh=device_mesh["data_parallel"])
    return fully_shard(net, mesh=device_mesh["data_parallel"])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", choices=("ddp", "fsdp"), default="ddp")
    parser.add_argument("--accumulation", type=int, default=2)
    options = parser.parse_args()
    strategy = DDPStrategy()
    if options.strategy == "fsdp":
        strategy = ModelParallelStrategy(shard, data_parallel_size=2, tensor_parallel_size=1)
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    net = fabric.setup(model().train())
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(net.parameters(), lr=1e-3))
    loader = fabric.setup_dataloaders(DataLoader(Samples(), batch_size=2))
    for number, batch in enumerate(loader, start=1):
        ends = number % options.accumulation == 0
        with fabric.no_backward_sync(net, enabled=not ends):
            fabric.backward(net(**batch, use_cache=False).loss / options.accumulation)
        if ends:
            fabric.clip_gradients(net, optimizer, max_norm=0.5)
            optimizer.step()
            optimizer.zero_grad()
        if number == 3 * options.accumulation:
            break


if __name__ == "__main__":
    main()
