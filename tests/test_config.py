"""Mistakes: one line, exit status 2, before anything is started. Through the real scripts, in real processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep import config as config_module
from lockstep import strategies
from lockstep.errors import UserError

ROOT = Path(__file__).parents[1]


def script(name, *arguments, **environment):
    return subprocess.run(
        [sys.executable, f"train_{name}.py", *arguments],
        cwd=ROOT, capture_output=True, text=True, timeout=60, env={**os.environ, **environment},
    )  # fmt: skip


CASES = [
    ("fsdp", "--tp_size 2 --dp_size 2 --num_workers 3", "--num_workers 3 is not tp_size x dp_size = 2 x 2 = 4"),
    ("fsdp", "--tp_size 3", "does not divide the model's 4 attention heads"),
    ("deepspeed", "--tp_size 4", "does not divide the model's 2 KV heads"),
    ("ddp", "--tp_size 2", "DDP has no tensor parallelism"),
    ("ddp", "--dp_size 4096", "at most 4 per core"),
    ("ddp", "--device cuda --dp_size 64", "64 GPUs needed"),
    ("ddp", "--device cpu --backend nccl", "--backend nccl needs --device cuda"),
    ("ddp", "--model_name no-such-model", "built-in: tiny-qwen2"),
    ("ddp", "--num_layers 3", "tiny-qwen2 has 2 layers"),
    ("ddp", "--dataset_name gone.txt", "no such file or folder"),
    ("ddp", "--batch_size 100000", "one step needs 200000"),
    ("ddp", "--seq_length 5000", "positions for 4096 tokens"),
    ("ddp", "--batch_size 0", "0 is out of range; it must be at least 1"),
    ("ddp", "--learning_rate 0", "0 is out of range; it must be above 0"),
    ("ddp", "--learning_rate nan", "nan is out of range"),
    ("ddp", "--max_grad_norm -1", "must be at least 0"),
    ("ddp", "--num_epochs two", "'two' is not a whole number"),
    ("ddp", "--autocast --precision fp32", "--autocast contradicts --precision fp32"),
    ("fsdp", "--save_init_weights --init_weights_path w.pt", "only train_ddp.py writes initial weights"),
    ("ddp", "--save_init_weights", "needs --init_weights_path"),
    ("ddp", "--save_init_weights --init_weights_path w.bin", "must end in .safetensors or .pt"),
    ("ddp", "--init_weights_path gone.pt", "no such file"),
    ("ddp", "--loss_output_dir /proc/nothing", "--loss_output_dir /proc/nothing: cannot be written"),
    ("ddp", "--init_weight_path x", "unrecognized arguments"),
    ("ddp", "--optimizer lion", "invalid choice: 'lion'"),
    ("ddp", "--seed 4294967296", "at most 4294967295"),
    ("ddp", "--model_name ~nosuch/x", "no built-in model"),
    ("ddp", "--dataset_name nobody/a?b", "no such file or folder"),
]


@pytest.mark.parametrize("strategy, arguments, message", CASES)
def test_mistakes_are_one_line_and_exit_2(tmp_path, strategy, arguments, message):
    result = script(strategy, "--loss_output_dir", str(tmp_path / "l"), "--storage_path", str(tmp_path / "s"), *arguments.split())
    assert result.returncode == 2
    assert message in result.stderr and len(result.stderr.strip().splitlines()) == 1, result.stderr
    assert result.stdout == "", "something was started"


def test_no_compiler(tmp_path):
    python = Path(sys.executable)
    result = script("deepspeed", "--dry_run", "--device", "cpu", PATH=str(tmp_path))
    assert python.exists() and result.returncode == 2 and "C++ compiler" in result.stderr


def test_a_used_experiment_name_is_refused(tmp_path):
    (tmp_path / "mine").mkdir()
    result = script("ddp", "--storage_path", str(tmp_path), "--experiment_name", "mine", "--loss_output_dir", str(tmp_path))
    assert result.returncode == 2 and "already used" in result.stderr


def test_no_cluster_at_the_address(tmp_path):
    """The one mistake that only ray can find."""
    result = script("ddp", "--loss_output_dir", str(tmp_path), "--storage_path", str(tmp_path), RAY_ADDRESS="127.0.0.1:1")
    assert result.returncode == 2 and "no Ray cluster answers there" in result.stderr.splitlines()[-1]


def test_dry_run_shows_what_would_happen_and_writes_no_history(tmp_path):
    result = script("fsdp", "--dry_run", "--loss_output_dir", str(tmp_path), "--storage_path", str(tmp_path))
    assert result.returncode == 0 and list(tmp_path.iterdir()) == []
    for words in ("dp 1  rank 2   rank 3", "max_grad_norm                1.0", "tokens per step", "FSDP+DTensor (TP=2, DP=2)"):
        assert words in result.stdout


def test_defaults_are_written_once():
    parser = config_module.build_parser("ddp")
    fields = config_module.Config.__dataclass_fields__
    for action in parser._actions:
        if action.dest == "precision":  # left out where it is not given, so that --autocast can tell
            assert action.help.endswith(f"(default: {fields[action.dest].default})")
        elif action.dest in fields and action.dest not in ("save_init_weights", "dry_run"):
            assert action.default == fields[action.dest].default, action.dest


def test_one_set_of_flags():
    flags = [{a.dest for a in config_module.build_parser(s)._actions} for s in strategies.ROWS]
    assert flags[0] == flags[1] == flags[2]


def test_launcher_and_mesh_must_agree(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert config_module.parse_config("ddp", []).num_workers == 4
    assert config_module.parse_config("fsdp", []).dp_size == 2
    with pytest.raises(UserError, match="the launcher started 4 processes, the mesh has 1 x 2"):
        config_module.parse_config("ddp", ["--dp_size", "2"])


def test_gpus_in_place_are_those_of_this_machine(monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", lambda name: "2.13.0")
    for name, value in {"RANK": "0", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8", "CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}.items():
        monkeypatch.setenv(name, value)
    assert config_module.parse_config("fsdp", []).device == "cuda"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(UserError, match="8 GPUs needed for 8 workers, 2 found"):
        config_module.parse_config("fsdp", ["--device", "cuda"])
    assert config_module.parse_config("fsdp", ["--device", "cuda", "--backend", "gloo"]).device == "cuda"
    with pytest.raises(UserError, match="8 GPUs needed"):
        config_module.parse_config("deepspeed", ["--device", "cuda", "--backend", "gloo"])


def test_gpus_are_counted_without_torch(monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", lambda name: "2.13.0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,3")
    assert config_module.local_gpus() == 3
    config = config_module.parse_config("ddp", ["--dp_size", "2"])
    assert (config.device, config.backend) == ("cuda", "nccl")
    config = config_module.parse_config("fsdp", [])
    assert (config.device, config.backend) == ("cpu", "gloo")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert config_module.local_gpus() == 0
