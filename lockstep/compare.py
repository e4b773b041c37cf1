"""The tensor-level comparison: is every tensor of every run as close to the truth as a correct run is?

    python -m lockstep.compare runs/verify/fsdp runs/verify/reference         a dump and the reference (and DDP's beside it)
    python -m lockstep.compare runs/verify/{ddp,deepspeed,fsdp,reference}     all of them
    python -m lockstep.compare runs/one/fsdp runs/two/fsdp                    any two dumps

The yardstick is DDP's own distance from the float64 reference; docs/verification.md derives what is tolerated.
Exit status: 0 PASS; 1 not; 2 a mistake, or dumps that cannot be compared.
"""

import functools
import sys
from pathlib import Path

from lockstep import tensor_report
from lockstep.compare_losses import RULES, loss_noise
from lockstep.config import Parser
from lockstep.distance import Distance, clip_factor, on_all_cores, tensor_distances, update_distances
from lockstep.dump import Dump, number_of_elements
from lockstep.errors import UserError
from lockstep.verdict import PASSES, ROUNDING, Loss, Result, Row

# Without a reference: the largest distance DDP had from it, over the sweep of results/clean_sweep.json.
TYPICAL = {"fp32": 1e-6, "autocast": 1.5e-2}
SAME = ("optimizer", "learning_rate", "weight_decay", "max_grad_norm", "gradient_accumulation_steps", "precision",
        "batch_size", "seq_length", "dp_size")  # fmt: skip


def require_comparable(one: Dump, other: Dump) -> None:
    """Raise UserError naming the first difference that makes a comparison of two dumps meaningless."""
    pair = f"{one.folder} and {other.folder} cannot be compared"
    if one.run["architecture"] != other.run["architecture"]:
        raise UserError(f"{pair}: their models differ; capture both with one --model_name and --num_layers")
    if one.manifest["initial_sha256"] != other.manifest["initial_sha256"]:
        raise UserError(f"{pair}: they started from different weights; give both one --init_weights_path")
    for key in SAME:
        a, b = one.run["config"][key], other.run["config"][key]
        if a != b:
            raise UserError(f"{pair}: {key} is {a} in one and {b} in the other; capture both with the same options")
    steps, others = ({step for step in dump.steps if step != "0"} for dump in (one, other))
    if steps != others and not other.run.get("exact"):
        raise UserError(f"{pair}: steps {', '.join(sorted(steps))} against {', '.join(sorted(others))}; capture the same steps")
    for step in sorted(steps & others, key=int):
        if one.steps[step]["batch_hash"] != other.steps[step]["batch_hash"]:
            raise UserError(f"{pair}: step {step} was trained on different batches; use one corpus and seed")
    if one.run["versions"] != other.run["versions"]:
        raise UserError(f"{pair}: versions {one.run['versions']} against {other.run['versions']}; use one environment")


def compare(reference: Dump, dumps: dict[str, Dump], replays: dict[str, Dump]) -> Result:
    """Judge the dumps against the reference; the first one must be DDP's, whose distance is the yardstick.

    `replays` hold the truth of later steps, by strategy. Raises UserError for dumps that cannot be compared, for a
    step without its truth, and for damaged files.
    """
    if next(iter(dumps)) != "ddp":
        raise UserError("the yardstick is DDP's own distance from the reference; capture train_ddp.py too and name its dump")
    precision = reference.run["config"]["precision"]
    _require_precision(precision)
    for dump in dumps.values():
        require_comparable(dump, reference)
        require_comparable(dumps["ddp"], dump)
    steps = sorted(int(step) for step in dumps["ddp"].steps)
    rows, losses, pairs = [], [], {}
    for step in steps:
        truths = {name: reference if step == 1 else _replay(replays, name, step) for name in dumps}
        rows += _judge_step(reference, dumps, truths, step, pairs)
        losses += _losses(reference, dumps, step, precision)
    return Result(dumps, "ddp", rows, losses, pairs, dumps)


def compare_two(one: Dump, other: Dump) -> Result:
    """Judge the first step of one dump against another one, without a reference: forward, backward and gradients.

    Two correct runs, each within MULTIPLE times DDP's distance from the truth, are within twice that of each other.
    """
    require_comparable(one, other)
    precision = one.run["config"]["precision"]
    _require_precision(precision)
    names = {"this": one, "other": other}
    entries, pairs = _same_tensors(names, 1), {}
    plain = [name for name in entries if PASSES[name.split("/")[0]] != "update"]
    rows = []
    for name, tensor in _measure(plain, entries, [other], names, 1):
        pairs[name] = tensor
        distance = tensor.distances[0]
        yardstick = Distance(
            2 * TYPICAL[precision] * distance.norm, 2 * TYPICAL[precision] * distance.largest,
            distance.norm, distance.largest, distance.norm, distance.norm,
        )  # fmt: skip
        rows.append(Row("this", 1, name, distance, yardstick, ROUNDING.get(entries[name]["dtype"], 0.0)))
    return Result({"this": one}, "other", rows, _losses(other, names, 1, precision), pairs, names)


def _require_precision(precision: str) -> None:
    if precision not in RULES:
        raise UserError(f"no tolerance is derived for --precision {precision}; compare {' or '.join(RULES)}")


def _same_tensors(dumps: dict[str, Dump], step: int) -> dict[str, dict]:
    """The entries of a step's tensors, which all dumps must have."""
    first = next(iter(dumps.values()))
    entries = first.steps[str(step)]["tensors"]
    for dump in dumps.values():
        odd = set(entries) ^ set(dump.steps[str(step)]["tensors"])
        if odd:
            raise UserError(f"{dump.folder} and {first.folder}: only one has {sorted(odd)[0]} in step {step}; capture both again")
    return entries


def _measure(names: list[str], entries: dict, truths: list[Dump], dumps: dict[str, Dump], step: int):
    """(name, Tensor) of every named tensor; one truth for all, or one for each dump."""
    truths = truths * len(dumps) if len(truths) == 1 else truths
    sizes = [number_of_elements(entries[name]) for name in names]
    tensors = on_all_cores(functools.partial(tensor_distances, truths, list(dumps.values()), step), names, sizes)
    return zip(names, tensors, strict=True)


def _replay(replays: dict[str, Dump], name: str, step: int) -> Dump:
    if name not in replays or str(step) not in replays[name].steps:
        raise UserError(f"step {step} of {name} has no replay to be judged by; run lockstep.reference after the training scripts")
    return replays[name]


def _judge_step(reference: Dump, dumps: dict[str, Dump], truths: dict[str, Dump], step: int, pairs: dict) -> list[Row]:
    entries = _same_tensors(dumps, step)
    names = [name for name in entries if PASSES[name.split("/")[0]] != "update"]
    parameters = [name.removeprefix("parameter/") for name in entries if name.startswith("parameter/")]
    found: dict[str, dict[str, Distance]] = {strategy: {} for strategy in dumps}
    for name, tensor in _measure(names, entries, list(truths.values()), dumps, step):
        if step == 1:
            pairs[name] = tensor
        for strategy, distance in zip(dumps, tensor.distances, strict=True):
            found[strategy][name] = distance
    clips = {
        strategy: clip_factor(dump.run["config"], [found[strategy][f"gradient/{name}"].own_norm for name in parameters])
        for strategy, dump in dumps.items()
    }
    items = [(strategy, name) for strategy in dumps for name in parameters]
    sizes = [number_of_elements(entries[f"parameter/{name}"]) for _, name in items]
    updates = on_all_cores(functools.partial(_update, dumps, reference, step, clips), items, sizes)
    for (strategy, name), kinds in zip(items, updates, strict=True):
        found[strategy].update({f"{kind}/{name}": distance for kind, distance in kinds.items()})
    return [
        Row(strategy, step, name, found[strategy][name], found["ddp"][name], ROUNDING.get(entries[name]["dtype"], 0.0))
        for strategy in dumps
        for name in entries
    ]


def _update(dumps: dict[str, Dump], reference: Dump, step: int, clips: dict[str, float], item: tuple[str, str]):
    strategy, name = item
    return update_distances(dumps[strategy], reference, step, clips[strategy], name)


def _losses(reference: Dump, dumps: dict[str, Dump], step: int, precision: str) -> list[Loss]:
    config = reference.run["config"]
    tokens = config["batch_size"] * config["gradient_accumulation_steps"] * config["seq_length"]
    exact = reference.steps[str(step)]["rank_losses"]
    return [
        Loss(
            step,
            dp_rank,
            loss,
            {name: dump.steps[str(step)]["rank_losses"][dp_rank] for name, dump in dumps.items()},
            loss_noise(precision, loss, reference.run["architecture"], tokens) * (1 if step == 1 else RULES[precision].growth),
        )
        for dp_rank, loss in enumerate(exact)
    ]


def open_all(folders: list[Path]) -> tuple[Dump | None, dict[str, Dump], dict[str, Dump]]:
    """(the reference, the dumps by strategy with DDP's first, the replays), with what stands beside the reference."""
    opened = [Dump(folder) for folder in folders]
    exact = [dump for dump in opened if dump.run.get("exact")]
    if len(exact) != 1:
        return None, {}, {}
    (reference,), dumps = exact, {}
    beside = reference.folder.resolve().parent
    given = {dump.run["config"]["strategy"]: dump for dump in opened if dump is not reference}
    dumps["ddp"] = given.pop("ddp", None) or Dump(beside / "ddp")
    dumps.update(given)
    replays = {name: beside / f"replay_{name}" for name in dumps}
    return reference, dumps, {name: Dump(folder) for name, folder in replays.items() if folder.is_dir()}


def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="python -m lockstep.compare", description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("dumps", type=Path, nargs="+", help="two or more dump folders; one may be the reference")
    parser.add_argument("--output_dir", type=Path, help="write report.json and report.md there")
    try:
        options = parser.parse_args(argv)
        if len(options.dumps) < 2:
            raise UserError("give two dump folders or more")
        reference, dumps, replays = open_all(options.dumps)
        if reference is not None:
            result = compare(reference, dumps, replays)
        elif len(options.dumps) == 2:
            result = compare_two(*(Dump(folder) for folder in options.dumps))
        else:
            raise UserError("more than two dumps are compared through one reference; name its folder too")
        return tensor_report.show(result, options.output_dir)
    except UserError as error:
        print(f"lockstep.compare: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    raise SystemExit(main())
