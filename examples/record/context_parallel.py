"""A loop of plain PyTorch with context parallelism: each rank has a piece of every sequence, and attends to the keys of all.

    torchrun --nproc_per_node 2 -m lockstep.record --output runs/cp examples/record/context_parallel.py --layout zigzag
    python -m lockstep.judge runs/cp

`position_ids` say where a piece belongs. Labels are shifted before the sequence is cut, and the loss is divided by the tokens of all pieces.
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from trainer import LENGTH, Samples, model
from transformers import AttentionInterface


def places(layout, rank, ranks):
    """The positions of a sequence that a rank has."""
    if layout != "zigzag":
        return torch.arange(LENGTH).chunk(ranks)[rank]
    chunks = torch.arange(LENGTH).chunk(
        2 * ranks
    )  # an early and a late one, so that all ranks have equal work
    return torch.cat([chunks[rank], chunks[-1 - rank]])


class Gather(torch.autograd.Function):
    """(N, ...) of every rank -> (ranks, N, ...). `all_gather` of torch.distributed.nn has a wrong gradient with gloo, if it lies transposed in memory."""

    @staticmethod
    def forward(ctx, own, group):
        ctx.group = group
        parts = [torch.empty(own.shape) for _ in range(group.size())]
        dist.all_gather(parts, own.contiguous(), group)
        return torch.stack(parts)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient[ctx.group.rank()], None


class Exchange(torch.autograd.Function):
    """(ranks, N, ...): part i is sent to rank i, and comes from there."""

    @staticmethod
    def forward(ctx, parts, group):
        ctx.group = group
        received = torch.empty(parts.shape)
        dist.all_to_all_single(received, parts.contiguous(), group=group)
        return received

    @staticmethod
    def backward(ctx, gradient):
        return Exchange.apply(gradient, ctx.group), None


def attend_to_all(layout, group, scaling, query, key, value):
    """Queries of a rank's own positions, keys and values of all."""
    ranks = group.size()
    key, value = (torch.cat(Gather.apply(one, group).unbind(), 2) for one in (key, value))
    keys = torch.cat([places(layout, rank, ranks) for rank in range(ranks)])
    seen = keys <= places(layout, group.rank(), ranks)[:, None]
    return F.scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=scaling, enable_gqa=True)


def exchange(tensor, group, cut, joined):
    """All to all: cuts one dim, joins another."""
    parts = torch.stack(tensor.chunk(group.size(), cut))
    return torch.cat(Exchange.apply(parts, group).unbind(), joined)


def attend_with_some_heads(group, scaling, query, key, value):
    """Ulysses: all positions, a part of the heads."""
    query, key, value = (exchange(one, group, 1, 2) for one in (query, key, value))
    found = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
    return exchange(found, group, 2, 1)


def use(layout, group):
    """In the place of transformers' attention, as DeepSpeed does it."""

    def attend(_module, query, key, value, _mask, *, scaling=None, **_options):
        if layout == "ulysses":
            found = attend_with_some_heads(group, scaling, query, key, value)
        else:
            found = attend_to_all(layout, group, scaling, query, key, value)
        return found.transpose(1, 2).contiguous(), None

    AttentionInterface.register("sdpa", attend)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--layout", choices=("contiguous", "zigzag", "ulysses"), default="contiguous")
    parser.add_argument("--cp", type=int, default=2)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--own_loss", action="store_true")
    parser.add_argument(
        "--experts", action="store_true", help="a mixture, each token routed where its piece is"
    )
    options = parser.parse_args()
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks // options.cp, options.cp), mesh_dim_names=("dp", "cp"))
    use(options.layout, mesh["cp"].get_group())
    own = places(options.layout, mesh["cp"].get_local_rank(), options.cp)
    net = model("experts" if options.experts else "text")
    net = DistributedDataParallel(net, find_unused_parameters=options.experts)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    sampler = DistributedSampler(Samples(), ranks // options.cp, mesh["dp"].get_local_rank())
    for number, batch in enumerate(DataLoader(Samples(), batch_size=2, sampler=sampler), start=1):
        labels = F.pad(batch["labels"][:, 1:], (0, 1), value=-100)[:, own]
        given = {"input_ids": batch["input_ids"][:, own], "position_ids": own.expand(2, -1)}
        tokens = (labels != -100).sum()
        dist.all_reduce(tokens)
        if options.own_loss:
            logits = net(**given).logits
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / tokens
        else:
            loss = net(**given, labels=labels, shift_labels=labels, num_items_in_batch=tokens).loss
        (loss * ranks / options.accumulation).backward()  # DDP averages over all ranks
        if number % options.accumulation == 0:
            optimizer.step()
            optimizer.zero_grad()
        if number == 3 * options.accumulation:
            break


if __name__ == "__main__":
    main()
