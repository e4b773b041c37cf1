"""A pipeline with two stages on each rank, as in Megatron's interleaved schedule. One optimizer has the weights of both.

torchrun --nproc_per_node 2 -m lockstep.record --output runs/interleaved examples/record/interleaved_pipeline.py
python -m lockstep.judge runs/interleaved
"""

import argparse

import torch
import torch.distributed as dist
from own_module import VOCABULARY
from pipeline import LENGTH, MICRO, Stage, loss_of
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B

STAGES = 4


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--max_norm", type=float, default=0.0)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    first, last = dist.get_rank() == 0, dist.get_rank() == dist.get_world_size() - 1
    nets = {}
    for number in range(dist.get_rank(), STAGES, dist.get_world_size()):
        torch.manual_seed(0)
        nets[number] = Stage(number, STAGES)
    stages = [PipelineStage(net, number, STAGES, torch.device("cpu")) for number, net in nets.items()]
    schedule = ScheduleInterleaved1F1B(stages, MICRO, loss_fn=loss_of)
    parameters = [parameter for net in nets.values() for parameter in net.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        ids = torch.randint(0, VOCABULARY, (2 * MICRO, LENGTH + 1), generator=generator)
        schedule.step(*([ids[:, :-1]] if first else []), **({"target": ids[:, 1:]} if last else {}))
        if options.max_norm:
            square = torch.nn.utils.get_total_norm([parameter.grad for parameter in parameters]) ** 2
            dist.all_reduce(square)
            torch.nn.utils.clip_grads_with_norm_(parameters, options.max_norm, square.sqrt())
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
