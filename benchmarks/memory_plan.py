"""The memory plan against what torch's CPU allocator really holds, in real runs of two ranks.

    PYTHONPATH=.:tests python benchmarks/memory_plan.py --output results/memory_plan.json      about fifteen minutes on two cores
    PYTHONPATH=.:tests python benchmarks/memory_plan.py --runs ddp stage1 --output results/memory_plan.json      replaces their rows

The runs are those of studies/memory.toml, with a widened tiny model whose tensors dominate, tied and not. A row fails if the peak of the plan is
more than 15 % from the peak of the rank that holds most. Exit status: 0 no row fails; 1 one does; 2 a usage error.
"""

import argparse
import json
import os
import platform
import tempfile
from pathlib import Path

import allocated
from outputs import output

from extras.memory import plan
from extras.studies import study as study_file
from lockstep.ground.errors import run_program
from lockstep.ground.files import read_json, write_result
from lockstep.inputs import architectures
from lockstep.inputs.architectures import BUILT_IN
from lockstep.plan import command_line
from lockstep.plan.config import BASELINE
from lockstep.training.observe import versions

STUDY = Path(__file__).parents[1] / "studies" / "memory.toml"
TITLE = "# The memory plan against the allocator"
LIMIT = 0.15
WIDE = {
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
MODELS = {"tied": {**BUILT_IN["tiny-qwen2"], **WIDE}, "not tied": {**BUILT_IN["tiny-llama"], **WIDE}}


def cases(study: study_file.Study, folder: Path) -> list[tuple[str, str, str, list[str]]]:
    """(model, name of the run, strategy, flags) of every run with every model."""
    found = []
    for model, architecture in MODELS.items():
        place = folder / model.replace(" ", "_")
        place.mkdir()
        (place / "config.json").write_text(json.dumps(architecture))
        runs = {BASELINE: study_file.Run(strategy=BASELINE), **study.runs}
        for name, run in runs.items():
            flags = {**study.shared, **run.flags, "model_name": str(place)}
            found.append((model, name, run.strategy, study_file.arguments_of(run.strategy, flags)))
    return found


def predicted(strategy: str, flags: list[str]) -> dict[str, int]:
    """Bytes by the moments that can be told apart from outside."""
    config = command_line.parse_config(strategy, flags)
    architecture, _ = architectures.resolve(config.model_name)
    found = plan.of(config, architecture)
    totals = {name: moment.total for name, moment in found.moments.items()}
    return {
        "built": found.built,
        "start": totals[plan.START],
        "forward and backward": max(totals[plan.LOSS], totals[plan.END_OF_BACKWARD]),
        "update": totals[plan.UPDATE],
    }


def page(content: dict) -> str:
    machine = content["machine"]
    rows = [
        TITLE,
        "",
        f"Made by `PYTHONPATH=.:tests python benchmarks/memory_plan.py` on {machine['cores']} cores ({machine['processor']}), "
        f"torch {content['versions']['torch']}. fp32 unless the name says otherwise; the runs are those of `studies/memory.toml`.",
        "MiB of the rank that holds most: predicted / measured, and by how much the prediction of the peak is off.",
        "No GPU was at hand: nothing here was measured on one.",
        "",
        "| model | run | start | forward and backward | update | peak off by |",
        "|---|---|---|---|---|---|",
    ]
    for row in content["rows"]:
        cells = [
            f"{row['predicted'][moment] / 2**20:.1f} / {row['measured'][moment] / 2**20:.1f}"
            for moment in ("start", "forward and backward", "update")
        ]
        rows.append(f"| {row['model']} | {row['run']} | {' | '.join(cells)} | {row['off']:+.1%} |")
    return "\n".join([*rows, ""])


def run(options: argparse.Namespace) -> int:
    study = study_file.read(STUDY)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        chosen = [case for case in cases(study, folder) if not options.runs or case[1] in options.runs]
        rows = []
        expected = [predicted(strategy, flags) for _, _, strategy, flags in chosen]
        measured = allocated.measure([(strategy, flags) for *_, strategy, flags in chosen], folder)
        for (model, run, *_), plans, found in zip(chosen, expected, measured, strict=True):
            off = max(plans.values()) / max(found.values()) - 1
            rows.append({"model": model, "run": run, "predicted": plans, "measured": found, "off": off})
            print(
                f"{model:9} {run:22} {off:+.1%}  "
                + "  ".join(
                    f"{moment} {plans[moment] / 2**20:.1f}/{found[moment] / 2**20:.1f}" for moment in found
                ),
                flush=True,
            )
    if options.output.exists():
        new = {(row["model"], row["run"]) for row in rows}
        older = [row for row in read_json(options.output)["rows"] if (row["model"], row["run"]) not in new]
        order = [(model, name) for model in MODELS for name in (BASELINE, *study.runs)]
        rows = sorted(older + rows, key=lambda row: order.index((row["model"], row["run"])))
    content = {
        "of": "memory plan",
        "machine": {"cores": os.cpu_count(), "processor": platform.machine()},
        "versions": versions(),
        "rows": rows,
    }
    write_result(options.output, json.dumps(content, indent=1) + "\n")
    write_result(options.output.with_suffix(".md"), page(content))
    return int(any(abs(row["off"]) > LIMIT for row in rows))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--runs", nargs="+", help="names of runs in the study (default: all)")
    parser.add_argument(
        "--output",
        type=output('{\n "of": "memory plan"', md=TITLE),
        default="runs/memory_plan.json",
        help=".md beside it",
    )
    return run_program("memory_plan.py", lambda: run(parser.parse_args(argv)))


if __name__ == "__main__":
    raise SystemExit(main())
