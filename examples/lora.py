"""LoRA by peft: adapters are trained, the model under them is frozen (docs/models.md).

python run_verification.py --model examples/lora.py:make_model --strategies ddp,fsdp@tp1xdp2
"""

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM


def make_model() -> torch.nn.Module:
    config = AutoConfig.for_model(
        "qwen2",
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    adapters = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return WithLoss(get_peft_model(AutoModelForCausalLM.from_config(config), adapters))


class WithLoss(torch.nn.Module):
    """Lets transformers' model compute its loss from labels that are shifted already."""

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=ids, labels=labels, shift_labels=labels, use_cache=False).loss
