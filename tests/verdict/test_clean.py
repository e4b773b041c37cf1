"""Correct runs raise no alarm: a sample of benchmarks/clean_sweep.py, and unusual options. `run_tests.sh --all` runs the whole sweep."""

import clean_sweep
import pytest

SGD = "--attn_impl eager --optimizer sgd --max_grad_norm 0 --weight_decay 0"
CASES = [
    ("tiny-mistral", "fp32", 1, 2),
    ("tiny-gpt2", "autocast", 2, 1, "--gradient_accumulation_steps", "2"),
    ("tiny-qwen3", "fp32", 1, 2, *SGD.split()),
    (
        "tiny-qwen2-odd-vocab",
        "autocast",
        2,
        2,
        "--gradient_accumulation_steps",
        "3",
        "--max_grad_norm",
        "0.1",
    ),
]


@pytest.fixture(scope="module")
def trained(new_folder):
    folder = new_folder("clean")
    clean_sweep.train(
        dict.fromkeys(CASES, 1000), folder, clean_sweep.named("deepspeed,fsdp")
    )  # a seed that the published sweep does not have
    return folder


@pytest.mark.parametrize("case", CASES, ids=lambda case: "{}-{}-dp{}-tp{}".format(*case) + "".join(case[4:]))
def test_no_alarm(trained, case):
    said, worst = clean_sweep.judge(
        clean_sweep.folder_of(trained, *case), clean_sweep.named("deepspeed,fsdp")
    )
    assert said["alarms"] == said["not judged"] == []
    unjudged = said["unjudged"]
    # an SGD step of 1e-3 moves a norm weight of 1 by less than float32 can show
    assert (
        all(name.startswith("parameter/") and "norm" in name for name in unjudged)
        if "sgd" in case
        else unjudged == []
    )
    assert all(0 < worst[strategy]["gradient"] < 1 for strategy in ("ddp", "deepspeed", "fsdp"))
