"""A tiny model trained by transformers' Trainer on random tokens with labels of unequal lengths.

    torchrun --nproc_per_node 2 -m lockstep.record --output runs/trainer examples/record/trainer.py
    python -m lockstep.judge runs/trainer

Further arguments are those of TrainingArguments, such as --max_grad_norm 0.5 --gradient_accumulation_steps 2.
"""

import tempfile

import torch
from transformers import HfArgumentParser, Qwen2Config, Qwen2ForCausalLM, Trainer, TrainingArguments

VOCABULARY, LENGTH = 512, 32


def model() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=True,
        )
    )


class Samples(torch.utils.data.Dataset):
    """Random token ids; the first ones of each sample, the prompt, have no label."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(0, VOCABULARY, (LENGTH,), generator=generator)
        labels = ids.clone()
        labels[: 4 + index % 13] = -100
        return {"input_ids": ids, "labels": labels}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        (arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(
            [
                "--output_dir",
                folder,
                "--use_cpu",
                "True",
                "--max_steps",
                "3",
                "--report_to",
                "none",
                "--per_device_train_batch_size",
                "2",
                *__import__("sys").argv[1:],
            ]
        )
        Trainer(model=model(), args=arguments, train_dataset=Samples()).train()


if __name__ == "__main__":
    main()
