"""A pipeline of DeepSpeed: PipelineModule and its engine, in float32 or bfloat16, without ZeRO or with ZeRO 1.

torchrun --nproc_per_node 2 -m lockstep.record --output runs/deepspeed-pipeline examples/record/deepspeed_pipeline.py
python -m lockstep.judge runs/deepspeed-pipeline
"""

import argparse
import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # leave this out on GPUs

import deepspeed
import torch
from deepspeed.pipe import PipelineModule
from own_module import VOCABULARY, WIDTH, Block
from pipeline import LENGTH, MICRO, loss_of
from torch import nn

STAGES, LAYERS, BATCH = 2, 4, 2


def batches(rank):
    generator = torch.Generator().manual_seed(rank)
    while True:
        ids = torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1), generator=generator)
        yield ids[:, :-1], ids[:, 1:]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--zero_stage", type=int, choices=[0, 1], default=1)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--max_norm", type=float, default=0.0)
    options = parser.parse_args()
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    layers = [
        nn.Embedding(VOCABULARY, WIDTH),
        *(Block() for _ in range(LAYERS)),
        nn.Linear(WIDTH, VOCABULARY),
    ]
    net = PipelineModule(layers, num_stages=STAGES, loss_fn=loss_of, partition_method="uniform")
    settings = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": MICRO,
        "zero_optimization": {"stage": options.zero_stage},
        "gradient_clipping": options.max_norm,
        "bf16": {"enabled": options.bf16},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=settings)
    data = batches(engine.grid.get_data_parallel_rank())
    for _ in range(3):
        engine.train_batch(data_iter=data)


if __name__ == "__main__":
    main()
