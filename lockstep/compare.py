"""The tensor-level comparison: is every tensor of every run as close to the truth as a correct run is?

    python -m lockstep.compare runs/verify/fsdp runs/verify/reference         a dump and the reference (and DDP's beside it)
    python -m lockstep.compare runs/verify/{ddp,deepspeed,fsdp,reference}     all of them
    python -m lockstep.compare runs/one/fsdp runs/two/fsdp                    any two dumps

The yardstick is DDP's own distance from the float64 reference; docs/verification.md derives what is tolerated.
Exit status: 0 PASS; 1 not; 2 a mistake, or dumps that cannot be compared.
"""

if __name__ == "__main__":
    from lockstep import startup

    startup.begin()  # first: from now on Ctrl-C and a missing package are one line each

import functools
import math
import sys
from pathlib import Path

from lockstep import tensor_report
from lockstep.compare_losses import RANK_SPACINGS, RULES, loss_noise
from lockstep.config import Parser
from lockstep.contract import KNOWN_DIFFERENCES, contract_differences
from lockstep.diagnose import diagnose
from lockstep.distance import Distance, Size, clip_factor, on_all_cores, tensor_distances, update_distances
from lockstep.dump import Dump, number_of_elements
from lockstep.errors import UserError
from lockstep.files import require_writable_folder
from lockstep.verdict import PASSES, ROUNDING, UNIT, Loss, Norm, Result, is_vector_gradient, judge, judge_yardstick, typical_error, yardstick

# Without a reference: the largest distance from it that DDP had, over the clean sweep and the real sizes (results/).
TYPICAL = {"fp32": 1.5e-6, "autocast": 2e-2}
SAME = ("optimizer", "learning_rate", "weight_decay", "max_grad_norm", "gradient_accumulation_steps", "precision",
        "batch_size", "seq_length", "dp_size", "attn_impl")  # fmt: skip


def require_comparable(one: Dump, other: Dump, *, same_steps: bool = True) -> None:
    """Raise UserError naming the first difference that makes a comparison of two dumps meaningless.

    A reference may have more steps than the other dump; `same_steps=False` compares only those that both have.
    """
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
    if same_steps and not (steps <= others if other.run.get("exact") else steps == others):
        raise UserError(f"{pair}: steps {', '.join(sorted(steps))} against {', '.join(sorted(others))}; capture the same steps")
    for step in sorted(steps & others, key=int):
        if one.steps[step]["batch_hash"] != other.steps[step]["batch_hash"]:
            raise UserError(f"{pair}: step {step} was trained on different batches; use one corpus, one --seed and one --debug_steps")
    if one.run["versions"] != other.run["versions"]:
        raise UserError(f"{pair}: versions {one.run['versions']} against {other.run['versions']}; use one environment")


def configuration_differences(baseline: Dump, dump: Dump) -> dict[str, str]:
    """Entry -> sentence: where two runs did not run with the same settings, whatever their arithmetic."""
    found = contract_differences(baseline.contract, dump.contract, KNOWN_DIFFERENCES)
    for step in sorted(baseline.steps.keys() & dump.steps.keys(), key=int):
        wanted, rate = (one.steps[step]["learning_rate"] for one in (baseline, dump))
        if rate != wanted and "learning_rates" not in found:
            found["learning_rates"] = f"learning rate of step {step} is {rate}, not {wanted}"
    return found


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
    result = Result(dumps, "ddp", [], [], {}, dumps, [])
    result.configuration = {name: configuration_differences(dumps["ddp"], dump) for name, dump in dumps.items()}
    for step in steps:
        truths = {name: reference if step == 1 else _replay(replays, dump, name, step) for name, dump in dumps.items()}
        _judge_step(reference, dumps, truths, step, precision, result)
        result.losses += _losses(reference, dumps, step, precision)
    return result


def compare_two(one: Dump, other: Dump) -> Result:
    """Judge the first step of one dump against another one, without a reference: forward, backward and gradients.

    Two correct runs, each within MULTIPLE times DDP's distance from the truth, are within twice that of each other.
    """
    require_comparable(one, other)
    precision = one.run["config"]["precision"]
    _require_precision(precision)
    dumps = {str(one.folder): one, str(other.folder): other}
    result = Result(dumps, str(other.folder), [], _losses(other, dumps, 1, precision), {}, dumps, [])
    result.configuration = {str(one.folder): configuration_differences(other, one)}
    entries, names, _ = _tensors(other, dumps, 1, result)
    apart = 2 * TYPICAL[precision]
    for name, tensor in _measure(names, entries, [other], dumps, 1):
        result.pairs[name] = tensor
        for folder, distance in zip(dumps, tensor.distances, strict=True):
            measure = Size(apart * distance.norm, apart * distance.largest)
            result.rows.append(judge(folder, 1, name, distance, measure, ROUNDING[entries[name]["dtype"]]))
    return result


def _require_precision(precision: str) -> None:
    if precision not in RULES:
        raise UserError(f"no tolerance is derived for --precision {precision}; compare {' or '.join(RULES)}")


def _tensors(truth: Dump, dumps: dict[str, Dump], step: int, result: Result) -> tuple[dict, list[str], list[str]]:
    """A step's entries, the names of its tensors but the update's, and its parameters: those that all dumps have.

    What the truth has and a dump has not is noted as missing.
    """
    wanted = truth.steps[str(step)]["tensors"]
    for strategy, dump in dumps.items():
        result.missing += [(strategy, step, name) for name in wanted if name not in dump.steps[str(step)]["tensors"]]
    entries = next(iter(dumps.values())).steps[str(step)]["tensors"]
    common = [name for name in wanted if all(name in dump.steps[str(step)]["tensors"] for dump in dumps.values())]
    names = [name for name in common if PASSES[name.split("/")[0]] != "update"]
    return entries, names, [name.removeprefix("parameter/") for name in common if name.startswith("parameter/")]


def _measure(names: list[str], entries: dict, truths: list[Dump], dumps: dict[str, Dump], step: int):
    """(name, Tensor) of every named tensor; one truth for all, or one for each dump."""
    truths = truths * len(dumps) if len(truths) == 1 else truths
    sizes = [number_of_elements(entries[name]) for name in names]
    tensors = on_all_cores(functools.partial(tensor_distances, truths, list(dumps.values()), step), names, sizes)
    return zip(names, tensors, strict=True)


def _replay(replays: dict[str, Dump], dump: Dump, name: str, step: int) -> Dump:
    """The truth of a later step: a replay that started from just the parameters that this dump had reached."""
    again = "run lockstep.reference after the training scripts, into a folder without older replays"
    if name not in replays or str(step) not in replays[name].steps:
        raise UserError(f"step {step} of {dump.folder} has no replay to be judged by; {again}")
    require_comparable(replays[name], dump, same_steps=False)
    if replays[name].steps[str(step)].get("started_from") != dump.parameter_digest(step - 1):
        raise UserError(f"{replays[name].folder}: step {step} did not start from the parameters of {dump.folder}; {again}")
    return replays[name]


def _judge_step(reference: Dump, dumps: dict, truths: dict, step: int, precision: str, result: Result) -> None:
    entries, names, parameters = _tensors(reference, dumps, step, result)
    found: dict[str, dict[str, Distance]] = {strategy: {} for strategy in dumps}
    for name, tensor in _measure(names, entries, list(truths.values()), dumps, step):
        if step == 1:
            result.pairs[name] = tensor
        for strategy, distance in zip(dumps, tensor.distances, strict=True):
            found[strategy][name] = distance
    held = {
        strategy: math.hypot(*(found[strategy][f"gradient/{name}"].own_norm for name in parameters)) for strategy in dumps
    }
    result.norms += [Norm(name, step, dump.steps[str(step)]["grad_norm"], held[name]) for name, dump in dumps.items()]
    clips = {strategy: clip_factor(dump.run["config"], held[strategy]) for strategy, dump in dumps.items()}
    items = [(strategy, name) for strategy in dumps for name in parameters]
    sizes = [number_of_elements(entries[f"parameter/{name}"]) for _, name in items]
    updates = on_all_cores(functools.partial(_update, dumps, reference, step, clips), items, sizes)
    for (strategy, name), kinds in zip(items, updates, strict=True):
        found[strategy].update({f"{kind}/{name}": distance for kind, distance in kinds.items()})

    noise = _noise(found["ddp"], entries, precision)
    typical = typical_error([found["ddp"][name] for name in found["ddp"] if is_vector_gradient(name, entries[name])])
    for strategy in dumps:
        for name in (name for name in entries if name in found[strategy]):
            distance, which = found[strategy][name], PASSES[name.split("/")[0]]
            if strategy == "ddp" and which in noise:
                result.rows.append(judge_yardstick(strategy, step, name, distance, precision, noise[which][name]))
            else:
                rounding = ROUNDING[entries[name]["dtype"]]
                measure = yardstick(found["ddp"][name], typical if is_vector_gradient(name, entries[name]) else None)
                result.rows.append(judge(strategy, step, name, distance, measure, rounding))


def _noise(found: dict[str, Distance], entries: dict, precision: str) -> dict[str, dict[str, Size]]:
    """By pass and tensor: how large rounding noise alone may be, taking the largest rms of the pass for its scale."""
    sizes = {name: max(number_of_elements(entries[name]), 1) for name in found}
    noise: dict[str, dict[str, Size]] = {}
    for which in ("forward", "backward", "gradient"):
        names = [name for name in found if PASSES[name.split("/")[0]] == which]
        scale = UNIT[precision] * max((found[name].norm / math.sqrt(sizes[name]) for name in names), default=0.0)
        noise[which] = {name: Size(scale * math.sqrt(sizes[name]), scale) for name in names}
    return noise


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
            loss_noise(precision, loss, reference.run["architecture"], tokens, spacings=RANK_SPACINGS)
            * (1 if step == 1 else RULES[precision].growth),
        )
        for dp_rank, loss in enumerate(exact)
    ]


def arrange(opened: list[Dump]) -> tuple[Dump, dict[str, Dump], dict[str, Dump]]:
    """(the reference, the dumps by strategy with DDP's first, the replays), with what stands beside the reference.

    Raises UserError unless just one of the dumps is a reference, and the others are one each of some strategies.
    """
    exact = [dump for dump in opened if "0" in dump.steps]
    if len(exact) != 1:
        raise UserError(f"{len(exact)} of the {len(opened)} dumps are references; more than two dumps are compared through just one")
    (reference,), dumps = exact, {}
    beside = reference.folder.resolve().parent
    given: dict[str, Dump] = {}
    for dump in opened:
        name = dump.run["config"]["strategy"]
        if dump is not reference and (name in given or dump.run.get("exact")):
            clash = given.get(name, reference).folder
            raise UserError(f"{clash} and {dump.folder} are both dumps of {name}; name one dump for each strategy")
        if dump is not reference:
            given[name] = dump
    dumps["ddp"] = given.pop("ddp", None) or Dump(beside / "ddp")
    dumps.update(given)
    replays = {name: beside / f"replay_{name}" for name in dumps}
    return reference, dumps, {name: Dump(folder) for name, folder in replays.items() if folder.is_dir()}


def run(opened: list[Dump], output_dir: Path | None) -> int:
    """Compare the dumps with the reference among them, name the causes, show it all; returns the exit status."""
    reference, dumps, replays = arrange(opened)
    result = compare(reference, dumps, replays)
    diagnoses = {name: diagnose(result, name, reference, replays) for name in dumps if result.has_failed(name)}
    return tensor_report.show(result, diagnoses, output_dir)


def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="python -m lockstep.compare", description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("dumps", type=Path, nargs="+", help="two or more dump folders; one may be the reference")
    parser.add_argument("--output_dir", type=Path, help="write report.json and report.md there")
    try:
        options = parser.parse_args(argv)
        if len(options.dumps) < 2:
            raise UserError("give two dump folders or more")
        if options.output_dir is not None:
            require_writable_folder(options.output_dir, "--output_dir", keep=False)
        opened = [Dump(folder) for folder in options.dumps]
        if len(opened) == 2 and not any("0" in dump.steps for dump in opened):
            return tensor_report.show(compare_two(*opened), {}, options.output_dir)
        return run(opened, options.output_dir)
    except UserError as error:
        print(f"lockstep.compare: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    raise SystemExit(main())
