"""A pipeline of torch.distributed.pipelining, with DDP or FSDP2 over the ranks of a stage, and clipping by the norm of the whole model.

torchrun --nproc_per_node 2 -m lockstep.record --output runs/pipeline examples/record/pipeline.py
python -m lockstep.judge runs/pipeline
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from own_module import VOCABULARY, WIDTH, Block
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel

LAYERS, LENGTH, MICRO = 4, 32, 4


class Stage(nn.Module):
    """Some layers of a model. The first stage has the embedding, the last one the head."""

    def __init__(self, number: int, stages: int):
        super().__init__()
        blocks = [Block() for _ in range(LAYERS)]
        embedding, head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        share = LAYERS // stages
        self.blocks = nn.ModuleList(blocks[number * share : (number + 1) * share])
        self.embedding = embedding if number == 0 else None
        self.head = head if number == stages - 1 else None

    def forward(self, x):
        if self.embedding is not None:
            x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return x if self.head is None else self.head(F.rms_norm(x, (WIDTH,)))


def loss_of(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", choices=["none", "ddp", "fsdp"], default="none")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--schedule", choices=["gpipe", "1f1b"], default="1f1b")
    parser.add_argument("--max_norm", type=float, default=0.0)
    parser.add_argument("--autocast", action="store_true")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    shape = options.stages, dist.get_world_size() // options.stages
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("pp", "dp"))
    number, of_data = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
    torch.manual_seed(0)
    net = called = Stage(number, options.stages)
    if options.strategy == "ddp":
        called = DistributedDataParallel(net, process_group=mesh["dp"].get_group())
    if options.strategy == "fsdp":
        for block in net.blocks:
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(net, mesh=mesh["dp"])
    stage = PipelineStage(called, number, options.stages, torch.device("cpu"), group=mesh["pp"].get_group())
    schedule = (ScheduleGPipe if options.schedule == "gpipe" else Schedule1F1B)(stage, MICRO, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(of_data)
    for _ in range(3):
        ids = torch.randint(0, VOCABULARY, (2 * MICRO, LENGTH + 1), generator=generator)
        inputs, targets = ids[:, :-1], ids[:, 1:]
        with torch.autocast("cpu", torch.bfloat16, enabled=options.autocast):
            schedule.step(
                *([inputs] if stage.is_first else []), **({"target": targets} if stage.is_last else {})
            )
        if options.max_norm:
            norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in net.parameters()])
            square = (norm.full_tensor() if options.strategy == "fsdp" else norm) ** 2
            dist.all_reduce(square, group=mesh["pp"].get_group())
            torch.nn.utils.clip_grads_with_norm_(net.parameters(), options.max_norm, square.sqrt())
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
