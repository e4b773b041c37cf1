"""A script that starts its ranks itself, and one whose modules are in folders that it adds to Python's path.

The ranks do not call destroy_process_group: with torch 2.13, a DDP module that outlives its process group may hang.
"""

import subprocess
import sys
from pathlib import Path

import pytest
from ranks import free_port

from lockstep import judge

ROOT = Path(__file__).parents[2]
SCRIPT = """
import functools, os, sys, torch, torch.distributed as dist, torch.multiprocessing as mp
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inside = torch.nn.Linear(8, 4)
    def forward(self, x, y):
        return torch.nn.functional.cross_entropy(self.inside(x), y)
def train(rank, times):
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="{port}")
    dist.init_process_group("gloo", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    torch.manual_seed(rank)
    for _ in range(3):
        optimizer.zero_grad()
        (times * model(torch.randn(4, 8), torch.randint(4, (4,)))).backward()
        optimizer.step()
def evaluate(rank):
    with torch.no_grad():
        Net()(torch.randn(4, 8), torch.randint(4, (4,)))
if __name__ == "__main__":
    kind = sys.argv[1]
    if kind == "nothing":
        mp.spawn(evaluate, nprocs=1)
    elif kind == "fork":
        start = functools.partial(mp.get_context("fork").Process, target=train)
        processes = [start(args=(rank, 1)) for rank in range(2)]
        for one in processes:
            one.start()  # Python waits for them at its end
    else:
        mp.spawn(train, args=(2 if kind == "twice" else 1,), nprocs=2)
"""


def recorded(folder, kind):
    (folder / "train.py").write_text(SCRIPT.format(port=free_port()))
    command = [sys.executable, "-m", "lockstep.record", "--output", str(folder / "run"), "train.py", kind]
    environment = {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("kind, status", [("spawn", 0), ("fork", 0), ("twice", 1)])
def test_ranks_that_the_script_starts(tmp_path, capsys, kind, status):
    done = recorded(tmp_path, kind)
    assert done.returncode == 0, done.stderr
    assert judge.main([str(tmp_path / "run")]) == status
    out = capsys.readouterr().out
    assert "step 2: 2 micro batches of 2 data-parallel ranks" in out
    assert ("the gradient is 2 times that of the mean over all tokens" in out) == (status == 1)


def test_processes_that_train_nothing(tmp_path):
    done = recorded(tmp_path, "nothing")
    said = "train.py, or a process that it started, called no model in training mode"
    assert done.returncode == 2 and said in done.stderr


BESIDE = """
import multiprocessing, sys, time, torch
def wait():
    time.sleep(1000)
def probe():
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        model(torch.randn(2, 3)).mean().backward()
        optimizer.step()
if __name__ == "__main__":
    multiprocessing.Process(target=wait, daemon=True).start()
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(6):
        optimizer.zero_grad()
        model(torch.randn(2, 4)).square().mean().backward()
        if step in (0, 3):
            process = multiprocessing.get_context(sys.argv[1]).Process(target=probe)
            process.start()
            process.join()
        optimizer.step()
"""


@pytest.mark.parametrize("kind", ["fork", "spawn"])
def test_processes_beside_the_one_that_trains(tmp_path, capsys, kind):
    (tmp_path / "train.py").write_text(BESIDE)
    command = [sys.executable, "-m", "lockstep.record", "--output", str(tmp_path / "run"), "train.py", kind]
    subprocess.run(command, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, check=True, timeout=120)
    assert judge.main([str(tmp_path / "run")]) == 0
    assert "whole run: 6 steps, 12 samples" in capsys.readouterr().out


TRAIN = """
import os, sys, torch
sys.path.{adds}os.path.join(os.path.dirname(__file__), "library"))
from net_{kind} import Net
from helper_{kind} import around
model = around(Net())
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(2):
    optimizer.zero_grad()
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
"""
NET = """
import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inside = torch.nn.Linear(8, 4)
    def forward(self, x):
        return self.inside(x)
"""


@pytest.mark.parametrize("adds", ["append(", "insert(0, "])
def test_folders_that_a_script_adds_to_the_path(tmp_path, capsys, adds):
    kind = adds[:6]
    (tmp_path / "library").mkdir()
    (tmp_path / "library" / f"net_{kind}.py").write_text(NET)
    (tmp_path / f"helper_{kind}.py").write_text(
        "import torch\ndef around(net):\n    return torch.nn.Sequential(net)\n"
    )
    (tmp_path / "train.py").write_text(TRAIN.format(adds=adds, kind=kind))
    command = [sys.executable, "-m", "lockstep.record", "--output", str(tmp_path / "run"), "train.py"]
    subprocess.run(command, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, check=True)
    assert judge.main([str(tmp_path / "run")]) == 0, capsys.readouterr()


METHODS = """
import sys, torch
from torch.nn import functional as F
class Coder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.code, self.back = torch.nn.Linear(8, 4), torch.nn.Linear(4, 8)
    def encode(self, x):
        return self.code(x)
    def loss(self, x):
        return F.mse_loss(self.back(self.encode(x).tanh()), x)
    def twice(self, x):
        return F.mse_loss(self.back(self.encode(x).tanh()), x) + self.encode(x).square().mean()
    def forward(self, x):
        return self.loss(x)
torch.manual_seed(0)
model = Coder()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(3):
    optimizer.zero_grad()
    x = torch.randn(4, 8)
    (model(x) if sys.argv[1] == "forward" else getattr(model, sys.argv[1])(x)).backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    "method, status, said",
    [
        ("forward", 0, "PASS: 2 steps"),
        (
            "loss",
            0,
            "; Linear alone is judged, which Coder.loss calls, as the loop does not call Coder itself",
        ),
        (
            "twice",
            2,
            "the loop calls Coder.twice, which calls Linear twice with the same, and not Coder itself",
        ),
    ],
)
def test_a_loop_that_calls_another_method_than_forward(tmp_path, capsys, method, status, said):
    (tmp_path / "train.py").write_text(METHODS)
    command = [sys.executable, "-m", "lockstep.record", "--output", "run", "train.py", method]
    subprocess.run(command, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, check=True, timeout=120)
    assert judge.main([str(tmp_path / "run")]) == status
    captured = capsys.readouterr()
    last = (captured.out + captured.err).splitlines()[-1]
    assert said in last and ("alone" in last) == (method == "loss"), last


BEFORE = """
import torch
class Net(torch.nn.Module):
    def __init__(self, inside):
        size = inside(torch.zeros(1, 4)).shape[1]  # before torch's constructor
        super().__init__()
        self.inside, self.head = inside, torch.nn.Linear(size, 2)
    def forward(self, x):
        return self.head(self.inside(x))
model = Net(torch.nn.Linear(4, 3))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(5, 4)).square().mean().backward()
    optimizer.step()
"""


def test_a_constructor_that_calls_a_part_first(tmp_path, capsys):
    (tmp_path / "train.py").write_text(BEFORE)
    command = [sys.executable, "-m", "lockstep.record", "--output", "run", "train.py"]
    subprocess.run(command, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, check=True, timeout=120)
    assert judge.main([str(tmp_path / "run")]) == 0
    assert "alone" not in capsys.readouterr().out
