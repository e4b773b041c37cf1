"""What capturing costs: a captured step against an uncaptured one of the same run, disk included.

    python benchmarks/capture_cost.py --output results/capture_cost.json

Qwen2.5-0.5B's sizes, 2 layers, sequence 128, autocast. Steps 1 to 3 are captured, 4 to 7 are not. Medians, without the first of each kind.
With --dumps, the comparison of dumps against a plain pass over the same bytes, in alternation.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

from outputs import output

from lockstep import compare
from lockstep.dumps import history
from lockstep.ground.files import write_result
from lockstep.plan.config import history_file
from lockstep.plan.mesh import Mesh
from lockstep.plan.strategies import SPECS
from lockstep.running import jobs

ROOT = Path(__file__).parents[1]

MESHES = {name: row.largest(Mesh(dp=2, tp=2)) for name, row in SPECS.items()}
CAPTURED, PLAIN = 3, 4


def train(strategy: str, folder: Path, model: list[str]) -> dict:
    arguments = [*model, "--debug_steps", str(CAPTURED + PLAIN), "--capture_steps", str(CAPTURED)]
    arguments += [
        "--capture_dir",
        str(folder),
        "--loss_output_dir",
        str(folder / "losses"),
        "--storage_path",
        str(folder),
    ]
    job = {"strategy": strategy, "arguments": arguments}
    jobs.start_all_groups([(MESHES[strategy].world_size, [job])], folder / "work")
    record = history.read(history_file(folder / "losses", strategy))
    seconds = [step["seconds"] for step in record.steps]
    captured, plain = statistics.median(seconds[1:CAPTURED]), statistics.median(seconds[CAPTURED + 1 :])
    size = sum(path.stat().st_size for path in (folder / strategy).iterdir()) / CAPTURED / 2**30
    row = {"captured_s": captured, "plain_s": plain, "ratio": captured / plain, "gib_per_step": size}
    return {
        **row,
        "peak_memory_gib": [round(n / 2**30, 2) for n in record.run["peak_memory"]["bytes_by_rank"]],
    }


def forget(folder: Path) -> None:
    """Take the dumps out of the page cache, so that they are read from the disk."""
    for path in folder.glob("*/step_*.safetensors"):
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def plain_pass(folder: Path) -> float:
    """Seconds to read every byte of the dumps once."""
    start, buffer = time.perf_counter(), bytearray(1 << 22)
    for path in sorted(folder.glob("*/step_*.safetensors")):
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return time.perf_counter() - start


def comparison(folder: Path) -> float:
    start = time.perf_counter()
    compare.judge([folder / name for name in (*MESHES, "reference")])
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--dumps", type=Path, help="a finished run_verification.py of one step, to time the comparison"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=output('{\n "cores": '))
    options = parser.parse_args()
    model = ["--model_name", "Qwen2.5-0.5B", "--num_layers", "2", "--seq_length", "128", "--batch_size", "2"]
    model += ["--dp_size", "2", "--precision", "autocast", "--learning_rate", "1e-5"]
    content: dict = {"cores": os.cpu_count()}
    if options.dumps:
        for where in ("disk", "page cache"):
            pairs = []
            for _ in range(options.repeats):
                pair = []
                for measure in (comparison, plain_pass):
                    if where == "disk":
                        forget(options.dumps)
                    pair.append(measure(options.dumps))
                pairs.append(pair)
                print(f"from the {where}: comparison {pair[0]:.1f} s, plain pass {pair[1]:.1f} s", flush=True)
            ratio = statistics.median(ours / plain for ours, plain in pairs)
            content[f"from the {where}"] = {"comparison_and_plain_pass_s": pairs, "median_ratio": ratio}
    else:
        for strategy in MESHES:
            with tempfile.TemporaryDirectory(dir=ROOT / "runs") as folder:
                content[strategy] = train(strategy, Path(folder), model)
            print(strategy, content[strategy], flush=True)
    if options.output:
        write_result(options.output, json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
