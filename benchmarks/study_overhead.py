"""The share of a study's time that is its own: everything but the starts and the trainings of its runs.

    PYTHONPATH=. python benchmarks/study_overhead.py studies/zero_stages.toml --repeats 3 --output results/study_overhead.json

Each repeat runs the whole study as a program. The time within lockstep.running.jobs, which starts the ranks of every run, is that of the
trainings and of the float64 reference. What is left is imports, plan, histories, verdicts, report and figure.
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
from typing import Any

from outputs import output

import run_study
from lockstep.ground.files import write_result
from lockstep.running import jobs


def inside(study: str, folder: str) -> int:
    """The study, with its starts timed; the seconds within them go into a file of the folder."""
    seconds = []
    start = jobs.start_groups

    def timed(*arguments: Any, **named: Any) -> tuple[list[float], int]:
        begin = time.perf_counter()
        try:
            return start(*arguments, **named)
        finally:
            seconds.append(time.perf_counter() - begin)

    jobs.start_groups = timed
    status = run_study.main([study, "--output_dir", folder])
    Path(folder, "seconds.txt").write_text(str(sum(seconds)))
    return status


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("study")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=output('{\n "study": '))
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        raise SystemExit(inside(options.study, options.inside))
    repeats = []
    with tempfile.TemporaryDirectory() as place:
        for number in range(options.repeats):
            folder = Path(place, str(number))
            begin = time.perf_counter()
            subprocess.run(
                [sys.executable, __file__, options.study, "--inside", str(folder)],
                check=True,
                stdout=subprocess.DEVNULL,
            )
            whole = time.perf_counter() - begin
            trainings = float(Path(folder, "seconds.txt").read_text())
            repeats.append({"whole": whole, "trainings": trainings, "own share": 1 - trainings / whole})
            print(
                f"{whole:.1f} s, of which {whole - trainings:.1f} s the study's own: {repeats[-1]['own share']:.1%}"
            )
    share = statistics.median(each["own share"] for each in repeats)
    print(f"median {share:.1%}")
    if options.output:
        content = {
            "study": options.study,
            "cores": os.cpu_count(),
            "seconds": repeats,
            "median own share": share,
        }
        write_result(options.output, json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
