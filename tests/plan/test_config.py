"""Usage errors: one line, exit status 2, before anything is started. Through the real scripts."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from programs import completed, in_process

from lockstep.ground.errors import UserError
from lockstep.inputs.architectures import BUILT_IN
from lockstep.plan import command_line, resources
from lockstep.training import preflight

ROOT = Path(__file__).parents[2]


def script(name, *arguments, cwd=ROOT, **environment):
    """The training script in this process."""
    return in_process(f"train_{name}.py", *arguments, cwd=cwd, **environment)


def process(name, *arguments, cwd=ROOT, **environment):
    """The training script in a process of its own."""
    return completed(
        [sys.executable, ROOT / f"train_{name}.py", *arguments], cwd=cwd, env={**os.environ, **environment}
    )


CASES = [
    (
        "fsdp",
        "--tp_size 2 --dp_size 2 --num_workers 3",
        "--num_workers 3 is not tp_size x dp_size = 2 x 2 = 4",
    ),
    ("deepspeed", "--tp_size 3", "does not divide the model's 4 attention heads"),
    ("ddp", "--tp_size 2", "DDP has no tensor parallelism"),
    ("ddp", "--dp_size 4096", "at most 8 per core"),
    ("ddp", "--device cpu --backend nccl", "--backend nccl needs --device cuda"),
    ("ddp", "--dataset_name gone.txt", "no such file or folder"),
    ("ddp", "--autocast --precision fp32", "--autocast contradicts --precision fp32"),
    ("ddp", "--held_out 100000", "needs 16, and --held_out 100000; give more text"),
    ("fsdp", "--save_init_weights --init_weights_path w.pt", "only train_ddp.py writes initial weights"),
    ("ddp", "--save_init_weights", "needs --init_weights_path"),
    ("ddp", "--optimizer lion", "--optimizer lion: not adamw, sgd, no class of torch.optim"),
    ("ddp", "--dataset_name nobody/a?b", "no such file or folder"),
    ("ddp", "--dataset_name=", "--dataset_name is empty; give builtin, a .txt file"),
]
FIRST = {strategy: (strategy, arguments) for strategy, arguments, _ in reversed(CASES)}.values()


@pytest.mark.parametrize("strategy, arguments, message", CASES)
def test_usage_errors_are_one_line_and_exit_2(tmp_path, strategy, arguments, message):
    """The first of every script in a real process, too."""
    for run in (script, process) if (strategy, arguments) in FIRST else (script,):
        _is_one_line_and_exit_2(run, tmp_path, strategy, arguments, message)


def _is_one_line_and_exit_2(run, tmp_path, strategy, arguments, message):
    result = run(
        strategy,
        "--loss_output_dir",
        str(tmp_path / "l"),
        "--storage_path",
        str(tmp_path / "s"),
        *arguments.split(),
    )
    assert result.returncode == 2
    assert message in result.stderr and len(result.stderr.strip().splitlines()) == 1, result.stderr
    assert result.stdout == "", "something was started"
    assert list(tmp_path.iterdir()) == []


def test_a_used_experiment_name_is_refused(tmp_path):
    (tmp_path / "mine").mkdir()
    result = script(
        "ddp",
        "--storage_path",
        str(tmp_path),
        "--experiment_name",
        "mine",
        "--loss_output_dir",
        str(tmp_path),
    )
    assert result.returncode == 2 and "already used" in result.stderr


def test_no_cluster_at_the_address(tmp_path):
    """The one usage error that only ray can find."""
    result = process(
        "ddp", "--loss_output_dir", str(tmp_path), "--storage_path", str(tmp_path), RAY_ADDRESS="127.0.0.1:1"
    )
    assert (
        result.returncode == 2
        and "no Ray cluster answers there" in result.stderr
        and len(result.stderr.splitlines()) == 1
    )
    assert list(tmp_path.iterdir()) == [], "something was removed or written"


def test_dry_run_shows_what_would_happen_and_writes_nothing(tmp_path):
    folders = shlex.split(
        "--loss_output_dir a/l --storage_path b/s --capture_dir c --init_weights_path d/w.pt --save_init_weights"
    )
    result = script("fsdp", "--dry_run", *folders[:6], cwd=tmp_path)
    for words in (
        "dp 1  rank 2   rank 3",
        "max_grad_norm                1.0",
        "tokens per step",
        "FSDP+DTensor (TP=2, DP=2)",
    ):
        assert words in result.stdout
    assert result.returncode == 0 and list(tmp_path.iterdir()) == []
    assert (
        script("ddp", "--dry_run", *folders, cwd=tmp_path).returncode == 0 and list(tmp_path.iterdir()) == []
    )


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The current folder, with a model and a text in it under awkward names."""
    monkeypatch.chdir(tmp_path)
    for name in ("tiny-qwen2", "my models/a $x 'b'"):
        Path(name).mkdir(parents=True)
        (Path(name) / "config.json").write_text(json.dumps(BUILT_IN["tiny-llama"]))
    Path("builtin").write_text("")
    Path("texts").mkdir()
    (Path("texts") / "a.txt").write_text(" ".join(f"word{number}" for number in range(20_000)))
    return tmp_path


def test_names_in_the_callers_folder_are_made_absolute(here):
    config = command_line.parse_config(
        "ddp", ["--model_name", "my models/a $x 'b'", "--dataset_name", "texts"]
    )
    assert (config.model_name, config.dataset_name) == (str(here / "my models/a $x 'b'"), str(here / "texts"))
    assert not preflight.shadowed(config)
    config = command_line.parse_config(
        "ddp", ["--model_name", "Qwen/Qwen2.5-0.5B", "--dataset_name", "owner/data:x"]
    )
    assert (config.model_name, config.dataset_name) == ("Qwen/Qwen2.5-0.5B", "owner/data:x")


def test_a_built_in_name_wins_and_says_so(here):
    result = script("ddp", "--dry_run", cwd=here)
    assert "built-in architecture tiny-qwen2" in result.stdout and result.returncode == 0
    assert result.stderr.splitlines() == [
        f"--{option} {name}: the built-in one is used; write ./{name} for the one in this folder"
        for option, name in (("model_name", "tiny-qwen2"), ("dataset_name", "builtin"))
    ]
    result = script("ddp", "--dry_run", "--model_name", "./tiny-qwen2", "--dataset_name", "texts", cwd=here)
    assert f"config of {here / 'tiny-qwen2'}" in result.stdout and result.stderr == ""


def test_without_deepspeed(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    config = command_line.parse_config("deepspeed", ["--dry_run", "--loss_output_dir", str(tmp_path)])
    with pytest.raises(UserError, match="needs the package deepspeed"):
        preflight.check_environment(config, {})


def test_every_rank_finds_it_and_rank_0_says_it():
    """torchrun kills all ranks when one ends: one that is not rank 0 waits until it has spoken."""
    ranks = [
        subprocess.Popen(
            [sys.executable, ROOT / "train_fsdp.py", "--tp_size", "3"],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "6"},
        )
        for rank in range(2)
    ]
    said = ranks[0].communicate(timeout=60)[1]
    assert (
        ranks[0].returncode == 2
        and said.startswith("train_fsdp.py: --tp_size 3 does not divide")
        and len(said.splitlines()) == 1
    )
    with pytest.raises(subprocess.TimeoutExpired):
        ranks[1].wait(2)
    ranks[1].kill()
    assert ranks[1].communicate()[1] == ""


def test_launcher_and_mesh_must_agree(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert command_line.parse_config("ddp", []).num_workers == 4
    assert command_line.parse_config("fsdp", []).dp_size == 2
    with pytest.raises(UserError, match="the launcher started 4 processes, the mesh has 1 x 2"):
        command_line.parse_config("ddp", ["--dp_size", "2"])


def test_gpus_in_place_are_those_of_this_machine(monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", lambda name: "2.13.0")
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "16",
        "LOCAL_WORLD_SIZE": "8",
        "CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7",
    }.items():
        monkeypatch.setenv(name, value)
    assert command_line.parse_config("fsdp", []).device == "cuda"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(UserError, match="8 GPUs needed for 8 workers, 2 found"):
        command_line.parse_config("fsdp", ["--device", "cuda"])
    assert command_line.parse_config("ddp", ["--device", "cuda", "--backend", "gloo"]).device == "cuda"
    for strategy in ("deepspeed", "fsdp"):
        with pytest.raises(UserError, match="8 GPUs needed"):
            command_line.parse_config(strategy, ["--device", "cuda", "--backend", "gloo"])


def test_gpus_are_counted_without_torch(monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", lambda name: "2.13.0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,3")
    assert resources.local_gpus() == 3
    config = command_line.parse_config("ddp", ["--dp_size", "2"])
    assert (config.device, config.backend) == ("cuda", "nccl")
    config = command_line.parse_config("fsdp", [])
    assert (config.device, config.backend) == ("cpu", "gloo")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert resources.local_gpus() == 0
