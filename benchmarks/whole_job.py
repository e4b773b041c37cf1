"""./run_verification_main.sh against the same three trainings started by plain torchrun one after the other.

    python benchmarks/whole_job.py --repeats 5 --output results/whole_job.json

Without the control run, which the other side does not make. Everything is installed and DeepSpeed's extension built. Whole
wall-clock seconds, in alternation; prints the ratio pair by pair, and where the script's time goes by the times at which its
lines appear.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
ENVIRONMENT = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "DEVICE": "cpu", "NOISE_FLOOR": "0"}
# What a phase ends with, in the order of a run. The later scripts start while the run before them trains.
FIRST_SCRIPT = {"Ray's start, checks": "workers on", "first script: import ray.train, controller": "Requesting resources"}
EVERY_RUN = {
    "workers: start, import torch, process group": "Setting up process group",
    "workers: import transformers, load weights": "Loaded initial weights",
    "strategy set-up and first step": "step 1/",
    "training": " steps, loss",
}


def script(folder: Path) -> tuple[float, dict[str, float]]:
    """Seconds of the whole script, and of each phase summed over the three runs."""
    start = last = time.perf_counter()
    phases = dict.fromkeys([*FIRST_SCRIPT, *EVERY_RUN, "comparison and end"], 0.0)
    process = subprocess.Popen(
        [ROOT / "run_verification_main.sh"], env={**ENVIRONMENT, "OUTPUT_DIR": str(folder)},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    for line in process.stdout:
        for phase, mark in (FIRST_SCRIPT | EVERY_RUN).items():
            if mark in line and not (phase in FIRST_SCRIPT and phases[phase]):
                now = time.perf_counter()
                phases[phase] += now - last
                last = now
    assert process.wait() == 0
    end = time.perf_counter()
    phases["comparison and end"] = end - last
    return end - start, phases


def by_torchrun(folder: Path) -> float:
    start = time.perf_counter()
    for strategy, ranks in (("ddp", 2), ("deepspeed", 4), ("fsdp", 4)):
        command = [BIN / "torchrun", "--nproc_per_node", str(ranks), f"train_{strategy}.py", "--dp_size", "2"]
        command += ["--loss_output_dir", folder, "--storage_path", folder, "--init_weights_path", folder / "w.safetensors"]
        command += ["--save_init_weights"] if strategy == "ddp" else []
        environment = {**ENVIRONMENT, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True, env=environment)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    pairs, phases = [], []
    for _ in range(options.repeats):
        with tempfile.TemporaryDirectory() as folder:
            seconds, spent = script(Path(folder))
            phases.append(spent)
            pairs.append((seconds, by_torchrun(Path(folder))))
        print(f"script {pairs[-1][0]:.1f} s, torchrun {pairs[-1][1]:.1f} s, ratio {pairs[-1][0] / pairs[-1][1]:.3f}", flush=True)
    ratio = statistics.median(ours / theirs for ours, theirs in pairs)
    spent = {phase: round(statistics.median(p[phase] for p in phases), 1) for phase in phases[0]}
    print(f"median ratio {ratio:.3f}; where the script's time goes (seconds, three runs together): {spent}")
    if options.output:
        content = {"cores": os.cpu_count(), "seconds": pairs, "median_ratio": ratio, "script_phases_seconds": spent}
        options.output.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
