"""Correct runs of many configurations: how far are they from the float64 reference, and does any raise an alarm?

    python benchmarks/clean_sweep.py --seeds 10 --output results/clean_sweep.json

Every built-in tiny model on meshes (dp, tp) = (2, 1), (1, 2), (2, 2), in fp32 and autocast, three captured steps, DDP,
AutoTP and FSDP against the reference. Writes the largest ratio of each strategy's distance to DDP's.
"""

import argparse
import collections
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
MODELS = ["tiny-qwen2", "tiny-qwen2-odd-vocab", "tiny-qwen3", "tiny-llama"]
PRECISIONS = ["fp32", "autocast"]
MESHES = [(2, 1), (1, 2), (2, 2)]


def worker(jobs: list[dict]) -> None:
    """Train one configuration after the other in this process group."""
    import torch
    import torch.distributed as dist

    import train_ddp
    import train_deepspeed
    import train_fsdp
    from lockstep import config as config_module
    from lockstep import reference, training

    make = {"ddp": train_ddp, "deepspeed": train_deepspeed, "fsdp": train_fsdp}
    torch.set_num_threads(1)
    if config_module.launched_in_place():
        dist.init_process_group("gloo")
    else:  # the reference: alone
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for job in jobs:
        strategy = job["strategy"]
        config = config_module.parse_config("ddp" if strategy == "reference" else strategy, job["arguments"])
        inputs = config_module.load_inputs(config)
        if strategy == "reference":
            reference.run(config, inputs)
        else:
            training.run(config, inputs, make[strategy].make_strategy, torch.device("cpu"))
    os._exit(0)  # the groups of many strategies are not worth taking down one by one


def start(world_size: int | None, jobs: list[dict], folder: Path) -> None:
    """Run the jobs in so many ranks, or, without a number, in one process outside any launcher."""
    path = folder / "jobs.json"
    path.write_text(json.dumps(jobs))
    command = [sys.executable]
    if world_size:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(world_size)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, __file__, "--worker", str(path)], env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stdout[-3000:] + done.stderr[-6000:])


def train(cases: list[tuple], seed: int, folder: Path) -> None:
    """Capture three steps of every (model, precision, dp, tp, more flags) with all three strategies and the reference."""
    jobs = collections.defaultdict(list)
    for model, precision, dp, tp, *more in cases:
        common = ["--model_name", model, "--precision", precision, "--seed", str(seed), "--dp_size", str(dp)]
        common += ["--batch_size", "2", "--seq_length", "64", "--debug_steps", "3", "--capture_steps", "3"]
        common += ["--capture_dir", str(folder_of(folder, model, precision, dp, tp, *more)), *more]
        common += ["--loss_output_dir", str(folder), "--storage_path", str(folder)]
        jobs[dp, 1, "ddp"].append({"strategy": "ddp", "arguments": common})
        for strategy in ("deepspeed", "fsdp"):
            jobs[dp, tp, "sharded"].append({"strategy": strategy, "arguments": [*common, "--tp_size", str(tp)]})
        jobs[None].append({"strategy": "reference", "arguments": common})
    for key in sorted(jobs, key=lambda key: key is None):  # the reference last: it replays the others
        start(key and key[0] * key[1], jobs[key], folder)


def folder_of(folder: Path, *case) -> Path:
    return folder / "-".join(map(str, case))


def judge(folder: Path) -> tuple[list[dict], list[str], dict[str, dict[str, float]]]:
    """Alarms of one configuration, tensors too small to judge, and the worst multiple of what is tolerated, by strategy
    and kind of tensor."""
    from lockstep.compare import compare
    from lockstep.dump import Dump

    dumps = {name: Dump(folder / name) for name in ("ddp", "deepspeed", "fsdp")}
    replays = {name: Dump(folder / f"replay_{name}") for name in dumps}
    result = compare(Dump(folder / "reference"), dumps, replays)
    worst: dict[str, dict[str, float]] = {name: collections.defaultdict(float) for name in dumps}
    for row in result.rows:
        kind = row.name.split("/")[0]
        worst[row.strategy][kind] = max(worst[row.strategy][kind], row.multiple)
    alarms = [
        {"strategy": name, "verdict": result.verdict(name), "first": result.failures(name)[:1]}
        for name in dumps
        if result.verdict(name) != "PASS"
    ]
    return alarms, sorted({row.name for row in result.rows if not row.judged}), worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(json.loads(options.worker.read_text()))
    rows, worst = [], collections.defaultdict(float)
    for seed in range(options.seeds):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            cases = [(model, precision, *mesh) for model in MODELS for precision in PRECISIONS for mesh in MESHES]
            train(cases, seed, folder)
            for case in cases:
                alarms, unjudged, found = judge(folder_of(folder, *case))
                row = {"model": case[0], "precision": case[1], "dp": case[2], "tp": case[3], "seed": seed}
                rows.append({**row, "alarms": alarms, "unjudged": unjudged})
                for strategy, kinds in found.items():
                    for kind, multiple in kinds.items():
                        key = f"{case[1]} {strategy} {kind}"
                        worst[key] = max(worst[key], multiple)
        print(f"seed {seed}: {len(rows)} configurations, alarms {[r for r in rows if r['alarms']]}", flush=True)
    for key in sorted(worst):
        print(f"{key:<32} worst {worst[key]:.2f} of what is tolerated")
    if options.output:
        content = {"configurations": rows, "worst_multiple_of_tolerated": worst, "cores": os.cpu_count()}
        options.output.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
