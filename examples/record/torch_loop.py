"""A loop of plain PyTorch: DDP, FSDP2, HSDP, or tensor parallelism by DTensor, alone or below FSDP2.

torchrun --nproc_per_node 2 -m lockstep.record --output runs/torch examples/record/torch_loop.py --strategy fsdp --max_norm 0.5
python -m lockstep.judge runs/torch
"""

import argparse
from collections import defaultdict

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from trainer import Samples, model

PLAN = {
    **{f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
    "self_attn.o_proj": RowwiseParallel(),
    "mlp.gate_proj": ColwiseParallel(),
    "mlp.up_proj": ColwiseParallel(),
    "mlp.down_proj": RowwiseParallel(),
}


def wrap(net, strategy, tp):
    """(the wrapped model, this rank's place among the data-parallel ranks, their number)"""
    replicas = 2 if strategy == "hsdp" else 1
    shards = dist.get_world_size() // tp // replicas
    mesh = init_device_mesh("cpu", (replicas, shards, tp), mesh_dim_names=("replica", "shard", "tp"))
    if tp > 1:
        for layer in net.model.layers:
            parallelize_module(layer, mesh["tp"], PLAN)
    if strategy == "ddp":
        net = DistributedDataParallel(net)
    elif strategy in ("fsdp", "hsdp"):
        inside = mesh["replica", "shard"] if strategy == "hsdp" else mesh["shard"]
        for layer in net.model.layers:
            fully_shard(layer, mesh=inside)
        fully_shard(net, mesh=inside)
    return net, dist.get_rank() // tp, replicas * shards


def clip(net, max_norm):
    """As torch.nn.utils.clip_grad_norm_, which refuses parameters of different meshes."""
    groups = defaultdict(list)
    for parameter in net.parameters():
        groups[getattr(parameter, "device_mesh", None)].append(parameter)
    norms = [torch.nn.utils.get_total_norm([one.grad for one in group]) for group in groups.values()]
    whole = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    for group in groups.values():
        torch.nn.utils.clip_grads_with_norm_(group, max_norm, torch.stack(whole).norm())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", choices=("ddp", "fsdp", "hsdp", "tp"), default="ddp")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--max_norm", type=float)
    parser.add_argument("--scaler", action="store_true")
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    net, place, shares = wrap(model(), options.strategy, options.tp)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", enabled=options.scaler)
    called = torch.compile(net, backend="aot_eager") if options.compile else net
    sampler = DistributedSampler(Samples(), shares, place)
    for number, batch in enumerate(DataLoader(Samples(), batch_size=2, sampler=sampler), start=1):
        loss = called(**batch, use_cache=False).loss
        scaler.scale(loss / options.accumulation).backward()
        if number % options.accumulation == 0:
            if options.max_norm:
                scaler.unscale_(optimizer)
                clip(net, options.max_norm)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        if number == 3 * options.accumulation:
            break


if __name__ == "__main__":
    main()
