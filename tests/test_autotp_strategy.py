"""The one-off build of DeepSpeed's extension, and the lock that an interrupted one leaves."""

import os
import subprocess
import sys
import threading
import time

import pytest
from ranks import ROOT

from lockstep.config import parse_config
from lockstep.deepspeed import build as extension
from lockstep.deepspeed import configuration


@pytest.fixture
def build(tmp_path, monkeypatch):
    """Run build_extension against an empty build folder, with the compilation itself and the barrier left out."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder

    folder = tmp_path / ShareMemCommBuilder.NAME
    folder.mkdir()
    loaded = []
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("PATH", os.environ["PATH"])
    monkeypatch.setattr(ShareMemCommBuilder, "load", lambda self, verbose: loaded.append(1))
    monkeypatch.setattr("torch.distributed.barrier", lambda: None)

    def run():
        extension.build_extension(*extension.SHARED_MEMORY)
        return loaded

    return folder, run


def test_the_wait_is_announced(build, capsys):
    _, run = build
    assert run() == [1] and "builds its shared-memory op, once per environment" in capsys.readouterr().out


def test_a_finished_build_is_silent(build, capsys):
    folder, run = build
    (folder / "deepspeed_shm_comm.so").touch()
    run()
    assert capsys.readouterr().out == ""


def test_a_stale_lock_is_removed(build, capsys):
    folder, run = build
    (folder / "lock").touch()
    os.utime(folder / "lock", (time.time() - 1000,) * 2)
    run()
    assert (
        not (folder / "lock").exists()
        and "removing the lock of an interrupted build" in capsys.readouterr().out
    )


def test_a_lock_in_use_is_waited_for(build, capsys):
    folder, run = build
    (folder / "lock").touch()
    timer = threading.Timer(1.5, (folder / "lock").unlink)  # the other build ends
    timer.start()
    run()
    out = capsys.readouterr().out
    assert not timer.is_alive() and "waiting for it" in out and "removing" not in out


def test_a_young_lock_of_a_dead_build_does_not_hang(build, capsys, monkeypatch):
    folder, run = build
    (folder / "lock").touch()
    monkeypatch.setattr(extension, "STALE_LOCK_SECONDS", 2)
    run()
    assert "removing the lock of an interrupted build" in capsys.readouterr().out


def test_what_deepspeed_is_told():
    told = configuration.of_flags(
        parse_config("deepspeed", ["--max_grad_norm", "0", "--precision", "autocast"])
    )
    assert told["gradient_clipping"] == 0.0, "left out, DeepSpeed clips at 1.0"
    assert told["torch_autocast"]["lower_precision_safe_modules"] == [] and not told["bf16"]["enabled"]
    assert told["zero_optimization"] == {"stage": 1} and told["tensor_parallel"]["autotp_size"] == 2


def test_the_process_that_forks_ranks_stays_without_threads():
    """A lock that another thread holds while a process forks is never released in the fork."""
    program = "import os; from lockstep.deepspeed.build import preload; preload(); print(len(os.listdir('/proc/self/task')))"
    settings = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], env=settings, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1:] == ["1"], done.stdout + done.stderr
