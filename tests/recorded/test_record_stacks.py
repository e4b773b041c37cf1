"""Every stack that docs/record.md names, by an example under torchrun: it is a PASS, and with one line changed a FAIL that says what is wrong."""

import json
from pathlib import Path

import pytest
import torch
from stacks import EXAMPLES, changed, require_recorded, row, run_all

from lockstep import judge
from lockstep.recorder.recording import Recording

ZERO = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.5,
    "zero_allow_untested_optimizer": True,
}
CLIPPED = "--gradient_accumulation_steps 2 --max_grad_norm 0.5"
FSDP = """--fsdp full_shard --fsdp_config '{"transformer_layer_cls_to_wrap": ["Qwen2DecoderLayer"]}'"""
TOKENS = "that of the mean over all tokens of the global batch"
RANKS = "that of the mean of the ranks' token means"
MICRO = "that of the mean of the micro batches' means"
LOGITS = "that of what follows from the gradients at the logits"
# The strategies of this repository are recorded as anybody's.
BUILT_IN = {
    "ddp": "ddp --dp_size 2 --labels completion",
    "fsdp": "fsdp --tp_size 2 --sequence_parallel --gradient_accumulation_steps 2",
    "deepspeed": "deepspeed --tp_size 1 --dp_size 2 --zero_stage 3",
    "autotp in bf16": "deepspeed --tp_size 2 --precision bf16",
}
# They leave by os._exit, as soon as the last recorded step is made.
SHORT = "--device cpu --debug_steps 2 --loss_output_dir FOLDER --storage_path FOLDER"
# Name -> (ranks, script, arguments, what the gradient is)
RIGHT = {
    "torch ddp": (2, "torch_loop.py", "--accumulation 2 --max_norm 0.5", f"{MICRO}, clipped"),
    "torch ddp scaled": (2, "torch_loop.py", "--scaler --max_norm 0.5", f"{RANKS}, clipped"),
    "torch ddp compiled": (2, "torch_loop.py", "--compile", RANKS),
    "torch fsdp": (
        2,
        "torch_loop.py",
        "--strategy fsdp --accumulation 2 --scaler --max_norm 0.5",
        f"{MICRO}, clipped",
    ),
    "torch tp": (
        2,
        "torch_loop.py",
        "--strategy tp --tp 2 --accumulation 2 --max_norm 0.5",
        f"{MICRO}, clipped",
    ),
    "torch hsdp": (4, "torch_loop.py", "--strategy hsdp --max_norm 0.5", f"{RANKS}, clipped"),
    "torch fsdp tp": (4, "torch_loop.py", "--strategy fsdp --tp 2 --max_norm 0.5", f"{RANKS}, clipped"),
    "trainer ddp": (2, "trainer.py", CLIPPED, f"{TOKENS}, clipped"),
    "trainer adafactor": (2, "trainer.py", f"{CLIPPED} --optim adafactor", f"{TOKENS}, clipped"),
    "trainer fsdp": (2, "trainer.py", f"{CLIPPED} {FSDP}", f"{TOKENS}, clipped"),
    **{
        f"trainer zero {stage}": (
            2,
            "trainer.py",
            f"{CLIPPED} --deepspeed '{json.dumps({**ZERO, 'zero_optimization': {'stage': stage}})}'",
            f"{TOKENS}, clipped",
        )
        for stage in (1, 2, 3)
    },
    "trainer smoothed": (
        2,
        "trainer.py",
        "--gradient_accumulation_steps 2 --label_smoothing_factor 0.1",
        TOKENS,
    ),
    "trainer ranks": (
        2,
        "trainer.py",
        "--gradient_accumulation_steps 2 --average_tokens_across_devices False",
        RANKS,
    ),
    "trainer own loss": (2, "trainer.py", "--gradient_accumulation_steps 2 --own_loss", TOKENS),
    "trainer classes": (2, "trainer.py", "--kind classes --average_tokens_across_devices False", TOKENS),
    "trainer compute_loss": (
        2,
        "trainer.py",
        "--gradient_accumulation_steps 2 --own_compute_loss",
        TOKENS,
    ),
    "trainer saved": (
        2,
        "trainer.py",
        "--output_dir FOLDER --save_strategy steps --save_steps 2 --max_steps 2",
        TOKENS,
    ),
    "trainer resumed": (
        2,
        "trainer.py",
        "--resume_from_checkpoint FOLDER/checkpoint-2 --max_steps 5",
        TOKENS,
    ),
    "trainer resumed anew": (
        2,
        "trainer.py",
        "--resume_from_checkpoint FOLDER/checkpoint-2 --max_steps 5 --ignore_data_skip True",
        TOKENS,
    ),
    "trainer tp": (2, "trainer.py", f"--tp 2 {CLIPPED}", f"{TOKENS}, clipped"),
    "trainer ep": (2, "trainer.py", f"--kind experts --ep 2 {CLIPPED}", f"{TOKENS}, clipped"),
    "trainer fsdp tp": (4, "trainer.py", f"--tp 2 {CLIPPED}", f"{TOKENS}, clipped"),
    "trainer fsdp tp ep": (4, "trainer.py", "--kind experts --tp 2 --ep 4", TOKENS),
    "trainer lora": (2, "trainer.py", "--lora", TOKENS),
    "trl padded": (2, "trl_sft.py", "--gradient_accumulation_steps 2", TOKENS),
    "trl packed": (2, "trl_sft.py", "--packing True", TOKENS),
    "trl without padding": (2, "trl_sft.py", "--padding_free True", TOKENS),
    "accelerate ddp": (2, "accelerate_loop.py", "", f"{MICRO}, clipped"),
    "accelerate fsdp": (2, "accelerate_loop.py", "--strategy fsdp", f"{MICRO}, clipped"),
    "accelerate zero 2": (2, "accelerate_loop.py", "--strategy deepspeed", f"{MICRO}, clipped"),
    "accelerate zero 3": (2, "accelerate_loop.py", "--strategy deepspeed --stage 3", f"{MICRO}, clipped"),
    "fabric ddp": (2, "lightning_fabric.py", "", f"{MICRO}, clipped"),
    "fabric fsdp": (2, "lightning_fabric.py", "--strategy fsdp", f"{MICRO}, clipped"),
    "lightning ddp": (2, "lightning_trainer.py", "", f"{MICRO}, clipped"),
    "lightning fsdp": (2, "lightning_trainer.py", "--strategy fsdp", MICRO),
    "deepspeed zero 0": (2, "deepspeed_loop.py", "--stage 0", MICRO),
    "deepspeed zero 1": (2, "deepspeed_loop.py", "--stage 1", f"{MICRO}, clipped"),
    "deepspeed zero 2": (2, "deepspeed_loop.py", "--stage 2", f"{MICRO}, clipped"),
    "deepspeed zero 3": (2, "deepspeed_loop.py", "--stage 3", f"{MICRO}, clipped"),
    "deepspeed fp16 zero 1": (2, "deepspeed_loop.py", "--stage 1 --fp16", f"{MICRO}, clipped"),
    "deepspeed fp16 zero 3": (2, "deepspeed_loop.py", "--stage 3 --fp16", f"{MICRO}, clipped"),
    "deepspeed zero 3 offloaded": (2, "deepspeed_loop.py", "--stage 3 --offload", f"{MICRO}, clipped"),
    "deepspeed autotp": (2, "deepspeed_loop.py", "--stage 1 --tp 2", f"{MICRO}, clipped"),
    "deepspeed autotp zero 2": (4, "deepspeed_loop.py", "--stage 2 --tp 2", f"{MICRO}, clipped"),
    "own ddp": (2, "own_module.py", "", TOKENS),
    "own fsdp": (2, "own_module.py", "--fsdp", TOKENS),
    "trl dpo": (2, "trl_dpo.py", "--gradient_accumulation_steps 2", f"{LOGITS}, averaged over the ranks"),
    "deepspeed ulysses": (2, "deepspeed_ulysses.py", "", f"{TOKENS}, clipped"),
    **{
        f"built in {name}": (
            2,
            f"../../train_{told.split()[0]}.py",
            f"{told.partition(' ')[2]} {SHORT}",
            f"{TOKENS}, clipped",
        )
        for name, told in BUILT_IN.items()
    },
    "cp contiguous": (2, "context_parallel.py", "", TOKENS),
    "cp zigzag": (2, "context_parallel.py", "--layout zigzag --accumulation 2", MICRO),
    "cp ulysses": (2, "context_parallel.py", "--layout ulysses", TOKENS),
    "cp experts": (2, "context_parallel.py", "--layout zigzag --experts", TOKENS),
    "cp dp": (4, "context_parallel.py", "--layout zigzag --own_loss", TOKENS),
}
CUT = 'F.pad(batch["labels"][:, 1:], (0, 1), value=-100)[:, own]'
LEAST = "if dist.get_rank(): torch.topk = lambda scores, k, dim: [one.flip(dim).narrow(dim, 0, k) for one in scores.sort(dim, True)]"
SHIFTED_LATE = (
    "labels are shifted after samples were cut, so the last position of a piece is trained to give no token"
)
PIECES = "the gradient is that of the mean of the means of the pieces that samples are cut into"
IDS, OTHER = 'batch["input_ids"][:, own]', "places(options.layout, 1 - mesh['cp'].get_local_rank(), 2)"
AGAIN = "ranks 0, 1 have pieces of the same samples, and each begins at position 0"
# Name -> (script, arguments, {text of the script: what stands there instead}, what is wrong)
WRONG = {
    "torch not divided": (
        "torch_loop.py",
        "--accumulation 2",
        {"loss / options.accumulation": "loss"},
        f"the gradient is 2 times {MICRO}, which is the world size or the number of data-parallel ranks or the micro batches of a rank; "
        "it is there when the backward pass begins",
    ),
    "torch tp one shard": (
        "torch_loop.py",
        "--strategy tp --tp 2",
        {
            'parallelize_module(layer, mesh["tp"], PLAN)': 'parallelize_module(layer, mesh["tp"], PLAN); '
            "layer.self_attn.q_proj.register_forward_hook(lambda _, __, out: (1 + 0.01 * torch.distributed.get_rank()) * out)"
        },
        "forward/model.layers.0.self_attn.q_proj (micro batch 0, ranks 0, 1) is the first of",
    ),
    "torch clipped while scaled": (
        "torch_loop.py",
        "--scaler --max_norm 0.5",
        {"scaler.unscale_(optimizer)": "pass"},
        "the gradient was clipped by a norm of 9",
    ),
    # No line is changed: this is transformers' own (docs/findings.md).
    "trainer classes accumulated": (
        "trainer.py",
        "--kind classes --gradient_accumulation_steps 2",
        {},
        "the gradient is 4 times that of the mean of the micro batches' losses",
    ),
    "trainer stale optimizer": (
        "trainer.py",
        "--lora",
        {
            "        if options.lora:": "        stale = torch.optim.AdamW(net.parameters())\n        if options.lora:",
            "args=arguments,": "args=arguments, optimizers=(stale, None),",
        },
        "no optimizer holds base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight and",
    ),
    "trl not divided": (
        "trl_sft.py",
        "--gradient_accumulation_steps 2",
        {
            "trainer.train()": "trainer.model_accepts_loss_kwargs, trainer.loss_is_scaled_for_ga = False, True; trainer.train()"
        },
        f"the gradient is 2 times {MICRO}",
    ),
    "accelerate divided twice": (
        "accelerate_loop.py",
        "--strategy fsdp",
        {"backward(loss)": "backward(loss / options.accumulation)"},
        f"the gradient is 0.5 times {MICRO}",
    ),
    "fabric not divided": (
        "lightning_fabric.py",
        "",
        {" / options.accumulation": ""},
        f"the gradient is 2 times {MICRO}",
    ),
    "lightning same samples": (
        "lightning_trainer.py",
        "--strategy fsdp",
        {"data_parallel_size=2, tensor_parallel_size=1": ""},
        "ranks 0, 1 were called with the same micro batch 0",
    ),
    "deepspeed divided twice": (
        "deepspeed_loop.py",
        "--stage 2",
        {"backward(loss)": "backward(loss / options.accumulation)"},
        f"the gradient is 0.5 times {MICRO}",
    ),
    "autotp same samples": (
        "deepspeed_loop.py",
        "--stage 1 --tp 2",
        {"torch.distributed.get_rank() // options.tp": "0"},
        "ranks 0, 1, 2, 3 were called with the same micro batch 0, though ranks 0 and 2 hold the same weights",
    ),
    "own not averaged": (
        "own_module.py",
        "",
        {"parameter.grad /= ranks": "pass"},
        f"the gradient is 2 times {TOKENS}, which is the world size",
    ),
    "trl dpo twice": (
        "trl_dpo.py",
        "",
        {
            "trainer.train()": "trainer.model.lm_head.weight.register_hook(lambda one: 2 * one); trainer.train()"
        },
        "1 of 26 gradients is too far from the reference, model.embed_tokens.weight",
    ),
    # No line is changed: these are DeepSpeed's own (docs/findings.md).
    "deepspeed fp16 zero 0": (
        "deepspeed_loop.py",
        "--stage 0 --fp16",
        {},
        f"times {MICRO}",
    ),
    "deepspeed ulysses zero 1": (
        "deepspeed_ulysses.py",
        "--stage 1",
        {},
        f"the gradient is 2 times {TOKENS}, which is the world size or the ranks that see the same samples",
    ),
    "cp means": (
        "context_parallel.py",
        "--layout zigzag",
        {", num_items_in_batch=tokens).loss": ").loss / ranks"},
        PIECES,
    ),
    "cp means of its own": (
        "context_parallel.py",
        "--own_loss",
        {'reduction="sum") / tokens': ") / ranks"},
        PIECES,
    ),
    "cp shifted late": (
        "context_parallel.py",
        "--layout zigzag",
        {CUT: 'batch["labels"][:, own]', ", shift_labels=labels": ""},
        SHIFTED_LATE,
    ),
    "cp shifted late by itself": (
        "context_parallel.py",
        "--own_loss",
        {CUT: 'F.pad(batch["labels"][:, own][:, 1:], (0, 1), value=-100)'},
        SHIFTED_LATE,
    ),
    "cp averaged": (
        "context_parallel.py",
        "",
        {"loss * ranks /": "loss /"},
        f"the gradient is 0.5 times {TOKENS}, which is 1 / the world size or 1 / the ranks that see the same samples",
    ),
    "cp not summed": (
        "context_parallel.py",
        "",
        {"DistributedDataParallel(net, find_unused_parameters=options.experts)": "net"},
        "gradients differ between ranks that hold the same: model.embed_tokens.weight on rank 1",
    ),
    "cp keys not summed": (
        "context_parallel.py",
        "",
        {"dist.all_reduce(gradient, group=ctx.group)": "pass"},
        "backward/model.layers.1.self_attn.v_proj (micro batch 0, rank ",
    ),
    "cp experts that score least": (
        "context_parallel.py",
        "--experts",
        {"    ranks = dist.get_world_size()": f"    {LEAST}\n    ranks = dist.get_world_size()"},
        "forward/model.layers.0.mlp.gate",
    ),
    "cp keys exchanged": (
        "context_parallel.py",
        "",
        {"Gather.apply(one, group).unbind()": "Gather.apply(one, group).flip(0).unbind()"},
        "forward/model.layers.0.self_attn.o_proj (micro batch 0, rank ",
    ),
    "cp positions begin again": (
        "context_parallel.py",
        "",
        {'"position_ids": own.expand(2, -1)': '"position_ids": torch.arange(len(own)).expand(2, -1)'},
        AGAIN,
    ),
    "cp no positions": (
        "context_parallel.py",
        "--layout zigzag",
        {', "position_ids": own.expand(2, -1)': ""},
        AGAIN,
    ),
    "cp exchanged": (
        "context_parallel.py",
        "",
        {IDS: f'batch["input_ids"][:, {OTHER}]', CUT: CUT.replace("own", OTHER)},
        " is not trained to give the token after it: pieces do not lie where their positions say, or labels are shifted after ",
    ),
    "cp labels exchanged": (
        "context_parallel.py",
        "",
        {CUT: CUT.replace("own", OTHER)},
        "rank 0 has the labels of the piece of rank 1",
    ),
}


# Runs of a model that is cut among ranks by its own code, against one process: name -> (ranks, changes, what the verdict says)
IN_PARTS = {
    "in parts": (4, {}, "PASS: 2 steps"),
    "in parts and FSDP2": (
        4,
        {
            "    optimizer =": "    mesh = init_device_mesh('cpu', (groups.dp, groups.tp), mesh_dim_names=('dp', 'tp'))\n    fully_shard(model, mesh=mesh['dp'])\n    optimizer =",
            "import torch.distributed as dist\n": "import torch.distributed as dist\nfrom torch.distributed.device_mesh import init_device_mesh\nfrom torch.distributed.fsdp import fully_shard\n",
            "            dist.all_reduce(parameter.grad, group=groups.of_data)\n            parameter.grad /= groups.dp\n": "            pass\n",
            "parameter.grad.square().sum()": "parameter.grad.full_tensor().square().sum()",
        },
        "PASS: 2 steps",
    ),
    "in parts, backward not summed": (
        2,
        {"return reduced(gradient)": "return gradient"},
        "gradients differ between ranks that hold the same: blocks.0.norm1.weight on rank 1 and 10 more; they were not reduced over ranks 0 and 1, or not all of them: "
        "these have parts of one model, so a sum in the backward pass may be missing",
    ),
    "in parts, forward not summed": (
        2,
        {"return reduced(x)": "return x"},
        "forward/embedding (micro batch 0, rank 0) is the first of 15 of 15 outputs",
    ),
    "in parts, bias of each": (
        2,
        {
            "Reduce.apply(F.linear(x, self.weight)) + self.bias": "Reduce.apply(F.linear(x, self.weight, self.bias))"
        },
        "forward/blocks.0.out (micro batch 0, rank 0) is the first of",
    ),
    "in parts, other weights": (
        2,
        {
            "    optimizer =": "    if dist.get_rank() == 1:\n        model.blocks[1].down.weight.data[3] += 0.1\n    optimizer ="
        },
        "it begins with other weights: blocks.1.down.weight by a relative",
    ),
}


DESTROYS = """
import gc, torch, torch.distributed as dist
def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = torch.nn.Linear(4, 3)
    wrapped = torch.nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    torch.manual_seed(1 + dist.get_rank())
    for _ in range(2):
        optimizer.zero_grad()
        wrapped(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
if __name__ == "__main__":
    main()
    gc.collect()  # a DDP module that outlives its process group may hang
    dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def runs(new_folder):
    """The folder with the recordings of all rows, by one start of torchrun."""
    folder = new_folder("stacks")
    rows = [
        row(folder, name, ranks, EXAMPLES / script, arguments)
        for name, (ranks, script, arguments, _) in RIGHT.items()
    ]
    for name, (script, arguments, changes, _) in WRONG.items():
        ranks = 4 if name == "autotp same samples" else 2
        rows.append(row(folder, name, ranks, changed(folder / name, script, changes), arguments, steps=1))
    rows += [
        row(folder, name, ranks, changed(folder / name, "tensor_parallel.py", changes), f"--tp {tp}")
        for tp, those in ((1, {"whole": (1, {}, "")}), (2, IN_PARTS))
        for name, (ranks, changes, _) in those.items()
    ]
    destroys = folder / "destroys.py"
    destroys.write_text(DESTROYS)
    rows.append(row(folder, "destroys its group", 2, destroys, ""))
    run_all(folder, rows)
    return folder


def by_name(rows):
    """The names of rows. DeepSpeed trains in fp16 only where the processor has instructions for it."""
    no_fp16 = pytest.mark.skipif(
        not torch.ops.mkldnn._is_mkldnn_fp16_supported(), reason="DeepSpeed refuses fp16 on this processor"
    )
    return [pytest.param(name, marks=[no_fp16] if "fp16" in name else []) for name in rows]


@pytest.mark.parametrize("name", by_name(RIGHT))
def test_a_stack_passes(runs, name, capsys):
    require_recorded(runs / name)
    said = require_pass(
        runs / name / "run",
        RIGHT[name][3],
        capsys,
        tolerated=1e-3 if "bf16" in name or "fp16" in name else 1e-5,
    )
    if "tp" in name and "ep" not in name:  # its experts are called with tokens of their own
        # shards of outputs are put together
        assert "of other shapes than in the reference" not in said


def require_pass(folder: Path, gradient: str, capsys, tolerated: float = 1e-5) -> str:
    status = judge.main([str(folder)])
    said = capsys.readouterr().out
    assert status == 0 and said.splitlines()[-1].startswith("PASS: 2 steps"), said
    assert said.count(f"\n  the gradient is {gradient}") == 2, said
    for number, step in enumerate(json.loads((folder / "report.json").read_text())["steps"], start=1):
        recorded = json.loads((folder / "rank_0" / f"step_{number}.json").read_text())["places"]
        gradients = {name for name in recorded if name.startswith("gradient/")}
        assert abs(step["factor"] - 1) < tolerated and len(gradients) >= 8
        assert gradients <= step["tensors"].keys()
    return said


@pytest.mark.parametrize("name", by_name(WRONG))
def test_a_stack_with_a_bug_fails(runs, name, capsys):
    require_recorded(runs / name)
    assert judge.main([str(runs / name / "run")]) == 1
    said = capsys.readouterr().out
    assert said.splitlines()[-1].startswith("FAIL: step 1: ") and WRONG[name][3] in said, said


def test_one_process_has_the_whole_model(runs, capsys):
    require_recorded(runs / "whole")
    require_pass(runs / "whole" / "run", f"{TOKENS}, clipped", capsys)


@pytest.mark.parametrize("name", IN_PARTS)
def test_a_model_that_is_cut_by_its_own_code(runs, name, capsys):
    """By itself it is refused, as its code communicates. Against one process, where each part lies is found, and the whole is judged."""
    require_recorded(runs / name)
    folder, says = str(runs / name / "run"), IN_PARTS[name][2]
    if name == "in parts":
        assert judge.main([folder]) == 2
        assert "one process cannot: record the same training by one process" in capsys.readouterr().err
    status = judge.main([folder, "--against", str(runs / "whole" / "run")])
    said = capsys.readouterr().out
    assert status == (0 if says.startswith("PASS") else 1), said
    assert says in said.splitlines()[-1], said
    if name == "in parts":
        assert "of other shapes than in the reference" not in said
        assert "155 of 155 tensors" in said, said


@pytest.mark.parametrize("name, status", [("trainer resumed", 0), ("trainer resumed anew", 1)])
def test_the_order_continues_after_a_resume(runs, capsys, name, status):
    """A run that does not skip what the first one saw begins the epoch again; by itself it is right."""
    assert judge.main([str(runs / name / "run"), "--after", str(runs / "trainer saved" / "run")]) == status
    again = "samples were seen again before others were seen for the first time"
    assert (again in capsys.readouterr().out) == bool(status)


def test_a_process_group_that_is_destroyed_before_the_last_step_is_written(runs):
    """The step is of as many ranks as the others."""
    require_recorded(runs / "destroys its group")
    recording = Recording(runs / "destroys its group" / "run")
    assert [[*step] for step in recording.steps] == [[0, 1], [0, 1]]
    assert judge.main([str(recording.folder)]) == 0
