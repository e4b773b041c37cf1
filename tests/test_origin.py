"""What a recording and a report say of the command that made them: what was typed, without what may be secret."""

import sys

import pytest

from lockstep.ground import origin

TOKEN = "abcdefghijklmnopqrst01"


@pytest.mark.parametrize(
    "typed, shown",
    [
        ("--hub_token abc --lr 1", "--hub_token HIDDEN --lr 1"),
        ("--hub-token=abc", "--hub-token=HIDDEN"),
        ("logger.apiKey=abc", "logger.apiKey=HIDDEN"),
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


def test_versions_of_what_needs_torch():
    import torch
    import transformers

    versions = origin.of_run()["versions"]
    assert versions["torch"] == torch.__version__ and versions["transformers"] == transformers.__version__
    assert "pytest" not in versions
