"""transformers: Trainer counts the first label of each row, which no position is trained to give, for models whose loss has no name.

python findings/transformers_trainer_first_labels.py
"""

import tempfile

import torch
from finding import settle
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

ROWS, LENGTH = 4, 8
MODELS = {
    "GPT2LMHeadModel": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2)),
    "Qwen2ForCausalLM": lambda: Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
        )
    ),
}


class Keep(TrainerCallback):
    def on_pre_optimizer_step(self, *_, model, **__):
        self.gradient = torch.cat([one.grad.flatten() for one in model.parameters()]).clone()


def times_too_large(model: torch.nn.Module) -> float:
    """The gradient of Trainer's first step, divided by that of one batch of the same samples; without dropout."""
    model.eval()
    ids = torch.randint(0, 64, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    model(input_ids=ids, labels=ids).loss.backward()
    right = torch.cat([one.grad.flatten() for one in model.parameters()]).clone()
    model.zero_grad()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0  # Trainer calls model.train()
    keep = Keep()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            per_device_train_batch_size=ROWS,
            max_grad_norm=0.0,
            max_steps=1,
        )
        samples = [{"input_ids": row, "labels": row} for row in ids]
        Trainer(model=model, args=arguments, train_dataset=samples, callbacks=[keep]).train()
    return float((keep.gradient * right).sum() / right.square().sum())


def check() -> tuple[bool, str]:
    torch.manual_seed(0)
    found = {name: times_too_large(make()) for name, make in MODELS.items()}
    said = ", ".join(f"{name} {times:.4f}" for name, times in found.items())
    expected = (LENGTH - 1) / LENGTH
    holds = abs(found["GPT2LMHeadModel"] - expected) < 1e-3 and abs(found["Qwen2ForCausalLM"] - 1) < 1e-3
    return holds, f"the gradient of rows of {LENGTH} tokens is so many times that of one batch: {said}"


if __name__ == "__main__":
    raise SystemExit(settle(check, libraries=("transformers",)))
