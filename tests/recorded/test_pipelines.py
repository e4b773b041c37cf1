"""Pipelines of torch are judged stage by stage, and what a stage hands on is what the next one is called with."""

import json
import os
import shutil

import pytest
import torch
import torch.distributed as dist
from ranks import ROOT, run_ranks
from stacks import changed, require_recorded, row, run_all

from lockstep import judge, record
from lockstep.recorder.recorder import Recorder

STEP = "        optimizer.step()\n"
BUILT = "    stage = PipelineStage("
TRANSPORT = """    dist.init_process_group("gloo")
    real, sends = dist.P2POp, dist.get_rank() == SENDER
    dist.P2POp = lambda op, x, *more: real(op, 1.001 * x.detach() if sends and op is dist.isend and x.ndim == 3 else x, *more)
"""
INIT = '    dist.init_process_group("gloo")\n'
TIED = {
    "        self.blocks =": "        head.weight = embedding.weight\n        self.blocks =",
    "        if options.max_norm:": "        dist.all_reduce((net.head if number else net.embedding).weight.grad)\n        if options.max_norm:",
}
TOKENS = "the gradient is that of the mean over all tokens of the global batch"
# Name -> (ranks, arguments, {text of the example: what stands there instead}, what the last line begins with, what is said)
PIPELINES = {
    "gpipe": (2, "--schedule gpipe", {}, "PASS: 2 stages; 2 steps", TOKENS),
    "autocast": (4, "--strategy ddp --autocast", {}, "PASS: 2 stages; 2 steps", TOKENS),
    "fsdp clipped": (
        4,
        "--strategy fsdp --max_norm 0.1",
        {},
        "PASS: 2 stages; 2 steps",
        f"{TOKENS}, clipped from a norm of ",
    ),
    "a loss of its own": (
        2,
        "",
        {
            "F.cross_entropy(logits.flatten(0, 1), targets.flatten())": "(logits.exp() - targets[..., None]).abs().mean()"
        },
        "PASS: 2 stages; 2 steps; the loss itself is not judged",
        "averaged over the ranks and the micro batches",
    ),
    "not divided": (
        2,
        "",
        {"MICRO, loss_fn": "MICRO, scale_grads=False, loss_fn"},
        "FAIL: stage 1: step 1: the gradient is 4 times that of the mean over all tokens",
        "which is the micro batches of a rank",
    ),
    "one stage not divided": (
        2,
        "",
        {
            STEP: "        for x in net.parameters() if stage.is_first else ():\n            x.grad *= 4\n"
            + STEP
        },
        "FAIL: stage 0: step 1: the gradient is 4 times that of what follows from the gradients of the next stage",
        TOKENS,
    ),
    "norm of a stage": (
        2,
        "--max_norm 0.1",
        {'dist.all_reduce(square, group=mesh["pp"].get_group())': "pass"},
        "FAIL: stage 0: step 1: the gradient was clipped by a norm of ",
        "times that of the reference's gradient",
    ),
    "not reduced": (
        4,
        "",
        {},
        "FAIL: stage 0: step 1: gradients differ between ranks that hold the same: blocks.0.qkv.weight on rank 1",
        "they were not reduced over ranks 0 and 1",
    ),
    "a wrong module": (
        2,
        "",
        {
            BUILT: "    if number:\n        net.blocks[1].up.register_forward_hook(lambda _, __, out: 1.01 * out)\n"
            + BUILT
        },
        "FAIL: stage 1: step 1: forward/blocks.1.up (micro batch ",
        "it is 1.01 times the reference's",
    ),
    "outputs changed on their way": (
        2,
        "",
        {INIT: TRANSPORT.replace("SENDER", "0")},
        "FAIL: stage 1: step 1: in micro batch 0 of rank 0, what this stage is called with as x is not what the stage before returned",
        "off by 1.0e-03",
    ),
    "gradients changed on their way": (
        2,
        "",
        {INIT: TRANSPORT.replace("SENDER", "1")},
        "FAIL: stage 1: step 1: in micro batch 0 of rank 0, what arrives at x in the stage before is not the gradient that this stage has there",
        "off by 1.0e-03",
    ),
    "tied weights": (
        2,
        "--max_norm 0.1",
        {
            **TIED,
            "in net.parameters()])": "in net.parameters() if not (number and parameter is net.head.weight)])",
        },
        "PASS: 2 stages; 2 steps; the gradient of head.weight, which another stage has, too, is not judged",
        TOKENS,
    ),
    "tied weights in the norm twice": (
        2,
        "--max_norm 0.1",
        TIED,
        "FAIL: stage 0: step 1: the gradient was clipped by a norm of ",
        "times that of the reference's gradient",
    ),
    "other learning rates": (
        2,
        "",
        {"lr=1e-3": "lr=1e-3 * (1 + number)"},
        "PASS: 2 stages; 2 steps",
        "note: the largest learning rate is 0.002 in this stage, and 0.001 in the stage before",
    ),
    "a schedule of one stage": (
        2,
        "",
        {STEP: STEP + "        optimizer.param_groups[0]['lr'] *= 0.5 if number else 1.0\n"},
        "FAIL: stage 1: step 2: the learning rate is 0.5 of the largest in this stage, and 1 of it in the stage before",
        TOKENS,
    ),
    "a stage that skips an update": (
        2,
        "",
        {STEP: "        if _ < 2 or number:\n    " + STEP},
        "FAIL: stage 1: this stage made 3 steps, and the stage before 2",
        TOKENS,
    ),
    # What it leaves out has an effect on hidden states, which are no logits
    "a mask in the first stage": (
        2,
        "",
        {
            "def forward(self, x):": "def forward(self, x, attention_mask=None):",
            '{"target": targets} if stage.is_last else {}': '{"target": targets} if stage.is_last else {"attention_mask": (inputs > 20).long()}',
        },
        "PASS: 2 stages; 2 steps; which labels the loss has was not seen",
        TOKENS,
    ),
    "stages with one seed": (
        2,
        "--max_norm 0.1",
        {"blocks[number * share : (number + 1) * share]": "blocks[:share]"},
        "PASS: 2 stages; 2 steps; which labels the loss has was not seen",
        TOKENS,
    ),
}
MADE = "    optimizer = torch.optim.AdamW(parameters, lr=1e-3)\n"
STEPPED = "        optimizer.step()\n        optimizer.zero_grad()\n"
# Two stages on each rank of a pipeline. Name -> likewise
INTERLEAVED = {
    "interleaved": (2, "--max_norm 0.1", {}, "PASS: 4 stages; 2 steps", f"{TOKENS}, clipped from a norm of "),
    "breadth first, sharded": (4, "--schedule LoopedBFS --fsdp --max_norm 0.1", {}, "PASS: 4 stages; 2 steps", TOKENS),
    "zero bubble, sharded": (4, "--schedule InterleavedZeroBubble --fsdp", {}, "PASS: 4 stages; 2 steps", TOKENS),
    "zero bubble in a V": (2, "--schedule ZBVZeroBubble", {}, "PASS: 4 stages; 2 steps", TOKENS),
    "DualPipeV": (2, "--schedule DualPipeV", {}, "PASS: 4 stages; 2 steps", TOKENS),
    "an optimizer for each stage": (
        2,
        "",
        {
            MADE: "    optimizers = [torch.optim.AdamW(net.parameters(), lr=1e-3) for net in nets.values()]\n",
            STEPPED: "        for optimizer in optimizers:\n            optimizer.step()\n            optimizer.zero_grad()\n",
        },
        "PASS: 4 stages; 2 steps",
        TOKENS,
    ),
    "the norm of a rank's stages": (
        2,
        "--max_norm 0.1",
        {"dist.all_reduce(square, group=group)": "pass"},
        "FAIL: stage 0: step 1: the gradient was clipped by a norm of ",
        "times that of the reference's gradient",
    ),
    "an optimizer of one stage": (
        2,
        "",
        {MADE: MADE.replace("parameters", "nets[rank].parameters()")},
        "FAIL: stage 2: ",
        "no optimizer holds",
    ),
    "a wrong module in a second stage": (
        2,
        "--schedule DualPipeV",
        {
            "    parameters = [": "    if 2 in nets:\n        nets[2].blocks[0].up.register_forward_hook(lambda _, __, out: 1.01 * out)\n"
            "    parameters = ["
        },
        "FAIL: stage 2: step 1: forward/blocks.0.up (micro batch ",
        "it is 1.01 times the reference's",
    ),
    "a second stage that is not divided": (
        2,
        "--schedule ZBVZeroBubble",
        {STEPPED: "        for x in nets[2].parameters() if 2 in nets else ():\n            x.grad *= 4\n" + STEPPED},
        "FAIL: stage 2: step 1: the gradient is 4 times that of what follows from the gradients of the next stage",
        TOKENS,
    ),
    "weights of one micro batch fewer": (
        2,
        "--schedule InterleavedZeroBubble",
        {'    dist.init_process_group("gloo")\n': """    dist.init_process_group("gloo")
    real = PipelineStage.backward_weight_one_chunk
    PipelineStage.backward_weight_one_chunk = (
        lambda stage, chunk, **more: None if (stage.stage_index, chunk) == (2, 1) else real(stage, chunk, **more)
    )
"""},
        "FAIL: stage 2: step 1: ",
        TOKENS,
    ),
}  # fmt: skip


DRAWN = "    data = batches("
# By DeepSpeed's engine. Name -> likewise
BY_DEEPSPEED = {
    "ZeRO 1": (4, "--max_norm 0.1", {}, "PASS: 2 stages; 2 steps", f"{TOKENS}, clipped from a norm of "),
    "no ZeRO": (2, "--zero_stage 0", {}, "PASS: 2 stages; 2 steps", TOKENS),
    "bf16": (2, "--bf16 --max_norm 0.1", {}, "PASS: 2 stages; 2 steps", f"{TOKENS}, clipped from a norm of "),
    "norm of the first stage": (  # docs/findings.md
        2,
        "--zero_stage 0 --max_norm 0.1",
        {},
        "FAIL: stage 0: step 1: the gradient was clipped by a norm of ",
        "times that of the reference's gradient",
    ),
    "a wrong module in DeepSpeed": (
        2,
        "",
        {DRAWN: "    if hasattr(net, '4'):\n        getattr(net, '4').up.register_forward_hook(lambda _, __, out: 1.01 * out)\n" + DRAWN},
        "FAIL: stage 1: step 1: forward/4.up (micro batch ",
        "it is 1.01 times the reference's",
    ),
    "one batch for all ranks": (
        4,
        "",
        {"batches(engine.grid.get_data_parallel_rank())": "batches(0)"},
        "FAIL: stage 0: step 1: ranks 0, 1 were called with the same micro batch 0",
        TOKENS,
    ),
}  # fmt: skip


STAGES = "--model_name tiny-qwen2 --pp_size 2 --tp_size 1 --dp_size 1 --batch_size 4 --debug_steps 2 --device cpu --loss_output_dir FOLDER --storage_path FOLDER"
# The built-in strategy
BUILT_IN = {
    "built in": (2, STAGES, {}, "PASS: 2 stages; 2 steps", f"{TOKENS}, clipped"),
    "built in, completions": (
        2,
        f"{STAGES} --labels completion --gradient_accumulation_steps 2 --gradient_sync every",
        {},
        "PASS: 2 stages; 2 steps",
        f"{TOKENS}, clipped",
    ),
}


OF_EXAMPLES = {
    "pipeline.py": PIPELINES,
    "interleaved_pipeline.py": INTERLEAVED,
    "deepspeed_pipeline.py": BY_DEEPSPEED,
}
ALL = PIPELINES | INTERLEAVED | BY_DEEPSPEED | BUILT_IN


@pytest.fixture(scope="module")
def runs(new_folder):
    """The folder with the recordings of all rows."""
    folder = new_folder("pipelines")
    rows = [
        row(folder, name, ranks, changed(folder / name, example, changes), arguments)
        for example, examples in OF_EXAMPLES.items()
        for name, (ranks, arguments, changes, *_) in examples.items()
    ]
    script = ROOT / "train_fsdp.py"
    rows += [row(folder, name, ranks, script, arguments) for name, (ranks, arguments, *_) in BUILT_IN.items()]
    run_all(folder, rows)
    return folder


@pytest.mark.parametrize("name", ALL)
def test_a_pipeline(runs, name, capsys):
    require_recorded(runs / name)
    *_, verdict, says = ALL[name]
    status = judge.main([str(runs / name / "run")])
    said = capsys.readouterr().out
    assert status == int(verdict.startswith("FAIL")), said
    assert said.splitlines()[-1].startswith(verdict) and says in said, said


@pytest.mark.parametrize(
    "missing, options, said",
    [
        ("stage_0", [], "stage_0: this stage of the pipeline recorded no step; record again"),
        ("stage_1", [], "stage_1: this stage of the pipeline recorded no step; record again"),
        ("stage_1/rank_1/step_2.json", [], "the stages of the pipeline recorded different numbers of steps"),
        ("", ["--against", "RUN"], "the recorded run is a pipeline, whose stages are judged by themselves"),
    ],
)
def test_what_cannot_be_judged_of_a_pipeline(runs, tmp_path, capsys, missing, options, said):
    run = tmp_path / "run"
    shutil.copytree(runs / "gpipe" / "run", run)
    if missing:
        (shutil.rmtree if (run / missing).is_dir() else lambda path: path.unlink())(run / missing)
    assert judge.main([str(run), *(option.replace("RUN", str(run)) for option in options)]) == 2
    assert said in capsys.readouterr().err


def test_what_an_earlier_run_left_does_not_count(runs, tmp_path, capsys):
    """One of more ranks and stages, or one that was no pipeline."""
    run, earlier = tmp_path / "run", runs / "autocast" / "run"
    shutil.copytree(runs / "gpipe" / "run", run)
    shutil.copytree(earlier / "stage_1" / "rank_3", run / "stage_1" / "rank_3")
    shutil.copytree(earlier / "stage_1", run / "stage_2")
    assert judge.main([str(run)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("PASS: 2 stages; 2 steps")


def test_a_rank_of_a_stage_that_did_not_record(runs, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(runs / "autocast" / "run", run)
    shutil.rmtree(run / "stage_1" / "rank_3")
    assert judge.main([str(run)]) == 2
    assert "rank 3 of 4 recorded no step of a stage" in capsys.readouterr().err


REPLACED = (
    (torch.autograd, "grad"),
    (torch.autograd, "backward"),
    (torch.optim.Optimizer, "zero_grad"),
    (torch.nn.utils, "clip_grads_with_norm_"),
    (torch.nn.functional, "cross_entropy"),
    (torch.amp.GradScaler, "step"),
    (dist, "all_reduce"),
    (os, "_exit"),
)
# What is recorded of both stages of the only rank -> what the judge says at last
ONE_RANK = {
    "the first stage is named": "PASS: 2 stages; 2 steps",
    "the second stage is named": "PASS: 2 stages; 2 steps",
    "in evaluation mode": "PASS: 2 stages; 2 steps",
    "modules of the first stage": "PASS: 2 stages; 2 steps",
    "an optimizer for each stage": "PASS: 2 stages; 2 steps",
    "an error in the other stage": None,
}


VOCABULARY, WIDTH, MICRO = 13, 8, 4


class Stage(torch.nn.Module):
    """One of two stages."""

    def __init__(self, number):
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, WIDTH) if number == 0 else torch.nn.Identity()
        self.inside = torch.nn.Linear(WIDTH, VOCABULARY if number else WIDTH)

    def forward(self, x):
        return self.inside(self.embedding(x).tanh())


def loss_of(logits, targets):
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def both_stages(folder, what):
    """Train and record on one rank that has both stages, and write the functions that are still replaced afterwards."""
    from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B

    torch.manual_seed(0)
    nets = [Stage(number) for number in range(2)]
    if what == "in evaluation mode":
        for net in nets:
            net.eval()
    stages = [PipelineStage(net, number, 2, torch.device("cpu")) for number, net in enumerate(nets)]
    schedule = ScheduleInterleaved1F1B(stages, MICRO, loss_fn=loss_of)
    parameters = [list(net.parameters()) for net in nets]
    if what != "an optimizer for each stage":
        parameters = [sum(parameters, [])]
    optimizers = [torch.optim.AdamW(held, lr=1e-3) for held in parameters]
    ids = torch.randint(0, VOCABULARY, (4, 2 * MICRO, 9))
    before = [getattr(place, name) for place, name in REPLACED]
    named = nets[what == "the second stage is named"]
    pattern = "embedding" if what == "modules of the first stage" else None
    if what == "an error in the other stage":
        real = Recorder._keep_inputs
        Recorder._keep_inputs = (
            lambda recorder, *given: real(recorder, *given) if recorder.model is named else 1 / 0
        )
    with record(named, folder / "run", modules=pattern):
        for one in ids:
            schedule.step(one[:, :-1], target=one[:, 1:])
            torch.nn.utils.clip_grad_norm_(sum(parameters, []), 0.1)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    replaced = [
        name for (place, name), own in zip(REPLACED, before, strict=True) if getattr(place, name) is not own
    ]
    (folder / "replaced.json").write_text(json.dumps(replaced))


@pytest.mark.parametrize("what", ONE_RANK)
def test_a_rank_with_both_stages(tmp_path, capsys, what):
    said = run_ranks(1, "recorded.test_pipelines:both_stages", tmp_path, what)
    assert json.loads((tmp_path / "replaced.json").read_text()) == []
    if ONE_RANK[what] is None:
        assert said.count("the training goes on without it") == 1 and "ZeroDivisionError" in said
        assert not [*tmp_path.rglob("step_*.json")]
        return
    assert judge.main([str(tmp_path / "run")]) == 0, capsys.readouterr().out
    out = capsys.readouterr().out
    assert out.splitlines()[-1].startswith(ONE_RANK[what]) and "other models" not in out, out
