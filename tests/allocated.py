"""What torch's CPU allocator holds in real ranks, moment by moment: for benchmarks/memory_plan.py and test_memory_plan.py.

A small library is preloaded that counts the blocks of the allocator, in all threads. torch's profiler does not see a tensor that a thread of
gloo frees.
"""

import ctypes
import gc
import json
import os
import subprocess
from pathlib import Path

import preloaded
from ranks import run_groups

LIBRARY = "LOCKSTEP_ALLOCATOR"  # names the preloaded library to the ranks
STEPS = 3  # the optimizer has no state before the first update


def build(folder: Path) -> dict[str, str]:
    """Build the library in a folder; the environment of ranks that are to be counted."""
    library = folder / "allocator.so"
    source = Path(__file__).with_name("allocator.c")
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, source, "-ldl", "-lpthread"], check=True)
    return {"LD_PRELOAD": str(library), LIBRARY: str(library)}


def measure(cases: list[tuple[str, list[str]]], folder: Path) -> list[dict[str, int]]:
    """The most bytes that any rank holds at each moment, of runs (strategy, flags)."""
    from lockstep.plan import command_line

    server = preloaded.Server(build(folder))
    ranks = [command_line.parse_config(strategy, flags).num_workers for strategy, flags in cases]
    groups = [
        (count, "allocated:steps", folder / str(number), list(case))
        for number, (count, case) in enumerate(zip(ranks, cases, strict=True))
    ]
    run_groups(groups, timeout=600, server=server)
    found = []
    for number, count in enumerate(ranks):
        by_rank = [json.loads(path.read_text()) for path in sorted((folder / str(number)).glob("rank?.json"))]
        assert len(by_rank) == count
        found.append({moment: max(one[moment] for one in by_rank) for moment in by_rank[0]})
    return found


def steps(folder: Path, case: list) -> None:
    """One rank: build, parallelize, train; writes the peak of the allocator at every moment."""
    import torch
    import torch.distributed as dist

    from lockstep.inputs import architectures
    from lockstep.inputs.model import build_model
    from lockstep.plan import command_line
    from lockstep.training.strategy import factory_of

    strategy, arguments = case
    library = ctypes.CDLL(os.environ[LIBRARY])
    for name in ("allocated_bytes", "peak_bytes"):
        getattr(library, name).restype = ctypes.c_longlong
    config = command_line.parse_config(strategy, arguments)
    architecture, _ = architectures.resolve(config.model_name, config.num_layers)
    gc.collect()
    before, peaks = library.allocated_bytes(), {}

    def moment(name, action):
        library.forget_peak()
        result = action()
        peaks[name] = library.peak_bytes() - before
        return result

    built = [
        moment(
            "built",
            lambda: build_model(architecture, seed=0, attn_impl=config.attn_impl, init_weights_path=None)[0],
        )
    ]
    device = torch.device("cpu")
    live = moment("start", lambda: factory_of(config.spec)(built.pop(), config, config.mesh, device))
    torch.manual_seed(config.mesh.sample_share(dist.get_rank()))
    for _ in range(STEPS):
        shape = (config.gradient_accumulation_steps, config.batch_size, config.seq_length)
        ids = torch.randint(0, architecture["vocab_size"], shape)
        moment(
            "forward and backward", lambda ids=ids: float(live.forward_backward([(one, one) for one in ids]))
        )
        moment("update", live.update)
        gc.collect()
    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(peaks))
