"""Step time of every strategy at Qwen2.5-0.5B's real sizes (2 layers, sequence 256, autocast), in alternation.

    python benchmarks/real_size.py --repeats 3 --steps 8 --output results/real_size.json

Each run has a start of its own. Medians, without the first three steps. Prints step time, tokens per second and peak memory per rank, and
each step time as a ratio of the first strategy's, pair by pair.
"""

import argparse
import json
import os
import platform
import statistics
import tempfile
from pathlib import Path

from outputs import output

from lockstep.dumps import history
from lockstep.ground.files import write_result
from lockstep.plan.config import BASELINE, history_file
from lockstep.plan.mesh import Mesh
from lockstep.plan.strategies import SPECS, others
from lockstep.running import jobs

WARM_UP = 3
MESHES = {name: row.largest(Mesh(dp=2, tp=2)) for name, row in SPECS.items()}


def measure(strategy: str, steps: int, batch_size: int) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        arguments = [
            "--model_name",
            "Qwen2.5-0.5B",
            "--num_layers",
            "2",
            "--seq_length",
            "256",
            "--dp_size",
            "2",
        ]
        arguments += ["--batch_size", str(batch_size), "--precision", "autocast", "--learning_rate", "1e-5"]
        arguments += [
            "--debug_steps",
            str(WARM_UP + steps),
            "--loss_output_dir",
            folder,
            "--storage_path",
            folder,
        ]
        job = {"strategy": strategy, "arguments": arguments}
        jobs.start_all_groups([(MESHES[strategy].world_size, [job])], Path(folder) / "work")
        record = history.read(history_file(Path(folder), strategy))
    assert record.contract["optimizer_implementation"] == "fused", "the optimizer must be fused"
    seconds = statistics.median(step["seconds"] for step in record.steps[WARM_UP:])
    memory = record.run["peak_memory"]
    return {
        "seconds": seconds,
        "tokens_per_second": record.steps[0]["tokens"] / seconds,
        "peak_memory_gib": [round(n / 2**30, 2) for n in memory["bytes_by_rank"]],
        "memory_kind": memory["kind"],
        "versions": record.run["versions"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--batch_size", type=int, default=2)
    parser.add_argument("--strategies", nargs="+", default=[*others(), BASELINE], choices=SPECS)
    parser.add_argument("--output", type=output('{\n "machine": '))
    options = parser.parse_args()
    runs = {strategy: [] for strategy in options.strategies}
    for repeat in range(options.repeats):
        for strategy in options.strategies:
            runs[strategy].append(measure(strategy, options.steps, options.batch_size))
            print(f"{repeat + 1} {strategy:<10} {runs[strategy][-1]}", flush=True)
    summary = {s: statistics.median(run["seconds"] for run in r) for s, r in runs.items()}
    first, *rest = options.strategies
    ratios = {}
    for strategy in rest:
        pairs = zip(runs[strategy], runs[first], strict=True)
        ratios[strategy] = [mine["seconds"] / theirs["seconds"] for mine, theirs in pairs]
        median, each = statistics.median(ratios[strategy]), [round(ratio, 3) for ratio in ratios[strategy]]
        print(f"{SPECS[strategy].label} / {SPECS[first].label}: median {median:.3f} of {each}")
    print(f"median step seconds: {summary}")
    if options.output:
        machine = {"cores": os.cpu_count(), "processor": platform.machine(), "batch_size": options.batch_size}
        content = {"machine": machine, "runs": runs, "median_seconds": summary, f"over_{first}": ratios}
        write_result(options.output, json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
