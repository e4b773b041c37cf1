"""Correct runs of pipeline, context and sequence parallelism: does any raise an alarm?

    PYTHONPATH=. python benchmarks/dimension_sweep.py --seeds 10 --output results/dimension_sweep.json

Each dimension alone at 2 and 4, pairs, three and four together, on three tiny models in fp32, and what needs four KV heads on one that
has them; each dimension alone in autocast. Two captured steps of every run, judged tensor by tensor and by their losses. Exit status 1 if
there is an alarm.
"""

import argparse
import collections
import itertools
import json
import multiprocessing
import os
import tempfile
from pathlib import Path

from clean_sweep import SAMPLES
from outputs import output

from lockstep import compare
from lockstep.dumps import history
from lockstep.ground.files import write_result
from lockstep.plan.command_line import parse_config
from lockstep.plan.config import BASELINE, CONTROL, history_file
from lockstep.plan.strategies import SPECS
from lockstep.running import jobs
from lockstep.verdict import loss_curves

STRATEGY = next(row.name for row in SPECS.values() if {"pp", "cp"} <= set(row.axes))
ULYSSES = next(row.name for row in SPECS.values() if "sp_size" in row.also_called.values())
SEQUENCE = "--tp_size 2 --sequence_parallel"
ALONE = {
    "pp 2": "--pp_size 2",
    "cp 2": "--cp_size 2",
    "sp 2": SEQUENCE,
    "dp 2": "--dp_size 2 --batch_size 2",
    "ulysses 2": "--sp_size 2",
}
COMBINATIONS = {
    **ALONE,
    "pp 4": "--pp_size 4",
    "dp 4": "--dp_size 4 --batch_size 1",
    "cp 4": "--cp_size 4",
    "ulysses 4": "--sp_size 4",
    "pp 2, interleaved": "--pp_size 2 --pp_schedule interleaved1f1b",
    "pp 2 x dp 2": "--pp_size 2 --dp_size 2 --batch_size 2",
    "pp 2 x cp 2": "--pp_size 2 --cp_size 2",
    "pp 2 x tp 2": "--pp_size 2 --tp_size 2",
    "pp 2 x sp 2": f"--pp_size 2 {SEQUENCE}",
    "dp 2 x cp 2": "--dp_size 2 --batch_size 2 --cp_size 2",
    "dp 2 x sp 2": f"--dp_size 2 --batch_size 2 {SEQUENCE}",
    "dp 2 x ulysses 2": "--dp_size 2 --batch_size 2 --sp_size 2",
    "dp 2 x tp 2": "--dp_size 2 --batch_size 2 --tp_size 2",
    "cp 2 x tp 2": "--cp_size 2 --tp_size 2",
    "cp 2 x sp 2": f"--cp_size 2 {SEQUENCE}",
    "pp 2 x dp 2 x tp 2": "--pp_size 2 --dp_size 2 --batch_size 2 --tp_size 2",
    "pp 2 x dp 2 x cp 2 x tp 2": "--pp_size 2 --dp_size 2 --batch_size 2 --cp_size 2 --tp_size 2",
}
FOUR_HEADS = {"tp 4": "--tp_size 4", "sp 4": "--tp_size 4 --sequence_parallel"}
# Model, precision -> what is run.
SWEEP = {
    **{
        (model, precision): combinations
        for model in ("tiny-qwen2", "tiny-qwen3", "tiny-llama")
        for precision, combinations in (("fp32", COMBINATIONS), ("autocast", ALONE), ("bf16", ALONE))
    },
    ("tiny-qwen2-4kv", "fp32"): FOUR_HEADS,
}
FLAGS = [
    "--batch_size",
    "4",
    "--seq_length",
    "64",
    "--debug_steps",
    "2",
    "--capture_steps",
    "2",
    "--dp_size",
    "1",
    "--device",
    "cpu",
]


def cases(model: str, precision: str, seed: int) -> dict[str, tuple[str, list[str]]]:
    """Name -> strategy, and flags besides those that all share, of the runs of a model in a precision with a seed and its samples."""
    masked = {"--padding", "--documents"} & {*samples(seed)}  # Ulysses takes no mask
    return {
        name: (ULYSSES if "ulysses" in name else STRATEGY, ["--tp_size", "1", *flags.split()])
        for name, flags in SWEEP[model, precision].items()
        if not (masked and "ulysses" in name)
    }


def samples(seed: int) -> tuple[str, ...]:
    """Flags of the samples of all runs with a seed."""
    return SAMPLES[seed % len(SAMPLES)]


def train(folder: Path, model: str, precision: str, seeds: list[int]) -> None:
    """Every run with every seed, DDP's and the control's, and the reference of each seed, into FOLDER/SEED."""
    groups: dict[int, dict[tuple[int, ...], list[dict]]] = collections.defaultdict(
        lambda: collections.defaultdict(list)
    )
    references = []
    for seed in seeds:
        own = str(folder / str(seed))
        common = [
            *FLAGS,
            "--model_name",
            model,
            "--precision",
            precision,
            "--seed",
            str(seed),
            *samples(seed),
        ]
        common += ["--capture_dir", own, "--loss_output_dir", f"{own}/losses", "--storage_path", str(folder)]
        groups[1][(1,)].append({"strategy": BASELINE, "arguments": [*common, "--control"]})
        for name, (strategy, flags) in cases(model, precision, seed).items():
            arguments = [*common, *flags, "--run_name", name.replace(" ", "").replace(",", "-")]
            mesh = parse_config(strategy, arguments).mesh
            groups[mesh.world_size][tuple(mesh.sizes.values())].append(
                {"strategy": strategy, "arguments": arguments}
            )
        references.append({"strategy": jobs.REFERENCE, "arguments": common})
    started = [(ranks, runs) for ranks, meshes in groups.items() for runs in meshes.values()]
    jobs.start_all_groups([*started, (None, references)], folder / "jobs")


def judge(folder: Path, model: str, precision: str, seed: int) -> dict[str, dict]:
    """Name of a run -> its alarms, and the largest multiples of what is tolerated of a tensor, from the batch and by itself."""
    found = {}
    baseline, control = (history.read(history_file(folder / "losses", name)) for name in (BASELINE, CONTROL))
    tolerance = loss_curves.tolerance_for(baseline, control)
    for name in cases(model, precision, seed):
        run = name.replace(" ", "").replace(",", "-")
        result = compare.judge([folder / each for each in (BASELINE, run, "reference")])
        losses = history.read(history_file(folder / "losses", run))
        loss_curves.require_comparable_curves(baseline, losses)
        curve = loss_curves.compare_curves(baseline, losses, tolerance)
        alarms = [f"tensors {result.verdict(run)}: {result.runs[run].failures[:1]}"] * (
            result.verdict(run) != "PASS"
        )
        alarms += [] if curve.passed else [f"losses: {curve.as_dict()}"]
        own = result.runs[run]
        found[name] = {
            "alarms": alarms,
            "worst": own.nearest,
            "worst_by_itself": max((row.multiple for row in own.by_themselves), default=0.0),
        }
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--output", type=output('{\n "alarms": '))
    options = parser.parse_args()
    rows = []
    seeds = list(range(options.seeds))
    for model, precision in SWEEP:
        with tempfile.TemporaryDirectory() as name:
            train(Path(name), model, precision, seeds)
            folders = [Path(name) / str(seed) for seed in seeds]
            with multiprocessing.Pool(os.cpu_count()) as pool:
                judged = pool.starmap(
                    judge, zip(folders, itertools.repeat(model), itertools.repeat(precision), seeds)
                )
            for seed, runs in zip(seeds, judged, strict=True):
                for run, found in runs.items():
                    rows.append({"model": model, "precision": precision, "run": run, "seed": seed, **found})
        alarms = [row for row in rows if row["alarms"]]
        print(f"{model} {precision}: {len(rows)} runs so far, alarms {alarms}", flush=True)
    count = sum(bool(row["alarms"]) for row in rows)
    if options.output:
        content = {"alarms": count, "runs": rows, "cores": os.cpu_count()}
        write_result(options.output, json.dumps(content, indent=1) + "\n")
    return 1 if count else 0


if __name__ == "__main__":
    raise SystemExit(main())
