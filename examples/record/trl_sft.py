"""TRL's SFTTrainer on prompts and completions: padded, packed, or without padding; the loss is on the completions.

    torchrun --nproc_per_node 2 -m lockstep.record --output runs/sft examples/record/trl_sft.py --packing True
    python -m lockstep.judge runs/sft

Further arguments are those of SFTConfig.
"""

import sys
import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from trainer import VOCABULARY, model
from transformers import HfArgumentParser, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer


def samples() -> Dataset:
    """Token ids of unequal lengths, with a mask of the completion: what SFTTrainer makes of texts."""
    rows = []
    for index in range(64):
        generator = torch.Generator().manual_seed(index)
        length = 8 + index * 7 % 24
        ids = torch.randint(1, VOCABULARY, (length,), generator=generator).tolist()
        rows.append(
            {"input_ids": ids, "completion_mask": [int(place > index % 6) for place in range(length)]}
        )
    return Dataset.from_list(rows)


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(
        models.WordLevel({f"w{number}": number for number in range(VOCABULARY)}, unk_token="w0")
    )
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1", unk_token="w0")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        given = [
            "--output_dir",
            folder,
            "--use_cpu",
            "True",
            "--max_steps",
            "3",
            "--report_to",
            "none",
            "--bf16",
            "False",
        ]
        given += [
            "--gradient_checkpointing",
            "False",
            "--per_device_train_batch_size",
            "2",
            "--save_strategy",
            "no",
            "--completion_only_loss",
            "True",
        ]
        (arguments,) = HfArgumentParser(SFTConfig).parse_args_into_dataclasses([*given, *sys.argv[1:]])
        arguments.max_length = 32 if arguments.packing else None
        trainer = SFTTrainer(
            model=model(), args=arguments, train_dataset=samples(), processing_class=tokenizer()
        )
        trainer.train()


if __name__ == "__main__":
    main()
