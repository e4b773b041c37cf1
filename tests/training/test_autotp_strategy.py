"""What DeepSpeed is told, and the process that imports it."""

import os
import sys

from programs import completed
from ranks import ROOT

from lockstep.plan import deepspeed_file
from lockstep.plan.command_line import parse_config


def test_what_deepspeed_is_told():
    told = deepspeed_file.of_flags(
        parse_config("deepspeed", ["--max_grad_norm", "0", "--precision", "autocast"])
    )
    assert told["gradient_clipping"] == 0.0, "left out, DeepSpeed clips at 1.0"
    assert told["torch_autocast"]["lower_precision_safe_modules"] == [] and not told["bf16"]["enabled"]
    assert told["zero_optimization"] == {"stage": 1} and told["tensor_parallel"]["autotp_size"] == 2


def test_the_process_that_forks_ranks_stays_without_threads():
    """A lock that another thread holds while a process forks is never released in the fork."""
    program = (
        "import os; from lockstep.plan.strategies import SPECS; from lockstep.running.jobs import preload_strategy; "
        "preload_strategy(SPECS['deepspeed']); print(len(os.listdir('/proc/self/task')))"
    )
    settings = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = completed([sys.executable, "-c", program], env=settings)
    assert done.stdout.splitlines()[-1:] == ["1"], done.stdout + done.stderr
