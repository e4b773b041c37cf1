"""What it costs to record two steps and to judge them: two layers of Qwen2.5-0.5B with its vocabulary, DDP over two ranks.

    PYTHONPATH=. python benchmarks/recording.py --work_dir runs/recording --output results/recording.json

A step has one micro batch of two sequences of 256 tokens on each rank, and AdamW. Times are medians on rank 0, in seconds. The judge's two ways to
compute are timed by a profiler, in a run of their own; what it does once, in the first step, counts as neither.

What later steps cost, the hashes of their samples, is lost in the noise of so large a step. So it is measured on a tiny model with the
same batch, as the difference of its steps with and without a recorder, in alternation.
"""

import argparse
import json
import os
import pstats
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from outputs import output

import lockstep
from lockstep.ground.files import write_result, write_text
from lockstep.inputs.architectures import BUILT_IN
from lockstep.inputs.shapes import from_config

BATCH, LENGTH, PLAIN, RECORDED = 2, 256, 5, 2
TINY, ROUNDS = 100, 9  # steps of the tiny model, each way, and how often
HOW = ("--workers 1", "--workers 2", "--ray")  # the judge's options


def worker(folder: Path) -> None:
    """One rank: steps without a recorder, recorded ones, and steps after these, whose samples alone are hashed."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = from_config({**BUILT_IN["Qwen2.5-0.5B"], "num_hidden_layers": 2}, attn_impl="sdpa").train()
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    generator = torch.Generator().manual_seed(dist.get_rank())

    def step() -> float:
        ids = torch.randint(0, model.config.vocab_size, (BATCH, LENGTH), generator=generator)
        began = time.perf_counter()
        optimizer.zero_grad()
        wrapped(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        dist.barrier()
        return time.perf_counter() - began

    step()
    found = {"plain": [step() for _ in range(PLAIN)]}
    began = time.perf_counter()
    with lockstep.record(model, folder / "run", steps=RECORDED):
        found["recorded"] = [step() for _ in range(RECORDED)]
        step()  # which writes the last recorded one
        found["all recorded"] = [time.perf_counter() - began]
    found["more after"] = more_after(folder / "tiny")
    if dist.get_rank() == 0:
        write_text(folder / "times.json", json.dumps(found))


def more_after(folder: Path) -> list[float]:
    """How many seconds longer a step is after the recorded ones, by the medians of each round of alternation."""
    model = torch.nn.Embedding(1000, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

    def step() -> float:
        ids = torch.randint(0, 1000, (BATCH, LENGTH))
        began = time.perf_counter()
        optimizer.zero_grad()
        model(ids).mean().backward()
        optimizer.step()
        return time.perf_counter() - began

    found = []
    for number in range(ROUNDS):
        plain = statistics.median(step() for _ in range(TINY))
        with lockstep.record(model, folder / str(number), steps=1):
            step()
            step()  # which writes the recorded one
            found.append(statistics.median(step() for _ in range(TINY)) - plain)
    return found


def judge(folder: Path, *options: str) -> float:
    began = time.perf_counter()
    command = [sys.executable, "-m", "lockstep.judge", str(folder), *options]
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "2"})
    return time.perf_counter() - began


def alone_times_free(folder: Path) -> float:
    """How long each module by itself takes, times the pass from the batch."""
    path = folder.parent / "judge.profile"
    command = [sys.executable, "-m", "cProfile", "-o", str(path), "-m", "lockstep.judge", str(folder)]
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "2"})
    seconds = {
        (Path(file).name, name): cumulative
        for (file, _, name), (_, _, _, cumulative, _) in pstats.Stats(str(path)).stats.items()
    }
    once = seconds["free_pass.py", "_not_linear"] + seconds["task.py", "judge"]
    return seconds["step.py", "_judge_alone"] / (seconds["step.py", "_judge_free"] - once)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work_dir", type=Path, default=Path("runs/recording"))
    parser.add_argument("--output", type=output('{\n "step": '))
    options = parser.parse_args()
    if options.output is None:
        return worker(options.work_dir)
    options.work_dir.mkdir(parents=True, exist_ok=True)
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", __file__]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*start, "--work_dir", str(options.work_dir)], check=True, env=environ)
    times = json.loads((options.work_dir / "times.json").read_text())
    judged = {how: judge(options.work_dir / "run", *how.split()) for how in HOW}
    plain = statistics.median(times["plain"])
    recording = times["all recorded"][0] - plain  # the step after them writes the last
    files = [path for path in (options.work_dir / "run").rglob("*") if path.is_file()]
    found = {
        "step": plain,
        "recorded step": recording / RECORDED,
        "recorded step, times a step": recording / RECORDED / plain,
        "step after, more seconds": statistics.median(times["more after"]),
        "step after, times a step": 1 + statistics.median(times["more after"]) / plain,
        "judge, of two steps, by its options": judged,
        "judge, times the recorded steps": judged[HOW[0]] / (RECORDED * plain),
        "judge, each module by itself, times from the batch": alone_times_free(options.work_dir / "run"),
        "bytes of a rank": sum(path.stat().st_size for path in files) // 2,
        "torch": torch.__version__,
    }
    write_result(options.output, json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))
    return None


if __name__ == "__main__":
    main()
