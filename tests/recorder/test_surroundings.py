"""What a script sets beside its model, before it trains: the judge has it, too."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from scripts import TRAINS

from lockstep import judge

ROOT = Path(__file__).parents[2]
SETTINGS = """
import dataclasses, time
import numpy, torch
class Odd:
    # Such as what is made when it is used first
    @property
    def __class__(self):
        raise RuntimeError("not yet")
    def __eq__(self, other):
        raise RuntimeError("not yet")
table, numbers, odd = torch.arange(3), numpy.arange(3), Odd()
scale, names, secret_key = 1.0, ["a"], ""
@dataclasses.dataclass
class Options:
    shift: float = 0.0
options = Options()
class Table:
    values, length = None, 0
    @classmethod
    def of(cls, n):
        if n > cls.length:
            cls.values, cls.length = torch.linspace(1, 2, n), n
        return cls.values[:n]
@dataclasses.dataclass(frozen=True)
class Frozen:
    started: float
frozen = Frozen(time.time())
class Kinds:
    backends = []
    @classmethod
    def fill(cls):
        from torch.nn.attention import SDPBackend
        cls.backends = [SDPBackend.MATH]
def choose(value):
    global scale
    scale = value
"""
NET = """
import os, torch
import {settings} as settings
from {settings} import names
USED = os.environ.get("LS_USED", "no")
class Net(torch.nn.Module):
    power = 1
    def __init__(self):
        super().__init__()
        self.one, self.two = torch.nn.Linear(8, 16), torch.nn.Linear(16, 5)
    def forward(self, x):
        h = self.one(x)
        if os.getenv("LS_ACTIVATION", "relu") == "tanh":
            h = h.tanh()
        if USED == "yes":
            h = h.abs()
        assert int(os.environ.get("WORLD_SIZE", "1")) == 1
        if settings.Kinds.backends:
            with torch.nn.attention.sdpa_kernel(settings.Kinds.backends):
                h = h * 2
        h = h * settings.Table.of(16)
        return self.two(h * settings.scale * len(names) + settings.options.shift) ** self.power
"""
TRAIN = """
import os, torch
import {settings} as settings
{sets}
from {net} import Net
"""


def recorded(folder, kind, sets="", late="pass"):
    """The recording of a script, whose files no other test imports."""
    names = {"settings": f"settings_{kind}", "net": f"net_{kind}"}
    (folder / f"settings_{kind}.py").write_text(SETTINGS)
    (folder / f"net_{kind}.py").write_text(NET.format(**names))
    script = TRAIN.format(**names, sets=sets) + TRAINS.format(before=late)
    (folder / "train.py").write_text(script)
    command = [sys.executable, "-m", "lockstep.record", "--output", str(folder / "run"), "train.py"]
    subprocess.run(command, cwd=folder, env={"PYTHONPATH": str(ROOT), "WORLD_SIZE": "1"}, check=True)
    return folder / "run"


CASES = {
    "variable": {"sets": 'os.environ["LS_ACTIVATION"] = "tanh"'},
    "at_import": {"sets": 'os.environ["LS_USED"] = "yes"'},
    "global": {"late": "settings.choose(3.0)"},
    "list": {"late": 'settings.names.append("b")'},
    "attribute": {"late": "Net.power = 2"},
    "object": {"late": "settings.options.shift = 3.0"},
}


@pytest.mark.parametrize("kind", CASES)
def test_what_a_script_sets_is_set_for_the_judge(tmp_path, capsys, kind):
    run = recorded(tmp_path, kind, **CASES[kind])
    before, whole = dict(os.environ), (run / "model.json").read_text()
    content = json.loads(whole)
    del content["tree"]["surroundings"]
    (run / "model.json").write_text(json.dumps(content))
    assert judge.main([str(run)]) == 1  # the reference is another model
    assert "FAIL: step 1: forward/" in capsys.readouterr().out
    (run / "model.json").write_text(whole)
    assert judge.main([str(run)]) == 0, capsys.readouterr().out
    assert os.environ == before


def test_secrets_and_large_values_are_not_recorded(tmp_path):
    sets = 'settings.secret_key, settings.names, settings.options.api_token = "abc", ["abc"] * 2000, "abc"'
    run = recorded(tmp_path, "secret", sets=sets)
    of_settings = json.loads((run / "model.json").read_text())["tree"]["surroundings"]["globals"][
        "settings_secret"
    ]
    assert of_settings == {
        "scale": 1.0,
        "options.shift": 0.0,
        "frozen.started": of_settings["frozen.started"],
    }


def test_a_recording_sets_no_variable_that_the_code_does_not_name(tmp_path, capsys):
    run = recorded(tmp_path, "other")
    content = json.loads((run / "model.json").read_text())
    content["tree"]["surroundings"]["environment"] = {"LD_PRELOAD": "other.so", "LS_USED": "/no"}
    content["tree"]["surroundings"]["globals"]["os"] = {"sep": "|"}
    of_net = content["tree"]["surroundings"]["globals"]["net_other"]
    of_net |= {"Net": 3, "torch": None, "__file__": "other"}
    content["tree"]["surroundings"]["classes"]["torch.nn:Linear"] = {"in_features": 1}
    (run / "model.json").write_text(json.dumps(content))
    check = (
        "import os, sys, torch; from lockstep import judge; from lockstep.recorder import surroundings as s; import contextlib;"
        "s.restored = contextlib.nullcontext; status = judge.main(sys.argv[1:]);"
        "print(status, 'LD_PRELOAD' in os.environ, os.environ.get('LS_USED'), os.sep, hasattr(torch.nn.Linear, 'in_features'))"
    )
    out = subprocess.run(
        [sys.executable, "-c", check, run], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert out.stdout.splitlines()[-1] == "0 False None / False"
