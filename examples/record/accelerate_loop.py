"""A loop of Accelerate: DDP, FSDP2 or DeepSpeed, with accumulation and clipping.

torchrun --nproc_per_node 2 -m lockstep.record --output runs/accelerate examples/record/accelerate_loop.py --strategy fsdp
python -m lockstep.judge runs/accelerate
"""

import argparse
import os

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import torch
from accelerate import (
    Accelerator,
    DeepSpeedPlugin,
    DistributedType,
    FullyShardedDataParallelPlugin,
    PartialState,
)
from torch.utils.data import DataLoader
from trainer import Samples, model

# Without this, DeepSpeed compiles it, which takes a minute
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def accelerator_for(options):
    # Accelerator(cpu=True) leaves a plugin out without a word, and trains with DDP
    PartialState(cpu=True)
    if options.strategy == "deepspeed":
        plugin = DeepSpeedPlugin(
            zero_stage=options.stage,
            gradient_accumulation_steps=options.accumulation,
            gradient_clipping=options.max_norm,
        )
        plugin.deepspeed_config["zero_allow_untested_optimizer"] = True
        return Accelerator(deepspeed_plugin=plugin)
    if options.strategy == "fsdp":
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["Qwen2DecoderLayer"],
        )
        accelerator = Accelerator(gradient_accumulation_steps=options.accumulation, fsdp_plugin=plugin)
        accelerator.state.distributed_type = DistributedType.FSDP  # which it would be with GPUs
        accelerator.state.fsdp_plugin = plugin
        return accelerator
    return Accelerator(gradient_accumulation_steps=options.accumulation)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", choices=("ddp", "fsdp", "deepspeed"), default="ddp")
    parser.add_argument("--stage", type=int, default=2, help="of ZeRO")
    parser.add_argument("--accumulation", type=int, default=2)
    parser.add_argument("--max_norm", type=float, default=0.5)
    options = parser.parse_args()
    accelerator = accelerator_for(options)
    net = model().train()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    net, optimizer, loader = accelerator.prepare(
        net, optimizer, DataLoader(Samples(), batch_size=2, shuffle=True)
    )
    for number, batch in enumerate(loader, start=1):
        with accelerator.accumulate(net):
            loss = net(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(net.parameters(), options.max_norm)
            optimizer.step()
            optimizer.zero_grad()
        if number == 3 * options.accumulation:
            break


if __name__ == "__main__":
    main()
