"""Attributes that a script divides by the size of a tensor-parallel group: the reference has the whole."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TRAIN = """
import lockstep, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.n_heads, self.head_dim, self.calls = 4, 8, 64
        self.q, self.k, self.v, self.o = (torch.nn.Linear(32, 32, bias=False) for _ in range(4))
    def forward(self, x):
        q, k, v = (one(x).view(*x.shape[:2], self.n_heads, {size}).transpose(1, 2) for one in (self.q, self.k, self.v))
        x = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(x.transpose(1, 2).flatten(2)) * 64 / self.calls
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.attention, self.head = torch.nn.Embedding(64, 32), Attention(), torch.nn.Linear(32, 64)
    def forward(self, ids):
        x = self.embedding(ids)
        return self.head(x + self.attention(x))
def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    mesh, net = init_device_mesh("cpu", (2,)), Net()
    with {recording}:
        plan = dict(q=ColwiseParallel(), k=ColwiseParallel(), v=ColwiseParallel(), o=RowwiseParallel())
        parallelize_module(net.attention, mesh, plan)
        net.attention.calls //= 4  # by no size of the mesh: what the code says
        {divide}
        optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
        for _ in range(2):
            ids = torch.randint(0, 64, (4, 9))
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(net(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).backward()
            optimizer.step()
    dist.barrier()
if __name__ == "__main__":
    main()
"""
NONE, BEFORE = "torch.enable_grad()", 'lockstep.record(net, "run")'
DIVIDED = "net.attention.n_heads //= mesh.size()"


@pytest.mark.parametrize(
    ("size", "divide", "recording", "status"),
    [
        ("-1", DIVIDED, NONE, 0),
        ("self.head_dim", DIVIDED, BEFORE, 0),
        ("-1", "pass", NONE, 1),  # each rank has all heads, of half their size
    ],
)
def test_heads_of_a_shard(tmp_path, size, divide, recording, status):
    (tmp_path / "train.py").write_text(TRAIN.format(size=size, divide=divide, recording=recording))
    recorder = ["-m", "lockstep.record", "--output", "run"] if recording == NONE else []
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([*torchrun, *recorder, "train.py"], cwd=tmp_path, env=env, check=True)
    judge = [sys.executable, "-m", "lockstep.judge", "run"]
    found = subprocess.run(judge, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert found.returncode == status, found.stdout + found.stderr
    assert status == 0 or "forward/attention.o" in found.stdout.splitlines()[-1]
