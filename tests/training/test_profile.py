"""--profile: a trace of each rank, and the line that says where a step's time goes."""

import contextlib
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from own_strategy import own_strategy
from programs import completed, in_process
from ranks import ROOT
from real_runs import environment, folders
from torch.autograd import DeviceType

from lockstep.ground.errors import UserError
from lockstep.running import jobs
from lockstep.training import profiled

SMALL = ["--batch_size", "2", "--seq_length", "32", "--num_layers", "1", "--device", "cpu"]
LINE = re.compile(
    r"(.*): steps (\d+) to (\d+) profiled: ([\d.]+) ms a step, computing (\d+)%, communicating (\d+)%, waiting (\d+)%; (.*) and the other ranks'"
)
SLOW = """

import time

import torch.distributed as dist


class Slow(Mine):
    label, axes = "slow", ("dp",)

    def forward_backward(self, micro_batches):
        time.sleep(dist.get_rank())
        return super().forward_backward(micro_batches)
"""


def event(name, begin, end, parent=None, device=DeviceType.CPU, note=False):
    """An event of torch's profiler, in seconds."""
    span = SimpleNamespace(start=begin * 1e6, end=end * 1e6)
    return SimpleNamespace(
        name=name, time_range=span, cpu_parent=parent, device_type=device, is_user_annotation=note
    )


def test_what_overlaps_is_counted_once():
    """Computing comes first; what an operation with a collective inside adds is none of both, and so is what lies outside of a step."""
    engine = event("autograd::engine::evaluate_function: Sum", 5, 9)
    function = event("SumBackward0", 5, 9, engine)
    events = [
        event("lockstep step 2", 0, 10, note=True),
        event("lockstep step 3", 20, 30, note=True),
        event("aten::mm", 1, 3),
        event("aten::resolve_conj", 1, 2),
        event("gloo:all_reduce", 2, 4, note=True),
        engine,
        function,
        event("c10d::allreduce_", 6, 7, function),
        event("Optimizer.step", 20, 30, note=True),
        event("aten::add_", 9, 22),
    ]
    assert profiled.times(events) == pytest.approx((20, 2 + 1 + 2, 1 + 1))
    assert profiled.times(events[:2]) == pytest.approx((20, 0, 0))


def test_of_a_gpu_the_kernels_count():
    events = [
        event("lockstep step 2", 0, 10, note=True),
        event("aten::mm", 0, 9),
        event("gemm_kernel", 2, 4, device=DeviceType.CUDA),
        event("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 3, 6, device=DeviceType.CUDA),
        event("lockstep step 2", 0, 10, device=DeviceType.CUDA, note=True),
    ]
    assert profiled.times(events) == pytest.approx((10, 2, 2))


def parts(said):
    """(first step, last step, ms a step, the three shares in %) of the line among what a run said."""
    (found,) = (match for match in map(LINE.fullmatch, said.splitlines()) if match)
    return [float(each) for each in found.groups()[1:7]]


def require_trace(path, steps):
    """torch has written all of it, and the marked steps are among its slices."""
    trace = json.loads(path.read_text())
    whole = [one for one in trace["traceEvents"] if one["ph"] == "X"]
    assert len(whole) > 500
    marks = {one["name"] for one in whole if one["name"].startswith(profiled.STEP)}
    assert marks == {f"{profiled.STEP}{step}" for step in steps}
    assert any(one["name"].startswith("gloo:") for one in whole)


@pytest.mark.parametrize(("strategy", "waits"), [("Mine", False), ("Slow", True)])
def test_a_rank_that_comes_late_is_waited_for(tmp_path, strategy, waits):
    """By a second, which both ranks wait: the one sleeps, the other has nothing to do. Negative control: without the sleep.

    On a busy machine the rank that does not sleep comes late as well.
    """
    own_strategy(tmp_path / "mine.py", "Mine", SLOW)
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc_per_node",
        "2",
        "-m",
        "lockstep.train",
    ]
    command = [*launcher, "--strategy", f"{tmp_path / 'mine.py'}:{strategy}", *folders(tmp_path), *SMALL]
    done = completed([*command, "--debug_steps", "4", "--profile", "2"], env=environment())
    assert done.returncode == 0, done.stdout + done.stderr
    first, last, each, *shares = parts(done.stdout)
    assert (first, last) == (2, 3) and 99 <= sum(shares) <= 101
    assert shares[0] > 0 or waits  # a second beside a tiny step may leave less than a percent
    waited = each * shares[2] / 100
    assert (waited > 700) == waits, done.stdout
    for rank in range(2):
        require_trace(tmp_path / f"trace_{strategy.lower()}_rank{rank}.json", (2, 3))


def test_deepspeed(tmp_path, capsys):
    """After the captured steps; a second run replaces the traces, and no file of somebody else. Under Ray: test_terminal.py."""
    flags = [*folders(tmp_path), *SMALL, "--dp_size", "1", "--debug_steps", "4", "--profile", "1"]
    flags += ["--capture_dir", str(tmp_path / "tensors"), "--capture_steps", "2"]
    job = {"strategy": "deepspeed", "arguments": flags}
    jobs.start_all_groups([(2, [job])], tmp_path / "work", shown=True)
    assert parts(capsys.readouterr().out)[:2] == [3, 3]
    for rank in range(2):
        require_trace(tmp_path / f"trace_deepspeed_rank{rank}.json", (3,))
    again = ["train_deepspeed.py", *flags, "--overwrite", "--dry_run"]
    assert in_process(*again).returncode == 0
    (tmp_path / "trace_deepspeed_rank1.json").write_text("{}")
    done = in_process(*again)
    assert (
        done.returncode == 2 and "rank1.json was not written by Lockstep and is not replaced" in done.stderr
    )


def test_a_verification_profiles_further_steps(tmp_path):
    """After those that it compares."""
    flags = ["--output_dir", tmp_path / "out", "--strategies", "ddp,fsdp", "--tp_size", "1", *SMALL]
    command = [sys.executable, ROOT / "run_verification.py", *flags, "--steps", "1", "--profile", "1"]
    done = completed(command, env=environment())
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [match for match in map(LINE.fullmatch, done.stdout.splitlines()) if match]
    assert [match.groups()[1:3] for match in lines] == [("2", "2")] * 2, done.stdout
    for name in ("ddp", "fsdp"):
        require_trace(tmp_path / "out" / "losses" / f"trace_{name}_rank0.json", (2,))


@pytest.mark.parametrize(
    ("program", "given", "said"),
    [
        ("train_ddp.py", ["--debug_steps", "3", "--profile", "3"], "--profile 3: steps 2 to 4 would be profiled, and the run has 3;"),
        ("run_verification.py", ["--profile", "-1"], "must be at least 0"),
        ("train_fsdp.py", ["--profile", "1", "--count_collectives"], "leave one out"),
        ("train_deepspeed.py", ["--profile", "-1"], "must be at least 0"),
    ],
)  # fmt: skip
def test_what_cannot_be_profiled_is_refused(tmp_path, program, given, said):
    folder = ["--output_dir", tmp_path / "out"] if program == "run_verification.py" else folders(tmp_path)
    done = in_process(program, *folder, *given)
    assert done.returncode == 2 and said in done.stderr, done.stderr


@pytest.mark.parametrize(("text", "whole"), [('{"traceEvents": []}\n', True), ('{"traceEvents": [{', False)])
def test_a_trace_that_is_cut_off_is_an_error(tmp_path, text, whole):
    """torch's profiler says nothing of a full disk."""
    one = profiled.Profile(tmp_path / "trace.json", 2)
    one.profiler = SimpleNamespace(export_chrome_trace=lambda path: Path(path).write_text(text))
    refused = pytest.raises(UserError, match="cannot write .*trace.json: No space left on device")
    with contextlib.nullcontext() if whole else refused:
        profiled.write_atomically(one.path, one._export)
    assert one.path.exists() == whole
