"""torch: a DDP module that outlives its gloo process group may hang, for ever, when it is freed.

python findings/torch_ddp_outlives_its_group.py
"""

import faulthandler
import subprocess
import sys

import torch
import torch.distributed as dist
from finding import settle
from torch.nn.parallel import DistributedDataParallel

ROUNDS, SECONDS = 2000, 20


def rounds(*, freed_first: bool) -> None:
    """Train a module for three steps, end its process group, and again. A hang of `SECONDS` ends the process with status 1."""
    store = dist.HashStore()
    for number in range(ROUNDS):
        faulthandler.cancel_dump_traceback_later()
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        train(dist.PrefixStore(str(number), store), freed_first=freed_first)


def train(store: dist.Store, *, freed_first: bool) -> None:
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    for _ in range(3):
        model(torch.ones(2, 4)).sum().backward()
    if freed_first:
        del model
    dist.destroy_process_group()


def hangs(*, freed_first: bool) -> bool:
    command = [sys.executable, __file__, "freed first" if freed_first else "freed last"]
    return subprocess.run(command, stderr=subprocess.DEVNULL).returncode != 0


def check() -> tuple[bool, str]:
    last, first = hangs(freed_first=False), hangs(freed_first=True)
    seen = [
        f"{'hangs' if hung else 'ends'} if it is freed {order}"
        for hung, order in ((last, "last"), (first, "first"))
    ]
    return last and not first, f"in {ROUNDS} rounds, a DDP module {', and '.join(seen)}"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        rounds(freed_first=sys.argv[1] == "freed first")
    else:
        raise SystemExit(settle(check, libraries=("torch",)))
