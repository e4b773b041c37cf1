"""Correct runs of models and optimizers drawn at random: does any raise an alarm, and how near do they come?

    PYTHONPATH=. python benchmarks/model_sweep.py --number 300 --output results/model_sweep.json     about an hour on two cores
    PYTHONPATH=. python benchmarks/model_sweep.py --precision autocast --output results/model_sweep-autocast.json

Architectures of benchmarks/models.py with other sizes, heads, depths, windows, ties, optimizers, micro batches and clipping, each with a
seed of its own: two captured steps of DDP and FSDP at dp 2, judged tensor by tensor. Exit status 1 if there is an alarm.
"""

import argparse
import collections
import json
import os
import random
import tempfile
from pathlib import Path

import models
from clean_sweep import named
from outputs import output

from lockstep import compare
from lockstep.dumps.trace import layout_of
from lockstep.ground import origin
from lockstep.ground.errors import UserError
from lockstep.ground.files import write_result
from lockstep.inputs import shapes
from lockstep.plan.config import BASELINE, JUDGED
from lockstep.running import jobs
from lockstep.training.observe import versions
from lockstep.verdict import model_check

RUN, SEQ_LENGTH = "fsdp@tp1xdp2", 48
EXAMPLES = Path(__file__).parents[1] / "examples"
OPTIMIZERS = [
    *("adamw", "adamw", "sgd", "NAdam", "RMSprop", "Adagrad", "Adam"),
    *(f"{EXAMPLES}/optimizers.py:{name}" for name in ("muon", "sgd_with_momentum", "adamw_foreach")),
]


def draw(chance: random.Random) -> tuple[dict, list[str]]:
    """(a config.json, the flags of its runs); transformers may refuse it."""
    kind = chance.choice(sorted(models.MODELS))
    own = dict(models.MODELS[kind])
    attention = ["--attn_impl", "eager"] if own.pop("eager", False) or chance.random() < 0.2 else []
    heads = chance.choice((2, 4, 8))
    content = {
        **models.COMMON,
        "hidden_size": heads * chance.choice((8, 16, 24)),
        "intermediate_size": chance.choice((48, 96, 160)),
        "num_hidden_layers": chance.choice((1, 2, 3)),
        "num_attention_heads": heads,
        "num_key_value_heads": chance.choice([each for each in (1, 2, 4, 8) if heads % each == 0]),
        "vocab_size": chance.choice((67, 256, 1000)),
        "tie_word_embeddings": chance.random() < 0.5,
        **own,
        "model_type": kind,
    }
    if "sliding_window" in own:
        content["sliding_window"] = chance.choice((5, 16, 64))
    optimizer = chance.choice(OPTIMIZERS)
    flags = ["--optimizer", optimizer, "--gradient_accumulation_steps", str(chance.choice((1, 2)))]
    flags += ["--max_grad_norm", chance.choice(("1.0", "0.1", "0")), *attention]
    return content, flags


def is_taken(content: dict, flags: list[str]) -> bool:
    """Whether the drawn model is one that run_verification.py takes, and the drawn optimizer takes."""
    attention = "eager" if "eager" in flags else "sdpa"
    try:
        architecture = shapes.as_transformers_says(content, "drawn")
        shapes.require_trainable(architecture, "drawn")
        layout = layout_of(architecture, attention)
    except UserError:
        return False
    if ":muon" in flags[1] and ".layers" not in layout.names.layers:
        return False
    return not model_check.problem_of(architecture, attention, SEQ_LENGTH)


def train(cases: dict[int, tuple[dict, list[str]]], folder: Path, precision: str) -> None:
    """Capture two steps of every case, by its seed, with DDP, FSDP and the reference."""
    runs, references = [], []
    for seed, (content, flags) in cases.items():
        model, own = folder / f"model-{seed}", folder / str(seed)
        model.mkdir(parents=True)
        (model / "config.json").write_text(json.dumps(content))
        common = ["--model_name", str(model), "--seed", str(seed), "--dp_size", "2", "--batch_size", "2"]
        common += [
            "--precision",
            precision,
            "--seq_length",
            str(SEQ_LENGTH),
            "--debug_steps",
            "2",
            "--capture_steps",
            "2",
            *flags,
        ]
        common += [
            "--capture_dir",
            str(own),
            "--loss_output_dir",
            f"{own}-losses",
            "--storage_path",
            str(folder),
        ]
        runs.append({"strategy": BASELINE, "arguments": common})
        for run in named(RUN):
            runs.append(
                {"strategy": run.spec.place, "arguments": [*common, "--tp_size", "1", "--run_name", run.name]}
            )
        references.append({"strategy": "reference", "arguments": common})
    jobs.start_all_groups([(2, runs), (None, references)], folder / "jobs")


def judge(folder: Path) -> dict:
    """By run: a verdict that is not PASS, with its first tensor, and the nearest tensor's share of what is tolerated.

    NOT JUDGED is no alarm: DDP itself is too far from the reference, which an optimizer that magnifies rounding errors explains.
    """
    names = (BASELINE, *(run.name for run in named(RUN)), "reference")
    result = compare.judge([folder / name for name in names])
    found = {
        name: [result.verdict(name), run.failures[:1], run.unjudged] for name, run in result.runs.items()
    }
    return {
        "alarms": {name: why for name, why in found.items() if why[0] not in ("PASS", "NOT JUDGED")},
        "not judged": {name: why for name, why in found.items() if why[0] == "NOT JUDGED"},
        "nearest": {name: run.nearest for name, run in result.runs.items()},
    }


def trained_and_judged(
    cases: dict[int, tuple[dict, list[str]]], folder: Path, precision: str
) -> dict[int, dict]:
    """What `judge` finds, by seed. Where a run fails, each case is tried alone; one that fails again did not run, and why is kept."""
    try:
        train(cases, folder / "together", precision)
        return {seed: judge(folder / "together" / str(seed)) for seed in cases}
    except jobs.JobFailed as error:
        print(
            f"together: {error}\n{(folder / 'together' / 'jobs' / 'log.txt').read_text()[-4000:]}", flush=True
        )
    found = {}
    for seed, case in cases.items():
        try:
            train({seed: case}, folder / f"alone-{seed}", precision)
            found[seed] = judge(folder / f"alone-{seed}" / str(seed))
        except jobs.JobFailed as error:
            why = str(error).partition("; all it said is in ")[0]
            found[seed] = {"alarms": {}, "did not run": why, "nearest": {}}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--number", type=int, default=300)
    parser.add_argument("--precision", choices=JUDGED, default="fp32")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--output", type=output('{\n "alarms": '))
    parser.add_argument("--at_once", type=int, default=20, help="configurations per start of the workers")
    options = parser.parse_args()
    rows: list[dict] = []
    waiting = list(range(options.first, options.first + options.number))
    while waiting:
        now = {}
        for seed in waiting[: options.at_once]:
            chance = random.Random(seed)
            content, flags = draw(chance)
            while not is_taken(content, flags):
                content, flags = draw(chance)
            now[seed] = (content, flags)
        waiting = waiting[options.at_once :]
        with tempfile.TemporaryDirectory() as name:
            for seed, found in trained_and_judged(now, Path(name), options.precision).items():
                content, flags = now[seed]
                flags = [flag.removeprefix(f"{EXAMPLES.parent}/") for flag in flags]
                rows.append({"seed": seed, "model": content, "flags": flags, **found})
        alarms = [row for row in rows if row["alarms"]]
        unjudged = [row["seed"] for row in rows if row.get("not judged")]
        failed = {row["seed"]: row["did not run"] for row in rows if "did not run" in row}
        print(
            f"{len(rows)} configurations, alarms {alarms}, not judged {unjudged}, did not run {failed}",
            flush=True,
        )
        if options.output:
            content = {
                "alarms": len(alarms),
                "precision": options.precision,
                "not judged": sum(bool(row.get("not judged")) for row in rows),
                "did not run": sum("did not run" in row for row in rows),
                "configurations": rows,
                "nearest": max(
                    max(row["nearest"].values(), default=0.0) for row in rows if not row.get("not judged")
                ),
                "by architecture": collections.Counter(row["model"]["model_type"] for row in rows),
                "cores": os.cpu_count(),
                "origin": origin.about(),
                "versions": versions(),
            }
            write_result(options.output, json.dumps(content, indent=1) + "\n")
    return int(any(row["alarms"] for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
