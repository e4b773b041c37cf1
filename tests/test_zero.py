"""ZeRO stages and offload: which combinations are refused, and that the live engine is what was asked for."""

import pytest

from lockstep.config import parse_config
from lockstep.deepspeed import zero
from lockstep.errors import UserError


def config(*arguments, strategy="deepspeed"):
    return parse_config(strategy, ["--device", "cpu", *arguments])


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--zero_stage 0 --precision bf16", "float32 copies"),
        ("--zero_stage 0 --offload_optimizer cpu", "nothing sharded to offload"),
        ("--zero_stage 2 --offload_param cpu", "at stage 3 alone"),
        ("--zero_stage 2 --offload_optimizer nvme --nvme_path x", "add --zero_stage 3"),
        ("--zero_stage 3 --offload_optimizer nvme", "needs --nvme_path"),
        ("--nvme_path x", "nothing is offloaded to nvme"),
    ],
)
def test_what_cannot_be_combined(arguments, message):
    with pytest.raises(UserError, match=message):
        zero.require(config(*arguments.split()))


@pytest.mark.parametrize(
    "arguments",
    ["", "--zero_stage 0", "--zero_stage 3 --offload_param cpu", "--zero_stage 2 --offload_optimizer cpu"],
)
def test_what_can_be_combined(arguments):
    zero.require(config(*arguments.split()))


def test_other_strategies_have_no_such_flags_and_record_none():
    with pytest.raises(UserError, match="unrecognized arguments: --zero_stage 2"):
        config("--zero_stage", "2", strategy="fsdp")
    assert "zero_stage" not in config(strategy="fsdp").as_dict() and config().as_dict()["zero_stage"] == 1
