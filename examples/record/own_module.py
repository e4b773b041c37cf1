"""A module, a loss and an optimizer setup of one's own, as torchtitan and nanochat have them: no labels among the model's inputs, a sum over tokens
divided by the number of tokens of the global batch, a group of parameters for each learning rate, gradients averaged by hand or by FSDP2.

    torchrun --nproc_per_node 2 -m lockstep.record --output runs/own examples/record/own_module.py
    python -m lockstep.judge runs/own
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

VOCABULARY, WIDTH, HEADS, LENGTH = 256, 64, 4, 32


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        batch, length, _ = x.shape
        parts = self.qkv(F.rms_norm(x, (WIDTH,))).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.relu(self.up(F.rms_norm(x, (WIDTH,)))).square())


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return 15 * torch.tanh(self.head(F.rms_norm(x, (WIDTH,))) / 15)


def batches(rank, ranks):
    for number in range(rank, 1000, ranks):
        generator = torch.Generator().manual_seed(number)
        ids = torch.randint(0, VOCABULARY, (2, LENGTH + 1), generator=generator)
        targets = ids[:, 1:].clone()
        targets[:, : number % 11] = -100
        yield ids[:, :-1], targets


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fsdp", action="store_true")
    parser.add_argument("--accumulation", type=int, default=2)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    net = Transformer()
    if options.fsdp:
        for block in net.blocks:
            fully_shard(block)
        fully_shard(net)
    groups = [
        {"params": [*net.embedding.parameters(), *net.head.parameters()], "lr": 3e-3},
        {"params": list(net.blocks.parameters()), "lr": 1e-3, "weight_decay": 0.1},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    source = batches(rank, ranks)
    for _ in range(3):
        micro = [next(source) for _ in range(options.accumulation)]
        tokens = torch.tensor(sum(int((targets != -100).sum()) for _, targets in micro))
        dist.all_reduce(tokens)
        for ids, targets in micro:
            loss = F.cross_entropy(
                net(ids).flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum"
            )
            (loss / tokens * ranks).backward()  # the gradients are averaged over the ranks
        for parameter in net.parameters():
            if not isinstance(parameter, DTensor):
                dist.all_reduce(parameter.grad)
                parameter.grad /= ranks
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
