"""The recorder under launchers other than torchrun, of which modules it keeps the outputs, and FSDP1."""

import os
import subprocess
import sys

import pytest
from ranks import ROOT, free_port

from lockstep import judge
from lockstep.recorder.module_hooks import matches
from lockstep.recorder.recording import Recording

SCRIPT = """
import argparse, os, sys, torch, torch.distributed as dist
import lockstep
from torch import nn
parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", "--local-rank", type=int, default=0)
parser.add_argument("--times", type=float, default=1.0)
parser.add_argument("--kind", default="ddp")
given = parser.parse_args()

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.head = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)]), nn.Linear(8, 4)
    def forward(self, x, y):
        for layer in self.layers:
            x = layer(x).tanh()
        return nn.functional.cross_entropy(self.head(x), y)

def wrapped(net):
    if given.kind == "ddp":
        return nn.parallel.DistributedDataParallel(net)
    from torch.distributed.fsdp import FullyShardedDataParallel
    return FullyShardedDataParallel(net, device_id=torch.device("cpu"), use_orig_params=given.kind == "fsdp1 orig")

def train(net):
    model = wrapped(net)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    torch.manual_seed(dist.get_rank())
    for _ in range(3):
        optimizer.zero_grad()
        (given.times * model(torch.randn(4, 8), torch.randint(4, (4,)))).backward()
        optimizer.step()

dist.init_process_group("gloo")
torch.manual_seed(0)
net = Net()
if given.kind.startswith("fsdp1"):
    with lockstep.record(net, "within"):
        train(net)
else:
    train(net)
sys.stdout.flush()
os._exit(0)  # with torch 2.13, a DDP module that outlives its process group may hang
"""
TORCHRUN = ("torch.distributed.run", "--nproc_per_node", "2", "--master_port", "PORT")
# The module of a launcher with its options, and how it is told that it starts a module
LAUNCHERS = {
    "deepspeed": ("deepspeed.launcher.runner", "--num_gpus", "2", "--master_port", "PORT", "--module"),
    "accelerate": ("accelerate.commands.launch", "--cpu", "--num_processes", "1", "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--module"),
    "torch.distributed.launch": ("torch.distributed.launch", "--nproc_per_node", "2", "--master_port", "PORT", "-m"),
}  # fmt: skip


def started(folder, launcher, *arguments):
    (folder / "train.py").write_text(SCRIPT)
    port = str(free_port())
    command = [sys.executable, "-m", *(port if one == "PORT" else one for one in launcher), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu"}
    environment |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "RANK": "0", "WORLD_SIZE": "1"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=200)


@pytest.mark.parametrize(
    "name, times, status",
    [
        ("deepspeed", "1", 0),
        ("deepspeed", "2", 1),
        ("accelerate", "1", 0),
        ("torch.distributed.launch", "1", 0),
    ],
)
def test_launchers(tmp_path, capsys, name, times, status):
    """What a launcher adds to the arguments goes to the script. Negative control: twice the gradient."""
    own = ("lockstep.record", "--output", "run", "train.py", "--times", times)
    done = started(tmp_path, LAUNCHERS[name], *own)
    assert done.returncode == 0, done.stderr
    assert judge.main([str(tmp_path / "run")]) == status
    assert "the gradient is 2 times" in capsys.readouterr().out or not status


@pytest.mark.parametrize("kind", ["fsdp1", "fsdp1 orig"])
def test_a_model_that_fsdp1_wraps_later_is_refused(tmp_path, kind):
    done = started(tmp_path, TORCHRUN, "train.py", "--kind", kind)
    assert done.returncode != 0
    assert (
        "the model is wrapped by FSDP1, whose flat parameters have no names of their own; use fully_shard"
        in done.stderr
    )


def test_some_modules_are_recorded(tmp_path, capsys):
    """All of them are trained. Negative control: a pattern of no module."""
    own = ("-m", "lockstep.record", "--output", "run", "--modules")
    done = started(tmp_path, TORCHRUN, *own, "layers.{0,2}", "train.py")
    assert done.returncode == 0, done.stderr
    names = Recording(tmp_path / "run").steps[0][0].places
    assert {name for name in names if name.startswith("forward/")} == {
        "forward/0/layers.0",
        "forward/0/layers.2",
    }
    assert judge.main([str(tmp_path / "run")]) == 0
    said = (
        "no output of layers.1 and head was recorded: each is judged together with the modules that follow it"
    )
    assert said in capsys.readouterr().out
    done = started(tmp_path, TORCHRUN, *own, "layer.{0,2}", "train.py")
    assert done.returncode != 0
    assert (
        "--modules 'layer.{0,2}': no module of Net has such a name; they are called layers, head and so on"
        in done.stderr
    )


@pytest.mark.parametrize(
    "name, pattern, found",
    [
        ("a.0.b", "*", True),
        ("a.0.b", "a.0", False),
        ("a.13", "a.{0,13}", True),
        ("a.1", "a.{0,13}", False),
        ("a.2.c", "a.{1,2}.{b,c}", True),
        ("a.2.d", "a.{1,2}.{b,c}", False),
        ("a", "", False),
    ],
)
def test_names_of_modules(name, pattern, found):
    assert matches(name, pattern) is found


def test_a_module_of_a_package(tmp_path, capsys):
    """As `python -m package.train` runs it. Negative controls: a factor of two, and no such module."""
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "scale.py").write_text("BY = 1.0\n")
    returned = "self.head(x), y)"
    script = SCRIPT.replace("import lockstep\n", "import lockstep\nfrom .scale import BY\n")
    (package / "train.py").write_text(script.replace(returned, f"BY * {returned}"))
    own = ("-m", "lockstep.record", "--output", "run", "-m")
    for times, status in (("1", 0), ("2", 1)):
        done = started(tmp_path, TORCHRUN, *own, "package.train", "--times", times)
        assert done.returncode == 0, done.stderr
        assert judge.main([str(tmp_path / "run")]) == status, capsys.readouterr()
    done = started(tmp_path, TORCHRUN, *own, "package.other")
    assert "-m package.other: there is no such module; name it as for python -m" in done.stderr
