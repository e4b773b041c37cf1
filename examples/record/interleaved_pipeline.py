"""A pipeline with two stages on each rank, by any of torch's schedules for it. One optimizer has the weights of both.

torchrun --nproc_per_node 2 -m lockstep.record --output runs/interleaved examples/record/interleaved_pipeline.py
python -m lockstep.judge runs/interleaved
"""

import argparse

import torch
import torch.distributed as dist
from own_module import VOCABULARY
from pipeline import LENGTH, MICRO, Stage, loss_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

STAGES = 4
# Of these, each rank has one stage of the first half and one of the second half, and the first rank has both ends.
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--schedule", default="Interleaved1F1B")
    parser.add_argument("--fsdp", action="store_true", help="shard each stage over the ranks that have it")
    parser.add_argument("--max_norm", type=float, default=0.0)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    mesh = init_device_mesh(
        "cpu", (STAGES // 2, 2 * dist.get_world_size() // STAGES), mesh_dim_names=("pp", "dp")
    )
    rank, ranks = mesh["pp"].get_local_rank(), STAGES // 2
    numbers = (rank, STAGES - 1 - rank if options.schedule in V_SHAPED else rank + ranks)
    nets = {}
    for number in numbers:
        torch.manual_seed(0)
        nets[number] = Stage(number, STAGES)
        if options.fsdp:
            fully_shard(nets[number], mesh=mesh["dp"])
    group = mesh["pp"].get_group()
    stages = [
        PipelineStage(net, number, STAGES, torch.device("cpu"), group=group) for number, net in nets.items()
    ]
    schedule = get_schedule_class(options.schedule)(stages, MICRO, loss_fn=loss_of)
    parameters = [parameter for net in nets.values() for parameter in net.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    generator = torch.Generator().manual_seed(mesh["dp"].get_local_rank())
    for _ in range(3):
        ids = torch.randint(0, VOCABULARY, (2 * MICRO, LENGTH + 1), generator=generator)
        schedule.step(
            *([ids[:, :-1]] if 0 in nets else []), **({"target": ids[:, 1:]} if STAGES - 1 in nets else {})
        )
        if options.max_norm:
            norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in parameters])
            square = (norm.full_tensor() if options.fsdp else norm) ** 2
            dist.all_reduce(square, group=group)
            torch.nn.utils.clip_grads_with_norm_(parameters, options.max_norm, square.sqrt())
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
