"""torch, gloo: ranks that share cores spin for a lock, unless their threads are batch threads.

python findings/torch_gloo_preemption.py
"""

import os
import statistics
import time

from finding import settle

PAIRS, STEPS = 3, 40


def schedule(policy: int) -> None:
    """Put all threads of this rank on two cores, and under a scheduling policy."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    for thread in map(int, os.listdir("/proc/self/task")):
        os.sched_setaffinity(thread, cores)
        os.sched_setscheduler(thread, policy, os.sched_param(0))


def train(policy: int) -> float:
    """Train a little, as one of the ranks. Returns the CPU time of a step in ms, summed over the ranks."""
    import torch
    import torch.distributed as dist

    schedule(policy)
    dist.barrier()
    before = time.process_time()
    a, activations = torch.randn(64, 64), torch.randn(8, 128, 64)
    for _ in range(STEPS):
        for _ in range(12):
            (activations.view(-1, 64) @ a).exp()
            dist.all_reduce(activations)
            activations /= dist.get_world_size()
    used = torch.tensor(time.process_time() - before)
    dist.all_reduce(used)
    return 1e3 * float(used) / STEPS


def check() -> tuple[bool, str]:
    normal, batch = zip(*((train(os.SCHED_OTHER), train(os.SCHED_BATCH)) for _ in range(PAIRS)), strict=True)
    normal, batch = (statistics.median(times) for times in (normal, batch))
    seen = f"four ranks on two cores use {normal:.1f} ms of CPU a step, {batch:.1f} ms as batch threads"
    return normal > 1.2 * batch, seen


if __name__ == "__main__":
    raise SystemExit(settle(check, libraries=("torch",), ranks=4))
