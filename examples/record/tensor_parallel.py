"""Tensor parallelism by the model's own code, as in Megatron: column- and row-parallel layers, with one all-reduce each way.

python -m lockstep.record --output runs/one examples/record/tensor_parallel.py
torchrun --nproc_per_node 4 -m lockstep.record --output runs/four examples/record/tensor_parallel.py --tp 2
python -m lockstep.judge runs/four --against runs/one
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch.nn import functional as F

HIDDEN, HEADS, VOCABULARY, BATCH, LENGTH = 16, 4, 37, 4, 12


class Groups:
    """Of the ranks that have parts of one model, and of those that have the same part for other samples."""

    def __init__(self, tp):
        self.tp, self.dp = tp, dist.get_world_size() // tp
        self.tp_rank, self.dp_rank = dist.get_rank() % tp, dist.get_rank() // tp
        ranks = torch.arange(dist.get_world_size()).view(self.dp, tp)
        self.of_model = [dist.new_group(row.tolist()) for row in ranks][self.dp_rank]
        self.of_data = [dist.new_group(row.tolist()) for row in ranks.T][self.tp_rank]


def set_up(tp):
    global groups
    groups = Groups(tp)


def reduced(x):
    """The sum over the ranks that have parts of one model; of one process, what it is."""
    x = x.clone()
    dist.all_reduce(x, group=groups.of_model)
    return x


class Copy(torch.autograd.Function):
    """What column-parallel layers are given: as it is, and the gradients of all parts summed."""

    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, gradient):
        return reduced(gradient)


class Reduce(torch.autograd.Function):
    """What row-parallel layers return: the sum of all parts."""

    @staticmethod
    def forward(ctx, x):
        return reduced(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Column(torch.nn.Linear):
    """Matrices on each other, such as those of q, k and v, of each of which a rank has some rows."""

    def __init__(self, inputs, outputs, matrices=1):
        super().__init__(inputs, outputs)
        for name in ("weight", "bias"):
            parts = [one.chunk(groups.tp)[groups.tp_rank] for one in getattr(self, name).data.chunk(matrices)]
            setattr(self, name, torch.nn.Parameter(torch.cat(parts)))

    def forward(self, x):
        return super().forward(Copy.apply(x))


class Row(torch.nn.Linear):
    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        self.weight = torch.nn.Parameter(self.weight.data.chunk(groups.tp, 1)[groups.tp_rank].clone())

    def forward(self, x):
        return Reduce.apply(F.linear(x, self.weight)) + self.bias


class Embedding(torch.nn.Embedding):
    """Each rank has some rows, and the last one padding below its own."""

    def __init__(self, number, hidden):
        super().__init__(number, hidden)
        rows = -(-number // groups.tp)
        self.first = rows * groups.tp_rank
        weight = F.pad(self.weight.data, (0, 0, 0, rows * groups.tp - number))
        self.weight = torch.nn.Parameter(weight[self.first : self.first + rows].clone())

    def forward(self, ids):
        inside = (ids >= self.first) & (ids < self.first + len(self.weight))
        found = F.embedding((ids - self.first).where(inside, 0), self.weight)
        return Reduce.apply(found * inside[..., None])


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = torch.nn.LayerNorm(HIDDEN), torch.nn.LayerNorm(HIDDEN)
        self.qkv, self.out = Column(HIDDEN, 3 * HIDDEN, 3), Row(HIDDEN, HIDDEN)
        self.up, self.down = Column(HIDDEN, 4 * HIDDEN), Row(4 * HIDDEN, HIDDEN)

    def forward(self, x):
        parts = self.qkv(self.norm1(x)).chunk(3, -1)
        q, k, v = (one.unflatten(-1, (HEADS // groups.tp, -1)).transpose(1, 2) for one in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = Embedding(VOCABULARY, HIDDEN)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = torch.nn.LayerNorm(HIDDEN), torch.nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, ids, labels):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def norm_of(model):
    """The norm of the whole gradient, of which each rank has a part."""
    square = torch.zeros(())
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            own = parameter.grad.square().sum()
            in_parts = isinstance(module, (Column, Embedding)) or (
                isinstance(module, Row) and name == "weight"
            )
            square += reduced(own) if in_parts else own
    return square.sqrt()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--tp", type=int, default=1)
    options = parser.parse_args()
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT="29510")
    dist.init_process_group("gloo")
    set_up(options.tp)
    torch.manual_seed(0)  # the same whole weights on each rank, of which it keeps its part
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(1)
    for _ in range(3):
        ids = torch.randint(VOCABULARY, (BATCH, LENGTH + 1)).chunk(groups.dp)[groups.dp_rank]
        optimizer.zero_grad()
        model(ids[:, :-1], ids[:, 1:]).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=groups.of_data)
            parameter.grad /= groups.dp
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), 0.5, norm_of(model))
        optimizer.step()


if __name__ == "__main__":
    main()
