"""How much of the ideal speed-up a dimension reaches on this machine's cores, and where the rest goes.

    PYTHONPATH=. python benchmarks/dimension_speed.py --output results/dimension_speed.json

Each case is a set of ranks, one thread each, and is held against another one that does the same work. A step's wall time is divided
into what each rank computes (CPU time of its thread) and what it waits (the rest: collectives, bubbles, other ranks on its core). Medians
over steps, cases in turn.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

import torch
import torch.distributed as dist
from dimension_sweep import STRATEGY as ALL_AXES
from outputs import output

from lockstep.ground import origin
from lockstep.ground.files import write_result
from lockstep.inputs.model import build_model
from lockstep.plan import command_line
from lockstep.plan.config import BASELINE
from lockstep.plan.resources import make_batch_threads
from lockstep.plan.strategies import SPECS, others
from lockstep.training import loop as training
from lockstep.training import preflight
from lockstep.training.observe import versions
from lockstep.training.strategy import factory_of

MARK = "measured "
WARM_UP = 3
LONG = "--model_name narrow-qwen2 --seq_length 2048 --batch_size 1 --dp_size 1"
DEEP = "--model_name narrow-qwen2 --seq_length 256 --batch_size 4 --dp_size 1"
REAL = "--model_name Qwen2.5-0.5B --num_layers 2 --seq_length 256 --batch_size 2 --precision autocast --dp_size 2"
# case -> (strategy, ranks, flags, the case it is held against, its ideal wall time as a multiple of that one's)
CASES: dict[str, tuple[str, int, str, str | None, float]] = {
    "one rank, sequence 2048": (BASELINE, 1, LONG, None, 1.0),
    "cp 2, sequence 2048": (ALL_AXES, 2, f"{LONG} --tp_size 1 --cp_size 2", "one rank, sequence 2048", 1 / 2),
    "one rank, batch 4": (BASELINE, 1, DEEP, None, 1.0),
    "pp 2, 4 micro batches": (
        ALL_AXES,
        2,
        f"{DEEP} --tp_size 1 --pp_size 2 --pp_schedule 1f1b",
        "one rank, batch 4",
        (4 + 2 - 1) / 4 / 2,  # with m micro batches and p stages a rank works m of m + p - 1 turns
    ),
    "dp 2, real size": (BASELINE, 2, REAL, None, 1.0),
    **{
        f"{SPECS[name].label}, tp 2 x dp 2, real size": (
            name,
            4,
            f"{REAL} --tp_size 2",
            "dp 2, real size",
            1.0,
        )
        for name in others()
    },
}


def measure(strategy_name: str, steps: int, flags: list[str]) -> None:
    """As one rank: train, and print the median wall time and CPU time of a step of every rank, in seconds."""
    config = command_line.parse_config(strategy_name, flags)
    inputs = preflight.load_inputs(config)
    torch.set_num_threads(1)
    make_batch_threads()
    dist.init_process_group("gloo")
    rank, device = dist.get_rank(), torch.device("cpu")
    model, _ = build_model(inputs.architecture, seed=0, attn_impl=config.attn_impl, init_weights_path=None)
    strategy = factory_of(config.spec)(model, config, config.mesh, device)
    seconds = []
    for index in range(WARM_UP + steps):
        dist.barrier()
        begin, computed = time.perf_counter(), time.thread_time()
        training.train_step(strategy, inputs.batches, config.mesh, device, index)
        seconds.append((time.perf_counter() - begin, time.thread_time() - computed))
    mine = [statistics.median(column) for column in zip(*seconds[WARM_UP:], strict=True)]
    everyone: list[list[float]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, mine)
    if rank == 0:
        wall, computing = zip(*everyone, strict=True)
        print(MARK + json.dumps({"seconds": max(wall), "computing": list(computing)}), flush=True)
    dist.destroy_process_group()


def run(case: str, steps: int) -> dict:
    """One case, in ranks of its own."""
    strategy, ranks, flags, _, _ = CASES[case]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    command += [__file__, "--case", strategy, "--steps", str(steps), *flags.split(), "--device", "cpu"]
    done = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if not lines:
        raise SystemExit(f"{case} failed: {done.stderr[-2000:]}")
    return json.loads(lines[0].removeprefix(MARK))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", help=argparse.SUPPRESS)  # as one rank
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--output", type=output('{\n "origin": '))
    options, flags = parser.parse_known_args()
    if options.case:
        return measure(options.case, options.steps, flags)
    if flags:
        parser.error(f"unknown: {' '.join(flags)}")
    runs: dict[str, list[dict]] = {case: [] for case in CASES}
    for _ in range(options.repeats):
        for case in CASES:
            runs[case].append(run(case, options.steps))
            print(f"{case}: {runs[case][-1]}", flush=True)
    rows = []
    for case, (_, ranks, flags_of, other, ideal) in CASES.items():
        seconds = statistics.median(each["seconds"] for each in runs[case])
        computing = [
            statistics.median(of_rank)
            for of_rank in zip(*(each["computing"] for each in runs[case]), strict=True)
        ]
        row = {
            "case": case,
            "ranks": ranks,
            "flags": flags_of,
            "seconds": seconds,
            "computing by rank": computing,
        }
        if other is not None:
            pairs = [
                mine["seconds"] / theirs["seconds"]
                for mine, theirs in zip(runs[case], runs[other], strict=True)
            ]
            row |= {"held against": other, "ratio": statistics.median(pairs), "ratios": pairs, "ideal": ideal}
            row["of the ideal"] = ideal / row["ratio"]
            print(
                f"{case}: {row['ratio']:.3f} of {other}, ideal {ideal:.3f}: {100 * row['of the ideal']:.0f} %"
            )
        rows.append(row)
    if options.output:
        content = {"origin": origin.about(), "versions": versions(), "rows": rows, "runs": runs}
        write_result(options.output, json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
