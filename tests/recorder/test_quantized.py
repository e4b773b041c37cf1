"""QLoRA: the frozen weights of a base model have 4 bits, and the adapters are judged."""

import pytest

from lockstep import judge, record

SCRIPT = """
import bitsandbytes
import torch
from peft import LoraConfig, get_peft_model
from transformers import Qwen2Config, Qwen2ForCausalLM

def main():
    torch.manual_seed(0)
    net = Qwen2ForCausalLM(Qwen2Config(vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2)).to(torch.{dtype})
    for parent in (net.model.layers[0].self_attn, net.model.layers[0].mlp):
        for name, own in list(parent.named_children()):
            if isinstance(own, torch.nn.Linear):
                new = bitsandbytes.nn.{kind}(own.in_features, own.out_features, own.bias is not None, {options})
                new.load_state_dict(own.state_dict())
                setattr(parent, name, new.to("cpu"))
    net = get_peft_model(net, LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)).train()
    {bug}
    optimizer = {optimizer}.AdamW([one for one in net.parameters() if one.requires_grad])
    for _ in range(2):
        ids = torch.randint(0, 64, (2, 16))
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled={autocast}):
            loss = net(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()

if __name__ == "__main__":
    main()
"""
FOUR = {
    "kind": "Linear4bit",
    "options": "compute_dtype=torch.float32",
    "dtype": "float32",
    "optimizer": "torch.optim",
}
# As Trainer does for an optimizer of bitsandbytes, which then holds the module.
OVERRIDE = "bitsandbytes.optim.GlobalOptimManager.get_instance().register_module_override(net.get_input_embeddings(), 'weight', dict())"
LAYER = "net.base_model.model.model.layers[0].self_attn"


@pytest.mark.parametrize(
    "fields, status, said",
    [
        ({}, 0, "PASS: 2 steps"),
        ({"autocast": True, "options": "compute_dtype=torch.bfloat16"}, 0, "PASS: 2 steps"),
        ({"optimizer": "bitsandbytes.optim", "bug": OVERRIDE}, 0, "PASS: 2 steps"),
        ({"dtype": "bfloat16", "options": "compute_dtype=torch.bfloat16"}, 0, "PASS: 2 steps"),
        (
            {"bug": f"{LAYER}.q_proj.lora_A.default.weight.register_hook(lambda one: 1.02 * one)"},
            1,
            "self_attn.q_proj.lora_A.default.weight: all of it is 1.02 times what it should be",
        ),
        (
            {
                "bug": f"{LAYER}.o_proj.register_forward_hook(lambda module, given, out: out.bfloat16().float())"
            },
            1,
            "FAIL: step 1: forward/base_model.model.model.layers.0.self_attn.o_proj (micro batch 0, rank 0) is the first",
        ),
    ],
)
def test_adapters_of_quantized_layers_are_judged(tmp_path, capsys, fields, status, said):
    script, output = tmp_path / "train.py", tmp_path / "out"
    script.write_text(SCRIPT.format(**{**FOUR, "bug": "", "autocast": False, **fields}))
    assert record.main(["--output", str(output), str(script)]) == 0
    assert judge.main([str(output)]) == status
    assert said in (last := capsys.readouterr().out.splitlines()[-1]) and "not judged" not in last


def test_a_layer_that_rounds_its_inputs_is_refused(tmp_path, capsys):
    script = tmp_path / "train.py"
    eight = {"kind": "Linear8bitLt", "options": "has_fp16_weights=False", "dtype": "float32"}
    script.write_text(SCRIPT.format(**eight, bug="", autocast=False, optimizer="torch.optim"))
    assert record.main(["--output", str(tmp_path / "out"), str(script)]) == 2
    assert "Linear8bitLt of bitsandbytes computes with 8 bits" in capsys.readouterr().err
