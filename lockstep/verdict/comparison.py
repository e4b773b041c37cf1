"""Compare dumps: is every tensor of every run as close to the reference as a correct run's?

The yardstick is DDP's own distance from the float64 reference; docs/verification.md derives the tolerances.
"""

import math

from lockstep.dumps.dump import Dump, Dumps
from lockstep.dumps.manifest import REMEDY
from lockstep.ground.errors import UserError
from lockstep.plan.config import BASELINE, JUDGED
from lockstep.plan.strategies import in_order
from lockstep.verdict import measuring, scalars
from lockstep.verdict.comparable_dumps import (
    configuration_differences,
    require_comparable_dumps,
    require_its_batch,
    require_norm,
)
from lockstep.verdict.distance import Distance, Size
from lockstep.verdict.judgement import EXACT, ROUNDOFF, Judgement, OfDDP, noise_of, pass_of, tolerance
from lockstep.verdict.result import Findings, Result

# DDP's largest distance from the reference in the clean sweep and at real sizes (results/): the yardstick without a reference.
TYPICAL = {"fp32": 1.5e-6, "autocast": 2e-2, "bf16": 2e-2}
AGAIN = "run python -m lockstep.reference after the training scripts, into a folder without older replays"


def compare_dumps(reference: Dump, dumps: Dumps, replays: Dumps) -> Result:
    """Judge the dumps (by strategy, DDP's among them) against the reference; DDP's distance is the yardstick.

    `replays` are the references of later steps, by strategy. A run that lacks tensors of its model fails. Raises UserError for dumps
    that cannot be compared, a step without reference, an incomplete yardstick, and damaged files.
    """
    _require_yardstick(reference, dumps)
    # The result must not depend on the order in which the dumps are given
    dumps = {name: dumps[name] for name in in_order(dumps)}
    baseline, precision = dumps[BASELINE], _precision(reference)
    for dump in dumps.values():
        require_comparable_dumps(dump, reference)
        require_comparable_dumps(baseline, dump)
    result = _begin(dumps, BASELINE, has_reference=True)
    for step in sorted(baseline.steps):
        references = {
            name: _reference_of_step(reference, replays, dump, name, step) for name, dump in dumps.items()
        }
        for its_reference in references.values():
            require_its_batch(its_reference, step)
        _judge_step(reference, dumps, references, step, precision, result)
        result.losses += scalars.losses(reference, dumps, step, precision, references)
    _verify_the_rest(reference)
    return result


def _require_yardstick(reference: Dump, dumps: Dumps) -> None:
    """Raise UserError unless `reference` is one, and DDP's dump is there, complete and not compiled."""
    if BASELINE not in dumps:
        raise UserError(
            "tolerances are multiples of DDP's error, so DDP's dump is needed; run train_ddp.py with --capture_dir and name its dump"
        )
    if not reference.is_reference:
        raise UserError(
            f"{reference.folder}: not a reference; run python -m lockstep.reference, and name what it writes"
        )
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


def _precision(dump: Dump) -> str:
    """Return the precision of a dump's run. Raises UserError if no tolerance is derived for it."""
    precision = dump.run["config"]["precision"]
    if precision not in JUDGED:
        raise UserError(f"no tolerance is derived for --precision {precision}; compare {' or '.join(JUDGED)}")
    return precision


def _begin(dumps: Dumps, baseline: str, *, has_reference: bool) -> Result:
    """Return a result that has nothing yet but the differences in configuration. All its findings share its list of losses."""
    losses: list[scalars.Loss] = []
    runs = {
        name: Findings(name, dump, baseline, losses, configuration_differences(dumps[baseline], dump))
        for name, dump in dumps.items()
    }
    return Result(runs, baseline, losses, has_reference)


def _before_update(dump: Dump, step: int) -> list[str]:
    """Return the names of the tensors that a step must have, without those of the update, in order of execution."""
    return [name for name in dump.expected(step) if pass_of(name) != "update"]


def _reference_of_step(reference: Dump, replays: Dumps, dump: Dump, name: str, step: int) -> Dump:
    """Return the reference of one step of a dump: its replay, or `reference` if step 1 has none.

    A replay started from the parameters that the dump had reached, and made its choices. Step 1 has one only if the run chose
    other experts than the reference, or has other micro batches in a mixture, or an optimizer of the user's own. Raises UserError
    for a later step without a replay, and for a replay of other parameters.
    """
    replay = replays.get(name)
    if replay is None or step not in replay.steps:
        if step == 1:
            return reference
        raise UserError(f"step {step} of {dump.folder} has no replay to compare it with; {AGAIN}")
    require_comparable_dumps(replay, dump, same_steps=False)
    source = dump if step > 1 else reference
    if replay.steps[step].get("started_from") != source.parameter_digest(step - 1):
        raise UserError(
            f"{replay.folder}: step {step} did not start from the parameters of {dump.folder}; {AGAIN}"
        )
    return replay


def _judge_step(
    reference: Dump,
    dumps: Dumps,
    references: Dumps,
    step: int,
    precision: str,
    result: Result,
) -> None:
    """Add the rows, norms and choices of one step to `result`. `references` are those of this step, by run."""
    ddp, runs = dumps[BASELINE], result.runs
    distances: dict[str, measuring.Found] = {run: {} for run in dumps}
    for name, measured in measuring.measured(_before_update(ddp, step), references, dumps, step).items():
        if step == 1 and len(measured.distances) == len(dumps):
            result.pairs[name] = measured
        for run, distance in measured.distances.items():
            distances[run][name] = distance
    norms = {run: norm for run in dumps if (norm := scalars.norm_of(dumps[run], step, distances[run]))}
    for run, norm in norms.items():
        gradient_norms = (distances[run][f"gradient/{name}"].norm for name in ddp.layout.model.trained)
        require_norm(references[run], step, math.hypot(*gradient_norms))
        norm.clip = measuring.fitting_clip(dumps[run], reference, norm)
        runs[run].norms.append(norm)
    for run, of_update in measuring.updates(reference, references, dumps, step, norms):
        distances[run] |= of_update
    yardstick = OfDDP(ddp, step, distances[BASELINE], precision)
    for run, dump in dumps.items():
        entry = references[run].steps[step]
        lowered, errors = bool(entry.get("lowered")), entry.get("update_errors", {})
        runs[run].rows += [
            yardstick.judge(dump, name, distances[run][name], lowered, Size(*errors.get(name, EXACT)))
            for name in ddp.expected(step)
            if name in distances[run]
        ]
        runs[run].choices += scalars.choices(references[run], step, runs[run].rows_of(step))


def _verify_the_rest(reference: Dump) -> None:
    """Raise UserError if what was not read of the reference is damaged: its first update and its later steps."""
    for step in filter(None, reference.steps):
        names = [name for name in reference.expected(step) if step > 1 or pass_of(name) == "update"]
        squares = dict(zip(names, measuring.verify([(reference, step, name) for name in names]), strict=True))
        if step > 1:
            gradient_squares = (square for name, square in squares.items() if name.startswith("gradient/"))
            require_norm(reference, step, math.sqrt(sum(gradient_squares)))


def compare_two(one: Dump, other: Dump) -> Result:
    """Judge the first step of one dump against another one, without a reference: forward, backward and gradients.

    Two correct runs are each within MULTIPLE times DDP's distance of the reference, so they are within twice that of each other. A
    tensor that only one of them has is a failure. The order of the two does not matter.
    """
    order = in_order({one.name, other.name})
    other, one = sorted((one, other), key=lambda dump: (order.index(dump.name), str(dump.folder.resolve())))
    require_comparable_dumps(one, other)
    precision = _precision(one)
    dumps = {str(one.folder): one, str(other.folder): other}
    result = _begin(dumps, str(other.folder), has_reference=False)
    result.losses += scalars.losses(other, dumps, 1, precision, {})
    names = [name for name in _before_update(other, 1) if one.has(1, name) and other.has(1, name)]
    result.pairs = measuring.measured(names, dict.fromkeys(dumps, other), dumps, 1)
    sizes = {name: measured.distances[result.baseline] for name, measured in result.pairs.items()}
    noise = noise_of(sizes, other.steps[1]["tensors"], precision)
    for folder, run in result.runs.items():
        distances = {name: measured.distances[folder] for name, measured in result.pairs.items()}
        for name, distance in distances.items():
            run.rows.append(_judge_pair(name, distance, other, precision, noise))
        norm = scalars.norm_of(run.dump, 1, distances)
        run.norms += [norm] if norm else []
    already_read = {(1, name) for name in names}
    measuring.verify(
        [
            (dump, step, name)
            for dump in dumps.values()
            for step, entry in dump.steps.items()
            for name in entry["tensors"]
            if (step, name) not in already_read
        ]
    )
    return result


def _judge_pair(name: str, distance: Distance, other: Dump, precision: str, noise: dict) -> Judgement:
    """Return a row of step 1 without a reference. Each of two correct runs may be as far from it as DDP typically is."""
    yardstick, tensor_noise = distance.size.times(2 * TYPICAL[precision]), noise.get(name)
    if tensor_noise is not None and distance.norm <= tensor_noise.norm:
        # Without a reference, noise cannot be told from zero
        yardstick = yardstick.or_more(tensor_noise)
    roundoff = ROUNDOFF[other.steps[1]["tensors"][name]["dtype"]]
    return Judgement(1, name, distance, *tolerance(name, distance, yardstick, roundoff))
