"""The smallest relative error that the tensor-level verdict catches at least 99 times in 100, for each kind of tensor.

    python run_verification.py --precision fp32 --output_dir runs/fp32
    python run_verification.py --precision autocast --output_dir runs/autocast
    python run_verification.py --precision bf16 --output_dir runs/bf16
    PYTHONPATH=. python benchmarks/detection_limit.py runs/fp32 runs/autocast runs/bf16 --output results/detection_limit.json

Reads the dumps of finished verifications with AdamW. 100 times for each kind, a tensor of step 1 of AutoTP or FSDP is drawn at random and
spoilt: all of it, or only its median element by size, is multiplied with 1 + e or 1 - e. The smallest e = 2^-k that the verdict notices is
sought. Then once more with the modules by themselves: of a micro batch's tensors, all of one, one sample, or half of a dim is spoilt, and rounded
to the tensor's dtype. Writes a figure beside the data, too.
"""

import argparse
import functools
import itertools
import json
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from factors import WHERE, Kept, spoilt
from outputs import output

from lockstep.dumps.dump import Dump
from lockstep.ground.files import FIGURE, write_result
from lockstep.plan.config import BASELINE, BETAS, EPS
from lockstep.plan.strategies import others
from lockstep.training.optim import decays
from lockstep.verdict import forced
from lockstep.verdict.distance import Distance, Size, clip_factor, distance_of
from lockstep.verdict.factors import farthest, project
from lockstep.verdict.float64 import make_exact
from lockstep.verdict.judgement import (
    PASSES,
    ROUNDOFF,
    UPDATE,
    Judgement,
    is_vector_gradient,
    measure,
    tolerance,
    typical_error,
)
from lockstep.verdict.rows import StepVerdict

TRIALS = 100
SPOILT = ("all of it", "one middling element")
BY_ITSELF = {where: f"{where}, its module by itself" for where in WHERE}
LARGEST, SMALLEST = 10, -40  # exponents of e


def sizes(tensor: torch.Tensor) -> Size:
    return Size(float(tensor.norm()), float(tensor.abs().max()))


def distance(dump: Dump, reference: Dump, name: str) -> Distance:
    reference_tensor = reference.tensor(1, name).double()
    true = sizes(reference_tensor)
    return Distance(*sizes(dump.tensor(1, name).double() - reference_tensor), *true, true.norm, *true, 1.0)


def reference_update(
    dump: Dump, reference: Dump, name: str, clip: float
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Kind -> (the reference's tensor, what it should show) of AdamW's first step, from the run's own gradient."""
    options, (b1, b2) = dump.run["config"], BETAS
    old, gradient = (
        reference.tensor(0, f"parameter/{name}").double(),
        dump.tensor(1, f"gradient/{name}").double() * clip,
    )
    m, v = (1 - b1) * gradient, (1 - b2) * gradient**2
    decay = options["weight_decay"] if decays(old.ndim) else 0.0
    change = -options["learning_rate"] * (decay * old + (m / (1 - b1)) / ((v / (1 - b2)).sqrt() + EPS))
    return {"exp_avg": (m, m), "exp_avg_sq": (v, v), "parameter": (old + change, change)}


def limit(is_noticed: Callable[[float], bool]) -> float:
    """The smallest e = 2^-k that is noticed, by bisection between LARGEST and SMALLEST; infinite if none is."""
    low, high = SMALLEST, LARGEST + 1  # exponents: low is not noticed, high is
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_noticed(2.0**middle) else (middle, high)
    return 2.0**high if high <= LARGEST else float("inf")


def limits_of(mine, reference, change, yardstick, name: str, sign: int, roundoff: float) -> dict[str, float]:
    """The limits of one tensor, by what is spoilt."""
    error, true, shown = mine - reference, sizes(reference), sizes(change)
    middling = int(mine.abs().flatten().median(dim=0).indices)
    own, its_error = float(mine.view(-1)[middling]), float(error.view(-1)[middling])
    rest = error.clone()
    rest.view(-1)[middling] = 0.0
    others = sizes(rest)

    def too_far(off: Size) -> bool:
        distance = Distance(*off, *true, true.norm, *shown, 1.0)
        return Judgement(1, name, distance, *tolerance(name, distance, yardstick, roundoff)).too_far

    def whole(e: float) -> bool:
        return too_far(sizes(torch.add(error, mine, alpha=sign * e)))

    def one(e: float) -> bool:
        off = abs(its_error + sign * e * own)
        return too_far(Size(math.hypot(others.norm, off), max(others.largest, off)))

    return {SPOILT[0]: limit(whole), SPOILT[1]: limit(one)}


def limits(folder: Path, kind: str) -> dict[str, list[float]]:
    """The limits of all trials of one kind of tensor, sorted, by what is spoilt."""
    reference, ddp = Dump(folder / "reference"), Dump(folder / BASELINE)
    dumps = {name: Dump(folder / name) for name in others()}
    draw = random.Random(kind)
    entries = ddp.steps[1]["tensors"]
    names = [name for name in entries if name.startswith(f"{kind}/")]
    typical = typical_error(
        [distance(ddp, reference, other) for other in names if is_vector_gradient(other, entries[other])]
    )
    drawn = sorted(
        (draw.choice(names), draw.choice(list(dumps)), draw.choice((1, -1))) for _ in range(TRIALS)
    )
    found: dict[str, list[float]] = {what: [] for what in SPOILT}
    for name, strategy, sign in drawn:
        dump = dumps[strategy]
        mine, yardstick = dump.tensor(1, name).double(), Size(0.0, 0.0)
        if kind in UPDATE:
            clip = clip_factor(dump.run["config"], dump.steps[1]["grad_norm"])
            reference_tensor, change = reference_update(dump, reference, name.split("/", 1)[1], clip)[kind]
        else:
            reference_tensor = change = reference.tensor(1, name).double()
            yardstick = measure(
                distance(ddp, reference, name), typical if is_vector_gradient(name, entries[name]) else None
            )
        roundoff = ROUNDOFF[entries[name]["dtype"]]
        for what, value in limits_of(mine, reference_tensor, change, yardstick, name, sign, roundoff).items():
            found[what].append(value)
    return {what: sorted(values) for what, values in found.items()}


@dataclass
class Computed:
    """A tensor of a run, and what its module gives in the run's dtypes and in float64 from the inputs that it had in the run."""

    own: torch.Tensor
    yardstick: torch.Tensor
    reference: torch.Tensor
    is_weight: bool
    tolerated: tuple[float, float]

    def is_noticed(self, name: str, where: str, sign: int, seed: str, number: int, e: float) -> bool:
        """Whether a factor of 1 + sign e is. The run has `number` projections."""
        own = spoilt(self.own, where, 1 + sign * e, random.Random(seed))
        if farthest(project(name, own, self.yardstick, self.reference, self.is_weight), number).multiple > 1:
            return True
        return Judgement(1, name, distance_of(own, self.reference), *self.tolerated).too_far


def computed(folder: Path, strategy: str) -> tuple[dict[str, Computed], int]:
    """(the tensors of step 1 of all micro batches; the number of projections of the run)."""
    dump, initial = Dump(folder / strategy), Dump(folder / "reference")
    reference_model, yardstick_model = forced.model_of(dump), forced.model_of(dump)
    make_exact(reference_model, dump.layout.tables)
    real, tolerated = StepVerdict.judged, dict[str, tuple[float, float]]()

    def judged(verdict: StepVerdict, *arguments: Any, **options: Any) -> list[Judgement]:
        rows = real(verdict, *arguments, **options)
        if verdict.step == 1:
            tolerated.update({row.name: (row.tolerated, row.tolerated_largest) for row in rows})
        return rows

    Kept.every = []
    with (
        mock.patch.object(forced, "Factors", Kept),
        mock.patch.object(StepVerdict, "judged", judged),
    ):
        forced.judge(dump, initial, reference_model, yardstick_model)
    first = Kept.every[0]
    return {name: Computed(*tensors, tolerated[name]) for name, *tensors in first.tensors}, first.number


def limits_by_itself(folder: Path) -> Iterator[tuple[str, str, list[float]]]:
    """(kind, what is spoilt, the limits of all trials, sorted)."""
    runs = {strategy: computed(folder, strategy) for strategy in others()}
    for kind in ("forward", "backward", "gradient"):
        draw = random.Random(kind)
        names = [name for name in next(iter(runs.values()))[0] if name.startswith(f"{kind}/")]
        drawn = [(draw.choice(names), draw.choice(list(runs)), draw.choice((1, -1))) for _ in range(TRIALS)]
        for where in WHERE:
            if where == "one sample" and kind == "gradient":
                continue
            values = []
            for trial, (name, strategy, sign) in enumerate(drawn):
                found, number = runs[strategy]
                noticed = functools.partial(
                    found[name].is_noticed, name, where, sign, f"{kind} {trial}", number
                )
                values.append(limit(noticed))
            yield kind, BY_ITSELF[where], sorted(values)


def draw_figure(rows: list[dict], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    runs = list(dict.fromkeys(row["run"] for row in rows))
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    titles = [*SPOILT, *BY_ITSELF.values()]
    figure, panels = pyplot.subplots(len(titles), 1, figsize=(8, 12), sharex=True, layout="constrained")
    for axes, title in zip(panels, titles, strict=True):
        for number, run in enumerate(runs):
            mine = [row for row in rows if row["run"] == run and row["spoilt"] == title]
            places = [kinds.index(row["kind"]) + 0.8 * (number + 0.5) / len(runs) - 0.4 for row in mine]
            axes.bar(
                places,
                [row["caught_99_of_100"] if math.isfinite(row["caught_99_of_100"]) else 0.0 for row in mine],
                0.8 / len(runs),
                label=run if axes is panels[0] else None,
            )
        axes.set_yscale("log")
        axes.set_title(title)
        axes.grid(axis="y", alpha=0.3)
        axes.set_axisbelow(True)
    panels[-1].set_xticks(range(len(kinds)), kinds)
    figure.supylabel("relative error caught 99 times in 100")
    figure.get_layout_engine().set(h_pad=0.1)
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(path, dpi=120, metadata={"Creator": FIGURE.decode()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="+")
    parser.add_argument("--output", type=output('[\n {\n  "run": ', png=""))
    options = parser.parse_args()
    rows = []
    for folder in options.folder:
        baseline = Dump(folder / BASELINE)
        run = baseline.run["config"]
        captured = {name.split("/", 1)[0] for name in baseline.steps[1]["tensors"]}
        kinds = [
            kind for kind in (*PASSES, *UPDATE) if kind != "batch" and kind in captured
        ]  # a run without --ema_decay has no averages
        from_batch = ((kind, what, values) for kind in kinds for what, values in limits(folder, kind).items())
        for kind, what, values in itertools.chain(from_batch, limits_by_itself(folder)):
            row = {
                "run": f"{run['model_name']}, {run['precision']}",
                "kind": kind,
                "spoilt": what,
                "best": values[0],
                "median": values[TRIALS // 2],
                "caught_99_of_100": values[TRIALS - 2],
                "worst": values[-1],
            }
            rows.append(row)
            print(
                " | ".join(f"{value:.1e}" if isinstance(value, float) else value for value in row.values()),
                flush=True,
            )
    if options.output:
        finite = [{key: None if value == math.inf else value for key, value in row.items()} for row in rows]
        write_result(options.output, json.dumps(finite, indent=1) + "\n")
        draw_figure(rows, options.output.with_suffix(".png"))


if __name__ == "__main__":
    main()
