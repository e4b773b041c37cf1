"""How far do correct runs go beyond one control run? What CONTROL_FACTOR in lockstep/compare_losses.py is made of.

    python benchmarks/noise_floor.py --work_dir runs/noise --output results/noise_floor.json          about 8 minutes

tiny-qwen2 at two batch shapes, three seeds, fp32 and autocast, 100 steps: DDP, its control run, AutoTP and FSDP. For
loss and gradient norm the largest ratio, over the steps, of a strategy's distance from DDP to the control's largest
distance so far (at least an eighth of what is always allowed); and which comparisons pass without and with the control.
"""

import argparse
import itertools
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from lockstep import history, jobs
from lockstep.config import SHARDED
from lockstep.compare_losses import CONTROL_FACTOR, RULES, loss_gap, norm_gap, compare, tolerance_for

SHAPES = {"8x128": ("8", "128"), "2x64": ("2", "64")}
CASES = list(itertools.product(RULES, SHAPES, range(3)))


def train(folder: Path) -> None:
    two, four = [], []
    for precision, shape, seed in CASES:
        batch, sequence = SHAPES[shape]
        common = ["--precision", precision, "--seed", str(seed), "--batch_size", batch, "--seq_length", sequence, "--dp_size", "2"]
        common += ["--loss_output_dir", str(folder / f"{precision}-{shape}-{seed}"), "--storage_path", str(folder)]
        two += [{"strategy": "ddp", "arguments": common}, {"strategy": "ddp", "arguments": [*common, "--noise_control"]}]
        four += [{"strategy": strategy, "arguments": [*common, "--tp_size", "2"]} for strategy in SHARDED]
    jobs.start_all(2, two, folder / "ranks-2")
    jobs.start_all(4, four, folder / "ranks-4")


def ratio(baseline, control, other, gap, least: float) -> float:
    """The largest gap in units of the control's largest so far."""
    noise = itertools.accumulate((gap(*pair) for pair in zip(baseline.steps, control.steps, strict=True)), max)
    gaps = (gap(*pair) for pair in zip(baseline.steps, other.steps, strict=True))
    return max(mine / max(allowed, least) for mine, allowed in zip(gaps, noise, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work_dir", type=Path, required=True, help="runs that are there already are not made again")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    folder = options.work_dir.absolute()
    if not folder.exists():
        train(folder)
    rows = []
    for precision, shape, seed in CASES:
        runs = {name: history.read(history.path_of(folder / f"{precision}-{shape}-{seed}", name))
                for name in ("ddp", history.CONTROL, *SHARDED)}  # fmt: skip
        baseline, control = runs["ddp"], runs[history.CONTROL]
        fixed = tolerance_for(baseline)
        for name in SHARDED:
            rows.append({
                "precision": precision, "shape": shape, "seed": seed, "strategy": name,
                "loss_ratio": ratio(baseline, control, runs[name], loss_gap, fixed.first / CONTROL_FACTOR),
                "grad_norm_ratio": ratio(baseline, control, runs[name], norm_gap, RULES[precision].first_grad_norm / CONTROL_FACTOR),
                "passes_without_control": compare(baseline, runs[name], fixed).passed,
                "passes_with_control": compare(baseline, runs[name], tolerance_for(baseline, control)).passed,
            })  # fmt: skip
            print(" | ".join(f"{value:.2f}" if isinstance(value, float) else str(value) for value in rows[-1].values()))
    for what in ("loss_ratio", "grad_norm_ratio"):
        print(f"largest {what}: {max(row[what] for row in rows):.2f}")
    for what in ("passes_without_control", "passes_with_control"):
        print(f"{what}: {sum(row[what] for row in rows)} of {len(rows)}")
    if options.output:
        options.output.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
