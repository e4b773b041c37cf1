"""Compare dumps: is every tensor of every run as close to the reference as a correct run's?

    python -m lockstep.compare runs/verify/fsdp runs/verify/reference         a dump and the reference (and DDP's beside it)
    python -m lockstep.compare runs/verify/{ddp,fsdp,reference}               several dumps and the reference
    python -m lockstep.compare runs/one/fsdp runs/two/fsdp                    any two dumps

The yardstick is DDP's own distance from the float64 reference; docs/verification.md derives the tolerances. The order of the folders
does not matter. Exit status: 0 PASS; 1 any other verdict; 2 a usage error, or dumps that cannot be compared; 3 an internal error.
"""

if __name__ == "__main__":
    from lockstep import startup

    startup.begin()  # first: from now on Ctrl-C and a missing package are one line each

import functools
import math
from pathlib import Path

import numpy as np
import torch

from lockstep.config import BASELINE
from lockstep.diagnosis.diagnose import Diagnosis, diagnose
from lockstep.errors import UserError, run_program
from lockstep.files import REPORTS, require_ours, require_writable_folder
from lockstep.flags import Parser
from lockstep.inputs.data import independent_tokens
from lockstep.losses.tolerance import RANK_ULPS, RULES, loss_noise
from lockstep.strategies import in_order
from lockstep.tensors import tensor_report
from lockstep.tensors.comparable_dumps import (
    configuration_differences,
    require_comparable_dumps,
    require_its_batch,
    require_norm,
    require_norms,
    require_summary,
)
from lockstep.tensors.distance import (
    BLOCK,
    Distance,
    Measured,
    Size,
    average_distance,
    clip_factors,
    frozen_distance,
    on_all_cores,
    own_update_distances,
    tensor_distances,
    update_distances,
)
from lockstep.tensors.dump import Dump, number_of_elements
from lockstep.tensors.judgement import (
    LIMIT,
    LIMIT_OF_LOWERED,
    LIMIT_OF_UPDATE,
    ROUNDOFF,
    UNIT,
    Chosen,
    Judgement,
    Loss,
    Norm,
    Result,
    float32_norm_error,
    is_vector_gradient,
    is_zero,
    judge,
    judge_own_update,
    judge_yardstick,
    larger,
    pass_of,
    typical_error,
    yardstick,
)
from lockstep.tensors.manifest import REMEDY

# Without a reference: the largest distance from it that DDP had, over the clean sweep and the real sizes (results/).
TYPICAL = {"fp32": 1.5e-6, "autocast": 2e-2}


def compare_dumps(reference: Dump, dumps: dict[str, Dump], replays: dict[str, Dump]) -> Result:
    """Judge the dumps (by strategy, DDP's among them) against the reference; DDP's distance is the yardstick.

    `replays` are the references of later steps, by strategy. A run that lacks tensors of its model fails. Raises UserError for dumps
    that cannot be compared, a step without reference, an incomplete yardstick, and damaged files.
    """
    if BASELINE not in dumps:
        raise UserError(
            "tolerances are multiples of DDP's error, so DDP's dump is needed; run train_ddp.py with --capture_dir and name its dump"
        )
    if not reference.is_reference:
        raise UserError(
            f"{reference.folder}: not a reference; run python -m lockstep.reference, and name what it writes"
        )
    dumps = {name: dumps[name] for name in in_order(dumps)}  # so that nothing depends on their order
    baseline = dumps[BASELINE]
    if baseline.missing:
        step, name = baseline.missing[0]
        raise UserError(
            f"{baseline.folder}: step {step} lacks {name}; DDP's dump must have every tensor; {REMEDY}"
        )
    if baseline.run["config"]["compile"] != "off":
        raise UserError(
            f"{baseline.folder}: a compiled run lacks what is inside of layers; run train_ddp.py without --compile, and name its dump"
        )
    precision = reference.run["config"]["precision"]
    _require_precision(precision)
    for dump in dumps.values():
        require_comparable_dumps(dump, reference)
        require_comparable_dumps(baseline, dump)
    result = Result(dumps, BASELINE, [], [], {}, dumps, [], has_reference=True)
    result.configuration = {name: configuration_differences(baseline, dump) for name, dump in dumps.items()}
    result.missing = [(name, *missing) for name, dump in dumps.items() for missing in dump.missing]
    for step in sorted(int(step) for step in baseline.steps):
        references = {
            name: _its_reference(reference, replays, dump, name, step) for name, dump in dumps.items()
        }
        for its_reference in references.values():
            require_its_batch(its_reference, step)
        _judge_step(reference, dumps, references, step, precision, result)
        result.losses += _losses(reference, dumps, step, precision, references)
    for step in (
        int(step) for step in reference.steps if step != "0"
    ):  # of which the first update and the later steps were not read
        names = [name for name in reference.expected(step) if step > 1 or pass_of(name) == "update"]
        squares = _verify([(reference, step, name) for name in names])
        if step > 1:
            require_norm(
                reference,
                step,
                math.sqrt(
                    sum(
                        square
                        for name, square in zip(names, squares, strict=True)
                        if name.startswith("gradient/")
                    )
                ),
            )
    return result


def compare_two(one: Dump, other: Dump) -> Result:
    """Judge the first step of one dump against another one, without a reference: forward, backward and gradients.

    Two correct runs are each within MULTIPLE times DDP's distance of the reference, so they are within twice that of each other. A
    tensor that only one of them has is a failure. The order of the two does not matter.
    """
    order = in_order({one.name, other.name})
    other, one = sorted((one, other), key=lambda dump: (order.index(dump.name), str(dump.folder.resolve())))
    require_comparable_dumps(one, other)
    precision = one.run["config"]["precision"]
    _require_precision(precision)
    dumps = {str(one.folder): one, str(other.folder): other}
    result = Result(dumps, str(other.folder), [], _losses(other, dumps, 1, precision, {}), {}, dumps, [])
    result.configuration = {name: configuration_differences(other, dump) for name, dump in dumps.items()}
    result.missing = [(name, *missing) for name, dump in dumps.items() for missing in dump.missing]
    names = [name for name in _names(other, 1) if one.has(1, name) and other.has(1, name)]
    entries = other.steps["1"]["tensors"]
    apart = 2 * TYPICAL[precision]
    result.pairs = dict(zip(names, _measure(names, dict.fromkeys(dumps, other), dumps, 1), strict=True))
    noise = _noise({name: tensor.distances[0] for name, tensor in result.pairs.items()}, entries, precision)
    for name, tensor in result.pairs.items():
        for folder, distance in zip(dumps, tensor.distances, strict=True):
            measure = Size(apart * distance.norm, apart * distance.largest)
            least = noise.get(pass_of(name), {}).get(name)
            if (
                least is not None and distance.norm <= least.norm
            ):  # without a reference, noise cannot be told from zero
                measure = larger(measure, least)
            result.rows.append(judge(folder, 1, name, distance, measure, ROUNDOFF[entries[name]["dtype"]]))
    for folder, dump in dumps.items():
        _hold_records(
            folder, dump, 1, {row.name: row.distance for row in result.rows if row.strategy == folder}, result
        )
    read = {(1, name) for name in names}
    rest = [
        (dump, int(step), name)
        for dump in dumps.values()
        for step, entry in dump.steps.items()
        for name in entry["tensors"]
    ]
    _verify([(dump, step, name) for dump, step, name in rest if (step, name) not in read])
    return result


def _verify(items: list[tuple[Dump, int, str]]) -> list[float]:
    """Verify the checksums of tensors that are not compared: a damaged dump gets no verdict.

    Returns the sum of squares of each tensor.
    """
    sizes = [number_of_elements(dump.steps[str(step)]["tensors"][name]) for dump, step, name in items]
    return on_all_cores(_verify_one, items, sizes)


def _verify_one(item: tuple[Dump, int, str]) -> float:
    dump, step, name = item
    return sum(
        float(block.double().square().sum())
        for block in dump.blocks(step, name, BLOCK, np.empty(8 * BLOCK, dtype=np.uint8))
    )


def _require_precision(precision: str) -> None:
    if precision not in RULES:
        raise UserError(f"no tolerance is derived for --precision {precision}; compare {' or '.join(RULES)}")


def _names(dump: Dump, step: int) -> list[str]:
    """The tensors that a step must have, without those of the update, in order of execution."""
    return [name for name in dump.expected(step) if pass_of(name) != "update"]


def _measure(
    names: list[str], references: dict[str, Dump], dumps: dict[str, Dump], step: int
) -> list[Measured]:
    """What was measured of each name: the dumps that have it, in their order, against their references."""
    sizes = [math.prod(next(iter(references.values())).expected(step)[name]) for name in names]
    return on_all_cores(functools.partial(_distances, references, dumps, step), names, sizes)


def _distances(references: dict[str, Dump], dumps: dict[str, Dump], step: int, name: str) -> Measured:
    have = [strategy for strategy, dump in dumps.items() if dump.has(step, name)]
    return tensor_distances(
        [references[strategy] for strategy in have], [dumps[strategy] for strategy in have], step, name
    )


def _hold_records(strategy: str, dump: Dump, step: int, found: dict[str, Distance], result: Result) -> None:
    """Compare what a dump records of its tensors with the tensors: the gradient norm, and the summary of the logits."""
    entry = dump.steps[str(step)]
    gradients = [f"gradient/{name}" for name in dump.layout.model.trained]
    if all(name in found for name in gradients):
        norm = Norm(
            strategy, step, entry["grad_norm"], math.hypot(*(found[name].own_norm for name in gradients))
        )
        alike = (
            entry["replicas_differ"].keys().isdisjoint(gradients)
        )  # else rank 0's norm is of other gradients
        if norm.inexact and alike and math.isfinite(norm.held):
            norm.float32 = _float32_error(dump, step, gradients, norm.held)
        result.norms.append(norm)
    logits = dump.layout.names.logits
    if logits in found:
        require_summary(dump, step, found[logits].own_norm)


def _float32_error(dump: Dump, step: int, gradients: list[str], held: float) -> float:
    """What the norm of these gradients may be off by if it was summed in float32, as `clip_grad_norm_` does."""
    each = [torch.linalg.vector_norm(dump.tensor(step, name).float()) for name in gradients]
    summed = float(torch.linalg.vector_norm(torch.stack(each)))
    sizes = [number_of_elements(dump.steps[str(step)]["tensors"][name]) for name in gradients]
    return float32_norm_error(held, summed, max(sizes))


def _its_reference(reference: Dump, replays: dict[str, Dump], dump: Dump, name: str, step: int) -> Dump:
    """The reference of a step: a replay that started from the parameters that this dump had reached, and made its choices.

    Of step 1 there is one only if its choices are not the reference's.
    """
    if step == 1 and (name not in replays or "1" not in replays[name].steps):
        return reference
    again = "run python -m lockstep.reference after the training scripts, into a folder without older replays"
    if name not in replays or str(step) not in replays[name].steps:
        raise UserError(f"step {step} of {dump.folder} has no replay to compare it with; {again}")
    require_comparable_dumps(replays[name], dump, same_steps=False)
    source = dump if step > 1 else reference
    if replays[name].steps[str(step)].get("started_from") != source.parameter_digest(step - 1):
        raise UserError(
            f"{replays[name].folder}: step {step} did not start from the parameters of {dump.folder}; {again}"
        )
    return replays[name]


def _judge_step(
    reference: Dump,
    dumps: dict[str, Dump],
    references: dict[str, Dump],
    step: int,
    precision: str,
    result: Result,
) -> None:
    ddp = dumps[BASELINE]
    names, parameters, entries = (
        _names(ddp, step),
        list(ddp.layout.model.trained),
        ddp.steps[str(step)]["tensors"],
    )
    found: dict[str, dict[str, Distance]] = {strategy: {} for strategy in dumps}
    for name, tensor in zip(names, _measure(names, references, dumps, step), strict=True):
        have = [strategy for strategy, dump in dumps.items() if dump.has(step, name)]
        if step == 1 and len(have) == len(dumps):
            result.pairs[name] = tensor
        for strategy, distance in zip(have, tensor.distances, strict=True):
            found[strategy][name] = distance
    for strategy, dump in dumps.items():
        _hold_records(strategy, dump, step, found[strategy], result)
    require_norms(references, step, found, parameters)
    for norm in (norm for norm in result.norms if norm.step == step):
        norm.clip = _clip_factor(dumps[norm.strategy], reference, norm)
    clips = {norm.strategy: norm.clip for norm in result.norms if norm.step == step}
    items = [
        (strategy, name)
        for strategy in clips
        for name in parameters
        if _has_update(dumps[strategy], step, name)
    ]
    sizes = [number_of_elements(entries[f"parameter/{name}"]) for _, name in items]
    updates = on_all_cores(
        functools.partial(_update, dumps, reference, references, step, clips), items, sizes
    )
    for (strategy, name), kinds in zip(items, updates, strict=True):
        found[strategy].update({f"{kind}/{name}": distance for kind, distance in kinds.items()})

    for strategy, dump in dumps.items():
        for name in (name for name in dump.layout.model.frozen if dump.has(step, f"parameter/{name}")):
            found[strategy][f"parameter/{name}"] = frozen_distance(dump, reference, step, name)

    noise = _noise(found[BASELINE], entries, precision)
    typical = typical_error(
        [found[BASELINE][name] for name in found[BASELINE] if is_vector_gradient(name, entries[name])]
    )
    for strategy in dumps:
        for name in (name for name in ddp.expected(step) if name in found[strategy]):
            distance, which = found[strategy][name], pass_of(name)
            if name.removeprefix("parameter/") in ddp.layout.model.frozen:
                result.rows.append(Judgement(strategy, step, name, distance, 0.0, 0.0))
            elif which == "update" and not name.startswith("average/") and ddp.has_own_optimizer:
                lowered = references[strategy].steps[str(step)].get("lowered")
                result.rows.append(
                    judge_own_update(
                        strategy,
                        step,
                        name,
                        distance,
                        found[BASELINE][name],
                        LIMIT_OF_LOWERED if lowered else LIMIT_OF_UPDATE,
                        ROUNDOFF[entries[name]["dtype"]],
                    )
                )
            elif strategy == BASELINE and name in noise.get(which, {}):
                result.rows.append(
                    judge_yardstick(strategy, step, name, distance, precision, noise[which][name])
                )
            else:
                roundoff = ROUNDOFF[entries[name]["dtype"]]
                least = noise.get(which, {}).get(name)
                measure = yardstick(
                    found[BASELINE][name],
                    typical if is_vector_gradient(name, entries[name]) else None,
                    least if least is not None and is_zero(distance, least, precision) else None,
                )
                if is_vector_gradient(name, entries[name]):
                    times = _times_as_many_tokens(dumps[strategy], ddp)
                    measure = Size(times * measure.norm, times * measure.largest)
                result.rows.append(judge(strategy, step, name, distance, measure, roundoff))
        result.choices += _choices(strategy, references[strategy], step, result)


def _times_as_many_tokens(dump: Dump, ddp: Dump) -> float:
    """How many times as many tokens a rank of this run has in a micro batch as one of DDP, at least 1.

    The gradient of a norm or a bias is a sum over tokens, one after the other. The relative error of such a sum of n terms is about
    u sqrt(n) / 3. DDP's mean over r ranks has r independent sums of n / r terms, so its error is r times smaller.
    """
    tokens, others = (one.run["config"]["batch_size"] / one.run["config"]["cp_size"] for one in (dump, ddp))
    return max(1.0, tokens / others)


def _choices(strategy: str, reference: Dump, step: int, result: Result) -> list[Chosen]:
    """The run's discrete choices that its reference was told, judged.

    Scores are made of logits by a softmax or a sigmoid, which never widen a difference. So two scores that the right choice has in
    another order are at most twice as far apart as a logit may be off.
    """
    rows = {row.name: row for row in result.rows if (row.strategy, row.step) == (strategy, step)}
    found = []
    for name, regret in reference.steps[str(step)].get("regrets", {}).items():
        scores = rows.get(f"forward/{reference.layout.choices[name].scores}")
        tolerated = 2 * scores.tolerated_largest if scores else 0.0
        found.append(Chosen(strategy, step, name, regret, tolerated))
    return found


def _clip_factor(dump: Dump, initial: Dump, norm: Norm) -> float:
    """Of the factors in use, the one that fits the run's own update of one parameter best: by the norm that it recorded, or by the exact one."""
    options = dump.run["config"]
    factors = list(dict.fromkeys([*clip_factors(options, norm.used), *clip_factors(options, norm.held)]))
    whole = [name for name in dump.layout.model.trained if _has_update(dump, norm.step, name)]
    if len(factors) == 1 or not whole or dump.has_own_optimizer:
        return factors[0]

    def error(factor: float) -> float:
        return next(iter(update_distances(dump, initial, norm.step, factor, whole[-1]).values())).error

    return min(factors, key=error)


def _has_update(dump: Dump, step: int, name: str) -> bool:
    """Whether a dump has all tensors that the update of a parameter reads and writes."""
    kinds = [
        kind for kind in dump.layout.kinds(dump.run["config"])[1:] if f"{kind}/{name}" in dump.expected(step)
    ]
    before = [f"{kind}/{name}" for kind in kinds]
    return dump.has(step, f"gradient/{name}", *before) and (step == 1 or dump.has(step - 1, *before))


def _noise(found: dict[str, Distance], entries: dict, precision: str) -> dict[str, dict[str, Size]]:
    """By pass and tensor: the size that rounding noise may have. Its scale is the largest rms of the pass."""
    sizes = {name: max(number_of_elements(entries[name]), 1) for name in found}
    noise: dict[str, dict[str, Size]] = {}
    for which in ("forward", "backward", "gradient"):
        names = [name for name in found if pass_of(name) == which and entries[name]["dtype"] != "I64"]
        scale = UNIT[precision] * max(
            (found[name].norm / math.sqrt(sizes[name]) for name in names), default=0.0
        )
        noise[which] = {name: Size(scale * math.sqrt(sizes[name]), scale) for name in names}
    return noise


def _update(
    dumps: dict[str, Dump],
    reference: Dump,
    references: dict[str, Dump],
    step: int,
    clips: dict[str, float],
    item: tuple[str, str],
) -> dict[str, Distance]:
    strategy, name = item
    dump = dumps[strategy]
    if dump.has_own_optimizer:
        found = own_update_distances(dump, references[strategy], reference, step, name)
    else:
        found = update_distances(dump, reference, step, clips[strategy], name)
    if "average" in dump.layout.kinds(dump.run["config"]):
        found["average"] = average_distance(dump, reference, step, name)
    return found


def _losses(
    baseline: Dump, dumps: dict[str, Dump], step: int, precision: str, references: dict[str, Dump]
) -> list[Loss]:
    """The losses of all DP ranks, or of the smallest groups of ranks that see the same windows in every run.

    `references` are those of the runs, by strategy; empty without one.
    """
    shares = math.gcd(*(len(_rank_losses(dump, step)) for dump in (*dumps.values(), *references.values())))
    batch = ("batch/input_ids", "batch/labels")
    everyone = (baseline, *references.values(), *dumps.values())  # they have one batch; some may lack it
    holder = next((dump for dump in everyone if dump.has(step, *batch)), baseline)
    ids, labels = (holder.tensor(step, name).numpy() for name in batch)
    rows = len(ids) // shares
    growth = 1 if step == 1 else RULES[precision].growth

    def of_rank(dump: Dump, share: int) -> float:
        losses = _rank_losses(dump, step)
        each = len(losses) // shares
        return sum(losses[share * each : (share + 1) * each]) / each

    # weights that a bfloat16 optimizer has moved otherwise, or other micro batches of a mixture, have another loss
    moves = bool(references) and (bool(baseline.layout.choices) or baseline.has_own_optimizer)
    found = []
    for rank in range(shares):
        loss = of_rank(baseline, rank)
        mine = slice(rank * rows, (rank + 1) * rows)
        tokens = independent_tokens(ids[mine], labels[mine])
        noise = loss_noise(baseline.run, baseline.steps["1"]["loss"], loss, tokens, ulps=RANK_ULPS)
        by_strategy, exact = (
            {name: of_rank(dump, rank) for name, dump in each.items()} for each in (dumps, references)
        )
        found.append(
            Loss(
                step,
                rank,
                loss if references else None,
                by_strategy,
                noise * growth,
                exact,
                LIMIT[precision] * abs(loss),
                {name: exact[name] - exact[BASELINE] for name in exact} if moves else {},
            )
        )
    return found


def _rank_losses(dump: Dump, step: int) -> list[float]:
    return dump.steps[str(step)]["rank_losses"]


def arrange(opened: list[Dump]) -> tuple[Dump, dict[str, Dump], dict[str, Dump]]:
    """(the reference, the dumps by strategy, the replays); DDP's dump and the replays may lie beside the reference.

    Raises UserError unless exactly one dump is a reference, and no two others are of one strategy.
    """
    references = [dump for dump in opened if dump.is_reference]
    if len(references) != 1:
        raise UserError(
            f"{len(references)} of the {len(opened)} dumps are references; to compare more than two dumps, name exactly one"
        )
    (reference,) = references
    dumps: dict[str, Dump] = {}
    for dump in opened:
        name = dump.name
        if dump is not reference and name in dumps:
            raise UserError(
                f"{dumps[name].folder} and {dump.folder} are both dumps of {name}; name one dump for each strategy, or capture with --run_name"
            )
        if dump is not reference:
            dumps[name] = dump
    beside = reference.folder.resolve().parent
    if BASELINE not in dumps:
        dumps[BASELINE] = Dump(beside / BASELINE)
    replays = {name: beside / f"replay_{name}" for name in dumps}
    return reference, dumps, {name: Dump(folder) for name, folder in replays.items() if folder.is_dir()}


def run(opened: list[Dump], output_dir: Path | None) -> int:
    """Compare the dumps with the reference among them, diagnose, report. Returns the exit status."""
    reference, dumps, replays = arrange(opened)
    result = compare_dumps(reference, dumps, replays)
    return tensor_report.show(result, diagnoses(result, reference, replays), output_dir)


def diagnoses(result: Result, reference: Dump, replays: dict[str, Dump]) -> dict[str, Diagnosis]:
    """A diagnosis of every run that failed."""
    return {
        name: diagnose(result, name, reference, replays) for name in result.dumps if result.has_failed(name)
    }


def require_distinct(folders: list[Path]) -> None:
    """Raise UserError for a folder named twice: that a dump agrees with itself proves nothing."""
    seen: dict[Path, Path] = {}
    for folder in folders:
        if folder.resolve() in seen:
            raise UserError(
                f"{seen[folder.resolve()]} and {folder} are the same folder; name the dumps of two runs"
            )
        seen[folder.resolve()] = folder


def main(argv: list[str] | None = None) -> int:
    parser = Parser(
        prog="python -m lockstep.compare", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    parser.add_argument(
        "dumps", type=Path, nargs="+", help="two or more dump folders; one may be the reference"
    )
    parser.add_argument("--output_dir", type=Path, help="write report.json and report.md there")

    def body() -> int:
        options = parser.parse_args(argv)
        if len(options.dumps) < 2:
            raise UserError("give two dump folders or more")
        require_distinct(options.dumps)
        if options.output_dir is not None:
            require_writable_folder(options.output_dir, "--output_dir", keep=False)
            for name, begins in REPORTS.items():
                require_ours(options.output_dir / name, "--output_dir", begins)
        opened = [Dump(folder) for folder in options.dumps]
        replay = next((dump for dump in opened if dump.is_replay), None)
        if replay:
            raise UserError(
                f"{replay.folder}: a replay, which is found beside the reference; name the reference and the dump that it replays"
            )
        if len(opened) == 2 and not any(dump.is_reference for dump in opened):
            return tensor_report.show(compare_two(*opened), {}, options.output_dir)
        return run(opened, options.output_dir)

    return run_program("lockstep.compare", body)


if __name__ == "__main__":
    startup.end(main())
