"""Rules for a first wrong parameter or average. Gradients and moments are right."""

import math
from collections.abc import Callable, Iterator

import torch

from lockstep.diagnosis import evidence
from lockstep.diagnosis.case import LEFT, Case
from lockstep.diagnosis.exchanged import tensors_exchanged
from lockstep.diagnosis.forward import rounded
from lockstep.diagnosis.moments import are_left_out, have_many_values, paths
from lockstep.ground.words import listed
from lockstep.plan.config import BETAS, EPS
from lockstep.verdict.judgement import Judgement
from lockstep.verdict.result import Cause

SHIFTS = (1, -1, 2, -2, 4, -4, 8, -8)  # elements: one, or what pads to an even number or to 16 or 32 bytes
MOST_DECAY = 1.0  # a weight decay of more is none that somebody chose
STEPS = 20  # an update is compared with what the first so many steps make of its moments


# The parameters


def update_left_out(case: Case) -> Cause | None:
    """All wrong elements are bit for bit what they were before the step."""
    rows, shown = case.wrong("parameter"), []
    for row in rows:
        name = row.path
        own, before = case.own(row.name), case.before(name)
        is_unchanged = own == before
        if not are_left_out(case, row, is_unchanged):
            return None
        share = next(_unchanged_shares(case, row.name, own, before), "")
        shown.append(
            name
            + (
                f" in the share of {share}"
                if share
                else ""
                if bool(is_unchanged.all())
                else f" in {int(is_unchanged.sum())} of {is_unchanged.numel()} elements"
            )
        )
    if not rows:
        return None
    small = "; the right updates are so small that rounding to bfloat16 leaves the same"
    return Cause(
        "update left out",
        f"the moments are right; unchanged bit for bit: {listed(shown)}; all else is right"
        + small * all(_is_rounded_away(case, row) for row in rows),
    )


def _is_rounded_away(case: Case, row: Judgement) -> bool:
    """Whether a parameter is what the right update gives in bfloat16, in a run whose weights are in float32."""
    rounded_update = case.updated(row.path).bfloat16().double()
    return case.options["precision"] != "bf16" and torch.equal(case.own(row.name), rounded_update)


def _unchanged_shares(case: Case, name: str, own: torch.Tensor, before: torch.Tensor) -> Iterator[str]:
    """Yield the rank whose shard alone did not change, such as "tp rank 1 of 2", for each axis along which there is one."""
    for axis in case.sharded(name):
        pairs = zip(*(case.shares(name, axis, tensor) for tensor in (own, before)), strict=True)
        has_changed = [any(bool((a != b).any()) for a, b in zip(*pair, strict=True)) for pair in pairs]
        if has_changed.count(False) == 1:
            yield f"{axis} rank {has_changed.index(False)} of {len(has_changed)}"


def of_another_step(case: Case) -> Cause | None:
    """AdamW corrects the bias of its moments as in one other step, or not at all."""
    if case.options["optimizer"] != "adamw":
        return None
    shapes = case.dump.layout.parameters
    rows = sorted(case.wrong("parameter"), key=lambda row: math.prod(shapes[row.path]))
    found = [
        step
        for step in (math.inf, *range(1, STEPS + 1))
        if rows and all(case.explains(row.name, case.updated(row.path, step)) for row in rows)
    ]
    if len(found) != 1:  # in bfloat16, any factor may be that of several steps
        return None
    how = "not corrected" if found[0] == math.inf else f"corrected as in step {found[0]}"
    sentence = f"the moments are right, and in the update of {paths(rows)} their bias is {how}"
    return Cause("bias correction", sentence)


def other_epsilon(case: Case) -> Cause | None:
    """AdamW divides by the root of the second moment and another epsilon, the same in all wrong parameters."""
    rows = case.wrong("parameter")
    if case.options["optimizer"] != "adamw" or not have_many_values(case, rows):
        return None
    found = [_epsilon(case, row.path) for row in rows]
    for row, eps in zip(rows, found, strict=True):
        if not (eps >= 0 and math.isclose(eps, found[0], rel_tol=LEFT)):
            return None
        if not case.explains(row.name, case.updated(row.path, eps=eps)):
            return None
    sentence = (
        f"the moments are right; the update of {paths(rows)} has an epsilon of {found[0]:.3g}, not {EPS:g}"
    )
    return Cause("optimizer settings", sentence, found[0])


def _epsilon(case: Case, parameter: str) -> float:
    """Return the epsilon of a parameter's update: least squares over the elements, in proportion to their right updates.

    With r, the root of the second moment: update (r + epsilon) = right update (r + EPS).
    """
    unmoved = case.updated(parameter, eps=math.inf)
    update, right_update = case.own(f"parameter/{parameter}") - unmoved, case.updated(parameter) - unmoved
    root = (case.own(f"exp_avg_sq/{parameter}") / (1 - BETAS[1] ** case.step)).sqrt() + EPS
    return evidence.multiple_of(right_update - update * (root - EPS) / root, update / root)


def shifted(case: Case) -> Cause | None:
    """Before the step, a run of the elements of each wrong parameter had the values of elements some places away, always as many."""
    rows = case.wrong("parameter")
    found = [shift for shift in SHIFTS if rows and all(_is_shifted(case, row, shift) for row in rows)]
    if len(found) != 1:
        return None
    places = f"{abs(found[0])} place{'s' * (abs(found[0]) > 1)} {'after' if found[0] > 0 else 'before'} them"
    return Cause(
        "weights",
        f"the moments are right; before the step, elements of {paths(rows)} had the values {places}, as weights that are cut elsewhere have",
    )


def _is_shifted(case: Case, row: Judgement, shift: int) -> bool:
    """Whether all wrong elements began the step with the values `shift` places later, but for those that lie in another parameter."""
    before = case.before(row.path).flatten()
    own, right = case.own(row.name).flatten(), case.right(row.name).flatten()
    wrong = ((own - right).abs() > row.tolerated_largest).nonzero()[:, 0]
    wrong = wrong[(wrong + shift >= 0) & (wrong + shift < len(before))]
    value = right[wrong] + case.kept(row.path) * (before[wrong + shift] - before[wrong])
    return len(wrong) > 0 and case.leaves_little(row.name, float((own[wrong] - value).norm()))


def epsilon_in_root(case: Case) -> Cause | None:
    """AdamW adds epsilon to the second moment, and then takes the root."""
    rows = case.wrong("parameter")
    if case.options["optimizer"] != "adamw" or not rows:
        return None
    for row in rows:
        # With r, the root of the corrected second moment: right update (r + EPS) = update sqrt(r^2 + EPS)
        unmoved = case.updated(row.path, eps=math.inf)
        root = (case.own(f"exp_avg_sq/{row.path}") / (1 - BETAS[1] ** case.step)).sqrt()
        update = (case.updated(row.path) - unmoved) * (root + EPS) / (root.square() + EPS).sqrt()
        if not case.explains(row.name, unmoved + update):
            return None
    return Cause(
        "optimizer settings",
        f"the moments are right; in the update of {paths(rows)} epsilon is within the root",
    )


def scaled(case: Case) -> Cause | None:
    """The changes of all wrong parameters are the right ones times one factor."""
    rows = case.wrong("parameter")
    factor = case.factor(rows)
    if factor is None or not have_many_values(case, rows):
        return None
    which = "all parameters" if len(rows) == len(case.judged("parameter")) else paths(rows)
    others = case.unjudged_replicas(row.name for row in rows)
    return Cause(
        "update scale", f"the change of {which} is {evidence.shown(factor)} times what it should be{others}"
    )


def other_decay(case: Case) -> Cause | None:
    """The error of the parameters is a multiple of the parameters themselves, as weight decay is and an update is not.

    They are those before the update, or after it where the decay comes last.
    """
    return _of_decay(case, case.before) or _of_decay(case, case.updated)


def _of_decay(case: Case, decayed: Callable[[str], torch.Tensor]) -> Cause | None:
    rows, errors = case.wrong("parameter"), []
    for row in rows:
        before, updated = decayed(row.path), case.updated(row.path)
        factor = evidence.multiple_of(case.own(row.name) - updated, before)
        # Of weights that are all equal, a multiple is a constant. Only one as large as the configured decay shows it.
        known = case.options["weight_decay"] * case.rate
        is_known = math.isclose(abs(factor), known, rel_tol=LEFT)
        if evidence.are_equal(case.before(row.path)) and not is_known:
            return None
        if not math.isfinite(factor) or not case.explains(row.name, updated + factor * before):
            return None
        errors.append(-factor / case.rate)
    if not errors or not all(math.isclose(error, errors[0], rel_tol=2 * LEFT) for error in errors):
        return None
    names = paths(rows)
    without_rate = case.options["weight_decay"] * (1 / case.rate - 1)
    if without_rate and math.isclose(errors[0], without_rate, rel_tol=LEFT):
        return Cause(
            "weight decay",
            f"the moments are right; the weight decay of {names} is not multiplied by the learning rate",
        )
    if abs(errors[0]) > MOST_DECAY:
        return Cause(
            "weights",
            f"the moments are right; the step also multiplies {names} by {evidence.shown(1 - case.rate * errors[0])}",
        )
    return Cause(
        "weight decay", f"the moments are right; the weight decay of {names} is off by {errors[0]:+.4g}"
    )


def frozen_moved(case: Case) -> Cause | None:
    """The first wrong parameter is not trained, and is not what it was before the step."""
    frozen = case.dump.layout.model.frozen
    names = [row.path for row in case.wrong("parameter") if row.path in frozen]
    if not names or case.first != f"parameter/{names[0]}":
        return None
    return Cause("frozen weights", f"not trained, and changed by the step: {listed(names)}")


# The average of the weights


def other_average(case: Case) -> Cause | None:
    """All averages moved towards the weights by the same share of the way, which is not 1 - decay, or did not move."""
    shares = []
    for row in case.wrong("average"):
        before, weights = case.average_before(row.path), case.own(f"parameter/{row.path}")
        share = evidence.multiple_of(case.own(row.name) - before, weights - before)
        if not math.isfinite(share) or not case.explains(row.name, before + share * (weights - before)):
            return None
        shares.append(share)
    if not shares or not all(math.isclose(share, shares[0], rel_tol=LEFT, abs_tol=1e-6) for share in shares):
        return None
    decay = case.options["ema_decay"]
    moved = (
        "did not move"
        if abs(shares[0]) < 1e-6
        else f"moved {shares[0]:.4g} of the way to the weights, as with a decay of {1 - shares[0]:.4g}"
    )
    names = paths(case.wrong("average"))
    return Cause(
        "weight average", f"the weights are right; the average of {names} {moved}; the decay is {decay:g}"
    )


def another_beginning(case: Case) -> Cause | None:
    """Averages are wrong in step 1, and later steps move them as they should: they began with something else."""
    rows = case.wrong("average")
    if case.step > 1 or not rows or 2 not in case.dump.steps or case.first_of_later_steps():
        return None
    return Cause(
        "weight average",
        f"the average of {paths(rows)} is wrong in step 1 alone, and later steps move it as they should: it began with "
        "other weights, or was overwritten once",
    )


def moved_before_the_update(case: Case) -> Cause | None:
    """All averages moved towards the weights from before the update, too, up to once per micro batch."""
    rows, decay = case.wrong("average"), case.options["ema_decay"]
    for times in range(1, case.micro_batches + 1):
        values = []
        for row in rows:
            before, weights = case.before(row.path), case.own(f"parameter/{row.path}")
            moved = before + decay**times * (case.average_before(row.path) - before)
            values.append(case.explains(row.name, decay * moved + (1 - decay) * weights))
        if rows and all(values):
            return Cause(
                "weight average",
                f"the weights are right; before it moved to them, the average of {paths(rows)} moved {times} "
                f"time{'s' * (times > 1)} to the weights from before the update",
            )
    return None


PARAMETER_RULES = (
    rounded,
    frozen_moved,
    update_left_out,
    tensors_exchanged,
    shifted,
    other_decay,
    of_another_step,
    other_epsilon,
    epsilon_in_root,
    scaled,
)
RULES_OF_ANY_OPTIMIZER = (frozen_moved, update_left_out, tensors_exchanged, scaled)
AVERAGE_RULES = (other_average, another_beginning, moved_before_the_update)
