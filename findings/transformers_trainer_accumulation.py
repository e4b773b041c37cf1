"""transformers 5.4.0: Trainer divides the loss by the accumulation steps twice.

python findings/transformers_trainer_accumulation.py
"""

import tempfile

import torch
from finding import settle
from transformers import Qwen2Config, Qwen2ForCausalLM, Trainer, TrainerCallback, TrainingArguments


def model() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return Qwen2ForCausalLM(Qwen2Config(vocab_size=64, num_key_value_heads=2, **sizes))


class Keep(TrainerCallback):
    def on_pre_optimizer_step(self, *_, model, **__):
        self.gradient = torch.cat([one.grad.flatten() for one in model.parameters()]).clone()


def gradient(accumulation: int) -> torch.Tensor:
    """Of the first step on four samples."""
    ids = torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(1))
    keep = Keep()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            use_cpu=True,
            max_steps=1,
            report_to="none",
            max_grad_norm=0.0,
            per_device_train_batch_size=4 // accumulation,
            gradient_accumulation_steps=accumulation,
        )
        data = [{"input_ids": one, "labels": one} for one in ids]
        Trainer(model=model(), args=arguments, train_dataset=data, callbacks=[keep]).train()
    return keep.gradient


def check() -> tuple[bool, str]:
    whole = gradient(1)
    ratios = {steps: float(gradient(steps) @ whole / whole.square().sum()) for steps in (2, 4)}
    said = ", ".join(f"accumulation {steps}: {ratio:.4f}" for steps, ratio in ratios.items())
    return any(abs(ratio - 1) > 1e-4 for ratio in ratios.values()), f"times the gradient of one batch: {said}"


if __name__ == "__main__":
    raise SystemExit(settle(check, libraries=("torch", "transformers", "accelerate")))
