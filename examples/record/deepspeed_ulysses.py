"""DeepSpeed's sequence parallelism, Ulysses, as its tutorial for transformers has it: each rank has a piece of every sequence.

    torchrun --nproc_per_node 2 -m lockstep.record --output runs/ulysses examples/record/deepspeed_ulysses.py
    python -m lockstep.judge runs/ulysses

The mean over the tokens of all pieces is taken by an `all_gather` with a gradient, which is that of both ranks' losses. ZeRO 3 averages over
these ranks, so that is right; ZeRO 1 and 2 sum over them, so the gradient is twice as large.
"""

import argparse
import os

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import torch
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF, UlyssesSPDataLoaderAdapter
from deepspeed.utils import groups
from torch.distributed.nn.functional import all_gather
from torch.utils.data import DataLoader, DistributedSampler
from trainer import LENGTH, Samples, model

# Without this, DeepSpeed compiles it, which takes a minute
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


class Placed(Samples):
    def __getitem__(self, index):
        return {**super().__getitem__(index), "position_ids": torch.arange(LENGTH)}


def mean_over_pieces(net, logits, labels, group):
    own = net.loss_function(logits, labels=None, shift_labels=labels, vocab_size=net.config.vocab_size)
    losses = all_gather(own, group=group)
    tokens = all_gather((labels != -100).sum()[None], group=group)
    return sum(loss * number for loss, number in zip(losses, tokens, strict=True)) / sum(tokens)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int, default=3)
    options = parser.parse_args()
    deepspeed.init_distributed("gloo")
    ranks, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    net = model().train()
    mpu = UlyssesSPAttentionHF.register_with_transformers(
        net, core_attn_implementation="sdpa", sequence_parallel_size=ranks, micro_batch_size=2
    )
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.5,
        "sequence_parallel_size": ranks,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": options.stage},
        "zero_force_ds_cpu_optimizer": False,
    }
    engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config, mpu=mpu)
    group = groups._get_sequence_parallel_group()
    loader = DataLoader(Placed(), batch_size=2, sampler=DistributedSampler(Samples(), ranks, rank))
    pieces = UlyssesSPDataLoaderAdapter(loader, rank, group, ranks, "cpu")
    for number, batch in enumerate(pieces, start=1):
        logits = engine(**batch, use_cache=False).logits
        engine.backward(mean_over_pieces(net, logits, batch["shift_labels"].contiguous(), group))
        engine.step()
        if number == 3:
            break


if __name__ == "__main__":
    main()
