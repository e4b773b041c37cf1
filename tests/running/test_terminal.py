"""Programs on a real pseudo-terminal: one line that moves, under Ray Train, torchrun and run_verification.py; and --quiet."""

import re
import shutil
import sys
import tempfile

import pytest
from real_runs import environment, folders
from terminal import on_terminal, screen_of, states_of

SMALL = ["--batch_size", "2", "--seq_length", "32", "--num_layers", "1", "--device", "cpu"]
STEP = r"{}: step (\d+)/{}  loss \d\.\d{{6}}  grad norm \d+\.\d{{4}}(  [\dhmins ]+ left  \d+ tokens/s)?  0\.\d\d GiB"


@pytest.fixture
def ray():
    """The environment of a run under Ray, the names of whose sockets must be short."""
    short = tempfile.mkdtemp(dir="/tmp")
    yield environment(RAY_TMPDIR=short)
    shutil.rmtree(short, ignore_errors=True)


def steps_of(text, label, total):
    """The numbers of the steps on the moving line, each of which is as it should be."""
    found = [re.fullmatch(STEP.format(re.escape(label), total), state) for state in states_of(text)]
    return [int(one[1]) for one in found if one]


def test_a_run_under_ray(tmp_path, ray):
    """DeepSpeed, from Ray's worker, with the line of a profile."""
    flags = [*folders(tmp_path), *SMALL, "--dp_size", "1", "--tp_size", "1", "--debug_steps", "100"]
    flags += ["--profile", "1"]
    status, text = on_terminal([sys.executable, "train_deepspeed.py", *flags], columns=120, env=ray)
    label = "DeepSpeed AutoTP (TP=1, DP=1)"
    assert status == 0, text
    first, profile, last = (line for line in screen_of(text) if line)
    assert first.startswith(f"{label}: built-in architecture") and last.startswith(f"{label}: 100 steps in ")
    assert profile.startswith(f"{label}: steps 2 to 2 profiled: ")
    assert [path.name for path in tmp_path.glob("trace_*")] == ["trace_deepspeed_rank0.json"]
    steps = steps_of(text, label, 100)
    assert steps[0] == 1 and len(steps) > 1 and steps == sorted(steps)
    assert len(states_of(text)) == len(steps) + 1, "the profile's line takes the place of the moving one"


def test_a_quiet_run_says_its_last_line_alone(tmp_path):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "1"]
    flags = [*folders(tmp_path), *SMALL, "--dp_size", "1", "--debug_steps", "4", "--quiet"]
    status, text = on_terminal([*launcher, "train_ddp.py", *flags], columns=120, env=environment())
    assert status == 0 and states_of(text) == [], text
    (last,) = (line for line in screen_of(text) if line.startswith("DDP "))  # a library may warn
    assert last.startswith("DDP (TP=1, DP=1): 4 steps in ")


def test_a_run_under_torchrun_that_fails(tmp_path):
    """What is said of it stands below the line that moved. In a narrow terminal that line is cut."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    rates = ["--learning_rate", "1e30", "--max_grad_norm", "0", "--debug_steps", "8"]
    status, text = on_terminal(
        [*launcher, "train_ddp.py", *folders(tmp_path), *SMALL, *rates], columns=50, env=environment()
    )
    lines = screen_of(text)
    (said,) = (line for line in lines if line.startswith("train_ddp.py: step "))
    above = lines[lines.index(said) - 1]
    assert status == 1 and above.startswith("DDP (TP=1, DP=2): step ") and len(above) == 49, text


@pytest.mark.parametrize("quiet", [False, True])
def test_a_verification(tmp_path, quiet):
    command = [
        sys.executable,
        "run_verification.py",
        "--output_dir",
        tmp_path / "out",
        "--strategies",
        "ddp,fsdp@tp1xdp2",
    ]
    status, text = on_terminal(
        [*command, *SMALL, "--steps", "3", *["--quiet"] * quiet], columns=120, env=environment()
    )
    assert status == 0 and text.rstrip().endswith("PASS"), text
    steps = steps_of(text, "DDP (TP=1, DP=2)", 3)
    assert steps == ([] if quiet else sorted(steps)) and bool(steps) != quiet
    assert ("3 steps in" in text) != quiet
    assert not any(re.search("step ./3", line) for line in screen_of(text))
