"""Damaged and hostile weights files: refused in one line, or accepted and loaded as they were meant; nothing else."""

import pytest
from weights_trials import run

from lockstep.inputs import weights


@pytest.mark.parametrize("suffix, count", [(".safetensors", 240), (".pt", 160)])
def test_no_damage_gets_through(tmp_path, suffix, count):
    found = run(suffix, count, 1, tmp_path)
    assert found.keys() == {"refused", "same"}, {
        kind: cases for kind, cases in found.items() if kind not in ("refused", "same")
    }
    assert len(found["refused"]) > count / 2 and found["same"], "the cases are not what they are meant to be"


def test_without_the_check_damage_is_seen(tmp_path, monkeypatch):
    """Negative control: what is loaded is really held against what was written."""
    monkeypatch.setattr(weights, "check", lambda *_, **__: None)
    found = run(".safetensors", 60, 1, tmp_path)
    assert found["accepted wrong"] and found["fails later"]
