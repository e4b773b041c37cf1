"""A loop of DeepSpeed's engine: ZeRO 0 to 3, with the optimizer offloaded, with AutoTP, and in fp16.

torchrun --nproc_per_node 2 -m lockstep.record --output runs/deepspeed examples/record/deepspeed_loop.py --stage 3
python -m lockstep.judge runs/deepspeed
"""

import argparse
import os

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import torch
from torch.utils.data import DataLoader, DistributedSampler
from trainer import Samples, model

# Without this, DeepSpeed compiles it, which takes a minute
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int, default=1)
    parser.add_argument("--offload", action="store_true")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--accumulation", type=int, default=2)
    parser.add_argument("--max_norm", type=float, default=0.5)
    parser.add_argument("--fp16", action="store_true")
    options = parser.parse_args()
    deepspeed.init_distributed("gloo")
    zero = {"stage": options.stage}
    if options.offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": options.accumulation,
        "gradient_clipping": options.max_norm,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
        "tensor_parallel": {"autotp_size": options.tp},
    }
    if options.fp16:
        config["fp16"] = {"enabled": True, "loss_scale": 128}
    net = model().train()
    engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)
    shares = torch.distributed.get_world_size() // options.tp
    sampler = DistributedSampler(Samples(), shares, torch.distributed.get_rank() // options.tp)
    for number, batch in enumerate(DataLoader(Samples(), batch_size=2, sampler=sampler), start=1):
        loss = engine(**batch, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        if number == 3 * options.accumulation:
            break


if __name__ == "__main__":
    main()
