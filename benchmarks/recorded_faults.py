"""The planted faults of the built-in strategies as somebody who records the run would meet them: does `lockstep.judge` find each?

    PYTHONPATH=. python benchmarks/recorded_faults.py --output results/recorded_faults-fp32.json
    PYTHONPATH=. python benchmarks/recorded_faults.py --precision autocast --output results/recorded_faults-autocast.json
    PYTHONPATH=. python benchmarks/recorded_faults.py tie_broken --output runs/recorded_faults.json     some of the catalogue

The runs are those of run_faults.py. `lockstep.record` records two steps of each, and the judge is told neither the strategy nor its options.
"Against DDP" is what it says besides with `--against` a recording of DDP without a fault, with the same flags.
Pipelines are left out: a stage is no model, and its recording is refused. Exit status: 0 every run without a fault has PASS, and is the same
training as DDP; 1 one has not; 2 a usage error.
"""

import argparse
import collections
import concurrent.futures
import contextlib
import io
import json
import multiprocessing
import os
import sys
import tempfile
import time
from pathlib import Path

import run_faults
from lockstep.ground.errors import run_program
from lockstep.ground.files import write_result
from lockstep.ground.words import in_markdown
from lockstep.plan.config import BASELINE
from lockstep.plan.strategies import recorded as description
from lockstep.running import jobs

BEGINS = '{\n "of": "recorded faults"'
TITLE = "# Planted faults in recorded runs, "
STEPS = 2
COLUMNS = ("fault", "strategy", "mesh and flags", "verdict", "what the judge says", "against DDP")
AGAINST = "against "  # how sentences of --against begin
VERDICTS = {0: "PASS", 1: "FAIL", 2: "not judged"}


def record_every_run() -> None:
    """From now on the loop of the built-in strategies records every run that it trains, into `recording` beside its losses."""
    import lockstep
    from lockstep.training import loop

    train = loop.run_with_control

    def recorded(config, inputs, make, device):
        with contextlib.ExitStack() as recordings:

            def made(model, *rest):
                recordings.enter_context(
                    lockstep.record(model, Path(config.loss_output_dir) / "recording", STEPS)
                )
                return make(model, *rest)

            return train(config, inputs, made, device)

    loop.run_with_control = recorded


def run_jobs() -> int:
    """What lockstep/running/jobs.py does, in the process that it starts, recorded."""
    preload = jobs.preload

    def preload_and_record(groups):
        preload(groups)
        record_every_run()

    jobs.preload = preload_and_record
    return jobs.main()


def judged(pair: tuple[Path, Path]) -> tuple[int, str, str]:
    """(exit status of the judge of a recording, the last line, what --against another recording says), the first two without that."""
    from lockstep import judge

    folder, other = pair
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        status = judge.main([str(folder), "--against", str(other)])
    lines = [line for line in said.getvalue().splitlines() if not line.startswith(("report", "Report"))]
    last = next((line for line in reversed(lines) if line.strip()), "")
    if status > 1:
        return status, last, ""
    report = json.loads((folder / "report.json").read_text())
    against = [one.partition("that run: ")[2] for one in report["run"]["wrong"] if one.startswith(AGAINST)]
    if last.startswith(f"FAIL: {AGAINST}"):
        status, last = 0, f"PASS: {len(report['steps'])} steps"
    return status, last, against[0] if against else "the same"


def judge_all(pairs: list[tuple[Path, Path]]) -> list[tuple[int, str, str]]:
    """`judged` of each, in as many processes as there are cores."""
    with concurrent.futures.ProcessPoolExecutor(
        os.cpu_count(), multiprocessing.get_context("fork"), initializer=_one_thread
    ) as processes:
        return list(processes.map(judged, pairs))


def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)


def entry(
    run: run_faults.Planned, trained: float | str, found: tuple[int, str, str] | None
) -> dict[str, str | int | None]:
    from lockstep.faults import CATALOGUE

    group, name, strategy = run
    axes = [
        f"{axis} {size}" for axis, size in group.rows[strategy].largest(group.mesh).sizes.items() if size > 1
    ]
    status, said, against = found or (2, f"not trained: {trained}", "")
    return {
        "fault": name,
        "strategy": strategy,
        "run": ", ".join([group.model, *axes, " ".join([*group.arguments, *group.flags])]).rstrip(", "),
        "story": "" if name == run_faults.CLEAN else CATALOGUE[name].story,
        "verdict": VERDICTS.get(status, "internal error"),
        "said": said.removeprefix("python -m ").replace(str(group.folder), "RUN"),
        "against": against,
    }


def summary(rows: list[dict]) -> list[str]:
    lines = []
    for label, chosen in (
        ("without a fault", [row for row in rows if row["fault"] == run_faults.CLEAN]),
        ("with a fault", [row for row in rows if row["fault"] != run_faults.CLEAN]),
    ):
        counts = collections.Counter(row["verdict"] for row in chosen)
        other = sum(row["verdict"] == "PASS" and row["against"] != "the same" for row in chosen)
        counted = ", ".join(f"{number} {what}" for what, number in counts.items())
        lines.append(
            f"{len(chosen)} runs {label}: {counted}; of those that pass, {other} are not the training of DDP"
        )
    return lines


def run(options: argparse.Namespace, folder: Path) -> int:
    begin = time.monotonic()
    pairs = [(fault, row) for fault, row in run_faults.choose(options) if fault.mesh.pp == 1]
    by_mesh = run_faults.planned(run_faults.grouped(pairs, folder, options), (BASELINE,))
    trained = run_faults.run_all(by_mesh, folder)
    number = sum(map(len, by_mesh.values()))
    print(f"{number} runs trained in {time.monotonic() - begin:.0f} s", flush=True)
    places = {run: run[0].history_folder(run[2], run[1]) / "recording" for run in trained}
    there = [run for run, place in places.items() if not isinstance(trained[run], str) and place.is_dir()]
    ddp = {run[0]: places[run] for run in there if run[1:] == (run_faults.CLEAN, BASELINE)}
    found = dict(zip(there, judge_all([(places[run], ddp[run[0]]) for run in there]), strict=True))
    rows = [entry(run, seconds, found.get(run)) for run, seconds in trained.items()]
    table = in_markdown(
        [
            COLUMNS,
            *(
                (
                    row["fault"],
                    description(row["strategy"]).label,
                    row["run"],
                    row["verdict"],
                    row["said"].replace("|", "/"),
                    row["against"].replace("|", "/"),
                )
                for row in rows
            ),
        ]
    )
    lines = [*summary(rows), f"trained, recorded and judged in {time.monotonic() - begin:.0f} s"]
    print("\n".join(lines))
    content = {"of": "recorded faults", "precision": options.precision, "rows": rows}
    write_result(options.output, json.dumps(content, indent=1) + "\n")
    write_result(
        options.output.with_suffix(".md"),
        "\n".join([TITLE + options.precision, "", *table, "", *lines]) + "\n",
    )
    clean = [row for row in rows if row["fault"] == run_faults.CLEAN]
    return int(any((row["verdict"], row["against"]) != ("PASS", "the same") for row in clean))


def main() -> int:
    from outputs import output

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("faults", nargs="*", help="names of faults (default: all)")
    parser.add_argument("--precision", choices=run_faults.JUDGED, default="fp32")
    parser.add_argument("--output", type=output(BEGINS, md=TITLE), required=True)
    parser.add_argument("--work_dir", type=Path, help="folder that keeps the runs (default: a temporary one)")
    options = parser.parse_args()
    options.strategy, options.steps = None, STEPS + 1
    jobs.NAME = "benchmarks.recorded_faults"
    if options.work_dir:
        options.work_dir.mkdir(parents=True)
        return run(options, options.work_dir.absolute())
    with tempfile.TemporaryDirectory() as folder:
        return run(options, Path(folder))


if __name__ == "__main__":
    started = len(sys.argv) == 2 and sys.argv[1].endswith("jobs.json")
    sys.exit(run_program("recorded_faults.py", run_jobs if started else main))
