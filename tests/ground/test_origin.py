"""What a recording and a report say of the command that made them: what was typed, without what may be secret."""

import subprocess
import sys

import pytest

from lockstep.ground import origin
from lockstep.ground.processes import ROOT

CHILD = "from lockstep.ground import origin; print(origin.command())"

TOKEN = "abcdefghijklmnopqrst01"


@pytest.mark.parametrize(
    "typed, shown",
    [
        ("--hub_token abc --lr 1", "--hub_token HIDDEN --lr 1"),
        ("--hub-token=abc", "--hub-token=HIDDEN"),
        ("logger.apiKey=abc", "logger.apiKey=HIDDEN"),
        ("--HFToken abc", "--HFToken HIDDEN"),
        ("--password --lr 1", "--password --lr 1"),
        (f"--x hf_{TOKEN} y={TOKEN}", "--x hf_HIDDEN y=HIDDEN"),
        ("--at https://me:abc@host/x", "--at https://HIDDEN@host/x"),
    ],
)
def test_secrets_are_left_out(typed, shown):
    assert origin.without_secrets(typed.split()) == shown.split()


def test_what_is_no_secret_is_left():
    typed = "--model_name Qwen/Qwen2.5-0.5B --max_tokens 128 --tokenizer word --output runs/a-long-name/of-a-run-2 a=b -k 3"
    assert origin.without_secrets(typed.split()) == typed.split()


def test_the_command(monkeypatch):
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    monkeypatch.setattr(sys, "argv", ["folder/train.py", "--lr", "1e-3", "--api_key", "abc"])
    assert origin.command() == "python train.py --lr 1e-3 --api_key HIDDEN"
    monkeypatch.setattr(sys, "argv", ["ray/default_worker.py", "--node-ip-address=10.0.0.1"])
    assert origin.command() == "python default_worker.py"


def test_the_command_of_torchrun(monkeypatch):
    """A rank names it with what it was told. Negative control: where the parent is hidden, as in some containers, the rank's own."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setattr(sys, "argv", ["train.py"])
    parent = f"import os, subprocess, sys; os.environ['TORCHELASTIC_RUN_ID'] = 'none'; subprocess.run([sys.executable, '-c', {CHILD!r}])"
    ended = subprocess.run(
        [sys.executable, "-c", parent, "--api_key", "abc"], capture_output=True, text=True, cwd=ROOT
    )
    assert ended.stdout.startswith("-c ") and ended.stdout.endswith(" --api_key HIDDEN\n"), ended
    monkeypatch.setattr("os.getppid", lambda: -1)
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    assert origin.command() == "python train.py"


def test_versions_of_what_needs_torch():
    import torch
    import transformers

    versions = origin.of_run()["versions"]
    assert versions["torch"] == torch.__version__ and versions["transformers"] == transformers.__version__
    assert "pytest" not in versions
