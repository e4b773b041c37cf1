"""Correct runs raise no alarm: a sample of benchmarks/clean_sweep.py, every model and mesh."""

import sys

import pytest

from ranks import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import clean_sweep  # noqa: E402

CASES = [
    *((model, "fp32", 2, 2) for model in clean_sweep.MODELS),
    *((model, "autocast", 1, 2) for model in clean_sweep.MODELS),
    ("tiny-qwen2", "autocast", 2, 1),
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clean")
    clean_sweep.train(CASES, 100, folder)  # a seed that the published sweep does not have
    return folder


@pytest.mark.parametrize("case", CASES, ids=lambda case: "{}-{}-dp{}-tp{}".format(*case))
def test_no_alarm(trained, case):
    alarms, worst = clean_sweep.judge(clean_sweep.folder_of(trained, *case))
    assert alarms == []
    assert all(0 < worst[strategy]["gradient"] < 1 for strategy in ("ddp", "deepspeed", "fsdp"))
