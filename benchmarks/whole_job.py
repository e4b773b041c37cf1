"""Wall-clock seconds of ./run_verification_main.sh against an older commit of it, in alternation.

    python benchmarks/whole_job.py --repeats 3 --output results/whole_job.json

Both in fp32 on the CPU, with the control run; the new side judges the tensors as well. Run the script once before, because its first run
installs packages. Prints the ratio pair by pair, and where the new script's time goes, by the times of its lines.
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

from outputs import output

from lockstep.ground.files import write_result

ROOT = Path(__file__).parents[1]
# Each script is started while the run before it trains, in one Ray instance; the control is a run of its own
OLDER = "a50ed17"
SETTINGS = {"PYTHON": sys.executable, "DEVICE": "cpu", "PRECISION": "fp32"}
# What a phase ends with. The first three are gone through once in each of the runs.
EVERY_RUN = {
    "script, Ray, controller: until the banner": " workers on ",
    "workers: imports, process group, weights, first step": "step 1/",
    "training": " steps in ",
}


def script(root: Path, folder: Path) -> tuple[float, dict[str, float]]:
    """Seconds of the whole script in a checkout, and of each phase summed over the runs."""
    start = last = time.perf_counter()
    phases = dict.fromkeys([*EVERY_RUN, "verdict and end"], 0.0)
    process = subprocess.Popen(
        [root / "run_verification_main.sh"],
        env={**os.environ, **SETTINGS, "OUTPUT_DIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    for line in process.stdout:
        for phase, mark in EVERY_RUN.items():
            if mark in line:
                now = time.perf_counter()
                phases[phase] += now - last
                last = now
    assert process.wait() == 0, f"{root}: failed"
    end = time.perf_counter()
    phases["verdict and end"] = end - last
    return end - start, phases


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--older", default=OLDER, help="commit to compare with (default: %(default)s)")
    parser.add_argument("--output", type=output('{\n "cores": '))
    options = parser.parse_args()
    pairs, phases = [], []
    with tempfile.TemporaryDirectory() as folder:
        older = Path(folder) / "older"
        older.mkdir()
        archive = subprocess.run(
            ["git", "-C", str(ROOT), "archive", options.older], check=True, capture_output=True
        ).stdout
        subprocess.run(["tar", "-x", "-C", str(older)], check=True, input=archive)
        for number in range(options.repeats):
            seconds, spent = script(ROOT, Path(folder) / f"new{number}")
            phases.append(spent)
            pairs.append((seconds, script(older, Path(folder) / f"old{number}")[0]))
            print(
                f"now {pairs[-1][0]:.1f} s, {options.older} {pairs[-1][1]:.1f} s, ratio {pairs[-1][0] / pairs[-1][1]:.3f}",
                flush=True,
            )
    ratio = statistics.median(ours / theirs for ours, theirs in pairs)
    spent = {phase: round(statistics.median(p[phase] for p in phases), 1) for phase in phases[0]}
    print(f"median ratio {ratio:.3f}; where the script's time goes (seconds, all runs together): {spent}")
    if options.output:
        content = {
            "cores": os.cpu_count(),
            "older": options.older,
            "seconds": pairs,
            "median_ratio": ratio,
            "script_phases_seconds": spent,
        }
        write_result(options.output, json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
