"""Correct runs of models and optimizers drawn at random: does any raise an alarm, and how near do they come?

    PYTHONPATH=. python benchmarks/model_sweep.py --number 300 --output results/model_sweep.json     about an hour on two cores
    PYTHONPATH=. python benchmarks/model_sweep.py --precision autocast --output results/model_sweep-autocast.json

Architectures of benchmarks/models.py with other sizes, heads, depths, windows, ties, optimizers, micro batches, clipping, labels, padding and
documents, each with a seed of its own, two of five built like Llama: two captured steps of DDP and FSDP at dp 2, and of a strategy on another
mesh that is drawn among those that the model can be cut by, judged tensor by tensor. Exit status 1 if there is an alarm.
"""

import argparse
import collections
import dataclasses
import json
import os
import random
import tempfile
from pathlib import Path

import models
from clean_sweep import SAMPLES
from outputs import output

from lockstep import compare
from lockstep.dumps.trace import layout_of
from lockstep.ground import origin
from lockstep.ground.errors import UserError
from lockstep.ground.files import write_result
from lockstep.inputs.modules import LIKE_LLAMA
from lockstep.plan.command_line import parse_config
from lockstep.plan.config import BASELINE, JUDGED
from lockstep.plan.runs import Run, runs_of
from lockstep.plan.strategies import SPECS
from lockstep.running import jobs
from lockstep.training import preflight
from lockstep.training.observe import versions
from lockstep.verdict import model_check

EXAMPLES = Path(__file__).parents[1] / "examples"
ZERO = next(
    spec.name
    for spec in SPECS.values()
    if "zero_stage" in (option.name for option in dataclasses.fields(spec.options))
)
ALWAYS = "fsdp@tp1xdp2"
FURTHER = (
    *("fsdp@tp2", "fsdp@cp2", "fsdp@pp2", "fsdp@tp2:sequence_parallel", "fsdp@tp2xdp2", "fsdp@cp2xdp2"),
    *(f"{ZERO}@tp2", *(f"{ZERO}@tp1xdp2:zero_stage={stage}" for stage in (1, 2, 3))),
)
SIZES = {"dp_size": 2, "batch_size": 2, "seq_length": 48, "debug_steps": 2, "capture_steps": 2}
COMMON = [f"--{name}={size}" for name, size in SIZES.items()]
# A config.json, the flags of all its runs, and the runs
Case = tuple[dict, list[str], list[Run]]
OPTIMIZERS = [
    *("adamw", "adamw", "sgd", "NAdam", "RMSprop", "Adagrad", "Adam"),
    *(f"{EXAMPLES}/optimizers.py:{name}" for name in ("muon", "sgd_with_momentum", "adamw_foreach")),
]


def draw(chance: random.Random) -> Case:
    """A case that run_verification.py takes."""
    while True:
        content, flags = _draw(chance)
        further = chance.sample(FURTHER, len(FURTHER))
        with tempfile.TemporaryDirectory() as folder:
            flags_of_model = ["--model_name", write_model(content, Path(folder)), *COMMON, *flags]
            if _is_taken(ALWAYS, content, flags_of_model):
                names = [ALWAYS, *[name for name in further if _is_taken(name, content, flags_of_model)][:1]]
                return content, flags, runs_named(",".join(names))


def _draw(chance: random.Random) -> tuple[dict, list[str]]:
    """(a config.json, the flags of its runs); transformers may refuse it."""
    kind = chance.choice(sorted(models.MODELS) if chance.random() < 0.6 else LIKE_LLAMA)
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
    flags = ["--optimizer", chance.choice(OPTIMIZERS)]
    flags += ["--gradient_accumulation_steps", str(chance.choice((1, 2)))]
    flags += ["--max_grad_norm", chance.choice(("1.0", "0.1", "0")), *attention, *chance.choice(SAMPLES)]
    return content, flags


def write_model(content: dict, folder: Path) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(content))
    return str(folder)


def runs_named(names: str) -> list[Run]:
    return runs_of(names, parse_config(BASELINE, COMMON), tp_size=2)


def _is_taken(name: str, content: dict, flags: list[str]) -> bool:
    """Whether the drawn model is one that this run can be verified with, and the drawn optimizer takes."""
    _, run = runs_named(name)
    try:
        config, inputs = preflight.checked(run.spec.place, [*flags, *run.arguments])
        model_check.check(config, inputs)
        if any(":muon" in flag for flag in flags):
            return ".layers" in layout_of(inputs.architecture, config.attn_impl).names.layers
    except UserError:
        return False
    return True


def train(cases: dict[int, Case], folder: Path, precision: str) -> None:
    """Capture two steps of every case, by its seed, with its runs and the reference."""
    by_mesh, references = collections.defaultdict(list), []
    for seed, (content, flags, runs) in cases.items():
        own = folder / str(seed)
        common = [
            "--model_name",
            write_model(content, folder / f"model-{seed}"),
            "--seed",
            str(seed),
            *COMMON,
        ]
        common += ["--precision", precision, *flags, "--capture_dir", str(own)]
        common += ["--loss_output_dir", f"{own}-losses", "--storage_path", str(folder)]
        for run in runs:
            by_mesh[run.mesh].append({"strategy": run.spec.place, "arguments": [*common, *run.arguments]})
        references.append({"strategy": "reference", "arguments": common})
    groups = [(mesh.world_size, group) for mesh, group in by_mesh.items()]
    jobs.start_all_groups([*groups, (None, references)], folder / "jobs")


def judge(folder: Path, runs: list[Run]) -> dict:
    """By run: a verdict that is not PASS, with its first tensor, and the nearest tensor's share of what is tolerated.

    NOT JUDGED is no alarm: DDP itself is too far from the reference, which an optimizer that magnifies rounding errors explains.
    """
    result = compare.judge([folder / name for name in (*(run.name for run in runs), "reference")])
    found = {
        name: [result.verdict(name), run.failures[:1], run.unjudged] for name, run in result.runs.items()
    }
    return {
        "alarms": {name: why for name, why in found.items() if why[0] not in ("PASS", "NOT JUDGED")},
        "not judged": {name: why for name, why in found.items() if why[0] == "NOT JUDGED"},
        "nearest": {name: run.nearest for name, run in result.runs.items()},
    }


def trained_and_judged(cases: dict[int, Case], folder: Path, precision: str) -> dict[int, dict]:
    """What `judge` finds, by seed. Where a run fails, each case is tried alone; one that fails again did not run, and why is kept."""
    try:
        train(cases, folder / "together", precision)
        return {seed: judge(folder / "together" / str(seed), cases[seed][2]) for seed in cases}
    except jobs.JobFailed as error:
        print(
            f"together: {error}\n{(folder / 'together' / 'jobs' / 'log.txt').read_text()[-4000:]}", flush=True
        )
    found = {}
    for seed, case in cases.items():
        try:
            train({seed: case}, folder / f"alone-{seed}", precision)
            found[seed] = judge(folder / f"alone-{seed}" / str(seed), case[2])
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
            now[seed] = draw(random.Random(seed))
        waiting = waiting[options.at_once :]
        with tempfile.TemporaryDirectory() as name:
            for seed, found in trained_and_judged(now, Path(name), options.precision).items():
                content, flags, runs = now[seed]
                flags = [flag.removeprefix(f"{EXAMPLES.parent}/") for flag in flags]
                rows.append(
                    {
                        "seed": seed,
                        "model": content,
                        "flags": flags,
                        "runs": [run.name for run in runs if not run.is_baseline],
                        **found,
                    }
                )
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
