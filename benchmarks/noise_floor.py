"""What does a control run show, and how far do correct runs exceed it? The data behind the bounds in lockstep/verdict/loss_tolerance.py.

    python benchmarks/noise_floor.py --work_dir runs/noise --output results/noise_floor.json          about 20 minutes

Trains DDP and its control run, and AutoTP and FSDP in the cases marked with an asterisk: tiny models in fp32, autocast and bf16, batches from
2 x 8 x 128 to 2 x 32 tokens, several seeds, learning rates from 1e-6 to 0.1, SGD, accumulation, no clipping and hard clipping, up to 300 steps.

The first table is about the loss and gradient norm of each control: the first gap in units of its limit, the largest growth in a step, the
loneliest step, the amplification. The second is about other strategies: the largest ratio, over the steps, of the distance from DDP to the
control's envelope (at least an eighth of what is always allowed), for loss and gradient norm, and the verdict.
"""

import argparse
import json
from pathlib import Path

from outputs import output

from lockstep.dumps import history
from lockstep.ground.files import write_result
from lockstep.plan.config import BASELINE, CONTROL, history_file
from lockstep.plan.strategies import others
from lockstep.running import jobs
from lockstep.verdict.loss_curves import compare_curves, tolerance_for
from lockstep.verdict.loss_tolerance import (
    CONTROL_FACTOR,
    envelope,
    loss_gap,
    norm_gap,
    ratios,
    rule_and_noise,
)

SHAPES = {"8x128": ("8", "128"), "2x64": ("2", "64"), "1x32": ("1", "32")}


def cases() -> dict[str, list[str]]:
    """Name -> flags; an asterisk behind the name stands for all strategies."""
    found: dict[str, list[str]] = {}

    def case(name: str, precision: str, shape: str, seed: int, *more: str) -> None:
        batch, sequence = SHAPES[shape]
        flags = [
            "--precision",
            precision,
            "--batch_size",
            batch,
            "--seq_length",
            sequence,
            "--seed",
            str(seed),
            "--dp_size",
            "2",
        ]
        found[f"{precision}-{name}"] = [*flags, *more]

    for precision in ("fp32", "autocast"):
        for shape, seeds in (("2x64", 3), ("8x128", 3 if precision == "fp32" else 2)):
            for seed in range(seeds):
                case(f"{shape}-s{seed}*", precision, shape, seed)
        case("1x32*", precision, "1x32", 5)
        case("lr1e-2*", precision, "2x64", 3, "--learning_rate", "1e-2")
        case("sgd0.5*", precision, "2x64", 4, "--optimizer", "sgd", "--learning_rate", "0.5")
        case("acc4", precision, "2x64", 6, "--gradient_accumulation_steps", "4")
        case("lr1e-6", precision, "2x64", 9, "--learning_rate", "1e-6")
        case("llama", precision, "2x64", 11, "--model_name", "tiny-llama")
        case("qwen3", precision, "2x64", 12, "--model_name", "tiny-qwen3")
        case("noclip", precision, "2x64", 13, "--max_grad_norm", "0")
        case("clip.05", precision, "2x64", 14, "--max_grad_norm", "0.05")
        case("300", precision, "2x64", 15, "--debug_steps", "300")
        case("1x32-lr1e-2", precision, "1x32", 16, "--learning_rate", "1e-2", "--debug_steps", "200")
    case("lr1e-1", "fp32", "2x64", 8, "--learning_rate", "1e-1")
    case("lr3e-2", "autocast", "2x64", 7, "--learning_rate", "3e-2")
    case("2x64*", "bf16", "2x64", 0)
    case("8x128*", "bf16", "8x128", 1)
    case("1x32", "bf16", "1x32", 2)
    case("sgd", "bf16", "2x64", 3, "--optimizer", "sgd", "--learning_rate", "0.5")
    case("lr1e-4", "bf16", "2x64", 4, "--learning_rate", "1e-4")
    case("lr1e-5", "bf16", "2x64", 4, "--learning_rate", "1e-5")
    return found


def folder_of(folder: Path, name: str) -> Path:
    return folder / name.rstrip("*")


def train(folder: Path) -> None:
    two, four = [], []
    for name, flags in cases().items():
        flags = [*flags, "--loss_output_dir", str(folder_of(folder, name)), "--storage_path", str(folder)]
        two += [
            {"strategy": BASELINE, "arguments": flags},
            {"strategy": BASELINE, "arguments": [*flags, "--noise_control"]},
        ]
        four += [
            {"strategy": strategy, "arguments": [*flags, "--tp_size", "2"]}
            for strategy in others()
            if name.endswith("*")
        ]
    jobs.start_all_groups([(2, two)], folder / "ranks-2")
    jobs.start_all_groups([(4, four)], folder / "ranks-4")


def control_row(name: str, baseline: history.History, control: history.History) -> dict:
    """What the control run of one case shows, and whether it is a tolerance."""
    pairs = list(zip(baseline.steps, control.steps, strict=True))
    row: dict = {"case": name}
    for what, gap, noise in zip(
        ("loss", "grad_norm"), (loss_gap, norm_gap), rule_and_noise(baseline)[1:], strict=True
    ):
        gaps = [gap(*pair) for pair in pairs]
        growth, alone = (max(column) for column in zip(*ratios(gaps, noise), strict=True))
        row[what] = {
            "first": gaps[0] / noise.first,
            "growth": growth,
            "alone": alone,
            "amplification": max(gaps) / noise.floor,
        }
    losses = [step["loss"] for step in baseline.steps]
    row["tolerated_of_range"] = (
        CONTROL_FACTOR * max(loss_gap(*pair) for pair in pairs) / (max(losses) - min(losses))
    )
    return {**row, "doubt": tolerance_for(baseline, control).doubt}


def ratio(baseline, control, other, gap, least: float) -> float:
    """The largest gap in units of what the control shows by then."""
    noise = envelope([gap(*pair) for pair in zip(baseline.steps, control.steps, strict=True)])
    gaps = (gap(*pair) for pair in zip(baseline.steps, other.steps, strict=True))
    return max(mine / max(allowed, least) for mine, allowed in zip(gaps, noise, strict=True))


def comparison_row(name: str, runs: dict[str, history.History], strategy: str) -> dict:
    baseline, control, other = runs[BASELINE], runs[CONTROL], runs[strategy]
    rule, noise, norm_noise = rule_and_noise(baseline)
    least = [noise.floor, norm_noise.floor] if rule else [0.0, 0.0]
    return {
        "case": name,
        "strategy": strategy,
        "loss_ratio": ratio(baseline, control, other, loss_gap, least[0] / CONTROL_FACTOR),
        "grad_norm_ratio": ratio(baseline, control, other, norm_gap, least[1] / CONTROL_FACTOR),
        "without_control": compare_curves(baseline, other, tolerance_for(baseline)).outcome if rule else None,
        "with_control": compare_curves(baseline, other, tolerance_for(baseline, control)).outcome,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--work_dir", type=Path, required=True, help="runs that are there already are not made again"
    )
    parser.add_argument("--output", type=output('{\n "controls": '))
    options = parser.parse_args()
    folder = options.work_dir.absolute()
    if not folder.exists():
        train(folder)
    controls, comparisons = [], []
    for name in cases():
        names = (BASELINE, CONTROL, *(others() if name.endswith("*") else ()))
        runs = {each: history.read(history_file(folder_of(folder, name), each)) for each in names}
        controls.append(control_row(name, runs[BASELINE], runs[CONTROL]))
        comparisons += [comparison_row(name, runs, strategy) for strategy in names[2:]]
    for row in controls:
        cells = [f"{value:.2g}" for what in ("loss", "grad_norm") for value in row[what].values()]
        print(" | ".join([row["case"], *cells, f"{row['tolerated_of_range']:.2g}", row["doubt"][:60]]))
    for row in comparisons:
        print(
            " | ".join(f"{value:.2f}" if isinstance(value, float) else str(value) for value in row.values())
        )
    calm = {row["case"] for row in controls if not row["doubt"]}
    print(f"{len(calm)} of {len(controls)} control runs are a tolerance; of these:")
    for what in ("loss", "grad_norm"):
        found = {
            key: max(row[what][key] for row in controls if row["case"] in calm) for key in controls[0][what]
        }
        largest = max(row[f"{what}_ratio"] for row in comparisons if row["case"] in calm)
        print(f"{what}: {found}, other runs went to {largest:.2f} of the envelope")
    for what in ("without_control", "with_control"):
        words = [row[what] for row in comparisons if row[what]]
        print(f"{what}: { ({word: words.count(word) for word in words}) }")
    if options.output:
        write_result(
            options.output, json.dumps({"controls": controls, "comparisons": comparisons}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
