"""The smallest relative error in a gradient that the tensor-level verdict catches.

    python benchmarks/detection_limit.py runs/verify --output results/detection_limit.json

Takes the dumps of finished verifications. Every gradient of AutoTP and FSDP in step 1 is spoilt in two ways: all of it
multiplied with 1 + e, or only its middling element (the median by size); e is halved until nothing is noticed any more.
Prints the smallest e that is noticed: over all gradients the best, the median and the worst.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from lockstep.config import STRATEGIES
from lockstep.distance import Distance
from lockstep.dump import Dump
from lockstep.verdict import ROUNDING, judge


def distance(mine: torch.Tensor, exact: torch.Tensor) -> Distance:
    error, norm = mine - exact, float(exact.norm())
    largest = float(exact.abs().max())
    return Distance(float(error.norm()), float(error.abs().max()), norm, largest, float(mine.norm()), norm, largest)


def limit(mine: torch.Tensor, exact: torch.Tensor, yardstick: Distance, name: str, *, whole: bool) -> float:
    """The smallest e = 2^-k that is noticed."""
    middling = int(mine.abs().flatten().median(dim=0).indices)
    smallest, error = float("inf"), 1024.0
    while error > 2.0**-40:
        spoilt = mine.clone()
        if whole:
            spoilt *= 1 + error
        else:
            spoilt.view(-1)[middling] *= 1 + error
        if not judge("", 1, name, distance(spoilt, exact), yardstick, ROUNDING["F32"]).too_far:
            break
        smallest, error = error, error / 2
    return smallest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="+")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    rows = []
    for folder in options.folder:
        reference, ddp = Dump(folder / "reference"), Dump(folder / "ddp")
        names = [name for name in ddp.steps["1"]["tensors"] if name.startswith("gradient/")]
        for strategy in ("deepspeed", "fsdp"):
            dump = Dump(folder / strategy)
            found: dict[str, dict[str, float]] = {"all": {}, "middling element": {}}
            for name in names:
                exact, mine = reference.tensor(1, name), dump.tensor(1, name).double()
                yardstick = distance(ddp.tensor(1, name).double(), exact)
                for what, limits in found.items():
                    limits[name] = limit(mine, exact, yardstick, name, whole=what == "all")
            for what, limits in found.items():
                row = {
                    "run": folder.name, "precision": dump.run["config"]["precision"], "strategy": STRATEGIES[strategy], "spoilt": what,
                    "best": min(limits.values()), "median": statistics.median(limits.values()),
                    "worst": max(limits.values()), "worst_of": max(limits, key=limits.get), "gradients": len(limits),
                }  # fmt: skip
                rows.append(row)
                print(" | ".join(f"{v:.1e}" if isinstance(v, float) else str(v) for v in row.values()), flush=True)
    if options.output:
        options.output.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
