"""transformers: Trainer multiplies the gradient of a sequence classifier by the number of micro batches and of ranks.

python findings/transformers_sequence_classifier.py
"""

import os
import tempfile

import torch
import torch.distributed as dist
from finding import settle
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import Qwen2Config, Qwen2ForSequenceClassification, Trainer, TrainingArguments

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
MICRO = 2


class FirstGradient(Exception):
    pass


def stop(*_: object) -> None:
    raise FirstGradient


def gradient_of_trainer(model: torch.nn.Module, samples: list[dict]) -> torch.Tensor:
    """The gradient of the head as the first step has it, before clipping."""
    arguments = TrainingArguments(
        tempfile.mkdtemp(),
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        per_device_train_batch_size=1,
        gradient_accumulation_steps=MICRO,
        max_grad_norm=0.0,
        max_steps=1,
    )
    handle = register_optimizer_step_pre_hook(stop)
    try:
        Trainer(model=model, args=arguments, train_dataset=samples).train()
    except FirstGradient:
        return model.score.weight.grad
    finally:
        handle.remove()
    raise AssertionError("the optimizer took no step")


def check() -> tuple[bool, str]:
    torch.manual_seed(0)
    config = Qwen2Config(vocab_size=256, num_labels=3, pad_token_id=0, **SIZES, **HEADS)
    model = Qwen2ForSequenceClassification(config)
    ranks = dist.get_world_size()
    os.environ["LOCAL_WORLD_SIZE"] = str(ranks)  # or Accelerate takes them for several machines
    samples = [
        {"input_ids": torch.arange(1, 17) + 16 * place, "labels": torch.tensor(place % 3)}
        for place in range(MICRO * ranks)
    ]
    batch = {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}
    model(**batch).loss.backward()
    right = model.score.weight.grad.clone()
    model.zero_grad()
    found = gradient_of_trainer(model, samples)
    times = float((found * right).sum() / right.square().sum())
    seen = f"with {MICRO} micro batches and {ranks} ranks, the gradient is {times:.4f} times that of one batch of the same samples"
    return abs(times - MICRO * ranks) < 1e-3, seen


if __name__ == "__main__":
    raise SystemExit(settle(check, libraries=("transformers",), ranks=2))
