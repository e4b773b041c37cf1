"""The three training scripts under torchrun at the full configuration: 2 layers of Qwen2.5-0.5B, 2 x 1024 tokens a rank, learning rate 1e-5, autocast.

    PYTHONPATH=. python benchmarks/gpu_strategies.py --output results/gpu_strategies.json

One rank over NCCL each; then DDP with two ranks that share the GPU over gloo. Losses, the median step, tokens per second and memory.
"""

import argparse
import json
import statistics
import subprocess
import tempfile
from pathlib import Path

from outputs import output

from lockstep.dumps import history
from lockstep.ground.files import write_result
from lockstep.plan.config import BASELINE
from lockstep.plan.strategies import SPECS

FULL = (
    "--model_name Qwen2.5-0.5B --num_layers 2 --batch_size 2 --seq_length 1024 --learning_rate 1e-5 "
    "--precision autocast --device cuda --overwrite"
)
ROWS = {  # name: (ranks, script, flags)
    f"{name}, 1 rank, nccl": (1, spec.program, "--dp_size 1" + " --tp_size 1" * ("tp" in spec.axes))
    for name, spec in SPECS.items()
}
ROWS["ddp, 2 ranks, gloo"] = 2, SPECS[BASELINE].program, "--dp_size 2 --backend gloo"
WARM_UP = 5


def measure(ranks: int, script: str, flags: str, steps: int) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        command = (
            f"torchrun --standalone --nproc_per_node {ranks} {script} {FULL} {flags} --debug_steps {steps}"
        )
        subprocess.run(
            [*command.split(), "--loss_output_dir", folder, "--storage_path", folder],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        record = history.read(next(Path(folder).glob("loss_*.json")))
    seconds = statistics.median(step["seconds"] for step in record.steps[WARM_UP:])
    return {
        "losses": [step["loss"] for step in record.steps],
        "median step, s": seconds,
        "tokens per second": record.steps[0]["tokens"] / seconds,
        "peak memory, GiB": [round(n / 2**30, 2) for n in record.run["peak_memory"]["bytes_by_rank"]],
        "versions": record.run["versions"],
    }


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--output", type=output('{\n "device": '), default=Path("runs/gpu_strategies.json"))
    options = parser.parse_args()
    found: dict = {"device": torch.cuda.get_device_name(), "runs": {}}
    for name, row in ROWS.items():
        found["runs"][name] = measure(*row, options.steps)
        print(name, {key: one for key, one in found["runs"][name].items() if key != "losses"}, flush=True)
    write_result(options.output, json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
