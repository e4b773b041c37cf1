"""Correct runs of many configurations: does any raise an alarm, and how near do they come?

    python benchmarks/clean_sweep.py --output runs/clean_sweep.json             540 configurations, an hour and a half
    python benchmarks/clean_sweep.py --precision fp32 --strategies examples/transformers_tp.py:TransformersTP

Every built-in tiny model on three meshes of up to four ranks (with 4 KV heads also tp 4 and dp 4), in fp32, autocast and bf16, with
AdamW and SGD, one and two micro batches, clipped and not, and with three micro batches clipped hard, each with a seed of its own; in turn
with labels for all tokens or for completions, samples padded left or right, documents joined or apart. Two captured steps of every
strategy, judged tensor by tensor and by their losses. Exit status 1 if there is an alarm.
"""

import argparse
import collections
import itertools
import json
import os
import tempfile
from pathlib import Path

from outputs import output

from lockstep import compare
from lockstep.dumps import history
from lockstep.ground.files import write_result
from lockstep.plan.command_line import parse_config
from lockstep.plan.config import BASELINE, CONTROL, JUDGED, history_file
from lockstep.plan.runs import Run, runs_of
from lockstep.plan.strategies import others
from lockstep.running import jobs
from lockstep.verdict import loss_curves

SMALL, WIDE = [(2, 1), (1, 2), (2, 2)], [(4, 1), (1, 4), (2, 2)]  # (dp, tp)
MESHES = {
    "tiny-qwen2": SMALL,
    "tiny-qwen2-odd-vocab": SMALL,
    "tiny-qwen3": SMALL,
    "tiny-llama": SMALL,
    "tiny-qwen2-4kv": WIDE,
    "tiny-mistral": SMALL,
    "tiny-gpt2": [(2, 1), (4, 1)],  # it is not cut over tp
}
FURTHER = [*itertools.product(["adamw", "sgd"], ["1", "2"], ["1.0", "0"]), ("adamw", "3", "0.1")]
# in turn: their number has no factor in common with those above
SAMPLES = (
    (),
    ("--labels", "completion"),
    ("--padding", "left"),
    ("--padding", "right", "--labels", "completion"),
    ("--documents", "apart"),
    ("--documents", "apart", "--labels", "completion"),
    (),
)
FLAGS = ("--optimizer", "--gradient_accumulation_steps", "--max_grad_norm")


def everything() -> list[tuple]:
    """(model, precision, dp, tp, further flags) of every configuration."""
    found = [
        (model, precision, *mesh, *(word for pair in zip(FLAGS, values, strict=True) for word in pair))
        for model, meshes in MESHES.items()
        for precision, mesh, values in itertools.product(JUDGED, meshes, FURTHER)
    ]
    return [(*case, *samples) for case, samples in zip(found, itertools.cycle(SAMPLES), strict=False)]


def named(names: str) -> list[Run]:
    """The runs of a list as of run_verification.py --strategies, beside the baseline."""
    return runs_of(names, parse_config(BASELINE, []), tp_size=2)[1:]


def train(cases: dict[tuple, int], folder: Path, strategies: list[Run]) -> None:
    """Capture two steps of every case, with its seed, with the baseline, these strategies and the reference."""
    runs: dict[tuple[int, int], list[dict]] = collections.defaultdict(list)
    references = []
    for (model, precision, dp, tp, *more), seed in cases.items():
        own = str(folder_of(folder, model, precision, dp, tp, *more))
        common = ["--model_name", model, "--precision", precision, "--seed", str(seed), "--dp_size", str(dp)]
        common += [
            "--batch_size",
            "2",
            "--seq_length",
            "64",
            "--debug_steps",
            "2",
            "--capture_steps",
            "2",
            *more,
        ]
        common += ["--capture_dir", own, "--loss_output_dir", own + "-losses", "--storage_path", str(folder)]
        runs[dp, 1].append({"strategy": BASELINE, "arguments": [*common, "--control"]})
        runs[dp, tp] += [
            {
                "strategy": run.spec.place,
                "arguments": [*common, "--tp_size", str(tp), *run.options, "--run_name", run.name],
            }
            for run in strategies
        ]
        references.append({"strategy": "reference", "arguments": common})
    groups = [
        (dp * tp, group) for (dp, tp), group in runs.items()
    ]  # docs/findings.md: a mesh for each process
    jobs.start_all_groups(
        [*groups, (None, references)], folder / "jobs"
    )  # the reference last: it replays the others


def folder_of(folder: Path, *case) -> Path:
    return folder / "-".join(map(str, case))


def judge(folder: Path, strategies: list[Run]) -> tuple[dict[str, list], dict[str, dict[str, float]]]:
    """(of one configuration the alarms, the runs that are not judged, and the tensors that are too small to judge; the worst multiple of what is
    tolerated, by strategy and kind of tensor).

    NOT JUDGED is no alarm: in bf16, clipped SGD may change no weight, since such small updates are rounded away.
    """
    names = [run.name for run in strategies]
    result = compare.judge([folder / name for name in (BASELINE, *names, "reference")])
    worst: dict[str, dict[str, float]] = {name: collections.defaultdict(float) for name in result.runs}
    for name, run in result.runs.items():
        for row in run.counted:
            worst[name][row.kind] = max(worst[name][row.kind], row.multiple)
        for row in run.by_themselves:
            kind = f"{row.kind} by itself"
            worst[name][kind] = max(worst[name][kind], row.multiple)
    alarms = [
        {"strategy": name, "verdict": result.verdict(name), "first": run.failures[:1]}
        for name, run in result.runs.items()
        if result.verdict(name) not in ("PASS", "NOT JUDGED")
    ]
    not_judged = [name for name in result.runs if result.verdict(name) == "NOT JUDGED"]
    losses = {
        name: history.read(history_file(Path(f"{folder}-losses"), name))
        for name in (BASELINE, *names, CONTROL)
    }
    tolerance = loss_curves.tolerance_for(losses[BASELINE], losses[CONTROL])
    for name in names:
        loss_curves.require_comparable_curves(losses[BASELINE], losses[name])
        curve = loss_curves.compare_curves(losses[BASELINE], losses[name], tolerance)
        alarms += [] if curve.passed else [{"strategy": name, "losses": curve.as_dict()}]
    unjudged = {row.name for run in result.runs.values() for row in run.rows if not row.judged}
    return {"alarms": alarms, "not judged": not_judged, "unjudged": sorted(unjudged)}, worst


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=output('{\n "alarms": '))
    parser.add_argument("--precision", choices=JUDGED, help="one of them (default: all)")
    parser.add_argument(
        "--strategies",
        default=",".join(others()),
        help="as of run_verification.py, without meshes (default: %(default)s)",
    )
    parser.add_argument(
        "--at_once", type=int, default=36, help="configurations per start of the workers (disk: 60 MB each)"
    )
    parser.add_argument("--every", type=int, default=1, metavar="N", help="one of N configurations")
    options = parser.parse_args()
    if "@" in options.strategies:
        parser.error("--strategies: every mesh is tried; leave @MESH out")
    rows, worst = [], collections.defaultdict(float)
    strategies = named(options.strategies)
    cases = {case: seed for seed, case in enumerate(everything()) if options.precision in (None, case[1])}
    cases = dict(list(cases.items())[:: options.every])
    while cases:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            now = {case: cases.pop(case) for case in list(cases)[: options.at_once]}
            train(now, folder, strategies)
            for case, seed in now.items():
                said, found = judge(folder_of(folder, *case), strategies)
                row = {
                    "model": case[0],
                    "precision": case[1],
                    "dp": case[2],
                    "tp": case[3],
                    "flags": case[4:],
                    "seed": seed,
                }
                rows.append({**row, **said})
                for strategy, kinds in found.items():
                    for kind, multiple in kinds.items():
                        key = f"{case[1]} {strategy} {kind}"
                        worst[key] = max(worst[key], multiple)
        unjudged = sum(bool(row["not judged"]) for row in rows)
        alarms = [row for row in rows if row["alarms"]]
        print(f"{len(rows)} configurations, not judged {unjudged}, alarms {alarms}", flush=True)
    for key in sorted(worst):
        print(f"{key:<36} worst {worst[key]:.2f} of what is tolerated")
    count = sum(bool(row["alarms"]) for row in rows)
    if options.output:
        content = {
            "alarms": count,
            "not judged": unjudged,
            "configurations": rows,
            "worst_multiple_of_tolerated": worst,
            "cores": os.cpu_count(),
        }
        write_result(options.output, json.dumps(content, indent=1) + "\n")
    return 1 if count else 0


if __name__ == "__main__":
    raise SystemExit(main())
