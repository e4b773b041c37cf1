"""TRL's DPOTrainer: pairs of a chosen and a rejected completion, in one call of the model, and a frozen reference model.

    torchrun --nproc_per_node 2 -m lockstep.record --output runs/dpo examples/record/trl_dpo.py
    python -m lockstep.judge runs/dpo

Further arguments are those of DPOConfig.
"""

import sys
import tempfile

import torch
from datasets import Dataset
from trainer import VOCABULARY, model
from transformers import HfArgumentParser
from trl import DPOConfig, DPOTrainer
from trl_sft import tokenizer


def pairs() -> Dataset:
    """Prompts, each with two completions, all of unequal lengths."""
    rows = []
    for index in range(64):
        generator = torch.Generator().manual_seed(index)
        lengths = {"prompt": 3 + index % 5, "chosen": 4 + index % 7, "rejected": 4 + index * 3 % 11}
        words = {
            name: torch.randint(2, VOCABULARY, (length,), generator=generator).tolist()
            for name, length in lengths.items()
        }
        rows.append({name: " ".join(f"w{word}" for word in own) for name, own in words.items()})
    return Dataset.from_list(rows)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        given = ["--output_dir", folder, "--use_cpu", "True", "--max_steps", "3", "--report_to", "none"]
        given += ["--bf16", "False", "--gradient_checkpointing", "False", "--save_strategy", "no"]
        given += ["--per_device_train_batch_size", "2", *sys.argv[1:]]
        (arguments,) = HfArgumentParser(DPOConfig).parse_args_into_dataclasses(given)
        trainer = DPOTrainer(
            model=model(),
            ref_model=model(),
            args=arguments,
            train_dataset=pairs(),
            processing_class=tokenizer(),
        )
        trainer.train()


if __name__ == "__main__":
    main()
