"""Histories made up for the tests of the comparison: the smallest thing that passes, to be spoilt one way at a time."""

import copy

from lockstep.architectures import BUILT_IN
from lockstep.history import History

CONTRACT = {"optimizer": "AdamW", "max_grad_norm": 1.0, "biased_linear_dtype": ["torch.bfloat16"]}


def history(strategy="ddp", precision="fp32", steps=20, shift=0.0):
    labels = {"ddp": "DDP (TP=1, DP=2)", "deepspeed": "DeepSpeed AutoTP (TP=2, DP=2)", "fsdp": "FSDP+DTensor (TP=2, DP=2)"}
    return History(
        run={
            "label": labels[strategy],
            "num_steps": steps,
            "versions": {"torch": "2"},
            "architecture": BUILT_IN["tiny-qwen2"],
            "config": {"precision": precision, "model_name": "tiny-qwen2", "learning_rate": 1e-3},
        },
        contract=copy.deepcopy(CONTRACT),
        weights={"initial_sha256": "a", "final_sha256": "b", "moved": ["w"]},
        ended="finished",
        steps=[
            {
                "step": n,
                "loss": 7.5 - 0.1 * n + shift,
                "rank_losses": [7.5, 7.5],
                "grad_norm": 1.5,
                "learning_rate": 1e-3,
                "tokens": 2048,
                "seconds": 0.1,
                "batch_hash": f"h{n}",
            }
            for n in range(1, steps + 1)
        ],
    )
